# SPDX-License-Identifier: LGPL-3.0-or-later
"""Step 4: the ranks of one MPI program run in several pods, on one node and on two."""

from __future__ import annotations

import re
import subprocess

import pytest
from dovetail import page, paths, process
from dovetail.errors import BadInput
from dovetail.pods import wire
from localrun import wait_for
from podrun import ADDRESSES, cluster, name_of  # noqa: F401

pytestmark = pytest.mark.mpi

# What a pod has of its own besides files; its end takes all its processes with it.
ISOLATED = ("unshare", "--pid", "--ipc", "--fork", "--mount-proc", "--kill-child")

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
        if (argc > 2 && rank == 1 && !strcmp(argv[2], "exit")) _exit(9);
    }
    if (rank == 0) printf("total %lld\n", total);
    MPI_Finalize();
    return argc > 2 && !strcmp(argv[2], "fail") ? 5 : 0;
}
"""
LAYOUTS = {
    "two pods on one node": [("one", 0, 1), ("one", 0, 2)],
    "a pod on each of two nodes": [("one", 0, 1), ("two", 1, 1)],
    "two pods on each of two nodes": [("one", 0, 1), ("one", 0, 1), ("two", 1, 1), ("two", 1, 2)],
    "pods that take turns on two nodes": [("one", 0, 1), ("two", 1, 1), ("one", 0, 1)],
}


@pytest.fixture(scope="module", params=["openmpi", "mpich"])
def program(request, tmp_path_factory):
    """The program above, under either MPI."""
    try:
        paths.library(request.param)
    except BadInput as error:
        pytest.skip(str(error))
    directory = tmp_path_factory.mktemp(request.param)
    (directory / "sums.c").write_text(PROGRAM)
    words = [f"mpicc.{request.param}", "-o", "sums", "sums.c"]
    subprocess.run(words, cwd=directory, check=True)
    return str(directory / "sums")


def launch(cluster, layout, *command, policy="yield", prefix=()):  # noqa: F811
    """Start a program on pods: (node, index of its address, ranks) each."""
    for node, _, _ in layout:
        if node not in cluster.agents:
            cluster.agent(node)
    for group, (node, _, _) in enumerate(layout):
        cluster.entry("sim", group, node, *prefix)
    for _ in layout:
        cluster.until(wire.Pod, "sim")
    hosts = [{"address": ADDRESSES[index], "ranks": ranks} for _, index, ranks in layout]
    config = cluster.config("sim", command, sum(host["ranks"] for host in hosts))
    config["environment"]["PATH"] = config["environment"]["PATH"].partition(":")[2]
    cluster.hub.tell(wire.Wait("sim", policy, 20))
    cluster.hub.tell(wire.Run("sim", config, hosts))
    return hosts


def check_answer(cluster, layout, hosts, rounds=200):  # noqa: F811
    """The program ended well, its sums are right, and each rank was in its own pod."""
    result = cluster.until(wire.Result, "sim")
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
    check_answer(cluster, layout, launch(cluster, layout, program))


@pytest.mark.parametrize("policy", page.MODES)
def test_ranks_in_pods_that_see_no_other_process(cluster, program, policy):  # noqa: F811
    if subprocess.run([*ISOLATED, "true"], capture_output=True).returncode:
        pytest.skip("cannot make namespaces here")
    layout = LAYOUTS["two pods on each of two nodes"]
    hosts = launch(cluster, layout, program, "50", policy=policy, prefix=ISOLATED)
    check_answer(cluster, layout, hosts, 50)


def test_every_rank_is_sampled_wherever_it_is(cluster, program):  # noqa: F811
    launch(cluster, LAYOUTS["two pods on each of two nodes"], program, "-1")
    cluster.until(wire.Started, "sim")
    counts = {}
    while sorted(counts) != ["0", "1", "2", "3", "4"] or min(counts.values()) < 5:
        new = cluster.until(wire.Sample).ranks.get("sim", {})
        assert all(counts.get(rank, 0) <= values[0] for rank, values in new.items())
        assert all(values[2] > 0 and values[5] > 1 << 20 for values in new.values())
        counts.update({rank: values[0] for rank, values in new.items()})
    cluster.end("sim", 1)


def test_the_exit_code_of_a_rank_in_another_pod_is_kept(cluster, program):  # noqa: F811
    launch(cluster, LAYOUTS["two pods on one node"], program, "-1", "exit")
    result = cluster.until(wire.Result, "sim")
    assert result.code != 0
    assert "exit code 9" in result.reason or "mpich" in program
    cluster.end("sim", 9)


def test_a_stop_reaches_every_rank(cluster, program):  # noqa: F811
    launch(cluster, LAYOUTS["two pods on each of two nodes"], program, "-1")
    wait_for(lambda: cluster.log("sim").count("rank ") == 5)
    cluster.hub.tell(wire.Stop("sim"))
    assert cluster.until(wire.Result, "sim").code != 0
    cluster.end("sim", 1)
    wait_for(lambda: not processes(cluster, program))


def processes(cluster, program):  # noqa: F811
    """The test's processes that are ranks of the program."""
    found = process.members(cluster.token)
    return [pid for pid in found if program in name_of(pid)]
