# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the controller decides by: its settings, needs, requests and predictions.

Inputs: profiles and capacity. Outputs: CPU requests, predicted slowdowns, wait policies to try.

Invariants: pure functions of their arguments; requests fit the capacity and none is below the
floor (unless the capacity cannot give every rank the floor).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.core.cpu_requests import FLOOR as FLOOR
from dovetail.core.cpu_requests import proportional
from dovetail.core.protocol import Capacity, Requests, Spec, WaitPolicy

OFF = WaitPolicy("off")
YIELD = WaitPolicy("yield")
DOORBELL = WaitPolicy("doorbell", 20)

NODE_LOST, POD_LOST = "node lost", "pod lost"
"""How the reason of a Finished begins if it is not the simulation's fault: it is run again."""

Mix = tuple[tuple[str, int], ...]
"""Which simulations run at once: (family, how many), sorted by family."""


@dataclass(frozen=True)
class Settings:
    """Every tunable of the controller. Seconds are the controller's own (see Controller)."""

    max_packed: int = 0
    """Most simulations at once, 0 for no such limit: the plan's own bound."""
    period: float = 0.2
    """Seconds between decisions where samples arrive and no Tick does."""
    warmup: int = 3
    """First iterations left out: caches, first touch, file reading."""
    window: float = 1.5
    """Least seconds of a measurement: a hundred scheduler periods."""
    window_iterations: int = 8
    """Least iterations of a measurement: enough for four sub-windows of two."""
    window_limit: float = 6.0
    """Windows after which a measurement that does not settle is taken as it is."""
    steady: float = 0.03
    """Relative standard error of a rate that counts as settled; a gain must exceed it."""
    predicted_gain: float = 1.08
    """Least predicted gain for a trial: less drowns in the noise and in the trial's cost."""
    full: float = 0.9
    """Share of all cores that a simulation keeps busy, from which nothing is tried beside it."""
    kept_gain: float = 1.03
    """Least measured gain to keep an admission: more than the noise of two windows."""
    near_bound: float = 0.85
    """Share of the bound at which no other wait policy is tried: none could gain much."""
    hopeless: float = 0.8
    """Share of the throughput before, below which a trial ends after half a window."""
    wait_cost: float = 0.05
    """What blocking waits cost a simulation, until that is measured (measured: 5 %)."""
    beta: float = 0.05
    """Interference of packed ranks until it is measured (1:3 on two cores, gain 1.38: 0.05)."""
    harm: float = 0.015
    """Share of the queue's sequential time that trials may lose: half of the 3 % promised."""
    lookahead: int = 4
    """Families looked at in queue order for one that pays beside what runs."""
    overtakes: int = 8
    """Simulations that may pass the head of the queue before only the head may start."""
    hysteresis: float = 0.10
    """Relative change of a rank's request worth a resize: twice a window's noise."""
    replan: float = 5.0
    """Seconds between two looks at the load of running simulations."""
    boost: float = 1.5
    """Factor on the share of a simulation that is too slow, per step."""
    boost_limit: float = 3.0
    """Greatest such factor: above it the others starve."""
    margin: float = 0.03
    """Relative excess of a slowdown over its budget that is still noise."""
    cooldown: float = 10.0
    """Seconds without an admission after one was taken back, or of resizes after a refusal."""
    young: float = 20.0
    """Seconds of life up to which a simulation is rather run again than kept to the harm."""
    stall: float = 300.0
    """Least seconds without an iteration that count as hung: writing results may take minutes."""
    stall_iterations: float = 50.0
    """The same in usual iterations, whichever is longer."""
    start_limit: float = 1800.0
    """Seconds before the first iteration in which no rank does anything outside MPI."""
    start_factor: float = 20.0
    """The same in usual start times, once the family's is known (at least `stall`)."""
    restarts: int = 3
    """Times that a simulation is run again after it lost its node."""
    no_nodes: float = 60.0
    """Seconds without any CPU after which the rest of the queue is given up."""
    jump: float = 60.0
    """A step of the run's clock beyond this, or backwards, is a jump: windows begin anew."""

    def plain(self) -> dict[str, Any]:
        """For the header of the event log."""
        return dataclasses.asdict(self)

    @staticmethod
    def of(values: Mapping[str, Any]) -> Settings:
        """From the header of the event log; raises ValueError for what is no setting."""
        try:
            return Settings(**values)
        except TypeError as error:
            raise ValueError(f"settings: {error}") from None


@dataclass(frozen=True)
class Profile:
    """A family alone: `rate` in iterations/s (1/s), `error` relative.

    `loads` is CPU seconds per iteration and rank, shape (ranks,); `wait` the best policy alone;
    `need` the cores that it keeps busy; `memory` the peak of all ranks, bytes; `startup` the
    seconds from launch to the first iteration; `alone` is False if others ran meanwhile.
    """

    rate: float
    error: float
    loads: tuple[float, ...]
    wait: WaitPolicy
    need: float
    memory: int
    startup: float
    alone: bool


def mix_of(families: Mapping[str, int]) -> Mix:
    """The canonical form of how many of each family run."""
    return tuple(sorted((name, count) for name, count in families.items() if count > 0))


def with_one(mix: Mix, family: str) -> Mix:
    """The mix with one more of a family."""
    counts = dict(mix)
    counts[family] = counts.get(family, 0) + 1
    return mix_of(counts)


def expected_need(spec: Spec) -> float:
    """Cores before any profile: the heaviest rank is busy, the others by their weights."""
    heaviest = max(spec.weights, default=1.0)
    return sum(spec.weights) / heaviest if heaviest > 0 else float(spec.ranks)


def rank_needs(spec: Spec, profile: Profile | None) -> list[float]:
    """Millicores that each rank would use alone, shape (ranks,); no rank uses over a core."""
    if profile is None:
        heaviest = max(spec.weights, default=1.0) or 1.0
        return [1000.0 * weight / heaviest for weight in spec.weights]
    return [min(1000.0, 1000.0 * load * profile.rate) for load in profile.loads]


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


@dataclass(frozen=True)
class Part:
    """One family within a mix, for predictions: `need` in cores, measured packed or not."""

    count: int
    ranks: int
    need: float
    packed: bool


def slowdowns(parts: Sequence[Part], cores: float, beta: float, wait_cost: float) -> list[float]:
    """Predicted slowdown of each family in a mix, dimensionless, shape (len(parts),).

    The throughput model, for unlike simulations: with needed cores U of all and cores V,
    max(1, U/V) + β · (ranks of the others) / V. Waits block where ranks share cores, which
    costs `wait_cost`: in the 1, and in a need that was measured while waits were spinning.
    """
    ranks = sum(part.count * part.ranks for part in parts)
    if ranks <= cores:
        return [1.0] * len(parts)
    need = sum(p.count * p.need * (1.0 if p.packed else 1.0 + wait_cost) for p in parts)
    bound = max(1.0 + wait_cost, need / cores)
    return [bound + beta * (ranks - part.ranks) / cores for part in parts]


def candidates(ranks: int, simulations: int, cores: float) -> tuple[WaitPolicy, ...]:
    """Wait policies that may be measured, best guess first; `off` is always among them."""
    if ranks <= cores:
        return (OFF,)
    if simulations == 1:
        return (OFF, DOORBELL, YIELD)
    return (DOORBELL, YIELD, OFF)
