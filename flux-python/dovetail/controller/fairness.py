# SPDX-License-Identifier: LGPL-3.0-or-later
"""Phase D, fairness: every simulation within its budget, and what runs at once worth its while.

Inputs: the state. Outputs: larger shares for those that are too slow, another wait policy or a
roll-back where less comes of it than in the trial, and a word to the user whose deadline cannot be
met.

Invariants: after any of these a new window is measured before anything else is done about it.
"""

from __future__ import annotations

import math

from dovetail.controller import widths
from dovetail.controller.knowledge import Measure, TrialVerdict
from dovetail.controller.simulation import Family, Simulation
from dovetail.controller.state import AT_ONCE, State
from dovetail.controller.trial import measured, rollback
from dovetail.core import units
from dovetail.core.protocol import WaitPolicy


def keep_budgets(state: State) -> None:
    """Help whoever is slower than its budget allows, and take apart what no longer pays."""
    _tell_who_missed_its_deadline(state)
    if state.profiling or not state.settled():
        return
    sims = list(state.active.values())
    for sim in sims:
        _warn_of_deadline(state, sim)
    for family in state.families.values():
        _warn_who_waits(state, family)
    # Whose ranks have cores to themselves cannot be helped by anybody's share.
    if (
        len(sims) < 2
        or state.own_cores
        or state.knowledge.verdict(state.running) is not TrialVerdict.GOOD
    ):
        return
    if _still_pays(state):
        any(sim.measured and _too_slow(state, sim) for sim in sims)


def _too_slow(state: State, sim: Simulation) -> bool:
    """Act on a simulation beyond its budget; True if something was done."""
    window = sim.meter.window()
    if window is None or not state.complete(window) or state.now < state.resize_after:
        return False
    baseline, budget = state.baseline(sim), state.budget(sim)
    slow = baseline / window.rate if baseline > 0.0 else 1.0
    errs = math.hypot(2.0 * window.error, state.error(sim))
    if slow <= budget * (1.0 + state.settings.margin + errs):
        return False
    why = f"{sim.spec.name} runs {slow:.2f} times slower than alone, its budget is {budget:.2f}"
    figures = {"name": sim.spec.name, "slowdown": slow, "budget": budget}
    if state.capacity.weights and sim.boost < state.settings.boost_limit:
        sim.boost = min(state.settings.boost_limit, sim.boost * state.settings.boost)
        state.note("resize", f"{why}: it gets a larger share", boost=sim.boost, **figures)
        state.requests_due = AT_ONCE
        state.restart_windows(state.active.values())
        return True
    if state.tolerated != state.running:
        if sim.spec.deadline is None:
            state.knowledge.outcome(state.running).conclude(TrialVerdict.BAD, why)
        rollback(state, why, **figures)
        return True
    state.note_once(("slow", sim.spec.name), "hold", f"{why}; nothing helps", **figures)
    return False


def _tell_who_missed_its_deadline(state: State) -> None:
    """Say so where it was not said before, since nobody knows how long such a simulation takes."""
    begun = [*state.active.values(), *state.suspended.values(), *state.terminating.values()]
    for family in state.families.values():
        deadline = family.spec.deadline
        if deadline is None or state.t <= deadline:
            continue
        sims = [sim for sim in begun if sim.spec.family == family.spec.family]
        sims += [state.sims[name] for _, name in sorted(family.queue)]
        names = [sim.spec.name for sim in sims if not sim.late_told]
        if not names:
            continue
        for name in names:
            state.sims[name].late_told = True
        who, its = names[0], "its deadline"
        if len(names) > 1:
            who, its = f"{len(names)} of {family.spec.family}", "their deadline"
        after = units.rounded(deadline)
        why = f"{who} did not meet {its}, {after} s after the start of the run"
        state.note("fail", why, names=names, late=state.t - deadline)


def _warn_of_deadline(state: State, sim: Simulation) -> None:
    remaining = state.remaining(sim)
    if sim.late_told or sim.spec.deadline is None or remaining is None:
        return
    late = state.t + remaining - sim.spec.deadline
    if late > 0.0:
        sim.late_told = True
        state.note(
            "fail",
            f"{sim.spec.name} cannot meet its deadline: even alone it would be {late:.0f} s late",
            name=sim.spec.name,
            late=late,
        )


