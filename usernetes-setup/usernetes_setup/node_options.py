# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a node is to offer, from what its user asked for: cores, memory, devices, an address.

Input: words of the command line. Output: what the kernel has, checked; BadInput otherwise.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import time

from dovetail.core.errors import BadInput
from dovetail.host import devices as machine

from usernetes_setup.node import components
from usernetes_setup.node_record import Offer

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
YEAR_10000 = 253402300800  # seconds since the epoch; no certificate or token says a later time


def cores(wanted: str) -> tuple[list[int], int]:
    """The cores that may be offered, and how many of them: those asked for, or any so many."""
    usable = sorted(os.sched_getaffinity(0))
    if not wanted:
        return usable, len(usable)
    if re.fullmatch(r"\d+", wanted):
        number = int(wanted) if _is_short(wanted) else 0
        if not 1 <= number <= len(usable):
            raise BadInput(f"--cpus {wanted}: 1 to {len(usable)} cores can be used here")
        return usable, number
    if re.search(r"\d{7}", wanted):  # all in between would be listed, however many
        raise BadInput(f"--cpus {wanted}: only {components.listed(usable)} can be used here")
    try:
        asked = components.numbers(wanted)
    except ValueError:
        raise BadInput(f"--cpus {wanted}: neither a number nor a list such as 0-1,4") from None
    if not asked or not set(asked) <= set(usable):
        raise BadInput(f"--cpus {wanted}: only {components.listed(usable)} can be used here")
    return asked, len(asked)


def memory(wanted: str) -> int:
    """Bytes to offer."""
    most = components.host_memory()
    if not wanted:
        return most // 4 * 3
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(k|M|G|Ki|Mi|Gi|Ti)?", wanted)
    size = float(found[1]) * UNITS[found[2] or ""] if found else 0.0  # or infinity
    if not LEAST <= size <= most:
        raise BadInput(f"--memory {wanted}: a size from 256Mi to {most >> 20}Mi, such as 8Gi")
    return int(size)


def devices(wanted: str) -> dict[str, Offer]:
    """The devices to offer, by resource: those asked for, or the adapters and GPUs of `auto`."""
    found: dict[str, Offer] = {}
    if wanted == "auto":
        for name in machine.KINDS:
            units = [unit for unit in machine.units(name) if not machine.closed(unit)]
            visible = machine.visible_gpus() if name == "gpu" else None
            if visible is not None:  # the others are not ours, in a batch job
                units = [unit for unit in units if unit[0].removeprefix("/dev/nvidia") in visible]
            if units:
                found[machine.resource(name)] = {
                    "units": units,
                    "each": _each(name),
                    "asked": False,
                }
        return found
    for text in wanted.split(",") if wanted != "none" else ():
        name, equals, number = text.partition("=")
        where = f"--devices {wanted}: {name!r}"
        if name not in machine.KINDS and not machine.is_path(name):
            raise BadInput(f"{where} is not rdma, efa or gpu, or the path of a device below /dev")
        if equals and not (_is_short(number) and 1 <= int(number) <= machine.MOST_SHARED):
            raise BadInput(f"{where} is for a number of pods at once, 1 to {machine.MOST_SHARED}")
        if equals and name == "gpu":
            raise BadInput(f"{where} takes no number: each is for one pod at a time")
        units = machine.units(name)
        if not units:
            raise BadInput(f"{where} is not on this machine; `dovetail doctor` says what is")
        if shut := machine.closed([path for unit in units for path in unit]):
            raise BadInput(
                f"{where} is there, and not yours to open; "
                f"an administrator types: chmod 666 {' '.join(dict.fromkeys(shut))}"
            )
        each = int(number) if equals else _each(name)
        if machine.resource(name) in found:
            raise BadInput(f"{where} is there twice")
        found[machine.resource(name)] = {"units": units, "each": each, "asked": True}
    return found


def _is_short(word: str) -> bool:
    """Whether it is a number that Python reads: from some length on it refuses to."""
    return re.fullmatch(r"\d{1,9}", word) is not None


def _each(name: str) -> int:
    """How many pods may have one at once, if nobody says."""
    return machine.MOST_SHARED if name in machine.SHARED else 1


def check_validity(seconds: int) -> None:
    """Refuse an end that has passed, or that Kubernetes cannot read. Raises BadInput."""
    if seconds <= 0:
        raise BadInput(f"--valid {seconds}: more than 0 seconds would be right")
    if time.time() + seconds >= YEAR_10000:
        raise BadInput(f"--valid {seconds}: that would end after the year 9999")


def machine_name() -> str:
    """The first part of this machine's name, as Kubernetes takes it: `gpu_07` is `gpu-07`."""
    first = socket.gethostname().split(".")[0].lower()
    return re.sub("[^a-z0-9]+", "-", first).strip("-") or "node"


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
