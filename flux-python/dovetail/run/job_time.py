# SPDX-License-Identifier: LGPL-3.0-or-later
"""When the batch job ends in which a run is, so that its simulations can be stopped before.

Input: what Flux says of the job or the instance that this process is in. Output: seconds.
Invariants: where there is no Flux, or it never answers, there is no end that is known; a time that
is changed while the run goes on is noticed, and nobody waits for Flux but at the beginning and
before simulations are stopped.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time

LIMIT = 10.0
"""Seconds for Flux to answer."""
UNLIMITED = 1e9
"""Seconds, 30 years, from which on what Flux says stands for no limit."""
RESERVE = 5.0
"""Seconds before the job's end in which what did not stop is ended, and the report is written."""
EVERY = 15.0
"""Seconds after which Flux is asked again: `flux update JOBID duration=...` may have changed it."""

FRESH = 1.0
"""Seconds for which an answer is good enough to stop simulations by it."""


def instance(*, for_us_alone: bool) -> str:
    """Where Flux is; `for_us_alone`: not for simulations, which have nothing of our job."""
    return os.environ.pop("FLUX_URI", "") if for_us_alone else os.environ.get("FLUX_URI", "")


class End:
    """The end of the job of a Flux `instance`; `left` is the seconds until then as it began,
    infinity for none. It is asked for in the background while it is looked at by `due`."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._asked: subprocess.Popen[bytes] | None = None
        self._known_at = -math.inf
        self.at = math.inf
        """CLOCK_MONOTONIC."""
        self._ask(LIMIT)
        self.left = self.at - time.monotonic()
        self.early = before(self.left)

    def due(self) -> bool:
        """Whether it is so near that simulations are to stop at checkpoints."""
        if time.monotonic() - self._known_at >= EVERY:
            self._ask(0.0)
        if time.monotonic() < self.at - self.early:
            return False
        if time.monotonic() - self._known_at > FRESH:
            self._ask(LIMIT)  # there may be more time since
        return time.monotonic() >= self.at - self.early

    def close(self) -> None:
        """Leave no process behind."""
        if self._asked is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._asked.pid, signal.SIGKILL)
            self._asked.communicate()

    def _ask(self, patience: float) -> None:
        """Ask Flux, or take what it has answered by now; without an answer the last one holds."""
        if not self._instance:
            self._known_at = math.inf
            return
        if self._asked is None:
            words = [os.environ.get("FLUX", "flux"), "job", "timeleft"]
            try:
                self._asked = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL, start_new_session=True,
                    env={**os.environ, "FLUX_URI": self._instance},
                )  # fmt: skip
            except OSError:  # no Flux is here, or just now no process can be had
                self._known_at = time.monotonic()
                return
        try:
            if patience or self._asked.poll() is not None:
                output, _ = self._asked.communicate(timeout=patience or None)
                self._take(output, self._asked.returncode)
                self._asked = None
        except subprocess.TimeoutExpired:
            self._known_at = time.monotonic()

    def _take(self, output: bytes, code: int) -> None:
        self._known_at = time.monotonic()
        try:
            seconds = float(output)
        except ValueError:
            return
        if not code:
            self.at = self._known_at + (seconds if seconds < UNLIMITED else math.inf)


def before(seconds: float) -> float:
    """How long before the end of a job with so many seconds left its simulations are to be stopped.

    A tenth, and 15 seconds to two minutes: an iteration and writing the fields of large cases take
    that long, and what is asked earlier than needed is computed later.
    """
    return min(120.0, max(15.0, seconds / 10))
