# SPDX-License-Identifier: LGPL-3.0-or-later
"""Useful work as progress: CPU seconds outside MPI, of a program that counts nothing else.

Inputs: samples of its ranks (`protocol.Ranks`) and how they wait. Outputs: the same as if so much
work were an iteration, in a `Meter` like any other; and how many cores its threads want.

CPU time outside MPI is not measured as such, since a clock that tells CPU time costs more than
most calls. It lies between bounds, and how ranks wait tells where (`outside`).

Invariants: pure; a sample that is behind the one before, as of a program after another, only
begins anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dovetail.controller.meter import Meter
from dovetail.core.protocol import Ranks
from dovetail.core.taken_cpu import DISTURBED, taken

UNIT = 0.01
"""CPU seconds that count as one iteration: a window of 1.5 s has eight of them where one rank
works for a twentieth of its time, and one is more than a clock of the kernel errs by."""
THREADS_AFTER = 1.0
"""Seconds after which it is believed that threads want more cores than there are ranks."""
ALIKE = 0.03
"""Share by which equal simulations differ in their work, unless they are seen to by more."""
LEAST = 0.01
"""Share of what it wants that a program is taken to get at least."""
ROUNDING = 0.25
"""Part of a core beyond a whole number that is left to chance, and to helpers that hardly run."""


class Work:
    """The useful work of one simulation: `meter` counts it, in `UNIT`s."""

    def __init__(self, warmup: int) -> None:
        self.meter = Meter(warmup, timed=True)
        self._done: list[float] = []
        self._last: Ranks | None = None
        self._span, self._used, self._queued = 0.0, 0.0, 0.0
        self._sums: list[list[float]] = [[], [], []]  # CPU, useful and MPI seconds in the window

    def restart(self) -> None:
        """A new window begins."""
        self.meter.reset()
        self._sums = [[], [], []]

    def add(self, now: float, ranks: Ranks, spins: bool) -> bool:
        """Take a sample of ranks that spin inside MPI or sleep there; True if work was done."""
        last, self._last = self._last, ranks
        if last is None or not _follows(last, ranks):
            self._done = self._done if len(self._done) == len(ranks.cpu) else [0.0] * len(ranks.cpu)
            self.restart()
            return False
        cpu, useful, mpi = (_since(last, ranks, what) for what in ("cpu", "useful", "mpi"))
        self._done = [
            done + outside(one, out, within, spins)
            for done, one, out, within in zip(self._done, cpu, useful, mpi)
        ]
        self._watch_threads(last, ranks)
        self._sums = [_sum(a, b) for a, b in zip(self._sums, (cpu, useful, mpi))]
        return self.meter.add(now, self._counted(ranks))

    def stand_still(self, ranks: Ranks) -> None:
        """Take a sample of ranks that are suspended: that time does not count."""
        self._last = ranks
        self.restart()

    def _counted(self, ranks: Ranks) -> Ranks:
        """The sample as if so much work were an iteration."""
        n, done = len(ranks.cpu), tuple(self._done)
        count = int(sum(done) / UNIT)
        stamp = max(ranks.stamp)
        zero = (0.0,) * n
        return Ranks((count,) * n, (stamp,) * n, done, done, zero, ranks.memory, "work")

    def _watch_threads(self, last: Ranks, ranks: Ranks) -> None:
        if ranks.queued is None or last.queued is None:
            return
        self._span += max(ranks.stamp) - max(last.stamp)
        self._used += sum(ranks.cpu) - sum(last.cpu)
        self._queued += max(0.0, ranks.queued - last.queued)  # those of threads that end are gone

    def got(self, cores: float, spins: bool) -> float:
        """The share that its threads had of the CPU that they wanted, as far as is known.

        Of those without MPI since they began, of ranks that spin over the window.
        """
        if self._span > 0.0:
            known, wanted = self._span >= THREADS_AFTER, self._used + self._queued
            return max(LEAST, self._used / wanted) if known and wanted > 0.0 else 1.0
        cpu, useful, mpi = self._sums
        lost = (taken(cpu, useful, mpi) or 0.0) if spins and len(cpu) <= cores else 0.0
        return max(LEAST, 1.0 - lost) if lost > DISTURBED else 1.0

    @property
    def threads(self) -> int:
        """Cores that its threads would keep busy, had each its own; 0 if that is unknown."""
        if self._span < THREADS_AFTER:
            return 0
        return math.ceil((self._used + self._queued) / self._span - ROUNDING)


def dearer(ends: Sequence[tuple[float, float]]) -> float:
    """How many times the CPU time work takes beside others, at least; 1 if that is not certain.

    `ends` are, of equal simulations that are done, the work of all and that of it which was done
    with a core for each rank. If the rest costs c times as much, all is c L + (1 - c) alone, L
    being what one takes alone: a line of least squares, whose slope errs by the scatter around it,
    or by `ALIKE` of the whole at least.
    """
    if len(ends) < 2:
        return 1.0
    n, (every, alone) = len(ends), zip(*ends)
    mean, middle = sum(every) / n, sum(alone) / n
    spread = sum((one - middle) ** 2 for one in alone)
    if spread <= 0.0:
        return 1.0
    slope = sum((x - middle) * (y - mean) for y, x in ends) / spread
    rest = sum((y - mean - slope * (x - middle)) ** 2 for y, x in ends)
    error = max(ALIKE * mean, math.sqrt(rest / max(1, n - 2))) / math.sqrt(spread)
    return float(max(1.0, 1.0 - slope - 2.0 * error))


def outside(cpu: float, useful: float, mpi: float, spins: bool) -> float:
    """CPU seconds outside MPI of a rank that used `cpu`, in so many wall seconds out- and inside.

    A rank that spins takes turns with others alike in and outside of MPI. One that sleeps there
    used little inside: no more than was not needed outside.
    """
    if not spins:
        return max(0.0, min(cpu, max(useful, cpu - mpi)))
    wall = useful + mpi
    return max(0.0, cpu - mpi * min(1.0, cpu / wall)) if wall > 0.0 else 0.0


def _sum(before: Sequence[float], more: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(before, more)] if before else [*more]


def _since(last: Ranks, ranks: Ranks, what: str) -> Sequence[float]:
    return [b - a for a, b in zip(getattr(last, what), getattr(ranks, what))]


def _follows(last: Ranks, ranks: Ranks) -> bool:
    """Whether a sample is a later one of the same processes; roundings are not a step back."""
    if len(last.cpu) != len(ranks.cpu) or max(ranks.stamp) <= max(last.stamp):
        return False
    steps = (min(_since(last, ranks, what)) for what in ("cpu", "useful", "mpi"))
    return min(steps) >= -UNIT
