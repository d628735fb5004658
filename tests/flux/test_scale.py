# SPDX-License-Identifier: LGPL-3.0-or-later
"""An instance with many slices: what each costs is the same as with few."""

from __future__ import annotations

import pytest
from dovetail.bench.scale import slices
from support.broker_states import Play
from support.calls import calls_of

pytestmark = pytest.mark.unit


def test_ten_times_the_slices_cost_about_ten_times_the_messages_and_calls():
    slices.cost(2)  # imports and caches
    few, many = slices.cost(20), slices.cost(200)
    assert many.messages <= 11 * few.messages
    assert many.size <= 14 * few.size, "numbers have more digits"
    assert calls_of(lambda: slices.cost(200)) <= 12 * calls_of(lambda: slices.cost(20))


def test_the_control_slice_is_told_what_changed_and_not_the_rest_again():
    play = Play(50).begin().ready(*range(50))
    before = len(play.done)
    play.do(play.state.excepted(7, "cancel", "")).over(7)
    orders = [dict(one.value) for one in play.done[before:] if getattr(one, "key", "") == "agent0"]
    kept = [one["keep"]["slices"] for one in orders if "keep" in one]
    assert [[one["number"] for one in slices] for slices in kept] == [[7], []]
    assert [one["gone"] for one in orders if "gone" in one] == [[7]]
    assert sorted(one["number"] for one in play.kept()["slices"]) == [*range(7), *range(8, 50)]
