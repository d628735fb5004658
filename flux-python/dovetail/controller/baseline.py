# SPDX-License-Identifier: LGPL-3.0-or-later
"""What simulations do alone: the profile of a family, and each one's own baseline later on.

Iterations get cheaper or dearer as a run goes on: solvers converge, adaptive meshes grow. A rate
that was measured alone is then soon wrong, and every slowdown with it. CPU time per iteration
tells the work, but it also grows with interference (caches, memory). So it is compared only
within one regime (the same simulations at once, waiting the same way), where interference
stays as it is: there a change is the simulation's own. At the end of a regime what was learned
is folded in, and the next one begins with a reference of its own.

Inputs: rates and loads measured alone; CPU seconds per iteration and rank while others run too.
Outputs: the rate and the loads alone as they are by now.

Invariants: pure; without a measurement within the regime the last values stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.core.protocol import Measure, WaitPolicy

Loads = tuple[float, ...]
"""Seconds of work per iteration and rank, shape (ranks,)."""


@dataclass(frozen=True)
class Profile:
    """A shape alone: `rate` in iterations/s (1/s), `error` relative.

    `loads` is CPU seconds per iteration and rank, shape (ranks,); `wait` the best policy alone;
    `need` the cores that it keeps busy; `memory` the peak of all ranks, bytes; `startup` the
    seconds from launch to the first iteration; `alone` is False if others ran meanwhile. `got` is
    the share that the ranks had of the CPU that they would have used: programs beside the run may
    have taken the rest. `measure` says what an iteration is here.
    """

    rate: float
    error: float
    loads: tuple[float, ...]
    got: float
    wait: WaitPolicy
    need: float
    memory: int
    startup: float
    alone: bool
    measure: Measure = "iterations"


class Alone:
    """One simulation alone: `rate` in iterations/s (0 if unknown), `loads` and `got`."""

    def __init__(self, rate: float = 0.0, loads: Loads = (), got: float = 1.0) -> None:
        self.rate = rate
        self.loads = loads
        self.got = got
        self._begun: tuple[float, Loads, Loads] | None = None

    def follow(self, cpu: Loads, cores: float) -> None:
        """CPU seconds per iteration and rank over the present window, on `cores`."""
        if self._begun is None or len(self._begun[2]) != len(cpu):
            self._begun = (self.rate, self.loads, cpu)
            return
        rate, loads, before = self._begun
        then, now = least_seconds(before, cores), least_seconds(cpu, cores)
        if then <= 0.0 or now <= 0.0:
            return
        self.rate = rate * then / now
        self.loads = tuple(
            load * b / a if a > 0.0 else load for load, a, b in zip(loads, before, cpu)
        )

    def settle(self) -> None:
        """The regime ends: what is known now is where the next one begins."""
        self._begun = None


def least_seconds(loads: Sequence[float], cores: float) -> float:
    """The least seconds of an iteration with these loads: its heaviest rank, or all on `cores`."""
    if not loads or cores <= 0.0:
        return 0.0
    return max(max(loads), sum(loads) / cores)
