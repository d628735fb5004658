# SPDX-License-Identifier: LGPL-3.0-or-later
"""Which rank groups a simulation gets, and which nodes they fit on. Pure.

Inputs: nodes, pods and quotas as the API has them. Outputs: the room on each node, the number of
ranks in each group, a node for each, and a reason in words where there is no room. Invariant: what
is said to fit fits all at once, so a simulation's pods start together or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import ROUND_CEILING, Decimal
from typing import Any, Callable

from dovetail.core.protocol import Node
from dovetail.executors.kubernetes.devices import NONE

Object = Mapping[str, Any]

_UNITS = {
    "": Decimal(1), "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12),
    "P": Decimal(10**15), "E": Decimal(10**18), "Ki": Decimal(2**10), "Mi": Decimal(2**20),
    "Gi": Decimal(2**30), "Ti": Decimal(2**40), "Pi": Decimal(2**50), "Ei": Decimal(2**60),
}  # fmt: skip
_QUANTITY = re.compile(r"([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)([numkKMGTPE]i?|)")
_OVER = ("Succeeded", "Failed")
_SCOPES = {"NotTerminating": "", "NotBestEffort": "", "PriorityClass": "dovetail-simulation"}
"""Those of quotas that pods of simulations are in, with what they have there."""


@dataclass(frozen=True)
class Room:
    """What is free on a node: `cpu` in millicores, `memory` in bytes, `pods` more pods.

    `devices` are how many of each extended resource.
    """

    node: str
    cpu: int
    memory: int
    pods: int
    devices: Mapping[str, int] = field(default_factory=dict)

    def lacks(self, devices: Mapping[str, int]) -> str:
        """The first of these resources of which too few are free; empty for none."""
        found = (name for name, want in devices.items() if self.devices.get(name, 0) < want)
        return next(found, "")

    def without(self, cpu: int, memory: int, devices: Mapping[str, int]) -> Room:
        """What is left beside one more pod."""
        left = {name: free - devices.get(name, 0) for name, free in self.devices.items()}
        return replace(
            self, cpu=self.cpu - cpu, memory=self.memory - memory, pods=self.pods - 1, devices=left
        )


def quantity(text: object) -> Decimal:
    """A quantity as the API writes it, in its base unit; ValueError for anything else."""
    found = _QUANTITY.fullmatch(str(text))
    if not found or found[2] not in _UNITS:
        raise ValueError(f"{text!r} is no quantity")
    return Decimal(found[1]) * _UNITS[found[2]]


def millicores(text: object) -> int:
    """A CPU quantity, rounded up as Kubernetes does."""
    return int((quantity(text) * 1000).to_integral_value(ROUND_CEILING))


def ready(node: Object) -> bool:
    """Whether the node is well, by its own word."""
    conditions = node.get("status", {}).get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def usable(node: Object) -> bool:
    """Whether new pods of ours may go to the node: ready, and neither closed nor tainted."""
    spec = node.get("spec", {})
    taints = {taint.get("effect") for taint in spec.get("taints", [])}
    closed = spec.get("unschedulable") or taints & {"NoSchedule", "NoExecute"}
    return ready(node) and not closed


def asked(pod: Object) -> tuple[int, int]:
    """CPU (millicores) and memory (bytes) that the scheduler counts for a pod.

    While a pod is being resized that is the greater of what it has and what it shall have; where it
    asks for something as a whole, that counts.
    """
    spec, status = pod["spec"], pod.get("status", {})
    told = [*status.get("containerStatuses", []), *status.get("initContainerStatuses", [])]
    has = {one["name"]: one for one in told}
    whole = spec.get("resources", {}).get("requests", {})

    def total(name: str) -> Decimal:
        def of(container: Object) -> Decimal:
            wants = container.get("resources", {}).get("requests", {}).get(name, 0)
            now = has.get(container["name"], {}).get("allocatedResources", {}).get(name, 0)
            return max(quantity(wants), quantity(now))

        overhead = quantity(spec.get("overhead", {}).get(name, 0))
        needs = quantity(whole[name]) if name in whole else _at_once(spec, of)
        return needs + overhead

    return millicores(total("cpu")), int(total("memory"))


def _at_once(spec: Object, of: Callable[[Object], Decimal]) -> Decimal:
    """What a pod's containers ask for: those that run beside each other, or before, one by one.

    A sidecar starts before them and stays.
    """
    beside = before = Decimal(0)
    for one in spec.get("initContainers", []):
        before = max(before, beside + of(one))
        if one.get("restartPolicy") == "Always":
            beside += of(one)
    return max(before, beside + sum((of(one) for one in spec["containers"]), Decimal(0)))


def asked_devices(pod: Object) -> dict[str, int]:
    """The extended resources that a pod has or waits for."""
    spec = pod["spec"]
    containers = [*spec["containers"], *spec.get("initContainers", [])]
    names = {n for one in containers for n in one.get("resources", {}).get("requests", {})}

    def number(name: str) -> int:
        def of(container: Object) -> Decimal:
            return quantity(container.get("resources", {}).get("requests", {}).get(name, 0))

        return int(_at_once(spec, of))

    return {name: number(name) for name in names if "/" in name}


def extended(node: Object) -> dict[str, int]:
    """The extended resources of a node, which are those with a domain in their name."""
    can = node["status"].get("allocatable", {})
    return {name: int(quantity(number)) for name, number in can.items() if "/" in name}


def resources(nodes: Iterable[Object]) -> dict[str, int]:
    """How much of each extended resource all usable nodes have, whoever has it now."""
    found: dict[str, int] = {}
    for node in filter(usable, nodes):
        for name, number in extended(node).items():
            found[name] = found.get(name, 0) + number
    return found


def rooms(nodes: Iterable[Object], pods: Iterable[Object]) -> list[Room]:
    """What is free on each usable node, the emptiest first."""
    free: dict[str, Room] = {}
    for node in filter(usable, nodes):
        can, name = node["status"]["allocatable"], node["metadata"]["name"]
        memory, most = int(quantity(can["memory"])), int(quantity(can["pods"]))
        free[name] = Room(name, millicores(can["cpu"]), memory, most, extended(node))
    for pod in pods:
        on = pod["spec"].get("nodeName", "")
        if on in free and pod.get("status", {}).get("phase") not in _OVER:
            free[on] = free[on].without(*asked(pod), asked_devices(pod))
    return sorted(free.values(), key=lambda room: (-room.cpu, room.node))


def offered(nodes: Iterable[Object], foreign: Iterable[Object]) -> tuple[Node, ...]:
    """What simulations may share on each node: all but what `foreign` pods ask for."""
    left = rooms(nodes, foreign)
    made = (Node(room.node, max(0, room.cpu), max(0, room.memory)) for room in left)
    return tuple(sorted(made, key=lambda node: node.name))


def groups(
    ranks: int,
    per_group: int,
    requests: Sequence[int],
    memory: int,
    free: Sequence[Room],
    devices: Mapping[str, int] = NONE,
) -> list[int]:
    """How many ranks each group has: as asked, else all of them on as few nodes as hold them.

    Groups hold consecutive ranks. Where no division fits now there is one group.
    """
    if per_group:
        return [min(per_group, ranks - first) for first in range(0, ranks, per_group)]
    free = [room for room in free if not room.lacks(devices)]
    for count in range(1, min(ranks, len(free)) + 1):
        sizes = _divide(requests, [max(1, room.cpu) for room in free[:count]])
        if placed(*per_pod(sizes, requests, memory), free, devices)[0]:
            return sizes
    return [ranks]


def _divide(requests: Sequence[int], parts: Sequence[int]) -> list[int]:
    """Consecutive ranks cut so that each part's requests are close to its share of the whole."""
    whole, total = sum(requests), sum(parts)
    sizes, done, rank, target = [], 0, 0, 0
    for index, part in enumerate(parts):
        target += part
        first, spare = rank, len(parts) - index - 1
        while rank < len(requests) - spare and (
            rank == first or (done + requests[rank] / 2) * total <= whole * target
        ):
            done += requests[rank]
            rank += 1
        sizes.append(rank - first)
    sizes[-1] += len(requests) - rank
    return sizes


