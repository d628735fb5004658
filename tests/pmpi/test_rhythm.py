# SPDX-License-Identifier: LGPL-3.0-or-later
"""Programs that do not tell their iterations: their rhythm is counted exactly, or not at all."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from support import known_programs

pytestmark = pytest.mark.mpi
each_mpi = pytest.mark.parametrize("mpi", known_programs.MPIS)
LJ = Path(__file__).resolve().parents[2] / "examples" / "in.lj"


def run(mpi, directory, kind, steps):
    """Run the program on two ranks; the beats that it had by its own count, and the pages."""
    program = known_programs.build(mpi, "known/rhythm.c")
    done = known_programs.run(mpi, 2, [program, kind, str(steps)], directory)
    assert done.code == 0, done.errors
    assert [one.rank for one in done.pages] == [0, 1]
    return int(done.output), done.pages


@each_mpi
@pytest.mark.parametrize(
    ("kind", "steps"), [("steps", 1500), ("solver", 600)], ids=["one loop", "an inner loop"]
)
def test_every_rank_counts_the_steps_of_the_outer_loop(mpi, kind, steps, tmp_path):
    beats, pages = run(mpi, tmp_path, kind, steps)
    assert [one.iterations for one in pages] == [beats, beats] == [steps, steps]
    assert {one.iteration_source for one in pages} == {"rhythm"}
    assert len({one.beat for one in pages}) == 1


@each_mpi
@pytest.mark.parametrize(
    ("kind", "steps"), [("master", 500), ("steps", 20), ("unsteady", 900)],
    ids=["a master with workers", "too short", "steady no more"],
)  # fmt: skip
def test_without_a_rhythm_nothing_is_counted(mpi, kind, steps, tmp_path):
    _, pages = run(mpi, tmp_path, kind, steps)
    assert [(one.iterations, one.iteration_source) for one in pages] == [(0, "none")] * 2


@each_mpi
def test_what_the_program_tells_itself_comes_first(mpi, tmp_path):
    beats, pages = run(mpi, tmp_path, "told", 1000)
    assert [one.iterations for one in pages] == [beats, beats] == [3, 3]
    assert {one.iteration_source for one in pages} == {"pcontrol"}


@pytest.mark.skipif(shutil.which("lmp") is None, reason="needs LAMMPS")
def test_periods_of_lammps_are_in_proportion_to_its_steps(tmp_path):
    """Its neighbour lists are made anew every 20 steps, and it prints every 50."""
    cells = [word for name in "xyz" for word in ("-var", name, "10")]
    words = ["lmp", "-log", "none", "-in", str(LJ), *cells, "-var", "steps", "3000"]
    done = known_programs.run("openmpi", 2, words, tmp_path)
    assert done.code == 0, done.errors
    loop = re.search(r"Loop time of .* for (\d+) steps", done.output)
    assert loop
    for one in done.pages:
        assert one.iteration_source == "rhythm"
        # It prints before the first step as well, when it has set itself up.
        assert int(loop[1]) / 50 <= one.iterations <= int(loop[1]) / 50 + 2
