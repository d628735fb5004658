# SPDX-License-Identifier: LGPL-3.0-or-later
"""Seconds on widths that were not measured: what is known stays, the rest is plausible."""

from __future__ import annotations

import pytest
from dovetail.controller.choice import Task, choose
from dovetail.controller.speedup import Measured, Prior, predict, smoothed
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.unit

WIDTHS = (1, 2, 4, 8, 16)
SECONDS = st.floats(0.01, 1e5)


@given(st.dictionaries(st.sampled_from(WIDTHS), SECONDS, max_size=5))
def test_what_was_measured_stays_and_the_rest_is_said_to_be_predicted(measured):
    found = predict(WIDTHS, measured)
    assert set(found.seconds) == set(WIDTHS)
    assert found.predicted == set(WIDTHS) - set(measured)
    for width, seconds in measured.items():
        assert found.seconds[width] == seconds
    assert all(seconds > 0 for seconds in found.seconds.values())


@given(st.sampled_from(WIDTHS), SECONDS)
def test_no_prediction_from_one_width_is_better_than_in_proportion(width, seconds):
    found = predict(WIDTHS, {width: seconds}).seconds
    for other in WIDTHS:
        ratio = found[width] * width / (found[other] * other)
        assert ratio <= 1 + 1e-9 if other > width else ratio >= 1 - 1e-9


def test_with_nothing_measured_many_run_narrow_and_few_run_wide():
    found = predict(WIDTHS, {})
    assert found.predicted == set(WIDTHS)
    many = choose([Task("a", 64, found.seconds)], 16).starts_now
    assert many == (("a", 1),) * 16
    assert choose([Task("a", 1, found.seconds)], 16).starts_now == (("a", 16),)


def test_useful_work_on_two_ranks_tells_what_one_takes():
    """Measured: 56 ms on two balanced ranks, and 96 ms on one."""
    found = predict((1, 2, 4), {2: Measured(56.0, 1.0, work=(48.0, 48.0))}).seconds
    assert found[1] == pytest.approx(96.0, rel=0.05)
    assert 28.0 < found[4] < 56.0


def test_uneven_load_counts_as_work_that_more_ranks_do_not_shorten():
    even = predict((1, 2, 4), {2: Measured(56.0, 1.0, work=(48.0, 48.0))}).seconds
    uneven = predict((1, 2, 4), {2: Measured(79.0, 1.0, work=(24.0, 72.0))}).seconds
    assert uneven[1] == pytest.approx(96.0, rel=0.06)
    assert uneven[4] / uneven[2] > even[4] / even[2]


def test_a_width_between_two_that_were_measured_lies_between_them():
    found = predict(WIDTHS, {1: 100.0, 4: 40.0}).seconds
    assert 50.0 <= found[2] < 70.0
    assert 15.0 < found[8] < 40.0
    assert found[8] > found[16]


def test_the_width_measured_with_less_error_counts_more():
    sure, unsure = Measured(30.0, 0.3), Measured(30.0, 15.0)
    steep = {1: 100.0, 2: 50.0}
    assert predict(WIDTHS, {**steep, 4: sure}).seconds[4] == 30.0
    one = predict(WIDTHS, {1: 100.0, 2: Measured(80.0, 0.1)}).seconds[16]
    other = predict(WIDTHS, {1: 100.0, 2: Measured(80.0, 80.0)}).seconds[16]
    assert one > other
    assert predict(WIDTHS, {**steep, 4: unsure}).seconds[4] == 30.0


def test_of_many_widths_that_are_told_wrong_each_is_nearer_to_the_curve():
    truth = {r: 100 * Prior().share(r) for r in (1, 2, 4, 8, 16, 32)}
    wrong = {**truth, 8: 0.8 * truth[8]}
    nearer = smoothed(wrong, 0.1)
    assert wrong[8] < nearer[8] < truth[8]
    assert smoothed(wrong, 0.0) == pytest.approx(wrong)
