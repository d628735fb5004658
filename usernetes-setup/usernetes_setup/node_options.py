# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a node is to offer, from what its user asked for: cores, memory, an address.

Input: words of the command line. Output: what the kernel has, checked; BadInput otherwise.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket

from dovetail.core.errors import BadInput

from usernetes_setup.node import components

UNITS = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
LEAST = 256 << 20  # bytes of memory below which no node is of use


def cores(wanted: str) -> tuple[list[int], int]:
    """The cores that may be offered, and how many of them: those asked for, or any so many."""
    usable = sorted(os.sched_getaffinity(0))
    if not wanted:
        return usable, len(usable)
    if wanted.isdigit():
        number = int(wanted)
        if not 1 <= number <= len(usable):
            raise BadInput(f"--cpus {wanted}: 1 to {len(usable)} cores can be used here")
        return usable, number
    try:
        asked = components.numbers(wanted)
    except ValueError:
        raise BadInput(f"--cpus {wanted}: neither a number nor a list such as 0-1,4") from None
    if not asked or not set(asked) <= set(usable):
        raise BadInput(f"--cpus {wanted}: only {listed(usable)} can be used here")
    return asked, len(asked)


def listed(numbers: list[int]) -> str:
    """Cores as the kernel writes them, without ranges."""
    return ",".join(map(str, numbers))


def memory(wanted: str) -> int:
    """Bytes to offer."""
    most = components.host_memory()
    if not wanted:
        return most // 4 * 3
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(k|M|G|Ki|Mi|Gi|Ti)?", wanted)
    size = int(float(found[1]) * UNITS[found[2] or ""]) if found else 0
    if not LEAST <= size <= most:
        raise BadInput(f"--memory {wanted}: a size from 256Mi to {most >> 20}Mi, such as 8Gi")
    return size


def own_address(wanted: str) -> str:
    """The address to listen on, "" for a loopback one of our own."""
    if not wanted:
        return ""
    try:
        address = ipaddress.IPv4Address(wanted)
        with socket.socket() as probe:
            probe.bind((str(address), 0))
    except (ValueError, OSError):
        raise BadInput(f"--address {wanted}: not an IPv4 address of this machine") from None
    if address.is_unspecified or address.is_loopback:
        raise BadInput(f"--address {wanted}: leave it out for loopback; any other must be real")
    return str(address)
