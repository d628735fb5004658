# SPDX-License-Identifier: LGPL-3.0-or-later
"""Writes the control page that the ranks of a simulation read: how they wait.

In: a directory and a `WaitPolicy`. Out: the file `control` in it, laid out as in pmpi/page.h and
dovetail-page(5).

Invariant: the sequence number changes last, so that a rank sees a whole policy.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from dovetail.core.errors import BadInput
from dovetail.core.protocol import WaitPolicy
from dovetail.mpi.page import PageError

MAGIC = b"DVTCTRL\0"
VERSION = 1
LAYOUT = struct.Struct("=8s2I5I28x")
SEQ_AT = 16
MODES = ("off", "yield", "doorbell")


class Control:
    """The control page of one simulation: how its ranks wait inside MPI."""

    def __init__(self, directory: Path) -> None:
        """Open the control page of a directory; raises PageError if there is no right one."""
        path = directory / "control"
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                self._map = mmap.mmap(fd, LAYOUT.size)
            finally:
                os.close(fd)
        except (OSError, ValueError) as error:
            raise PageError(f"{path}: {error}") from error
        magic, version, size, self._seq, *_ = LAYOUT.unpack_from(self._map)
        if (magic, version, size) != (MAGIC, VERSION, LAYOUT.size):
            self._map.close()
            raise PageError(f"{path}: is not a control page of version {VERSION}")

    @classmethod
    def create(cls, directory: Path, policy: WaitPolicy) -> Control:
        """Write a new control page, which must be there before the ranks start."""
        data = LAYOUT.pack(MAGIC, VERSION, LAYOUT.size, 1, _mode(policy), policy.yields, 0, 0)
        path = directory / "control"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        return cls(directory)

    def set(self, policy: WaitPolicy) -> None:
        """Change how the ranks wait; they follow within one MPI call."""
        self._seq = (self._seq + 1) % 2**32
        values = (self._seq, _mode(policy), policy.yields)
        for i in (2, 1, 0):  # the sequence number last
            struct.pack_into("=I", self._map, SEQ_AT + 4 * i, values[i])

    def set_timeouts(self, shortest: int, longest: int) -> None:
        """How long a rank sleeps on the doorbell at first and at most, microseconds; 0: default."""
        struct.pack_into("=2I", self._map, SEQ_AT + 12, shortest, longest)

    def get(self) -> WaitPolicy:
        """What is set now."""
        mode, yields = struct.unpack_from("=2I", self._map, SEQ_AT + 4)
        return WaitPolicy(MODES[mode] if mode < len(MODES) else "off", yields)

    def close(self) -> None:
        """Let go of the mapping; the page stays as it is."""
        self._map.close()


def _mode(policy: WaitPolicy) -> int:
    if policy.mode not in MODES:
        raise BadInput(f"wait mode {policy.mode!r}: one of {', '.join(MODES)} would be right")
    if not 0 <= policy.yields < 2**31:
        raise BadInput(f"{policy.yields} yields: 0 to {2**31 - 1} would be right")
    return MODES.index(policy.mode)
