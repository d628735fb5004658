# SPDX-License-Identifier: LGPL-3.0-or-later
"""What sleeps is not robbed: figures of two ranks with a known share of their cores."""

from __future__ import annotations

import pytest
from dovetail.core.taken_cpu import missing, taken

pytestmark = pytest.mark.unit

WORK = (0.01, 0.03)  # CPU seconds per iteration, and for how long else each rank sleeps


def ranks(share, sleeps=(0.0, 0.0)):
    """CPU, time outside and inside MPI of ranks that get this share of their cores."""
    useful = [work / share + sleep for work, sleep in zip(WORK, sleeps)]
    inside = [max(useful) - one for one in useful]
    cpu = [work + share * waits for work, waits in zip(WORK, inside)]
    return cpu, useful, inside


@pytest.mark.parametrize("share", [1.0, 0.9, 2 / 3, 0.25])
def test_what_others_took_is_found_by_the_time_inside_mpi(share):
    assert taken(*ranks(share), blocking=WORK) == pytest.approx(1 - share)
    assert taken(*ranks(share)) == pytest.approx(1 - share)


def test_ranks_that_sleep_outside_mpi_were_not_robbed():
    seen = ranks(1.0, sleeps=(0.02, 0.06))
    assert missing(*seen) > 0.4
    assert taken(*seen, blocking=WORK) == pytest.approx(0.0)
    assert taken(*seen) == pytest.approx(0.0)


def test_without_time_inside_mpi_nobody_knows():
    assert taken([0.01], [0.03], [0.0], blocking=[0.01]) is None
    alike = [0.02, 0.02], [0.02, 0.02], [0.01, 0.01]
    assert taken(*alike) is None, "nor by ranks that are alike"
    assert taken(*alike, blocking=[0.02, 0.02]) == pytest.approx(1 / 3), "in all that they lack"


def test_a_rank_that_spins_less_than_it_waits_was_robbed_whatever_it_did_outside():
    assert taken([0.4], [0.3], [0.7]) == pytest.approx(0.3)


def test_clocks_may_differ_a_little():
    assert taken([0.97], [0.5], [0.5]) == pytest.approx(0.03)
