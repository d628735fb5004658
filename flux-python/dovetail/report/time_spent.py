# SPDX-License-Identifier: LGPL-3.0-or-later
"""Where the time of each simulation went: in its work, in MPI, or waiting for a core.

In: the simulations of a `Summary`. Out: a table for the terminal and the page, and a sentence for
each family on what hindered it most. Invariants: pure; a column that no simulation has a figure
for is left out, and a dash stands for what is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable, Protocol

from dovetail.core.contention import Contention, Hindrance, percent
from dovetail.mpi.profile import Efficiency


class Timed(Protocol):
    """What is looked at of a simulation."""

    @property
    def name(self) -> str:
        """Its own."""

    @property
    def family(self) -> str:
        """Its plan entry's."""

    @property
    def efficiency(self) -> Efficiency | None:
        """How much of its ranks' time was work."""

    @property
    def contention(self) -> Contention | None:
        """What kept its ranks from their cores."""

    @property
    def hindrances(self) -> Sequence[Hindrance]:
        """What of that was material."""


_EFFICIENCIES: dict[str, Callable[[Efficiency], float]] = {
    "parallel": lambda one: one.parallel,
    "balance": lambda one: one.load_balance,
    "comm.": lambda one: one.communication,
}
_CONTENTION: dict[str, Callable[[Contention], str]] = {
    "throttled": lambda one: percent(one.throttling.share) if one.throttling else "-",
    "queued": lambda one: percent(max(one.waiting)) if one.waiting else "-",
    "gave up": lambda one: f"{sum(one.voluntary):,}" if one.voluntary else "-",
    "lost it": lambda one: f"{sum(one.involuntary):,}" if one.involuntary else "-",
    "pressure s": lambda one: "-" if one.pressure is None else f"{one.pressure:.2f}",
}


def table(
    simulations: Sequence[Timed], whole: Efficiency | None
) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of cells; the last row is that of the whole queue, if there are several."""
    rows = [[one.name, *_cells(one.efficiency, one.contention)] for one in simulations]
    if len(rows) > 1:
        rows.append(["all", *_cells(whole, None)])
    headings = ["simulation", *_EFFICIENCIES, *_CONTENTION]
    told = [at for at in range(len(headings)) if at == 0 or any(row[at] != "-" for row in rows)]
    if len(told) == 1:
        return [], []
    return [headings[at] for at in told], [[row[at] for at in told] for row in rows]


def _cells(efficiency: Efficiency | None, contention: Contention | None) -> list[str]:
    return [
        *(f"{value(efficiency):.2f}" if efficiency else "-" for value in _EFFICIENCIES.values()),
        *(value(contention) if contention else "-" for value in _CONTENTION.values()),
    ]


def sentences(simulations: Sequence[Timed]) -> list[str]:
    """What hindered each family most, by kind; the one of it that it hit hardest speaks for all."""
    hit: dict[tuple[str, str], list[tuple[float, str, str]]] = {}
    for one in simulations:
        for hindrance in one.hindrances:
            told = (hindrance.share, one.name, hindrance.words)
            hit.setdefault((one.family, hindrance.kind), []).append(told)
    found = []
    for some in hit.values():
        _, name, words = max(some)
        more = f"; {len(some) - 1} more of its plan entry alike" if len(some) > 1 else ""
        found.append(f"{name}: {words}{more}")
    return found
