# SPDX-License-Identifier: LGPL-3.0-or-later
"""Which rank groups a simulation gets, and which nodes they fit on. Pure.

Inputs: nodes, pods and quotas as the API has them. Outputs: the room on each node, the number of
ranks in each group, a node for each, and a reason in words where there is no room. Invariant: what
is said to fit fits all at once, so a simulation's pods start together or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Decimal
from typing import Any

from dovetail.core.protocol import Node

Object = Mapping[str, Any]

_UNITS = {
    "": Decimal(1), "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12),
    "P": Decimal(10**15), "E": Decimal(10**18), "Ki": Decimal(2**10), "Mi": Decimal(2**20),
    "Gi": Decimal(2**30), "Ti": Decimal(2**40), "Pi": Decimal(2**50), "Ei": Decimal(2**60),
}  # fmt: skip
_QUANTITY = re.compile(r"([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)([numkKMGTPE]i?|)")
_OVER = ("Succeeded", "Failed")


@dataclass(frozen=True)
class Room:
    """What is free on a node: `cpu` in millicores, `memory` in bytes, `pods` more pods."""

    node: str
    cpu: int
    memory: int
    pods: int


def quantity(text: object) -> Decimal:
    """A quantity as the API writes it, in its base unit; ValueError for anything else."""
    found = _QUANTITY.fullmatch(str(text))
    if not found or found[2] not in _UNITS:
        raise ValueError(f"{text!r} is no quantity")
    return Decimal(found[1]) * _UNITS[found[2]]


def millicores(text: object) -> int:
    """A CPU quantity, rounded up as Kubernetes does."""
    return int((quantity(text) * 1000).to_integral_value(ROUND_CEILING))


def usable(node: Object) -> bool:
    """Whether new pods of ours may go to the node: ready, and neither closed nor tainted."""
    spec, status = node.get("spec", {}), node.get("status", {})
    ready = any(
        one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions", [])
    )
    taints = {taint.get("effect") for taint in spec.get("taints", [])}
    return ready and not spec.get("unschedulable") and not taints & {"NoSchedule", "NoExecute"}


def asked(pod: Object) -> tuple[int, int]:
    """CPU (millicores) and memory (bytes) that the scheduler counts for a pod.

    While a pod is being resized that is the greater of what it has and what it shall have.
    """
    spec, status = pod["spec"], pod.get("status", {})
    has = {one["name"]: one for one in status.get("containerStatuses", [])}
    totals = []
    for name in ("cpu", "memory"):

        def of(container: Object, name: str = name) -> Decimal:
            wants = container.get("resources", {}).get("requests", {}).get(name, 0)
            now = has.get(container["name"], {}).get("allocatedResources", {}).get(name, 0)
            return max(quantity(wants), quantity(now))

        steady = sum((of(one) for one in spec["containers"]), Decimal(0))
        first = max((of(one) for one in spec.get("initContainers", [])), default=Decimal(0))
        overhead = quantity(spec.get("overhead", {}).get(name, 0))
        totals.append(max(steady, first) + overhead)
    return millicores(totals[0]), int(totals[1])


def rooms(nodes: Iterable[Object], pods: Iterable[Object]) -> list[Room]:
    """What is free on each usable node, the emptiest first."""
    free = {}
    for node in filter(usable, nodes):
        can = node["status"]["allocatable"]
        free[node["metadata"]["name"]] = [
            millicores(can["cpu"]), int(quantity(can["memory"])), int(quantity(can["pods"]))
        ]  # fmt: skip
    for pod in pods:
        on = free.get(pod["spec"].get("nodeName", ""))
        if on is not None and pod.get("status", {}).get("phase") not in _OVER:
            cpu, memory = asked(pod)
            on[0], on[1], on[2] = on[0] - cpu, on[1] - memory, on[2] - 1
    made = [Room(name, *left) for name, left in free.items()]
    return sorted(made, key=lambda room: (-room.cpu, room.node))


def offered(nodes: Iterable[Object], foreign: Iterable[Object]) -> tuple[Node, ...]:
    """What simulations may share on each node: all but what `foreign` pods ask for."""
    left = rooms(nodes, foreign)
    made = (Node(room.node, max(0, room.cpu), max(0, room.memory)) for room in left)
    return tuple(sorted(made, key=lambda node: node.name))


def groups(
    ranks: int, per_group: int, requests: Sequence[int], memory: int, free: Sequence[Room]
) -> list[int]:
    """How many ranks each group has: as asked, else all of them on as few nodes as hold them.

    Groups hold consecutive ranks. Where no division fits now there is one group.
    """
    if per_group:
        return [min(per_group, ranks - first) for first in range(0, ranks, per_group)]
    for count in range(1, min(ranks, len(free)) + 1):
        sizes = _divide(requests, [max(1, room.cpu) for room in free[:count]])
        if placed(*per_pod(sizes, requests, memory), free)[0]:
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
    cpu: Sequence[int], memory: Sequence[int], free: Sequence[Room]
) -> tuple[dict[int, str], str]:
    """A node for each of these pods, by their order; or why they do not fit all at once."""
    left = list(free)
    nodes: dict[int, str] = {}
    for want, bytes_, pod in sorted(zip(cpu, memory, range(len(cpu))), reverse=True):
        for index, room in enumerate(left):
            if room.cpu >= want and room.memory >= bytes_ and room.pods > 0:
                nodes[pod] = room.node
                left[index] = replace(
                    room, cpu=room.cpu - want, memory=room.memory - bytes_, pods=room.pods - 1
                )
                left.sort(key=lambda room: (-room.cpu, room.node))
                break
        else:
            return {}, _shortage(want, bytes_, left)
    return nodes, ""


def _shortage(cpu: int, memory: int, left: Sequence[Room]) -> str:
    if not left:
        return "no node is ready"
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
    quotas: Iterable[Object], cpu: Sequence[int], memory: Sequence[int], limits: Sequence[int] = ()
) -> str:
    """Which quota a new Job of these pods would exceed, in words; empty for none."""
    want = {
        "requests.cpu": Decimal(sum(cpu)) / 1000, "cpu": Decimal(sum(cpu)) / 1000,
        "requests.memory": Decimal(sum(memory)), "memory": Decimal(sum(memory)),
        "limits.cpu": Decimal(sum(limits)) / 1000, "count/jobs.batch": Decimal(1),
        "pods": Decimal(len(cpu)), "count/pods": Decimal(len(cpu)),
    }  # fmt: skip
    for quota in quotas:
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


def _short(number: Decimal) -> str:
    return f"{float(number):g}"
