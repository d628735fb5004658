# SPDX-License-Identifier: LGPL-3.0-or-later
"""The CPU weights of pods as the kernel has them, and what their limits did.

Inputs: where the node's control groups are mounted, and pod uids. Output: per uid the weight file
and its content, `cpu.shares` of version 1 or `cpu.weight` of version 2, of the pod's own group, or
the counters of that group and those in it.
Invariant: nothing is written, and groups that are not of pods are passed over.
"""

from __future__ import annotations

import contextlib
import os

from dovetail.core.cgroup_weights import FILES
from dovetail.host import cpu_limits
from dovetail.host.cgroups import Group

_DEPTH = 8  # of groups below the mount; a kubelet's pods are at most six below its own root


def read(root: str, uids: list[str]) -> dict[str, dict[str, str]]:
    """The weights of those pods that are found."""
    return {uid: _values(path) for uid, path in find(root, uids).items()}


def counts(directory: str) -> list[float]:
    """What a pod's limit, and busy cores, did to it, as in messages.Counts; of its folder."""
    below: list[str] = []
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        below = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    # A container has the limit as well, and either of the two may be the one that stops it.
    stops = cpu_limits.hardest(cpu_limits.throttling([directory, *below]), {}, 1)
    known = (stops.limit, stops.periods, stops.throttled, stops.seconds, stops.of) if stops else ()
    pressure = cpu_limits.pressure([directory])
    return [*(known or (0, 0, 0, 0.0, 0.0)), -1.0 if pressure is None else pressure]


def since(earlier: list[float], now: list[float]) -> list[float]:
    """What of these counts came after the earlier ones, if there are any: all but the limit."""
    if not earlier:
        return now
    grown = [max(0.0, late - early) for late, early in zip(now[1:5], earlier[1:5])]
    pressure = max(0.0, now[5] - earlier[5]) if now[5] >= 0 else now[5]
    return [now[0], *grown, pressure]


def used(root: str, directory: str) -> list[float] | None:
    """CPU seconds that a pod has used so far, and its memory now, bytes; None if unknown.

    Memory is what is no cache of files, 0 if unknown. Version 1 may have other controllers, which
    both are of, in other folders than `directory`.
    """
    inside = os.path.relpath(directory, os.path.join(root, "cpu"))
    others = [os.path.join(root, name, inside) for name in ("cpuacct", "memory")]
    cpu = Group(directory, others[0]).cpu_seconds()
    memory = 0
    for path in (directory, others[1]):
        with contextlib.suppress(OSError), open(os.path.join(path, "memory.stat")) as file:
            lines = dict(line.split(" ", 1) for line in file)
            memory = int(lines.get("anon") or lines.get("total_rss") or 0)
    return None if cpu is None else [cpu, memory]


def find(root: str, uids: list[str]) -> dict[str, str]:
    """The folders of those pods that are found; a runtime writes a uid with `-` or with `_`."""
    wanted = {}
    for uid in uids:
        for name in (f"pod{uid}", f"pod{uid.replace('-', '_')}"):
            wanted[name] = uid
    found: dict[str, str] = {}
    top = os.path.join(root, "cpu")
    _look(top if os.path.isdir(top) else root, wanted, found, _DEPTH)
    return found


def _look(directory: str, wanted: dict[str, str], found: dict[str, str], depth: int) -> None:
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if len(found) == len({*wanted.values()}) or not entry.is_dir(follow_symlinks=False):
                continue
            # pod<uid> by cgroupfs, kubepods-burstable-pod<uid>.slice by systemd
            _, found_it, uid = entry.name.removesuffix(".slice").rpartition("-pod")
            name = f"pod{uid}" if found_it else entry.name
            if name in wanted:
                found[wanted[name]] = entry.path
            elif depth:
                _look(entry.path, wanted, found, depth - 1)


def _values(directory: str) -> dict[str, str]:
    values = {}
    for name in FILES:
        with contextlib.suppress(OSError), open(os.path.join(directory, name)) as file:
            values[name] = file.read().strip()
    return values
