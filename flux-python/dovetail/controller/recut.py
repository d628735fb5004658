# SPDX-License-Identifier: LGPL-3.0-or-later
"""Whether a simulation whose ranks are loaded unlike is to stop at a checkpoint and be cut anew.

Inputs: the state: the loads that were measured alone, and how long the simulation still needs.
Outputs: a checkpoint, with a note that has the balance, what was predicted and the new weights.
Simulations of the same entry that start on as many ranks later are cut by them from the beginning,
also where too little is left of the first to stop it.

Invariants: a simulation is cut anew once, and none that failed before, perhaps as it was stopped;
what is saved is predicted to be `restart_pays` times what the restart takes; it keeps its number
of ranks. Where none could start so, all are cut as the plan says again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

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
    """Stop one simulation whose load balance is poor, if cutting it anew pays; else later ones."""
    if state.profiling or not state.own_cores:
        return
    for sim in list(state.active.values()):
        if _may(state, sim) and (_stop(state, sim) or _cut_later(state, sim)):
            return


def load_balance(loads: Sequence[float]) -> float:
    """Mean over largest of the ranks' loads, 0 to 1; 1 if there is none (POP, load balance)."""
    most = max(loads, default=0.0)
    return sum(loads) / len(loads) / most if most > 0.0 else 1.0


def weights_for(spec: Spec, loads: Sequence[float]) -> tuple[float, ...]:
    """Cells of each rank, mean 1, with which all would have the same load.

    Where Dovetail cut the case, the weights are those of its cells, so that cells of one rank may
    cost more than another's. How a user's own lines cut it nobody knows: then all are equal, and so
    they are where the program shall balance them itself.
    """
    if not spec.widths or spec.application in programs.BALANCES or min(loads) <= 0.0:
        return (1.0,) * spec.ranks
    cells = [weight / load for weight, load in zip(spec.weights, loads)]
    mean = sum(cells) / len(cells)
    bounded = [max(LEAST, cell / mean) for cell in cells]
    return tuple(round(cell * len(cells) / sum(bounded), 3) for cell in bounded)


def _may(state: State, sim: Simulation) -> bool:
    if sim.spec.application in programs.UNCUT:
        return False
    may = sim.spec.rebalance and not sim.spec.recut and not sim.failed and sim.spec.ranks > 1
    may = may and state.family(sim).cuts.get(sim.spec.ranks) != ()
    return may and sim.stage is Stage.RUNNING and state.can_halt(sim)


@dataclass(frozen=True)
class _Gain:
    """Seconds alone that are `left` and would be `then`, what a `restart` takes; load balance."""

    balance: float
    left: float
    then: float
    restart: float

    def __str__(self) -> str:
        return (
            f"the load balance is {self.balance:.2f}, {self.left:.0f} s are left of each, "
            f"{self.then:.0f} s if it were {REACHED:g}, about {self.restart:.0f} s for a restart"
        )


def _gain(state: State, sim: Simulation, left: float | None) -> _Gain | None:
    """What cutting it anew would bring with so many seconds left; None if it does not pay."""
    profile = state.shape(sim).profile
    if sim.by_work or state.family(sim).guessed or left is None:
        return None
    if profile is None or not profile.alone:
        return None
    balance = load_balance(profile.loads)
    gain = _Gain(balance, left, left * balance / REACHED, widening.restart_seconds(state, sim))
    pays = gain.left - gain.then >= state.settings.restart_pays * gain.restart
    return gain if balance < BALANCED and pays else None


def _stop(state: State, sim: Simulation) -> bool:
    """Stop it if that pays; whether it was done."""
    gain = _gain(state, sim, state.remaining(sim))
    if gain is None:
        return False
    weights = _cut(state, sim)
    why = f"{sim.spec.name} stops at a checkpoint to be cut anew: {gain}"
    state.note("hold", why, name=sim.spec.name, weights=weights, **asdict(gain))
    sim.next_ranks, sim.halted_at = sim.spec.ranks, state.now
    state.halt(sim, "to be cut anew")
    return True


def _cut_later(state: State, sim: Simulation) -> bool:
    """Have the queued ones of its entry cut anew as they start, if it pays for one of them."""
    family, rate = state.family(sim), state.baseline(sim)
    if sim.spec.ranks in family.cuts or not family.queue or not family.length or not rate:
        return False
    gain = _gain(state, sim, family.length / rate)
    if gain is None:
        return False
    weights = _cut(state, sim)
    why = f"those of {sim.spec.family} that start from now on are cut anew: {gain}"
    state.note("hold", why, family=sim.spec.family, weights=weights, **asdict(gain))
    return True


def _cut(state: State, sim: Simulation) -> tuple[float, ...]:
    """Have those of its entry that are launched on as many ranks be cut by measured weights."""
    family, ranks = state.family(sim), sim.spec.ranks
    shape = state.shape(sim)
    if ranks not in family.cuts and shape.profile is not None:
        family.cuts[ranks] = weights_for(sim.spec, shape.profile.loads)
        spec = replace(family.spec.on(ranks), weights=family.cuts[ranks], recut=True)
        new = Shape(shape_name(spec), spec, memory=shape.memory)  # all else depends on the cut
        family.shapes[ranks] = state.shapes[new.name] = new
    return family.cuts[ranks]


def undo(state: State, sim: Simulation, why: str) -> bool:
    """Whether one failed as it was cut anew, and may do better as the plan has it cut.

    So it is if nothing has iterated or ended well that was cut so: none is again then.
    """
    family, shape, ranks = state.family(sim), state.shape(sim), sim.spec.ranks
    if not sim.spec.recut or sim.iterations or shape.startup is not None or shape.lasted:
        return False
    if family.cuts[ranks]:
        family.cuts[ranks] = ()
        family.shapes[ranks] = state.shapes[shape_name(family.spec.on(ranks))]
        told = f"those of {sim.spec.family} are cut as before: {sim.spec.name} failed, cut anew"
        told = f"{told}: {why}"
        state.note("hold", told, family=sim.spec.family, ranks=ranks, uncut=True)
    return True
