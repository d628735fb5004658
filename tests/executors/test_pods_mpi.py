# SPDX-License-Identifier: LGPL-3.0-or-later
"""The ranks of one MPI program run in several pods, on one node and on two."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from dovetail.core.errors import BadInput
from dovetail.executors.kubernetes.agent_hub import Hub
from dovetail.executors.pods import messages
from dovetail.host import install_paths, processes
from dovetail.mpi import page
from dovetail.mpi.control_page import MODES
from support.local_runs import wait_for
from support.pod_processes import ADDRESSES, cluster, name_of, state  # noqa: F401

pytestmark = pytest.mark.mpi

# What a pod has of its own besides files; its end takes all its processes with it.
ISOLATED = ("unshare", "--pid", "--ipc", "--fork", "--mount-proc", "--kill-child")

PITZ_DAILY = Path(
    "/usr/share/doc/openfoam-examples/examples/incompressible/simpleFoam/pitzDaily"
)  # fmt: skip

PROGRAM = r"""
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(int argc, char **argv) {
    int rank, size, sum = 0, i, rounds;
    long long total = 0;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    rounds = argc > 1 ? atoi(argv[1]) : 200;
    printf("rank %d of %d group %s dir %s\n", rank, size, getenv("DOVETAIL_GROUP"),
           getenv("DOVETAIL_DIR"));
    fflush(stdout);
    for (i = 1; i != rounds + 1; i++) {
        int mine = rank * i;
        MPI_Allreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
        total += sum;
        MPI_Pcontrol(1);
        if (rounds < 0) usleep(10000);
        if (i > 1 && argc > 2 && !strcmp(argv[2], "rarely")) sleep(30);
        if (argc > 2 && rank == 1 && !strcmp(argv[2], "exit")) _exit(9);
    }
    if (rank == 0) printf("total %lld\n", total);
    MPI_Finalize();
    return argc > 2 && !strcmp(argv[2], "fail") ? 5 : 0;
}
"""
LAYOUTS = {
    "two pods on one node": [("one", 0, 1), ("one", 0, 2)],
    "two pods with addresses of their own on one node": [("one", 0, 2), ("one", 1, 2)],
    "a pod on each of two nodes": [("one", 0, 1), ("two", 1, 1)],
    "two pods on each of two nodes": [("one", 0, 1), ("one", 0, 1), ("two", 1, 1), ("two", 1, 2)],
    "pods that take turns on two nodes": [("one", 0, 1), ("two", 1, 1), ("one", 0, 1)],
}


@pytest.fixture(scope="module", params=["openmpi", "mpich"])
def program(request, tmp_path_factory):
    """The program above, under either MPI."""
    try:
        install_paths.library(request.param)
    except BadInput as error:
        pytest.skip(str(error))
    directory = tmp_path_factory.mktemp(request.param)
    (directory / "sums.c").write_text(PROGRAM)
    words = [f"mpicc.{request.param}", "-o", "sums", "sums.c"]
    subprocess.run(words, cwd=directory, check=True)
    return str(directory / "sums")


def launch(cluster, layout, *command, policy="yield", prefix=(), case=None, prepare=(), **more):  # noqa: F811
    """Start a program on pods: (node, index of its address, ranks) each."""
    for node, _, _ in layout:
        if node not in cluster.agents:
            cluster.agent(node)
    for group, (node, _, _) in enumerate(layout):
        cluster.entrypoint("sim", group, node, *prefix)
    for _ in layout:
        cluster.until(messages.Pod, "sim")
    hosts = [{"address": ADDRESSES[index], "ranks": ranks} for _, index, ranks in layout]
    config = cluster.config("sim", command, sum(host["ranks"] for host in hosts), *prepare, **more)
    config["case"] = str(case or config["case"])
    config["environment"]["PATH"] = config["environment"]["PATH"].partition(":")[2]
    cluster.hub.tell(messages.Wait("sim", policy, 20))
    cluster.hub.tell(messages.Run("sim", config, hosts))
    return hosts


def check_answer(cluster, layout, hosts, rounds=200):  # noqa: F811
    """The program ended well, its sums are right, and each rank was in its own pod."""
    result = cluster.until(messages.Result, "sim")
    log = cluster.log("sim")
    assert (result.code, result.reason) == (0, ""), log
    size = sum(host["ranks"] for host in hosts)
    assert f"total {rounds * (rounds + 1) // 2 * size * (size - 1) // 2}" in log
    wanted, rank = set(), 0
    for group, (node, _, ranks) in enumerate(layout):
        for _ in range(ranks):
            wanted.add((str(rank), str(size), str(group), f"{cluster.session(node)}/sim"))
            rank += 1
    assert set(re.findall(r"rank (\d+) of (\d+) group (\d+) dir (\S+)", log)) == wanted
    cluster.end("sim")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_ranks_in_several_pods_are_one_program(cluster, program, layout):  # noqa: F811
    hosts = launch(cluster, layout, program)
    cluster.hub.tell(messages.Suspend("sim", False))  # which is news to nobody
    check_answer(cluster, layout, hosts)
    assert "signal" not in cluster.log("sim")


@pytest.mark.parametrize("policy", MODES)
def test_ranks_in_pods_that_see_no_other_process(cluster, program, policy):  # noqa: F811
    if subprocess.run([*ISOLATED, "true"], capture_output=True).returncode:
        pytest.skip("cannot make namespaces here")
    layout = LAYOUTS["two pods on each of two nodes"]
    hosts = launch(cluster, layout, program, "20", policy=policy, prefix=ISOLATED)
    check_answer(cluster, layout, hosts, 20)


def test_every_rank_is_sampled_wherever_it_is(cluster, program):  # noqa: F811
    launch(cluster, LAYOUTS["two pods on each of two nodes"], program, "-1")
    cluster.until(messages.Started, "sim")
    counts = {}
    while sorted(counts) != ["0", "1", "2", "3", "4"] or min(counts.values()) < 5:
        found = cluster.until(messages.Sample).ranks.get("sim", {})
        new = {rank: values for rank, values in found.items() if values[0] >= 0}
        assert all(counts.get(rank, 0) <= values[0] for rank, values in new.items())
        assert all(values[2] > 0 and values[5] > 1 << 20 for values in new.values())
        counts.update({rank: values[0] for rank, values in new.items()})
    cluster.end("sim", 1)


def test_the_exit_code_of_a_rank_in_another_pod_is_kept(cluster, program):  # noqa: F811
    launch(cluster, LAYOUTS["two pods on one node"], program, "-1", "exit")
    result = cluster.until(messages.Result, "sim")
    assert result.code != 0
    assert "exit code 9" in result.reason or "mpich" in program
    cluster.end("sim", 9)


def test_a_stop_reaches_every_rank(cluster, program):  # noqa: F811
    launch(cluster, LAYOUTS["two pods on each of two nodes"], program, "-1")
    wait_for(lambda: cluster.log("sim").count("rank ") == 5)
    cluster.hub.tell(messages.Stop("sim"))
    assert cluster.until(messages.Result, "sim").code != 0
    cluster.end("sim", 1)
    wait_for(lambda: not rank_processes(cluster, program))


def rank_processes(cluster, program):  # noqa: F811
    """The test's processes that are ranks of the program."""
    found = processes.members(cluster.token)
    return [pid for pid in found if program in name_of(pid)]


