# SPDX-License-Identifier: LGPL-3.0-or-later
"""Reads the pages that ranks publish.

In: a directory with one file `rank.<world rank>.<pid>` for each MPI process, laid out as in
pmpi/page.h and dovetail-page(5), perhaps while the process writes to it. Out: a `RankPage` for
each.

Invariants: reading costs the rank nothing. Any bytes at all give either a `RankPage` or a
`PageError` that says what is wrong with them.
"""

from __future__ import annotations

import math
import os
import re
import stat
import struct
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from dovetail.core.errors import BadInput
from dovetail.host import processes

MAGIC = b"DVTPAGE\0"
VERSION = 3
CALLS_MAX = 256
NAME_MAX = 32
HEAD = struct.Struct("=8s12I3Q64s4Q2Q")
MARK = struct.Struct("=7Qd")
CALL = struct.Struct("=2Q")
SEQUENCES = struct.Struct("=2Q")
SEQUENCES_AT = HEAD.size - SEQUENCES.size
WAITS = struct.Struct("=3Q")
MARKS_AT = HEAD.size + WAITS.size
CALLS_AT = MARKS_AT + 5 * MARK.size
NAMES_AT = CALLS_AT + CALLS_MAX * CALL.size
SIZE = NAMES_AT + CALLS_MAX * NAME_MAX

MPIS = {1: "openmpi", 2: "mpich"}
STATES = {1: "running", 2: "finalized", 3: "aborted"}
SOURCES = {0: "none", 1: "openfoam", 2: "pcontrol", 3: "lammps"}
RHYTHM, RHYTHMS_MAX = 4, 32
OWN = RHYTHMS_MAX
"""The beat of a rhythm that a rank found alone; those of all ranks together are below."""
SOURCES.update(dict.fromkeys(range(RHYTHM, RHYTHM + OWN + 1), "rhythm"))
MEASURES = {"none": "work", "rhythm": "periods"}
"""What tells a rank's progress, by its source; that of all others is `iterations`."""
QUIET = 60.0
"""Seconds after its last beat after which a rhythm tells nothing, and after an iteration after
which samples tell what ranks do now: the program may do other things, and must not be taken for one
that hangs."""

APART = 1 / 16
"""Share by which counts of ranks that found their beats alone may differ, apart from one beat that
is on its way and one that is not published yet. Where one takes two beats for what is three for
another it is a third, and ranks that do not wait for one another drift apart."""

_NO_QUEUE = 2**64 - 1
"""What a page has for the time in the queue where the kernel does not tell it."""

CENTURY = 100 * 366 * 86400 * 10**9  # nanoseconds; no true time is longer


class PageError(BadInput):
    """A page cannot be used; the message says which and why."""


class NotYet(PageError):
    """The rank is still writing the first lines of its page."""


@dataclass(frozen=True)
class Mark:
    """A rank at one moment: `stamp` on CLOCK_MONOTONIC, the rest since MPI_Init, all seconds."""

    iterations: int
    stamp: float
    cpu_s: float
    useful_s: float
    mpi_s: float
    peak_rss: int


@dataclass(frozen=True)
class Waits:
    """What kept a process from its core since MPI_Init, over all its threads.

    It gave it up `voluntary` times to wait for something, lost it `involuntary` times to others,
    and waited `queued_s` for one; None where the kernel does not tell that.
    """

    voluntary: int
    involuntary: int
    queued_s: float | None


@dataclass(frozen=True)
class RankPage:
    """One MPI process; see dovetail-page(5).

    Times are seconds: `init_s`, `stamp` and `iter_stamp` on CLOCK_MONOTONIC, the others since
    MPI_Init returned. `useful_s` is the main thread's wall time outside MPI and `mpi_s` inside;
    they sum to `elapsed_s`. `cpu_s` counts all threads. `calls` has (count, seconds) of all
    threads by function, those that were called. The `iter_` values are those of the last
    iteration boundary, and `first` is the first such boundary. `state` is running, in_mpi,
    finalized or aborted; a rank that is not `alive` and neither of the last two was killed, and
    its values are as of its last MPI call. `peak_rss` is in bytes. Ranks whose `beat` differs do
    not count the same: it is the call that a rhythm was taken from, else -1. Where it is OWN, only
    all pages together tell whether to believe it.
    """

    rank: int
    world_size: int
    world: int
    pid: int
    start_ticks: int
    host: str
    mpi: str
    state: str
    alive: bool
    init_s: float
    stamp: float
    elapsed_s: float
    useful_s: float
    mpi_s: float
    cpu_s: float
    calls: Mapping[str, tuple[int, float]]
    iterations: int
    iteration_source: str
    iter_stamp: float
    iter_cpu_s: float
    iter_useful_s: float
    iter_mpi_s: float
    peak_rss: int
    first: Mark | None
    beat: int
    waits: Waits