def _warn_who_waits(state: State, family: Family) -> None:
    """The same of those of a plan entry that are still queued, all at once."""
    head = state.sims[family.queue[0][1]] if family.queue else None
    if head is None or head.late_told or head.spec.deadline is None:
        return
    least = _least_seconds(state, head)
    late = 0.0 if least is None else state.t + least - head.spec.deadline
    if late <= 0.0:
        return
    waiting = [state.sims[name] for _, name in sorted(family.queue)]
    names = [sim.spec.name for sim in waiting if not (sim.late_told or sim.continued)]
    for name in names:
        state.sims[name].late_told = True
    who, whose, they = f"{names[0]}, which waits,", "its", "it"
    if len(names) > 1:
        who, whose, they = f"{len(names)} of {family.spec.family} that wait", "their", "they"
    why = f"{who} cannot meet {whose} deadline: started now, {they} would be {late:.0f} s late"
    state.note("fail", why, names=names, late=late)


def _least_seconds(state: State, sim: Simulation) -> float | None:
    """What a queued one takes, on the ranks on which it is quickest; None if that is not known."""
    family = state.family(sim)
    if sim.continued:  # it may have less to do than others
        return None
    if len(family.spec.widths) < 2:
        return state.remaining(sim)
    if not any(shape.lasted or shape.rates for shape in family.shapes.values()):
        return None
    seconds = widths.seconds_on(state, family)
    return min(seconds[ranks] for ranks in widths.allowed(family))


def _still_pays(state: State) -> bool:
    """Whether what runs at once does what it did in its trial, as far as is known.

    If not, and not either from then on, ranks wait in another way where that did more, and what
    does not pay is taken apart.
    """
    sims, running = sorted(state.active.values(), key=lambda sim: sim.shape), state.running
    s = state.settings
    if running == state.tolerated or not all(sim.measured for sim in sims):
        return True
    windows = [sim.meter.window() for sim in sims]
    whole = [w for w in windows if w is not None]
    if len(whole) < len(sims) or not all(state.complete(w) for w in whole):
        return True
    if not all(state.baseline(sim) > 0.0 for sim in sims):
        return True
    now, outcome = measured(state, sims, whole), state.knowledge.outcome(running)
    waits = {sim.share.wait for sim in sims if sim.share}
    tried = outcome.best if outcome.best and waits == {outcome.best[0]} else None
    if not _doubtful(state, now, tried):
        outcome.doubted_at = None
        return True
    if outcome.doubted_at is None or outcome.doubted_at < state.regime_at:
        outcome.doubted_at = state.now
    since = [sim.meter.since(outcome.doubted_at) for sim in sims]
    latest = [
        w for w in since if w and w.seconds >= s.window and w.iterations >= s.window_iterations
    ]
    if len(latest) < len(sims) or not _doubtful(state, measured(state, sims, latest), tried):
        return True  # as where a file system has stood still for a moment
    told = f"{len(sims)} at once now do only {now.throughput:.2f} times the work of one"
    # Where a rank that yields runs beside another's heavy one it does not give way: whether that is
    # so the kernel decides anew with every start.
    if tried and _less(now, tried[1]):
        outcome.measures[tried[0]] = now
        best = outcome.best
        if best and best[0] != tried[0]:
            why = f"{told}, with wait policy {tried[0].mode}: {best[0].mode} was better"
            state.note("policy", why, wait=best[0].mode, throughput=now.throughput, error=now.error)
            state.restart_windows(sims)
            return False
    if _pays(state, now):
        return True
    outcome.conclude(TrialVerdict.BAD, told)
    rollback(state, told, throughput=now.throughput, error=now.error)
    return False


def _doubtful(state: State, now: Measure, tried: tuple[WaitPolicy, Measure] | None) -> bool:
    """Whether less is done than one alone would do, or than in the trial."""
    return not _pays(state, now) or (tried is not None and _less(now, tried[1]))


def _pays(state: State, now: Measure) -> bool:
    return now.throughput + 2.0 * now.error >= 1.0 - state.settings.margin


def _less(now: Measure, before: Measure) -> bool:
    """Whether a measurement is clearly below another."""
    return now.throughput + 2.0 * (now.error + before.error) < before.throughput
