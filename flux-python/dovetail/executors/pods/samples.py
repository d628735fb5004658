# SPDX-License-Identifier: LGPL-3.0-or-later
"""Reads the rank pages of one simulation on a node, again and again, and cheaply.

Input: the simulation's directory in the session. Output: what is new since the last look, in the
terms of `messages.Sample`. Invariant: a page that has not changed costs one read of 16 bytes, and a
directory that has not changed one stat.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from typing import Literal

from dovetail.mpi import page, sampling
from dovetail.mpi.time_lines import COUNT, FILE

_PAGE = re.compile(r"rank\.\d+\.\d+")
What = Literal["iterations", "quiet", None]
"""What is told of a page: iterations, that these are long over, or as it counts none just work."""
_SETTLED = 100_000_000  # nanoseconds; a directory's time is no finer than a clock tick


@dataclass
class _Open:
    """A page that is being read; `marks` is None until it is filled in."""

    fd: int
    sequences: bytes = b""
    marks: page.Marks | None = None
    what: What = None  # at the last look


class Reader:
    """The ranks of one simulation on this node."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._pages: dict[str, _Open] = {}
        self._spawned: set[str] = set()  # pages of worlds that ranks have spawned
        self._queued: dict[int, float] = {}  # of each rank, at its last iteration
        self._scanned = 0
        self._log = -1
        self._lines = b""
        self._has_lines = False

    def look(self) -> tuple[dict[str, list[float]], list[float]]:
        """What is new: values by rank, and what the log's lines tell; empty for nothing.

        Of several programs that a simulation runs those of one, see `page.of_last_program`.
        """
        self._scan()
        changed = set()
        for name, one in list(self._pages.items()):
            try:
                if not self._changed(one):
                    continue
                assert one.marks
                if one.marks.world == 0:
                    changed.add(one.marks.rank)
                else:  # there may be thousands
                    self._spawned.add(name)
                    self._drop(name)
            except (page.PageError, OSError) as error:
                if not isinstance(error, page.NotYet):
                    self._drop(name)
        own = self._own()
        found = {str(rank): self._values(own[rank]) for rank in changed if rank in own}
        return found, self._count()

    @property
    def counts(self) -> bool:
        """Whether iterations of ranks with pages are told, by these or by the log."""
        pages = self._pages.values()
        return any(self._has_lines or one.what is not None for one in pages)

    def waits(self) -> dict[str, list[float]]:
        """What kept each rank from its core, as in messages.Counts."""
        return {
            str(rank): [*sampling.waits(marks.waits, marks.stamp - marks.init_s)]
            for rank, marks in self._own(fresh=True).items()
        }

    def forget(self) -> None:
        """Take all for new at the next look: somebody else wants to know."""
        for one in self._pages.values():
            one.sequences = b""
        self._lines = b""

    def close(self) -> None:
        """Close all files."""
        for name in list(self._pages):
            self._drop(name)
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    def _own(self, fresh: bool = False) -> dict[int, page.Marks]:
        """The marks of the simulation's own ranks, as of now if there are other programs' too."""
        known = [(one, one.marks) for one in self._pages.values() if one.marks]
        places = {(marks.world_size, marks.rank) for _, marks in known}
        sizes = {size for size, _ in places}
        found = [marks for _, marks in known]
        if fresh or len(sizes) > 1 or len(places) < len(known):
            found = []
            for one, _ in known:
                with contextlib.suppress(page.PageError):
                    found.append(page.read_marks(one.fd))
        return {marks.rank: marks for marks in page.of_last_program(found)}

    def _scan(self) -> None:
        try:
            stamp = os.stat(self._directory).st_mtime_ns
            if stamp == self._scanned:
                return
            names = {name for name in os.listdir(self._directory) if _PAGE.fullmatch(name)}
        except OSError:
            return
        self._scanned = stamp if time.time_ns() - stamp > _SETTLED else 0
        for name in self._pages.keys() - names:
            self._drop(name)
        self._spawned &= names
        for name in names - self._pages.keys() - self._spawned:
            with contextlib.suppress(OSError):
                path = os.path.join(self._directory, name)
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
                self._pages[name] = _Open(os.open(path, flags))

    def _drop(self, name: str) -> None:
        os.close(self._pages.pop(name).fd)

    def _changed(self, one: _Open) -> bool:
        """Whether a page says something new; then its marks are read."""
        now = os.pread(one.fd, page.SEQUENCES.size, page.SEQUENCES_AT)
        if one.marks is not None and self._what(one.marks) == one.what:
            if now == one.sequences:
                return False
            if one.what == "iterations" and now[:8] == one.sequences[:8]:
                one.sequences = now  # a mark between two iterations
                return False
        one.marks = page.read_marks(one.fd)
        one.what = self._what(one.marks)
        one.sequences = now
        return True

    def _what(self, marks: page.Marks) -> What:
        """Iterations, if they are to be believed: a rhythm's not if the log tells better."""
        quiet = time.monotonic() - marks.boundary.stamp >= page.QUIET
        if not marks.counts or (marks.beat >= 0 and (self._has_lines or quiet)):
            return None
        return "quiet" if quiet else "iterations"

    def _values(self, marks: page.Marks) -> list[float]:
        """As in messages.Sample."""
        what, last, now = self._what(marks), marks.boundary, marks.latest
        if what is None:
            return [-1, now.stamp, now.cpu_s, now.useful_s, now.mpi_s, now.peak_rss, -1]
        queued = marks.waits.queued_s or 0.0
        if what == "iterations":
            now, self._queued[marks.rank] = last, queued
        waited = queued - self._queued.setdefault(marks.rank, queued)
        useful = page.worked(last.useful_s, last.cpu_s, now.useful_s, now.cpu_s + waited)
        work = now.cpu_s, useful, now.mpi_s, now.peak_rss
        return [last.iterations, last.stamp, *work, marks.beat]

    def _count(self) -> list[float]:
        with contextlib.suppress(OSError):
            if self._log < 0:
                path = os.path.join(self._directory, FILE)
                self._log = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            now = os.pread(self._log, COUNT.size, 0)
            self._has_lines = self._has_lines or len(now) == COUNT.size
            if len(now) == COUNT.size and now != self._lines:
                self._lines = now
                return list(COUNT.unpack(now))
        return []
