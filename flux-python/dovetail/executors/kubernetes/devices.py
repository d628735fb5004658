# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a plan's devices are called on a cluster. Pure.

Input: a name from the plan, and the extended resources that nodes offer. Output: the resource that
pods ask for. `dovetail kube` calls devices its own way (`dovetail.host.devices`), other clusters as
their administrator's device plugin does, and those of vendors are known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dovetail.core.protocol import Spec
from dovetail.host import devices

_ELSEWHERE = {
    "gpu": ("nvidia.com/gpu", "amd.com/gpu"),
    "efa": ("vpc.amazonaws.com/efa",),
    "rdma": ("rdma/",),
}
"""How the resources begin that count such a device elsewhere."""
NONE: Mapping[str, int] = MappingProxyType({})


def resource(name: str, offered: Mapping[str, int]) -> str:
    """The resource of a device: of those that it may be, the one of which there is most."""
    if "/" in name and not name.startswith("/"):
        return name
    ours, others = devices.resource(name), _ELSEWHERE.get(name, ())
    there = [one for one in offered if one == ours or one.startswith(others)] if others else []
    return max(there, key=lambda one: (offered[one], one), default=ours)


def asked(spec: Spec, offered: Mapping[str, int]) -> dict[str, int]:
    """What each pod of a simulation asks for, by resource."""
    found: dict[str, int] = {}
    for name, number in spec.devices:
        of = resource(name, offered)
        found[of] = found.get(of, 0) + number
    return found
