# SPDX-License-Identifier: LGPL-3.0-or-later
"""Whether binding ranks to cores makes a shape faster: pairs of rates, and what follows from them.

Inputs: the rate of a simulation unbound and bound, measured one after the other. Outputs: the
decision, and its words.

Invariants: pure; unbound until bound was measured to be faster by more than the noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

LEAST_PAIRS = 4
"""Pairs that a decision rests on."""
MOST_PAIRS = 8
"""Pairs after which there is a decision, and the last that one to be bound rests on later."""
LEAST_GAIN = 0.01
"""Relative gain below which nothing is worth a bound rank, which cannot evade other programs."""
SURE = 3.0
"""Standard errors that a gain must be above nothing: the pairs are few."""


@dataclass
class Binding:
    """What is known of binding one shape.

    `gains` are logarithms of the rate bound over that unbound, by pair; `bound` is the decision,
    None while it is open; `why` has its words. Once bound, another pair is due `again_at`.
    """

    gains: list[float] = field(default_factory=list)
    bound: bool | None = None
    why: str = ""
    again_at: float = 0.0

    @property
    def closed(self) -> bool:
        """Whether it is to stay unbound."""
        return self.bound is False

    @property
    def gain(self) -> float:
        """Mean relative gain of being bound."""
        return math.exp(sum(self.gains) / len(self.gains)) - 1.0 if self.gains else 0.0

    @property
    def error(self) -> float:
        """Its standard error, from the spread of the pairs; infinite for fewer than two."""
        n = len(self.gains)
        if n < 2:
            return math.inf
        mean = sum(self.gains) / n
        return math.sqrt(sum((gain - mean) ** 2 for gain in self.gains) / (n - 1) / n)

    def add(self, unbound: float, bound: float, hopeless: float) -> bool:
        """Take a pair of rates; True if that changes the decision, which `why` then explains.

        One that falls to `hopeless` of the rate is enough for a no.
        """
        gain = math.log(bound / unbound)
        self.gains = [*self.gains, gain][-MOST_PAIRS:]
        before = self.bound
        if gain < math.log(hopeless):
            self.bound = False
            self.why = f"unbound: bound to cores it fell to {bound / unbound:.2f} of its rate"
        elif len(self.gains) >= LEAST_PAIRS:
            self._decide()
        return self.bound is not before

    def _decide(self) -> None:
        gain, error, n = self.gain, self.error, len(self.gains)
        way = "faster" if gain >= 0.0 else "slower"
        measured = f"{abs(gain):.1%} {way}, give or take {error:.1%}, in {n} pairs"
        if gain >= LEAST_GAIN and gain > SURE * error:
            self.bound, self.why = True, f"bound to cores: {measured}"
        elif self.bound or n == MOST_PAIRS or gain + SURE * error < LEAST_GAIN:
            self.bound, self.why = False, f"unbound: bound to cores {measured}: no sure gain"

    def refuse(self, why: str) -> None:
        """It cannot be bound."""
        self.bound, self.why = False, f"unbound: {why}"
