# SPDX-License-Identifier: LGPL-3.0-or-later
"""What happened in a run: the values that `build_history.tell` makes of a log.

A `History` has one `Track` for each simulation of the plan, the moments at which something
was decided, and the spells of time in which nothing changed, with what was measured in them.
Times are seconds on the run's own clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.core import protocol

Array = npt.NDArray[np.float64]
Span = tuple[float, float]
UNKNOWN = protocol.Contention()


@dataclass(frozen=True)
class Attempt:
    """One start of a simulation; times in seconds on the run's clock, None if not reached.

    `code` and `reason` are the executor's; `halted` if it stopped at a checkpoint; `over` are the
    iterations of earlier attempts from which it went on. `unseen` if it went on while the clock
    stood, so that how long it took is not known.
    """

    launch: float
    ranks: int
    start: float | None = None
    end: float | None = None
    code: int = 0
    reason: str = ""
    over: int = 0
    recut: bool = False
    halted: bool = False
    unseen: bool = False


@dataclass(frozen=True)
class Track:
    """One simulation's life. `iterations`, `stepping`, `memory` and what follows are its last
    attempt's, and what that attempt went on from counts among its iterations.

    `spec` is as the plan has it, on the ranks of its last attempt.

    `stepping` is (iterations, seconds) between its first and its last sample; `phases` holds
    (letter, start, end) with the letters of the controller's phases: A baseline run, C pack, D
    fairness (B, resize, takes no time; it is a Mark). `suspended` are the spans in which it was.
    `turns` are (number, time, iterations) of each further phase of its plan, as it began.
    `useful` and `mpi` are the seconds of each rank outside and inside MPI, empty if unknown.
    `ended` where the controller has said what became of it, also of one that could never start.
    """

    spec: protocol.Spec
    attempts: tuple[Attempt, ...] = ()
    state: str = "not started"
    reason: str = ""
    iterations: int = 0
    measure: protocol.Measure = "iterations"
    stepping: tuple[float, float] = (0.0, 0.0)
    memory: int = 0
    useful: tuple[float, ...] = ()
    mpi: tuple[float, ...] = ()
    contention: protocol.Contention = UNKNOWN
    turns: tuple[tuple[int, float, int], ...] = ()
    phases: tuple[tuple[str, float, float], ...] = ()
    suspended: tuple[Span, ...] = ()
    ended: bool = False

    @property
    def wall(self) -> float | None:
        """Seconds that the last attempt's own command ran, None if unknown, or it did not end."""
        last = self.attempts[-1] if self.attempts else None
        if last is None or last.start is None or last.end is None or last.unseen:
            return None
        return last.end - last.start


@dataclass(frozen=True)
class Mark:
    """A moment worth a mark in the timeline; `what` is a Note's, or resize, refused, stop,
    checkpoint, capacity, interrupt."""

    t: float
    what: str
    why: str
    names: tuple[str, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cut(self) -> tuple[float, ...]:
        """The measured weights by which a family is cut anew from now on; mostly empty."""
        weights = self.data.get("weights") if self.what == "hold" else None
        return tuple(map(float, weights)) if isinstance(weights, (list, tuple)) else ()


@dataclass(frozen=True)
class Spell:
    """A stretch of time with the same simulations running under the same shares.

    `steps` maps each simulation to (iterations, seconds) measured within it; `wait` is the
    wait policies in use; `recut` is True if one was cut anew by what its ranks were measured to do.
    """

    start: float
    end: float
    running: tuple[str, ...]
    wait: frozenset[str]
    steps: Mapping[str, tuple[float, float]]
    recut: bool = False


@dataclass(frozen=True)
class Load:
    """What a family's ranks do in one iteration, seconds, arrays of shape (ranks,).

    `kind` is `spinning` (alone, waits as the MPI library ships them), `yielding` or `blocking`
    (alone, waiting ranks yield or sleep) or `packed` (others run too). The means
    are taken over so many `iterations`; of a family that was cut anew, those after it. What ran on
    several numbers of ranks has one for each.
    """

    family: str
    kind: str
    iterations: float
    cpu: Array
    useful: Array
    mpi: Array


@dataclass(frozen=True)
class History:
    """A whole run. `end` is the time of the last event; `complete` if all that started ended."""

    tracks: tuple[Track, ...]
    marks: tuple[Mark, ...]
    spells: tuple[Spell, ...]
    loads: tuple[Load, ...]
    cpu: int
    end: float
    interrupted: str
    resizes: int
    refused: int

    @property
    def complete(self) -> bool:
        """Whether every simulation of the plan ended; one may end without having started."""
        over = ("done", "failed", *([] if self.interrupted else ["not started"]))
        return all(track.ended and track.state in over for track in self.tracks)
