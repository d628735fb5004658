# SPDX-License-Identifier: LGPL-3.0-or-later
"""One simulation of the local executor: its state, its supervisor, and what sets its shares.

Inputs: shares, rank pages, the supervisor's messages. Outputs: control group weights, the control
page, a simulation that is suspended, words to the supervisor. Invariants: the state changes by
the six methods of `Job` that say so, and by nothing else; every call may be repeated.
"""

from __future__ import annotations

import contextlib
import enum
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dovetail.core import protocol
from dovetail.core.contention import Throttling
from dovetail.core.protocol import Cause, Result
from dovetail.host import cgroups, processes
from dovetail.host.line_splitter import LineSplitter
from dovetail.host.memory import KernelKills
from dovetail.mpi import page
from dovetail.mpi.control_page import Control

_AGAIN = 1.0  # seconds between two looks for what else is to be suspended by signals


class JobState(enum.Enum):
    """Where a simulation stands."""

    STARTING = "starting"  # its supervisor copies the case and runs the prepare steps
    RUNNING = "running"  # its command runs
    HALTING = "halting"  # its command runs, and was asked to stop at a checkpoint
    STOPPING = "stopping"  # it was told to end, and has its grace
    ENDED = "ended"  # it has a result; a last sample may be taken
    RELEASED = "released"  # its supervisor ends and removes what is left


