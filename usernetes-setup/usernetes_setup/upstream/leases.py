# SPDX-License-Identifier: LGPL-3.0-or-later
"""Ports and subnets that a node of upstream Usernetes has to itself on this machine.

Input: what is wanted, where the cluster fixed it already. Output: ports and a subnet, with leases
that end with their last holder. Invariant: two nodes that start at the same moment, whoever their
users are, do not get the same.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from pathlib import Path

from usernetes_setup.node import namespaces
from usernetes_setup.upstream.record import PORTS, Record

BLOCKS = range(100, 128)  # of 10.0.0.0/8; upstream has 10.100.0.0/16
SUBNETS = range(1, 255)
"""Nodes of a cluster differ in the third number: the control node has the first."""


def take(record: Record) -> list[socket.socket]:
    """Lease the node's ports and its subnet, and note them. Raises OSError."""
    held = []
    for name in PORTS:
        record.ports[name], lease = namespaces.lease_port(wanted=record.ports.get(name, 0))
        held.append(lease)
    record.subnet, lease = _subnet(int(record.subnet or SUBNETS[0]))
    return [*held, lease]


def _subnet(number: int) -> tuple[str, socket.socket]:
    """A subnet with this number that is nobody's: no lease, and no route of this machine's."""
    routed = [*routes(Path("/proc/net/route").read_text())]
    for block in BLOCKS:
        subnet = ipaddress.IPv4Network(f"10.{block}.{number}.0/24")
        if any(subnet.overlaps(other) for other in routed):
            continue
        if lease := namespaces.lease(f"subnet-{subnet.network_address}"):
            return str(subnet), lease
    raise OSError(f"no subnet 10.{BLOCKS[0]} to {BLOCKS[-1]}.{number}.0/24 is free on this machine")


def routes(table: str) -> Iterable[ipaddress.IPv4Network]:
    """The networks in the kernel's table, but for the way to all others."""
    for line in table.splitlines()[1:]:
        fields = line.split()
        address, mask = (int.from_bytes(bytes.fromhex(fields[at])[::-1], "big") for at in (1, 7))
        if mask:
            yield ipaddress.IPv4Network((address, str(ipaddress.IPv4Address(mask))))
