# SPDX-License-Identifier: LGPL-3.0-or-later
"""The controller's answers to single events, and what holds in any run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dovetail.controller import trial, wait_policies, work
from dovetail.controller.controller import Controller
from dovetail.controller.knowledge import Measure, TrialVerdict
from dovetail.controller.meter import Meter
from dovetail.controller.settings import Settings
from dovetail.controller.simulation import Simulation, Stage
from dovetail.controller.state import State
from dovetail.core import eventlog, protocol
from dovetail.core.protocol import (
    Capacity,
    Cause,
    Checkpoint,
    Ended,
    Launch,
    Node,
    Note,
    Ranks,
    Requeued,
    Spec,
    Stop,
)
from dovetail.executors.simulated.executor import Fault, Work
from dovetail.run.resume import replay
from dovetail.run.simulate import run_simulated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.unit

GIB = 1 << 30
CAPACITY = Capacity((Node("n0", 2000, 8 * GIB),))
OVER = ("done", "failed", "not started")


def specs(count: int, **more) -> list[Spec]:
    return [Spec(f"a-{i}", "a", "case", 2, (1.0, 3.0), ("run",), **more) for i in range(count)]


def launches(actions) -> list[str]:
    return [action.name for action in actions if isinstance(action, Launch)]


def sample(t: float, name: str, k: int, seconds: float = 0.1) -> protocol.Sampled:
    """After k iterations of `seconds` each, loads 1:3."""
    stamp = 1.0 + k * seconds
    useful = (k * seconds / 3, k * seconds)
    ranks = Ranks((k, k), (stamp, stamp), useful, useful, (0.0, 0.0), (100, 100))
    return protocol.Sampled(t, name, ranks)


def running(controller: Controller, until: float = 1.9) -> float:
    """Bring the first simulation up to some iterations; returns the time."""
    controller.handle(protocol.Tick(0.0))
    controller.handle(protocol.Started(1.0, "a-0"))
    t, k = 1.0, 0
    while t < until:
        t, k = t + 0.1, k + 1
        controller.handle(sample(t, "a-0", k))
    return t


def test_the_first_event_starts_the_head_of_the_queue_and_nothing_else():
    assert launches(Controller(specs(3), CAPACITY).handle(protocol.Tick(0.0))) == ["a-0"]


def test_requests_before_a_profile_follow_the_weights():
    (launch,) = [
        a
        for a in Controller(specs(1), CAPACITY).handle(protocol.Tick(0.0))
        if isinstance(a, Launch)
    ]
    assert launch.share.requests == (333, 1000)
    assert launch.share.wait.mode == "off"


def test_requests_do_not_fall_where_other_programs_take_the_cores():
    controller = Controller(specs(1), CAPACITY)
    (launch,) = [a for a in controller.handle(protocol.Tick(0.0)) if isinstance(a, Launch)]
    controller.handle(protocol.Started(0.0, "a-0"))
    requests = [launch.share.requests]
    for k in range(1, 300):
        t = 0.4 * k  # of which both ranks, spinning inside MPI, have a core for a quarter
        cpu, useful, mpi = (0.1 * k, 0.1 * k), (0.04 * k, 0.12 * k), (0.36 * k, 0.28 * k)
        ranks = Ranks((k, k), (t, t), cpu, useful, mpi, (9, 9))
        for action in controller.handle(protocol.Sampled(t, "a-0", ranks)):
            if isinstance(action, protocol.Resize):
                requests.append(action.shares["a-0"].requests)
    assert requests[-1] == pytest.approx((333, 1000), rel=0.25), requests


def test_the_next_starts_in_the_same_breath_as_one_ends():
    controller = Controller(specs(2), CAPACITY)
    t = running(controller)
    assert launches(controller.handle(protocol.Finished(t, "a-0", Cause.DONE))) == ["a-1"]
    assert controller.view("a-0").state == "done"


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_trial_that_others_began_holds_each_to_its_own_budget(order):
    two = [replace(specs(1)[0], name=f, family=f, slowdown=s) for f, s in (("a", 1.2), ("b", 4.0))]
    state = State(two, CAPACITY, Settings(harm=0.0))
    for name in order:
        state.launch(state.sims[name], 2)
    for sim in state.active.values():
        sim.enter(Stage.RUNNING)
        sim.share = protocol.Share((500, 500), wait_policies.DOORBELL)
        sim.alone.rate = 10.0
        for k in range(40):  # at half its speed alone
            ranks = Ranks((k, k), (0.2 * k,) * 2, (k, k), (k, k), (0.0, 0.0), (9, 9))
            sim.meter.add(0.2 * k, ranks)
    outcome = state.knowledge.outcome(state.running)
    outcome.measures[wait_policies.YIELD] = Measure(1.24, 0.01, (1.1, 3.0))
    trial.judge(state)
    assert (outcome.verdict, outcome.best[0].mode) == (TrialVerdict.GOOD, "yield"), outcome.why


def test_an_empty_plan_is_finished_at_once():
    controller = Controller([], CAPACITY)
    assert controller.finished
    assert controller.handle(protocol.Tick(0.0)) == []


UNKNOWN = [
    protocol.Started(1.0, "who"),
    protocol.Finished(1.0, "who", Cause.DONE),
    protocol.Finished(1.0, "a-1", Cause.DONE),
    protocol.Started(1.0, "a-1"),
    protocol.Resized(1.0, ("who",), "no"),
    sample(1.0, "who", 3),
    sample(1.0, "a-1", 3),
]


@pytest.mark.parametrize("event", UNKNOWN, ids=lambda e: f"{type(e).__name__} {e}"[:40])
def test_events_about_who_does_not_run_are_ignored(event):
    controller = Controller(specs(2), CAPACITY)
    controller.handle(protocol.Tick(0.0))
    before = controller.views()
    controller.handle(event)
    assert controller.views() == before


def test_a_doubled_end_counts_once():
    controller = Controller(specs(2), CAPACITY)
    controller.handle(protocol.Tick(0.0))
    controller.handle(protocol.Finished(1.0, "a-0", Cause.FAILED, 1, "crashed"))
    controller.handle(protocol.Finished(1.1, "a-0", Cause.DONE))
    assert controller.view("a-0").state == "failed"
    assert controller.view("a-0").reason == "crashed"


def test_an_interrupt_stops_what_runs_and_starts_nothing_more():
    controller = Controller(specs(3), CAPACITY)
    running(controller)
    actions = controller.handle(protocol.Interrupted(3.0, "SIGINT"))
    assert [a.name for a in actions if isinstance(a, Stop)] == ["a-0"]
    assert not launches(
        controller.handle(protocol.Finished(3.1, "a-0", Cause.CANCELLED, 143, "stopped"))
    )
    assert [v.state for v in controller.views()] == ["failed", "not started", "not started"]
    assert controller.view("a-0").reason == "SIGINT"
    assert controller.finished
    assert not launches(controller.handle(protocol.Tick(4.0)))


def test_a_resume_after_an_interrupt_runs_what_was_interrupted_again():
    controller = Controller(specs(3), CAPACITY)
    t = running(controller)
    controller.handle(protocol.Finished(t, "a-0", Cause.DONE))
    controller.handle(protocol.Interrupted(3.0, "SIGINT"))
    controller.handle(protocol.Finished(3.1, "a-1", Cause.CANCELLED, 143, "stopped"))
    assert controller.finished
    assert launches(controller.resume(9.0, CAPACITY)) == ["a-1"]
    views = controller.views()
    assert [v.state for v in views] == ["done", "preparing", "queued"]
    assert [v.restarts for v in views] == [0, 1, 0]
    assert [v.reason for v in views] == [""] * 3


def test_one_that_ends_well_despite_an_interrupt_is_done():
    controller = Controller(specs(1), CAPACITY)
    running(controller)
    controller.handle(protocol.Interrupted(3.0, "SIGINT"))
    controller.handle(protocol.Finished(3.1, "a-0", Cause.DONE))
    assert controller.view("a-0").state == "done"


HERE = replace(CAPACITY, checkpoints=True)


def checkpoints(actions) -> list[str]:
    return [action.name for action in actions if isinstance(action, Checkpoint)]


def test_an_interrupt_may_stop_what_runs_at_checkpoints_from_which_a_resume_goes_on():
    controller = Controller(specs(3, checkpoint=True), HERE)
    t = running(controller)
    actions = controller.handle(protocol.Interrupted(t, "SIGTERM", within=60.0))
    assert checkpoints(actions) == ["a-0"]
    assert not any(isinstance(a, Stop) for a in actions)
    assert controller.view("a-0").state == "halting"
    done = controller.view("a-0").iterations + 1
    controller.handle(sample(t + 0.1, "a-0", done))
    actions = controller.handle(protocol.Finished(t + 0.2, "a-0", Cause.CHECKPOINTED))
    (end,) = [a for a in actions if isinstance(a, Ended)]
    assert (end.state, end.cause) == ("checkpointed", Cause.CHECKPOINTED)
    assert f"after {done} iterations: SIGTERM" in end.reason
    assert [v.state for v in controller.views()] == ["checkpointed", "not started", "not started"]
    assert controller.finished
    actions = controller.resume(t + 9.0, HERE)
    assert Requeued("a-0", Cause.CHECKPOINTED, end.reason) in actions
    (launch,) = [a for a in actions if isinstance(a, Launch)]
    assert (launch.name, launch.continued) == ("a-0", True)


def test_what_waits_with_a_checkpoint_as_a_resumed_run_is_ended_again_is_still_checkpointed():
    """It had no turn in the meantime; "not started" would say that its work is lost."""
    wide = replace(HERE, nodes=(Node("n0", 4000, 8 * GIB),))
    controller = Controller(specs(2, checkpoint=True), wide)
    t = running(controller)
    controller.handle(protocol.Started(t, "a-1"))
    controller.handle(sample(t + 0.1, "a-1", 7))
    controller.handle(protocol.Interrupted(t + 0.2, "SIGTERM", within=60.0))
    for name in ("a-0", "a-1"):
        controller.handle(protocol.Finished(t + 0.3, name, Cause.CHECKPOINTED))
    controller.resume(t + 9.0, HERE)
    assert controller.view("a-1").state == "queued"
    actions = controller.handle(protocol.Interrupted(t + 9.1, "SIGTERM", within=60.0))
    why = "stopped at a checkpoint after 7 iterations: SIGTERM"
    assert Ended("a-1", "checkpointed", Cause.CHECKPOINTED, why) in actions
    controller.handle(protocol.Finished(t + 9.2, "a-0", Cause.CHECKPOINTED))
    actions = controller.resume(t + 20.0, wide)
    restarted = next(a for a in actions if isinstance(a, Launch))
    assert (restarted.name, restarted.continued) == ("a-0", True)
    assert controller.view("a-1").restarts == 0


CANNOT = {
    "its plan does not allow it": (specs(1), HERE, 60.0),
    "the executor cannot": (specs(1, checkpoint=True), CAPACITY, 60.0),
    "there is no time": (specs(1, checkpoint=True), HERE, 0.0),
}


@pytest.mark.parametrize("why", CANNOT)
def test_what_cannot_stop_at_a_checkpoint_is_stopped_at_once(why):
    sims, capacity, within = CANNOT[why]
    controller = Controller(sims, capacity)
    t = running(controller)
    actions = controller.handle(protocol.Interrupted(t, "SIGTERM", within=within))
    assert not checkpoints(actions)
    assert [a.cause for a in actions if isinstance(a, Stop)] == [Cause.INTERRUPTED]


def test_what_has_not_begun_is_stopped_at_once():
    controller = Controller(specs(1, checkpoint=True), HERE)
    controller.handle(protocol.Tick(0.0))
    actions = controller.handle(protocol.Interrupted(0.5, "SIGTERM", within=60.0))
    assert [a.name for a in actions if isinstance(a, Stop)] == ["a-0"]
    assert not checkpoints(actions)


def test_what_does_not_stop_at_a_checkpoint_in_time_is_ended():
    controller = Controller(specs(1, checkpoint=True), HERE)
    t = running(controller)
    controller.handle(protocol.Interrupted(t, "SIGTERM", within=60.0))
    for later in range(1, 60):
        assert not controller.handle(protocol.Tick(t + later))
    (stop,) = controller.handle(protocol.Tick(t + 60.5))
    assert (stop.cause, stop.requeue) == (Cause.INTERRUPTED, False)
    controller.handle(protocol.Finished(t + 61, "a-0", Cause.INTERRUPTED, 143, "stopped"))
    assert controller.view("a-0").state == "failed"
    assert "did not stop at a checkpoint in time" in controller.view("a-0").reason
    assert [a.continued for a in controller.resume(t + 70, HERE) if isinstance(a, Launch)] == [True]


def test_what_has_stopped_at_a_checkpoint_as_its_time_was_over_goes_on_when_resumed():
    controller = Controller(specs(1, checkpoint=True), HERE)
    t = running(controller)
    controller.handle(protocol.Interrupted(t, "SIGTERM", within=1.0))
    assert [a for a in controller.handle(protocol.Tick(t + 1.5)) if isinstance(a, Stop)]
    controller.handle(protocol.Finished(t + 2.0, "a-0", Cause.CHECKPOINTED))
    assert controller.view("a-0").state == "checkpointed"
    assert launches(controller.resume(t + 9.0, HERE)) == ["a-0"]
    assert controller.view("a-0").restarts == 0


HALTED = {
    "done": (protocol.Finished(5.0, "a-0", Cause.DONE), []),
    "failed": (protocol.Finished(5.0, "a-0", Cause.FAILED, 1, "disk full"), ["a-0"]),
}


@pytest.mark.parametrize("state", HALTED)
def test_one_that_ends_otherwise_while_it_is_to_stop_at_a_checkpoint(state):
    event, again = HALTED[state]
    controller = Controller(specs(1, checkpoint=True), HERE)
    t = running(controller)
    controller.handle(protocol.Interrupted(t, "SIGTERM", within=60.0))
    controller.handle(event)
    assert controller.view("a-0").state == state
    assert event.reason in controller.view("a-0").reason
    assert launches(controller.resume(9.0, HERE)) == again


@pytest.mark.parametrize(
    ("application", "measure", "over"),
    [("lammps", "iterations", 4000), ("lammps", "periods", 9), ("generic", "iterations", 9)],
)
def test_what_is_over_is_in_the_unit_that_is_counted(application, measure, over):
    controller = Controller(specs(1, checkpoint=True, application=application), HERE)
    t = running(controller)
    last = sample(t, "a-0", 9)
    controller.handle(replace(last, ranks=replace(last.ranks, measure=measure)))
    controller.handle(protocol.Finished(t, "a-0", Cause.NODE_LOST, 1, "node lost"))
    assert controller.handle(protocol.Started(t, "a-0", 4000)) is not None
    assert controller.view("a-0").iterations == over


@pytest.mark.parametrize(("planned", "left"), [(0, 6.0), (80, 7.0)])
def test_what_is_left_is_known_from_the_case_that_was_prepared(planned, left):
    controller = Controller(specs(1, iterations=planned), HERE)
    controller.handle(protocol.Tick(0.0))
    controller.handle(protocol.Started(1.0, "a-0", 0, 70))
    for k in range(1, 11):
        controller.handle(sample(1.0 + 0.1 * k, "a-0", k))
    assert controller.view("a-0").left == pytest.approx(left)


def test_a_run_that_dies_while_one_is_to_stop_at_a_checkpoint_goes_on_with_it():
    controller = Controller(specs(1, checkpoint=True), HERE)
    t = running(controller)
    controller.handle(protocol.Interrupted(t, "SIGTERM", within=60.0))
    (launch,) = [a for a in controller.resume(9.0, HERE) if isinstance(a, Launch)]
    assert launch.continued


# --- Stopped at a checkpoint to be cut anew ---


def to_be_cut_anew() -> tuple[Controller, float]:
    """One that is asked to stop at a checkpoint, since its ranks are loaded 1:3; and the time."""
    plan = specs(1, checkpoint=True, application="openfoam", iterations=900)
    controller = Controller(plan, HERE)
    t = running(controller)
    k = controller.view("a-0").iterations
    while controller.view("a-0").state == "running":
        t, k = t + 0.1, k + 1
        assert t < 100.0, "it is never asked"
        asked = controller.handle(sample(t, "a-0", k)) + controller.handle(protocol.Tick(t))
    assert checkpoints(asked) == ["a-0"]
    return controller, t


def test_a_run_that_is_ended_asks_nobody_twice_to_stop_at_a_checkpoint():
    controller, t = to_be_cut_anew()
    actions = controller.handle(protocol.Interrupted(t, "SIGTERM", within=60.0))
    assert not [a for a in actions if isinstance(a, (Checkpoint, Stop))]
    controller.handle(protocol.Finished(t + 0.2, "a-0", Cause.CHECKPOINTED))
    assert controller.view("a-0").state == "checkpointed"


def test_one_that_has_stopped_at_a_checkpoint_goes_on_though_it_seemed_to_hang():
    """What it wrote was copied for so long; the executor does not obey a stop then."""
    controller, t = to_be_cut_anew()
    stops: list[Stop] = []
    while not stops:
        t += 1.0
        stops = [a for a in controller.handle(protocol.Tick(t)) if isinstance(a, Stop)]
    assert stops[0].cause is Cause.HUNG
    assert stops[0].why.startswith("hung: no iteration for 30")
    actions = controller.handle(protocol.Finished(t, "a-0", Cause.CHECKPOINTED))
    (launch,) = [a for a in actions if isinstance(a, Launch)]
    assert launch.continued
    assert controller.view("a-0").restarts == 0


def test_one_that_was_cancelled_as_it_stopped_at_a_checkpoint_does_not_go_on():
    controller, t = to_be_cut_anew()
    assert [a.cause for a in controller.handle(protocol.Unwanted(t, "a-0", "cancelled"))
            if isinstance(a, Stop)] == [Cause.CANCELLED]  # fmt: skip
    actions = controller.handle(protocol.Finished(t + 0.1, "a-0", Cause.CHECKPOINTED))
    assert launches(actions) == []
    assert controller.view("a-0").state == "failed"
    assert controller.view("a-0").reason == "cancelled"


def test_one_that_was_to_run_again_later_does_not_once_it_is_cancelled():
    controller = Controller(specs(2), CAPACITY)
    t, state = running(controller), controller._state
    state.stop(state.sims["a-0"], Cause.TAKEN_BACK, "for this test", requeue=True)
    state.flush()
    unwanted = protocol.Unwanted(t, "a-0", "cancelled")
    told = [a for _ in range(2) for a in controller.handle(unwanted) if isinstance(a, Stop)]
    assert told == [Stop("a-0", Cause.CANCELLED, "cancelled")]
    actions = controller.handle(protocol.Finished(t, "a-0", Cause.TAKEN_BACK, 143, "stopped"))
    assert Ended("a-0", "failed", Cause.CANCELLED, "cancelled") in actions
    assert controller.view("a-0").restarts == 0


def test_one_that_was_to_run_again_later_does_so_in_the_run_that_goes_on_with_an_interrupted_one():
    controller = Controller(specs(2), CAPACITY)
    t, state = running(controller), controller._state
    state.stop(state.sims["a-0"], Cause.TAKEN_BACK, "for this test", requeue=True)
    state.flush()
    controller.handle(protocol.Interrupted(t, "SIGINT"))
    actions = controller.handle(protocol.Finished(t, "a-0", Cause.TAKEN_BACK, 143, "stopped"))
    assert Ended("a-0", "failed", Cause.INTERRUPTED, "SIGINT") in actions
    controller.handle(protocol.Finished(t, "a-1", Cause.INTERRUPTED, 143, "SIGINT"))
    assert "a-0" in launches(controller.resume(t + 9.0, CAPACITY))


def test_one_that_is_cancelled_as_an_interrupted_run_ends_is_over_for_a_resumed_one():
    controller = Controller(specs(2), CAPACITY)
    t = running(controller)
    controller.handle(protocol.Interrupted(t, "SIGINT"))
    unwanted = protocol.Unwanted(t, "a-0", "cancelled")
    told = [a for _ in range(2) for a in controller.handle(unwanted) if isinstance(a, Stop)]
    assert told == [Stop("a-0", Cause.CANCELLED, "cancelled")]
    actions = controller.handle(protocol.Finished(t, "a-0", Cause.INTERRUPTED, 143, "SIGINT"))
    assert Ended("a-0", "failed", Cause.CANCELLED, "cancelled") in actions
    controller.handle(protocol.Finished(t, "a-1", Cause.INTERRUPTED, 143, "SIGINT"))
    assert launches(controller.resume(t + 9.0, CAPACITY)) == ["a-1"]


def test_one_that_was_cancelled_is_over_when_the_run_is_killed_and_resumed():
    controller = Controller(specs(2), CAPACITY)
    t = running(controller)
    controller.handle(protocol.Unwanted(t, "a-0", "cancelled"))
    actions = controller.resume(t + 9.0, CAPACITY)
    assert Ended("a-0", "failed", Cause.CANCELLED, "cancelled") in actions
    assert launches(actions) == ["a-1"]
    assert (controller.view("a-0").state, controller.view("a-0").restarts) == ("failed", 0)


def test_one_that_waits_in_the_queue_may_be_cancelled_and_others_go_on():
    controller = Controller(specs(3), CAPACITY)
    t = running(controller)
    actions = controller.handle(protocol.Unwanted(t, "a-1", "cancelled"))
    assert Ended("a-1", "failed", Cause.CANCELLED, "cancelled") in actions
    actions = controller.handle(protocol.Finished(t + 0.1, "a-0", Cause.DONE))
    assert launches(actions) == ["a-2"]
    controller.handle(protocol.Finished(t + 0.2, "a-2", Cause.DONE))
    assert controller.finished
    assert controller.resume(t + 9.0, CAPACITY) is not None
    assert controller.view("a-1").state == "failed"


def test_what_the_end_of_a_run_was_to_stop_goes_on_if_it_stops_after_a_resume():
    controller = Controller(specs(1, checkpoint=True), HERE)
    t = running(controller)
    controller.handle(protocol.Interrupted(t, "SIGTERM", within=60.0))
    assert checkpoints(controller.resume(t + 1.0, HERE, ["a-0"])) == ["a-0"]
    actions = controller.handle(protocol.Finished(t + 2.0, "a-0", Cause.CHECKPOINTED))
    assert [a.continued for a in actions if isinstance(a, Launch)] == [True]


@pytest.mark.parametrize("alive", [["a-0"], []])
def test_after_a_kill_it_is_asked_again_if_it_runs_and_else_begins_with_what_it_wrote(alive):
    controller, t = to_be_cut_anew()
    actions = controller.resume(t + 1.0, HERE, alive)
    assert checkpoints(actions) == alive
    if alive:
        actions = controller.handle(protocol.Finished(t + 2.0, "a-0", Cause.CHECKPOINTED))
    (launch,) = [a for a in actions if isinstance(a, Launch)]
    assert launch.continued
    assert controller.spec("a-0").recut
    assert controller.view("a-0").restarts == (0 if alive else 1)


def test_what_the_end_of_a_run_stopped_at_a_checkpoint_did_not_fail_and_may_stop_once_more():
    controller = Controller(specs(1, checkpoint=True), HERE)
    t = running(controller)
    controller.handle(protocol.Interrupted(t, "SIGTERM", within=60.0))
    controller.handle(protocol.Finished(t, "a-0", Cause.CHECKPOINTED))
    (launch,) = [a for a in controller.resume(t + 1.0, HERE) if isinstance(a, Launch)]
    assert launch.continued
    assert controller.view("a-0").restarts == 0


JUMPS = [
    ("a day ahead", 86400.0),
    ("back before the start", -100.0),
    ("an hour ahead", 3600.0),
    ("just past the limit", 61.0),
]


@pytest.mark.parametrize(("what", "jump"), JUMPS, ids=[j[0] for j in JUMPS])
def test_a_clock_jump_stops_nobody_and_spoils_no_rate(what, jump):
    controller = Controller(specs(2), CAPACITY)
    t = running(controller)
    k = controller.view("a-0").iterations
    taken = []
    for step in range(1, 31):
        now = t + jump + 0.1 * step
        ranks = sample(now, "a-0", k + step).ranks
        ranks = replace(ranks, stamp=tuple(s + jump for s in ranks.stamp))
        actions = controller.handle(protocol.Sampled(now, "a-0", ranks))
        assert not [a for a in actions if isinstance(a, Stop)]
        taken += [a.data for a in actions if isinstance(a, Note) and a.what == "profile"]
    (profile,) = taken
    assert profile["rate"] == pytest.approx(10.0, rel=0.02)
    assert profile["need"] == pytest.approx(4 / 3, rel=0.05)


HANGS = [
    ("a fast one after five minutes", 0.1, 299.0, 302.0),
    ("a slow one after fifty usual iterations", 8.0, 399.0, 420.0),
]


@pytest.mark.parametrize(("what", "seconds", "patient", "ended"), HANGS, ids=[h[0] for h in HANGS])
def test_it_ends_what_hangs(what, seconds, patient, ended):
    controller = Controller(specs(1), CAPACITY)
    controller.handle(protocol.Tick(0.0))
    controller.handle(protocol.Started(1.0, "a-0"))
    t = 1.0
    for k in range(1, 41):
        t = 1.0 + k * seconds
        controller.handle(sample(t, "a-0", k, seconds))
    quiet, stops = t, []
    while t < quiet + ended and not stops:
        t += 1.0
        stops = [a for a in controller.handle(protocol.Tick(t)) if isinstance(a, Stop)]
    assert patient <= t - quiet <= ended
    assert "hung" in stops[0].why
    controller.handle(protocol.Finished(t, "a-0", Cause.CANCELLED, 143, "stopped by us"))
    assert controller.view("a-0").state == "failed"
    assert controller.view("a-0").reason.startswith("hung")


def test_restarted_ranks_do_not_count_backwards():
    controller = Controller(specs(1), CAPACITY)
    t = running(controller)
    controller.handle(sample(t + 0.1, "a-0", 1))
    assert controller.view("a-0").iterations == 1


def test_a_lost_node_puts_the_simulation_back_into_the_queue_at_most_three_times():
    controller = Controller(specs(1), CAPACITY)
    t, states = 0.0, []
    controller.handle(protocol.Tick(t))
    for _ in range(4):
        t += 1.0
        controller.handle(protocol.Finished(t, "a-0", Cause.NODE_LOST, 1, "node lost: n0"))
        states.append(controller.view("a-0").state)
    assert states == ["preparing", "preparing", "preparing", "failed"]
    assert controller.view("a-0").restarts == 3


def test_one_that_ends_well_though_it_was_to_end_has_all_its_iterations():
    controller = Controller(specs(2), CAPACITY)
    t = running(controller)
    controller._state.stop(controller._state.sims["a-0"], Cause.SHORT_OF_MEMORY, "", requeue=True)
    controller.handle(sample(t + 0.1, "a-0", 50))
    controller.handle(protocol.Finished(t + 0.2, "a-0", Cause.DONE))
    assert (controller.view("a-0").state, controller.view("a-0").iterations) == ("done", 50)
    assert controller._state.families["a"].length == 50, "which others of its entry go by"


def test_without_any_node_the_rest_is_given_up_after_a_while_and_not_before():
    controller = Controller(specs(2), CAPACITY)
    controller.handle(protocol.Tick(0.0))
    controller.handle(protocol.CapacityChanged(1.0, Capacity(())))
    controller.handle(protocol.Finished(1.0, "a-0", Cause.NODE_LOST, 1, "node lost: n0"))
    for t in range(2, 60):
        controller.handle(protocol.Tick(float(t)))
    assert not controller.finished
    for t in range(60, 70):
        controller.handle(protocol.Tick(float(t)))
    assert [v.state for v in controller.views()] == ["not started"] * 2


def test_what_fits_on_a_node_that_is_away_for_a_while_waits_for_it():
    one, two = (Capacity(tuple(Node(f"n{i}", 2000, 100) for i in range(n))) for n in (1, 2))
    controller = Controller(specs(2, memory=150), two)
    controller.handle(protocol.Tick(0.0))
    controller.handle(protocol.CapacityChanged(30.0, one))
    actions = controller.handle(protocol.Finished(31.0, "a-0", Cause.NODE_LOST, 1, "node lost"))
    actions += controller.handle(protocol.Tick(85.0))
    assert not [a for a in actions if isinstance(a, (Ended, Launch))]
    (told,) = (a.why for a in actions if isinstance(a, protocol.Note) and "it waits" in a.why)
    assert told.startswith("a-0 needs 150 bytes of memory, there are 100: it waits for more, 60 s")
    assert launches(controller.handle(protocol.CapacityChanged(86.0, two))) == ["a-0"]
    controller.handle(protocol.CapacityChanged(90.0, one))
    controller.handle(protocol.Finished(91.0, "a-0", Cause.NODE_LOST, 1, "node lost"))
    actions = [a for t in range(92, 160) for a in controller.handle(protocol.Tick(float(t)))]
    ended = [a.cause for a in actions if isinstance(a, Ended)]
    assert ended == [Cause.TOO_LARGE] * 2


def test_all_that_can_never_run_is_given_up_at_once():
    controller = Controller(specs(100, memory=9 * GIB), CAPACITY)
    controller.handle(protocol.Tick(0.0))
    assert controller.finished
    assert {v.state for v in controller.views()} == {"not started"}


@pytest.mark.parametrize("widths", [(), (1, 2)], ids=["fixed", "moldable"])
def test_one_that_is_told_to_end_is_among_the_most_that_may_run(widths):
    controller = Controller(specs(3, widths=widths), CAPACITY, Settings(max_packed=1))
    controller.handle(protocol.Tick(0.0))
    actions = controller.handle(protocol.Unwanted(1.0, "a-0", "cancelled"))
    actions += controller.handle(protocol.Tick(2.0))
    assert not launches(actions), "it still runs"
    assert launches(controller.handle(protocol.Finished(3.0, "a-0", Cause.CANCELLED))) == ["a-1"]


@pytest.mark.parametrize("widths", [(), (1,)], ids=["fixed", "moldable"])
def test_no_more_run_than_the_place_can_have(widths):
    plan = [replace(one, ranks=1, weights=(1.0,)) for one in specs(4, widths=widths)]
    few = Capacity((Node("n0", 8000, 8 * GIB),), simulations=2)
    controller = Controller(plan, few)
    assert launches(controller.handle(protocol.Tick(0.0))) == ["a-0", "a-1"]
    assert launches(controller.handle(protocol.Finished(3.0, "a-0", Cause.DONE))) == ["a-2"]


def test_the_place_has_suspended_ones_too_and_they_can_go_on():
    state = State(specs(3), replace(CAPACITY, simulations=2), Settings())
    for name in ("a-0", "a-1"):
        state.launch(state.sims[name], 2)
    state.suspend(state.sims["a-1"], "room is needed")
    assert state.full
    state.suspend(state.sims["a-0"], "room is needed")
    assert not state.full


def test_nodes_that_come_back_are_used():
    controller = Controller(specs(2), CAPACITY)
    controller.handle(protocol.Tick(0.0))
    controller.handle(protocol.CapacityChanged(1.0, Capacity(())))
    controller.handle(protocol.Finished(1.0, "a-0", Cause.NODE_LOST, 1, "node lost: n0"))
    assert launches(controller.handle(protocol.CapacityChanged(20.0, CAPACITY))) == ["a-0"]


def test_two_simulations_of_one_name_are_a_mistake():
    with pytest.raises(ValueError, match="a-0"):
        Controller([*specs(1), *specs(1)], CAPACITY)


def test_every_figure_of_a_note_is_plain_json():
    result = run_simulated(
        specs(4),
        {"a": Work((0.01, 0.03), 200)},
        CAPACITY.nodes,
        faults=[Fault(6.0, "stall", "a-1")],
    )
    notes = [a for _, a in result.actions if isinstance(a, Note)]
    kinds = {"profile", "resize", "admit", "keep", "policy", "hold", "model", "fail"}
    assert {note.what for note in notes} <= kinds | {"rollback"}
    for note in notes:
        assert eventlog.decode(eventlog.encode(note)) == note
        assert note.why


# --- whatever happens ---

families = st.lists(
    st.fixed_dictionaries(
        {
            "count": st.integers(1, 4),
            "loads": st.lists(st.sampled_from([0.004, 0.01, 0.03]), min_size=1, max_size=4),
            "iterations": st.integers(1, 250),
            "noise": st.sampled_from([0.0, 0.05]),
            "drift": st.sampled_from([1.0, 0.5, 2.0]),
            "interference": st.sampled_from([0.0, 0.0, 0.2]),
            "publishes": st.sampled_from([True, True, True, False]),
            "memory": st.sampled_from([0, 1, 3, 5, 9]),
            "slowdown": st.sampled_from([1.0, 1.3, 2.0, 4.0]),
            "deadline": st.sampled_from([None, None, 5.0, 30.0]),
            "honest": st.booleans(),
        }
    ),
    min_size=1,
    max_size=3,
)
faults = st.lists(
    st.builds(
        Fault,
        st.floats(0.0, 30.0),
        st.sampled_from(["death", "stall", "refuse", "delay", "clock", "fail"]),
        st.sampled_from(["f0-0", "f0-1", "f1-0", "f2-2"]),
        st.sampled_from([-4.0, 0.5, 3.0, 20.0, 7200.0]),
    ),
    max_size=2,
)


def plan(drawn) -> tuple[list[Spec], dict[str, Work]]:
    specs, works = [], {}
    for i, f in enumerate(drawn):
        loads = tuple(f["loads"])
        works[f"f{i}"] = Work(
            loads,
            f["iterations"],
            f["noise"],
            publishes=f["publishes"],
            drift=f["drift"],
            interference=f["interference"],
        )
        weights = tuple(load / 0.004 for load in loads) if f["honest"] else (1.0,) * len(loads)
        for k in range(f["count"]):
            specs.append(
                Spec(
                    f"f{i}-{k}",
                    f"f{i}",
                    "case",
                    len(loads),
                    weights,
                    ("run",),
                    slowdown=f["slowdown"],
                    memory=f["memory"] * GIB,
                    deadline=f["deadline"],
                )
            )
    return specs, works


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(families, faults, st.booleans(), st.booleans(), st.sampled_from([1000, 2000, 4000]))
def test_any_run_ends_and_keeps_its_promises(tmp_path, drawn, faults, weights, suspend, cpu):
    queue, works = plan(drawn)
    # Nothing tells a program that publishes nothing from one that hangs: it has no end.
    silent = {name for name, work in works.items() if not work.publishes}
    faults = [one for one in faults if one.kind != "stall" or one.name[:2] not in silent]
    nodes = [Node("n0", cpu, 8 * GIB)]
    capacity = Capacity(tuple(nodes), weights, suspend)
    path = tmp_path / "events.jsonl"
    with eventlog.Log.create(path, eventlog.header(queue, capacity, Settings().plain())) as log:
        result = run_simulated(
            queue, works, nodes, 1, faults, weights=weights, suspend=suspend, log=log, limit=4000.0
        )
    assert result.ended
    views = result.controller.views()
    assert len(views) == len(queue)
    assert all(view.state in OVER for view in views)
    assert result.memory <= 8 * GIB
    started = [a.name for _, a in result.actions if isinstance(a, Launch)]
    assert len(started) == len(set(started)) + sum(view.restarts for view in views)
    for _, action in result.actions:
        if isinstance(action, protocol.Resize):
            for name, share in action.shares.items():
                assert sum(share.requests) <= cpu, name
                assert min(share.requests) >= 1, name
    if not faults:
        # No harm: windows of short simulations and waits between steps of 0.1 s allowed for.
        assert result.makespan <= 1.10 * result.sequential + 0.3 * len(queue) + 2.0
    assert replay(path) is None


# --- stages ---


def test_one_that_was_asked_to_stop_is_terminating_until_it_has_ended():
    controller = Controller(specs(1), CAPACITY)
    t = running(controller)
    controller.handle(protocol.Unwanted(t, "a-0", "cancelled"))
    assert controller.view("a-0").state == "terminating"
    assert controller.status().counts == {"terminating": 1}
    assert not controller.finished
    controller.handle(protocol.Finished(t + 1.0, "a-0", Cause.CANCELLED, 143, "stopped"))
    assert controller.view("a-0").state == "failed"
    assert controller.finished


def test_no_profile_is_taken_beside_one_that_is_yet_to_end():
    controller = Controller(specs(2), CAPACITY)
    controller.handle(protocol.Tick(0.0))
    actions = controller.handle(protocol.Unwanted(0.5, "a-0", "cancelled"))
    actions += controller.handle(protocol.Tick(0.6))
    assert launches(actions) == ["a-1"]
    controller.handle(protocol.Started(1.0, "a-1"))

    def profiled(first: int, last: int) -> bool:
        done = [controller.handle(sample(1.0 + k / 10, "a-1", k)) for k in range(first, last)]
        return any(isinstance(a, Note) and "rate" in a.data for some in done for a in some)

    assert not profiled(1, 200)
    controller.handle(protocol.Finished(21.0, "a-0", Cause.CANCELLED, 143, "stopped"))
    assert profiled(200, 300)


def test_whose_ranks_are_open_starts_on_no_core_of_one_that_is_yet_to_end():
    plan = [replace(one.on(1), widths=(1, 2)) for one in specs(3)]
    controller = Controller(plan, CAPACITY)
    assert launches(controller.handle(protocol.Tick(0.0))) == ["a-0", "a-1"]
    actions = controller.handle(protocol.Unwanted(0.5, "a-0", "cancelled"))
    actions += [a for t in range(1, 9) for a in controller.handle(protocol.Tick(float(t)))]
    assert not launches(actions)
    ended = protocol.Finished(9.0, "a-0", Cause.CANCELLED, 143, "stopped")
    assert launches(controller.handle(ended)) == ["a-2"]


def test_a_stage_follows_only_from_those_that_lead_to_it():
    sim = Simulation(specs(1)[0], 0, Meter(3), work.Work(3))
    with pytest.raises(AssertionError, match="a-0"):
        sim.enter(Stage.RUNNING)
    sim.enter(Stage.PREPARING)
    sim.enter(Stage.PAUSED)
    sim.go_on()
    assert sim.stage is Stage.PREPARING
    sim.started = 1.0
    sim.enter(Stage.SUSPENDED)
    sim.go_on()
    assert sim.stage is Stage.STARTING


def test_what_was_refused_to_go_on_is_not_asked_at_once_again():
    """As where a suspended one's node is lost, and its end is yet to come."""
    controller = Controller(specs(1), CAPACITY)
    t, state = running(controller), controller._state
    state.suspend(state.sims["a-0"], "for this test")
    asked = []
    for _ in range(20):
        for action in controller.handle(protocol.Tick(t)):
            if isinstance(action, protocol.Resize):
                asked.append(action.shares["a-0"].suspended)
        why = "" if asked[-1] else "a-0: runs no more"
        controller.handle(protocol.Resized(t, ("a-0",), why))
        t += 0.01
    assert asked.count(False) == 1


