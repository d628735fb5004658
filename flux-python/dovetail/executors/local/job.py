# SPDX-License-Identifier: LGPL-3.0-or-later
"""One simulation of the local executor, and what sets its shares.

Inputs: shares, rank pages. Outputs: control group weights, the control page, a simulation that
is suspended. Invariant: every call may be repeated.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

from dovetail.core import protocol
from dovetail.host import cgroups, processes
from dovetail.mpi import page
from dovetail.mpi.control_page import Control


@dataclass
class Result:
    """How a simulation ended. `trouble` is what to know besides: an incomplete log, for one."""

    code: int
    reason: str = ""
    trouble: str = ""


@dataclass
class Job:
    """One simulation that has been launched and not yet reported as finished."""

    spec: protocol.Spec
    share: protocol.Share
    directory: str
    temporary: str
    group: cgroups.Group
    parts: list[cgroups.Group] = field(default_factory=list)
    moved: set[int] = field(default_factory=set)
    control: Control | None = None
    keeper: subprocess.Popen[bytes] | None = None
    heard: bytes = b""
    started: bool = False
    stopped: str = ""
    paused: bool = False
    let_go: bool = False
    overdue: float = 0.0  # CLOCK_MONOTONIC; after it the keeper is taken for dead
    sample: protocol.Ranks | None = None
    result: Result | None = None

    def make_groups(self) -> None:
        """The simulation's group, and below it one per rank group if it is divided."""
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
        elif self.keeper is not None and suspended != self.paused:
            processes.pause_all(f"DOVETAIL_DIR={self.directory}", self.keeper.pid, suspended)
            self.paused = suspended

    def place_ranks(self, pages: Sequence[page.RankPage]) -> None:
        """Move ranks into their rank groups as they appear."""
        for one in pages if self.parts else ():
            if one.pid not in self.moved and processes.alive(one.pid, one.start_ticks):
                with contextlib.suppress(OSError):
                    self.parts[one.rank // self.spec.ranks_per_pod].add(one.pid)
                    self.moved.add(one.pid)
