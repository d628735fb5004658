# SPDX-License-Identifier: LGPL-3.0-or-later
"""Programs that do not tell their iterations: their rhythm is counted exactly, or not at all."""

from __future__ import annotations

import sys

import pytest
from dovetail.core.protocol import WaitPolicy
from dovetail.mpi import page
from dovetail.mpi.control_page import Control
from support import known_programs, suites

pytestmark = pytest.mark.mpi
each_mpi = pytest.mark.parametrize("mpi", known_programs.MPIS)


def run_words(mpi, directory, ranks, words, **more):
    """Run a program; the beats that it had by its own count, and the pages.

    Ranks sleep as they wait: they would else keep the ranks of other tests from the cores.
    """
    Control.create(directory, WaitPolicy("doorbell")).close()
    done = known_programs.run(mpi, ranks, words, directory, **more)
    assert done.code == 0, done.errors
    assert [one.rank for one in done.pages] == list(range(ranks))
    return int(done.output), done.pages


def run(mpi, directory, kind, steps, ranks=2):
    """The same of the known program."""
    program = known_programs.build(mpi, "known/rhythm.c")
    return run_words(mpi, directory, ranks, [program, kind, str(steps)])


def raw_sources(directory):
    """What each rank says of itself, whatever the others say."""
    files = sorted(directory.glob("rank.*"))
    return [page.SOURCES[page.HEAD.unpack_from(file.read_bytes())[11]] for file in files]


@each_mpi
@pytest.mark.parametrize(
    ("kind", "steps"), [("steps", 1500), ("solver", 600), ("summary", 1500), ("skipped", 1500)],
    ids=["one loop", "an inner loop", "several sums in a row", "an inner loop in some steps"],
)  # fmt: skip
def test_every_rank_counts_the_steps_of_the_outer_loop(mpi, kind, steps, tmp_path):
    beats, pages = run(mpi, tmp_path, kind, steps)
    assert [one.iterations for one in pages] == [beats, beats] == [steps, steps]
    assert {one.iteration_source for one in pages} == {"rhythm"}
    assert len({one.beat for one in pages}) == 1
    assert pages[0].beat != page.OWN, "a call of all ranks tells it"


@each_mpi
def test_a_conjugate_gradient_has_two_sums_to_a_turn_and_either_is_the_beat(mpi, tmp_path):
    beats, pages = run(mpi, tmp_path, "cg", 800)
    assert [one.iterations for one in pages] == [beats, beats] == [800, 800]
    assert pages[0].beat == pages[1].beat < page.OWN


ALONE = {
    "neighbours on a line, two": ("halo", 1200, 2),
    "neighbours on a line, four": ("halo", 1200, 4),
    "neighbours on a plane": ("grid", 1200, 4),
    "persistent requests": ("persistent", 1200, 4),
    "sums of half of the ranks": ("groups", 1200, 4),
    "an inner loop without a sum": ("inner", 1200, 2),
    "a sum of all now and then": ("rare", 400, 2),
}


@each_mpi
@pytest.mark.parametrize("case", ALONE.values(), ids=ALONE.keys())
def test_without_calls_of_all_each_rank_counts_the_steps_alone(mpi, case, tmp_path):
    kind, steps, ranks = case
    beats, pages = run(mpi, tmp_path, kind, steps, ranks)
    assert [one.iterations for one in pages] == [beats] * ranks == [steps] * ranks
    assert {(one.iteration_source, one.beat) for one in pages} == {("rhythm", page.OWN)}


@each_mpi
@pytest.mark.parametrize(
    ("kind", "ranks", "flags"), [("line", 4, ()), ("plane", 2, ()), ("plane", 4, ("-DF08",))],
    ids=["use mpi, line", "use mpi, plane", "use mpi_f08, plane"],
)  # fmt: skip
def test_a_stencil_in_fortran_is_counted_by_its_steps(mpi, kind, ranks, flags, tmp_path):
    program = known_programs.build(mpi, "known/halo.F90", *flags)
    beats, pages = run_words(mpi, tmp_path, ranks, [program, kind, "1200"])
    assert [one.iterations for one in pages] == [beats] * ranks == [1200] * ranks
    assert {one.beat for one in pages} == {page.OWN}