def running(cluster, program, layout, **more):  # noqa: F811
    """A program on pods that never ends by itself, all of whose ranks have said so."""
    launch(cluster, layout, program, "-1", **more)
    count = sum(ranks for _, _, ranks in layout)
    wait_for(lambda: cluster.log("sim").count("rank ") == count)


@pytest.mark.parametrize("group", range(4))
def test_a_pod_that_is_killed_ends_the_others_ranks(cluster, program, group):  # noqa: F811
    running(cluster, program, LAYOUTS["two pods on each of two nodes"])
    cluster.entrypoints["sim", group].kill()
    if group:
        assert cluster.until(messages.Result, "sim").code != 0  # there may be a Lost besides
    else:
        assert cluster.until(messages.Lost, "sim").group == 0
    cluster.hub.tell(messages.End("sim", 1))
    for entrypoint in cluster.entrypoints.values():
        assert entrypoint.wait(120) in (1, -9)
    wait_for(lambda: not rank_processes(cluster, program))


def test_a_rank_that_is_killed_in_another_pod_is_named(cluster, program):  # noqa: F811
    launch(cluster, LAYOUTS["two pods on each of two nodes"], program, "-1", "rarely")

    def waits():  # so that nobody finds rank 3 dead before its starter does
        found = page.read_pages(cluster.session("two") / "sim")
        return [one.pid for one in found if one.rank == 3 and one.iterations == 2]

    wait_for(lambda: (cluster.session("two") / "sim").is_dir())
    os.kill(wait_for(waits)[0], signal.SIGKILL)
    reason = cluster.until(messages.Result, "sim").reason
    assert reason == "rank 3 killed by signal 9" or "mpich" in program
    cluster.end("sim", 1)


