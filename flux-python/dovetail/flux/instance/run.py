# SPDX-License-Identifier: LGPL-3.0-or-later
"""One submitted plan as the module and the control slice know it: the state of its life. Pure.

Inputs: what happened to it, one method each. Outputs: its state, and what users see of it. It is
its own message, by which the control slice tells a module that was loaded anew.
Invariants: only the methods change the state; a run that has ended stays so.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class RunState(Enum):
    """Where a run is in its life."""

    PENDING = "waiting"
    RUNNING = "running"
    CANCELLING = "cancelling"
    """Its process is told to end, and has not yet."""
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def shown(self) -> str:
        """For users: what is to end runs until it has ended."""
        return "running" if self is RunState.CANCELLING else self.value

    @property
    def has_process(self) -> bool:
        """Whether a process of it runs."""
        return self in (RunState.RUNNING, RunState.CANCELLING)

    @property
    def ended(self) -> bool:
        """Whether nothing of it can follow."""
        return self in (RunState.DONE, RunState.FAILED, RunState.CANCELLED)


@dataclass
class Run:
    """One submitted plan; only the methods change its state."""

    number: int
    plan: str
    output: str
    cwd: str = "/"
    state: RunState = RunState.PENDING
    code: int = -1
    reason: str = ""
    reported: bool = False  # the summary in its directory is of this run

    def plain(self) -> dict[str, Any]:
        """For status and wait."""
        return {**vars(self), "state": self.state.shown}

    def start(self) -> None:
        """It is its turn."""
        self.state = RunState.RUNNING

    def end(self, code: int, reason: str, *, reported: bool = False) -> None:
        """Its process ended, and wrote its report, or could not."""
        if reported:
            self.report_written()
        if self.state.ended:  # as all did, before this was told
            return
        unwanted = self.state is RunState.CANCELLING
        self.state = RunState.CANCELLED if unwanted else RunState.FAILED
        self.code, self.reason = code, self.reason or reason
        if code == 0:
            self.state, self.reason = RunState.DONE, reason

    def report_written(self) -> None:
        """Its report is there, however it ended."""
        self.reported = True

    def cancel(self) -> None:
        """It is unwanted; a process of it must be told."""
        if self.state is RunState.PENDING:
            self.state, self.code = RunState.CANCELLED, 1
            self.reason = "cancelled before it started"
        elif self.state is RunState.RUNNING:
            self.state, self.reason = RunState.CANCELLING, "cancelled"

    def lose(self, reason: str) -> None:
        """Nothing can run any more."""
        if not self.state.ended:
            self.state, self.code, self.reason = RunState.FAILED, 1, reason
