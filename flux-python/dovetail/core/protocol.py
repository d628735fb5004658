# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the controller and its executors say to each other.

Inputs and outputs: none; these are values. `Event`s go into the controller, `Action`s come
out, and both are written to the event log, so every one of them is frozen, made of plain
JSON types, and survives `encode` and `decode` unchanged.

Invariants: times `t` are seconds on the run's own clock (0 at the start of the run; it goes
on over a resume); CPU requests are millicores, whole numbers, one per rank; memory is bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Optional, Protocol, Union

from dovetail.core.causes import Cause as Cause
from dovetail.core.contention import Contention as Contention

Requests = tuple[int, ...]
"""CPU requests in millicores, shape (ranks,)."""


@dataclass(frozen=True)
class WaitPolicy:
    """How a rank waits inside MPI.

    `mode` is `off` (the library spins, as shipped), `yield` (it spins and gives way to whoever
    else can run) or `doorbell` (after `yields` times giving way it sleeps until a peer rings).
    """

    mode: str = "off"
    yields: int = 20


@dataclass(frozen=True)
class PlanPhase:
    """A part of a simulation, by its plan, with the requests that its ranks have in it.

    It ends once `until` iterations are complete, counted from the first, or the residual is at most
    `residual`, whichever is first; 0 where that does not end it, and the last one ends with the
    simulation. `limit` is as in `Spec`.
    """

    until: int
    requests: Requests
    limit: float = 0.0
    residual: float = 0.0

    def over(self, iterations: int, residual: Optional[float]) -> bool:  # noqa: UP045
        """Whether it is, after so many iterations, of which the last had this residual."""
        small = residual is not None and residual <= self.residual
        return bool(0 < self.until <= iterations or (self.residual and small))