def test_ranks_go_on_without_hub_and_agents(cluster, program):  # noqa: F811
    running(cluster, program, LAYOUTS["two pods on each of two nodes"])
    cluster.hub.close()
    for agent in cluster.agents.values():
        agent.kill()
        agent.wait()
    cluster.hub = Hub("127.0.0.1", cluster.directory / "hub")
    for node in list(cluster.agents):
        cluster.agent(node)
    for _ in range(4):
        cluster.until(messages.Pod, "sim")
    while "4" not in cluster.until(messages.Sample).ranks.get("sim", {}):
        pass
    cluster.hub.tell(messages.Stop("sim"))
    assert cluster.until(messages.Result, "sim").code != 0
    cluster.end("sim", 1)
    wait_for(lambda: not rank_processes(cluster, program))


def counted(cluster):  # noqa: F811
    """The iterations of rank 4, which the last pod has, at the next sample that has any."""
    while True:
        values = cluster.until(messages.Sample).ranks.get("sim", {}).get("4", [0])
        if values[0] > 0:
            return values[0]


def test_a_suspended_program_stands_still_in_all_pods(cluster, program):  # noqa: F811
    running(cluster, program, LAYOUTS["two pods on each of two nodes"])
    assert counted(cluster)
    cluster.hub.tell(messages.Suspend("sim", True))
    wait_for(lambda: {state(pid) for pid in rank_processes(cluster, program)} == {"T"})
    cluster.hub.tell(messages.Suspend("sim", False))
    cluster.heard.clear()
    before = counted(cluster)
    wait_for(lambda: counted(cluster) > before + 5)
    cluster.hub.tell(messages.Suspend("sim", True))
    cluster.hub.tell(messages.Stop("sim"))
    assert cluster.until(messages.Result, "sim").code != 0
    cluster.end("sim", 1)


@pytest.mark.skipif(not PITZ_DAILY.is_dir(), reason="needs OpenFOAM's examples")
def test_openfoam_runs_in_pods_on_two_nodes(cluster):  # noqa: F811
    decompose = (
        "printf 'FoamFile{version 2.0;format ascii;class dictionary;object decomposeParDict;}"
        "numberOfSubdomains 3;method hierarchical;hierarchicalCoeffs{n (3 1 1);delta 0.001;"
        "order xyz;}' > system/decomposeParDict && decomposePar"
    )
    shorten = "sed -i 's/^endTime .*/endTime 20;/' system/controlDict"
    mesh = "cp -rL /usr/share/doc/openfoam-examples/examples/resources . || true; blockMesh"
    layout = [("one", 0, 1), ("one", 0, 1), ("two", 1, 1)]
    launch(
        cluster, layout, "simpleFoam", "-parallel", case=PITZ_DAILY,
        prepare=(shorten, mesh, decompose), WM_PROJECT_DIR="/usr/share/openfoam",
    )  # fmt: skip
    result = cluster.until(messages.Result, "sim")
    counts = {}
    samples = [m for _, m in cluster.heard if isinstance(m, messages.Sample)]
    while samples or sorted(counts) != ["0", "1", "2"]:  # the other node's may come later
        sample = samples.pop(0) if samples else cluster.until(messages.Sample)
        counts.update({rank: values[0] for rank, values in sample.ranks.get("sim", {}).items()})
    assert (result.code, result.reason) == (0, ""), cluster.log("sim")[-3000:]
    assert counts["0"] == 20  # the last look at the supervisor's node is just before the result
    assert "\nTime = 20\n" in cluster.log("sim")
    cluster.end("sim")
