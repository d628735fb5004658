# SPDX-License-Identifier: LGPL-3.0-or-later
"""One launch of a simulation on Kubernetes, as the executor keeps it.

Inputs: the simulation's pods as they were seen, samples of its ranks from the nodes. Outputs:
`protocol.Ranks` on the run's clock, and what is wrong with a pod, in words. No I/O.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail.core import protocol
from dovetail.executors.kubernetes import manifests
from dovetail.executors.kubernetes.placement import asked, millicores
from dovetail.executors.local.job import Result
from dovetail.mpi import sampling

Object = dict[str, Any]

LEAST_LIMIT = 100
"""Millicores; with less a pod would take minutes to start, and to end."""
_KEY = 40

# Reasons for which a container that waits will wait for ever.
_HOPELESS = (
    "ErrImageNeverPull", "ErrImagePull", "ImagePullBackOff", "InvalidImageName",
    "CreateContainerConfigError", "CreateContainerError", "RunContainerError",
)  # fmt: skip
_NOT_YET = "have not yet been read"  # said by a node that has just started, which tries again


@dataclass
class Launched:
    """A simulation from its launch to its Finished.

    `phase` is waiting (for room), creating, gathering (until all pods are connected), running,
    or leaving (until the last pod has gone). `cpu` is what each group shall ask for, millicores;
    `sizes` how many ranks it has; `pods` are by group. `deadline` ends the phase, 0 for none.
    `doubted` is a failure that the loss of a node or a pod may explain, until that is known;
    `checked` whether its pods were asked for since.
    """

    spec: protocol.Spec
    share: protocol.Share
    key: str
    phase: str = "waiting"
    sizes: list[int] = field(default_factory=list)
    cpu: list[int] = field(default_factory=list)
    pods: dict[int, Object] = field(default_factory=dict)
    connected: dict[int, str] = field(default_factory=dict)
    started: bool = False
    stopped: str = ""
    result: Result | None = None
    doubted: Result | None = None
    checked: bool = False
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
    sample: protocol.Ranks | None = None

    def hosts(self) -> list[Object]:
        """The address and the size of each rank group, once all are there; until then empty.

        Pods on their nodes' network have the same address where they share a node, and there one
        MPI daemon. A pod may call before its node has told the API its address.
        """
        found = [
            {"address": self.pods[group]["status"]["podIP"], "ranks": size}
            for group, size in enumerate(self.sizes)
            if group in self.connected and self.pods.get(group, {}).get("status", {}).get("podIP")
        ]
        return found if len(found) == len(self.sizes) else []

    def limits(self, share: protocol.Share) -> list[int]:
        """The CPU limit of each rank group with this share, millicores; 0 for none.

        Never below the request, which is at most the sum of what the ranks are given.
        """
        found, first = [], 0
        for size in self.sizes:
            given = sum(share.requests[first : first + size])
            limit = max(LEAST_LIMIT, math.ceil(self.spec.limit * given))
            found.append(limit if self.spec.limit else 0)
            first += size
        return found

    def take(
        self, ranks: Mapping[str, Sequence[float]], lines: Sequence[float] | None, offset: float
    ) -> None:
        """A node's sample of its ranks; `offset` maps its clock onto the run's."""
        if lines:
            self.lines = int(lines[0]), max(0.0, lines[1] + offset)
        for rank, values in ranks.items():
            if 0 <= int(rank) < self.spec.ranks and len(values) == 6:
                self.ranks[int(rank)] = [values[0], max(0.0, values[1] + offset), *values[2:]]

    def sampled(self) -> protocol.Ranks | None:
        """The ranks, if all have published and anything is new."""
        if len(self.ranks) < self.spec.ranks:
            return None
        rows = [self.ranks[rank] for rank in range(self.spec.ranks)]
        end = self.result or self.doubted
        found = sampling.of_values(rows, self.lines, end is not None and end.code == 0)
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


def born_with(pod: Object) -> tuple[int, int]:
    """The CPU request and limit in a pod's specification, millicores; 0 for no limit."""
    limit = pod["spec"]["containers"][0].get("resources", {}).get("limits", {}).get("cpu", "0")
    return asked({"spec": pod["spec"]})[0], millicores(limit)


def over(pod: Object) -> bool:
    """Whether a pod's containers have ended."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def deleted(pod: Object) -> bool:
    """Whether somebody has deleted a pod; it may still be there."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def ending(pod: Object) -> bool:
    """Whether a pod has ended or is about to."""
    return over(pod) or deleted(pod)


def hopeless(pod: Object) -> str:
    """Why a pod will never start, in words; empty if it may."""
    for one in _containers(pod):
        waits = one.get("state", {}).get("waiting") or {}
        said = waits.get("message", "")
        if waits.get("reason") in _HOPELESS and _NOT_YET not in said:
            image = pod["spec"]["containers"][0]["image"]
            if "Image" in waits["reason"]:
                return f"image {image} is not on node {node_of(pod)}: {waits['reason']}"
            return f"pod {pod['metadata']['name']}: {waits['reason']}: {said}"
    return ""


def _containers(pod: Object) -> list[Object]:
    """The states of its containers, without those of preparation that ended well."""
    status = pod.get("status", {})
    first = [
        one for one in status.get("initContainerStatuses", [])
        if not one.get("state", {}).get("terminated") or one["state"]["terminated"].get("exitCode")
    ]  # fmt: skip
    return [*first, *status.get("containerStatuses", [])]


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
    for one in _containers(pod):
        end = one.get("state", {}).get("terminated") or {}
        if end:
            last = str(end.get("message", "")).strip().splitlines()
            words = f"exit code {end.get('exitCode')}, {end.get('reason', '')}"
            said = said or words + (f": {last[-1]}" if last else "")
    for one in status.get("conditions", []):
        if one["type"] == "DisruptionTarget" and one["status"] == "True":
            return f"{one.get('reason')}: {one.get('message', '')}"
    return str(said or "by somebody else")
