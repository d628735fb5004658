# SPDX-License-Identifier: LGPL-3.0-or-later
"""What is said to the broker module: requests, and news of slices; see dovetail-flux(7). Pure.

Inputs: JSON objects. Outputs: a message for each, checked, or a `MessageError` that says what is
wrong. The news of a slice are told apart by their first key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Union, get_args

from dovetail.core.messages import MessageError, decode

# --- Requests ---


@dataclass(frozen=True)
class SubmitPlan:
    """Queue a plan; its content, or else what the file has when its turn comes."""

    plan: str
    output: str
    cwd: str
    content: str | None = None
    environment: dict[str, str] | None = None

    def __post_init__(self) -> None:
        """None of the three that are needed may be empty."""
        for name in ("plan", "output", "cwd"):
            if not getattr(self, name):
                raise MessageError(f"SubmitPlan: {name} is empty")


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
class Attach:
    """A slice's agent is there, and says what it knows; `kept` and what follows: slice 0 alone."""

    number: int
    rank: int
    host: str = ""
    node: str = ""
    cpus: str = ""
    kubeconfig: str = ""
    kept: dict[str, Any] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    simulations: list[dict[str, Any]] = field(default_factory=list)


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

    simulation: dict[str, Any]


@dataclass(frozen=True)
class RunEnded:
    """The process of a run has ended."""

    run: int
    code: int
    why: str = ""


News = Union[
    NodeReady, StartFailed, SliceEnded, Invited, Forgotten, Answered, SimulationNews, RunEnded
]
_NEWS: dict[str, Any] = {fields(kind)[0].name: kind for kind in get_args(News)}


def news(payload: Mapping[str, Any]) -> tuple[int, News]:
    """The slice that has something to say, and what."""
    number = payload.get("number")
    if not isinstance(number, int) or isinstance(number, bool):
        raise MessageError("news: number is not a whole number")
    for name, kind in _NEWS.items():
        if name in payload:
            found: News = decode(kind, {k: v for k, v in payload.items() if k != "number"})
            return number, found
    raise MessageError(f"news: none of {', '.join(_NEWS)} is there")