def per_pod(
    sizes: Sequence[int], requests: Sequence[int], memory: int
) -> tuple[list[int], list[int]]:
    """CPU and memory of each group; memory goes by the number of ranks."""
    cpu, first = [], 0
    for size in sizes:
        cpu.append(sum(requests[first : first + size]))
        first += size
    # One template serves all pods of a Job, so all ask for what the largest needs.
    largest = -(-memory * max(sizes) // len(requests))
    return cpu, [largest] * len(sizes)


def placed(
    cpu: Sequence[int],
    memory: Sequence[int],
    free: Sequence[Room],
    devices: Mapping[str, int] = NONE,
) -> tuple[dict[int, str], str]:
    """A node for each of these pods, by their order; or why they do not fit all at once.

    Each of them asks for `devices`.
    """
    left = list(free)
    nodes: dict[int, str] = {}
    for want, bytes_, pod in sorted(zip(cpu, memory, range(len(cpu))), reverse=True):
        for index, room in enumerate(left):
            enough = room.cpu >= want and room.memory >= bytes_ and room.pods > 0
            if enough and not room.lacks(devices):
                nodes[pod] = room.node
                left[index] = room.without(want, bytes_, devices)
                left.sort(key=lambda room: (-room.cpu, room.node))
                break
        else:
            return {}, _shortage(want, bytes_, devices, left)
    return nodes, ""


def _shortage(cpu: int, memory: int, devices: Mapping[str, int], left: Sequence[Room]) -> str:
    if not left:
        return "no node is ready"
    for name, want in devices.items():
        most = max(0, *(room.devices.get(name, 0) for room in left))
        if most < want:
            return f"a rank group asks for {want} {name}, and at most {most} are free on a node"
    left = [room for room in left if not room.lacks(devices)] or left
    best = max(left, key=lambda room: (room.pods > 0, room.cpu))
    if best.cpu < cpu:
        most = max(0, best.cpu)
        return f"a rank group asks for {cpu}m of CPU, and at most {most}m are free on a node"
    if best.pods <= 0:
        return "no node takes another pod"
    largest = max(max(0, room.memory) for room in left)
    return (
        f"a rank group asks for {memory >> 20} MiB of memory, and at most {largest >> 20} MiB "
        "are free on a node"
    )


def over_quota(
    quotas: Iterable[Object],
    cpu: Sequence[int],
    memory: Sequence[int],
    limits: Sequence[int] = (),
    devices: Mapping[str, int] = NONE,
) -> str:
    """Which quota a new Job of these pods would exceed, in words; empty for none."""
    want = {
        "requests.cpu": Decimal(sum(cpu)) / 1000, "cpu": Decimal(sum(cpu)) / 1000,
        "requests.memory": Decimal(sum(memory)), "memory": Decimal(sum(memory)),
        "limits.cpu": Decimal(sum(limits)) / 1000, "count/jobs.batch": Decimal(1),
        "pods": Decimal(len(cpu)), "count/pods": Decimal(len(cpu)),
        **{f"requests.{name}": Decimal(len(cpu) * each) for name, each in devices.items()},
    }  # fmt: skip
    for quota in filter(_is_for_simulations, quotas):
        status = quota.get("status", {})
        for name, hard in status.get("hard", {}).items():
            left = quantity(hard) - quantity(status.get("used", {}).get(name, 0))
            if want.get(name, Decimal(0)) > left:
                title, whole = quota["metadata"]["name"], _short(quantity(hard))
                return (
                    f"quota {title} has {_short(left)} of {whole} {name} left, "
                    f"and {_short(want[name])} are needed"
                )
    return ""


def _is_for_simulations(quota: Object) -> bool:
    """Whether a quota counts their pods: by its scopes it may be for others alone."""
    spec = quota.get("spec", {})
    scopes = [{"scopeName": name, "operator": "Exists"} for name in spec.get("scopes", [])]
    for one in (*scopes, *spec.get("scopeSelector", {}).get("matchExpressions", [])):
        operator, name = one["operator"], one["scopeName"]
        inside = name in _SCOPES
        if operator in ("In", "NotIn"):
            inside = inside and _SCOPES[name] in one.get("values", [])
        if inside != (operator in ("In", "Exists")):
            return False
    return True


def _short(number: Decimal) -> str:
    return f"{float(number):g}"
