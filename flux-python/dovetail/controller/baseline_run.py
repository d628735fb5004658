# SPDX-License-Identifier: LGPL-3.0-or-later
"""Phase A, profile: what simulations do alone.

The first simulation of each family is measured alone, in every way of waiting that may pay; the
others are suspended meanwhile. Where programs beside the run took its cores, it is measured again
once they have let go of them. Later on each simulation's own baseline follows its work, which
changes as a run goes on.

Inputs: the state with fresh samples. Outputs: a `Profile` for the family, `Simulation.alone`.

Invariants: one profile at a time; it is one taken alone only if no other simulation used its cores;
whatever ends it, the paused simulations go on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dovetail.controller import binding_trial
from dovetail.controller.baseline import Alone, Profile
from dovetail.controller.meter import Window, share_got
from dovetail.controller.simulation import Shape, Simulation, Stage
from dovetail.controller.state import AT_ONCE, State
from dovetail.controller.wait_policies import DOORBELL, OFF, candidates
from dovetail.controller.work import UNIT
from dovetail.core import units
from dovetail.core.protocol import WaitPolicy
from dovetail.core.taken_cpu import DISTURBED, PLENTY, missing, taken

_RUNS = (Stage.PREPARING, Stage.STARTING, Stage.RUNNING)


def measure(state: State) -> None:
    """Go on with profiles, and keep up with work per iteration that changes."""
    if state.profiling:
        sim = state.active.get(state.subject)
        if sim is None:
            end(state)
        elif _crowded(state, sim):
            _begin(state, sim)
        else:
            _measure(state, sim)
    unknown = any(not (f.profile and f.profile.alone) for f in state.shapes.values())
    if not state.profiling and unknown:
        fresh = next((sim for sim in state.active.values() if _due(state, sim)), None)
        if fresh is not None:
            _begin(state, fresh)
    if not state.profiling and state.settled():
        _follow(state)


def _due(state: State, sim: Simulation) -> bool:
    """True if its family has no profile, or one taken beside others and it is alone now."""
    profile = state.shape(sim).profile
    better = profile is not None and not profile.alone and len(state.active) == 1
    return sim.stage is Stage.RUNNING and (profile is None or better)


def _crowded(state: State, sim: Simulation) -> bool:
    """Whether others turn out to share its cores: it or they have more threads than was known."""
    runs = any(other.stage in _RUNS for other in state.active.values() if other is not sim)
    may = state.capacity.suspend and state.now >= state.resize_after
    return runs and may and not state.own_cores


def _beside(state: State, sim: Simulation) -> bool:
    """Whether others use its cores, as those do that are yet to end or to be suspended."""
    ending = state.terminating.values()
    if state.ranks + sum(other.cores for other in ending) <= state.cores:
        return False
    late = () if state.settled() else state.resizing.items()
    return (
        bool(ending)
        or any(o.stage is not Stage.PAUSED for o in state.active.values() if o is not sim)
        or any(not asked[0][0].suspended for name, asked in late if name != sim.spec.name)
    )


def _begin(state: State, sim: Simulation) -> None:
    state.begin_profile(sim)
    state.shape(sim).trials.clear()
    others = [other for other in state.active.values() if other is not sim and other.stage in _RUNS]
    if others and (state.own_cores or not state.capacity.suspend):
        return
    for other in others:
        state.pause(other, f"let {sim.spec.name} run alone for its profile")
    if others:
        state.note(
            "profile",
            f"{len(others)} simulations are suspended while {sim.spec.name} is profiled",
            name=sim.spec.name,
        )
    if others or (sim.share and sim.share.wait != OFF):
        state.share(sim, "run alone for the profile", wait=OFF)
        state.restart_windows([sim])


def _measure(state: State, sim: Simulation) -> None:
    if (state.capacity.suspend or state.terminating) and _beside(state, sim):
        state.restart_windows([sim])
        return
    window = sim.meter.window()
    if not state.complete(window) or window is None or sim.share is None:
        return
    shape = state.shape(sim)
    _record(shape, sim, window, sim.share.wait)
    todo = [p for p in _options(state, sim) if p not in shape.trials]
    if todo and _may_wait_differently(state, sim) and _may_lose_a_window(state, sim):
        state.share(sim, "measure another wait policy", wait=todo[0])
        state.restart_windows([sim])
        return
    conclude(state, sim)
    end(state)


def _may_wait_differently(state: State, sim: Simulation) -> bool:
    remaining = state.remaining(sim)
    return state.now >= state.resize_after and (
        remaining is None or remaining > 2 * state.settings.window
    )


def _may_lose_a_window(state: State, sim: Simulation) -> bool:
    """Whether a wait policy under which nothing goes on does the queue no harm, if short.

    How many iterations there are may be guessed here: a wrong guess costs no more than a window.
    """
    family = state.family(sim)
    rate = max(window.rate for window, _, _ in state.shape(sim).trials.values())
    queue = family.total * family.iterations / rate
    return not queue or state.lost + state.settings.window <= state.settings.harm * queue


def _options(state: State, sim: Simulation) -> tuple[WaitPolicy, ...]:
    return candidates(sim.spec.ranks, 1, state.cores)


def _record(shape: Shape, sim: Simulation, window: Window, wait: WaitPolicy) -> None:
    useful, cpu = sim.meter.loads("useful"), sim.meter.loads("cpu")
    shape.trials[wait] = (window, useful or (), cpu or ())


def finished_early(state: State, sim: Simulation) -> None:
    """A simulation ended before its profile was complete: take what there is."""
    window = sim.meter.window()
    shape = state.shape(sim)
    if shape.profile is None and sim.share is not None and window and window.iterations >= 3:
        _record(shape, sim, window, sim.share.wait)
    if shape.profile is None and shape.trials and state.cores > 0:
        conclude(state, sim)


def conclude(state: State, sim: Simulation) -> None:
    """Make the shape's profile from its trials."""
    shape = state.shape(sim)
    wait, (window, useful, cpu) = max(shape.trials.items(), key=lambda item: item[1][0].rate)
    loads = _loads(state, sim, wait)
    busy = [load * window.rate for load in loads]
    if not sim.by_work:  # whose threads are all in that
        busy = [min(1.0, one) for one in busy]
    alone = not _beside(state, sim)
    if shape.profile is not None:  # what rests on the one taken beside others is wrong
        state.knowledge.forget(sim.shape)
        shape.blocking_need, sim.alone = None, Alone()
    startup = shape.startup or 0.0
    got = 1.0  # beside others of ours the rest is theirs
    if alone:
        got = share_got(useful, cpu, window.rate, state.cores, spins=wait == OFF)
    if sim.by_work:
        got = sim.work.got(state.cores, spins=wait == OFF)
    need = min(sum(busy) / (got if sim.by_work else 1.0), state.cores)
    shape.profile = Profile(
        window.rate, window.error, loads, got, wait, need, sim.memory, startup, alone, sim.measure
    )
    for other in state.active.values():
        if other.shape == sim.shape:
            state.count_memory(other)
    state.requests_due = AT_ONCE
    _tell(state, sim, shape.profile, window.iterations)


