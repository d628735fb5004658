# SPDX-License-Identifier: LGPL-3.0-or-later
"""A run that goes on elsewhere, as its event log tells it so far.

Input: a run's output directory. Outputs: the controller as it is there, and what the ranks did of
late. Invariants: nothing is written, and nobody needs to answer; what the log does not tell is
None.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from dovetail.controller.controller import Controller
from dovetail.controller.settings import Settings
from dovetail.core import eventlog, protocol
from dovetail.core.errors import BadInput
from dovetail.core.units import printable

LATE = 5.0
"""Seconds of the run over which ranks are shown: at least, if their samples are further apart."""
SILENT = 10.0
"""Seconds without a new line after which the run may have died: it writes one each second."""


@dataclass(frozen=True)
class RankShare:
    """One rank of late, as parts of one; None: unknown.

    `duty` outside MPI; `cpu` of a core; `lost`, at least, outside MPI without a core: others had
    it, a limit throttled it, or it slept or waited for a disk; `queued` in the kernel's queue for
    a core.
    """

    duty: float | None
    cpu: float | None
    lost: float | None
    queued: float | None


class Follower:
    """Reads what is new in the log at each `look`; raises BadInput where there is none."""

    def __init__(self, directory: Path, log: str) -> None:
        self.path = directory / log
        self.controller: Controller | None = None
        self.t = 0.0  # the run's own clock, seconds
        self.notes: deque[str] = deque(maxlen=4)
        self.grown = time.monotonic()  # when the log was seen to grow
        self._samples: dict[str, deque[tuple[float, protocol.Ranks]]] = {}
        self._counts: dict[str, deque[protocol.Contention]] = {}
        self._reader = eventlog.Reader(self.path)
        self._read = 0
        self.look()
        age = time.time() - self.path.stat().st_mtime
        self.grown -= max(0.0, age)

    @property
    def silent(self) -> float | None:
        """Seconds since the last line, if that is so long that the run may have died."""
        age = time.monotonic() - self.grown
        return age if age > SILENT and not self.over else None

    @property
    def over(self) -> bool:
        """Whether each simulation has come to an end."""
        return self.controller is not None and self.controller.finished

    def look(self) -> None:
        """Take in what was written since."""
        while self._look():
            pass

    def _look(self) -> bool:
        """Take in some of it; False where there is no more."""
        try:
            if not self.path.is_file() and self.path.exists():
                raise BadInput(f"{self.path}: not a file; give a run's output folder")
            with self.path.open("rb") as file:
                file.seek(self._read)
                data = file.read(eventlog.BLOCK) + file.readline()
            data = data[: data.rfind(b"\n") + 1]  # the run may take a part of a line back
        except OSError as error:
            raise BadInput(f"{self.path}: {error.strerror}; give a run's output folder") from None
        if not data:
            return False
        self._read += len(data)
        self.grown = time.monotonic()
        entries = self._reader.take(data)
        head = self._reader.head
        if head is None:
            return True
        if head.old:
            raise BadInput(f"{self.path}: of an earlier version; `dovetail report` reads it")
        if self.controller is None:
            try:
                settings = Settings.of(head.settings)
            except ValueError as error:  # of another version
                raise BadInput(f"{self.path}: line 1: {error}") from None
            self.controller = Controller(head.specs, head.capacity, settings)
        for entry in entries:
            self._take(self.controller, entry)
        return True

    def _take(self, controller: Controller, entry: eventlog.Entry) -> None:
        if isinstance(entry, protocol.Note):
            self.notes.append(printable(f"{self.t:7.1f} s  {entry.what:9} {entry.why}"))
        if isinstance(entry, protocol.Resize):
            for name, share in entry.shares.items():
                if share.suspended:  # or that time would count for its ranks as it goes on
                    self._samples.pop(name, None)
        if isinstance(entry, protocol.ACTIONS):
            return
        self.t = getattr(entry, "t", self.t)
        if isinstance(entry, eventlog.Resumed):
            controller.resume(entry.t, entry.capacity, entry.alive)
            return
        controller.handle(entry)
        if isinstance(entry, protocol.Sampled):
            self._keep(entry)
        elif isinstance(entry, protocol.Counted):
            self._counts.setdefault(entry.name, deque(maxlen=2)).append(entry.contention)
        elif isinstance(entry, (protocol.Started, protocol.Finished)):
            self._samples.pop(entry.name, None)
            self._counts.pop(entry.name, None)

    def _keep(self, sample: protocol.Sampled) -> None:
        """Remember the samples of the last seconds, and the one before these."""
        kept = self._samples.setdefault(sample.name, deque())
        if kept and len(kept[-1][1].cpu) != len(sample.ranks.cpu):
            kept.clear()
        kept.append((sample.t, sample.ranks))
        while len(kept) > 2 and kept[1][0] <= sample.t - LATE:
            kept.popleft()

    def contention(self, name: str) -> protocol.Contention:
        """What kept its ranks from their cores between the last two looks at that."""
        kept = self._counts.get(name)
        return kept[-1].since(kept[0]) if kept and len(kept) > 1 else protocol.Contention()

    def ranks(self, name: str) -> list[RankShare]:
        """What each rank of a simulation did of late; empty while nothing is known."""
        kept = self._samples.get(name)
        if not kept:
            return []
        (_, old), (_, new) = kept[0], kept[-1]
        waiting = self.contention(name).waiting
        found = []
        for rank in range(len(new.cpu)):
            useful = new.useful[rank] - old.useful[rank]
            wall = useful + new.mpi[rank] - old.mpi[rank]
            cpu = new.cpu[rank] - old.cpu[rank]
            parts = useful, cpu, max(0.0, useful - cpu)
            duty, used, lost = (part / wall if wall > 0.0 else None for part in parts)
            queued = waiting[rank] if rank < len(waiting) else None
            found.append(RankShare(duty, used, lost, queued))
        return found
