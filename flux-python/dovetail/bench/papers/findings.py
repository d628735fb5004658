# SPDX-License-Identifier: LGPL-3.0-or-later
"""A published number beside a measured one, and what follows; the form of an experiment.

Inputs: `Published` numbers, the repeats of a measurement. Outputs: `Finding`s with a verdict.
Invariants: pure; what was not measured has a reason instead of a number; a verdict is about the
effect, so that 2 x where the paper has 4 x is half of it and not the same.

    effect 1.77 x, here 1.60 to 1.70 x  ->  confirmed (0.8 of its logarithm or more)
    effect 1.77 x, here 1.10 to 1.20 x  ->  smaller
    effect 1.77 x, here 0.95 to 1.10 x  ->  not seen: the rounds lie on both sides of 1
    effect 1.77 x, here 0.60 to 0.70 x  ->  the opposite
    amount 108 s, here 400 to 600 s     ->  larger: more than 1/0.8 of it
    same 1 x, here 0.98 to 1.9, 1.5 x   ->  not seen: far from 1, with rounds on both sides
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.bench.harness import Row
from dovetail.bench.papers.place import Place
from dovetail.bench.papers.published import Published
from dovetail.bench.papers.scales import Scale

CONFIRMED, SMALLER, LARGER = "confirmed", "smaller", "larger"
NOT_SEEN, OPPOSITE = "not seen", "the opposite"
NOT_MEASURED, NO_NUMBER = "not measured here", "no number found"
DISTURBED = "disturbed"
VERDICTS = (CONFIRMED, SMALLER, LARGER, NOT_SEEN, OPPOSITE, DISTURBED, NOT_MEASURED, NO_NUMBER)

ENOUGH = 0.8  # of an effect that counts as the same
NOISE = 0.02  # a ratio this near to 1 is none
ALIKE = 0.05  # what the papers call no difference

Figures = Mapping[str, float]
Measured = Mapping[str, Sequence[Figures]]
"""By variant, a round each; the rounds of all variants belong together."""


def verdict(published: Published, row: Row | None) -> str:
    """What a measurement says about a published number; one of `VERDICTS`."""
    if row is None:
        return NOT_MEASURED
    theirs, ours, (low, high) = published.value, row.median, row.spread
    if theirs is None:
        return NO_NUMBER
    if published.kind == "most":
        return CONFIRMED if ours <= theirs else NOT_SEEN
    if published.kind == "same":
        if abs(ours - 1) <= max(ALIKE, abs(theirs - 1)):
            return CONFIRMED
        return NOT_SEEN if low <= 1 <= high else OPPOSITE
    if published.kind == "amount":
        if ours > theirs / ENOUGH > 0:
            return LARGER
        return _of_effect(ours / theirs, low / theirs, high / theirs, 0.0)
    if min(low, high) <= 0 or abs(theirs - 1) < 1e-9:
        return NOT_SEEN
    scale = math.log(theirs)
    share, one, other = (math.log(value) / scale for value in (ours, low, high))
    return _of_effect(share, min(one, other), max(one, other), NOISE / abs(scale))


def _of_effect(share: float, low: float, high: float, noise: float) -> str:
    """By the share of the published effect that was seen, and its lowest and highest round."""
    if low <= noise and high >= -noise:
        return NOT_SEEN
    if share < 0:
        return OPPOSITE
    return CONFIRMED if share >= ENOUGH else SMALLER


@dataclass(frozen=True)
class Finding:
    """One row: what the paper says, or None, and what was measured, or why it was not.

    `what` and `unit` are of the measurement; `note` is said in addition. `group` puts findings
    into one chart, `at` is the place on its axis, 1 or more, where that has numbers. A `detail` is
    shown on the page alone. What was measured while others used the cores is `disturbed`, and says
    nothing about the paper.
    """

    what: str
    unit: str
    row: Row | None = None
    published: Published | None = None
    why: str = ""
    note: str = ""
    group: str = ""
    at: float | None = None
    detail: bool = False
    disturbed: bool = False

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`."""
        if self.published is None:
            return NO_NUMBER if self.row else NOT_MEASURED
        if self.row and self.disturbed and self.published.value is not None:
            return DISTURBED
        return verdict(self.published, self.row)

    @property
    def ratio(self) -> float | None:
        """Measured / published; None where one is missing or the published number is not above 0.

        An R squared below 0 says that a model is of no use, however far below.
        """
        theirs = self.published.value if self.published else None
        if self.row is None or theirs is None or theirs <= 0:
            return None
        return self.row.median / theirs

    def to_json(self) -> dict[str, object]:
        """As `--json` prints it."""
        one = self.published
        return {
            "what": self.what,
            "unit": self.unit,
            "paper": one.paper if one else None,
            "where": one.where if one else None,
            "source": one.source if one else None,
            "published": one.value if one else None,
            "values": list(self.row.values) if self.row else None,
            "median": self.row.median if self.row else None,
            "ratio": self.ratio,
            "verdict": self.verdict,
            "why": self.why,
            "note": self.note,
        }


@dataclass(frozen=True)
class Setting:
    """What an experiment may use; `price` is that of a vCPU-hour, 0 if the user gave none.

    `output` is a directory, not there at first, for what it keeps to go on with.
    """

    place: Place
    scale: Scale
    price: float
    progress: Callable[[str], None]
    output: Path


@dataclass(frozen=True)
class Experiment:
    """One row of the table: how it is measured, and what that says about which numbers.

    `variants` makes its cases and gives what is measured in turn; it raises NotHere where that
    cannot be. `findings` reads the rounds. `rests_on` names the experiment whose measurements it
    reads, if it has none of its own. `most` is the largest number of rounds, 0 for no such limit.
    With `own_clusters` it starts what it needs, and no other cluster may run meanwhile.
    """

    name: str
    title: str
    findings: Callable[[Setting, Measured], list[Finding]]
    variants: Callable[[Setting], Mapping[str, Callable[[], Figures]]] | None = None
    rests_on: str = ""
    most: int = 0
    own_clusters: bool = False


def ratio(measured: Measured, over: str, under: str, figure: str) -> Row:
    """One variant's figure over another's, round by round."""
    pairs = zip(measured[over], measured[under])
    return Row(f"{over} / {under}", tuple(a[figure] / b[figure] for a, b in pairs))


def plain(measured: Measured, variant: str, figure: str) -> Row:
    """A figure of one variant."""
    return Row(variant, tuple(one[figure] for one in measured[variant]))