def _loads(state: State, sim: Simulation, wait: WaitPolicy) -> tuple[float, ...]:
    """Seconds of work per iteration and rank, from the trial that shows them best.

    Spinning ranks show their load as time outside MPI; where ranks share cores that time also
    counts waiting for a core, and CPU time under blocking waits is the load.
    """
    trials = state.shape(sim).trials
    window, loads, cpu = trials[wait]
    if sim.spec.ranks > state.cores and DOORBELL in trials:
        loads = trials[DOORBELL][2]
    elif wait.mode == "doorbell":
        loads = cpu
    return tuple(max(load, 1e-9) for load in loads) or (1.0 / window.rate,) * sim.spec.ranks


def _lost(state: State, sim: Simulation, profile: Profile) -> tuple[float | None, float]:
    """Share of its ranks' CPU that others took, None if unknown; and what it did not have."""
    trials = state.shape(sim).trials
    window, useful, cpu = trials.get(OFF, (None, (), ()))
    if sim.by_work:
        return max(0.0, 1.0 - profile.got), 0.0
    if window is None or not cpu or not useful or sim.spec.ranks > state.cores:
        return 0.0, 0.0
    blocking = trials[DOORBELL][2] if DOORBELL in trials else ()
    lost = taken(cpu, useful, _inside(window, useful), blocking)
    return lost, _unused(window, useful, cpu)


def _inside(window: Window, useful: Sequence[float]) -> list[float]:
    """Seconds inside MPI per iteration and rank."""
    return [max(0.0, 1.0 / window.rate - one) for one in useful]


