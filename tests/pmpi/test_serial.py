# SPDX-License-Identifier: LGPL-3.0-or-later
"""A solver that has time steps and no MPI_Init publishes a page as well, and only one."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

import pytest
from dovetail.mpi import page
from support import known_programs

pytestmark = pytest.mark.mpi

FOAM = "void *_ZN4Foam4TimeppEv(void *self) { return self; }\n"
"""Stands for OpenFOAM's own library, of which a program needs this one function."""

SOLVER = """
#include <mpi.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

void *_ZN4Foam4TimeppEv(void *self);

static void steps(int n)
{
    for (int i = 0; i < n; i++) {
        _ZN4Foam4TimeppEv(NULL);
        usleep(2000);
    }
}

int main(int argc, char **argv)
{
    steps(argc > 2 ? atoi(argv[2]) : 5);
    if (!strcmp(argv[1], "fails"))
        exit(3);
    if (!strcmp(argv[1], "is killed"))
        raise(SIGKILL);
    if (!strcmp(argv[1], "meets")) {
        if (mkdir("met", 0700) != 0)
            rmdir("met");
        else
            while (access("met", F_OK) == 0)
                usleep(2000);
    }
    if (!strcmp(argv[1], "forks")) {
        if (fork() == 0) {
            steps(7);
            exit(0);
        }
        wait(NULL);
    }
    if (!strcmp(argv[1], "starts MPI late")) {
        MPI_Init(&argc, &argv);
        MPI_Barrier(MPI_COMM_WORLD);
        steps(2);
        MPI_Finalize();
        steps(9);
    }
    return 0;
}
"""


@pytest.fixture(params=known_programs.MPIS)
def mpi(request):
    known_programs.library(request.param)
    return request.param


@pytest.fixture
def solver(mpi, tmp_path):
    """A solver that takes five steps, linked with the MPI."""
    (tmp_path / "foam.c").write_text(FOAM)
    (tmp_path / "solver.c").write_text(SOLVER)
    library = ["cc", "-shared", "-fPIC", "-o", "libfoam.so", "foam.c"]
    program = [f"mpicc.{mpi}", "-o", "solver", "solver.c", "./libfoam.so"]
    for words in (library, program):
        subprocess.run(words, cwd=tmp_path, check=True)
    return str(tmp_path / "solver")


@dataclass
class Ended:
    """How a run ended, and what it left."""

    code: int
    pages: list[page.RankPage]
    files: list[str]


def run(solver: str, *arguments: str, mpi: str, starter: tuple[str, ...] = ()) -> Ended:
    top = os.path.dirname(solver)
    more = {"LD_PRELOAD": str(known_programs.library(mpi)), "DOVETAIL_DIR": top}
    words = [*starter, "./solver", *arguments]
    environment = known_programs.environment(**more)
    code = subprocess.run(words, cwd=top, env=environment, timeout=known_programs.LIMIT).returncode
    files = [name for name in os.listdir(top) if name.startswith("rank.")]
    return Ended(code, page.read_pages(top), files)


def test_its_steps_are_counted_without_any_mpi(solver, mpi):
    done = run(solver, "ends", mpi=mpi)
    (one,) = done.pages
    assert done.code == 0
    assert (one.rank, one.world_size, one.world, one.state) == (0, 1, 0, "finalized")
    assert (one.iterations, one.iteration_source) == (5, "openfoam")
    assert one.calls == {}
    assert one.mpi_s == 0
    assert one.elapsed_s == one.useful_s >= one.iter_useful_s > 0
    assert one.cpu_s >= one.iter_cpu_s > 0


def test_a_step_in_which_it_fails_is_not_complete(solver, mpi):
    done = run(solver, "fails", mpi=mpi)
    assert done.code == 3
    assert [(one.iterations, one.state) for one in done.pages] == [(4, "aborted")]


def test_its_page_is_whole_after_kill_9(solver, mpi):
    done = run(solver, "is killed", mpi=mpi)
    (one,) = done.pages
    assert done.code == -9
    assert (one.iterations, one.state, one.alive) == (4, "running", False)
    assert one.elapsed_s >= one.iter_useful_s > 0


def test_a_forked_child_leaves_its_parents_page_alone(solver, mpi):
    done = run(solver, "forks", mpi=mpi)
    assert [one.iterations for one in done.pages] == [5]
    assert len(done.files) == 1


def test_with_a_late_mpi_init_there_is_one_page_and_it_is_right(solver, mpi):
    starter = (known_programs.LAUNCHERS[mpi], "-np", "2")
    done = run(solver, "starts MPI late", mpi=mpi, starter=starter)
    assert done.code == 0
    assert [(one.rank, one.world_size, one.iterations) for one in done.pages] == [
        (0, 2, 7),
        (1, 2, 7),
    ]
    assert [known_programs.counts(one)["MPI_Barrier"] for one in done.pages] == [1, 1]
    assert len(done.files) == 2


def test_a_starter_of_two_that_do_not_know_of_each_other_makes_no_world_of_two(solver, mpi):
    """They meet: one that begins after the other has ended would remove its page."""
    starter = (known_programs.LAUNCHERS[mpi], "-np", "2")
    done = run(solver, "meets", mpi=mpi, starter=starter)
    assert [(one.rank, one.world_size) for one in done.pages] == [(0, 1)]
    assert len(done.files) == 2


def test_without_a_step_there_is_no_page(solver, mpi):
    assert run(solver, "ends", "0", mpi=mpi).files == []
