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


def suit(pods: Mapping[int, Object], cpu: Sequence[int]) -> bool:
    """Whether the pods, by rank group, can ask for so much CPU where they are.

    In millicores, shape (groups,); each node must have that among these pods.
    """
    spare: dict[str, int] = {}
    for group, pod in pods.items():
        has, _ = pod_status.born_with(pod)
        node = pod_status.node_of(pod)
        spare[node] = spare.get(node, 0) + has - cpu[group]
    return min(spare.values(), default=-1) >= 0


def more_memory(pod: Object, memory: int) -> int:
    """How many bytes more than it does a pod is to ask for, that needs so many."""
    needs, has = max(manifests.LEAST_MEMORY, memory), pod_status.memory_of(pod)
    return 0 if needs <= has <= SLACK * needs else needs - has
