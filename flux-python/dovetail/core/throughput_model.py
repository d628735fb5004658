# SPDX-License-Identifier: LGPL-3.0-or-later
"""How much slower simulations run at once: the one throughput model, with its one fit.

Inputs: which simulations run at once (`Part`: how many, their ranks R, the CPU need u of each in
cores, that is CPU seconds / wall seconds alone with blocking waits), the cores V that all share,
and measured slowdowns. Outputs: predicted slowdowns, the interference β, and the error of both.

    slowdown = max(1, Σu / V) + β · (ranks of the others) / V

`Model` is the case of N equal simulations, of which one alone takes T1:

    T(N) = T1 · (max(1, N·u / V) + β · (N - 1) · R / V)

While the cores suffice (N·u ≤ V, or u unknown) this is the one-parameter model of
arXiv:2604.00377: interference grows with the ranks that share the cores. Once they do not,
no order of work can beat N·u/V, and interference comes on top of that. It stays linear in β,
so the fit is least squares through a known offset, in closed form, and cheap to repeat
after each measurement. Measured on 2 cores with bulk-synchronous ranks of four imbalances,
T(3) from T(1) and T(2) comes out within 3 %; the greater of the two terms instead of their
sum, within 6 % and always too low, which would admit one too many.

Invariants: pure; times in any one unit (seconds, or slowdowns with t1=1); β ≥ 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dovetail.core import units
from dovetail.core.errors import BadInput

# Two-sided 95 % quantiles of Student's t for 3, 4, … degrees of freedom, then the normal's.
_T95 = (3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_Z95 = 1.96

MAX_SIMS = 100_000


WAIT_COST = 0.05
"""What blocking waits cost a simulation, until that is measured: 5 % where it was."""


WINDOW, WINDOWS, WINDOW_ITERATIONS = 1.5, 6.0, 8
"""Of a measurement the least seconds, how many times as long it is at most, the least iterations.
"""


@dataclass(frozen=True)
class Part:
    """Equal simulations among all that run at once: `count` of them, each of `ranks` ranks.

    `need` is the cores that one of them keeps busy alone; `blocking` is False if that was
    measured, or guessed, without what blocking waits cost.
    """

    count: int
    ranks: int
    need: float
    blocking: bool = True


def bound(need: float, cores: float, wait_cost: float = 0.0) -> float:
    """The least slowdown of simulations that need so many cores together, dimensionless."""
    return max(1.0 + wait_cost, need / cores)


def crowd(others: float, cores: float) -> float:
    """Ranks of the other simulations per core: what β multiplies."""
    return others / cores


def slowdowns(
    parts: Sequence[Part], cores: float, beta: float, wait_cost: float = 0.0
) -> list[float]:
    """How many times slower than alone each part's simulations run, shape (len(parts),).

    Waits that block cost `wait_cost`: in the 1, and in a need that does not hold it yet.
    """
    ranks = sum(part.count * part.ranks for part in parts)
    need = sum(p.count * p.need * (1.0 if p.blocking else 1.0 + wait_cost) for p in parts)
    least = bound(need, cores, wait_cost)
    return [least + beta * crowd(ranks - part.ranks, cores) for part in parts]


@dataclass(frozen=True)
class Point:
    """One measurement: a `slowdown` where the model says `bound` + β · `crowd`."""

    crowd: float
    bound: float
    slowdown: float

    def error(self, beta: float) -> float:
        """What the model with this β leaves unexplained."""
        return self.slowdown - self.bound - beta * self.crowd


@dataclass(frozen=True)
class Prior:
    """What is believed before there are measurements.

    `beta` counts like measurements whose squared crowds sum up to `spread`. `sigma`, the
    residuals that are to be expected, counts as so many degrees of `freedom`.
    """

    beta: float
    spread: float
    sigma: float
    freedom: int


PAPERS = Prior(beta=0.0, spread=0.0, sigma=0.03, freedom=3)
"""Nothing is believed of β; the papers' table (4 points, 1 parameter) says how well the model does.
"""


@dataclass(frozen=True)
class Fit:
    """β with its standard error; `rms_error` is the root mean square of the relative errors.

    `sigma` is what a slowdown scatters by, `spread` the sum of the squared crowds.
    """

    beta: float
    beta_error: float
    rms_error: float
    sigma: float
    spread: float


def fit(points: Sequence[Point], prior: Prior) -> Fit:
    """Least squares of β through the points' bounds. At least one point must be given."""
    spread = prior.spread + sum(p.crowd**2 for p in points)
    pull = sum(p.crowd * (p.slowdown - p.bound) for p in points)
    beta = max(0.0, (prior.spread * prior.beta + pull) / spread)
    rest = [p.error(beta) for p in points]
    squares = sum(r * r for r in rest) + prior.freedom * prior.sigma**2
    sigma = math.sqrt(squares / (prior.freedom + len(points) - 1))
    rms = math.sqrt(sum((r / p.slowdown) ** 2 for r, p in zip(rest, points)) / len(points))
    return Fit(beta, sigma / math.sqrt(spread), rms, sigma, spread)


