# SPDX-License-Identifier: LGPL-3.0-or-later
"""Whether the pods that one simulation has left are what another wants. Pure.

Inputs: both simulations, the pods as the API has them, what they shall ask for. What can be changed
in a pod that runs may differ: its requests, and its limit of CPU, as far as its node has room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.core.protocol import Spec
from dovetail.executors.kubernetes import manifests, pod_status
from dovetail.executors.kubernetes.placement import Room

Object = dict[str, Any]

_MADE_BY = ("ranks", "ranks_per_pod", "image", "pull_policy", "pull_secret", "devices")
SLACK = 2
"""Pods may ask for so many times the memory that is needed: a change costs their node time."""


def alike(one: Spec, other: Spec) -> bool:
    """Whether the pods of one are made as those of the other.

    Whoever wants an image to be pulled for each pod wants new pods.
    """
    same = all(getattr(one, name) == getattr(other, name) for name in _MADE_BY)
    return same and one.pull_policy != "Always"


def more(pods: Mapping[int, Object], cpu: Sequence[int], memory: int) -> list[Room]:
    """What the pods, by rank group, are to ask for besides, on each node where they are.

    `cpu` is in millicores, shape (groups,); `memory` is what each of them needs, bytes.
    """
    found: dict[str, Room] = {}
    for group, pod in pods.items():
        node, (has, _) = pod_status.node_of(pod), pod_status.born_with(pod)
        so_far = found.get(node, Room(node, 0, 0, 0))
        grown = so_far.memory + more_memory(pod, memory)
        found[node] = Room(node, so_far.cpu + cpu[group] - has, grown, 0)
    return [*found.values()]


def more_memory(pod: Object, memory: int) -> int:
    """How many bytes more than it does a pod is to ask for, that needs so many."""
    needs, has = max(manifests.LEAST_MEMORY, memory), pod_status.memory_of(pod)
    return 0 if needs <= has <= SLACK * needs else needs - has
