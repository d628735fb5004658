# SPDX-License-Identifier: LGPL-3.0-or-later
"""What was learned about running simulations at once.

Inputs: measured throughput and slowdowns of a mix under a wait policy. Outputs: verdicts, the
best policy of a mix, the model's interference β with its error.

Invariants: a verdict, once given, stands until `forget`, except that a
good one may turn bad; throughput is in simulations alone (1.0 is one after the other).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from dovetail.controller.settings import Mix, Settings
from dovetail.core.protocol import WaitPolicy


@dataclass(frozen=True)
class Measure:
    """A mix under one wait policy: `error` is absolute; `slowdowns` by simulation, sorted."""

    throughput: float
    error: float
    slowdowns: tuple[float, ...]


@dataclass
class Outcome:
    """What is known of one mix. `verdict` is "" while it is being measured, else good or bad."""

    measures: dict[WaitPolicy, Measure] = field(default_factory=dict)
    verdict: str = ""
    why: str = ""

    @property
    def best(self) -> tuple[WaitPolicy, Measure] | None:
        """The wait policy with the highest throughput so far."""
        if not self.measures:
            return None
        return max(self.measures.items(), key=lambda item: item[1].throughput)


@dataclass(frozen=True)
class Point:
    """One measurement for the model: slowdown over bound at `load` ranks of others per core."""

    load: float
    excess: float
    slowdown: float


class Knowledge:
    """Outcomes by mix, and the interference that follows from them."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.outcomes: dict[Mix, Outcome] = {}
        self.points: dict[Mix, Point] = {}
        self.beta = settings.beta
        self.beta_error = settings.beta

    def forget(self, family: str | None = None) -> None:
        """The capacity is another, or a family's rate alone: what paid may not pay now."""
        for mix in [m for m in self.outcomes if family is None or family in dict(m)]:
            del self.outcomes[mix]
            self.points.pop(mix, None)

    def outcome(self, mix: Mix) -> Outcome:
        """The record of a mix, made if need be."""
        return self.outcomes.setdefault(mix, Outcome())

    def verdict(self, mix: Mix) -> str:
        """Good, bad, or "" for unknown."""
        known = self.outcomes.get(mix)
        return known.verdict if known else ""

    def throughput(self, mix: Mix) -> float | None:
        """The best measured throughput of a mix; 1.0 by definition for one simulation."""
        if sum(count for _, count in mix) <= 1:
            return 1.0
        known = self.outcomes.get(mix)
        return known.best[1].throughput if known and known.best else None

    def reference(self, mix: Mix) -> float:
        """The best that is known without one of the mix: what it has to beat."""
        found = 1.0
        for name, _ in mix:
            rest = tuple((n, c - (n == name)) for n, c in mix if c - (n == name) > 0)
            value = self.throughput(rest)
            if value is not None and self.verdict(rest) != "bad":
                found = max(found, value)
        return found

    def learn(self, mix: Mix, load: float, bound: float, mean_slowdown: float) -> None:
        """Fit β again with the best measurement of a mix (least squares through the bound)."""
        self.points[mix] = Point(load, mean_slowdown - bound, mean_slowdown)
        self._fit(list(self.points.values()))

    def _fit(self, points: Sequence[Point]) -> None:
        # What is believed beforehand counts as one more measurement, at a load where it would
        # be as uncertain as it is large.
        prior, noise = self.settings.beta, self.settings.steady
        known = (noise / prior) ** 2 if prior > 0.0 else 0.0
        spread = known + sum(p.load**2 for p in points)
        if spread <= 0.0:
            return
        self.beta = max(0.0, (known * prior + sum(p.load * p.excess for p in points)) / spread)
        rest = [p.excess - self.beta * p.load for p in points]
        # One point has no residual of its own: a window's noise stands in for it.
        sigma = math.sqrt(
            (sum(r * r for r in rest) + self.settings.steady**2) / max(1, len(points))
        )
        self.beta_error = sigma / math.sqrt(spread)

    @property
    def error(self) -> float | None:
        """Root mean square of the model's relative errors at the measured mixes."""
        if not self.points:
            return None
        rest = [(p.excess - self.beta * p.load) / p.slowdown for p in self.points.values()]
        return math.sqrt(sum(r * r for r in rest) / len(rest))
