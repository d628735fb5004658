# SPDX-License-Identifier: LGPL-3.0-or-later
"""What is said of the choice of ranks: one sentence, in which each figure has its source."""

from __future__ import annotations

import pytest
from dovetail.core.decided import LINES, Decided

pytestmark = pytest.mark.unit


def choice(widths, seconds, measured, iterations=100, cores=2, name="a"):
    """The data of a choice of one entry."""
    return {
        "cores": cores,
        "widths": {name: widths} if widths else {},
        "seconds": {name: seconds} if seconds else {},
        "open": {name: {"iterations": iterations, "measured": measured}},
    }


def said(*choices, at_once=None, ran=None):
    decided = Decided()
    for data in choices:
        decided.take(data)
    return decided.lines(at_once or {}, ran)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            choice({"1": 4}, {"1": 4.77, "2": 3.0}, [1]),
            "1 rank each, 2 at once: 47.7 ms per iteration and core (measured) against 60 "
            "(predicted) on 2 ranks",
        ),
        (
            choice({"2": 4}, {"1": 900.0, "2": 300.0}, [1, 2]),
            "2 ranks each, 2 at once: 6 s per iteration and core (measured) against 9 (measured) "
            "on 1 rank",
        ),
        (
            choice({"2": 1}, {"1": 4.77, "2": 3.0}, [1]),
            "2 ranks, 2 at once: 30 ms per iteration (predicted) against 47.7 (measured) on 1 rank",
        ),
        (
            choice({"1": 18, "2": 2}, {"1": 9.0, "2": 5.0}, [1, 2], 0),
            "18 on 1 rank each, 2 on 2 ranks each, 2 at once: 9 s per simulation and core "
            "(measured) on 1 rank against 10 (measured) on 2 ranks",
        ),
        (
            choice({"1": 3}, {"1": 9.0, "2": 5.0, "4": 4.0}, [1], 0),
            "1 rank each, 2 at once: 9 s per simulation and core (measured) against 8 (predicted) "
            "on 4 ranks",
        ),
        (choice({"4": 2}, {"4": 9.0}, [4], 10),
         "4 ranks each, 2 at once: 1.8 s per iteration and core (measured)"),
        (choice({"1": 2}, {}, []), "1 rank each, 2 at once, before anything was measured"),
    ],
    ids=[
        "the least of a core", "the least of a core by measurement", "faster, for more of a core",
        "two widths", "ranks share cores", "nothing to compare", "nothing known",
    ],
)  # fmt: skip
def test_the_choice_and_its_reason_are_one_sentence(data, words):
    assert said(data, at_once={"a": 2}) == [f"decided: {words}"]


def test_an_entry_that_has_started_keeps_its_choice_and_gets_newer_figures():
    first = choice({"1": 4}, {}, [])
    then = choice({}, {"1": 4.0, "2": 3.0}, [1])
    assert said(then) == []
    assert said(first, then)[0].startswith("decided: 1 rank each: 40 ms per iteration and core (")


def test_what_ran_is_told_in_place_of_what_was_left():
    data = choice({"2": 1}, {"1": 4.0, "2": 3.0}, [1, 2])
    (words,) = said(data, ran={"a": {1: 4, 2: 1}})
    assert words.startswith("decided: 4 on 1 rank each, 1 on 2 ranks each: 40 ms per ")


def test_several_entries_have_a_line_each_and_many_are_counted():
    choices = [choice({"1": 2}, {}, [], name=f"e{n}") for n in range(LINES + 2)]
    assert said(*choices[:2]) == [
        f"decided for e{n}: 1 rank each, before anything was measured" for n in range(2)
    ]
    assert said(*choices)[-1] == "and for 2 more"
    assert len(said(*choices)) == LINES + 1


def test_nothing_is_said_of_ranks_that_are_kept_nor_of_a_log_that_does_not_tell():
    kept = {"cores": 2, "widths": {"a": {"2": 4}}, "seconds": {}, "open": {}}
    assert said(kept, {"seconds": {"a": {"2": 2.0}}}) == []