def _unused(window: Window, useful: Sequence[float], cpu: Sequence[float]) -> float:
    """Share of the time in which ranks that spin had no core."""
    return missing(cpu, useful, _inside(window, useful))


def _tell(state: State, sim: Simulation, profile: Profile, iterations: int) -> None:
    beside = "" if profile.alone else "; it did not run alone, so the rate is too low"
    lost, unused = _lost(state, sim, profile)
    if profile.alone and lost is None:
        beside = (
            f"; its ranks were off their cores for {unused:.0%} of the time: outside MPI they "
            "sleep, or other programs slow them down"
        )
    elif profile.alone and lost is not None and lost > DISTURBED:
        beside = f"; other programs took {lost:.0%} of its CPU, so the rate is too low"
    unsteady = "" if profile.error <= state.settings.steady else "; the rate did not settle"
    heaviest = max(profile.loads)
    rate, unit = profile.rate, str(sim.measure)
    if sim.by_work:
        rate, unit = rate * UNIT, "CPU seconds outside MPI"
    state.note(
        "profile",
        f"{sim.shape}: {units.rounded(rate)} {unit}/s alone, needs {profile.need:.2f} of "
        f"{state.cores:g} cores{beside}{unsteady}",
        family=sim.spec.family,
        name=sim.spec.name,
        rate=rate,
        measure=sim.measure,
        error=math.hypot(profile.error, state.error(sim)),
        iterations=0 if sim.by_work else iterations,
        need=profile.need,
        cores=state.cores,
        load=[load / heaviest for load in profile.loads],
        wait=profile.wait.mode,
        memory=profile.memory,
        lost=lost or 0.0,
    )


def end(state: State) -> None:
    """Resume those that were paused for the profile."""
    state.schedule()
    for sim in state.active.values():
        if sim.stage is Stage.PAUSED:
            state.unpause(sim, "the profile is done")
    state.regime()


def _follow(state: State) -> None:
    if len(state.active) == 1:
        _follow_alone(state, *state.active.values())
    elif not state.own_cores:
        for sim in state.active.values():
            _follow_beside_others(state, sim)


def _follow_alone(state: State, sim: Simulation) -> None:
    """A simulation that runs alone shows its own baseline."""
    window, s = sim.meter.window(), state.settings
    profile = state.shape(sim).profile
    if not (profile and window and sim.share and sim.share.wait == profile.wait):
        return
    if binding_trial.undecided(state, sim):
        return
    if window.seconds < s.window or window.error > s.steady:
        return
    blocking = profile.wait.mode == "doorbell"
    loads = None
    if blocking or sim.spec.ranks <= state.cores:
        loads = sim.meter.loads("cpu" if blocking else "useful")
    if _has_its_cores_now(state, sim, window):
        del state.shape(sim).trials[OFF]
        state.begin_profile(sim)
        state.restart_windows([sim])
        return
    got = sim.got(state.cores, spins=profile.wait == OFF)
    sim.alone = Alone(window.rate, loads or sim.alone.loads or profile.loads, got)


def _has_its_cores_now(state: State, sim: Simulation, window: Window) -> bool:
    """Whether ranks that spin were off their cores for its profile, and hardly are any more."""
    profile, trials = state.shape(sim).profile, state.shape(sim).trials
    if sim.by_work or sim.spec.ranks > state.cores or OFF not in trials:
        return False
    if not (profile and profile.alone and profile.wait == OFF):
        return False
    useful, cpu = sim.meter.loads("useful") or (), sim.meter.loads("cpu") or ()
    # Half, so that what is just below is not measured again and again.
    return _unused(*trials[OFF]) > PLENTY and _unused(window, useful, cpu) < PLENTY / 2


def _follow_beside_others(state: State, sim: Simulation) -> None:
    """CPU per iteration under blocking waits shows how the work of an iteration changes."""
    window, s = sim.meter.window(), state.settings
    profile = state.shape(sim).profile
    if not (profile and window and sim.share and sim.share.wait.mode == "doorbell"):
        return
    if window.seconds < s.window or window.iterations < s.window_iterations:
        return
    cpu = sim.meter.loads("cpu")
    if cpu:
        if sim.alone.rate <= 0.0:
            sim.alone = Alone(profile.rate, profile.loads, profile.got)
        sim.alone.follow(cpu, state.cores)
