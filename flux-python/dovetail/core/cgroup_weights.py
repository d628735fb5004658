# SPDX-License-Identifier: LGPL-3.0-or-later
"""How CPU requests become CPU weights, and back. Pure.

Inputs: requests in millicores; weights as found on disk. Outputs: which formula is in use, and
requests whose weights are in the wanted proportion.

A request becomes shares (version 1 of control groups, linear above 2), and under version 2 the
shares become a weight: by a straight line in kubelets and older runtimes, or (runc since 1.3.2,
crun since 1.23) by a curve that keeps 1024 shares at the default weight, but makes 15 to 1 less
than 8 to 1. A pod's own group, which is what it competes by, is the kubelet's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

SHARES, LINEAR, CURVE = "shares", "linear", "curve"
FILES = {"cpu.shares": (SHARES,), "cpu.weight": (LINEAR, CURVE)}
"""The formulas that can have made a file's content."""

_LEAST, _MOST = 2, 262144


def shares(millicores: int) -> int:
    """Shares of a request, version 1."""
    return min(_MOST, max(_LEAST, millicores * 1024 // 1000))


def weight(millicores: int, formula: str) -> int:
    """The value on disk for a request by one of the formulas; KeyError for an unknown one."""
    count = shares(millicores)
    if formula == SHARES:
        return count
    if formula == LINEAR:
        return 1 + (count - _LEAST) * 9999 // (_MOST - _LEAST)
    if formula != CURVE:
        raise KeyError(formula)
    if count <= _LEAST:
        return 1
    if count >= _MOST:
        return 10000
    power = math.log2(count)
    return math.ceil(10 ** ((power * power + 125 * power) / 612 - 7 / 34))


def formula_of(found: Iterable[tuple[int, str, int]]) -> str:
    """The one formula that explains (millicores, file, value) for all pods; empty if none does.

    Where more than one does, as for a single pod whose weight both give, the straight line.
    """
    seen = list(found)
    files = {file for _, file, _ in seen}
    for name in FILES.get(files.pop(), ()) if len(files) == 1 else ():
        if all(weight(cpu, name) == value for cpu, _, value in seen):
            return name
    return ""


def corrected(millicores: int, formula: str, largest: int) -> int:
    """The request whose weight is to that of `largest` as `millicores` is to `largest`.

    The curve flattens differences, so a lighter pod has to ask for less than its part: never for
    more than `millicores`, so that what fits goes on to fit. Straight formulas need nothing.
    """
    if formula != CURVE or not 0 < millicores < largest:
        return millicores
    wanted = weight(largest, formula) * millicores / largest
    low, high = 1, millicores
    while low < high:  # the greatest request whose weight is not above what is wanted
        middle = (low + high + 1) // 2
        if weight(middle, formula) <= wanted:
            low = middle
        else:
            high = middle - 1
    over = min(low + 1, millicores)
    below = abs(weight(low, formula) - wanted)
    return low if below <= abs(weight(over, formula) - wanted) else over
