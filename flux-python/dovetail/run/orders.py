# SPDX-License-Identifier: LGPL-3.0-or-later
"""What is asked of a run while it goes on: lines `stop NAME`.

Inputs: the standard input of the run, where another program gives them, and the file `orders.txt`
in its output directory, which its user or root appends to. Outputs: the names of simulations that
shall stop. Invariant: reading never blocks. A file, and no socket, as who looks at a run is often
on another machine, with which it shares the directory alone.
"""

from __future__ import annotations

import contextlib
import os
import select
from pathlib import Path

from dovetail.core.errors import WorkFailed
from dovetail.host.line_splitter import LineSplitter

FILE = "orders.txt"  # with a dot, which no simulation's folder has


def cancel(directory: Path, name: str) -> None:
    """Ask the run whose output is in `directory` to stop a simulation; the others go on.

    Root does so as the directory's owner, as a file of root's could not be read by the run.
    """
    path, we = directory / FILE, os.geteuid()
    try:
        if we == 0:
            os.seteuid(directory.stat().st_uid)
        try:
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        finally:
            os.seteuid(we)
        try:
            os.write(file, f"stop {name}\n".encode())
        finally:
            os.close(file)
    except OSError as error:
        raise WorkFailed(f"{path}: {error.strerror}") from error


class Orders:
    """Those of the program that started the run, and, while it `listens`, those in its file."""

    def __init__(self, source: int | None = None) -> None:
        """`source` is a pipe, a socket or a terminal; None if no program gives any."""
        self.source = source
        self.given = source is not None
        self._words, self._lines = LineSplitter(), LineSplitter()
        self._path: Path | None = None
        self._read = 0

    def listen(self, directory: Path) -> None:
        """Take those in the file too, from now on: what is in it was for an earlier run."""
        self._path = directory / FILE
        self.forget()

    def forget(self) -> None:
        """Remove the file, if there is one: nobody takes what is in it."""
        if self._path:
            with contextlib.suppress(
                OSError
            ):  # the run matters more than a file that is in the way
                self._path.unlink()

    def take(self) -> list[str]:
        """Names of the simulations that shall stop; lines that mean nothing are left out."""
        lines = [*self._from_source(), *self._from_file()]
        words = [line.decode(errors="replace").split() for line in lines]
        return [line[1] for line in words if len(line) == 2 and line[0] == "stop"]

    def _from_source(self) -> list[bytes]:
        lines: list[bytes] = []
        # Asked first and not set to non-blocking, as our output may be the same socket.
        while self.source is not None and select.select([self.source], [], [], 0)[0]:
            try:
                block = os.read(self.source, 1 << 16)
            except OSError:  # who gave orders has gone, and did not read all that we said
                block = b""
            lines += self._words.take(block)
            if not block:
                self.source = None
        return lines

    def _from_file(self) -> list[bytes]:
        if self._path is None:
            return []
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # nobody has asked for anything
            return []
        try:
            if os.fstat(file).st_uid not in (0, os.getuid()):
                return []
            block = os.pread(file, 1 << 16, self._read)
        except OSError:
            return []
        finally:
            os.close(file)
        self._read += len(block)
        return self._lines.take(block)
