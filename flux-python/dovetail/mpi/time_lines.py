# SPDX-License-Identifier: LGPL-3.0-or-later
"""Iterations as the log tells them: a `Time =` line for each, where ranks do not count themselves.

Inputs: what a simulation prints, in pieces. Outputs: the file `iterations` in its session
directory, and how many iterations are complete; with the largest `Initial residual` that was
printed in the last complete one. Invariant: a line begins an iteration and so ends
the one before; what ends the last one is that the simulation ends well.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import struct
import time

FILE = "iterations"
COUNT = struct.Struct("=Qdd")
"""The file's content: how many `Time =` lines, when the last came (CLOCK_MONOTONIC), and the
residual, -1 if none was printed."""

_LONGEST = 256  # bytes of a line that is kept until it is complete
_TOLD = re.compile(rb"\n(Time = )|Initial residual = ([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)[,\s]")


def complete(lines: int, succeeded: bool) -> int:
    """How many iterations are complete after that many lines."""
    return lines if succeeded else max(0, lines - 1)


class Counter:
    """Counts the lines of one simulation, and keeps the file."""

    def __init__(self, directory: str) -> None:
        path = os.path.join(directory, FILE)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._carry = b"\n"
        self._lines = 0
        self._since = 0.0  # CLOCK_MONOTONIC of the last line, as long as it is not told
        self._residual = self._largest = -1.0  # of the last complete iteration, and of this one

    @property
    def untold(self) -> bool:
        """Whether the file does not have all lines yet."""
        return self._since > 0.0

    def take(self, chunk: bytes, late: bool = False) -> bool:
        """Count the lines that this piece of the output completes the beginning of.

        Returns whether that is told. Of lines in a `late` piece nobody knows when they came, so
        they are told with the next one.
        """
        text = self._carry + chunk
        before, begun = self._lines, -1
        for told in _TOLD.finditer(text):
            if told[1]:
                self._lines, begun = self._lines + 1, told.start()
                self._residual, self._largest = self._largest, -1.0
            elif (residual := float(told[2])) < math.inf:
                self._largest = max(self._largest, residual)
        last = max(text.rfind(b"\n"), len(text) - _LONGEST)
        self._carry = text[last + (last == begun) :]  # a line that is counted is not counted again
        if self._lines == before:
            return False
        self._since = time.monotonic()
        if not late:
            self.tell()
        return not late

    def tell(self, age: float = 0.0) -> None:
        """Put what is counted into the file, if that has not been done for so many seconds."""
        if self.untold and time.monotonic() - self._since >= age:
            with contextlib.suppress(OSError):  # full, as a disk may be
                now = COUNT.pack(self._lines, self._since, self._residual)
                os.pwrite(self._file, now, 0)
            self._since = 0.0


def read(directory: str) -> tuple[int, float, float] | None:
    """How many lines, when the last came, and the residual or -1; None while there is none."""
    try:
        with open(os.path.join(directory, FILE), "rb") as file:
            lines, stamp, residual = COUNT.unpack(file.read())
    except (OSError, struct.error):
        return None
    return lines, stamp, residual
