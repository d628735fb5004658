# SPDX-License-Identifier: LGPL-3.0-or-later
"""Processes that stay on a core each, as long as their owner wants that.

Inputs: process ids with their start ticks, the CPUs of this machine that may be used. Outputs:
affinities of all their threads. Who is bound stays where the kernel runs it, since its memory
is near, unless that core, or another thread of it, is already somebody's; then it gets the
nearest core by number that has all its threads free, or else any.

Invariants: no two bound processes have one core; no process is bound that computes in more than
one thread, or whose affinity is not that of all CPUs here, which was its own choice; nothing is
changed of one that cannot be bound; unbound, all that was started meanwhile is so too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from dovetail.host import processes

_BUSY = 0.05
"""Share of the busiest thread's CPU time from which on another one computes too."""
_CPU, _USER, _SYSTEM = 36, 11, 12  # in /proc/PID/stat behind the name, see proc(5)


class Cores:
    """CPUs, and who is bound to which. Every method may be called again."""

    def __init__(self, cpus: Iterable[int]) -> None:
        self._cpus = frozenset(cpus)
        self._bound: dict[str, dict[int, int]] = {}

    def bind(self, owner: str, ranks: Mapping[int, int]) -> None:
        """Bind an owner's processes, id to start ticks; OSError says why they cannot be."""
        if owner in self._bound:
            return
        for pid, ticks in ranks.items():
            if not processes.alive(pid, ticks):
                raise OSError("a rank is gone")
            if os.sched_getaffinity(pid) != self._cpus:
                raise OSError("its ranks have cores of its own choice already")
            if busy_threads(pid) > 1:
                raise OSError("a rank computes in more than one thread")
        taken = [core for cores in self._bound.values() for core in cores.values()]
        chosen = choose([running_on(pid) for pid in ranks], self._cpus, taken, siblings)
        self._bound[owner] = dict(zip(ranks, chosen))
        try:
            for pid, core in self._bound[owner].items():
                _move(pid, self._cpus, {core})
        except OSError:
            self.release(owner, lambda: ranks)
            raise

    def release(self, owner: str, members: Callable[[], Iterable[int]]) -> None:
        """Unbind an owner's processes; `members` finds all that it has, also those begun since."""
        cores = self._bound.pop(owner, {})
        for pid in members() if cores else ():
            for core in cores.values():
                with contextlib.suppress(OSError):  # it has ended
                    _move(pid, {core}, self._cpus)


def choose(
    now: Sequence[int],
    cpus: Iterable[int],
    taken: Iterable[int],
    siblings: Callable[[int], Iterable[int]],
) -> list[int]:
    """A core for each process, by where each runs now; OSError if there are too few."""
    used = set(taken)
    chosen = []
    for here in now:
        free = set(cpus) - used
        if not free:
            raise OSError("fewer cores are free than it has ranks")
        shared = {core for core in free if used & set(siblings(core))}
        chosen.append(min(free, key=lambda core: (core in shared, abs(core - here), core)))
        used.add(chosen[-1])
    return chosen


def siblings(cpu: int) -> set[int]:
    """The CPUs that are threads of the same core, itself included."""
    try:
        with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
            parts = [part.split("-") for part in file.read().strip().split(",")]
        return {cpu for part in parts for cpu in range(int(part[0]), int(part[-1]) + 1)}
    except (OSError, ValueError):
        return {cpu}


def running_on(pid: int) -> int:
    """The CPU that a process last ran on."""
    return int(_stat(f"/proc/{pid}/stat")[_CPU])


def busy_threads(pid: int) -> int:
    """How many threads of a process compute; those that the MPI started mostly sleep."""
    ticks = []
    for thread in _threads(pid):
        with contextlib.suppress(OSError):  # it has ended
            stat = _stat(f"/proc/{pid}/task/{thread}/stat")
            ticks.append(int(stat[_USER]) + int(stat[_SYSTEM]))
    return sum(one > _BUSY * max(ticks) for one in ticks)


def _move(pid: int, before: Iterable[int], after: Iterable[int]) -> None:
    """Change the affinity of those threads that have it like `before`, of new ones too."""
    wanted, done = frozenset(before), set[int]()
    while True:
        threads = [thread for thread in _threads(pid) if thread not in done]
        if not threads:
            return
        for thread in threads:
            done.add(thread)
            with contextlib.suppress(ProcessLookupError):
                if os.sched_getaffinity(thread) == wanted:
                    os.sched_setaffinity(thread, after)


def _threads(pid: int) -> list[int]:
    return [int(name) for name in os.listdir(f"/proc/{pid}/task")]


def _stat(path: str) -> list[bytes]:
    with open(path, "rb") as file:
        return file.read().rpartition(b")")[2].split()
