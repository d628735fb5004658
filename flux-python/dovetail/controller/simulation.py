# SPDX-License-Identifier: LGPL-3.0-or-later
"""One simulation with its stages, its family and its shape, as the controller keeps them.

Inputs and outputs: none; `State` and the phases read and write them.

Invariants: a simulation is in one stage, and changes it by `enter` alone, along `FOLLOWS`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from dovetail.controller.baseline import Alone, Profile
from dovetail.controller.binding import Binding
from dovetail.controller.meter import Meter, Window
from dovetail.controller.speedup import Measured
from dovetail.controller.work import Work
from dovetail.core.protocol import Cause, Measure, PlanPhase, Share, Spec, Stop, WaitPolicy


class Stage(enum.Enum):
    """Where a simulation is between the queue and its end; the value is the word for users."""

    QUEUED = "queued"
    PREPARING = "preparing"  # launched; its own command does not run yet
    STARTING = "starting"  # its command runs, and no iteration is complete
    RUNNING = "running"
    PAUSED = "paused"  # for the length of another one's profile; it keeps its place
    SUSPENDED = "suspended"  # taken back with its work kept; its place is free
    HALTING = "halting"  # asked to stop at a checkpoint; it runs until it has
    TERMINATING = "terminating"  # asked to stop, and not yet ended
    DONE = "done"
    FAILED = "failed"
    CHECKPOINTED = "checkpointed"  # the run ended and it stopped; it goes on if that is resumed
    NOT_STARTED = "not started"


_ENDED = {Stage.QUEUED, Stage.DONE, Stage.FAILED}  # queued again, if it is not to blame
_STOPS = {Stage.PAUSED, Stage.SUSPENDED, Stage.HALTING, Stage.TERMINATING, *_ENDED}
_GOES_ON = {Stage.PREPARING, Stage.STARTING, Stage.RUNNING}

FOLLOWS: dict[Stage, set[Stage]] = {
    Stage.QUEUED: {Stage.PREPARING, Stage.NOT_STARTED, Stage.CHECKPOINTED, Stage.FAILED},
    Stage.PREPARING: {Stage.STARTING, Stage.RUNNING, *_STOPS},
    Stage.STARTING: {Stage.RUNNING, *_STOPS},
    Stage.RUNNING: _STOPS,
    Stage.PAUSED: {Stage.SUSPENDED, Stage.HALTING, Stage.TERMINATING, *_GOES_ON, *_ENDED},
    Stage.SUSPENDED: {Stage.HALTING, Stage.TERMINATING, *_GOES_ON, *_ENDED},
    Stage.HALTING: {Stage.TERMINATING, Stage.CHECKPOINTED, *_ENDED},
    Stage.TERMINATING: {Stage.CHECKPOINTED, *_ENDED},
    Stage.DONE: set(),
    Stage.FAILED: {Stage.QUEUED},  # an interrupt ended it, and the run is resumed
    Stage.CHECKPOINTED: {Stage.QUEUED},  # the same
    Stage.NOT_STARTED: {Stage.QUEUED},  # the same
}
"""The stages that may follow each stage."""


@dataclass
class Simulation:
    """One simulation. Times ending in `_at` are controller seconds, the others run seconds.

    `planned` is what the plan asks for, `spec` the same on the ranks that it was launched on.
    `plan_phase` is the number of the plan's phase that it is in, and `residual` what its log told
    last, None if nothing.
    `useful` is the seconds outside MPI of all its ranks, None until they publish anything, and
    `worked` of each when it last made progress;
    `memory` the most bytes seen, `counted_memory` those counted against the capacity now, and
    `counted_devices` the same for devices; `stop`
    is there from the moment it was asked to stop; `late_told` once its user was told that its
    deadline cannot be met. `cause` and `reason` say why it ended, None and empty before.
    `over` is the iterations of earlier launches after which it goes on, `most` the most that it
    has come to, what was lost included. Of its `restarts`, `losses` are those for which what it
    ran on was lost, or it could not go on from what it had written. It stopped `stops` times at a
    checkpoint, which are no `restarts`: at `halted_at` to go on on `next_ranks`, or as the run
    ended. `half` is the first half of a pair that is being measured: whether it was bound, its
    rate, and when it had that; `unbindable` is why it could not be bound, and when that was said.
    What tells its progress is `counted`, its iterations or periods, or if `by_work` its `work`,
    of which a unit is then called an iteration here. It began at `began_at`, its first iteration
    was over `startup` seconds after its launch, 0 before, and it last counted something else than
    work at `told_at`. While active it counts as on so many `cores`.
    So much of its work was `undisturbed`: each active rank had a core. It has `shared` cores if
    that was not so at some moment since its launch.
    """

    planned: Spec
    index: int
    counted: Meter
    work: Work
    spec: Spec = field(init=False)
    stage: Stage = Stage.QUEUED
    share: Share | None = None
    alone: Alone = field(default_factory=Alone)
    plan_phase: int = 0
    residual: float | None = None
    boost: float = 1.0
    restarts: int = 0
    losses: int = 0
    failed: bool = False
    begun: bool = False
    over: int = 0
    most: int = 0
    measure: Measure = "iterations"
    by_work: bool = False
    cores: int = 0
    undisturbed: int = 0
    shared: bool = False
    began_at: float = 0.0
    startup: float = 0.0
    told_at: float = 0.0
    stops: int = 0
    halted_at: float | None = None
    next_ranks: int = 0
    half: tuple[bool, float, float] | None = None
    unbindable: tuple[str, float] | None = None
    stop: Stop | None = None
    reason: str = ""
    cause: Cause | None = None
    started: float | None = None
    ended: float | None = None
    launched_at: float = 0.0
    progress_at: float = 0.0
    useful: float | None = None
    worked: tuple[float, ...] = ()
    resumed_at: float = 0.0
    memory: int = 0
    counted_memory: int = 0
    counted_devices: Mapping[str, int] = field(default_factory=dict)
    late_told: bool = False

    def __post_init__(self) -> None:
        self.spec = self.planned

    def enter(self, stage: Stage) -> None:
        """Change the stage. The controller alone calls it, so a wrong change is its mistake."""
        assert stage in FOLLOWS[self.stage], f"{self.spec.name}: {self.stage} -> {stage}"
        self.stage = stage

    def go_on(self) -> None:
        """Leave PAUSED or SUSPENDED for the stage that its progress says."""
        if self.iterations:
            self.enter(Stage.RUNNING)
        else:
            self.enter(Stage.PREPARING if self.started is None else Stage.STARTING)

    @property
    def shape(self) -> str:
        """The name of its shape."""
        return shape_name(self.spec)

    @property
    def meter(self) -> Meter:
        """What tells its progress."""
        return self.work.meter if self.by_work else self.counted

    @property
    def iterations(self) -> int:
        """Iterations complete on every rank."""
        return self.meter.iterations

    @property
    def continued(self) -> bool:
        """Whether it goes on from what it has written, if it is launched now."""
        return self.spec.checkpoint and self.begun

    def got(self, cores: float, spins: bool) -> float:
        """The share that its ranks had of the CPU that they would have used; see `share_got`."""
        return (self.work if self.by_work else self.counted).got(cores, spins)

    @property
    def told(self) -> int:
        """Iterations for the reader, those of earlier launches included; 0 if by work."""
        return 0 if self.by_work else self.over + self.iterations

    @property
    def iterates(self) -> bool:
        """True from its first iteration on, unless it was taken back."""
        paused = self.stage is Stage.PAUSED and self.iterations > 0
        return self.stage is Stage.RUNNING or paused

    @property
    def bound(self) -> bool:
        """Whether its ranks shall be bound to cores now."""
        return self.share is not None and self.share.bound

    @property
    def phase(self) -> PlanPhase | None:
        """The plan's phase that it is in, None if it has none."""
        return self.spec.phases[self.plan_phase] if self.spec.phases else None

    @property
    def measured(self) -> bool:
        """True if it iterates and is past its warm-up or its last change."""
        return self.stage is Stage.RUNNING and self.meter.warm


