# SPDX-License-Identifier: LGPL-3.0-or-later
"""How much is measured: rounds, iterations and cells by the scale that the user chooses.

Input: a scale's name. Output: a `Scale`. Ranks follow from the machine: its cores.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """`iterations` of a solver are timed in each measurement, for at most `seconds`.

    `refine` splits each of pitzDaily's 12,225 cells into refine x refine; `sizes` are those of
    which the speed-up is measured, and `levels` those of motorBike's refinement. `large` is the
    case of 16 ranks. `jobs` are those from which the models of the hybrid batch job learn, and
    those that they predict.
    """

    name: str
    rounds: int
    iterations: int
    seconds: float
    refine: int
    large: int
    sizes: tuple[int, ...]
    levels: tuple[int, ...]
    jobs: tuple[int, int]


SCALES = {
    one.name: one
    for one in (
        Scale("small", 3, 40, 3.0, 1, 2, (1, 2), (4,), (18, 9)),
        Scale("medium", 5, 150, 20.0, 2, 3, (1, 2, 4), (4, 5), (100, 25)),
        Scale("papers", 5, 300, 60.0, 1, 3, (1, 2, 4, 6), (5, 6), (1000, 250)),
    )
}