@dataclass(frozen=True)
class _Head:
    """The page's fields before its marks, in their order."""

    magic: bytes
    version: int
    size: int
    ncalls: int
    mpi: int
    rank: int
    world_size: int
    world: int
    thread_level: int
    pid: int
    state: int
    source: int
    current: int
    start_ticks: int
    init: int
    init_tick: int
    host: bytes
    enter_tick: int
    last_tick: int
    mpi_ticks: int
    init_cpu: int
    iteration_seq: int
    latest_seq: int


@dataclass(frozen=True)
class _Latest:
    """The latest mark, with what turns ticks into time."""

    mark: Mark
    tick: int
    ns_per_tick: float

    def seconds(self, tick: int) -> float:
        """The moment of a tick on CLOCK_MONOTONIC."""
        return self.mark.stamp + (tick - self.tick) * self.ns_per_tick * 1e-9


def read_page(path: str | os.PathLike[str]) -> RankPage:
    """One rank's page, live or left behind; raises PageError with the reason, NotYet if empty."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise PageError(f"{path}: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise PageError(f"{path}: is not a file")
        data = _snapshot(fd, path)
    except OSError as error:
        raise PageError(f"{path}: {error.strerror}") from error
    finally:
        os.close(fd)
    return parse(data, path)


@dataclass(frozen=True)
class Marks:
    """The few fields of a page that a sample needs, of a process in whatever pid namespace."""

    rank: int
    world_size: int
    world: int
    init_s: float
    source: int
    boundary: Mark
    latest: Mark
    waits: Waits

    @property
    def stamp(self) -> float:
        """When it was last heard of."""
        return self.latest.stamp

    @property
    def counts(self) -> bool:
        """Whether there are iterations."""
        return self.source != 0

    @property
    def beat(self) -> int:
        """The call that a rhythm was taken from, -1 where that is not what counts; or OWN."""
        return max(self.source - RHYTHM, -1)


def count_alike(beats: Sequence[int], counts: Sequence[int]) -> bool:
    """Whether ranks with these beats, -1 for none, and counts do count the same."""
    if len(set(beats)) > 1:
        return False
    return beats[0] != OWN or max(counts) - min(counts) <= 2 + max(counts) * APART


def worked(useful: float, cpu: float, useful_now: float, cpu_now: float) -> float:
    """Seconds outside MPI by now, without those since the first two in which a rank slept.

    `cpu_now` has besides CPU time what it waited for a core meanwhile, as far as that is known.
    """
    return min(useful_now, useful + max(0.0, cpu_now - cpu))


def read_marks(fd: int, path: object = "page") -> Marks:
    """The marks of a page that is open; raises PageError, NotYet if it is empty."""
    try:
        data = _snapshot(fd, path)
        head = _head(data)
        boundary = _mark(data, 1 + head.iteration_seq % 2, head)
        latest = _mark(data, 3 + head.latest_seq % 2, head)
    except OSError as error:
        raise PageError(f"{path}: {error.strerror}") from error
    init = head.init * 1e-9
    return Marks(
        head.rank, head.world_size, head.world, init, head.source, boundary.mark, latest.mark,
        _waits(data),
    )  # fmt: skip


def _snapshot(fd: int, path: object) -> bytes:
    """The file's bytes, taken while neither pair of marks changed."""
    for _ in range(1000):
        data = os.pread(fd, SIZE + 1, 0)
        if len(data) < HEAD.size:
            break
        again = os.pread(fd, SEQUENCES.size, SEQUENCES_AT)
        if again == data[SEQUENCES_AT : SEQUENCES_AT + SEQUENCES.size]:
            break
    else:
        raise PageError(f"{path}: changes faster than it can be read")
    return data


def parse(data: bytes, path: object = "page") -> RankPage:
    """A page from its bytes; `path` is for the message of the PageError."""
    try:
        return _parse(data)
    except PageError as error:
        raise type(error)(f"{path}: {error}") from None


