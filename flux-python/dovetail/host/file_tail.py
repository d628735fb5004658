# SPDX-License-Identifier: LGPL-3.0-or-later
"""What is appended to a file, as it happens, without polling.

Input: a path; the file may come later, and so may its folder, but not the folder of that.
Output: the new bytes, each once. Changes made on another machine wake nobody up; they come
with the next look. A machine gives each user only so many instances and watches of inotify,
often 128: where they are used up, a timer wakes up in their place.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import time
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
MODIFY, CREATE, MOVED_TO = 0x2, 0x100, 0x80  # inotify(7)
FLAGS = os.O_NONBLOCK | os.O_CLOEXEC


def _timer() -> int:
    """A descriptor that is readable once in a second; -1 where there can be no more of any."""
    timer = int(_libc.timerfd_create(time.CLOCK_MONOTONIC, FLAGS))
    every, first = (1, 0), (1, 0)  # seconds, nanoseconds
    if timer >= 0:
        _libc.timerfd_settime(timer, 0, (ctypes.c_long * 4)(*every, *first), None)
    return timer


class Tail:
    """Follows one file; `fileno` is readable when something may have changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.near = False  # the file's own folder is watched
        self.notes = _libc.inotify_init1(FLAGS)
        if self.notes < 0 or not (self.watch(path.parent) or self.watch(path.parents[1])):
            code = ctypes.get_errno()
            self.close()
            if code in (errno.EMFILE, errno.ENOSPC):
                self.notes, self.near = _timer(), True
            if self.notes < 0:
                raise OSError(code, os.strerror(code), str(path.parent))

    def watch(self, folder: Path) -> bool:
        """Have changes in a folder wake us; False where there is none."""
        mask = MODIFY | CREATE | MOVED_TO
        found = bool(_libc.inotify_add_watch(self.notes, bytes(folder), mask) >= 0)
        self.near = self.near or (found and folder == self.path.parent)
        return found

    def fileno(self) -> int:
        """For a selector."""
        return int(self.notes)

    def read(self) -> bytes:
        """What is new since the last look."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.notes, 1 << 16):
                pass
        if not self.near:
            self.watch(self.path.parent)
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                found = file.read()
        except OSError:  # not there, or not readable now: what is new then comes later
            return b""
        self.offset += len(found)
        return found

    def close(self) -> None:
        """Stop following."""
        if self.notes >= 0:
            os.close(self.notes)
            self.notes = -1
