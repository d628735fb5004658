# SPDX-License-Identifier: LGPL-3.0-or-later
"""Binding to cores: measured where ranks have cores to themselves, and kept where it is faster.

A simulation that runs anyway is measured unbound, bound, bound, unbound and so on, so that neither
work that changes nor a machine that does looks like a gain; no work is lost by that. All
simulations of a shape add to the same pairs.

Inputs: the state with fresh samples. Outputs: shares that are bound or not, a note per decision.

Invariants: whose cores are shared, or who is suspended, is not bound, from the same decision on;
nothing is bound at its launch, nor while profiles or resizes are under way.
"""

from __future__ import annotations

from dovetail.controller.simulation import Simulation, Stage
from dovetail.controller.state import State

AGAIN = 60.0
"""Seconds between two pairs once it is bound: threads may start, or other programs come."""
GOES_ON = 2.0
"""Seconds after which who could not be bound goes on: it was not just ending, unseen as yet."""


def bind(state: State) -> None:
    """Bind ranks and unbind them, to measure it or as was decided."""
    if not state.capacity.binds:
        return
    settled = state.settled() and not state.profiling
    for sim in [*state.active.values(), *state.suspended.values()]:
        stands = sim.stage in (Stage.SUSPENDED, Stage.PAUSED)
        if sim.share is None or not (sim.share.bound or state.own_cores):
            continue
        if stands or not state.own_cores:
            _change(state, sim, False, "cores are shared")
        elif (
            sim.stage is Stage.RUNNING and settled and not sim.by_work
        ):  # which tells nothing of it
            _go_on(state, sim)


def undecided(state: State, sim: Simulation) -> bool:
    """Whether it is bound only to see what that does: its rate says nothing to others."""
    return sim.bound and not state.shape(sim).binding.bound


def _change(state: State, sim: Simulation, bound: bool, why: str) -> None:
    sim.half = None
    state.share(sim, why, bound=bound)


def _go_on(state: State, sim: Simulation) -> None:
    binding = state.shape(sim).binding
    if sim.unbindable and not binding.closed:
        why, since = sim.unbindable
        if state.now - since < GOES_ON:
            return
        binding.refuse(why)
        state.tell_binding(sim)
    if binding.closed:
        _change(state, sim, False, binding.why)
    elif binding.bound and sim.half is None and state.now < binding.again_at:
        _change(state, sim, True, binding.why)
    elif state.now >= state.resize_after:
        _measure(state, sim)


def _measure(state: State, sim: Simulation) -> None:
    window, s = sim.meter.since(state.regime_at), state.settings
    if window is None or sim.share is None:
        return
    if window.seconds < s.window or window.iterations < s.window_iterations:
        return
    bound, half = sim.share.bound, sim.half
    if half is None or half[0] == bound or half[2] < state.regime_at:
        _change(state, sim, not bound, "measure binding to cores")
        sim.half = (bound, window.rate, state.now)
        return
    sim.half = None
    sim.meter.reset()
    binding = state.shape(sim).binding
    rates = (window.rate, half[1]) if half[0] else (half[1], window.rate)
    changed = binding.add(*rates, s.hopeless)
    binding.again_at = state.now + AGAIN
    if changed:
        state.tell_binding(sim)
