# SPDX-License-Identifier: LGPL-3.0-or-later
"""The messages between controller, agents and entrypoints; see dovetail-pods(7).

Inputs and outputs: values and bytes. A message travels as its length, four bytes, and a JSON
object with its fields and, as `kind`, the name of its class. Invariants: whatever bytes come,
`Decoder` gives messages whose fields have the right types, or a `MessageError`, after which their
connection is of no more use; a message that has been decoded is the one that was encoded.

`simulation` names one launch of a simulation, unique in its run; `group` is a rank group.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any, Union, get_args

from dovetail.core.causes import Cause
from dovetail.core.messages import MessageError, decode_tagged, encode_tagged

LENGTH = struct.Struct("!I")
LONGEST = 16 << 20  # bytes of one message
FIRST = 4096  # of the first one of a stranger


# --- From the nodes to the controller ---


@dataclass(frozen=True)
class Hello:
    """An agent's first words; nothing else is read, nor said, before the token is right."""

    node: str
    token: str


@dataclass(frozen=True)
class Transfer:
    """The first word of a connection for one folder, which comes ("in") or goes ("out")."""

    node: str
    token: str
    folder: str
    way: str


@dataclass(frozen=True)
class Pod:
    """A rank group's entrypoint is there; said again by each new agent, and to each new hub.

    Earlier simulations in the pod have `used` so many CPU seconds.
    """

    simulation: str
    group: int
    uid: str
    used: float = 0.0


@dataclass(frozen=True)
class Started:
    """The simulation's own command runs, under `mpi` (empty if that cannot be told).

    It goes on after so many `iterations` of earlier launches.
    """

    simulation: str
    mpi: str
    iterations: int


@dataclass(frozen=True)
class Result:
    """How a simulation ended, as its supervisor tells it; repeated until an End comes back."""

    simulation: str
    cause: Cause
    code: int
    reason: str
    trouble: str


@dataclass(frozen=True)
class Lost:
    """A rank group has no entrypoint, which ended without an End, or is not there for the next."""

    simulation: str
    group: int
    uid: str


@dataclass(frozen=True)
class Sample:
    """The ranks on a node that have something new, at `now` on its CLOCK_MONOTONIC.

    By simulation and rank: iterations (-1 if the rank counts none), stamp, cpu, useful, mpi and
    memory, as in core.Ranks but with the stamp on the node's clock; and the call of whose rhythm
    the iterations are periods, else -1. `lines` has, by simulation, the `Time =` lines in its log,
    when the last one came, and the residual of the iteration before it, -1 if it has none.
    """

    now: float
    ranks: dict[str, dict[str, list[float]]]
    lines: dict[str, list[float]]


@dataclass(frozen=True)
class Used:
    """What rank groups on a node used whose ranks have no page, or one that tells nothing for long.

    At `now` on the node's CLOCK_MONOTONIC, by simulation and rank group: the CPU seconds of its
    control group since the last Sample of its ranks, and its memory now.
    """

    now: float
    groups: dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Counts:
    """What has kept the ranks of a simulation on a node from their cores; every few seconds.

    By rank group: the limit in millicores, its periods, those of them in which the group was
    stopped, for how many seconds, the seconds of all periods, and those for which some task waited
    for a core, -1 where that is not known; the limit is 0 where there is none. By rank: voluntary
    and involuntary context switches, seconds in the queue for a core, -1 where that is not known,
    and seconds since MPI_Init. They run on so many `cpus`.
    """

    simulation: str
    cpus: int
    groups: dict[str, list[float]]
    ranks: dict[str, list[float]]


@dataclass(frozen=True)
class Weights:
    """The answer to a Check: the weight files of each pod's control group, by pod uid."""

    values: dict[str, dict[str, str]]


@dataclass(frozen=True)
class Seen:
    """The answer to a Look: which folders are not on this node, or are others."""

    missing: list[str]


@dataclass(frozen=True)
class Staged:
    """The answer to a Stage: it is done, or this went wrong."""

    simulation: str
    number: int
    trouble: str


@dataclass(frozen=True)
class Prepared:
    """The case is prepared on the first rank group's node alone; said until a Spread answers it."""

    simulation: str


@dataclass(frozen=True)
class Broker:
    """A pod's Flux broker asks where the first one listens; that one says it, in `address`.

    Asked by `flux_broker` before the pod has an entrypoint, and again until a Met answers it.
    """

    simulation: str
    address: str


@dataclass(frozen=True)
class Ping:
    """An agent asks whether its hub is there; the answer is a Pong."""


# --- From the controller to the nodes ---


