# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the controller shows of itself: one simulation, the whole run.

Inputs: the state. Outputs: values for the live table and for whoever follows a run.

Invariants: looking changes nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from dovetail.controller.simulation import Simulation, Stage
from dovetail.controller.state import State
from dovetail.controller.work import UNIT
from dovetail.core.protocol import Measure, Requests, WaitPolicy


@dataclass(frozen=True)
class View:
    """One simulation for the reader.

    `rate` in 1/s, by work in CPU seconds outside MPI per second, with its relative `error`, that of
    the `measure` included; `slowdown` (against it alone) and `left`, the seconds until its end at
    this rate, are None while unknown; `started` and `ended` are run seconds; `state` is a word of
    `simulation.Stage`, where paused ones are suspended like others, and a program that has been
    found to tell no iterations runs; `reason` says why it failed or
    was not started; its ranks are `bound` to cores or not.
    """

    name: str
    family: str
    ranks: int
    state: str
    iterations: int
    measure: Measure
    rate: float | None
    error: float | None
    slowdown: float | None
    left: float | None
    requests: Requests
    wait: WaitPolicy
    bound: bool
    restarts: int
    reason: str
    started: float | None
    ended: float | None

    @property
    def waits(self) -> str:
        """How its ranks wait, and whether they are bound to cores, in words."""
        return f"{self.wait.mode}, bound" if self.bound else self.wait.mode


@dataclass(frozen=True)
class Status:
    """The whole run for the reader.

    `phase` is a word of `state.Phase`; `n` is how many run at once; `counts` is by the state
    that a `View` shows.
    """

    phase: str
    n: int
    counts: dict[str, int]


def view(state: State, sim: Simulation) -> View:
    """One simulation."""
    window = sim.meter.window() if sim.iterates else None
    each = UNIT if sim.by_work else 1.0
    baseline, left = state.baseline(sim), state.iterations_left(sim)
    rate = window.rate if window else None
    share = sim.share
    return View(
        sim.spec.name,
        sim.spec.family,
        sim.spec.ranks,
        _word(sim),
        sim.told,
        sim.measure,
        rate and rate * each,
        math.hypot(window.error, state.error(sim)) if window else None,
        baseline / rate if baseline and rate else None,
        left / rate if left is not None and rate else None,
        share.requests if share else (),
        share.wait if share else WaitPolicy(),
        sim.bound,
        sim.restarts,
        sim.reason,
        sim.started,
        sim.ended,
    )


def _word(sim: Simulation) -> str:
    """Its stage for the reader; who tells no iterations is not said to wait for the first."""
    stage = sim.stage
    if stage is Stage.PAUSED:
        stage = Stage.SUSPENDED
    elif stage is Stage.STARTING and sim.by_work:
        stage = Stage.RUNNING
    word: str = stage.value
    return word


def decided(state: State) -> list[str]:
    """On how many ranks those run that may have several, and why: lines for the reader."""
    there = [*state.active.values(), *state.terminating.values()]
    return state.choices.lines(Counter(sim.spec.family for sim in there))


def status(state: State) -> Status:
    """The run as a whole."""
    counts: dict[str, int] = {}
    for sim in state.sims.values():
        word = _word(sim)
        counts[word] = counts.get(word, 0) + 1
    return Status(state.phase.value, len(state.active), counts)
