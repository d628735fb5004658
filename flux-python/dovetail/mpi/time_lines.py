# SPDX-License-Identifier: LGPL-3.0-or-later
"""Iterations as the log tells them: a `Time =` line for each, where ranks do not count themselves.

Inputs: what a simulation prints, in pieces. Outputs: the file `iterations` in its session
directory, and how many iterations are complete. Invariant: a line begins an iteration and so ends
the one before; what ends the last one is that the simulation ends well.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time

FILE = "iterations"
COUNT = struct.Struct("=Qd")
"""The file's content: how many `Time =` lines, and when the last came (CLOCK_MONOTONIC)."""

_TIME_LINE = b"\nTime = "


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

    def take(self, chunk: bytes) -> None:
        """Count the lines that this piece of the output completes the beginning of."""
        text = self._carry + chunk
        lines = text.count(_TIME_LINE)
        if lines:
            self._lines += lines
            with contextlib.suppress(OSError):  # full, as a disk may be
                os.pwrite(self._file, COUNT.pack(self._lines, time.monotonic()), 0)
        self._carry = text[1 - len(_TIME_LINE) :]


def read(directory: str) -> tuple[int, float] | None:
    """How many lines, and when the last came; None while there is none."""
    try:
        with open(os.path.join(directory, FILE), "rb") as file:
            lines, stamp = COUNT.unpack(file.read())
    except (OSError, struct.error):
        return None
    return lines, stamp
