# SPDX-License-Identifier: LGPL-3.0-or-later
"""Phase A, profile: the first simulation of each family alone.

Inputs: the state with fresh samples. Outputs: a `Profile` for the family, and on the way the
freezing and thawing of the others.

Invariants: one profile at a time; whatever ends it, the paused simulations go on.
"""

from __future__ import annotations

from dovetail.controller import settings
from dovetail.controller.baseline import Alone
from dovetail.controller.meter import Window
from dovetail.controller.settings import Profile
from dovetail.controller.simulation import Family, Simulation
from dovetail.controller.state import State
from dovetail.core.protocol import WaitPolicy

DISTURBED = 0.1
"""Share of a spinning rank's CPU that others take, from which a profile is not to be trusted."""


def complete(state: State, window: Window | None) -> bool:
    """True if a window has settled, or is as long as a window may become."""
    s = state.settings
    if window is None:
        return False
    if window.seconds >= s.window and window.iterations >= s.window_iterations:
        if window.error <= s.steady:
            return True
    elif window.iterations < 3:
        return False
    return state.now - state.since >= s.window * s.window_limit


def profile(state: State) -> None:
    """Begin, go on with, or end the profile of a family."""
    if state.profiling is not None:
        sim = state.active.get(state.profiling)
        if sim is None:
            end(state)
        else:
            _measure(state, sim)
    unknown = any(not (f.profile and f.profile.alone) for f in state.families.values())
    if state.profiling is None and unknown:
        fresh = next((sim for sim in state.active.values() if _due(state, sim)), None)
        if fresh is not None:
            _begin(state, fresh)


def _due(state: State, sim: Simulation) -> bool:
    """True if its family has no profile, or one that was taken in company and it is alone now."""
    profile = state.family(sim).profile
    better = profile is not None and not profile.alone and len(state.active) == 1
    return sim.state == "running" and (profile is None or better)


def _begin(state: State, sim: Simulation) -> None:
    state.profiling = sim.spec.name
    state.since = state.now
    state.family(sim).trials.clear()
    others = [other for other in state.active.values() if other is not sim]
    if others and (state.own_cores or not state.capacity.suspend):
        return
    for other in others:
        other.paused = True
        state.share(other, f"let {sim.spec.name} run alone for its profile", suspended=True)
    if others:
        state.note(
            "profile",
            f"{len(others)} simulations stand still while {sim.spec.name} is profiled",
            name=sim.spec.name,
        )
    if others or (sim.share and sim.share.wait != settings.OFF):
        state.share(sim, "run alone for the profile", wait=settings.OFF)
        state.restart_windows([sim])


def _measure(state: State, sim: Simulation) -> None:
    window = sim.meter.window()
    if not complete(state, window) or window is None or sim.share is None:
        return
    family = state.family(sim)
    _record(family, sim, window, sim.share.wait)
    todo = [p for p in _options(state, sim) if p not in family.trials]
    if todo and _may_wait_differently(state, sim):
        state.share(sim, "measure another way of waiting", wait=todo[0])
        state.restart_windows([sim])
        return
    conclude(state, sim)
    end(state)


def _may_wait_differently(state: State, sim: Simulation) -> bool:
    remaining = state.remaining(sim)
    return state.now >= state.resize_after and (
        remaining is None or remaining > 2 * state.settings.window
    )


def _options(state: State, sim: Simulation) -> tuple[WaitPolicy, ...]:
    return settings.candidates(sim.spec.ranks, 1, state.cores)


def _record(family: Family, sim: Simulation, window: Window, wait: WaitPolicy) -> None:
    useful, cpu = sim.meter.loads("useful"), sim.meter.loads("cpu")
    family.trials[wait] = (window, useful or (), cpu or ())


def finished_early(state: State, sim: Simulation) -> None:
    """A simulation ended before its profile was complete: take what there is."""
    window = sim.meter.window()
    family = state.family(sim)
    if family.profile is None and sim.share is not None and window and window.iterations >= 3:
        _record(family, sim, window, sim.share.wait)
    if family.profile is None and family.trials and state.cores > 0:
        conclude(state, sim)


def conclude(state: State, sim: Simulation) -> None:
    """Make the family's profile from its trials."""
    family = state.family(sim)
    wait, (window, _, _) = max(family.trials.items(), key=lambda item: item[1][0].rate)
    loads = _loads(state, sim, wait)
    need = min(sum(min(1.0, load * window.rate) for load in loads), state.cores)
    alone = len(state.active) <= 1 or state.own_cores or state.capacity.suspend
    if family.profile is not None:  # what rests on the one taken in company is wrong
        state.knowledge.forget(sim.spec.family)
        family.packed, sim.alone = None, Alone()
    startup = family.startup or 0.0
    family.profile = Profile(
        window.rate, window.error, loads, wait, need, sim.memory, startup, alone
    )
    for other in state.active.values():
        if other.spec.family == sim.spec.family:
            state.hold(other)
    state.replan = True
    _tell(state, sim, family.profile, window.iterations)


def _loads(state: State, sim: Simulation, wait: WaitPolicy) -> tuple[float, ...]:
    """Seconds of work per iteration and rank, from the trial that shows them best.

    Spinning ranks show their load as time outside MPI; where ranks share cores that time also
    counts waiting for a core, and CPU time under blocking waits is the load.
    """
    trials = state.family(sim).trials
    window, loads, cpu = trials[wait]
    if sim.spec.ranks > state.cores and settings.DOORBELL in trials:
        loads = trials[settings.DOORBELL][2]
    elif wait.mode == "doorbell":
        loads = cpu
    return tuple(max(load, 1e-9) for load in loads) or (1.0 / window.rate,) * sim.spec.ranks


def _lost(state: State, sim: Simulation) -> float:
    """Share of its ranks' CPU that others took: a rank that spins uses all it can get."""
    window, _, cpu = state.family(sim).trials.get(settings.OFF, (None, (), ()))
    if window is None or not cpu or sim.spec.ranks > state.cores:
        return 0.0
    return max(0.0, 1.0 - sum(cpu) * window.rate / sim.spec.ranks)


def _tell(state: State, sim: Simulation, profile: Profile, iterations: int) -> None:
    beside = "" if profile.alone else "; it did not run alone, so the rate is too low"
    lost = _lost(state, sim)
    if profile.alone and lost > DISTURBED:
        beside = f"; other programs took {lost:.0%} of its CPU, so the rate is too low"
    unsteady = "" if profile.error <= state.settings.steady else "; the rate did not settle"
    heaviest = max(profile.loads)
    state.note(
        "profile",
        f"{sim.spec.family}: {profile.rate:.3g} iterations/s alone, needs {profile.need:.2f} of "
        f"{state.cores:g} cores{beside}{unsteady}",
        family=sim.spec.family,
        name=sim.spec.name,
        rate=profile.rate,
        error=profile.error,
        iterations=iterations,
        need=profile.need,
        cores=state.cores,
        load=[load / heaviest for load in profile.loads],
        wait=profile.wait.mode,
        memory=profile.memory,
        lost=lost,
    )


def end(state: State) -> None:
    """Let those that stood still go on."""
    state.profiling = None
    for sim in state.active.values():
        if sim.paused:
            sim.paused = False
            sim.progress_at = sim.thawed_at = state.now
            state.share(sim, "the profile is done", suspended=False)
    state.regime()
