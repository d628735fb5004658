# SPDX-License-Identifier: LGPL-3.0-or-later
"""How the ranks of simulations shall wait inside MPI: what may be measured, and what is best.

Inputs: a co-scheduled set, and what is known of it. Outputs: wait policies.

Invariants: looking changes nothing; `off` is always among the candidates.
"""

from __future__ import annotations

from dovetail.controller.knowledge import CoScheduled, Outcome, TrialVerdict
from dovetail.controller.prediction import spun_need
from dovetail.controller.state import State
from dovetail.core.protocol import WaitPolicy

OFF = WaitPolicy("off")
YIELD = WaitPolicy("yield")
DOORBELL = WaitPolicy("doorbell", 20)


def candidates(ranks: int, simulations: int, cores: float) -> tuple[WaitPolicy, ...]:
    """Wait policies that may be measured, best guess first; `off` is always among them."""
    if ranks <= cores:
        return (OFF,)
    if simulations == 1:
        return (OFF, DOORBELL, YIELD)
    return (DOORBELL, YIELD, OFF)


def next_policy(state: State, running: CoScheduled) -> WaitPolicy:
    """How the simulations of a set shall wait: the best known, or the next to be measured.

    The candidates are measured in turn until one comes so near to the bound that no other
    could do much better. `off` is always among them, as the last: with spinning ranks that share
    cores next to nothing may go on, so it is measured if that is still open and can be afforded.
    """
    known = state.knowledge.outcome(running)
    todo = [p for p in _options(state, running) if p not in known.measures]
    if known.verdict is not TrialVerdict.OPEN or not todo or _good_enough(state, running, known):
        return known.best[0] if known.best else _options(state, running)[0]
    return todo[0]


def _options(state: State, running: CoScheduled) -> tuple[WaitPolicy, ...]:
    ranks = sum(count * state.shapes[name].spec.ranks for name, count in running)
    options = candidates(ranks, sum(count for _, count in running), state.cores)
    known = state.knowledge.outcome(running)
    # So few iterations may come that the measurement takes all the time that one may.
    loss = state.settings.window * state.settings.window_limit
    if len(options) > 1 and known.measures and not state.affordable(loss):
        return tuple(p for p in options if p != OFF)
    return options


def _good_enough(state: State, running: CoScheduled, known: Outcome) -> bool:
    """No other wait policy could gain much: the CPU is already used nearly as well as can be."""
    if known.best is None:
        return False
    need = sum(count * spun_need(state, name) for name, count in running)
    n = sum(count for _, count in running)
    bound = min(float(n), n * state.cores / need) if need > 0.0 else float(n)
    return known.best[1].throughput >= state.settings.near_bound * bound
