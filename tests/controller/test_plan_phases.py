# SPDX-License-Identifier: LGPL-3.0-or-later
"""In the phases of its plan a simulation has the plan's requests, changed while it runs."""

from __future__ import annotations

import pytest
from dovetail.core import eventlog, protocol
from dovetail.core.protocol import Launch, Node, PlanPhase, Resize, Spec
from dovetail.executors.simulated.executor import Work
from dovetail.report import build_history, plan_phases
from dovetail.run.simulate import run_simulated

pytestmark = pytest.mark.unit

PHASES = (
    PlanPhase(40, (500, 500), 2.0),
    PlanPhase(120, (250, 1000), 3.0),
    PlanPhase(0, (250, 1000), 2.0),
)


def spec(name: str, **more) -> Spec:
    return Spec(name, name, "case", 2, (1.0, 1.0), ("run",), **more)


@pytest.mark.parametrize(
    ("phase", "iterations", "residual", "over"),
    [
        (PlanPhase(40, (1,)), 39, 1e-9, False),
        (PlanPhase(40, (1,)), 40, None, True),
        (PlanPhase(0, (1,), residual=1e-3), 9999, None, False),
        (PlanPhase(0, (1,), residual=1e-3), 9999, 2e-3, False),
        (PlanPhase(0, (1,), residual=1e-3), 1, 1e-3, True),
        (PlanPhase(40, (1,), residual=1e-3), 1, 1e-4, True),
        (PlanPhase(40, (1,), residual=1e-3), 40, 1.0, True),
        (PlanPhase(0, (1,)), 9999, 0.0, False),
    ],
)
def test_a_phase_is_over_by_iterations_or_by_the_residual(phase, iterations, residual, over):
    assert phase.over(iterations, residual) is over


def test_requests_and_limits_are_the_phases_own_and_not_the_loads(tmp_path):
    specs, node = [spec("a", phases=PHASES)], Node("n", 2000, 0)
    head = eventlog.header(specs, protocol.Capacity((node,)), {"warmup": 3.0, "jump": 60.0})
    with eventlog.Log.create(tmp_path / "log", head) as log:
        result = run_simulated(specs, {"a": Work((0.01, 0.05), 200)}, [node], log=log)
    launch = next(a for _, a in result.actions if isinstance(a, Launch))
    assert (launch.share.requests, launch.share.limit) == ((500, 500), 2.0)
    resizes = [a for _, a in result.actions if isinstance(a, Resize)]
    changed = [(one.shares["a"].requests, one.shares["a"].limit) for one in resizes]
    assert changed == [((250, 1000), 3.0), ((250, 1000), 2.0)], "the last changes its limit alone"
    notes = result.notes("phase")
    assert [note.data["phase"] for note in notes] == [2, 3]
    for note, until in zip(notes, (40, 120)):
        assert until <= note.data["iterations"] < until + 40, "within a second or two"

    header, entries = eventlog.read(tmp_path / "log")
    (track,) = build_history.tell(header, entries).tracks
    one, two, three = plan_phases.figures(track, result.makespan)
    assert (one.requests, two.requests, three.limit) == ((500, 500), (250, 1000), 2.0)
    assert one.iterations + two.iterations + three.iterations == 200
    assert (one.end_s, two.end_s) == (two.start_s, three.start_s)
    assert two.seconds == pytest.approx(0.05, rel=0.2)


def test_phases_of_one_shrink_with_the_needs_of_all_to_what_there_is():
    specs = [spec("a", phases=(PlanPhase(0, (1500, 1500)),)), spec("b")]
    work = {"a": Work((0.05, 0.05), 300), "b": Work((0.05, 0.05), 300)}
    result = run_simulated(specs, work, [Node("n", 2000, 0)])
    launch = next(a for _, a in result.actions if isinstance(a, Launch))
    assert launch.share.requests == (1000, 1000), "in proportion, as many as there are"


def test_one_that_goes_on_from_a_checkpoint_is_in_the_phase_of_its_iterations():
    from dovetail.controller.controller import Controller

    one = spec("a", phases=PHASES)
    controller = Controller([one], protocol.Capacity((Node("n", 2000, 0),)))
    controller.handle(protocol.Tick(0.0))
    controller.handle(protocol.Started(1.0, "a", iterations=150))
    sample = protocol.Ranks(*[(150, 150)] + [(2.0, 2.0)] * 4 + [(1, 1)])
    told = controller.handle(protocol.Sampled(2.0, "a", sample))
    told += controller.handle(protocol.Tick(3.0))
    (note,) = [one for one in told if isinstance(one, protocol.Note) and one.what == "phase"]
    assert note.data["phase"] == 3
