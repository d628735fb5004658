# SPDX-License-Identifier: LGPL-3.0-or-later
"""One launch of a simulation on Kubernetes, as the executor keeps it (steps 4 to 7).

Inputs: the simulation's pods as they were seen, samples of its ranks from the nodes. Outputs:
`core.Ranks` on the run's clock, and what is wrong with a pod, in words. No I/O.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail import core, manifests
from dovetail.placement import asked

Object = dict[str, Any]

_KEY = 40

# Reasons for which a container that waits will wait for ever.
_HOPELESS = (
    "ErrImageNeverPull", "ErrImagePull", "ImagePullBackOff", "InvalidImageName",
    "CreateContainerConfigError", "CreateContainerError", "RunContainerError",
)  # fmt: skip


@dataclass
class Result:
    """How a simulation ended. `trouble` is what to know besides: an incomplete log, for one."""

    code: int
    reason: str = ""
    trouble: str = ""


@dataclass
class Launched:
    """A simulation from its launch to its Finished.

    `phase` is waiting (for room), creating, gathering (until all pods are connected), running,
    or leaving (until the last pod has gone). `cpu` is what each group shall ask for, millicores;
    `sizes` how many ranks it has; `pods` are by group. `deadline` ends the phase, 0 for none.
    """

    spec: core.Spec
    share: core.Share
    key: str
    phase: str = "waiting"
    sizes: list[int] = field(default_factory=list)
    cpu: list[int] = field(default_factory=list)
    pods: dict[int, Object] = field(default_factory=dict)
    connected: dict[int, str] = field(default_factory=dict)
    started: bool = False
    stopped: str = ""
    result: Result | None = None
    again: bool = False
    retry_at: float = 0.0
    deadline: float = 0.0
    why: str = ""
    failures: int = 0
    waiting_since: float = 0.0
    deleted: bool = False
    asking: bool = False
    ranks: dict[int, list[float]] = field(default_factory=dict)
    lines: tuple[int, float] = (0, 0.0)
    sample: core.Ranks | None = None

    def take(
        self, ranks: Mapping[str, Sequence[float]], lines: Sequence[float] | None, offset: float
    ) -> None:
        """A node's sample of its ranks; `offset` maps its clock onto the run's."""
        if lines:
            self.lines = int(lines[0]), max(0.0, lines[1] + offset)
        for rank, values in ranks.items():
            if 0 <= int(rank) < self.spec.ranks and len(values) == 6:
                self.ranks[int(rank)] = [values[0], max(0.0, values[1] + offset), *values[2:]]

    def sampled(self) -> core.Ranks | None:
        """The ranks, if all have published and anything is new."""
        if len(self.ranks) < self.spec.ranks:
            return None
        rows = [self.ranks[rank] for rank in range(self.spec.ranks)]
        counts = tuple(int(row[0]) for row in rows)
        stamps = tuple(row[1] for row in rows)
        if min(counts) < 0:  # only the log counts; a line begins an iteration and ends another
            count, stamp = self.lines
            over = self.result is not None and self.result.code == 0
            counts = (count if over else max(0, count - 1),) * len(rows)
            stamps = (stamp,) * len(rows)
        found = core.Ranks(
            counts,
            stamps,
            tuple(row[2] for row in rows),
            tuple(row[3] for row in rows),
            tuple(row[4] for row in rows),
            tuple(int(row[5]) for row in rows),
        )
        if found == self.sample:
            return None
        self.sample = found
        return found


class Clocks:
    """The nodes' clocks (CLOCK_MONOTONIC) against the run's."""

    def __init__(self) -> None:
        self._offsets: dict[str, float] = {}

    def offset(self, node: str, there: float, here: float) -> float:
        """What to add to the node's time, given one more message: sent `there`, heard `here`.

        The smallest difference ever seen belongs to the message that took least time.
        """
        self._offsets[node] = min(here - there, self._offsets.get(node, float("inf")))
        return self._offsets[node]


def new_key(name: str, again: bool = False) -> str:
    """What a launch is called on the nodes: the simulation, and a word if it is not the first.

    At most 40 characters, since names of sockets are short.
    """
    if not again and len(name) <= _KEY:
        return name
    return f"{name[: _KEY - 7].rstrip('-')}.{secrets.token_hex(3)}"


def group_of(pod: Object) -> int:
    """The completion index of a pod."""
    return int(pod["metadata"]["labels"].get(manifests.INDEX, "-1"))


def node_of(pod: Object) -> str:
    """The node that a pod is on; empty if it has none yet."""
    return str(pod["spec"].get("nodeName", ""))


def born_with(pod: Object) -> int:
    """The CPU request in a pod's specification, millicores."""
    return asked({"spec": pod["spec"]})[0]


def over(pod: Object) -> bool:
    """Whether a pod's containers have ended."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def ending(pod: Object) -> bool:
    """Whether a pod has ended or is about to."""
    return over(pod) or bool(pod["metadata"].get("deletionTimestamp"))


def hopeless(pod: Object) -> str:
    """Why a pod will never start, in words; empty if it may."""
    for one in pod.get("status", {}).get("containerStatuses", []):
        waits = one.get("state", {}).get("waiting") or {}
        if waits.get("reason") in _HOPELESS:
            image = pod["spec"]["containers"][0]["image"]
            said = waits.get("message", "")
            if "Image" in waits["reason"]:
                return f"image {image} is not on node {node_of(pod)}: {waits['reason']}"
            return f"pod {pod['metadata']['name']}: {waits['reason']}: {said}"
    return ""


def unplaced(pod: Object) -> str:
    """Why a pod is on no node, in the scheduler's words; empty if it is on one."""
    for one in pod.get("status", {}).get("conditions", []):
        if one["type"] == "PodScheduled" and one["status"] == "False":
            return str(one.get("message", one.get("reason", "")))
    return "" if node_of(pod) else "not scheduled yet"


def ended_by(pod: Object) -> str:
    """What ended a pod, in words."""
    status = pod.get("status", {})
    said = status.get("message") or status.get("reason")
    for one in status.get("containerStatuses", []):
        end = one.get("state", {}).get("terminated") or {}
        if end:
            last = str(end.get("message", "")).strip().splitlines()
            words = f"exit code {end.get('exitCode')}, {end.get('reason', '')}"
            said = said or words + (f": {last[-1]}" if last else "")
    for one in status.get("conditions", []):
        if one["type"] == "DisruptionTarget" and one["status"] == "True":
            return f"{one.get('reason')}: {one.get('message', '')}"
    return str(said or "by somebody else")