@dataclass
class Job:
    """One simulation that has been launched and not yet reported as finished.

    From STARTING it goes by `begun` to RUNNING, from there by `halt` to HALTING, from all three by
    `stop` to STOPPING, from all four by `end` to ENDED, and from any by `release` to RELEASED,
    which it does not leave.
    """

    spec: protocol.Spec
    share: protocol.Share
    directory: str
    temporary: str
    group: cgroups.Group
    parts: list[cgroups.Group] = field(default_factory=list)
    moved: set[int] = field(default_factory=set)
    control: Control | None = None
    supervisor: subprocess.Popen[bytes] | None = None
    splitter: LineSplitter = field(default_factory=LineSplitter)
    last_words: bytes = b""  # of a supervisor that failed: the last line that is no message
    state: JobState = JobState.STARTING
    why_stopped: str = ""
    stop_cause: Cause = Cause.CANCELLED
    deadline: float = 0.0  # CLOCK_MONOTONIC; after it the supervisor is taken for dead; 0: none
    signalled: bool = False  # suspended by signals, as there is no control group for it
    signal_at: float = 0.0  # CLOCK_MONOTONIC; when that is done again
    sample: protocol.Ranks | None = None
    began: bool = False  # its command
    begun_at: float = 0.0  # when that was, on the run's clock
    prepared: float = 0.0  # CPU seconds that its control group had used before
    peak_memory: int = 0  # of its control group, bytes, as long as it has no rank's page
    result: Result | None = None
    removed: bool = False  # all of it, and its supervisor can have another
    kills: KernelKills = field(default_factory=KernelKills)  # of its supervisor too
    spawned: set[str] = field(default_factory=set)  # see sampling.here
    awaited: tuple[float, ...] = ()  # see sampling.of_pages
    awaited_then: tuple[float, ...] = ()  # what is counted there, as its ranks fell quiet
    awaited_at: float = 0.0  # when that is looked at next, on the run's clock
    count_at: float = 0.0  # when what keeps it from its cores is looked at next, on the run's clock
    throttled: Mapping[str, Throttling] = field(default_factory=dict)  # as its command began
    pressure: float | None = None  # the same

    # --- State ---

    @property
    def wanted(self) -> bool:
        """Whether it runs or will: it can get new shares, and can be stopped."""
        return self.state in (JobState.STARTING, JobState.RUNNING, JobState.HALTING)

    @property
    def publishes(self) -> bool:
        """Whether there may be something new in its ranks' pages."""
        return self.began and self.state is not JobState.RELEASED

    @property
    def overdue(self) -> bool:
        """Whether the supervisor has had all the time that it may take."""
        return bool(self.deadline) and time.monotonic() > self.deadline

    def begun(self) -> None:
        """Its command has been started; one that is to be suspended is so from now on."""
        self.began = True
        if self.state is JobState.STARTING:
            self.state = JobState.RUNNING
            if self.share.suspended:
                self.suspend(True)

    def halt(self) -> None:
        """Have its command stop at a checkpoint, for which it goes on if it is suspended."""
        if self.state is not JobState.RUNNING:
            return
        self.state = JobState.HALTING
        self.share = replace(self.share, suspended=False)
        with contextlib.suppress(OSError):
            self.suspend(False)
        self.tell(b"checkpoint\n")

    def stop(self, why: str, cause: Cause, limit: float) -> None:
        """Have the supervisor end it, in at most `limit` seconds."""
        if not self.wanted:
            return
        self.state, self.why_stopped, self.stop_cause = JobState.STOPPING, why, cause
        self.deadline = time.monotonic() + limit
        with contextlib.suppress(OSError):
            self.suspend(False)
        with contextlib.suppress(OSError):
            self.tell(b"stop\n")

    def end(self, result: Result) -> None:
        """It has ended, or could not be started."""
        self.result = result
        if self.state is not JobState.RELEASED:
            self.state = JobState.ENDED

    def release(self, limit: float, why: str = "") -> None:
        """Have the supervisor remove all, and end what still runs; `why` it is not waited for.

        It can have another simulation then, unless it had something to end.
        """
        if self.state is JobState.RELEASED:
            return
        if self.wanted:
            self.why_stopped, self.stop_cause = why, Cause.INTERRUPTED
        over, self.state = self.state is JobState.ENDED, JobState.RELEASED
        self.deadline = time.monotonic() + limit
        if over:
            self.tell(b"release\n")
        elif self.supervisor is not None and self.supervisor.stdin is not None:
            self.supervisor.stdin.close()

    # --- Its supervisor ---

    def tell(self, words: bytes) -> None:
        """Say something to the supervisor."""
        if self.supervisor is not None and self.supervisor.stdin is not None:
            rest = memoryview(words)
            with contextlib.suppress(BrokenPipeError):  # it has gone, which its output tells
                while rest:  # a signal that is handled ends one write early
                    rest = rest[self.supervisor.stdin.write(rest) :]

    # --- Its shares ---

    def make_groups(self) -> None:
        """The simulation's group, and below it one per rank group if it is divided."""
        with contextlib.suppress(OSError):  # an earlier launch's, if processes of it ended late
            self.group.remove()
        self.group.create()
        size = self.spec.ranks_per_pod
        if size and self.group.weight:
            self.group.share_out()
            self.group.child("job").create()
            for index in range(0, self.spec.ranks, size):
                self.parts.append(self.group.child(f"r{index}", freezable=False).create())

    def apply(self, share: protocol.Share) -> None:
        """Set weights, wait policy and suspension; OSError where one is refused."""
        size = self.spec.ranks_per_pod
        self.group.set_weight(sum(share.requests))
        for index, part in enumerate(self.parts):
            part.set_weight(sum(share.requests[index * size : (index + 1) * size]))
        if self.control is not None:
            self.control.set(share.wait)
        self.suspend(share.suspended)

    def suspend(self, suspended: bool) -> None:
        """Suspend it, or let it go on."""
        if self.group.control:
            self.group.freeze(suspended)
        elif self.supervisor is not None and (suspended or self.signalled):
            processes.pause_all(f"DOVETAIL_DIR={self.directory}", self.supervisor.pid, suspended)
            self.signalled = suspended
            self.signal_at = time.monotonic() + _AGAIN

    def keep_suspended(self) -> None:
        """Now and then stop what its supervisor, which is not stopped, has started since."""
        if self.signalled and self.wanted and time.monotonic() >= self.signal_at:
            self.suspend(True)

    def place_ranks(self, pages: Sequence[page.RankPage]) -> None:
        """Move ranks into their rank groups as they appear."""
        for one in pages if self.parts else ():
            if one.pid not in self.moved and processes.alive(one.pid, one.start_ticks):
                with contextlib.suppress(OSError):
                    self.parts[one.rank // self.spec.ranks_per_pod].add(one.pid)
                    self.moved.add(one.pid)
