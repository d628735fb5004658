# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the broker module is told, and what it tells agents; see dovetail-flux(7). Pure.

These are requests, news of slices, and orders to the agents of slices. Inputs: JSON objects.
Outputs: a message for each, checked, or a `MessageError` that says what is wrong. The news of a
slice are told apart by their first key, and so are the orders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, Union, get_args

from dovetail.core.messages import MessageError, decode
from dovetail.flux.instance.run import Run
from dovetail.flux.instance.simulations import Simulation
from dovetail.flux.instance.slices import MOST, KeptSlice

T = TypeVar("T")

# --- Requests ---


@dataclass(frozen=True)
class SubmitPlan:
    """Queue a plan; its content, or else what the file has when its turn comes.

    `metrics` is where its run serves them, if it does, and `umask` that of what it writes.
    """

    plan: str
    output: str
    cwd: str
    content: str | None = None
    environment: dict[str, str] | None = None
    metrics: str | None = None
    umask: int | None = None

    def __post_init__(self) -> None:
        """None of the three that are needed may be empty."""
        for name in ("plan", "output", "cwd"):
            if not getattr(self, name):
                raise MessageError(f"SubmitPlan: {name} is empty")


@dataclass(frozen=True)
class ChooseRuns:
    """Wait for these runs, or cancel them; None: all of them."""

    runs: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Resize:
    """Have so many slices."""

    nodes: int

    def __post_init__(self) -> None:
        """None at all would be the end."""
        if not 1 <= self.nodes <= MOST:
            raise MessageError(f"nodes is a number from 1 to {MOST}, not {self.nodes}")


@dataclass(frozen=True)
class FindUrl:
    """Where can this service be reached?"""

    service: str


@dataclass(frozen=True)
class WaitDown:
    """Wait until nothing is left of this slice."""

    slice: int


@dataclass(frozen=True)
class Follow:
    """The job of a simulation follows this launch."""

    launch: str


@dataclass(frozen=True)
class Join:
    """A slice wants to join the cluster, with a node of this name; empty: one is found."""

    number: int
    node: str = ""


@dataclass(frozen=True)
class Kept:
    """What the control slice keeps for a module that comes after us; None is not known."""

    wanted: int | None = None
    up: bool | None = None
    lost: tuple[str, ...] | None = None
    slices: tuple[KeptSlice, ...] = ()


@dataclass(frozen=True)
class Attach:
    """A slice's agent is there, and says what it knows; `kept` and what follows: slice 0 alone."""

    number: int
    rank: int
    host: str = ""
    node: str = ""
    cpus: str = ""
    kubeconfig: str = ""
    kept: Kept = Kept()
    runs: tuple[Run, ...] = ()
    simulations: tuple[Simulation, ...] = ()


# --- News of a slice ---


@dataclass(frozen=True)
class NodeReady:
    """Its node is ready in Kubernetes."""

    node: str
    cpus: str = ""
    kubeconfig: str = ""


@dataclass(frozen=True)
class StartFailed:
    """It cannot be, and why."""

    failed: str


@dataclass(frozen=True)
class SliceEnded:
    """It has removed all that was on its machine, but for this."""

    ended: str


@dataclass(frozen=True)
class Invited:
    """The data with which slice `invited` may join, or why there are none."""

    invited: int
    join: dict[str, Any] = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True)
class Forgotten:
    """Kubernetes has this node no more."""

    forgotten: str


@dataclass(frozen=True)
class Answered:
    """The answer to question number `answer`, or why there is none."""

    answer: int
    value: dict[str, Any] = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True)
class SimulationNews:
    """A simulation was launched, or has ended."""

    simulation: Simulation


@dataclass(frozen=True)
class RunEnded:
    """The process of a run has ended."""

    run: int
    code: int
    why: str = ""
    reported: bool = False  # and its report was written


@dataclass(frozen=True)
class ReportWritten:
    """A run that ends with its slice has written its report."""

    report: int


News = Union[
    NodeReady, StartFailed, SliceEnded, Invited, Forgotten, Answered, SimulationNews, RunEnded,
    ReportWritten,
]  # fmt: skip


# --- Orders to the agents of slices; all but End are for that of the control slice ---


@dataclass(frozen=True)
class End:
    """End your slice."""

    end: bool = True


@dataclass(frozen=True)
class Invite:
    """Make the data with which slice `invite` may join, as `node` (empty: one is found)."""

    invite: int
    node: str


@dataclass(frozen=True)
class Forget:
    """Remove this node from Kubernetes, and its pods, if all that ran on it has `ended`."""

    forget: str
    ended: bool = False


@dataclass(frozen=True)
class Keep:
    """Keep this, which is a Kept of this module's version, for one that comes after us.

    It has what has changed, and beside that the rest is kept, but for slices that are `gone`.
    """

    keep: dict[str, Any]
    gone: tuple[int, ...] | None = None


@dataclass(frozen=True)
class QueuedPlan:
    """Run `number`: a plan as it was submitted, and where its simulations run."""

    number: int
    plan: str
    output: str
    cwd: str
    executor: str
    content: str | None = None
    environment: dict[str, str] | None = None
    metrics: str | None = None
    umask: int | None = None


@dataclass(frozen=True)
class Queue:
    """Keep this plan until it is its turn."""

    queue: QueuedPlan


@dataclass(frozen=True)
class StartRun:
    """It is this run's turn."""

    run: int


@dataclass(frozen=True)
class CancelRun:
    """End this run, or never start it."""

    cancel: int


@dataclass(frozen=True)
class FindService:
    """Find where this service can be reached, and answer the question of this number."""

    url: str
    question: int


Order = Union[End, Invite, Forget, Keep, Queue, StartRun, CancelRun, FindService]


# --- Told apart ---


def _by_key(kinds: tuple[type[T], ...]) -> dict[str, type[T]]:
    """Kinds of messages by their first key."""
    return {fields(kind)[0].name: kind for kind in kinds}  # type: ignore[arg-type]


_NEWS: dict[str, Any] = _by_key(get_args(News))
_ORDERS: dict[str, Any] = _by_key(get_args(Order))


def news(payload: Mapping[str, Any]) -> tuple[int, News]:
    """The slice that has something to say, and what."""
    number = payload.get("number")
    if not isinstance(number, int) or isinstance(number, bool):
        raise MessageError("news: number is not a whole number")
    found: News = _told_apart("news", _NEWS, {k: v for k, v in payload.items() if k != "number"})
    return number, found


def order(payload: Mapping[str, Any]) -> Order:
    """What an agent is to do."""
    found: Order = _told_apart("order", _ORDERS, payload)
    return found


def _told_apart(what: str, kinds: Mapping[str, type[T]], payload: Mapping[str, Any]) -> T:
    for name, kind in kinds.items():
        if name in payload:
            return decode(kind, payload)
    raise MessageError(f"{what}: none of {', '.join(kinds)} is there")
