# SPDX-License-Identifier: LGPL-3.0-or-later
"""Phases that a plan divides a simulation into, each with requests of its own.

Inputs: iterations, residuals, and the phases of each Spec. Outputs: the phase that each simulation
is in, and a note where one begins; the requests themselves are sent with all others, by `shares`.

Invariants: a simulation goes through its phases forwards, from the first; as it is started again,
from the one that its iterations say.
"""

from __future__ import annotations

from dovetail.controller.simulation import Simulation
from dovetail.controller.state import AT_ONCE, State


def at(sim: Simulation) -> int:
    """The number of the phase, from 0, that a simulation is in by now."""
    number, phases = sim.plan_phase, sim.spec.phases
    over = sim.told
    while number < len(phases) - 1 and phases[number].over(over, sim.residual):
        number += 1
    return number


def turn(state: State) -> None:
    """Let simulations whose phase is over go on to the next one."""
    for sim in [*state.active.values(), *state.suspended.values()]:
        if (now := at(sim)) > sim.plan_phase:
            sim.plan_phase = now
            state.requests_due = AT_ONCE
            _tell(state, sim)


def _tell(state: State, sim: Simulation) -> None:
    phases, over = sim.spec.phases, sim.told
    now = phases[sim.plan_phase]
    limit = f", at most {now.limit:g} times that" if now.limit else ""
    residual = "" if sim.residual is None else f", at a residual of {sim.residual:.3g}"
    asked = " ".join(f"{request}m" for request in now.requests)
    state.note(
        "phase",
        f"{sim.spec.name} is in phase {sim.plan_phase + 1} of {len(phases)} after {over} "
        f"iterations{residual}: {asked}{limit}",
        name=sim.spec.name,
        phase=sim.plan_phase + 1,
        iterations=over,
    )