@each_mpi
@pytest.mark.parametrize("flags", [(), ("-DF08",)], ids=["use mpi", "use mpi_f08"])
def test_of_nested_loops_in_fortran_the_outer_one_counts(mpi, flags, tmp_path):
    program = known_programs.build(mpi, "known/halo.F90", *flags)
    beats, pages = run_words(mpi, tmp_path, 2, [program, "solver", "600"])
    assert [one.iterations for one in pages] == [beats, beats] == [600, 600]
    assert {one.beat == page.OWN for one in pages} == {False}


@each_mpi
@pytest.mark.parametrize(
    ("kind", "ranks", "alone"), [("line", 4, True), ("objects", 2, True), ("all", 2, False)],
    ids=["buffers", "objects", "and all agree"],
)  # fmt: skip
def test_a_loop_of_mpi4py_is_counted_by_its_steps(mpi, kind, ranks, alone, tmp_path):
    pytest.importorskip("mpi4py")
    (tmp_path / "library").mkdir()
    more = suites.mpi4py_environment(mpi, tmp_path / "library")
    program = known_programs.TOP / "pmpi" / "known" / "halo.py"
    words = [sys.executable, str(program), kind, "1200"]
    beats, pages = run_words(mpi, tmp_path, ranks, words, **more)
    assert [one.iterations for one in pages] == [beats] * ranks == [1200] * ranks
    assert {one.beat == page.OWN for one in pages} == {alone}


NONE = {
    "a master with unequal tasks": ("master", 1200, 2),
    "a master with three workers": ("master", 2400, 4),
    "a master with equal tasks": ("equal", 1200, 4),
    "a master who waits for any": ("waitany", 1200, 4),
    "another partner each time": ("pairs", 4000, 4),
    "a partner now and then": ("pairs", 4000, 2),
}


@each_mpi
@pytest.mark.parametrize("case", NONE.values(), ids=NONE.keys())
def test_ranks_that_have_no_loop_in_common_have_no_rhythm(mpi, case, tmp_path):
    kind, steps, ranks = case
    _, pages = run(mpi, tmp_path, kind, steps, ranks)
    assert [(one.iterations, one.iteration_source) for one in pages] == [(0, "none")] * ranks
    if kind != "pairs":
        expected = ["none"] + ["rhythm"] * (ranks - 1)
        assert raw_sources(tmp_path) == expected, "a worker alone cannot know"


@each_mpi
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_beat_that_some_rank_takes_back_counts_for_none(mpi, ranks, tmp_path):
    """Of four ranks the outer ones do not see what has changed."""
    _, pages = run(mpi, tmp_path, "shifted", 1200, ranks)
    assert [(one.iterations, one.iteration_source) for one in pages] == [(0, "none")] * ranks
    assert raw_sources(tmp_path)[1] == "none"
    assert any(
        page.MARK.unpack_from(file.read_bytes(), page.MARKS_AT)[0] > 0
        for file in tmp_path.glob("rank.*")
    ), "there was one first"


@each_mpi
@pytest.mark.parametrize(
    ("kind", "steps"), [("master", 500), ("steps", 20), ("unsteady", 900),
                         ("halo", 100)],
    ids=["a master with workers", "too short", "steady no more", "neighbours, too short"],
)  # fmt: skip
def test_without_a_rhythm_nothing_is_counted(mpi, kind, steps, tmp_path):
    _, pages = run(mpi, tmp_path, kind, steps)
    assert [(one.iterations, one.iteration_source) for one in pages] == [(0, "none")] * 2


@each_mpi
def test_what_the_program_tells_itself_comes_first(mpi, tmp_path):
    beats, pages = run(mpi, tmp_path, "told", 1000)
    assert [one.iterations for one in pages] == [beats, beats] == [3, 3]
    assert {one.iteration_source for one in pages} == {"pcontrol"}


@each_mpi
def test_one_mark_alone_switches_a_profiler_on_and_tells_no_iteration(mpi, tmp_path):
    beats, pages = run(mpi, tmp_path, "switched", 1000)
    assert [one.iterations for one in pages] == [beats, beats] == [1000, 1000]
    assert {one.iteration_source for one in pages} == {"rhythm"}
