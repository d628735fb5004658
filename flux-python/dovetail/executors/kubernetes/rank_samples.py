# SPDX-License-Identifier: LGPL-3.0-or-later
"""The ranks of one simulation, put together from what its nodes say. Pure.

Inputs: samples from the nodes, each on its node's clock. Output: `protocol.Ranks` on the run's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dovetail.core import contention, protocol
from dovetail.core.contention import Contention, Throttling
from dovetail.executors.pods import messages
from dovetail.mpi import sampling


class RankSamples:
    """What is known of a simulation's `count` ranks, wherever they are."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._ranks: dict[int, list[float]] = {}
        self._told: dict[int, list[float]] = {}  # what their pages told last
        self._lines: tuple[int, float, float] = (0, 0.0, -1.0)
        self._sample: protocol.Ranks | None = None

    def take(
        self, ranks: Mapping[str, Sequence[float]], lines: Sequence[float] | None, offset: float
    ) -> None:
        """A node's sample of its ranks; `offset` maps its clock onto the run's."""
        if lines and len(lines) == 3:
            self._lines = int(lines[0]), max(0.0, lines[1] + offset), lines[2]
        for rank, values in ranks.items():
            if 0 <= int(rank) < self._count and len(values) == 7:
                row = [values[0], max(0.0, values[1] + offset), *values[2:]]
                self._ranks[int(rank)] = self._told[int(rank)] = row

    def take_used(
        self, groups: Mapping[str, Sequence[float]], sizes: Sequence[int], now: float
    ) -> None:
        """What rank groups used since their ranks' pages told anything, all of it outside MPI.

        `now` is on the run's clock. Which of a group's ranks did what is not known.
        """
        for name, values in groups.items():
            group = int(name)
            if not 0 <= group < len(sizes) or len(values) != 2:
                continue
            size, first = sizes[group], sum(sizes[:group])
            cpu, memory = values[0] / size, values[1] / size
            for rank in range(first, first + size):
                told = self._told.setdefault(rank, [-1, now, 0.0, 0.0, 0.0, 0, -1])
                if told[0] < 0:
                    work = told[2] + cpu, told[3] + now - told[1], told[4], max(told[5], memory)
                    self._ranks[rank] = [-1, now, *work, -1]

    def new(self, over: bool) -> protocol.Ranks | None:
        """The ranks, if all have published and anything is new; `over` once they ended well."""
        if len(self._ranks) < self._count:
            return None
        rows = [self._ranks[rank] for rank in range(self._count)]
        found = sampling.of_values(rows, self._lines, over)
        if found == self._sample:
            return None
        self._sample = found
        return found


class Waits:
    """What is known of that which kept a simulation's ranks from their cores, on all nodes."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._ranks: dict[int, Sequence[float]] = {}
        self._groups: dict[int, tuple[Throttling | None, float]] = {}

    def take(self, message: messages.Counts, sizes: Sequence[int]) -> Contention:
        """A node's counts, of groups of these `sizes`; what is known with them."""
        for name, row in message.groups.items():
            group = int(name)
            if 0 <= group < len(sizes) and len(row) == 6:
                limit, periods, throttled, seconds, of, pressure = row
                cores = min(sizes[group], message.cpus)
                counts = int(limit), int(periods), int(throttled)
                stops = Throttling(*counts, round(seconds, 6), round(of * cores, 6))
                self._groups[group] = (stops if limit else None, round(pressure, 6))
        for name, row in message.ranks.items():
            if 0 <= int(name) < self._count and len(row) == 4:
                self._ranks[int(name)] = row
        rows = [self._ranks[rank] for rank in range(self._count) if rank in self._ranks]
        limited = [stops for stops, _ in self._groups.values() if stops is not None]
        pressed = [pressure for _, pressure in self._groups.values() if pressure >= 0]
        return sampling.of_waits(
            rows if len(rows) == self._count else [],
            contention.together(limited),
            max(pressed, default=None),
        )


class Clocks:
    """The nodes' clocks (CLOCK_MONOTONIC) against ours."""

    def __init__(self) -> None:
        self._offsets: dict[str, float] = {}
        self._anew: set[str] = set()

    def joined(self, node: str) -> None:
        """A node's agent has connected: the node may have been booted since, its clock at 0."""
        self._anew.add(node)

    def heard(self, node: str, there: float, here: float) -> None:
        """One more message came from a node: sent `there`, heard `here`."""
        last = float("inf") if node in self._anew else self._offsets.get(node, float("inf"))
        self._anew.discard(node)
        self._offsets[node] = min(here - there, last)

    def offset(self, node: str) -> float:
        """What to add to the node's time, for which it was heard before.

        The smallest difference seen since its agent connected belongs to the message that took
        least time.
        """
        return self._offsets[node]
