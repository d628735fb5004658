# SPDX-License-Identifier: LGPL-3.0-or-later
"""How much of spinning ranks' CPU other programs took, as far as that can be known. Pure.

Inputs: seconds per iteration of each rank, measured while it ran alone and its waits were spins.
Output: a share of their CPU, or None.

Invariant: what sleeps is not robbed. A rank that spins is never off its core of its own will while
it is inside MPI; outside it may sleep, read a disk or wait for a service, so that what is missing
there says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

INSIDE = 0.1
"""Share of its time inside MPI from which a program shows there what it gets."""
PLENTY = 0.1
"""Share that may be missing, by clocks and the kernel's own work, before anybody is blamed."""
DISTURBED = 0.1
"""Share that others take, from which a rate is not to be trusted."""
ALIKE = 0.2
"""Of ranks' times inside and outside MPI, below which their difference is noise."""


def missing(cpu: Sequence[float], useful: Sequence[float], mpi: Sequence[float]) -> float:
    """Share of their wall time in which the ranks had no core, for whatever reason."""
    wall = sum(useful) + sum(mpi)
    return max(0.0, 1.0 - sum(cpu) / wall) if wall > 0 else 0.0


def taken(
    cpu: Sequence[float],
    useful: Sequence[float],
    mpi: Sequence[float],
    blocking: Sequence[float] = (),
) -> float | None:
    """The share that others took; None if the ranks may as well have slept.

    `useful` is wall time outside MPI and `mpi` inside; `blocking` is the CPU time of the same
    work where waiting ranks sleep, if that was measured.
    """
    lacking, wall, inside = missing(cpu, useful, mpi), sum(useful) + sum(mpi), sum(mpi)
    if lacking <= PLENTY:
        return lacking
    found: float | None = None
    if inside > INSIDE * wall:
        found = 1.0 - (sum(cpu) - sum(blocking)) / inside if blocking else _fit(cpu, useful, mpi)
    # Had all the time outside MPI been slept, this were still missing inside.
    least = sum(max(0.0, within - one) for one, within in zip(cpu, mpi)) / wall
    if found is not None:
        return max(least, min(lacking, found))
    return least if least > PLENTY else None


def _fit(cpu: Sequence[float], useful: Sequence[float], mpi: Sequence[float]) -> float | None:
    """The share missing inside MPI, if each rank lacks one share inside and one outside.

    By least squares over the ranks; None where they are too alike to tell the two apart.
    """
    lacks = [out + within - one for one, out, within in zip(cpu, useful, mpi)]
    outside, inside = (sum(one * one for one in times) for times in (useful, mpi))
    both = sum(out * within for out, within in zip(useful, mpi))
    apart = outside * inside - both * both
    if apart <= ALIKE * outside * inside:
        return None
    by_outside = sum(lack * out for lack, out in zip(lacks, useful))
    by_inside = sum(lack * within for lack, within in zip(lacks, mpi))
    return (by_inside * outside - by_outside * both) / apart
