# SPDX-License-Identifier: LGPL-3.0-or-later
"""Phases B and D, resize and watch fairness; and what makes no progress.

Inputs: the state. Outputs: requests that follow the measured load, larger shares for those
that are too slow, roll-backs, and the end of those that hang.

Invariants: requests change only by more than `Settings.hysteresis`; after a larger share, or
a roll-back, a new window is measured before anything else is done about it.
"""

from __future__ import annotations

from dovetail.controller import settings
from dovetail.controller.baseline import Alone
from dovetail.controller.baseline_run import complete
from dovetail.controller.simulation import Simulation
from dovetail.controller.state import State
from dovetail.controller.trial import measured, next_policy, rollback
from dovetail.core.protocol import WaitPolicy

GUARD = 1.0
"""Seconds between two looks for what hangs: limits are a minute and more."""


def guard(state: State) -> None:
    """End simulations that have made no progress for much longer than usual."""
    if state.now < state.guard_at:
        return
    state.guard_at = state.now + GUARD
    for sim in list(state.active.values()):
        if sim.paused:
            continue
        limit = _patience(state, sim)
        idle = state.now - max(sim.progress_at, sim.thawed_at)
        if limit is None or idle <= limit:
            continue
        what = "no iteration" if sim.state == "running" else "no first iteration"
        why = f"hung: {what} for {idle:.0f} s, the limit is {limit:.0f} s"
        state.note("fail", f"{sim.spec.name} is ended, {why}", name=sim.spec.name, idle=idle)
        state.stop(sim, why)


def _patience(state: State, sim: Simulation) -> float | None:
    s, family = state.settings, state.family(sim)
    if sim.state == "running":
        rate = state.baseline(sim)
        usual = 1.0 / rate if rate > 0.0 else _usual(state, sim)
        return max(s.stall, s.stall_iterations * usual)
    if family.silent or sim.useful is None:
        return None  # nothing tells a program that publishes nothing from one that hangs
    if family.startup is not None:
        return max(s.stall, s.start_factor * family.startup)
    return s.start_limit


def _usual(state: State, sim: Simulation) -> float:
    """Seconds per iteration so far, start included; before any profile."""
    return (sim.progress_at - sim.launched_at) / max(1, sim.iterations)


def watch(state: State) -> None:
    """Keep every simulation within its budget, and the mix worth its while."""
    if state.profiling is not None or not state.settled():
        return
    sims = list(state.active.values())
    for sim in sims:
        _warn_of_deadline(state, sim)
    # Whose ranks have cores to themselves cannot be helped by anybody's share.
    if len(sims) < 2 or state.own_cores or state.knowledge.verdict(state.mix) != "good":
        return
    if any(sim.measured and _too_slow(state, sim) for sim in sims):
        return
    _still_pays(state)


def follow(state: State) -> None:
    """Keep up with work per iteration that changes as a simulation goes on."""
    if state.profiling is not None or not state.settled():
        return
    if len(state.active) == 1:
        _alone(state, *state.active.values())
    elif not state.own_cores:
        for sim in state.active.values():
            _packed(state, sim)


def _alone(state: State, sim: Simulation) -> None:
    """A simulation that runs alone shows its own baseline."""
    window, s = sim.meter.window(), state.settings
    profile = state.family(sim).profile
    if not (profile and window and sim.share and sim.share.wait == profile.wait):
        return
    if state.leaving or window.seconds < s.window or window.error > s.steady:
        return
    blocking = profile.wait.mode == "doorbell"
    loads = None
    if blocking or sim.spec.ranks <= state.cores:
        loads = sim.meter.loads("cpu" if blocking else "useful")
    sim.alone = Alone(window.rate, loads or sim.alone.loads or profile.loads)


def _packed(state: State, sim: Simulation) -> None:
    """CPU per iteration under blocking waits shows how the work of an iteration changes."""
    window, s = sim.meter.window(), state.settings
    profile = state.family(sim).profile
    if not (profile and window and sim.share and sim.share.wait.mode == "doorbell"):
        return
    if window.seconds < s.window or window.iterations < s.window_iterations:
        return
    cpu = sim.meter.loads("cpu")
    if cpu:
        if sim.alone.rate <= 0.0:
            sim.alone = Alone(profile.rate, profile.loads)
        sim.alone.follow(cpu, state.cores)


def _too_slow(state: State, sim: Simulation) -> bool:
    """Act on a simulation beyond its budget; True if something was done."""
    window = sim.meter.window()
    if window is None or not complete(state, window) or state.now < state.resize_after:
        return False
    baseline, budget = state.baseline(sim), state.budget(sim)
    slow = baseline / window.rate if baseline > 0.0 else 1.0
    if slow <= budget * (1.0 + state.settings.margin + 2.0 * window.error):
        return False
    why = f"{sim.spec.name} runs {slow:.2f} times slower than alone, its budget is {budget:.2f}"
    figures = {"name": sim.spec.name, "slowdown": slow, "budget": budget}
    if state.capacity.weights and sim.boost < state.settings.boost_limit:
        sim.boost = min(state.settings.boost_limit, sim.boost * state.settings.boost)
        state.note("resize", f"{why}: it gets a larger share", boost=sim.boost, **figures)
        state.replan = True
        state.restart_windows(state.active.values())
        return True
    if state.tolerated != state.mix:
        if sim.spec.deadline is None:
            outcome = state.knowledge.outcome(state.mix)
            outcome.verdict, outcome.why = "bad", why
        rollback(state, why, **figures)
        return True
    state.note_once(("slow", sim.spec.name), "hold", f"{why}; nothing helps", **figures)
    return False


