# SPDX-License-Identifier: LGPL-3.0-or-later
"""Phase B, resize: what each simulation gets, by what its ranks need and how they shall wait.

Inputs: profiles, measured loads and the capacity. Outputs: CPU requests and wait policies, sent
as one resize at the end of a decision.

Invariants: requests fit the capacity and none is below the floor (unless the capacity cannot give
every rank the floor); they change only by more than `Settings.hysteresis`, unless the plan says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dovetail.controller.baseline import Profile
from dovetail.controller.knowledge import TrialVerdict
from dovetail.controller.simulation import Simulation, Stage
from dovetail.controller.state import AT_ONCE, State
from dovetail.controller.wait_policies import OFF, next_policy
from dovetail.core.cpu_requests import FLOOR, proportional
from dovetail.core.protocol import Capacity, Measure, Requests, Share, Spec, WaitPolicy


def rank_needs(spec: Spec, profile: Profile | None) -> list[float]:
    """Millicores that each rank would use alone, shape (ranks,); no rank uses over a core.

    One of several threads does, if they are known by their work.

    Where the plan has phases, what each rank asks for in the first.
    """
    if spec.phases:
        return [*map(float, spec.phases[0].requests)]
    if profile is None:
        heaviest = max(spec.weights, default=1.0) or 1.0
        return [1000.0 * weight / heaviest for weight in spec.weights]
    return _millicores(profile.loads, profile.rate, profile.got, profile.measure)


def _millicores(loads: Sequence[float], rate: float, got: float, measure: Measure) -> list[float]:
    """What ranks with these loads would use at this rate, had they got all that they wanted.

    Else requests would fall where other programs take cores, and leave these the more of them.
    """
    most = math.inf if measure == "work" else 1000.0
    return [min(most, 1000.0 * load * rate / got) for load in loads]


def fit_requests(needs: Sequence[Sequence[float]], capacity: Capacity) -> list[Requests]:
    """Requests for each simulation's ranks: their needs, or in proportion to them if too much.

    `needs` in millicores, one sequence per simulation.
    """
    flat = [max(1, round(need)) for sim in needs for need in sim]
    if not flat:
        return []
    floor = max(1, min(FLOOR, capacity.cpu // len(flat)))
    shares: Requests = tuple(max(floor, need) for need in flat)
    if sum(shares) > capacity.cpu:
        shares = proportional(flat, max(floor * len(flat), capacity.cpu), floor)
    result, start = [], 0
    for sim in needs:
        result.append(tuple(shares[start : start + len(sim)]))
        start += len(sim)
    return result


def differ(old: Sequence[float], new: Sequence[float], relative: float) -> bool:
    """True if some rank's millicores differ by enough to be worth a resize."""
    return len(old) != len(new) or any(
        abs(a - b) > max(FLOOR, relative * a) for a, b in zip(old, new)
    )


def settle(state: State) -> None:
    """Bring wait policies and requests to what they should be."""
    if not state.profiling:
        _waits(state)
    at_once = state.requests_due == AT_ONCE
    if at_once or (state.now >= state.requests_due and not _on_trial(state)):
        _requests(state)


def _on_trial(state: State) -> bool:
    """A resize would spoil the measurement that is under way."""
    if state.profiling:
        return True
    shared = len(state.active) > 1 and not state.own_cores
    return shared and state.knowledge.verdict(state.running) is TrialVerdict.OPEN


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
        return OFF
    if len(state.active) == 1:
        (sim,) = state.active.values()
        profile = state.shape(sim).profile
        return profile.wait if profile else OFF
    return next_policy(state, state.running)


def _requests(state: State) -> None:
    fresh = any(sim.share is None for sim in state.active.values())
    if state.now < state.resize_after and not fresh:
        return
    state.requests_due = state.now + state.settings.replan
    sims = [*state.active.values(), *state.suspended.values()]
    if len(state.active) == 1:
        sims[0].boost = 1.0
    needs = [
        _needs(state, sim) if sim.spec.name in state.active else [1.0] * sim.spec.ranks
        for sim in sims
    ]
    wanted = fit_requests(needs, state.capacity)
    pairs = list(zip(sims, wanted))
    moved = [
        (sim, new) for sim, new in pairs if sim.share is None or _moves(state, sim, sim.share, new)
    ]
    stays = {sim.spec.name: sim.share.requests for sim in sims if sim.share}
    stays.update({sim.spec.name: new for sim, new in moved})
    if sum(map(sum, stays.values())) > state.capacity.cpu:  # what barely changes must fit as well
        moved = [(sim, new) for sim, new in pairs if not sim.share or sim.share.requests != new]
    _send(state, moved)


def _moves(state: State, sim: Simulation, share: Share, new: Requests) -> bool:
    """Whether its requests are worth a resize; in another phase of the plan every one is."""
    if sim.phase is None:
        return differ(share.requests, new, state.settings.hysteresis)
    return differ(share.requests, new, 0.0) or share.limit != sim.phase.limit


def _send(state: State, moved: list[tuple[Simulation, tuple[int, ...]]]) -> None:
    up = [
        (sim, new)
        for sim, new in moved
        if sim.share is not None and sim.stage is not Stage.PREPARING and sim.phase is None
    ]
    for sim, new in moved:
        if sim.phase is None:
            state.share(sim, "requests follow the measured load", requests=new)
        else:
            why = f"requests of phase {sim.plan_phase + 1} of the plan"
            state.share(sim, why, requests=new, limit=sim.phase.limit)
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
    """Millicores that each rank would use alone, times the boost; or what its phase asks for.

    They are the family's, so that equal simulations get equal requests, unless the loads of
    this one have been seen to differ.
    """
    if sim.phase is not None:
        return [*map(float, sim.phase.requests)]
    needs = rank_needs(sim.spec, state.shape(sim).profile)
    rate, loads, got = sim.alone.rate, sim.alone.loads, sim.alone.got
    window = sim.meter.window()
    if state.own_cores and window and window.iterations >= state.settings.window_iterations:
        rate, loads = window.rate, sim.meter.loads("useful") or ()
        got = sim.got(state.cores, spins=True)
    if rate > 0.0 and len(loads) == len(needs) and state.shape(sim).profile:
        own = _millicores(loads, rate, got, sim.measure)
        if differ(needs, own, state.settings.hysteresis):
            needs = own
    return [need * sim.boost for need in needs]
