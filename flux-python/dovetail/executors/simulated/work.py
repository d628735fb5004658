# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the simulated executor is told to simulate, and its ranks as numbers.

Inputs: the work of a simulation, faults to inject. Outputs: ranks and simulations with their
progress, and `fill`, the sharing of a node's cores.

Invariants: no clock and no randomness here; `fill` hands out no more than there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dovetail.core import protocol
from dovetail.core.protocol import Share, Spec


@dataclass(frozen=True)
class Work:
    """What a simulation does: `seconds` of CPU per iteration and rank, shape (ranks,).

    `noise` is the relative standard deviation of each rank's work, `startup` the seconds from
    launch to the first iteration; `publishes` False for a program that shows nothing, and `tells`
    False for one that shows no iterations, so that only its work is seen.
    `drift` is the work of the last iteration over that of the first, with a straight line in
    between. `interference` is the speed that it loses to each other simulation on its node
    beyond the sharing of cores: caches and memory, which no figure of its own foretells.
    `bound` is its speed with ranks that are bound to cores over that without.
    `cuts` is `seconds` on other numbers of ranks. Cut anew by measured weights, the same seconds
    are divided by them, each times the rank's `cost`.
    """

    seconds: tuple[float, ...]
    iterations: int = 100
    noise: float = 0.02
    startup: float = 0.5
    publishes: bool = True
    tells: bool = True
    drift: float = 1.0
    interference: float = 0.0
    bound: float = 1.0
    cuts: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    cost: tuple[float, ...] = ()

    def on(self, spec: Spec) -> tuple[float, ...]:
        """CPU seconds per iteration and rank as it is cut. Raises ValueError if unknown."""
        seconds = self.cuts.get(spec.ranks, self.seconds)
        if len(seconds) != spec.ranks:
            raise ValueError(f"{len(seconds)} works for {spec.ranks} ranks")
        if not spec.recut:
            return seconds
        costs = self.cost or (1.0,) * spec.ranks
        each = sum(seconds) / sum(spec.weights)
        return tuple(each * weight * cost for weight, cost in zip(spec.weights, costs))


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong at run time `t`.

    `kind`: death (a rank of `name` is killed), stall (`name` stops iterating), refuse (resizes
    are refused for `seconds`), delay (they take `seconds`), node (`name` is lost), away (no node
    is ready for `seconds`), clock (the run's clock jumps by `seconds`), fail (`name` exits 1),
    busy (for `seconds` programs of others leave rank 0 of `name` a third of what it had).
    """

    t: float
    kind: str
    name: str = ""
    seconds: float = 0.0


@dataclass(eq=False)
class Rank:
    """One rank: `left` CPU seconds of this iteration, `speed` of its work, `share` of a core."""

    sim: Sim
    node: int
    left: float = 0.0
    working: bool = False
    speed: float = 0.0
    share: float = 0.0
    cpu: float = 0.0
    useful: float = 0.0
    mpi: float = 0.0


@dataclass(eq=False)
class Sim:
    """One simulation on the machine: `pending` ranks still work on this iteration.

    It goes on after `over` iterations of an earlier launch; `halting` if it ends after this one.
    Rank 0 gets the share `granted` of its CPU.
    """

    spec: Spec
    work: Work
    share: Share
    order: int
    begins: float
    ranks: list[Rank] = field(default_factory=list)
    nodes: tuple[int, ...] = ()
    on: dict[int, list[Rank]] = field(default_factory=dict)
    started: bool = False
    stalled: bool = False
    halting: bool = False
    granted: float = 1.0
    over: int = 0
    iterations: int = 0
    pending: int = 0
    stamp: float = 0.0
    fresh: bool = False
    ranks_at: protocol.Ranks | None = None
    _weighed: tuple[Sequence[int], dict[int, float]] = ((), {})

    @property
    def running(self) -> bool:
        """True if its ranks want CPU."""
        return self.started and not self.share.suspended and not self.stalled

    def place(self, nodes: Sequence[int]) -> None:
        """Put its ranks on these nodes, one for each rank."""
        self.ranks = [Rank(self, node) for node in nodes]
        for rank in self.ranks:
            self.on.setdefault(rank.node, []).append(rank)
        self.nodes = tuple(sorted(self.on))

    def weight(self, node: int) -> float:
        """What its ranks on a node request, millicores."""
        if self._weighed[0] is not self.share.requests:
            found: dict[int, float] = {}
            for request, rank in zip(self.share.requests, self.ranks):
                found[rank.node] = found.get(rank.node, 0.0) + request
            self._weighed = self.share.requests, found
        return self._weighed[1].get(node, 0.0)


def fill(groups: Sequence[tuple[int, float]], cores: float) -> list[float]:
    """Share `cores` among groups of (how many cores it can use, weight); nothing is left idle."""
    if len(groups) == 1:
        return [max(0.0, min(float(groups[0][0]), cores))]
    given = [0.0] * len(groups)
    open_ = [i for i, (want, _) in enumerate(groups) if want > 0]
    left = cores
    while open_ and left > 1e-12:
        weight = sum(max(1e-9, groups[i][1]) for i in open_)
        full = [i for i in open_ if left * max(1e-9, groups[i][1]) / weight >= groups[i][0]]
        if not full:
            for i in open_:
                given[i] = left * max(1e-9, groups[i][1]) / weight
            break
        for i in full:
            given[i] = float(groups[i][0])
        left -= sum(given[i] for i in full)
        open_ = [i for i in open_ if i not in full]
    return given
