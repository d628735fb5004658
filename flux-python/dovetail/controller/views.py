# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the controller shows of itself: one simulation, the whole run.

Inputs: the state. Outputs: values for the live table and the summary.

Invariants: looking changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.controller import settings
from dovetail.controller.simulation import Simulation
from dovetail.controller.state import State
from dovetail.core.protocol import Requests, WaitPolicy


@dataclass(frozen=True)
class View:
    """One simulation for the reader.

    `rate`, `baseline` in 1/s and `slowdown` (baseline / rate) are None while unknown; `started`
    and `ended` are run seconds; `state` is queued, preparing, starting, running, suspended, done,
    failed or not started; `reason` says why for the last two.
    """

    name: str
    family: str
    state: str
    iterations: int
    rate: float | None
    baseline: float | None
    slowdown: float | None
    requests: Requests
    wait: WaitPolicy
    restarts: int
    reason: str
    started: float | None
    ended: float | None
    boost: float


@dataclass(frozen=True)
class Status:
    """The whole run for the reader.

    `phase` is profile, run (one at a time), pack (an admission is judged), watch or done; `n` is
    how many run at once; `counts` is by state; `beta` and its standard error, `model_error` (rms,
    relative, None before the first measurement); `lost` seconds spent on trials that did not
    pay; `sequential` seconds that the plan takes one after the other, as far as is known.
    """

    t: float
    phase: str
    n: int
    n_max: int
    counts: dict[str, int]
    admissions: int
    rollbacks: int
    resizes: int
    restarts: int
    beta: float
    beta_error: float
    model_error: float | None
    lost: float
    sequential: float


def view(state: State, sim: Simulation) -> View:
    """One simulation."""
    window = sim.meter.window() if sim.state == "running" else None
    baseline = state.baseline(sim) or None
    rate = window.rate if window else None
    share = sim.share
    return View(
        sim.spec.name,
        sim.spec.family,
        "suspended" if sim.paused else sim.state,
        sim.iterations,
        rate,
        baseline,
        baseline / rate if baseline and rate else None,
        share.requests if share else (),
        share.wait if share else settings.OFF,
        sim.restarts,
        sim.reason,
        sim.started,
        sim.ended,
        sim.boost,
    )


def status(state: State) -> Status:
    """The run as a whole."""
    counts: dict[str, int] = {}
    for sim in state.sims.values():
        counts[sim.state] = counts.get(sim.state, 0) + 1
    known, totals = state.knowledge, state.totals
    return Status(
        state.t,
        phase(state),
        len(state.active),
        totals["n_max"],
        counts,
        totals["admissions"],
        totals["rollbacks"],
        totals["resizes"],
        sum(sim.restarts for sim in state.sims.values()),
        known.beta,
        known.beta_error,
        known.error,
        state.lost,
        state.sequential(),
    )


def phase(state: State) -> str:
    """What the run is about now; see `Status`."""
    if state.finished:
        return "done"
    if state.profiling or any(state.family(s).profile is None for s in state.active.values()):
        return "profile"
    if len(state.active) < 2:
        return "run"
    if state.own_cores or state.knowledge.verdict(state.mix):
        return "watch"
    return "pack"
