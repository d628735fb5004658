# SPDX-License-Identifier: LGPL-3.0-or-later
"""What kept ranks from their cores: a limit of CPU, or others that wanted to run. Pure.

Inputs: counters of the kernel, as executors sample them. Outputs: shares of time, and a sentence
where one is large enough to matter. Invariants: what is not known is None or empty, never 0, and
nothing is said of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Optional, TypeVar

T = TypeVar("T", int, float)

MATERIAL_STOPS = 0.05
"""Share of its time for which a limit stops a simulation, from which on that is worth a word."""
MATERIAL_PERIODS = 0.25
"""The same of the periods in which it was stopped: where others have the core meanwhile, the kernel
counts that as a wait for the core, and little of it as a stop."""
MATERIAL_QUEUE = 0.2
"""The same of a rank that waits for a core. More is asked, as a node that is full has waits."""


# ruff: noqa: UP045 (pydantic reads the types, on Python 3.9 too)
@dataclass(frozen=True)
class Throttling:
    """What the limit of one or several control groups did to their processes so far.

    `limit` is in millicores. In `periods` the group wanted CPU, in `throttled` of them it was
    stopped at the limit; `seconds` of `of` are those of its cores that it lost so: a period in
    which two ranks want to run has those of two cores.
    """

    limit: int
    periods: int
    throttled: int
    seconds: float
    of: float

    @property
    def share(self) -> float:
        """The share of its time for which it was stopped, 0 to 1."""
        return min(1.0, self.seconds / self.of) if self.of > 0 else 0.0

    def since(self, before: Throttling) -> Throttling:
        """What came after that."""
        return Throttling(
            self.limit,
            max(0, self.periods - before.periods),
            max(0, self.throttled - before.throttled),
            round(max(0.0, self.seconds - before.seconds), 6),
            max(0.0, self.of - before.of),
        )


@dataclass(frozen=True)
class Contention:
    """What kept the ranks of one simulation from their cores, since it was launched.

    `throttling` is None where nothing is limited, and `pressure` (seconds for which some task of
    it waited for a core, by the kernel's pressure stall information) where the kernel does not
    tell; of several pods of the one that waited most. Arrays have shape (ranks,), and are empty
    where that is not known of every rank:
    context switches, `voluntary` to wait for something and `involuntary` as others wanted the
    core, seconds `queued` for a core, all threads added up, and seconds `elapsed` since MPI_Init.
    A rank that is stopped at a limit is in the queue too.
    """

    throttling: Optional[Throttling] = None
    pressure: Optional[float] = None
    voluntary: tuple[int, ...] = ()
    involuntary: tuple[int, ...] = ()
    queued: tuple[float, ...] = ()
    elapsed: tuple[float, ...] = ()

    @property
    def waiting(self) -> tuple[float, ...]:
        """The share of its time for which each rank waited for a core; empty if unknown."""
        pairs = zip(self.queued, self.elapsed)
        return tuple(min(1.0, part / whole) if whole > 0 else 0.0 for part, whole in pairs)

    def since(self, before: Contention) -> Contention:
        """What came after that, of the same launch."""
        stops, pressure = self.throttling, self.pressure
        if stops is not None and before.throttling is not None:
            stops = stops.since(before.throttling)
        if pressure is not None and before.pressure is not None:
            pressure -= before.pressure
        return Contention(
            stops,
            pressure,
            _since(self.voluntary, before.voluntary),
            _since(self.involuntary, before.involuntary),
            _since(self.queued, before.queued),
            _since(self.elapsed, before.elapsed),
        )


def _since(now: tuple[T, ...], before: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(a - b for a, b in zip(now, before)) if len(before) == len(now) else now


def together(groups: Sequence[Throttling]) -> Throttling | None:
    """Those of a simulation's groups added up; None if there is none."""
    if not groups:
        return None
    return Throttling(
        sum(one.limit for one in groups),
        sum(one.periods for one in groups),
        sum(one.throttled for one in groups),
        sum(one.seconds for one in groups),
        sum(one.of for one in groups),
    )


@dataclass(frozen=True)
class Hindrance:
    """One thing that took a material `share` of a simulation's time, and a sentence on it."""

    kind: str
    share: float
    words: str


def hindrances(seen: Contention, own_limit: bool, names: Sequence[str] = ()) -> Iterator[Hindrance]:
    """What took much of a simulation's time; `own_limit` if its plan has a limit.

    Ranks are called by their `names`, or, without any, by their numbers in `seen`.
    """
    stops = seen.throttling
    stopped = stops is not None and (
        stops.share >= MATERIAL_STOPS or stops.throttled > MATERIAL_PERIODS * stops.periods
    )
    if stops is not None and stopped:
        which = f"of {cores(stops.limit)}"
        which = f"its limit {which}" if own_limit else f"the limit {which} around it"
        much = f"for {percent(stops.share)} of its time"
        if stops.share < MATERIAL_STOPS:
            much = f"in {stops.throttled} of {stops.periods} periods"
        yield Hindrance("throttling", stops.share, f"throttled {much}: {which} is too small")
    share = max(seen.waiting, default=0.0)
    if share >= MATERIAL_QUEUE and not stopped:
        rank = seen.waiting.index(share)
        who = f"rank {names[rank] if names else rank} waited for a core"
        told = f"{who} for {percent(share)} of its time: more wants to run there than can at once"
        yield Hindrance("queue", share, told)


def percent(share: float) -> str:
    """A share as whole percent."""
    return f"{100 * share:.0f} %"


def cores(millicores: int) -> str:
    """Millicores as a number of cores, in words."""
    return f"{millicores / 1000:g} core{'' if millicores == 1000 else 's'}"
