# SPDX-License-Identifier: LGPL-3.0-or-later
"""On how many ranks simulations run that may have several, and why: a sentence for each plan entry.

Inputs: the data of a run's notes of what `choice`, in their order. Outputs: lines for the live
table, `top`, the summary and the report.

Invariants: pure. Every figure is said to be measured or predicted. Of entries whose ranks the plan
keeps nothing is said: nothing was chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dovetail.core import units

LINES = 4
"""Entries that have a line; the others are counted."""


@dataclass(frozen=True)
class _Entry:
    """What the last choices said of a plan entry.

    `widths` is how many were to run on how many ranks, and `seconds` what one takes, of which those
    on `measured` ranks are no predictions; it has so many `iterations`, 0 if that is not known.
    """

    widths: Mapping[int, int]
    seconds: Mapping[int, float]
    measured: frozenset[int]
    iterations: int
    cores: int

    def core_seconds(self, ranks: int, /) -> float:
        """What one costs; more ranks than there are cores share all of them."""
        return self.seconds[ranks] * min(ranks, self.cores)


@dataclass
class Decided:
    """What was decided so far, by plan entry."""

    entries: dict[str, _Entry] = field(default_factory=dict)

    def take(self, data: Mapping[str, Any]) -> None:
        """Add a choice, which tells of the entries that go on; the others stay as they were.

        One of which none is left to start keeps its widths.
        """
        for name, known in data.get("open", {}).items():
            widths = data["widths"].get(name) or {}
            before = self.entries.get(name)
            if widths or before:
                self.entries[name] = _Entry(
                    _by_ranks(widths) if widths or before is None else before.widths,
                    _by_ranks(data["seconds"].get(name, {})),
                    frozenset(known["measured"]),
                    known["iterations"],
                    data["cores"],
                )

    def lines(
        self, at_once: Mapping[str, int], ran: Mapping[str, Mapping[int, int]] | None = None
    ) -> list[str]:
        """A sentence for each entry; so many of it run `at_once`, or did at most.

        `ran` is how many did on how many ranks, once that is known; else it is what is planned.
        """
        said = []
        for name, entry in self.entries.items():
            counts = (ran or {}).get(name) or entry.widths
            whose = f" for {name}" if len(self.entries) > 1 else ""
            beside = f", {at_once[name]} at once" if at_once.get(name, 0) > 1 else ""
            said.append(f"decided{whose}: {_on(counts)}{beside}{_why(entry, counts)}")
        more = len(said) - LINES
        return said if more <= 0 else [*said[:LINES], f"and for {more} more"]


def _by_ranks(values: Mapping[str, Any]) -> dict[int, Any]:
    """Something by number of ranks, from JSON."""
    return {int(ranks): value for ranks, value in values.items()}


def _on(counts: Mapping[int, int]) -> str:
    if sum(counts.values()) == 1:
        return _ranks(*counts)
    if len(counts) == 1:
        return f"{_ranks(*counts)} each"
    return ", ".join(f"{count} on {_ranks(r)} each" for r, count in sorted(counts.items()))


def _why(entry: _Entry, counts: Mapping[int, int]) -> str:
    """What the ranks that most have cost, against the best of the others.

    Where more ranks are chosen than cost least, it is for their speed.
    """
    most = max(counts, key=lambda ranks: counts[ranks])
    if not entry.measured or most not in entry.seconds:
        return ", before anything was measured"
    here = min(most, entry.cores)
    others = [ranks for ranks in entry.seconds if min(ranks, entry.cores) != here]
    other = min(others, key=entry.core_seconds, default=most)
    costs, per = entry.core_seconds, " and core"
    if other < most and entry.core_seconds(other) < entry.core_seconds(most):
        costs, per = entry.seconds.__getitem__, ""
    each = max(1, entry.iterations)
    milli = costs(most) < each

    def figure(ranks: int) -> tuple[str, str]:
        value = units.rounded(costs(ranks) / each * (1000 if milli else 1))
        return value, "measured" if ranks in entry.measured else "predicted"

    value, source = figure(most)
    of = "iteration" if entry.iterations else "simulation"
    words = f": {value} {'ms' if milli else 's'} per {of}{per} ({source})"
    words += f" on {_ranks(most)}" if len(counts) > 1 else ""
    if other == most:
        return words
    value, source = figure(other)
    return f"{words} against {value} ({source}) on {_ranks(other)}"


def _ranks(count: int) -> str:
    return units.counted(count, "rank")
