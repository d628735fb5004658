# SPDX-License-Identifier: LGPL-3.0-or-later
"""When the batch job ends in which a run is, so that its simulations can be stopped before.

Input: what Flux says of the job or the instance that this process is in. Output: seconds.
Invariant: where there is no Flux, or it does not answer, there is no end that is known.
"""

from __future__ import annotations

import math
import os
import subprocess

LIMIT = 10.0
"""Seconds for Flux to answer."""
UNLIMITED = 1e9
"""Seconds, 30 years, from which on what Flux says stands for no limit."""
RESERVE = 5.0
"""Seconds before the job's end in which what did not stop is ended, and the report is written."""


def left() -> float:
    """Seconds until this process's job ends by itself; infinity if it does not, or is not known."""
    if not os.environ.get("FLUX_URI"):
        return math.inf
    words = [os.environ.get("FLUX", "flux"), "job", "timeleft"]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT, check=True
        )
        seconds = float(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return math.inf
    return seconds if seconds < UNLIMITED else math.inf


def before(seconds: float) -> float:
    """How long before the end of a job with so many seconds left its simulations are to be stopped.

    A tenth, and 15 seconds to two minutes: an iteration and writing the fields of large cases take
    that long, and what is asked earlier than needed is computed later.
    """
    return min(120.0, max(15.0, seconds / 10))
