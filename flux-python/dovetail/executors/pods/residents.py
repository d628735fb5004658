# SPDX-License-Identifier: LGPL-3.0-or-later
"""What an agent knows of the simulations and pods on its node.

Inputs and outputs: values, and the locks that entries hold. Invariant: whether an entry lives is
told by its lock alone; that it is not connected says nothing.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from dataclasses import dataclass, field

from dovetail.executors.pods import messages
from dovetail.executors.pods.samples import Reader
from dovetail.mpi.control_page import Control


@dataclass
class Place:
    """One rank group on this node; `writer` is None while its entry is not connected."""

    uid: str
    writer: asyncio.StreamWriter | None = None


@dataclass
class Simulation:
    """One simulation, as far as it is on this node."""

    name: str
    directory: str
    reader: Reader
    places: dict[int, Place] = field(default_factory=dict)
    told: dict[type, messages.Message] = field(default_factory=dict)  # what the hub must hear
    lost: dict[int, messages.Lost] = field(default_factory=dict)
    spawns: dict[tuple[type, int], messages.Message] = field(default_factory=dict)
    control: Control | None = None
    end: messages.End | None = None


def dead(file: str) -> bool:
    """Whether the entry that locked this file has ended."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return True  # it has removed it
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
