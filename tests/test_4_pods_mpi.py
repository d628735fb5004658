# SPDX-License-Identifier: LGPL-3.0-or-later
"""Step 4: the ranks of one MPI program run in several pods, on one node and on two."""

from __future__ import annotations

import re
import subprocess

import pytest
from dovetail import paths
from dovetail.errors import BadInput
from dovetail.pods import wire
from podrun import ADDRESSES, cluster  # noqa: F401

pytestmark = pytest.mark.mpi

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
TOTAL = 200 * 201 // 2  # the answer, times the sum of all ranks

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


def launch(cluster, layout, *command, policy="yield"):  # noqa: F811
    """Start a program on pods: (node, index of its address, ranks) each."""
    for node, _, _ in layout:
        if node not in cluster.agents:
            cluster.agent(node)
    for group, (node, _, _) in enumerate(layout):
        cluster.entry("sim", group, node)
    for _ in layout:
        cluster.until(wire.Pod, "sim")
    hosts = [{"address": ADDRESSES[index], "ranks": ranks} for _, index, ranks in layout]
    config = cluster.config("sim", command, sum(host["ranks"] for host in hosts))
    config["environment"]["PATH"] = config["environment"]["PATH"].partition(":")[2]
    cluster.hub.tell(wire.Wait("sim", policy, 20))
    cluster.hub.tell(wire.Run("sim", config, hosts))
    return hosts


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_ranks_in_several_pods_are_one_program(cluster, program, layout):  # noqa: F811
    hosts = launch(cluster, layout, program)
    result = cluster.until(wire.Result, "sim")
    log = cluster.log("sim")
    assert (result.code, result.reason) == (0, ""), log
    size = sum(host["ranks"] for host in hosts)
    assert f"total {TOTAL * size * (size - 1) // 2}" in log
    wanted, rank = set(), 0
    for group, (node, _, ranks) in enumerate(layout):
        for _ in range(ranks):
            wanted.add((str(rank), str(size), str(group), f"{cluster.session(node)}/sim"))
            rank += 1
    assert set(re.findall(r"rank (\d+) of (\d+) group (\d+) dir (\S+)", log)) == wanted
    cluster.end("sim")