@dataclass
class Shape:
    """A family on one number of ranks. `trials` are windows alone by wait policy.

    `name` is the family's own where the plan keeps its ranks. `blocking_need` is the cores needed
    including what blocking waits cost, once measured; `memory` the most
    bytes that one took; `startup` the most seconds from a launch to the first iteration, and
    `soonest` the least: the first one may prepare what the others share; `rates` are the last
    measured in 1/s with a core for every rank, by simulation; `lasted` the seconds that each that
    is done took after its start;
    `broken` if one failed before its first iteration and other ranks may do better; `threads` is
    the most cores that the threads of one wanted, if known; `ends` are for `work.dearer`; `binding`
    is what is known of binding its ranks to cores.
    """

    name: str
    spec: Spec
    profile: Profile | None = None
    trials: dict[WaitPolicy, tuple[Window, tuple[float, ...], tuple[float, ...]]] = field(
        default_factory=dict
    )
    blocking_need: float | None = None
    memory: int = 0
    startup: float | None = None
    soonest: float = 0.0
    rates: dict[str, float] = field(default_factory=dict)
    lasted: list[float] = field(default_factory=list)
    broken: bool = False
    threads: int = 0
    ends: list[tuple[float, float]] = field(default_factory=list)
    binding: Binding = field(default_factory=Binding)

    @property
    def cores(self) -> int:
        """Cores that one keeps busy at most: one for each rank, or for each thread if known."""
        return max(self.spec.ranks, self.threads)


@dataclass
class Family:
    """What the simulations of one plan entry share, on however many ranks they run.

    `iterations` is how many a whole run takes, 0 if unknown; `guessed` while they may be
    of another unit than what is counted; `silent` if it publishes none, nor any work; `by_work` if
    its progress is told by work, which it began to `turns` times;
    `least` is the fewest ranks that one was launched on, 0 before, and `tried` if one was to know
    what fewer ranks take;
    `restart` is the seconds from a checkpoint that was asked for to the next iteration, once seen;
    `shapes` are by number of ranks, and so are `cuts`, measured weights in place of the plan's,
    empty once none could start so;
    `curve` is what was last predicted of the seconds by ranks, after what it was made from.
    """

    spec: Spec
    iterations: int = 0
    guessed: bool = False
    silent: bool = False
    by_work: bool = False
    turns: int = 0
    restart: float | None = None
    queue: list[tuple[int, str]] = field(default_factory=list)
    total: int = 0
    least: int = 0
    tried: bool = False
    shapes: dict[int, Shape] = field(default_factory=dict)
    cuts: dict[int, tuple[float, ...]] = field(default_factory=dict)
    curve: tuple[tuple[Mapping[int, Measured], int], dict[int, float]] = field(
        default_factory=lambda: (({}, 0), {})
    )

    @property
    def length(self) -> int:
        """How many iterations a whole run takes, as they are counted; 0 if unknown."""
        return 0 if self.guessed else self.iterations


def shape_name(spec: Spec) -> str:
    """The shape that a simulation has on its present ranks; its family's name if all are kept."""
    name = spec.family if len(spec.widths) < 2 else f"{spec.family} on {spec.ranks}"
    return f"{name}, cut anew" if spec.recut else name
