# SPDX-License-Identifier: LGPL-3.0-or-later
"""How long N simulations take at once: the throughput model.

Inputs: the time T1 of one simulation alone, its ranks R, the vCPUs V that all share, its CPU
need u in cores (CPU seconds / wall seconds, alone, waits blocking), and measured times of
N = 2, 3, … at once. Output: T(N), the gain, its knee, and the error of all that.

    T(N) = T1 · (max(1, N·u / V) + β · (N - 1) · R / V)

While the cores suffice (N·u ≤ V, or u unknown) this is the one-parameter model of
arXiv:2604.00377: interference grows with the ranks that share the vCPUs. Once they do not,
no order of work can beat N·u/V, and interference comes on top of that. It stays linear in β,
so the fit is least squares through a known offset, in closed form, and cheap to repeat
after each measurement. Measured on 2 cores with bulk-synchronous ranks of four imbalances,
T(3) from T(1) and T(2) comes out within 3 %; the greater of the two terms instead of their
sum, within 6 % and always too low, which would admit one too many.

Invariants: pure; times in any one unit (seconds, or slowdowns with t1=1); β ≥ 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dovetail.core.errors import BadInput

# Before there are residuals of our own, those of the papers' table (4 points, 1 parameter)
# say how well such a model does; they go on counting as so many degrees of freedom.
PRIOR_SIGMA = 0.03
PRIOR_FREEDOM = 3

# Two-sided 95 % quantiles of Student's t for 3, 4, … degrees of freedom, then the normal's.
_T95 = (3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_Z95 = 1.96

MAX_SIMS = 100_000


@dataclass(frozen=True)
class Model:
    """The model with its parameter known; `fit` makes one from measurements.

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
    sigma: float = PRIOR_SIGMA
    spread: float = 0.0

    def __post_init__(self) -> None:
        _positive("t1", self.t1, "the seconds of one simulation alone")
        _positive("ranks", self.ranks, "MPI ranks of one simulation")
        _positive("vcpus", self.vcpus, "the vCPUs that all simulations share")
        if self.need is not None:
            _positive("need", self.need, "the cores that one simulation keeps busy alone")
        if not (math.isfinite(self.beta) and 0 <= self.beta <= 1e6):
            raise BadInput(f"beta: {self.beta:g} is not a finite number, 0 or more")

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
        x = {n: start._load(n) for n in slow}
        spread = sum(v * v for v in x.values())
        beta = max(0.0, sum(x[n] * (s - start.slowdown(n)) for n, s in slow.items()) / spread)
        best = Model(t1, ranks, vcpus, beta, need)
        rest = {n: s - best.slowdown(n) for n, s in slow.items()}
        freedom = PRIOR_FREEDOM + len(slow) - 1
        squares = sum(r * r for r in rest.values()) + PRIOR_FREEDOM * PRIOR_SIGMA**2
        sigma = math.sqrt(squares / freedom)
        rms = math.sqrt(sum((rest[n] / s) ** 2 for n, s in slow.items()) / len(slow))
        return Model(
            t1, ranks, vcpus, beta, need, sigma / math.sqrt(spread), rms, len(slow), sigma, spread
        )

    def slowdown(self, n: int) -> float:
        """T(n)/T1: how many times slower each of n simulations runs than alone."""
        return self._bound(n) + self.beta * self._load(n)

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
        leverage = self._load(n) ** 2 / self.spread if self.spread else 0.0
        freedom = PRIOR_FREEDOM + max(0, self.points - 1) - 3
        quantile = _T95[freedom] if freedom < len(_T95) else _Z95
        half = quantile * self.sigma * math.sqrt(1 + leverage)
        middle = self.slowdown(n)
        return (self.t1 * max(self._bound(n), middle - half), self.t1 * (middle + half))

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

    def _bound(self, n: int) -> float:
        """The slowdown of n simulations on cores that never idle while there is work."""
        _count(n)
        return max(1.0, n * (self.need or 0.0) / self.vcpus)

    def _load(self, n: int) -> float:
        """Ranks of the other simulations per vCPU: what beta multiplies."""
        return (n - 1) * self.ranks / self.vcpus


def _positive(what: str, value: float, meaning: str) -> None:
    if not (math.isfinite(value) and 1e-9 <= value <= 1e12):
        raise BadInput(f"{what}: {value:g} is not a number from 1e-9 to 1e12 ({meaning})")


def _count(n: int) -> None:
    if not 1 <= n <= MAX_SIMS:
        raise BadInput(f"simulations at once: {n} is not from 1 to {MAX_SIMS}")