def _warn_of_deadline(state: State, sim: Simulation) -> None:
    remaining = state.remaining(sim)
    if sim.warned or sim.spec.deadline is None or remaining is None:
        return
    late = state.t + remaining - sim.spec.deadline
    if late > 0.0:
        sim.warned = True
        state.note(
            "fail",
            f"{sim.spec.name} cannot meet its deadline: even alone it would be {late:.0f} s late",
            name=sim.spec.name,
            late=late,
        )


def _still_pays(state: State) -> None:
    """A mix that has stopped paying is taken apart."""
    sims = list(state.active.values())
    mix = state.mix
    if mix == state.tolerated or not all(sim.measured for sim in sims):
        return
    windows = [sim.meter.window() for sim in sims]
    whole = [w for w in windows if w is not None]
    if len(whole) < len(sims) or not all(complete(state, w) for w in whole):
        return
    if not all(state.baseline(sim) > 0.0 for sim in sims):
        return
    now = measured(state, sims, whole)
    if now.throughput + 2.0 * now.error >= 1.0 - state.settings.margin:
        return
    outcome = state.knowledge.outcome(mix)
    outcome.verdict = "bad"
    outcome.why = f"{len(sims)} at once now do only {now.throughput:.2f} times the work of one"
    rollback(state, outcome.why, throughput=now.throughput, error=now.error)


# --- shares ---


def settle(state: State) -> None:
    """Bring wait policies and requests to what they should be."""
    if state.profiling is None:
        _waits(state)
    if state.replan or (state.now >= state.replan_at and not _being_judged(state)):
        _requests(state)


def _being_judged(state: State) -> bool:
    """A resize would spoil the measurement that is under way."""
    if state.profiling is not None:
        return True
    shared = len(state.active) > 1 and not state.own_cores
    return shared and not state.knowledge.verdict(state.mix)


def _waits(state: State) -> None:
    if not state.active:
        return
    wait = _wanted(state)
    sims = [sim for sim in state.active.values() if sim.share is None or sim.share.wait != wait]
    for sim in sims:
        if sim.share is None or state.now >= state.resize_after:
            state.share(sim, f"wait policy {wait.mode} for {len(state.active)} at once", wait=wait)
    if sims and not state.own_cores and state.now >= state.resize_after:
        state.restart_windows(state.active.values())


def _wanted(state: State) -> WaitPolicy:
    if state.own_cores:
        return settings.OFF
    if len(state.active) == 1:
        (sim,) = state.active.values()
        profile = state.family(sim).profile
        return profile.wait if profile else settings.OFF
    return next_policy(state, state.mix)


def _requests(state: State) -> None:
    fresh = any(sim.share is None for sim in state.active.values())
    if state.now < state.resize_after and not fresh:
        return
    state.replan = False
    state.replan_at = state.now + state.settings.replan
    sims = [*state.active.values(), *state.frozen.values()]
    if len(state.active) == 1:
        sims[0].boost = 1.0
    needs = [
        _needs(state, sim) if sim.spec.name in state.active else [1.0] * sim.spec.ranks
        for sim in sims
    ]
    wanted = settings.fit_requests(needs, state.capacity)
    pairs = list(zip(sims, wanted))
    moved = [
        (sim, new)
        for sim, new in pairs
        if sim.share is None or settings.differ(sim.share.requests, new, state.settings.hysteresis)
    ]
    stays = {sim.spec.name: sim.share.requests for sim in sims if sim.share}
    stays.update({sim.spec.name: new for sim, new in moved})
    if sum(map(sum, stays.values())) > state.capacity.cpu:  # what barely changes must fit as well
        moved = [(sim, new) for sim, new in pairs if not sim.share or sim.share.requests != new]
    _send(state, moved)


def _send(state: State, moved: list[tuple[Simulation, tuple[int, ...]]]) -> None:
    up = [(sim, new) for sim, new in moved if sim.share is not None and sim.state != "preparing"]
    for sim, new in moved:
        state.share(sim, "requests follow the measured load", requests=new)
    if up:
        first = up[0][0]
        more = f" and {len(up) - 1} more" if len(up) > 1 else ""
        state.note(
            "resize",
            f"the requests of {first.spec.name}{more} follow the load: {sum(up[0][1])}m",
            names=[sim.spec.name for sim, _ in up],
            total=[sum(new) for _, new in up],
        )


def _needs(state: State, sim: Simulation) -> list[float]:
    """Millicores that each rank would use alone, times the boost.

    They are the family's, so that equal simulations get equal requests, unless the loads of
    this one have been seen to differ.
    """
    needs = settings.rank_needs(sim.spec, state.family(sim).profile)
    rate, loads = sim.alone.rate, sim.alone.loads
    window = sim.meter.window()
    if state.own_cores and window and window.iterations >= state.settings.window_iterations:
        rate, loads = window.rate, sim.meter.loads("useful") or ()
    if rate > 0.0 and len(loads) == len(needs) and state.family(sim).profile:
        own = [min(1000.0, 1000.0 * load * rate) for load in loads]
        if settings.differ(needs, own, state.settings.hysteresis):
            needs = own
    return [need * sim.boost for need in needs]
