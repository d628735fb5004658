# SPDX-License-Identifier: LGPL-3.0-or-later
"""Turns the rank pages of one simulation into a sample for the controller.

Inputs: the simulation's session directory on this node. Output: `protocol.Ranks`. Invariant: a
sample belongs to whole iterations, whichever of the three sources counts them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from dovetail.core import protocol
from dovetail.core.errors import BadInput
from dovetail.mpi import page, supervisor


def here(directory: Path) -> list[page.RankPage]:
    """The pages of the simulation's own ranks that are on this node, by rank.

    Ranks of spawned worlds are left out; nothing that can be read gives an empty list.
    """
    try:
        return sorted(
            (one for one in page.read_pages(directory) if one.world == 0),
            key=lambda one: one.rank,
        )
    except (BadInput, OSError):
        return []


def complete(directory: Path, count: int) -> list[page.RankPage]:
    """The pages of all `count` ranks, or an empty list while any of them is missing."""
    pages = here(directory)
    return pages if [one.rank for one in pages] == list(range(count)) else []


def ranks(
    pages: Sequence[page.RankPage], directory: Path, origin: float, succeeded: bool = False
) -> protocol.Ranks:
    """The sample of these pages; `origin` is the CLOCK_MONOTONIC time of the run clock's 0.

    `succeeded` says that the simulation has ended well, which completes its last iteration.
    """
    memory = tuple(one.peak_rss for one in pages)
    if all(one.iteration_source != "none" for one in pages):
        return protocol.Ranks(
            tuple(one.iterations for one in pages),
            _seconds(one.iter_stamp - origin for one in pages),
            _seconds(one.iter_cpu_s for one in pages),
            _seconds(one.iter_useful_s for one in pages),
            _seconds(one.iter_mpi_s for one in pages),
            memory,
        )
    # Only the log tells of iterations; a `Time =` line begins one and so ends another.
    lines, stamp = 0, origin
    with contextlib.suppress(OSError, ValueError):
        raw = (directory / "iterations").read_bytes()
        lines, stamp = supervisor.COUNT.unpack(raw) if raw else (0, origin)
    count = len(pages)
    return protocol.Ranks(
        (lines if succeeded else max(0, lines - 1),) * count,
        _seconds([stamp - origin]) * count,
        _seconds(one.cpu_s for one in pages),
        _seconds(one.useful_s for one in pages),
        _seconds(one.mpi_s for one in pages),
        memory,
    )


def _seconds(values: Iterable[float]) -> tuple[float, ...]:
    """To the microsecond, since every sample is logged with all its digits; none below 0."""
    return tuple(round(max(0.0, value), 6) for value in values)