@dataclass(frozen=True)
class Model:
    """The model of N equal simulations; `Model.fit` makes one from measurements.

    `t1` seconds; `ranks` per simulation; `vcpus` shared by all; `beta` dimensionless; `need`
    cores, None if unknown. From a fit: `beta_error` the standard error of beta, `rms_error`
    the root mean square of the relative errors at the measured points, `points` how many
    there were; `sigma` and `spread` (Σx²) are what `band` needs.

    Raises BadInput for a value that is not finite or out of range.
    """

    t1: float
    ranks: int
    vcpus: float
    beta: float
    need: float | None = None
    beta_error: float | None = None
    rms_error: float | None = None
    points: int = 0
    sigma: float = PAPERS.sigma
    spread: float = 0.0

    def __post_init__(self) -> None:
        _positive("t1", self.t1, "the seconds of one simulation alone")
        _positive("ranks", self.ranks, "MPI ranks of one simulation")
        _positive("vcpus", self.vcpus, "the vCPUs that all simulations share")
        if self.need is not None:
            _positive("need", self.need, "the cores that one simulation keeps busy alone")
        if not (math.isfinite(self.beta) and 0 <= self.beta <= 1e6):
            raise BadInput(f"beta: {self.beta:g} is not a number from 0 to 1e6")

    @staticmethod
    def fit(
        t1: float,
        ranks: int,
        vcpus: float,
        measured: Mapping[int, float],
        need: float | None = None,
    ) -> Model:
        """Least squares of beta over `measured`: {simulations at once: seconds}.

        An entry for N=1 only repeats t1 and is left out; at least one other must be there. A
        measurement faster than N·need/V proves that the need was overestimated (a waiting
        rank that spins looks busy), so the need is lowered to what was seen.

        Raises BadInput for no measurement, or one that is not a positive number.
        """
        Model(t1, ranks, vcpus, 0.0, need)
        for n, seconds in measured.items():
            _count(n)
            _positive(f"measured time of {n} simulations", seconds, "seconds")
        slow = {n: seconds / t1 for n, seconds in sorted(measured.items()) if n > 1}
        if not slow:
            raise BadInput("measured: no time of 2 or more simulations at once; give at least one")
        if need is not None:
            need = min(need, *(s * vcpus / n for n, s in slow.items()))
        start = Model(t1, ranks, vcpus, 0.0, need)
        found = fit([Point(start._crowd(n), start.slowdown(n), s) for n, s in slow.items()], PAPERS)
        return Model(
            t1,
            ranks,
            vcpus,
            found.beta,
            need,
            found.beta_error,
            found.rms_error,
            len(slow),
            found.sigma,
            found.spread,
        )

    def slowdown(self, n: int) -> float:
        """T(n)/T1: how many times slower each of n simulations runs than alone."""
        _count(n)
        return slowdowns([Part(n, self.ranks, self.need or 0.0)], self.vcpus, self.beta)[0]

    def makespan(self, n: int) -> float:
        """T(n), the time of n simulations started at once, in the unit of t1."""
        return self.t1 * self.slowdown(n)

    def gain(self, n: int) -> float:
        """n·T1/T(n): throughput against one simulation after the other."""
        return n / self.slowdown(n)

    def efficiency(self, n: int) -> float:
        """T1/T(n), from 1 downwards: the speed that each of n simulations keeps."""
        return 1 / self.slowdown(n)

    def band(self, n: int) -> tuple[float, float]:
        """The 95 % prediction interval of T(n): where a new measurement is to be expected.

        Of no width at n=1, where the time is given. Never below what the cores allow. For a
        model that was not fitted, the interval knows nothing of the error of beta.
        """
        if n == 1:
            return (self.makespan(1), self.makespan(1))
        leverage = self._crowd(n) ** 2 / self.spread if self.spread else 0.0
        freedom = PAPERS.freedom + max(0, self.points - 1) - 3
        quantile = _T95[freedom] if freedom < len(_T95) else _Z95
        half = quantile * self.sigma * math.sqrt(1 + leverage)
        middle = self.slowdown(n)
        least = bound(n * (self.need or 0.0), self.vcpus)
        return (self.t1 * max(least, middle - half), self.t1 * (middle + half))

    def knee(self, max_n: int) -> int:
        """The n in 1..max_n after which another simulation pays less than it did on average.

        It is the point of the gain curve farthest above its chord from 1 to max_n (Satopää et
        al., "Finding a Kneedle in a Haystack", 2011). On a curve without a bend it is the end
        with the greater gain: 1 where packing does not pay.
        """
        _count(max_n)
        rise = (self.gain(max_n) - self.gain(1)) / max(1, max_n - 1)

        def height(n: int) -> tuple[float, float]:
            above = self.gain(n) - self.gain(1) - rise * (n - 1)
            return (round(above, 9), round(self.gain(n), 9))

        return max(range(1, max_n + 1), key=height)

    def _crowd(self, n: int) -> float:
        return crowd((n - 1) * self.ranks, self.vcpus)


def check_need(need: float | None, vcpus: float) -> None:
    """Raise BadInput where one simulation alone is said to keep more cores busy than there are."""
    if need is not None and need > vcpus:
        raise BadInput(
            f"need: {need:g} cores are more than the {vcpus:g} vCPUs that one simulation alone "
            "can keep busy; give its CPU seconds on them divided by its wall seconds"
        )


def _positive(what: str, value: float, meaning: str) -> None:
    if not 1e-9 <= value <= 1e12:
        # Some whole numbers are too large for a float.
        shown = f"{value:g}" if isinstance(value, float) else units.show(value)
        raise BadInput(f"{what}: {shown} is not a number from 1e-9 to 1e12 ({meaning})")


def _count(n: int) -> None:
    if not 1 <= n <= MAX_SIMS:
        raise BadInput(f"simulations at once: {n} is not from 1 to {MAX_SIMS}")
