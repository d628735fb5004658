# SPDX-License-Identifier: LGPL-3.0-or-later
"""Phase C, pack: put what runs at once on trial; keep it, or take the newest back.

Inputs: the state. Outputs: verdicts on co-scheduled sets, and those taken back, with notes that
say why.

Invariants: a set is judged once, by measured throughput and slowdowns; no work is thrown away
but that of a young simulation that cannot be suspended.
"""

from __future__ import annotations

import math

from dovetail.controller.knowledge import CoScheduled, Measure, Outcome, TrialVerdict
from dovetail.controller.meter import Window
from dovetail.controller.prediction import learn, learn_needs, predicted, spun_need, to_beat
from dovetail.controller.simulation import Shape, Simulation
from dovetail.controller.state import AT_ONCE, State
from dovetail.controller.wait_policies import next_policy
from dovetail.controller.work import dearer
from dovetail.core.protocol import Cause, WaitPolicy


def judge(state: State) -> None:
    """Measure what runs at once if that is not known; keep it or take the newest back."""
    sims = list(state.active.values())
    if len(sims) < 2 or state.own_cores or state.profiling:
        return
    sims.sort(key=lambda sim: sim.shape)
    running = state.running
    outcome = state.knowledge.outcome(running)
    if (
        outcome.verdict is TrialVerdict.BAD
        and running != state.tolerated
        and state.now >= state.resize_after
    ):
        rollback(state, outcome.why)
        return
    judged = outcome.verdict is not TrialVerdict.OPEN
    if judged or not all(sim.measured for sim in sims) or not state.settled():
        return
    wait = next_policy(state, running)
    if any(sim.share is None or sim.share.wait != wait for sim in sims):
        return  # `shares.settle` asks for it, or a refusal keeps it away for a while
    windows = [sim.meter.window() for sim in sims]
    if not _enough(state, running, sims, windows):
        return
    measure = measured(state, sims, [w for w in windows if w is not None])
    _record(state, running, sims, wait, measure)
    if next_policy(state, running) in outcome.measures:
        _conclude(state, running, sims, outcome)
    else:
        state.restart_windows(sims)


def _enough(
    state: State, running: CoScheduled, sims: list[Simulation], windows: list[Window | None]
) -> bool:
    """All windows are complete, or long enough for a clear answer, or half done and hopeless."""
    whole = [w for w in windows if w is not None]
    if len(whole) < len(sims) or not all(state.baseline(sim) > 0.0 for sim in sims):
        return False
    if all(state.complete(w) for w in whole):
        return True
    s, before = state.settings, to_beat(state, running)
    if any(w.seconds < s.window / 2 or w.iterations < s.window_iterations / 2 for w in whole):
        return False
    now = measured(state, sims, whole)
    if all(w.seconds >= s.window and w.iterations >= s.window_iterations for w in whole):
        return abs(now.throughput - s.kept_gain * before) > 3 * now.error
    return now.throughput + 2 * now.error < s.hopeless * before


def measured(state: State, sims: list[Simulation], windows: list[Window]) -> Measure:
    """Throughput in simulations alone, its absolute error, and each slowdown.

    What a measure errs by as such is no chance, so that one simulation's does not cancel another's.
    Work that seems to be more than the cores can do shows that a baseline was too low.
    """
    slow, total, square, own = [], 0.0, 0.0, 0.0
    speeds = [window.rate / state.baseline(sim) for sim, window in zip(sims, windows)]
    busy = sum(
        speed * spun_need(state, sim.shape) for sim, speed in zip(sims, speeds) if sim.by_work
    )
    for sim, window, speed in zip(sims, windows, speeds):
        if sim.by_work and busy > state.cores:
            speed *= state.cores / busy
        total += speed
        square += (speed * window.error) ** 2
        own += speed * state.error(sim)
        slow.append(1.0 / speed)
    return Measure(total, math.hypot(square**0.5, own), tuple(slow))