def test_what_waits_for_the_memory_of_a_suspended_one_is_not_given_up_as_too_large():
    plan = [Spec(name, name, "case", 2, (1.0, 1.0), ("run",), memory=6 * GIB) for name in "bq"]
    controller = Controller(plan, CAPACITY)
    controller.handle(protocol.Tick(0.0))
    controller.handle(protocol.Started(0.0, "b"))
    state = controller._state
    state.suspend(state.sims["b"], "for this test")
    state.flush()
    actions = controller.handle(protocol.Resized(1.0, ("b",)))
    actions += controller.handle(protocol.Resized(1.1, ("b",), "b: no room on its node"))
    for k in range(1, 30):
        actions += controller.handle(protocol.Tick(1.1 + 0.5 * k))
    assert not [a for a in actions if isinstance(a, (Ended, Launch))]
    asked = [a.shares["b"].suspended for a in actions if isinstance(a, protocol.Resize)]
    assert asked == [False, False], "once more when the refusal is some seconds old"
    assert launches(controller.handle(protocol.Finished(20.0, "b", Cause.DONE))) == ["q"]


def test_memory_that_was_only_seen_keeps_nobody_from_running_alone():
    small = Capacity((Node("n0", 2000, 150),))
    controller = Controller(specs(2), small)
    t = running(controller)  # and each of its ranks took 100 bytes
    assert launches(controller.handle(protocol.Finished(t, "a-0", Cause.DONE))) == ["a-1"]
    end, _ = Controller(specs(1, memory=151), small).handle(protocol.Tick(0.0))
    assert end.cause is Cause.TOO_LARGE
    assert end.reason == "needs 151 bytes of memory, there are 150"


