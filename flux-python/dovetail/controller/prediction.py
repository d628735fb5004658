# SPDX-License-Identifier: LGPL-3.0-or-later
"""How much slower a co-scheduled set runs than alone: predicted, and learned from measurements.

Inputs: profiles and needs of shapes, measured slowdowns. Outputs: slowdowns by the one
throughput model (core.throughput_model), whose interference is fitted anew after each measurement.

Invariants: where every rank has a core to itself, nobody is slowed.
"""

from __future__ import annotations

from dovetail.controller.knowledge import CoScheduled, Measure
from dovetail.controller.simulation import Simulation
from dovetail.controller.state import State
from dovetail.core.protocol import Spec
from dovetail.core.throughput_model import Part, Point, bound, crowd, slowdowns


def expected_need(spec: Spec) -> float:
    """Cores before any profile: the heaviest rank is busy, the others by their weights."""
    heaviest = max(spec.weights, default=1.0)
    return sum(spec.weights) / heaviest if heaviest > 0 else float(spec.ranks)


def spun_need(state: State, name: str) -> float:
    """Cores that a shape's simulation keeps busy alone, without what blocking waits cost."""
    profile = state.shapes[name].profile
    return profile.need if profile else expected_need(state.shapes[name].spec)


def parts(state: State, running: CoScheduled) -> list[Part]:
    """A co-scheduled set as the throughput model sees it."""
    result = []
    for name, count in running:
        shape = state.shapes[name]
        need = expected_need(shape.spec)
        if shape.profile is not None:
            need = shape.blocking_need or shape.profile.need
        result.append(Part(count, shape.cores, need, shape.blocking_need is not None))
    return result


def predicted(state: State, running: CoScheduled) -> list[float]:
    """Slowdowns by shape, in the order of the set."""
    pieces = parts(state, running)
    if sum(part.count * part.ranks for part in pieces) <= state.cores:
        return [1.0] * len(pieces)
    return slowdowns(pieces, state.cores, state.knowledge.beta, state.settings.wait_cost)


def to_beat(state: State, running: CoScheduled) -> float:
    """The best that is known without one of a set, in simulations alone: what it has to beat.

    Where those without it have cores to themselves, each does what it does alone.
    """
    found = state.knowledge.reference(running)
    ranks = sum(count * state.shapes[name].cores for name, count in running)
    most = max(state.shapes[name].cores for name, _ in running)
    rest = sum(count for _, count in running) - 1
    return max(found, float(rest)) if ranks - most <= state.cores else found


def learn_needs(state: State, sims: list[Simulation]) -> None:
    """CPU per iteration under blocking waits is what one needs beside others."""
    seen: dict[str, list[float]] = {}
    for sim in sims:
        cpu = sim.meter.loads("cpu")
        if cpu and sum(cpu) > 0.0:
            seen.setdefault(sim.shape, []).append(sum(cpu) * state.baseline(sim))
    for name, needs in seen.items():
        state.shapes[name].blocking_need = sum(needs) / len(needs)


def learn(state: State, running: CoScheduled, measure: Measure, before: list[float]) -> None:
    """Fit the model again, and say how well it had predicted this set."""
    mean = sum(measure.slowdowns) / len(measure.slowdowns)
    counts = [count for _, count in running]
    n = sum(counts)
    guess = sum(count * slow for count, slow in zip(counts, before)) / n
    pieces = parts(state, running)
    need = sum(p.count * p.need for p in pieces)
    if need > mean * state.cores:
        # Faster than the cores allow proves that the need was overestimated.
        for name, _ in running:
            shape = state.shapes[name]
            if shape.blocking_need is not None:
                shape.blocking_need *= mean * state.cores / need
        need = mean * state.cores
    least = bound(need, state.cores, state.settings.wait_cost)
    others = sum(p.count * (state.ranks - p.ranks) for p in pieces) / n
    state.knowledge.learn(running, Point(crowd(others, state.cores), least, mean))
    known = state.knowledge
    state.note(
        "model",
        f"beta is {known.beta:.3f}; {n} at once were predicted {guess:.2f} times slower than "
        f"alone and are {mean:.2f}",
        beta=known.beta,
        beta_error=known.beta_error,
        error=known.error,
        n=n,
        predicted=guess,
        measured=mean,
        needs=[p.need for p in pieces],
    )