@dataclass(frozen=True)
class Run:
    """Start a simulation all of whose pods are there.

    `config` is for the supervisor; `hosts` has the address of its node and its number of ranks for
    each rank group, in order.
    """

    simulation: str
    config: dict[str, Any]
    hosts: list[dict[str, Any]]


@dataclass(frozen=True)
class Checkpoint:
    """Have a simulation that runs stop at a checkpoint; its Result follows once it has."""

    simulation: str


@dataclass(frozen=True)
class Stop:
    """End a simulation, with the supervisor's grace; its Result follows."""

    simulation: str


@dataclass(frozen=True)
class Wait:
    """Change how the ranks wait inside MPI."""

    simulation: str
    mode: str
    yields: int


@dataclass(frozen=True)
class Suspend:
    """Stop all processes of a simulation where they stand, or let them go on."""

    simulation: str
    suspended: bool


@dataclass(frozen=True)
class End:
    """The simulation is over and its result known: entrypoints end what is left, and exit.

    Or, if there is a `next` one, are there for that, unless something is left in their pods.
    """

    simulation: str
    code: int
    next: str = ""


@dataclass(frozen=True)
class Look:
    """Tell which of these folders are not the same on the node, by their marks; see `staging`.

    With a `store` the run's folders are copied: into that folder of the node.
    """

    folders: dict[str, str]
    store: str


@dataclass(frozen=True)
class Stage:
    """Have a folder of the store become as the controller's (`way` "in"), or that as it ("out").

    Copies are listened for on another `port` of the hub's address.
    """

    simulation: str
    number: int
    folder: str
    way: str
    port: int


@dataclass(frozen=True)
class Spread:
    """The prepared case is on all nodes of the simulation: its command may start."""

    simulation: str


@dataclass(frozen=True)
class Met:
    """The answer to a Broker: where the simulation's first broker listens."""

    simulation: str
    address: str


@dataclass(frozen=True)
class Check:
    """Tell the weights of these pods as they are on disk."""

    uids: list[str]


@dataclass(frozen=True)
class Pong:
    """The answer to a Ping, after all that was to be said to what its node had told before."""


# --- From an agent to its entrypoints ---


@dataclass(frozen=True)
class Fence:
    """Have the processes of a simulation stand still while the node is `cut_off`."""

    simulation: str
    cut_off: bool


# --- From pod to pod, by way of agents and hub ---


@dataclass(frozen=True)
class Spawn:
    """Rank group `origin` asks `group` to start one process for its MPI starter."""

    simulation: str
    group: int
    origin: int
    number: int
    command: str
    environment: dict[str, str]
    session: str


@dataclass(frozen=True)
class Spawned:
    """The answer to a Spawn, for `group`: it runs, or it has ended with `code` and `said` this."""

    simulation: str
    group: int
    number: int
    running: bool
    code: int
    said: str


# --- Made by the hub ---


@dataclass(frozen=True)
class Joined:
    """A node's agent has connected."""


@dataclass(frozen=True)
class Gone:
    """The connection of a node's agent has ended."""


Message = Union[
    Hello, Transfer, Pod, Started, Result, Lost, Sample, Used, Counts, Weights, Seen, Staged,
    Prepared, Broker, Ping, Run, Stop, Wait, Suspend, Checkpoint, End, Look, Stage, Spread, Met,
    Check, Pong, Fence, Spawn, Spawned, Joined, Gone,
]  # fmt: skip
Order = Union[Run, Spread, Wait, Suspend, Checkpoint, Stop, End]
"""What the controller tells of a simulation, in the order of the effect."""
KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """A message as bytes."""
    text = json.dumps(encode_tagged(message), separators=(",", ":")).encode()
    if len(text) > LONGEST:
        raise MessageError(f"{type(message).__name__}: {len(text)} bytes are too many")
    return LENGTH.pack(len(text)) + text


class Decoder:
    """Takes the bytes of a connection as they come. `longest` may be raised on the way."""

    def __init__(self, longest: int = LONGEST) -> None:
        self.longest = longest
        self._held = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete with `data`; MessageError if they cannot be any."""
        self._held += data
        found = []
        while len(self._held) >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._held)
            if size > self.longest:
                raise MessageError(f"a message of {size} bytes; at most {self.longest} is right")
            end = LENGTH.size + size
            if len(self._held) < end:
                break
            found.append(_decode(bytes(self._held[LENGTH.size : end])))
            del self._held[:end]
        return found


def _decode(text: bytes) -> Message:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise MessageError("not a message") from None
    message: Message = decode_tagged(KINDS, data)
    return message
