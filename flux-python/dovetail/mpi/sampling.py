# SPDX-License-Identifier: LGPL-3.0-or-later
"""Turns what the ranks of one simulation publish into a sample for the controller.

Inputs: the simulation's session directory on this node, or the values that other nodes have sent;
for a program without MPI what its control group has used.
Output: `protocol.Ranks`. Invariant: a sample belongs to whole iterations, whichever of the three
sources counts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dovetail.core import protocol
from dovetail.core.contention import Contention, Throttling
from dovetail.core.errors import BadInput
from dovetail.mpi import page, time_lines


def here(directory: Path, spawned: set[str] | None = None) -> list[page.RankPage]:
    """The pages of the simulation's own ranks that are on this node, by rank.

    Ranks of spawned worlds are left out; nothing that can be read gives an empty list. In `spawned`
    the names of their pages are kept, which need not be read again: there may be thousands.
    """
    known = set() if spawned is None else spawned
    try:
        pages = page.read_pages(directory, known)
        known.update(f"rank.{one.rank}.{one.pid}" for one in pages if one.world)
        return sorted((one for one in pages if one.world == 0), key=lambda one: one.rank)
    except (BadInput, OSError):
        return []


def complete(directory: Path, count: int, spawned: set[str] | None = None) -> list[page.RankPage]:
    """The pages of all `count` ranks, or an empty list while any is missing; see `here`."""
    pages = here(directory, spawned)
    return pages if [one.rank for one in pages] == list(range(count)) else []


def of_pages(
    pages: Sequence[page.RankPage],
    directory: Path,
    origin: float,
    succeeded: bool = False,
    awaited: Sequence[float] = (),
) -> protocol.Ranks:
    """The sample of these pages; `origin` is the CLOCK_MONOTONIC time of the run clock's 0.

    `succeeded` says that the simulation has ended well, which completes its last iteration.
    `awaited` are for each rank the seconds, since all were `quiet`, for which it waited for a core,
    and those of what the ranks have started: one outside MPI waits for these, and does not hang.
    """
    lines, stamp, residual = time_lines.read(str(directory)) or (0, origin, -1.0)
    rows = [*_values(pages, origin, bool(lines), awaited)]
    return of_values(rows, (lines, stamp - origin, residual), succeeded)


def quiet(pages: Sequence[page.RankPage]) -> bool:
    """Whether ranks that count iterations have none of late."""
    return _counted(pages) and _long_over(pages)


def of_waits(
    rows: Sequence[Sequence[float]], throttling: Throttling | None, pressure: float | None
) -> Contention:
    """What kept the ranks from their cores, from one row per rank as `waits` has them."""
    if not rows:
        return Contention(throttling, pressure)
    voluntary, involuntary, queued, elapsed = zip(*rows)
    known = min(queued) >= 0
    return Contention(
        throttling,
        pressure,
        _whole(voluntary),
        _whole(involuntary),
        _seconds(queued) if known else (),
        _seconds(elapsed) if known else (),
    )


def waits(one: page.Waits, elapsed: float) -> tuple[float, ...]:
    """A rank's context switches, its seconds in the queue for a core, -1 if unknown, and all."""
    queued = -1.0 if one.queued_s is None else one.queued_s
    return one.voluntary, one.involuntary, queued, elapsed


@dataclass(frozen=True)
class Used:
    """What a program used of which no page is known, as those without MPI, until `stamp`.

    `cpu` are the seconds of its whole control group, `wall` those since its command began, `queued`
    those that the threads which it has now waited for a core, None if unknown; `memory` is bytes.
    """

    stamp: float
    cpu: float
    wall: float
    queued: float | None
    memory: int


def of_group(
    used: Used, ranks: int, directory: Path, origin: float, succeeded: bool = False
) -> protocol.Ranks:
    """The sample of a program of so many ranks without a page; nobody knows which did what.

    All is outside MPI. Where pages appear later, they count anew, from MPI_Init on.
    """
    lines, stamp, residual = time_lines.read(str(directory)) or (0, origin, -1.0)
    row = (-1, used.stamp, used.cpu / ranks, used.wall, 0.0, used.memory // ranks, -1)
    found = of_values([row] * ranks, (lines, stamp - origin, residual), succeeded)
    return replace(found, queued=None if used.queued is None else round(used.queued, 6))


def of_values(
    rows: Sequence[Sequence[float]], lines: tuple[int, float, float], succeeded: bool
) -> protocol.Ranks:
    """The sample of one row per rank.

    It has iterations, stamp, CPU, useful and MPI seconds, peak memory, and the call of whose rhythm
    the iterations are periods, else -1. Stamps are on the run's clock. Where a rank's iterations
    are -1, or ranks do not count alike, `lines` counts for all: how many `Time =` lines the log
    has, when the last came, and the residual of the iteration before it, -1 if unknown. Where it
    has none, only their work tells, as of their own stamps.
    """
    counts, stamps, cpu, useful, inside, memory, beats = zip(*rows)
    measure: protocol.Measure = "iterations" if beats[0] < 0 else "periods"
    if min(counts) < 0 or not page.count_alike(beats, counts):
        measure = "iterations" if lines[0] else "work"
        counts = (time_lines.complete(lines[0], succeeded),) * len(rows)
        stamps = (lines[1],) * len(rows) if lines[0] else stamps
    return protocol.Ranks(
        _whole(counts),
        _seconds(stamps),
        _seconds(cpu),
        _seconds(useful),
        _seconds(inside),
        _whole(memory),
        measure,
        lines[2] if lines[2] >= 0 else None,
    )


def _counted(pages: Sequence[page.RankPage]) -> bool:
    """Whether all ranks count iterations, and alike."""
    return all(one.iteration_source != "none" for one in pages) and page.count_alike(
        [one.beat for one in pages], [one.iterations for one in pages]
    )


def _long_over(pages: Sequence[page.RankPage]) -> bool:
    """Whether the last iteration is."""
    now = max((one.stamp for one in pages), default=0.0)
    return any(now - one.iter_stamp >= page.QUIET for one in pages)


def _values(
    pages: Sequence[page.RankPage], origin: float, lines: bool, awaited: Sequence[float]
) -> Iterable[tuple[float, ...]]:
    """A row per page: as of the last iteration, or, if not all ranks count theirs, as of now.

    So it is where the last iteration is long over, to tell ranks that work from those that hang.
    A rhythm counts where all ranks have the same and count alike, its last beat is not long ago,
    and the log has no `lines`, which tell better.
    """
    counted = _counted(pages)
    long_over = counted and _long_over(pages)
    if counted and ({one.beat for one in pages} == {-1} or not (lines or long_over)):
        for one, more in zip(pages, awaited or [0.0] * len(pages)):
            used = one.iter_cpu_s, one.iter_useful_s, one.iter_mpi_s
            if long_over:
                useful = page.worked(used[1], used[0], one.useful_s, one.cpu_s + more)
                used = one.cpu_s, useful, one.mpi_s
            yield one.iterations, one.iter_stamp - origin, *used, one.peak_rss, one.beat
    else:
        for one in pages:
            yield -1, one.stamp - origin, one.cpu_s, one.useful_s, one.mpi_s, one.peak_rss, -1


def _whole(values: Iterable[float]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _seconds(values: Iterable[float]) -> tuple[float, ...]:
    """To the microsecond, since every sample is logged with all its digits; none below 0."""
    return tuple(round(max(0.0, value), 6) for value in values)
