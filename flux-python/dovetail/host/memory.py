# SPDX-License-Identifier: LGPL-3.0-or-later
"""Memory that this process and its children may use, and what the kernel killed for want of it.

Inputs: /proc and the control groups above a process, as far as it can see them. Outputs: bytes,
and one line for the user. Invariants: works with version 1, version 2 and without any group;
whatever cannot be read is no limit. Imports stay few: the supervisor starts once per simulation.
"""

from __future__ import annotations

import contextlib
import os
import signal

from dovetail.host import cgroups

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


def free_memory() -> int:
    """Bytes that simulations may use: what is free on the machine, and in every group above."""
    with open("/proc/meminfo") as file:
        room = next(int(line.split()[1]) << 10 for line in file if "MemAvailable" in line)
    for folder in cgroups.above("memory"):
        for limit, usage in (("memory.limit_in_bytes", "memory.usage_in_bytes"),
                             ("memory.max", "memory.current")):  # fmt: skip
            most, used = _number(folder, limit), _number(folder, usage)
            if most is not None and used is not None:
                # Files that nobody has used for a while are the first that the kernel drops.
                stat = _table(folder, "memory.stat")
                cached = stat.get("total_inactive_file", stat.get("inactive_file", 0))
                room = min(room, max(1, most - max(0, used - cached)))
    return room


def out_of_memory(who: str, why: str) -> str:
    """What is said of one that the kernel killed; `why` as `KernelKills` has it."""
    return f"out of memory: {who} was killed by the kernel; {why}"


def lost(who: str, code: int, words: bytes, kills: KernelKills) -> tuple[int, str]:
    """The exit code and the reason of what depended on a process that has failed.

    `code` is of `os.waitstatus_to_exitcode`, `words` are the last that it said, `kills` those since
    it began.
    """
    starved = kills.why() if code == -signal.SIGKILL else ""
    if starved:
        return 128 - code, out_of_memory(who, starved)
    why = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    said = words.decode(errors="replace").strip()
    reason = f"{who} failed: {why}" + (f": {said}" if said else "")
    return 128 - code if code < 0 else 1, reason


class KernelKills:
    """Whether the kernel has killed processes for want of memory since this was made.

    `group` is a folder of version 2 in which they run, if they are not where we are.
    """

    def __init__(self, group: str = "") -> None:
        self._folders = cgroups.above("memory", group)
        self._before = self._kills()

    def why(self) -> str:
        """Empty if nothing was killed; else what limits the memory here, in words."""
        if self._kills() <= self._before:
            return ""
        limits = [limit for folder in self._folders for limit in _limits(folder)]
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        least = min([machine, *limits])
        where = "this machine has" if least == machine else "the limit of its control group is"
        return f"{where} {least >> 20} MiB"

    def _kills(self) -> int:
        """How often that has happened in the nearest group that counts it, or on the machine."""
        for folder in self._folders:
            for name in ("memory.oom_control", "memory.events"):
                count = _table(folder, name).get("oom_kill")
                if count is not None:
                    return count
        return _table("/proc", "vmstat").get("oom_kill", 0)


def _limits(folder: str) -> Iterator[int]:
    """What limits memory in a group; version 1 says there what the groups above it allow."""
    above = _table(folder, "memory.stat").get("hierarchical_memory_limit")
    for limit in (above, _number(folder, "memory.max")):
        if limit is not None:
            yield limit


def _number(folder: str, name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, name)) as file:
        return int(file.read())
    return None


def _table(folder: str, name: str) -> dict[str, int]:
    """The numbers of a file that has a word and a number in each line."""
    with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, name)) as file:
        return {word: int(number) for word, number in map(str.split, file)}
    return {}
