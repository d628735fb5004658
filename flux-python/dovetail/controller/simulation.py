# SPDX-License-Identifier: LGPL-3.0-or-later
"""One simulation, and the family it belongs to, as the controller keeps them.

Inputs and outputs: none; `State` and the phases read and write them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dovetail.controller.baseline import Alone
from dovetail.controller.meter import Meter, Window
from dovetail.controller.settings import Profile
from dovetail.core.protocol import Share, Spec, Stop, WaitPolicy


@dataclass
class Simulation:
    """One simulation. Times ending in `_at` are controller seconds, the others run seconds.

    `state` is queued, preparing, starting, running, suspended, done, failed or not started;
    `useful` the seconds outside MPI of all its ranks, None until they publish anything.
    """

    spec: Spec
    index: int
    meter: Meter
    state: str = "queued"
    share: Share | None = None
    alone: Alone = field(default_factory=Alone)
    boost: float = 1.0
    restarts: int = 0
    paused: bool = False
    stop: Stop | None = None
    reason: str = ""
    started: float | None = None
    ended: float | None = None
    launched_at: float = 0.0
    progress_at: float = 0.0
    useful: float | None = None
    thawed_at: float = 0.0
    boosted_at: float = 0.0
    memory: int = 0
    held: int = 0
    warned: bool = False

    @property
    def iterations(self) -> int:
        """Iterations complete on every rank."""
        return self.meter.iterations

    @property
    def measured(self) -> bool:
        """True if it iterates and is past its warm-up or its last change."""
        return self.state == "running" and not self.paused and self.meter.warm


@dataclass
class Family:
    """What the simulations of one plan entry share. `trials` are windows alone by policy.

    `packed` is the cores needed including what blocking waits cost, once measured;
    `iterations` is how many a whole run takes, 0 if unknown; `silent` if it publishes none.
    """

    spec: Spec
    profile: Profile | None = None
    trials: dict[WaitPolicy, tuple[Window, tuple[float, ...], tuple[float, ...]]] = field(
        default_factory=dict
    )
    packed: float | None = None
    iterations: int = 0
    startup: float | None = None
    silent: bool = False
    queue: list[tuple[int, str]] = field(default_factory=list)
    total: int = 0
