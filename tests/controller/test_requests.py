# SPDX-License-Identifier: LGPL-3.0-or-later
"""Requests that follow the load: sums, floors, hysteresis."""

from __future__ import annotations

import pytest
from dovetail.controller.shares import differ, fit_requests
from dovetail.core import protocol
from dovetail.core.protocol import Capacity, Node, Spec
from dovetail.executors.simulated.executor import Work
from dovetail.run.simulate import run_simulated
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.unit


def capacity(cpu: int) -> Capacity:
    return Capacity((Node("n", cpu, 0),))


CASES = [
    ("needs that fit are granted", [[300, 900], [400, 400]], 4000, [(300, 900), (400, 400)]),
    (
        "needs that do not fit shrink alike",
        [[1000, 1000], [500, 1500]],
        2000,
        [(500, 500), (250, 750)],
    ),
    ("a light rank keeps the floor", [[1, 999]], 1000, [(10, 990)]),
    ("the floor comes first", [[1, 1, 3000]], 1000, [(10, 10, 980)]),
    ("no simulation, no request", [], 1000, []),
]


@pytest.mark.parametrize(("what", "needs", "cpu", "expected"), CASES, ids=[c[0] for c in CASES])
def test_requests(what, needs, cpu, expected):
    assert fit_requests(needs, capacity(cpu)) == expected


@given(
    st.lists(st.lists(st.floats(0.0, 3000.0), min_size=1, max_size=5), min_size=1, max_size=5),
    st.integers(0, 20_000),
)
def test_requests_fit_the_capacity_and_keep_the_floor(needs, cpu):
    found = fit_requests(needs, capacity(cpu))
    flat = [request for sim in found for request in sim]
    assert [len(sim) for sim in found] == [len(sim) for sim in needs]
    if cpu >= 10 * len(flat):
        assert sum(flat) <= cpu
        assert min(flat) >= 10
    assert min(flat) >= 1


CHANGES = [
    ("noise of a few percent", (100, 900), (104, 870), False),
    ("a light rank that wavers by less than the floor", (12, 900), (20, 900), False),
    ("a rank that doubled", (100, 900), (200, 900), True),
    ("another number of ranks", (100,), (100, 100), True),
]


@pytest.mark.parametrize(("what", "old", "new", "sent"), CHANGES, ids=[c[0] for c in CHANGES])
def test_a_resize_is_sent_only_for(what, old, new, sent):
    assert differ(old, new, 0.10) is sent


def test_requests_follow_a_load_that_is_not_what_the_weights_said():
    specs = [Spec("a-0", "a", "case", 2, (1.0, 1.0), ("run",))]
    result = run_simulated(specs, {"a": Work((0.006, 0.03), 300)}, [Node("n", 2000, 0)])
    resize = next(a for _, a in result.actions if isinstance(a, protocol.Resize))
    light, heavy = resize.shares["a-0"].requests
    assert light / heavy == pytest.approx(0.2, abs=0.03)
    assert result.count(protocol.Resize) == 1


def test_within_the_machine_at_every_moment():
    specs = [Spec(f"a-{i}", "a", "case", 2, (1.0, 3.0), ("run",)) for i in range(5)]
    result = run_simulated(specs, {"a": Work((0.01, 0.03), 200)}, [Node("n", 2000, 0)])
    now: dict[str, int] = {}
    for _, action in result.actions:
        if isinstance(action, protocol.Launch):
            running = {v.name for v in result.controller.views()}
            now[action.name] = sum(action.share.requests)
            assert action.name in running
        elif isinstance(action, protocol.Resize):
            now.update({name: sum(share.requests) for name, share in action.shares.items()})
    assert all(total <= 2000 for total in now.values())


def test_equal_simulations_get_equal_requests_however_noisy_they_are():
    specs = [Spec(f"a-{i}", "a", "case", 2, (1.0, 3.0), ("run",)) for i in range(4)]
    work = Work((0.01, 0.03), 800, noise=0.2)
    result = run_simulated(specs, {"a": work}, [Node("n", 2000, 0)])
    shares: dict[str, protocol.Share] = {}
    for _, action in result.actions:
        if isinstance(action, protocol.Launch):
            shares[action.name] = action.share
        elif isinstance(action, protocol.Resize):
            shares.update(action.shares)
        packed = {s.requests for s in shares.values() if s.wait.mode == "doorbell"}
        assert len(packed) <= 1
    # One for the first admission, one for the last that stays alone; a few for wait policies.
    assert result.count(protocol.Resize) <= 5
