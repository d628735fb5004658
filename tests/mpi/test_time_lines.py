# SPDX-License-Identifier: LGPL-3.0-or-later
"""How the `Time =` lines of a log count iterations."""

from __future__ import annotations

import pytest
from dovetail.mpi import sampling, time_lines

pytestmark = pytest.mark.unit

COUNTED = [7.0, 30.0, 3.0, 2.0, 1.0, 4096.0, -1.0]
UNCOUNTED = [-1.0, 30.0, 3.0, 2.0, 1.0, 4096.0, -1.0]


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 1000])
def test_time_lines_are_counted_whatever_pieces_they_come_in(tmp_path, size):
    text = b"Time = 1\n Time = 2\nTime = 3\nExecutionTime = 4\n\nTime = 5\nTime = 6"
    counter = time_lines.Counter(str(tmp_path))
    for start in range(0, len(text), size):
        counter.take(text[start : start + size])
    lines, stamp, residual = time_lines.read(str(tmp_path))
    assert (lines, stamp > 0, residual) == (4, True, -1.0)


def test_lines_that_have_waited_are_told_with_the_next_that_has_not(tmp_path):
    counter, told = time_lines.Counter(str(tmp_path)), lambda: time_lines.read(str(tmp_path))
    assert counter.take(b"Time = 1\n")
    first = told()
    assert not counter.take(b"Time = 2\nTime = 3\nUx", late=True)
    assert (counter.untold, told()) == (True, first)
    assert not counter.take(b" converged\n"), "no line, and so nothing to tell"
    assert counter.take(b"Time = 4\n")
    assert (counter.untold, told()[0]) == (False, 4)
    counter.take(b"Time = 5\n", late=True)
    counter.tell(1000.0)
    assert (counter.untold, told()[0]) == (True, 4), "it is not so old"
    counter.tell()
    assert (counter.untold, told()[0]) == (False, 5)


STEP = b"""Time = 1

DILUPBiCG:  Solving for Ux, Initial residual = 1, Final residual = 0.0538, No Iterations 1
GAMG:  Solving for p, Initial residual = 2.5e-01, Final residual = 0.0069, No Iterations 18
time step continuity errors : sum local = 1.19, global = 0.1798, cumulative = 0.1798
"""


@pytest.mark.parametrize("size", [1, 7, 50, 1000])
def test_the_residual_is_the_largest_of_the_last_complete_step(tmp_path, size):
    second = STEP.replace(b"= 1\n", b"= 2\n").replace(b"= 1,", b"= 1.25e-02,")
    text, counter, seen = STEP + second + b"Time = 3\n", time_lines.Counter(str(tmp_path)), []
    for start in range(0, len(text), size):
        counter.take(text[start : start + size])
        seen += [(time_lines.read(str(tmp_path)) or (0, 0, 0))[::2]]
    assert seen[-1] == (3, 0.25)
    assert set(seen) <= {(0, 0), (1, -1.0), (2, 1.0), (3, 0.25)}
    assert sampling.of_values([COUNTED], (3, 31.0, 0.25), False).residual == 0.25
    assert sampling.of_values([COUNTED], (3, 31.0, -1.0), False).residual is None


@pytest.mark.parametrize("word", [b"0.10.2", b"...", b".", b"1e999"])
def test_what_is_no_number_is_no_residual(tmp_path, word):
    counter = time_lines.Counter(str(tmp_path))
    counter.take(STEP.replace(b"2.5e-01", word) + b"Time = 2\n")
    assert (time_lines.read(str(tmp_path)) or ())[::2] == (2, 1.0)


@pytest.mark.parametrize("content", [None, b"", b"half of it"])
def test_a_file_without_a_count_says_nothing(tmp_path, content):
    if content is not None:
        (tmp_path / time_lines.FILE).write_bytes(content)
    assert time_lines.read(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("lines", "succeeded", "iterations"), [(0, False, 0), (0, True, 0), (5, False, 4), (5, True, 5)]
)
def test_a_line_begins_an_iteration_and_a_good_end_completes_the_last(lines, succeeded, iterations):
    sample = sampling.of_values([UNCOUNTED] * 2, (lines, 31.0, -1.0), succeeded)
    assert sample.iterations == (iterations,) * 2
    assert sample.stamp == (31.0 if lines else 30.0,) * 2, "else when they worked"


def test_ranks_that_count_need_no_log_and_one_that_does_not_makes_the_log_count_for_all():
    assert sampling.of_values([COUNTED] * 2, (5, 31.0, -1.0), False).iterations == (7, 7)
    mixed = sampling.of_values([COUNTED, UNCOUNTED], (5, 31.0, -1.0), False)
    assert (mixed.iterations, mixed.stamp) == ((4, 4), (31.0, 31.0))
    assert mixed.measure == "iterations"


def test_what_is_counted_has_a_name():
    beats = [[*COUNTED[:6], beat] for beat in (2, 2, 3)]
    assert sampling.of_values(beats[:2], (0, 0.0, -1.0), False).measure == "periods"
    assert sampling.of_values(beats[1:], (0, 0.0, -1.0), False).measure == "work"
    assert sampling.of_values([UNCOUNTED], (0, 0.0, -1.0), False).measure == "work"