@pytest.mark.parametrize(("first", "second"), [("", "no room"), ("no room", ""), ("no", "no")])
def test_each_of_two_resizes_on_their_way_has_its_own_answer(first, second):
    """As on a cluster, where one takes seconds: what was refused was never done."""
    controller = Controller(specs(1), CAPACITY)
    t, state = running(controller), controller._state
    state.suspend(state.sims["a-0"], "for this test")
    state.flush()
    asked = [a for a in controller.handle(protocol.Tick(t)) if isinstance(a, protocol.Resize)]
    assert [one.shares["a-0"].suspended for one in asked] == [False], "nothing else runs"
    controller.handle(protocol.Resized(t, ("a-0",), first))
    controller.handle(protocol.Resized(t, ("a-0",), second))
    suspended = second != "" and first == ""
    assert (controller.view("a-0").state == "suspended") is suspended
    assert controller.running()["a-0"].suspended is suspended


def test_one_that_is_suspended_is_so_though_an_earlier_resize_of_it_is_refused():
    controller = Controller(specs(1), CAPACITY)
    running(controller)
    state, sim = controller._state, controller._state.sims["a-0"]
    state.share(sim, "for this test", requests=(400, 400))
    state.flush()
    state.suspend(sim, "for this test")
    state.flush()
    state.resized(["a-0"], "no room")
    state.resized(["a-0"], "")
    assert sim.stage is Stage.SUSPENDED
    assert sim.share.suspended


def test_what_never_started_begins_anew_as_what_its_case_came_with_is_no_checkpoint():
    controller = Controller(specs(1, checkpoint=True), HERE)
    (launch,) = [a for a in controller.handle(protocol.Tick(0.0)) if isinstance(a, Launch)]
    continued = [launch.continued]
    for started in (False, True, False):  # it is lost as it is prepared, as it runs, and once more
        if started:
            controller.handle(protocol.Started(1.0, "a-0"))
        lost = protocol.Finished(1.0, "a-0", Cause.NODE_LOST, 1, "node lost")
        continued += [a.continued for a in controller.handle(lost) if isinstance(a, Launch)]
    assert continued == [False, False, True, True]
