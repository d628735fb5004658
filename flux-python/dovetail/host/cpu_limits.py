# SPDX-License-Identifier: LGPL-3.0-or-later
"""What limits of CPU, and cores that are busy, did to control groups.

Inputs: folders of control groups of version 1 (`cpu`) or 2. Outputs: their counters. Invariants:
only files are read, and those of a group stay as long as it does, whatever its processes do; what
the kernel does not tell is None.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace

from dovetail.core.contention import Throttling

_NOTHING = Throttling(0, 0, 0, 0.0, 0.0)


def around(group: str) -> list[str]:
    """The folders of the groups that this one is in, nearest first."""
    found = []
    while os.path.exists(os.path.join(group := os.path.dirname(group), "cgroup.procs")):
        found.append(group)
    return found


def throttling(directories: Iterable[str]) -> dict[str, Throttling]:
    """What the limits of those of these groups that have one did so far, by folder.

    It is `of` the time of one core.
    """
    found = {}
    for path in directories:
        quota, period = _limit(path)
        if quota:
            stat = _stat(path)
            # Of version 1 in nanoseconds, of version 2 in microseconds.
            seconds = stat.get("throttled_time", 0) / 1e9 + stat.get("throttled_usec", 0) / 1e6
            counts = stat.get("nr_periods", 0), stat.get("nr_throttled", 0)
            of = counts[0] * period * 1e-6
            found[path] = Throttling(round(1000 * quota / period), *counts, round(seconds, 6), of)
    return found


def hardest(
    now: Mapping[str, Throttling], before: Mapping[str, Throttling], cores: int
) -> Throttling | None:
    """What that limit did since `before` which stopped most; None if there is none.

    The processes run on so many `cores` at once. Of limits one inside the other only one stops at
    a time.
    """
    since = [one.since(before.get(path, _NOTHING)) for path, one in now.items()]
    most = max(since, key=lambda one: (one.seconds, -one.limit), default=None)
    return replace(most, of=round(most.of * cores, 6)) if most else None


def pressure(directories: Iterable[str]) -> float | None:
    """Seconds for which some task of the first of these groups that tells it waited for a core.

    Of version 2 alone, where the kernel has pressure stall information.
    """
    for path in directories:
        # Where it is switched off the file may be there, and cannot be read.
        with contextlib.suppress(OSError, ValueError, KeyError):
            with open(os.path.join(path, "cpu.pressure")) as file:
                some = dict(pair.split("=") for pair in file.readline().split()[1:])
            return int(some["total"]) * 1e-6
    return None


def _limit(path: str) -> tuple[int, int]:
    """A group's quota and its period, microseconds; the first is 0 if it has no limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = _read(os.path.join(path, "cpu.max")).split()
        return (0 if quota == "max" else int(quota)), int(period)
    with contextlib.suppress(OSError, ValueError):
        quota = _read(os.path.join(path, "cpu.cfs_quota_us"))
        return max(0, int(quota)), int(_read(os.path.join(path, "cpu.cfs_period_us")))
    return 0, 1


def _stat(path: str) -> dict[str, int]:
    """What `cpu.stat` of a group has, by name."""
    with contextlib.suppress(OSError, ValueError):
        pairs = (line.split() for line in _read(os.path.join(path, "cpu.stat")).splitlines())
        return {name: int(value) for name, value in pairs}
    return {}


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
