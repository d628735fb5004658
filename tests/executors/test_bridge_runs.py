# SPDX-License-Identifier: LGPL-3.0-or-later
"""Pods with addresses, whose nodes see nothing else.

Whole runs by `dovetail run`, as an ordinary user where that is possible.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess

import pytest
from dovetail.core.errors import BadInput
from dovetail.host import install_paths
from support import cluster_runs, flux_operator
from support.cluster_runs import containers, running, two
from support.other_users import WHY_NOT

pytestmark = pytest.mark.kube

# No name server can be reached, which is to be known at once, and every time.
NAMES = "for i in 1 2 3 4 5 6 7 8; do getent hosts nowhere.example; test $? = 2 || exit 9; done"
# Messages of every size cross the network; argv[1] is the exit code of the last rank.
PROGRAM = r"""
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
static char data[1 << 20];
int main(int argc, char **argv) {
    int rank, size, total, sum = 0, i;
    char host[256];
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    gethostname(host, sizeof(host));
    for (i = 1; i <= sizeof(data); i *= 2) {
        data[i - 1] = rank == i % size;
        MPI_Bcast(data, i, MPI_CHAR, i % size, MPI_COMM_WORLD);
        total = data[i - 1];
        MPI_Allreduce(MPI_IN_PLACE, &total, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
        sum += total / size;
        MPI_Pcontrol(1);
    }
    printf("rank %d of %d on %s: %d\n", rank, size, host, sum);
    fflush(stdout);
    MPI_Finalize();
    return argc > 1 && rank == size - 1 ? atoi(argv[1]) : 0;
}
"""


@pytest.fixture(scope="module")
def site(binaries):
    rootless = os.getuid() != 0 or not WHY_NOT
    found = cluster_runs.made(binaries, rootless, "--network", "bridge")
    yield found
    found.close()


@pytest.fixture(params=["openmpi", "mpich"])
def program(request, site):
    """The program above, under either MPI."""
    return built(site, request.param)


def built(site, mpi):
    """The program above, where the site's user can run it."""
    try:
        install_paths.library(mpi)
    except BadInput as error:
        pytest.skip(str(error))
    folder = site.folder / mpi
    folder.mkdir(exist_ok=True)
    (folder / "sums.c").write_text(PROGRAM)
    words = [f"mpicc.{mpi}", "-o", "sums", "sums.c"]
    subprocess.run(words, cwd=folder, check=True)
    for path in (folder, folder / "sums"):
        path.chmod(0o755)
    return str(folder / "sums")


def test_ranks_talk_between_pods_and_in_one_and_their_exit_code_is_kept(site, out, program):
    pods = {"two-pods": 2, "one-pod": 1}
    entries = [
        {"name": f"{name}-{where}", "command": [program, code], "ranks": 2,
         "ranks_per_pod": 2 // count, "prepare": [f"timeout 30 sh -c '{NAMES}'"]}
        for name, code in (("good", "0"), ("bad", "7"))
        for where, count in pods.items()
    ]  # fmt: skip
    run = site.start(site.plan(*entries), out, "--network", "bridge")
    assert site.end(run) == 1, site.errors(out)
    ends = {one["name"]: one["code"] for one in site.of("Finished", out)}
    assert ends == {f"{name}-{where}": code for name, code in (("good", 0), ("bad", 7))
                    for where in pods}, site.errors(out)  # fmt: skip
    for where, count in pods.items():
        log = (site.folder / out / f"good-{where}" / "log").read_text()
        found = sorted(re.findall(r"rank (\d) of 2 on (good-\S+): 21", log))
        assert [rank for rank, _ in found] == ["0", "1"]
        assert len({host for _, host in found}) == count, "each pod is a host"


def test_on_the_network_of_a_node_that_has_loopback_alone_ranks_talk_too(site, out):
    run = site.start(site.plan(site.busy(10, 10, iterations=20)), out, "--network", "host")
    assert site.end(run) == 0, site.errors(out)


def test_requests_follow_the_load_and_a_killed_run_is_taken_over(site, out):
    plan = two(site, ranks_per_pod=1)
    run = running(site, out, plan, "--network", "bridge")
    assert {one["spec"].get("hostNetwork", False) for one in site.pods()} == {False}
    site.until(lambda: [one for one in site.of("Resized", out) if not one["refused"]], out)
    before = containers(site)
    site.end(run, signal.SIGKILL)
    again = site.start(plan, out, "--resume")
    site.until_iterating("sim-1", "sim-2", out=out)
    assert containers(site) == before, "no pod was made anew, nor restarted"
    assert site.end(again, signal.SIGTERM) == 130
    assert not (site.folder / out / "kubernetes").exists()


def test_brokers_of_a_minicluster_have_addresses_of_their_own(site, out):
    with flux_operator.beside(site):
        entry = {"command": [built(site, "openmpi")], "ranks": 2, "ranks_per_pod": 1}
        words = ("--network", "bridge", "--launcher", "minicluster")
        run = site.start(site.plan(entry), out, *words)
        pods = site.until(lambda: len(found := site.pods()) == 2 and found, out)
        assert {one["spec"].get("hostNetwork", False) for one in pods} == {False}
        assert site.end(run) == 0, site.errors(out)
        site.nothing_left()
    log = (site.folder / out / "sim" / "log").read_text()
    found = re.findall(r"rank (\d) of 2 on (sim-\S+): 21", log)
    assert len({host for _, host in found}) == 2, "each pod is a host"
