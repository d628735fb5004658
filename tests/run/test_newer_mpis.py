# SPDX-License-Identifier: LGPL-3.0-or-later
"""Open MPI 5 and MPICH 5 as their makers build them: other names and options than Debian's.

In: what `support.known_programs` says of where they are; without them all is skipped.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from dovetail.mpi import page
from support import known_programs
from support.run_command import site  # noqa: F401

pytestmark = pytest.mark.mpi

each_mpi = pytest.mark.parametrize("mpi", known_programs.NEWER)


def on_path(mpi):
    """The environment of a user who has loaded its module."""
    return {"PATH": f"{known_programs.NEWER_BIN[mpi]}:{os.environ['PATH']}"}


@each_mpi
def test_iterations_and_useful_time_of_each_rank_are_those_known(mpi, tmp_path):
    words = [known_programs.build(mpi, "known/busy.c"), "sleep", "50", "2", "8"]
    saved = tmp_path / "profile.json"
    done = known_programs.dovetail(
        "-o", str(saved), "--wait", "doorbell", "--", "mpirun", "-np", "2", *words, **on_path(mpi)
    )
    assert done.returncode == 0, done.stderr
    ranks = known_programs.saved(saved)["ranks"]
    assert [one["iterations"] for one in ranks] == [50, 50]
    assert [one["calls"]["MPI_Barrier"][0] for one in ranks] == [50, 50]
    light, heavy = (one["useful_s"] for one in ranks)
    assert 0.1 <= light < heavy
    assert heavy >= 0.4


@each_mpi
def test_two_at_once_on_more_ranks_than_cores_are_counted_and_free_to_run_anywhere(site, mpi):  # noqa: F811
    cores = os.sched_getaffinity(0)
    ranks = len(cores) + 1
    milliseconds = ["20"] + ["5"] * (ranks - 1)
    command = [known_programs.build(mpi, "known/busy.c"), "sleep", "0", *milliseconds]
    until = {"BUSY_UNTIL": str(site.directory / "never"), **on_path(mpi)}
    entry = {"ranks": ranks, "weights": [4] + [1] * (ranks - 1), "slowdown": 50, "count": 2}
    run = site.start(site.plan({**entry, "command": command, "environment": until}), "-o", "out")
    for name in ("sim-1", "sim-2"):
        site.until(lambda log, name=name: any(
            min(one["ranks"]["iterations"]) > 0
            for one in log if one.get("type") == "Sampled" and one["name"] == name
        ))  # fmt: skip
    (session,) = site.sessions
    pages = [
        one for path in Path("/dev/shm", session).glob("sim-*") for one in page.read_pages(path)
    ]
    assert len(pages) == 2 * ranks
    assert {frozenset(os.sched_getaffinity(one.pid)) for one in pages} == {frozenset(cores)}
    shared = [name for path in Path("/dev/shm", session).glob("sim-*") for name in os.listdir(path)]
    assert [name for name in shared if name.startswith(("mpich_shm_", "sm_segment"))]
    code, _, errors = site.end(run, signal.SIGINT)
    assert code == 130, errors


ASKS = """
#include <mpi.h>

int main(int argc, char **argv)
{
    MPI_Session session;
    MPI_Session_init(MPI_INFO_NULL, MPI_ERRORS_ARE_FATAL, &session);
    MPI_Session_finalize(&session);
    MPI_Init(&argc, &argv);
    for (int i = 0; i < 5; i++) {
        MPI_Barrier(MPI_COMM_WORLD);
        MPI_Pcontrol(1);
    }
    return MPI_Finalize();
}
"""
"""Opens a session to ask MPI something, ends it, and begins."""


@each_mpi
def test_a_session_before_mpi_init_hides_nothing_of_what_follows(mpi, tmp_path):
    (tmp_path / "asks.c").write_text(ASKS)
    words = [known_programs.build(mpi, str(tmp_path / "asks.c"))]
    if known_programs.plain(mpi, 2, words) is None:
        pytest.skip("this MPI begins once only, with or without the library")
    done = known_programs.run(mpi, 2, words, tmp_path)
    assert done.code == 0, done.errors
    assert [(one.rank, one.state, one.iterations) for one in done.pages] == [
        (0, "finalized", 5),
        (1, "finalized", 5),
    ]
    for one in done.pages:
        assert known_programs.counts(one)["MPI_Barrier"] == 5
        assert known_programs.counts(one)["MPI_Init"] == 1
    assert len(list(tmp_path.glob("rank.*"))) == 2


STANDARD = """
#include <mpi.h>
int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Barrier(MPI_COMM_WORLD);
    return MPI_Finalize();
}
"""


def test_a_program_of_the_standard_abi_runs_as_ever_under_the_starter_of_mpich(tmp_path):
    """Its handles are wider than MPICH's own, by which the library would be deceived."""
    known_programs.library("mpich5")
    (tmp_path / "standard.c").write_text(STANDARD)
    compiler = known_programs.NEWER_BIN["mpich5"] / "mpicc_abi"
    subprocess.run([compiler, "-o", "standard", "standard.c"], cwd=tmp_path, check=True)
    done = known_programs.run("mpich5", 2, [str(tmp_path / "standard")], tmp_path)
    assert (done.code, done.pages) == (0, []), done.errors
