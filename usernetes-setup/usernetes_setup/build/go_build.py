# SPDX-License-Identifier: LGPL-3.0-or-later
"""Builds a Go program, and tells how far it is: Kubernetes takes minutes.

Inputs: the `go` command, a package of a module, where the program goes. Outputs: the program; a
line now and then. Invariant: the estimate takes packages for alike, and those that Go has in its
cache for work, so that it tends to be too long and not too short.
"""

from __future__ import annotations

import subprocess
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from dovetail.core.errors import WorkFailed

from usernetes_setup.build.debian_packages import Say, run

EVERY = 15.0
"""Seconds between two lines."""


def build(
    go: str,
    package: str,
    target: Path,
    flags: list[str],
    folder: Path,
    environment: Mapping[str, str],
    say: Say,
) -> None:
    """Build it; raises WorkFailed with the end of what Go complained of."""
    listed = run([go, "list", "-deps", package], "go list", cwd=folder, env=environment)
    packages = set(listed.split())
    total, done, tail = len(packages), 0, deque([""], maxlen=3)
    # What debuggers need is not made at all, as the linker would leave it out: 10 % of the time.
    lean = ["-trimpath", "-gcflags=all=-dwarf=false", "-ldflags", " ".join(flags)]
    words = ["nice", go, "build", "-v", *lean]
    begun = told = time.monotonic()
    with subprocess.Popen(
        [*words, "-o", str(target), package],
        cwd=folder, env=environment, stderr=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        assert child.stderr is not None
        try:
            for line in child.stderr:
                if line.strip() not in packages:  # which are named as they are compiled
                    tail.append(line.strip())
                    continue
                done += 1
                now = time.monotonic()
                if now - told >= EVERY:
                    told = now
                    left = (now - begun) * (total - done) / done
                    say(f"{done} of {total} packages compiled, at most {_minutes(left)} left")
        except BaseException:
            child.terminate()  # it would go on for minutes, and be waited for
            raise
    if child.returncode:
        why = " ".join(tail).strip() or f"exit code {child.returncode}"
        raise WorkFailed(f"go build: {why}")


def _minutes(seconds: float) -> str:
    whole = int(seconds // 60) + 1
    return f"{whole} minutes" if whole > 1 else "a minute"