def _parse(data: bytes) -> RankPage:
    head = _head(data)
    first, *marks = (_mark(data, i, head) for i in range(5))
    boundary = marks[head.iteration_seq % 2].mark
    latest = marks[2 + head.latest_seq % 2]
    if not (math.isfinite(latest.ns_per_tick) and 1e-3 < latest.ns_per_tick < 1e6):
        raise PageError(f"{latest.ns_per_tick} nanoseconds per tick is not possible")
    alive = processes.alive(head.pid, head.start_ticks)
    state, end, inside = _now(head, latest, alive)
    elapsed = max(end - head.init * 1e-9, 0.0)
    inside = min(max(inside, 0.0), elapsed)
    newest = max(latest.mark, boundary, key=lambda mark: mark.stamp)
    return RankPage(
        rank=head.rank,
        world_size=head.world_size,
        world=head.world,
        pid=head.pid,
        start_ticks=head.start_ticks,
        host=head.host.split(b"\0")[0].decode("ascii", "replace"),
        mpi=MPIS[head.mpi],
        state=state,
        alive=alive,
        init_s=head.init * 1e-9,
        stamp=end,
        elapsed_s=elapsed,
        useful_s=elapsed - inside,
        mpi_s=inside,
        cpu_s=_cpu(head, newest.cpu_s) if alive and head.state == 1 else newest.cpu_s,
        calls=_calls(data, head.ncalls, latest.ns_per_tick),
        iterations=boundary.iterations,
        iteration_source=SOURCES[head.source],
        iter_stamp=boundary.stamp,
        iter_cpu_s=boundary.cpu_s,
        iter_useful_s=boundary.useful_s,
        iter_mpi_s=boundary.mpi_s,
        peak_rss=newest.peak_rss,
        first=first.mark if head.source else None,
        beat=max(head.source - RHYTHM, -1),
        waits=_waits(data),
    )


def _head(data: bytes) -> _Head:
    if len(data) in (0, SIZE) and not any(data[:8]):  # just made, or just sized
        raise NotYet("is not filled in yet")
    if data[:8] != MAGIC:
        raise PageError("is not a page of a rank")
    if len(data) < HEAD.size:
        raise PageError(f"ends after {len(data)} bytes, {SIZE} would be right")
    head = _Head(*HEAD.unpack_from(data))
    if head.version != VERSION:
        raise PageError(f"has version {head.version}, this program reads {VERSION}")
    if head.size != SIZE or len(data) != SIZE:
        raise PageError(f"has {len(data)} bytes and says {head.size}, {SIZE} would be right")
    for what, right in (
        ("MPI", head.mpi in MPIS),
        ("state", head.state in STATES),
        ("iteration source", head.source in SOURCES),
        ("number of calls", head.ncalls <= CALLS_MAX),
        ("current call", head.current <= head.ncalls),
        ("rank", head.rank < head.world_size <= 2**31),
        ("pid", 0 < head.pid < 2**31),
        ("time of MPI_Init", 0 < head.init < CENTURY),
    ):
        if not right:
            raise PageError(f"is damaged: impossible {what}")
    return head


def _mark(data: bytes, index: int, head: _Head) -> _Latest:
    values = MARK.unpack_from(data, MARKS_AT + index * MARK.size)
    iterations, stamp, tick, cpu, useful, inside, peak_rss, ns_per_tick = values
    used = stamp != 0
    if max(stamp, cpu, useful, inside) > CENTURY or (used and stamp < head.init):
        raise PageError("is damaged: impossible times in a mark")
    if iterations > 2**53 or peak_rss > 2**60:
        raise PageError("is damaged: impossible counts in a mark")
    mark = Mark(iterations, stamp * 1e-9, cpu * 1e-9, useful * 1e-9, inside * 1e-9, peak_rss)
    return _Latest(mark, tick, ns_per_tick)


def _waits(data: bytes) -> Waits:
    voluntary, involuntary, queued = WAITS.unpack_from(data, HEAD.size)
    known = queued != _NO_QUEUE
    if max(voluntary, involuntary) > 2**53 or (known and queued > CENTURY):
        raise PageError("is damaged: impossible counts of waits")
    return Waits(voluntary, involuntary, queued * 1e-9 if known else None)


