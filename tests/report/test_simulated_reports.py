# SPDX-License-Identifier: LGPL-3.0-or-later
"""The report of runs that the real controller made, with the simulated executor."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dovetail.controller.controller import Controller
from dovetail.controller.settings import Settings
from dovetail.core import eventlog, protocol
from dovetail.executors.simulated.executor import Fault, Work
from dovetail.report import summary
from dovetail.report.html import page
from dovetail.run.simulate import run_simulated

pytestmark = [pytest.mark.unit, pytest.mark.slow]

NODE = protocol.Node("node", 2000, 8 << 30)
UNEVEN = Work((0.01, 0.03), iterations=600)
EVEN = Work((0.02, 0.02), iterations=600)


def plan(family, count, ranks=2, **more):
    return [
        protocol.Spec(f"{family}-{n}", family, "case", ranks, (1.0,) * ranks, ("true",), **more)
        for n in range(1, count + 1)
    ]


def simulate(directory, specs, works, faults=(), **more):
    head = eventlog.header(specs, protocol.Capacity((NODE,)), Settings().plain())
    with eventlog.Log.create(directory / "events.jsonl", head) as log:
        result = run_simulated(specs, works, [NODE], seed=1, faults=faults, log=log, **more)
    return result, *summary.load(directory)


ANY = replace(EVEN, iterations=2000, cuts={1: (0.04,)})
OPEN = {"widths": (1, 2), "checkpoint": True}
LAST = plan("l", 1, iterations=2000, **OPEN) + plan("s", 1, iterations=20, **OPEN)
CASES = {
    "uneven ranks pack": (plan("u", 4), {"u": UNEVEN}, ()),
    "even ranks do not": (plan("e", 4), {"e": EVEN}, ()),
    "both": (plan("u", 4) + plan("e", 3), {"u": UNEVEN, "e": EVEN}, ()),
    "a rank dies": (plan("u", 4), {"u": UNEVEN}, (Fault(12.0, "death", "u-1"),)),
    "one fails": (plan("u", 3), {"u": UNEVEN}, (Fault(5.0, "fail", "u-1"),)),
    "one hangs": (plan("u", 3), {"u": UNEVEN}, (Fault(8.0, "stall", "u-1"),)),
    "resizes are refused": (plan("u", 4), {"u": UNEVEN}, (Fault(1.0, "refuse", seconds=30),)),
    "resizes are late": (plan("u", 4), {"u": UNEVEN}, (Fault(1.0, "delay", seconds=1.5),)),
    "the clock jumps ahead": (plan("u", 4), {"u": UNEVEN}, (Fault(9.0, "clock", seconds=9999),)),
    "the clock jumps back": (plan("u", 4), {"u": UNEVEN}, (Fault(9.0, "clock", seconds=-500),)),
    "the node is lost": (plan("u", 3), {"u": UNEVEN}, (Fault(9.0, "node", "node"),)),
    "one is too large": (plan("u", 2) + plan("b", 1, memory=1 << 40), {"u": UNEVEN, "b": EVEN}, ()),
    "the last one is widened": (LAST, {"l": ANY, "s": replace(ANY, iterations=20)}, ()),
    "nothing is published": (plan("s", 2), {"s": Work((0.1, 0.1), 50, publishes=False)}, ()),
    "only work is seen": (plan("w", 3), {"w": Work((0.02, 1.0), 20, tells=False)}, ()),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("suspend", [True, False], ids=["with freezing", "without"])
def test_the_log_tells_the_same_story_as_the_controller(tmp_path, case, suspend):
    specs, works, faults = case
    result, found, history = simulate(tmp_path, specs, works, faults, suspend=suspend)
    for view, one in zip(result.controller.views(), found.simulations):
        assert (one.name, one.state, one.iterations) == (view.name, view.state, view.iterations)
        if one.state != "not started":
            assert one.restarts == view.restarts
        asked = [a.name for _, a in result.actions if isinstance(a, protocol.Checkpoint)]
        assert one.checkpoints == asked.count(one.name)
        assert one.checkpoints == (case is CASES["the last one is widened"] and one.name == "l-1")
        assert one.reason == view.reason
    assert found.n_max == max((note.data["n"] for note in result.notes("admit")), default=0)
    assert found.rollbacks == len(result.notes("rollback"))
    assert history.end == pytest.approx(result.makespan, abs=61)
    assert page(found, history)


def test_after_an_interrupt_the_report_says_what_the_controller_said(tmp_path):
    """One whose pod was lost was in the queue again, and so did not fail."""
    specs, why = plan("u", 3), "interrupted by SIGINT"
    capacity = protocol.Capacity((NODE,))
    controller = Controller(specs, capacity)
    head = eventlog.header(specs, capacity, Settings().plain())
    with eventlog.Log.create(tmp_path / "events.jsonl", head) as log:
        for event in (
            protocol.Tick(0.0),
            protocol.Started(0.1, "u-1"),
            protocol.CapacityChanged(1.0, protocol.Capacity(())),
            protocol.Finished(2.0, "u-1", protocol.Cause.POD_LOST, 1, "pod lost: evicted"),
            protocol.Interrupted(3.0, why),
        ):
            for entry in (event, *controller.handle(event)):
                log.write(entry)
    found, _ = summary.load(tmp_path)
    assert [(one.state, one.reason) for one in found.simulations] == [("not started", why)] * 3
    assert [(one.state, one.reason) for one in controller.views()] == [("not started", why)] * 3


def test_the_figures_of_a_packed_queue_are_the_executors(tmp_path):
    result, found, _ = simulate(tmp_path, *CASES["uneven ranks pack"][:2])
    totals = found.totals
    assert totals.makespan_s.value == pytest.approx(result.makespan, rel=0.02)
    assert totals.sequential_s.value == pytest.approx(result.sequential, rel=0.03)
    assert totals.throughput_gain.value == pytest.approx(result.gain, rel=0.04)
    # The ranks need 0.01 and 0.03 s for each of 600 iterations of 4 simulations on 2 cores.
    assert totals.bound_s.value == pytest.approx(0.04 * 600 * 4 / 2, rel=0.06)
    best = max(found.families[0].points, key=lambda point: point.throughput)
    assert best.n > 1


def test_of_work_the_report_tells_what_its_trial_found(tmp_path):
    _, found, history = simulate(tmp_path, *CASES["only work is seen"][:2])
    assert {one.measure for one in found.simulations} == {"work"}
    assert "2 at once did" in found.totals.throughput_gain.how
    assert "2 at once did" in page(found, history)


def test_a_balanced_queue_is_said_not_to_pay(tmp_path):
    _, found, _ = simulate(tmp_path, *CASES["even ranks do not"][:2])
    assert found.totals.throughput_gain.value == pytest.approx(1.0, abs=0.06)
    assert "as long as one after the other" in found.verdict.words
