# SPDX-License-Identifier: LGPL-3.0-or-later
"""The controller's tunables, each with the reason for its value.

Inputs and outputs: from and to the header of the event log, so that a recorded run is replayed
with the settings that it had.

Invariants: frozen for the length of a run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.core.throughput_model import WAIT_COST, WINDOW, WINDOW_ITERATIONS, WINDOWS


@dataclass(frozen=True)
class Settings:
    """Every tunable of the controller. Seconds are the controller's own (see Controller)."""

    max_packed: int = 0
    """Most simulations at once, 0 for no such limit: the plan's own bound."""
    period: float = 0.2
    """Seconds between decisions where samples arrive and no Tick does."""
    warmup: int = 3
    """First iterations left out: caches, first touch, file reading."""
    window: float = WINDOW
    """Least seconds of a measurement: a hundred scheduler periods."""
    window_iterations: int = WINDOW_ITERATIONS
    """Least iterations of a measurement: enough for four sub-windows of two."""
    window_limit: float = WINDOWS
    """Windows after which a measurement that does not settle is taken as it is."""
    steady: float = 0.03
    """Relative standard error of a rate that counts as settled; a gain must exceed it."""
    rhythm: float = 10.0
    """Seconds without an iteration after which work tells progress: a rhythm takes at least five of
    its beats and a second to be found, and who tells it later is measured anew."""
    period_error: float = 0.02
    """Relative error of a rate of periods beyond its scatter: one may be a part of an iteration."""
    work_error: float = 0.10
    """The same of a rate of work: caches and memory that are shared make it cost more CPU."""
    predicted_gain: float = 1.08
    """Least predicted gain for a trial: less drowns in the noise and in the trial's cost."""
    full: float = 0.9
    """Share of all cores that a simulation keeps busy, from which nothing is tried beside it."""
    kept_gain: float = 1.03
    """Least measured gain to keep an admission: more than the noise of two windows."""
    near_bound: float = 0.85
    """Share of the bound at which no other wait policy is tried: none could gain much."""
    hopeless: float = 0.8
    """Share of the throughput before, below which a trial ends after half a window."""
    wait_cost: float = WAIT_COST
    """What blocking waits cost a simulation, until that is measured."""
    beta: float = 0.05
    """Interference of packed ranks until it is measured (1:3 on two cores, gain 1.38: 0.05)."""
    harm: float = 0.015
    """Share of the queue's sequential time that trials may lose: half of the 3 % promised."""
    lookahead: int = 4
    """Families looked at in queue order for one that pays beside what runs."""
    overtakes: int = 8
    """Simulations that may pass the head of the queue before only the head may start."""
    hysteresis: float = 0.10
    """Relative change of a rank's request worth a resize: twice a window's noise."""
    replan: float = 5.0
    """Seconds between two looks at the load of running simulations."""
    boost: float = 1.5
    """Factor on the share of a simulation that is too slow, per step."""
    boost_limit: float = 3.0
    """Greatest such factor: above it the others starve."""
    margin: float = 0.03
    """Relative excess of a slowdown over its budget that is still noise."""
    cooldown: float = 10.0
    """Seconds without an admission after one was taken back, or of resizes after a refusal."""
    young: float = 20.0
    """Seconds of life up to which a simulation is rather run again than kept to the harm."""
    stall: float = 300.0
    """Least seconds without an iteration that count as hung: writing results may take minutes."""
    stall_iterations: float = 50.0
    """The same in usual iterations, whichever is longer."""
    start_limit: float = 1800.0
    """Seconds before the first iteration in which no rank does anything outside MPI."""
    start_factor: float = 20.0
    """The same in usual start times, once the family's is known (at least `stall`)."""
    halt: float = 300.0
    """Seconds to stop at a checkpoint in: to write large fields may take minutes."""
    restart_pays: float = 2.0
    """How many times its cost a restart on other ranks, or for a new cut, is to save by what is
    predicted: the cost is certain, and predictions err."""
    restarts: int = 3
    """Times that one is run again after it lost its node, or failed before its first iteration."""
    no_nodes: float = 60.0
    """Seconds without any CPU after which the rest of the queue is given up."""
    jump: float = 60.0
    """A step of the run's clock beyond this, or backwards, is a jump: windows begin anew."""

    def plain(self) -> dict[str, Any]:
        """For the header of the event log."""
        return dataclasses.asdict(self)

    @staticmethod
    def of(values: Mapping[str, Any]) -> Settings:
        """From the header of the event log; raises ValueError for what is no setting."""
        try:
            return Settings(**values)
        except TypeError as error:
            raise ValueError(f"settings: {error}") from None
