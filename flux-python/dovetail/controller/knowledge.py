# SPDX-License-Identifier: LGPL-3.0-or-later
"""What was learned about running simulations at once.

Inputs: measured throughput and slowdowns of a co-scheduled set under a wait policy. Outputs:
verdicts, the best wait policy of a set, the throughput model's interference β with its error.

Invariants: a verdict, once given, stands until `forget`, except that a good one may turn bad;
throughput is in simulations alone (1.0 is one after the other).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from dovetail.controller.settings import Settings
from dovetail.core import throughput_model
from dovetail.core.protocol import WaitPolicy
from dovetail.core.throughput_model import Point, Prior

CoScheduled = tuple[tuple[str, int], ...]
"""A co-scheduled set, which is what runs at once: (shape, how many), sorted by shape."""


def co_scheduled(families: Mapping[str, int]) -> CoScheduled:
    """The canonical form of how many of each family run at once."""
    return tuple(sorted((name, count) for name, count in families.items() if count > 0))


def with_one(running: CoScheduled, family: str) -> CoScheduled:
    """The co-scheduled set with one more of a family."""
    counts = dict(running)
    counts[family] = counts.get(family, 0) + 1
    return co_scheduled(counts)


class TrialVerdict(enum.Enum):
    """Whether a co-scheduled set pays. OPEN until it is measured."""

    OPEN = "open"
    GOOD = "good"
    BAD = "bad"


@dataclass(frozen=True)
class Measure:
    """A set under one wait policy: `error` is absolute; `slowdowns` in the order of the shapes.

    The order in which they came is another each time that the set runs.
    """

    throughput: float
    error: float
    slowdowns: tuple[float, ...]


@dataclass
class Outcome:
    """What is known of one co-scheduled set; `why` tells the reason of a verdict.

    `doubted_at` is since when it has done less than when it was judged, in controller seconds.
    """

    measures: dict[WaitPolicy, Measure] = field(default_factory=dict)
    verdict: TrialVerdict = TrialVerdict.OPEN
    why: str = ""
    doubted_at: float | None = None

    @property
    def best(self) -> tuple[WaitPolicy, Measure] | None:
        """The wait policy with the highest throughput so far.

        The candidates are measured in the order in which they are to be preferred, so that a later
        one has to be better by more than both measurements may err.
        """
        found: tuple[WaitPolicy, Measure] | None = None
        for wait, measure in self.measures.items():
            noise = 2.0 * math.hypot(measure.error, found[1].error) if found else 0.0
            if found is None or measure.throughput > found[1].throughput + noise:
                found = wait, measure
        return found

    def conclude(self, verdict: TrialVerdict, why: str) -> None:
        """Give the verdict; a good one may be turned into a bad one later."""
        self.verdict, self.why = verdict, why


class Knowledge:
    """Outcomes by co-scheduled set, and the interference that follows from them."""

    def __init__(self, settings: Settings) -> None:
        # What is believed of β beforehand counts as one more measurement, at a load where it
        # would be as uncertain as it is large. One point has no residual of its own: a window's
        # noise stands in for it.
        beta, noise = settings.beta, settings.steady
        self._prior = Prior(beta, (noise / beta) ** 2 if beta > 0.0 else 0.0, noise, 1)
        self.outcomes: dict[CoScheduled, Outcome] = {}
        self.points: dict[CoScheduled, Point] = {}
        self.beta = beta
        self.beta_error = beta
        self.error: float | None = None  # of the model at the measured sets, rms, relative

    def forget(self, family: str | None = None) -> None:
        """The capacity is another, or a family's rate alone: what paid may not pay now."""
        for running in [m for m in self.outcomes if family is None or family in dict(m)]:
            del self.outcomes[running]
            self.points.pop(running, None)

    def outcome(self, running: CoScheduled) -> Outcome:
        """The record of a set, made if need be."""
        return self.outcomes.setdefault(running, Outcome())

    def verdict(self, running: CoScheduled) -> TrialVerdict:
        """Whether a set pays, as far as is known."""
        known = self.outcomes.get(running)
        return known.verdict if known else TrialVerdict.OPEN

    def throughput(self, running: CoScheduled) -> float | None:
        """The best measured throughput of a set; 1.0 by definition for one simulation."""
        if sum(count for _, count in running) <= 1:
            return 1.0
        known = self.outcomes.get(running)
        return known.best[1].throughput if known and known.best else None

    def reference(self, running: CoScheduled) -> float:
        """The best that is known without one of the set: what the set has to beat."""
        found = 1.0
        for name, _ in running:
            rest = tuple((n, c - (n == name)) for n, c in running if c - (n == name) > 0)
            value = self.throughput(rest)
            if value is not None and self.verdict(rest) is not TrialVerdict.BAD:
                found = max(found, value)
        return found

    def learn(self, running: CoScheduled, point: Point) -> None:
        """Fit β again with the best measurement of a set."""
        self.points[running] = point
        fit = throughput_model.fit(list(self.points.values()), self._prior)
        self.beta, self.beta_error, self.error = fit.beta, fit.beta_error, fit.rms_error
