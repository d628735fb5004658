# SPDX-License-Identifier: LGPL-3.0-or-later
"""Proportional CPU requests: whole millicores, exact sum, a floor.

Inputs: one weight per rank (cells, CPU seconds per iteration, or what the user says), the
CPU to share, the least that any rank may get. Output: one request per rank, millicores.

Invariants: the requests add up to the total, exactly; none is below the floor; a rank with a
greater weight never gets less; equal weights differ by one millicore at most.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction

from dovetail.core.errors import BadInput

FLOOR = 10
"""The least request by default, millicores: below it the kernel's CPU weights lose precision."""

LIMIT = 2.0
"""A CPU limit below this many times the request throttles."""

THROTTLED = (
    "limits equal to requests made simulations 3.7 times slower on two cores, limits of 1.5 "
    "to 2 times the request hardly throttled (measured elsewhere)"
)
"""Why, in words."""

MAX_MILLICORES = 1_000_000_000


def proportional(weights: Sequence[float], total: int, floor: int = FLOOR) -> tuple[int, ...]:
    """Share `total` millicores in proportion to `weights`, shape (ranks,); same shape out.

    Ranks whose share would be below `floor` get the floor, and the others pay for it in
    proportion to their weights. Shares are rounded by largest remainder; of equal
    remainders the lower rank wins. Raises BadInput for weights that are not finite numbers
    greater than 0, and for a total that cannot give the floor to every rank.
    """
    check_weights(weights)
    if not 0 < total <= MAX_MILLICORES:
        raise BadInput(f"cpus: {total}m is not from 1m to {MAX_MILLICORES}m")
    if floor < 0 or floor * len(weights) > total:
        raise BadInput(
            f"floor: {len(weights)} ranks of at least {floor}m need {len(weights) * floor}m, "
            f"and {total}m are to be shared; lower the floor or give more CPU"
        )
    return apportion(weights, total, floor)


def apportion(weights: Sequence[float], total: int, floor: int) -> tuple[int, ...]:
    """`proportional` for any unit and without its checks: floor · ranks ≤ total, weights good."""
    whole_weights = _in_whole_units(weights)
    result = [floor] * len(weights)
    rest: list[tuple[int, int]] = []
    left, weight = total, sum(whole_weights)
    # From the lightest up: once one is above the floor on what its heavier peers and it can
    # share, so are all of them, and `left` and `weight` stay as they are.
    for i in sorted(range(len(weights)), key=lambda i: whole_weights[i]):
        if left * whole_weights[i] < floor * weight:
            left, weight = left - floor, weight - whole_weights[i]
        else:
            result[i], remainder = divmod(left * whole_weights[i], weight)
            rest.append((-remainder, i))
    for _, i in sorted(rest)[: total - sum(result)]:
        result[i] += 1
    return tuple(result)


def _in_whole_units(weights: Sequence[float]) -> list[int]:
    """The same weights in a unit that makes all of them whole numbers, exactly."""
    ratios = [weight.as_integer_ratio() for weight in weights]
    unit = max(below for _, below in ratios)  # of floats: a power of two, so all divide it
    return [above * (unit // below) for above, below in ratios]


def check_weights(weights: Sequence[float]) -> None:
    """Raise BadInput unless there is a weight and each is greater than 0 and at most 1e15."""
    if not weights:
        raise BadInput("weights: none given; give one per rank")
    for rank, weight in enumerate(weights):
        if not (math.isfinite(weight) and 0 < weight <= 1e15):
            raise BadInput(
                f"weights: {weight:g} for rank {rank} is not a number greater than 0, up to 1e15"
            )


def parse_weights(text: str) -> tuple[float, ...]:
    """`1,1,5,15` as numbers. Raises BadInput for anything else, or a weight of 0 or less."""
    try:
        weights = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise BadInput(f"weights: {text!r} is not a list of numbers like 1,1,5,15") from None
    check_weights(weights)
    return weights


def cores_as_text(cores: float | str) -> str:
    """Cores for `parse_cpu`, a number without what floats are off by, as 6 * 0.7 is."""
    if isinstance(cores, float) and abs(cores) < MAX_MILLICORES:
        return f"{cores:.9f}".rstrip("0").rstrip(".")
    return str(cores)


def parse_cpu(text: str, what: str = "cpus", least: int = 1) -> int:
    """A CPU quantity as millicores: `4`, `2.5` (cores) or `2500m`.

    Raises BadInput for anything else, fewer than `least`, or a fraction of a millicore.
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(m?)", text.strip(), re.ASCII)
    if not match:
        raise BadInput(f"{what}: {text!r} is not a CPU quantity like 4, 2.5 or 2500m")
    value = Fraction(match[1]) * (1 if match[2] else 1000)
    if value.denominator != 1 or not least <= value <= MAX_MILLICORES:
        bounds = f"from {least}m to {MAX_MILLICORES}m"
        raise BadInput(f"{what}: {text!r} is not whole millicores {bounds}")
    return int(value)
