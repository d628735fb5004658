# SPDX-License-Identifier: LGPL-3.0-or-later
"""Ranks with cores to themselves are bound to them where that measures better, and only there."""

from __future__ import annotations

import random

import pytest
from dovetail.controller.binding import LEAST_PAIRS, MOST_PAIRS, Binding
from dovetail.controller.settings import Settings
from dovetail.core import eventlog, protocol
from dovetail.core.protocol import Node, Resize, Spec
from dovetail.executors.simulated.executor import Fault, Work
from dovetail.report.build_history import tell
from dovetail.report.summary import summarise
from dovetail.run.resume import replay
from dovetail.run.simulate import SimulatedRun, run_simulated

pytestmark = pytest.mark.unit

NODE = [Node("n0", 2000, 0)]


def specs(family: str, count: int, ranks: int = 1, **more) -> list[Spec]:
    return [
        Spec(f"{family}-{i}", family, "case", ranks, (1.0,) * ranks, ("run",), **more)
        for i in range(count)
    ]


def run(work: Work, count: int = 2, ranks: int = 1, **more) -> SimulatedRun:
    return run_simulated(specs("a", count, ranks), {"a": work}, NODE, binds=True, **more)


def changes(result: SimulatedRun) -> list[tuple[str, bool]]:
    """Who was bound or unbound, in order."""
    found: list[tuple[str, bool]] = []
    now: dict[str, bool] = {}
    for _, action in result.actions:
        for name, share in action.shares.items() if isinstance(action, Resize) else ():
            if share.bound != now.get(name, False):
                now[name] = share.bound
                found.append((name, share.bound))
    return found


def words(result: SimulatedRun) -> list[str]:
    return [note.why for note in result.notes("bind")]


def test_what_is_a_tenth_faster_bound_is_kept_so():
    result = run(Work((0.03,), 3000, bound=1.1))
    assert [note.data["bound"] for note in result.notes("bind")] == [True]
    assert result.notes("bind")[0].data["gain"] == pytest.approx(0.1, abs=0.02)
    assert "a: bound to cores: " in words(result)[0]
    assert "% faster" in words(result)[0]
    assert dict(changes(result)) == {"a-0": True, "a-1": True}
    assert result.makespan < 3000 * 0.03 / 1.07


@pytest.mark.parametrize(("speed", "noise"), [(1.0, 0.02), (1.0, 0.2), (0.97, 0.02), (0.5, 0.02)])
def test_what_is_no_faster_bound_runs_unbound(speed, noise):
    work = Work((0.03,), 3000, bound=speed, noise=noise)
    result = run(work)
    free = run_simulated(specs("a", 2), {"a": work}, NODE)
    assert dict(changes(result)) == {"a-0": False, "a-1": False}
    assert [note.data["bound"] for note in result.notes("bind")] == [False]
    assert result.makespan < 1.015 * free.makespan


def test_every_other_decision_is_as_it_would_be_without():
    plan = specs("a", 6, 2, widths=(1, 2))
    works = {"a": Work((0.03, 0.03), 300, cuts={1: (0.05,)})}

    def told(binds: bool) -> list[tuple[float, object, object]]:
        result = run_simulated(plan, works, NODE, binds=binds)
        return [
            (t, type(a), a.why if isinstance(a, protocol.Note) else a.name)
            for t, a in result.actions
            if not isinstance(a, Resize) and not (isinstance(a, protocol.Note) and a.what == "bind")
        ]

    assert told(True) == told(False)


def test_who_begins_to_share_cores_is_unbound_at_once():
    bound = run(Work((0.03, 0.03), 3000, bound=1.1), 1, 2, limit=60.0)
    assert bound.controller.view("a-0").bound
    fewer = protocol.Capacity((Node("n0", 1000, 0),), checkpoints=True, binds=True)
    actions = bound.controller.handle(protocol.CapacityChanged(60.1, fewer))
    assert [a.shares["a-0"].bound for a in actions if isinstance(a, Resize)] == [False]


def test_what_is_measured_while_bound_tells_nothing_of_the_rate_before_it_is_decided():
    plan = specs("a", 2, 2, widths=(1, 2))
    works = {"a": Work((0.02, 0.02), 3000, bound=0.5, cuts={1: (0.03,)})}
    whole = run_simulated(plan, works, NODE, binds=True)
    decided = next(t for t, a in whole.actions if isinstance(a, protocol.Note) and a.what == "bind")
    until = run_simulated(plan, works, NODE, binds=True, limit=decided + 0.05)
    assert words(until)
    rates = until.controller._state.shapes["a on 1"].rates
    assert list(rates.values()) == pytest.approx([1 / 0.03] * 2, rel=0.05)


def test_an_executor_that_refuses_is_asked_once():
    result = run(Work((0.03,), 1500, bound=1.1), count=1, faults=[Fault(1.0, "refuse", "", 8.0)])
    assert changes(result)[0] == ("a-0", True)
    assert sum(bound for _, bound in changes(result)) == 1
    assert words(result) == ["a: unbound: no room on the node"]
    assert not result.notes("hold")


def test_one_that_ends_as_it_is_to_be_bound_says_nothing_of_the_others():
    work = Work((0.03, 0.03), 1500, bound=1.1)
    alone = run(work, ranks=2).actions
    first = next(
        t
        for t, one in alone
        if isinstance(one, Resize) and any(share.bound for share in one.shares.values())
    )
    faults = [Fault(first - 0.05, "refuse", "", 0.1), Fault(first + 0.1, "fail", "a-0")]
    result = run(work, ranks=2, faults=faults)
    assert changes(result)[0] == ("a-0", True)
    assert "unbound" not in " ".join(words(result))
    assert words(result)[0].startswith("a: bound to cores: ")


def test_more_ranks_than_cores_are_never_bound():
    assert changes(run(Work((0.02,) * 4, 500, bound=1.1), ranks=4)) == []


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_rarely_looks_like_a_gain_and_a_gain_is_found(seed):
    chance = random.Random(seed)

    def decided(gain: float, noise: float) -> bool | None:
        binding = Binding()
        while binding.bound is None and len(binding.gains) < MOST_PAIRS:
            binding.add(1.0, gain * chance.lognormvariate(0.0, noise), 0.8)
        return binding.bound

    assert sum(decided(1.0, 0.03) is True for _ in range(200)) < 20
    assert sum(decided(1.1, 0.02) is True for _ in range(200)) > 190
    assert not any(decided(0.95, 0.01) for _ in range(200))


def test_what_becomes_slower_while_bound_is_unbound():
    binding = Binding()
    for _ in range(LEAST_PAIRS):
        binding.add(1.0, 1.1, 0.8)
    assert binding.bound
    assert binding.add(1.0, 0.3, 0.8)
    assert binding.closed
    assert "0.30 of its rate" in binding.why


def test_a_log_replays_to_the_same_and_says_what_was_decided(tmp_path):
    path, plan, work = tmp_path / "events.jsonl", specs("a", 2), Work((0.03,), 3000, bound=1.1)
    capacity = protocol.Capacity(tuple(NODE), checkpoints=True, binds=True)
    with eventlog.Log.create(path, eventlog.header(plan, capacity, Settings().plain())) as log:
        run_simulated(plan, {"a": work}, NODE, binds=True, log=log)
    assert replay(path) is None
    (line,) = summarise(tell(*eventlog.read(path))).bound
    assert line.startswith("a: bound to cores: ")
