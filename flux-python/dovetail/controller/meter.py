# SPDX-License-Identifier: LGPL-3.0-or-later
"""Rates and loads from samples.

Inputs: the samples of one simulation's ranks, and the controller's own seconds. Outputs:
iterations per second over a window with its relative error, and work per iteration and rank.

Invariants: only whole iterations count; a window never spans a change of regime (`reset`), a
restart or a jump of the clock; memory is bounded, so a long window slides.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.core.protocol import Ranks
from dovetail.core.taken_cpu import DISTURBED, taken

KEEP = 96
"""Most marks kept per simulation."""
SPAN = 9.0
"""Seconds over which a window slides, to follow work that changes; longer if iterations are."""
LEAST = 8
"""Iterations that a sliding window keeps."""
SPACING = 0.1
"""Least seconds between two marks: closer ones would only make the window shorter."""
PARTS = 4
"""Sub-windows whose rates are compared to get the error of the whole."""
JUMP = 60.0
"""Seconds by which a rank's stamps may disagree with the controller's clock."""


@dataclass(frozen=True)
class Window:
    """One simulation's progress over `seconds`: `rate` in 1/s, `error` relative, 1 if unknown."""

    iterations: int
    seconds: float
    rate: float
    error: float


@dataclass(frozen=True)
class Mark:
    """The ranks at one iteration boundary; `now` in controller seconds, `stamp` in run seconds."""

    now: float
    iterations: int
    stamp: float
    ranks: Ranks


class Meter:
    """The recent progress of one simulation.

    If `timed`, samples are of any moment, and time in which nothing went on counts as well.
    """

    def __init__(self, warmup: int, timed: bool = False) -> None:
        self._timed = timed
        self.marks: deque[Mark] = deque(maxlen=KEEP)
        self.iterations = 0
        self._from = warmup
        self._window: Window | None = None
        self._fresh = False

    def reset(self, skip: int = 1) -> None:
        """Forget the window; the next `skip` iterations belong to the old regime."""
        self._fresh = False
        self.marks.clear()
        self._from = self.iterations + skip

    def add(self, now: float, ranks: Ranks) -> bool:
        """Take a sample; True if every rank has completed a further iteration."""
        iterations = min(ranks.iterations, default=0)
        if iterations < self.iterations:
            self.iterations = iterations
            self.reset()
            return False
        further = iterations > self.iterations
        if not further and not (self._timed and self.marks):
            return False
        self.iterations = iterations
        if iterations < self._from:
            return True
        self._fresh = False
        stamp = ranks.stamp[ranks.iterations.index(iterations)]
        if self.marks:
            last = self.marks[-1]
            step = stamp - last.stamp
            if not 0.0 < step < now - last.now + JUMP:
                self.marks.clear()
            elif step < SPACING:
                return further
        if math.isfinite(stamp):
            self.marks.append(Mark(now, iterations, stamp, ranks))
            self._slide(stamp, iterations)
        return further

    def _slide(self, stamp: float, iterations: int) -> None:
        marks = self.marks
        while len(marks) > PARTS + 1 and (
            stamp - marks[1].stamp >= SPAN and iterations - marks[1].iterations >= LEAST
        ):
            marks.popleft()

    @property
    def warm(self) -> bool:
        """True once the warm-up, or the rest of the old regime, is over."""
        return bool(self.marks)

    def window(self) -> Window | None:
        """Progress since the last reset, at most KEEP samples back; None if there is none."""
        if not self._fresh:
            self._window = _window(self.marks)
            self._fresh = True
        return self._window

    def since(self, now: float) -> Window | None:
        """Progress from samples that were not taken before; None if there is none."""
        return _window([mark for mark in self.marks if mark.now >= now])

    def got(self, cores: float, spins: bool) -> float:
        """See `share_got`; 1 if there is no window."""
        window = self.window()
        useful, cpu = self.loads("useful") or (), self.loads("cpu") or ()
        return share_got(useful, cpu, window.rate, cores, spins) if window else 1.0

    def loads(self, what: str) -> tuple[float, ...] | None:
        """Seconds per iteration and rank over the window, shape (ranks,).

        `what` is `useful`, `cpu` or `mpi`. None if there is no window, or the samples are of
        different sizes.
        """
        if len(self.marks) < 2:
            return None
        first, last = self.marks[0].ranks, self.marks[-1].ranks
        before: Sequence[float] = getattr(first, what)
        after: Sequence[float] = getattr(last, what)
        if len(before) != len(after):
            return None
        return tuple(
            max(0.0, b - a) / max(1, j - i)
            for a, b, i, j in zip(before, after, first.iterations, last.iterations)
        )


def share_got(
    useful: Sequence[float], cpu: Sequence[float], rate: float, cores: float, spins: bool
) -> float:
    """The share that ranks had of the CPU that they would have used, as far as that is known.

    `useful` and `cpu` are seconds per iteration, shape (ranks,), at `rate` iterations per second on
    `cores`, by ranks that spin inside MPI or sleep there.
    """
    if not useful or sum(cpu) <= 0.0:
        return 1.0
    if not spins:
        return min(1.0, sum(cpu) / max(1e-9, min(sum(useful), cores / rate)))
    mpi = [max(0.0, 1.0 / rate - one) for one in useful]
    lost = (taken(cpu, useful, mpi) or 0.0) if len(cpu) <= cores else 0.0
    return 1.0 - lost if lost > DISTURBED else 1.0


def _window(marks: Sequence[Mark]) -> Window | None:
    if len(marks) < 2:
        return None
    first, last = marks[0], marks[-1]
    seconds = last.stamp - first.stamp
    iterations = last.iterations - first.iterations
    if seconds <= 0.0 or iterations <= 0:
        return None
    return Window(iterations, seconds, iterations / seconds, _error(marks))


def _error(marks: Sequence[Mark]) -> float:
    """Relative standard error of the rate, from the spread between sub-windows."""
    parts = min(PARTS, len(marks) - 1)
    if parts < 2:
        return 1.0
    edges = [marks[round(k * (len(marks) - 1) / parts)] for k in range(parts + 1)]
    rates = []
    for a, b in zip(edges, edges[1:]):
        seconds = b.stamp - a.stamp
        if seconds <= 0.0:
            return 1.0
        rates.append((b.iterations - a.iterations) / seconds)
    mean = sum(rates) / parts
    if mean <= 0.0:
        return 1.0
    spread = math.sqrt(sum((r - mean) ** 2 for r in rates) / (parts - 1))
    return min(1.0, spread / mean / math.sqrt(parts))
