# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a simulation takes on widths on which none of its kind has run yet.

Inputs: the widths in question, what was measured on some, and a prior. Output: a `Curve` with the
seconds on every width, in the unit of what was measured, and which of them are predictions.

    seconds(r) = work * ((1 - serial) / r + serial + communication * log2(r))

That is Amdahl's law with a term for collective messages, whose number grows with log2(r). One
number is fitted besides the work: how many times larger than in the prior the serial part is, which
thus stands for all that more ranks do not shorten, uneven load included. What then is left between
measured and fitted seconds is interpolated over log2(r).

Invariants: pure. A measured width has exactly the seconds that were measured. More ranks are never
predicted to be faster than in proportion to their number. Where nothing was measured, work is 1,
so that all kinds are equal, and the prior alone decides.

    predict((1, 2, 4), {2: Measured(56.0, work=(48.0, 48.0))}).seconds  # 1 rank: about 96
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Prior:
    """The overheads of r ranks, as parts of what one rank takes alone.

    One balanced case of 48,900 cells took 0.583 of one rank's time on two (56 ms per iteration
    against 2 * 48 ms, both with all cores busy), perfect scaling takes 0.5. That case is small, so
    the prior is near the middle, 0.53, and its speed grows up to about 130 ranks: with nothing
    measured, many simulations run narrow, and few run wide.
    """

    serial: float = 0.05
    communication: float = 0.005
    certainty: float = 0.1
    """How much a serial part that is e times larger or smaller counts against the measurements."""

    def share(self, ranks: int, times: float = 1.0) -> float:
        """Seconds on so many ranks, if one takes 1 and the serial part is so many times larger."""
        serial = min(0.95, self.serial * times)
        return (1 - serial) / ranks + serial + self.communication * math.log2(ranks)


PRIOR = Prior()

TIMES = tuple(2.0 ** (step / 16) for step in range(-96, 97))
"""Multiples of the prior's serial part that are tried, from 1/64 to 64."""
WORK_ERROR = 0.15
"""Useful CPU seconds say what one rank would take only so well: the same work is slower on cores
that all stream memory."""

FIT_ERROR = 0.05
"""How far a fit is from the truth: the root mean square over curves that saturate, without noise.
`dovetail bench choice` has them."""


@dataclass(frozen=True)
class Measured:
    """Seconds on one width, of a whole simulation or of an iteration, the same for all widths."""

    seconds: float
    error: float = 0.0
    """Of the seconds, absolute."""
    work: tuple[float, ...] = ()
    """CPU seconds outside MPI of each rank, for the same; empty if unknown."""


@dataclass(frozen=True)
class Curve:
    """Seconds by width, and which widths are predictions."""

    seconds: Mapping[int, float]
    predicted: frozenset[int]


def predict(
    widths: Iterable[int], measured: Mapping[int, Measured | float], prior: Prior = PRIOR
) -> Curve:
    """The curve through all that was measured; a plain number is seconds without error."""
    known = {
        width: one if isinstance(one, Measured) else Measured(one)
        for width, one in sorted(measured.items())
    }
    every = sorted({*widths, *known})
    if not known:
        return Curve({width: prior.share(width) for width in every}, frozenset(every))
    times, work = _fit(known, prior)
    left = {w: math.log(one.seconds / (work * prior.share(w, times))) for w, one in known.items()}
    seconds = {
        width: known[width].seconds
        if width in known
        else work * prior.share(width, times) * math.exp(_between(left, width))
        for width in every
    }
    for width in every:
        if width not in known:
            narrower = [seconds[w] * w / width for w in known if w < width]
            wider = [seconds[w] * w / width for w in known if w > width]
            seconds[width] = max([seconds[width], *narrower])
            seconds[width] = min([seconds[width], *wider])
    return Curve(seconds, frozenset(width for width in every if width not in known))


def smoothed(seconds: Mapping[int, float], error: float, prior: Prior = PRIOR) -> dict[int, float]:
    """Seconds of which each is wrong by so large a part, nearer to the curve that explains all.

    Of many widths the one that is too fast by chance is else taken for the fastest.
    """
    known = {width: Measured(each, error * each) for width, each in seconds.items()}
    times, work = _fit(known, prior)
    part = error**2 / (error**2 + FIT_ERROR**2)
    return {
        width: each ** (1 - part) * (work * prior.share(width, times)) ** part
        for width, each in seconds.items()
    }


def _fit(known: Mapping[int, Measured], prior: Prior) -> tuple[float, float]:
    """Multiple of the serial part, and work, that explain best what was measured."""
    points = []
    for width, one in known.items():
        points.append((width, one.seconds, max(0.01, one.error / one.seconds)))
        if one.work and 1 not in known:
            points.append((1, sum(one.work), WORK_ERROR))

    def misfit(times: float) -> tuple[float, float]:
        logs = [(math.log(s / prior.share(w, times)), 1 / error**2) for w, s, error in points]
        mean = sum(log * weight for log, weight in logs) / sum(weight for _, weight in logs)
        off = sum(weight * (log - mean) ** 2 for log, weight in logs)
        return off + (math.log(times) * prior.certainty) ** 2, mean

    times = min(TIMES, key=lambda one: misfit(one)[0])
    return times, math.exp(misfit(times)[1])


def _between(left: Mapping[int, float], width: int) -> float:
    """What the fit leaves at a width: linear over log2 between its neighbours, level outside."""
    below = [w for w in left if w < width]
    above = [w for w in left if w > width]
    if not below or not above:
        return left[max(below)] if below else left[min(above)]
    low, high = max(below), min(above)
    part = math.log2(width / low) / math.log2(high / low)
    return left[low] + part * (left[high] - left[low])