def _record(
    state: State, running: CoScheduled, sims: list[Simulation], wait: WaitPolicy, measure: Measure
) -> None:
    reference = to_beat(state, running)
    outcome = state.knowledge.outcome(running)
    before = predicted(state, running)
    outcome.measures[wait] = measure
    state.lost += max(0.0, reference - measure.throughput) * (state.now - state.window_began)
    state.note(
        "policy",
        f"{len(sims)} at once with wait policy {wait.mode}: {measure.throughput:.2f} times one "
        f"alone{by_work(sims)}, against {reference:.2f} without the newest",
        mix=[[name, count] for name, count in running],
        wait=wait.mode,
        throughput=measure.throughput,
        error=measure.error,
        measures=sorted({sim.measure for sim in sims}),
        slowdowns=list(measure.slowdowns),
        before=reference,
    )
    if wait.mode == "doorbell":
        learn_needs(state, sims)
    if outcome.best and outcome.best[0] == wait:
        learn(state, running, measure, before)


def _conclude(state: State, running: CoScheduled, sims: list[Simulation], outcome: Outcome) -> None:
    assert outcome.best is not None
    wait, best = outcome.best
    reference = to_beat(state, running)
    need = reference * state.settings.kept_gain
    over = [slow / state.budget(sim) for sim, slow in zip(sims, best.slowdowns)]
    figures = {
        "mix": [[name, count] for name, count in running],
        "wait": wait.mode,
        "throughput": best.throughput,
        "error": best.error,
        "measures": sorted({sim.measure for sim in sims}),
        "before": reference,
        "slowdowns": list(best.slowdowns),
    }
    if best.throughput < need or best.throughput - reference < best.error:
        outcome.conclude(
            TrialVerdict.BAD,
            f"{len(sims)} at once do {best.throughput:.2f} times the work of one alone"
            f"{by_work(sims)}, without the newest {reference:.2f}: it does not pay",
        )
    elif min(over) > 1.0 + state.settings.margin or max(over) > 1.25:
        outcome.conclude(
            TrialVerdict.BAD,
            f"{len(sims)} at once slow a simulation to {max(over):.2f} times its budget",
        )
    else:
        outcome.conclude(
            TrialVerdict.GOOD,
            f"{len(sims)} at once do {best.throughput:.2f} times the work of one alone"
            f"{by_work(sims)} ({reference:.2f} before), wait policy {wait.mode}",
        )
        state.note("keep", outcome.why, **figures)
        state.restart_windows(sims)
        return
    rollback(state, outcome.why, **figures)


def judge_ends(state: State, shape: Shape) -> None:
    """Take a verdict back that work gave if those that have ended since tell otherwise.

    CPU seconds do not tell whether what is shared besides cores, such as memory, makes the same
    work cost more of them; what equal simulations took in all does.
    """
    cost = dearer(shape.ends)
    for running, outcome in state.knowledge.outcomes.items():
        if [name for name, _ in running] != [shape.name] or outcome.best is None:
            continue
        best = outcome.best[1].throughput / cost
        if outcome.verdict is not TrialVerdict.GOOD or best >= to_beat(state, running):
            continue
        why = (
            f"the same work took {cost:.2f} times the CPU time or more beside others: "
            f"{running[0][1]} of {shape.name} at once do {best:.2f} times the work of one alone"
        )
        outcome.conclude(TrialVerdict.BAD, why)
        state.note("model", why, family=shape.spec.family, cost=cost, throughput=best)


def by_work(sims: list[Simulation]) -> str:
    """That CPU seconds tell the progress of some, in words; empty if of none."""
    return " by CPU time outside MPI" if any(sim.by_work for sim in sims) else ""


def rollback(state: State, why: str, **figures: object) -> None:
    """Take the newest admission back without losing its work where that can be done."""
    newest = list(state.active.values())[-1]
    name = newest.spec.name
    state.admit_after = state.now + state.settings.cooldown
    figures["name"] = name
    if state.capacity.suspend:
        state.note("rollback", f"{why}; {name} is suspended until there is room", **figures)
        state.suspend(newest, f"take {name} back")
    elif state.now - newest.resumed_at <= state.settings.young:
        state.note("rollback", f"{why}; {name} goes back to the queue", **figures)
        state.stop(newest, Cause.TAKEN_BACK, "taken back, to run again later", requeue=True)
    else:
        state.tolerated = state.running
        state.note("hold", f"{why}; {name} cannot be suspended and is too old to be run again")
        return
    state.requests_due = AT_ONCE
