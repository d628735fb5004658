# SPDX-License-Identifier: LGPL-3.0-or-later
"""Ends what cannot go on: who hangs, who is one too many for the memory, a queue without nodes.

Inputs: the state. Outputs: stops, with notes that say why.

Invariants: a simulation that publishes nothing is never taken for one that hangs; of those that
are short of memory one at a time goes back to the queue, the newest first.
"""

from __future__ import annotations

from dovetail.controller.simulation import Simulation, Stage
from dovetail.controller.state import State
from dovetail.core.protocol import Cause

GUARD = 1.0
"""Seconds between two looks for what hangs: limits are a minute and more."""


def end_what_cannot_go_on(state: State) -> None:
    """Stop simulations that hang or find no memory, and give up a queue without any node."""
    if state.now >= state.guard_at:
        state.guard_at = state.now + GUARD
        _end_what_hangs(state)
    _short_of_capacity(state)


def _end_what_hangs(state: State) -> None:
    """End simulations that have made no progress for much longer than usual."""
    for sim in list(state.active.values()):
        if sim.stage is Stage.PAUSED:
            continue
        limit = _patience(state, sim)
        idle = state.now - max(sim.progress_at, sim.resumed_at)
        if limit is None or idle <= limit:
            continue
        what = "no iteration" if sim.iterations else "no first iteration"
        what = "no work outside MPI" if sim.by_work else what
        why = f"hung: {what} for {idle:.0f} s, the limit is {limit:.0f} s"
        state.note("fail", f"{sim.spec.name} is ended, {why}", name=sim.spec.name, idle=idle)
        state.stop(sim, Cause.HUNG, why)


def _patience(state: State, sim: Simulation) -> float | None:
    s, shape = state.settings, state.shape(sim)
    if sim.by_work:
        return s.start_limit
    if sim.stage is Stage.RUNNING:
        rate = state.baseline(sim)
        usual = 1.0 / rate if rate > 0.0 else _usual(state, sim)
        return max(s.stall, s.stall_iterations * usual)
    if state.family(sim).silent or sim.useful is None:
        return None  # nothing tells a program that publishes nothing from one that hangs
    if shape.startup is not None:
        return max(s.stall, s.start_factor * shape.startup)
    return s.start_limit


def _usual(state: State, sim: Simulation) -> float:
    """Seconds per iteration so far, start included; before any profile."""
    return (sim.progress_at - sim.launched_at) / max(1, sim.iterations)


def _short_of_capacity(state: State) -> None:
    if state.capacity.cpu > 0:
        state.empty_since = None
    elif state.empty_since is None:
        state.empty_since = state.now
    elif state.now - state.empty_since > state.settings.no_nodes and not state.active:
        state.give_up(Cause.NO_NODE, "no node is left")
    room, used = state.capacity.memory, state.memory_used
    coming = sum(sim.counted_memory for sim in state.terminating.values())
    group = [*(state.suspended or state.active).values()]
    if not 0 < room < used - coming or len(state.active) + len(state.suspended) < 2:
        return
    if state.memory_of(group[-1]):
        state.note(
            "rollback",
            f"{group[-1].spec.name} goes back to the queue: {used} bytes of {room} used",
        )
        why = "memory is short, to run again later"
        state.stop(group[-1], Cause.SHORT_OF_MEMORY, why, requeue=True)
