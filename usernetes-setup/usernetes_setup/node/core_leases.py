# SPDX-License-Identifier: LGPL-3.0-or-later
"""Which cores are given to whom on this host, whoever the user is.

Input: cores that may be used, and how many are wanted. Output: the least used of them, each with
a lease that ends with its last holder. Invariant: two that choose at the same moment do not take
the same core while another is used less. A core may be leased more than once: each lease has a
number, the first that is free.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection
from pathlib import Path

from usernetes_setup.node import namespaces

_NAME = re.compile(r"@dovetail-core-(\d+)\.(\d+)$")


def leased() -> dict[int, set[int]]:
    """The numbers of the leases of each core on this host."""
    found: dict[int, set[int]] = {}
    for line in Path("/proc/net/unix").read_text(errors="replace").splitlines():
        if name := _NAME.search(line):
            found.setdefault(int(name[1]), set()).add(int(name[2]))
    return found


def take(usable: Collection[int], number: int) -> tuple[list[int], list[socket.socket]]:
    """Lease that many cores: those least leased."""
    taken: dict[int, socket.socket] = {}
    while len(taken) < number:
        held = leased()
        free = [core for core in usable if core not in taken]
        core = min(free, key=lambda one: (len(held.get(one, ())), one))
        slot = next(k for k in range(len(held.get(core, ())) + 1) if k not in held.get(core, ()))
        if lease := namespaces.lease(f"core-{core}.{slot}"):  # else another was quicker: look again
            taken[core] = lease
    return sorted(taken), list(taken.values())