@dataclass(frozen=True)
class Spec:
    """One simulation, as the plan asks for it.

    `family` is the plan entry: its simulations have the same case, ranks and weights, so one
    profile serves all. `slowdown` is how many times slower than alone it may run (1.0 or
    more); `deadline` is on the run's clock, None if it has none; `memory` is 0 if unknown.
    `iterations` is the number that a run is expected to take, 0 if unknown. `environment`
    holds pairs added to the environment. `ranks_per_pod` is 0 for one rank group per node.
    `limit` is how many times its request a pod may use at most, 0 for no limit.
    `phases` are the parts in which its requests are the plan's own, in order; empty if they follow
    its load.
    `image` is the container image whose programs it runs, empty for the machine's own;
    `pull_policy`, a word of Kubernetes, and `pull_secret`, the name of a Secret, or empty, are how
    nodes get it. `devices` are pairs of a name and how many of it each pod gets.

    `widths` are the numbers of ranks that it may run on, ascending; empty if `ranks` is kept.
    Where there are several, `ranks` and `weights` are those of the widest until it is launched,
    and then those that were chosen. `application` says who cuts its case (see `applications`).
    `recut` is True if `weights` were measured, and its case is to be cut by them whatever its
    `prepare` lines did; `rebalance` False if it never shall be.
    `live` is True if what it writes on nodes without a common folder comes back while it runs.
    `checkpoint` is True if it may be stopped at a written step and continued; `write` and `restart`
    are the plan's own commands for it. What it takes are
    command lines in its copied case, which it has once it is launched, empty where there are none:
    `go_on` makes ready what an earlier launch left; its last line says how many iterations are
    over. Where it fails, the simulation begins anew; but where it has exit code 75, or is killed,
    the launch has failed, and what is there is kept. `halt` asks the running program to write all
    and to end after its step; once it has ended well, `halted` has exit code 3 if nothing is left
    to do. If it has any other, the simulation goes on, and ends at once if all was done.
    """

    name: str
    family: str
    case: str
    ranks: int
    weights: tuple[float, ...]
    command: tuple[str, ...]
    prepare: tuple[str, ...] = ()
    slowdown: float = 2.0
    memory: int = 0
    deadline: Optional[float] = None  # noqa: UP045 (pydantic reads it, on Python 3.9 too)
    iterations: int = 0
    ranks_per_pod: int = 0
    environment: tuple[tuple[str, str], ...] = ()
    limit: float = 0.0
    phases: tuple[PlanPhase, ...] = ()
    widths: tuple[int, ...] = ()
    application: str = "generic"
    objective: Literal["throughput", "turnaround"] = "throughput"
    recut: bool = False
    rebalance: bool = True
    live: bool = True
    checkpoint: bool = False
    write: str = ""
    restart: str = ""
    go_on: str = ""
    halt: str = ""
    halted: str = ""
    image: str = ""
    pull_policy: str = "IfNotPresent"
    pull_secret: str = ""
    devices: tuple[tuple[str, int], ...] = ()

    def takes(self, ranks: int = 0) -> dict[str, int]:
        """Devices that it takes at least, on so many ranks: those of one pod, or of all.

        How many pods there are is known before it is placed only where the plan says that.
        """
        pods = -(-(ranks or self.ranks) // self.ranks_per_pod) if self.ranks_per_pod else 1
        return {name: pods * each for name, each in self.devices}

    def on(self, ranks: int) -> Spec:
        """The same on that many of its `widths`; evenly cut, unless they are as it was given."""
        if ranks == self.ranks:
            return self
        return replace(self, ranks=ranks, weights=(1.0,) * ranks)


@dataclass(frozen=True)
class Node:
    """A place for ranks: `cpu` in millicores, `memory` in bytes."""

    name: str
    cpu: int
    memory: int


@dataclass(frozen=True)
class Capacity:
    """What the executor may use, and what it can do there.

    `weights` is False where CPU weights cannot be set (no writable cgroup); `suspend` is False
    where a simulation cannot be suspended, `checkpoints` where it cannot be asked to stop at one,
    `binds` where its ranks cannot be bound to cores. `devices` are pairs of a name, as in `Spec`,
    and how many all nodes have of it. No more than `simulations` can be started at once, suspended
    ones among them; 0 for any number.
    """

    nodes: tuple[Node, ...]
    weights: bool = True
    suspend: bool = True
    checkpoints: bool = False
    binds: bool = False
    devices: tuple[tuple[str, int], ...] = ()
    simulations: int = 0

    @property
    def cpu(self) -> int:
        """All nodes' CPU, millicores."""
        return sum(node.cpu for node in self.nodes)

    @property
    def memory(self) -> int:
        """All nodes' memory, bytes."""
        return sum(node.memory for node in self.nodes)


@dataclass(frozen=True)
class Share:
    """What one simulation gets: requests per rank, how it waits, whether it is suspended.

    Where it is `bound`, each rank has a core on which it stays, and no other rank of the run.
    `limit` is how many times its requests it may use at most, 0 if that is as in its `Spec`.
    """

    requests: Requests
    wait: WaitPolicy = field(default_factory=WaitPolicy)
    suspended: bool = False
    bound: bool = False
    limit: float = 0.0


# --- Events: from the executor, or from the loop, to the controller ---


Measure = Literal["iterations", "periods", "work"]


@dataclass(frozen=True)
class Ranks:
    """The ranks of one simulation at one moment; every array has shape (ranks,).

    `iterations` complete so far; `stamp` is the run-clock time at which the last of them
    ended, and `cpu`, `useful` (wall seconds outside MPI) and `mpi` (wall seconds inside) are
    taken at that same moment, so that differences between two samples belong to whole
    iterations. `memory` is the peak resident set so far, bytes. `measure` says what was counted:
    iterations that the program or its log tells of, periods of its MPI calls, which may be a part
    of an iteration or several, or nothing, so that only its work tells of progress: then `stamp` is
    when the sample was taken. `residual` is the largest that the log told in the last complete
    iteration, None if none. `queued` is the seconds that all threads that it has now waited for a
    core, None if unknown, or if the ranks use MPI.
    """

    iterations: tuple[int, ...]
    stamp: tuple[float, ...]
    cpu: tuple[float, ...]
    useful: tuple[float, ...]
    mpi: tuple[float, ...]
    memory: tuple[int, ...]
    measure: Measure = "iterations"
    residual: Optional[float] = None  # noqa: UP045 (as above)
    queued: Optional[float] = None  # noqa: UP045


@dataclass(frozen=True)
class Tick:
    """Time has passed and nothing else happened."""

    t: float


@dataclass(frozen=True)
class Delayed:
    """The simulation was launched and cannot start yet: there is no room, for one."""

    t: float
    name: str
    why: str


@dataclass(frozen=True)
class Placed:
    """The simulation's pods are there, on these nodes: one for each rank group, in their order."""

    t: float
    name: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Started:
    """The simulation's own command runs now; its prepare step is over.

    It goes on after so many `iterations` of an earlier launch; 0 if it begins. Its case, as it was
    prepared, says that it takes `total`; 0 if that is not known, or was before.
    """

    t: float
    name: str
    iterations: int = 0
    total: int = 0


@dataclass(frozen=True)
class Sampled:
    """A look at a running simulation's ranks."""

    t: float
    name: str
    ranks: Ranks


@dataclass(frozen=True)
class Counted:
    """What has kept a simulation's ranks from their cores so far; now and then, and at its end."""

    t: float
    name: str
    contention: Contention


@dataclass(frozen=True)
class Finished:
    """The simulation ended, by `cause`; `reason` is one line for the user, empty for success.

    `code` is its exit code, 128 more than the signal that ended it; 0 for success.
    """

    t: float
    name: str
    cause: Cause
    code: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Resized:
    """A resize took effect; where `refused` is not empty none of it did, and it says why."""

    t: float
    names: tuple[str, ...]
    refused: str = ""


@dataclass(frozen=True)
class CapacityChanged:
    """Nodes came or went. Simulations that lost ranks are reported as Finished."""

    t: float
    capacity: Capacity


@dataclass(frozen=True)
class Interrupted:
    """The user wants the run to end: stop everything, start nothing.

    What may be stopped at a checkpoint has `within` seconds for that; 0 if all is stopped at once.
    """

    t: float
    reason: str
    within: float = 0.0


@dataclass(frozen=True)
class Unwanted:
    """The user wants one simulation to end; the others go on."""

    t: float
    name: str
    reason: str


Event = Union[
    Tick, Delayed, Placed, Started, Sampled, Counted, Finished, Resized, CapacityChanged,
    Interrupted, Unwanted,
]  # fmt: skip


EndState = Literal["done", "failed", "checkpointed", "not started"]


# --- Actions: from the controller to the executor ---


@dataclass(frozen=True)
class Launch:
    """Start a simulation, on as many ranks as its share has requests.

    If `continued`, it goes on from its last checkpoint, if there is one and the executor can.
    """

    name: str
    share: Share
    continued: bool = False


@dataclass(frozen=True)
class Resize:
    """Give simulations new shares, all of them or none."""

    shares: Mapping[str, Share]
    why: str


@dataclass(frozen=True)
class Stop:
    """End a simulation; `requeue` if it shall run again from its start.

    Its Finished has this `cause`, unless it ended by itself before.
    """

    name: str
    cause: Cause
    why: str
    requeue: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """Ask a running simulation to stop at a checkpoint; one that is suspended goes on for that.

    Until it has, it runs. Its Finished has the cause CHECKPOINTED, unless it ended by itself.
    """

    name: str
    why: str


@dataclass(frozen=True)
class Requeued:
    """A simulation is in the queue again, at its place in the plan; nothing for the executor."""

    name: str
    cause: Cause
    why: str


@dataclass(frozen=True)
class Ended:
    """What the controller makes of a simulation's end; nothing for the executor to do.

    `reason` is empty for one that is done. One that has not started ends so when the run gives
    it up, and one that is `checkpointed` when the run ended and it can go on. Where the run is
    resumed, a Requeued may follow.
    """

    name: str
    state: EndState
    cause: Cause
    reason: str = ""


@dataclass(frozen=True)
class Note:
    """A decision for the log and the reader, nothing for the executor to do.

    `what` is one of: profile, choice, resize, admit, keep, rollback, policy, bind, phase, hold,
    model, fail.
    `data` holds the figures that the decision rests on.
    """

    what: str
    why: str
    data: Mapping[str, Any] = field(default_factory=dict)


Action = Union[Launch, Resize, Stop, Checkpoint, Requeued, Ended, Note]
ACTIONS = (Launch, Resize, Stop, Checkpoint, Requeued, Ended, Note)


@dataclass(frozen=True)
class Result:
    """How a simulation ended, for an executor: as in Finished.

    `trouble` is what to know besides: an incomplete log, for one.
    """

    cause: Cause
    code: int = 0
    reason: str = ""
    trouble: str = ""

    def once_stopped(self, cause: Cause, why: str) -> Result:
        """The end of one that had been told to end: that is why, whatever it did then."""
        return Result(cause, self.code or 143, f"stopped: {why}", self.trouble)


class Executor(Protocol):
    """Runs simulations somewhere. No call blocks for longer than a local file write.

    `observe` returns what happened since the last call, oldest first, with a Sampled for each
    simulation that has published anything new. `close` ends everything that is still running
    and removes every trace; it is safe to call twice.
    """

    def capacity(self) -> Capacity:
        """What may be used now."""

    def launch(self, spec: Spec, share: Share) -> None:
        """Start; progress and failure come back as events."""

    def observe(self, t: float) -> Sequence[Event]:
        """What happened since the last call; `t` is now on the run's clock."""

    def resize(self, shares: Mapping[str, Share]) -> None:
        """Change shares as one transaction; a Resized follows."""

    def stop(self, name: str, why: str, cause: Cause = Cause.CANCELLED) -> None:
        """End one simulation; a Finished with this cause and a reason follows."""

    def checkpoint(self, name: str) -> None:
        """Ask one to stop at a checkpoint; called only where the capacity has `checkpoints`."""

    def close(self) -> None:
        """End all, leave nothing behind."""
