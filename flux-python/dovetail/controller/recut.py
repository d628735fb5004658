# SPDX-License-Identifier: LGPL-3.0-or-later
"""Whether a simulation whose ranks are loaded unlike is to stop at a checkpoint and be cut anew.

Inputs: the state: the loads that were measured alone, and how long the simulation still needs.
Outputs: a checkpoint, with a note that has the balance, what was predicted and the new weights.
Simulations of the same entry that start on as many ranks later are cut by them from the beginning.

Invariants: a simulation is cut anew once, and none that failed before, perhaps as it was stopped;
what is saved is predicted to be `restart_pays` times what the restart takes; it keeps its number
of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dovetail.controller import widening
from dovetail.controller.simulation import Shape, Simulation, Stage, shape_name
from dovetail.controller.state import State
from dovetail.core import programs
from dovetail.core.protocol import Spec

BALANCED = 0.9
"""Load balance, mean over largest load, from which on nothing is done (POP metrics)."""
REACHED = 0.95
"""Load balance that a new cut is predicted to have: cells are whole, and costs differ by place."""
LEAST = 0.1
"""Smallest weight over the mean of all: a rank that hardly worked was perhaps not measured well."""


def recut(state: State) -> None:
    """Stop one simulation whose load balance is poor, if cutting it anew pays."""
    if state.profiling or not state.own_cores:
        return
    for sim in list(state.active.values()):
        if _may(state, sim) and _pays(state, sim):
            return


def load_balance(loads: Sequence[float]) -> float:
    """Mean over largest of the ranks' loads, 0 to 1; 1 if there is none (POP, load balance)."""
    most = max(loads, default=0.0)
    return sum(loads) / len(loads) / most if most > 0.0 else 1.0


def weights_for(spec: Spec, loads: Sequence[float]) -> tuple[float, ...]:
    """Cells of each rank, mean 1, with which all would have the same load.

    Where Dovetail cut the case, the weights are those of its cells, so that cells of one rank may
    cost more than another's. How a user's own lines cut it nobody knows: then all are equal.
    """
    if not spec.widths or min(loads) <= 0.0:
        return (1.0,) * spec.ranks
    cells = [weight / load for weight, load in zip(spec.weights, loads)]
    mean = sum(cells) / len(cells)
    bounded = [max(LEAST, cell / mean) for cell in cells]
    return tuple(round(cell * len(cells) / sum(bounded), 3) for cell in bounded)


def _may(state: State, sim: Simulation) -> bool:
    if sim.spec.application in programs.CUT_THEMSELVES:
        return False
    may = sim.spec.rebalance and not sim.spec.recut and not sim.restarts and sim.spec.ranks > 1
    return may and sim.stage is Stage.RUNNING and state.can_halt(sim)


def _pays(state: State, sim: Simulation) -> bool:
    """Stop it if it pays; whether that was done."""
    profile, left = state.shape(sim).profile, state.remaining(sim)
    if state.family(sim).guessed or left is None or profile is None or not profile.alone:
        return False
    balance = load_balance(profile.loads)
    then = left * balance / REACHED
    cost = widening.restart_seconds(state, sim)
    if balance >= BALANCED or left - then < state.settings.restart_pays * cost:
        return False
    family, ranks = state.family(sim), sim.spec.ranks
    weights = family.cuts.get(ranks) or weights_for(sim.spec, profile.loads)
    if ranks not in family.cuts:
        family.cuts[ranks] = weights
        spec = replace(family.spec.on(ranks), weights=weights, recut=True)
        family.shapes[ranks] = state.shapes[shape_name(spec)] = Shape(shape_name(spec), spec)
    state.note(
        "hold",
        f"{sim.spec.name} stops at a checkpoint to be cut anew: its load balance is {balance:.2f}, "
        f"{left:.0f} s are left, {then:.0f} s if it were {REACHED:g}, about {cost:.0f} s for the "
        "restart",
        name=sim.spec.name, balance=balance, left=left, then=then, restart=cost, weights=weights,
    )  # fmt: skip
    sim.next_ranks, sim.halted_at = ranks, state.now
    state.halt(sim, "to be cut anew")
    return True
