# SPDX-License-Identifier: LGPL-3.0-or-later
"""How simulations fared in the phases of their plan, each with requests of its own.

In: a run's tracks. Out: figures of each phase, and a table of those of a few. Invariants: pure; a
phase that was not reached is left out, and one that is not over ends where its simulation did.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dovetail.core.units import rounded
from dovetail.report.history import Track


@dataclass(frozen=True)
class PhaseFigures:
    """Phase `number`, from 1, of a simulation's plan, and what was done in it.

    It asked for `requests` in millicores, and had `limit` times that at most, 0 for none. Times are
    on the run's clock, and `seconds` is how long an iteration took, None where there was none,
    or the clock stood meanwhile.
    """

    number: int
    requests: tuple[int, ...]
    limit: float
    start_s: float
    end_s: float
    iterations: int
    seconds: float | None


def figures(track: Track, end: float) -> tuple[PhaseFigures, ...]:
    """The phases that a simulation was in since its last start; the log ends at `end`."""
    last = track.attempts[-1] if track.attempts else None
    if last is None or last.start is None or not track.spec.phases:
        return ()
    until = end if last.end is None else last.end
    begins = [(1, last.start, last.over), *track.turns]
    ends = [(t, iterations) for _, t, iterations in track.turns] + [(until, track.iterations)]
    found = []
    for (number, start, before), (stop, after) in zip(begins, ends):
        done = max(0, after - before)
        known = 0 < number <= len(track.spec.phases)
        if known and (done or len(begins) == 1):  # none in one that it went on behind
            one = track.spec.phases[number - 1]
            each = (stop - start) / done if done and not last.unseen else None
            found.append(PhaseFigures(number, one.requests, one.limit, start, stop, done, each))
    return tuple(found)


HEADINGS = ("simulation", "phase", "requests", "limit", "from, s", "to, s", "iterations", "s each")


def table(phases: Iterable[tuple[str, Sequence[PhaseFigures]]]) -> list[tuple[str, ...]]:
    """Rows of cells under HEADINGS, for the phases of these simulations."""
    return [
        (
            name,
            str(one.number),
            " ".join(f"{request}m" for request in one.requests[:4])
            + (" …" if len(one.requests) > 4 else ""),
            f"{one.limit:g} x" if one.limit else "-",
            f"{one.start_s:.1f}",
            f"{one.end_s:.1f}",
            str(one.iterations),
            "-" if one.seconds is None else rounded(one.seconds),
        )
        for name, some in phases
        for one in some
    ]
