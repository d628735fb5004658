# SPDX-License-Identifier: LGPL-3.0-or-later
"""The volumes of a node's claims: folders in one place, which every user of a pod may write to.

Input: folders that the kubelet makes, for the volumes of `control.local_volumes`. Output: their
mode. Invariants: a folder is opened once, as soon as it is there, and then is as its pods make it;
it is in the node's own, where nobody else gets in.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

from dovetail.host.file_tail import CREATE, FLAGS

from usernetes_setup.node import namespaces
from usernetes_setup.node_record import SHOWN, Node

_libc = ctypes.CDLL(None, use_errno=True)


class Volumes:
    """A node's volumes; `notes` is readable when there may be a new one, -1 if nobody can tell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: set[str] = set()
        folder.mkdir(exist_ok=True)
        self.notes = int(_libc.inotify_init1(FLAGS))
        if self.notes < 0 or _libc.inotify_add_watch(self.notes, bytes(folder), CREATE) < 0:
            why = os.strerror(ctypes.get_errno())
            print(f"only root of a pod can write to a claim's volume: inotify: {why}", flush=True)

    def open_new(self) -> None:
        """Let every user of a pod write to what is new."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.notes, 1 << 16)
        there = set(os.listdir(self.folder))
        for name in there - self._seen:
            with contextlib.suppress(OSError):  # gone again, or no folder
                handle = os.open(self.folder / name, os.O_DIRECTORY | os.O_NOFOLLOW)
                os.fchmod(handle, 0o777)
                os.close(handle)
        self._seen = there


def show(node: Node) -> Volumes:
    """Give a node's volumes the same path on every node, wherever its folder is."""
    made = Volumes(node.folder / "volumes")
    (SHOWN / "volumes").mkdir(parents=True, exist_ok=True)
    namespaces.mount(str(made.folder), str(SHOWN / "volumes"), "", namespaces.BIND)
    return made