def _calls(data: bytes, ncalls: int, ns_per_tick: float) -> dict[str, tuple[int, float]]:
    calls = {}
    for i in range(ncalls):
        count, ticks = CALL.unpack_from(data, CALLS_AT + i * CALL.size)
        if not count:
            continue  # most of them: a page is read several times a second
        at = NAMES_AT + i * NAME_MAX
        name = data[at : at + NAME_MAX].split(b"\0")[0].decode("ascii", "replace")
        if not re.fullmatch(r"MPI_[A-Z][A-Za-z_]*", name):
            raise PageError(f"is damaged: call {i} has no name")
        calls[name] = (count, ticks * ns_per_tick * 1e-9)
    return calls


def _now(head: _Head, latest: _Latest, alive: bool) -> tuple[str, float, float]:
    """Its state, the moment that its values are of, and the seconds inside MPI until then."""
    if STATES[head.state] != "running":
        return STATES[head.state], latest.mark.stamp, latest.mark.mpi_s
    # A rank may be seen between two stores; a call that has been left is over.
    in_mpi = head.enter_tick > head.last_tick
    inside = head.mpi_ticks * latest.ns_per_tick * 1e-9
    if alive:
        end = time.monotonic()
        if in_mpi:
            inside += max(end - latest.seconds(head.enter_tick), 0.0)
    else:
        end = max(latest.seconds(max(head.enter_tick, head.last_tick)), latest.mark.stamp)
    return ("in_mpi" if in_mpi else "running"), end, inside


def _cpu(head: _Head, known: float) -> float:
    """CPU seconds of a live process, at least what is known of it."""
    try:
        # How Linux names the CPU clock of another process: clock_getcpuclockid(3).
        return max(known, time.clock_gettime((~head.pid << 3) | 2) - head.init_cpu * 1e-9)
    except OSError:
        return known


def read_pages(directory: str | os.PathLike[str], without: Container[str] = ()) -> list[RankPage]:
    """All ranks of the program that runs or ran last, by world and rank.

    Left out are those of other programs, see `of_last_program`, and rhythms in a world whose ranks
    do not count alike; and `without`, see `read_all`. Raises PageError as that does.
    """
    return of_each_world(read_all(directory, without))


def of_each_world(pages: Iterable[RankPage]) -> list[RankPage]:
    """What `read_pages` has of all pages."""
    worlds = groupby(sorted(pages, key=lambda page: page.world), lambda page: page.world)
    return [page for _, world in worlds for page in _sure(of_last_program(world))]


def read_all(directory: str | os.PathLike[str], without: Container[str] = ()) -> list[RankPage]:
    """The pages of all programs, but those that are not filled in yet, or go meanwhile.

    Files whose names are in `without` are left out.

    Raises PageError for a damaged page or a directory that cannot be read.
    """
    pages = []
    try:
        names = os.listdir(directory)
    except OSError as error:
        raise PageError(f"{directory}: {error.strerror}") from error
    for name in names:
        if name in without or not re.fullmatch(r"rank\.\d+\.\d+", name):
            continue
        path = Path(directory, name)
        try:
            pages.append(read_page(path))
        except NotYet:
            continue
        except PageError:
            if os.path.lexists(path):
                raise
    return pages


Page = TypeVar("Page", RankPage, Marks)


def of_last_program(pages: Iterable[Page]) -> list[Page]:
    """Of the pages of one world those of the program that began last, by rank.

    Or of one that had not ended by then, with more ranks, or as many if it began before: one of
    these has started a tool.
    """
    known: dict[tuple[int, int], Page] = {}
    for page in sorted(pages, key=lambda page: page.init_s):
        before = known.setdefault((page.world_size, page.rank), page)
        if before.stamp < page.init_s:
            known[page.world_size, page.rank] = page
    start = max((page.init_s for page in known.values()), default=0.0)
    goes_on = [page for page in known.values() if page.stamp >= start or page.init_s == start]
    size = max((page.world_size for page in goes_on), default=0)
    return [page for key, page in sorted(known.items(), key=lambda item: item[0]) if key[0] == size]


def _sure(pages: Iterable[RankPage]) -> list[RankPage]:
    """The pages of one world; those whose rhythm tells nothing as if they had none."""
    world = list(pages)
    if count_alike([page.beat for page in world], [page.iterations for page in world]):
        return world
    return [
        replace(page, iterations=0, iteration_source="none", first=None, beat=-1)
        if page.beat >= 0
        else page
        for page in world
    ]
