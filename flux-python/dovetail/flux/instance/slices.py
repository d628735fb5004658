# SPDX-License-Identifier: LGPL-3.0-or-later
"""One slice as the module knows it: the state of its life, and what is left of it at its end. Pure.

Inputs: what happened to it, one method each. Outputs: its state, and what users see of it.
Invariants: only the methods change the state; a slice that is to end, or that the user cancelled,
stays so whatever its agent says.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from dovetail.flux.instance.effects import Key

MOST = 10000  # slices, or cores of one; more is a slip of the finger


class SliceState(Enum):
    """Where a slice is in its life."""

    SUBMITTED = "submitted"
    """Its agent has not come yet."""
    EXPECTED = "expected"
    """It was ready before the module was loaded anew; its agent has not come to this one yet."""
    STARTING = "starting"
    READY = "ready"
    START_LOST = "start lost"
    """Its agent is gone, and it had not been ready."""
    LOST = "lost"
    """Its agent is gone, and it had been ready."""
    CANCELLED = "cancelled"
    """The user cancelled its job."""
    ENDING = "ending"
    """It was told to end."""

    @property
    def shown(self) -> str:
        """For users, who see what there is and not what there was."""
        return _SHOWN.get(self, self.value)

    @property
    def was_ready(self) -> bool:
        """Whether it is, or was, part of Kubernetes: then it is replaced if it is lost."""
        return self in (SliceState.EXPECTED, SliceState.READY, SliceState.LOST)


_SHOWN = {
    SliceState.EXPECTED: "submitted",
    SliceState.START_LOST: "lost",
    SliceState.CANCELLED: "lost",
}
_FINAL = (SliceState.CANCELLED, SliceState.ENDING)


class Left(Enum):
    """What is left of a slice; its machine is being swept where its agent could not do that."""

    ALL = "its job, and what it has on its machine"
    JOB_AND_SWEEP = "its job, and a sweep of its machine"
    JOB = "its job"
    MACHINE = "what it has on its machine"
    SWEEP = "a sweep of its machine"
    NOTHING = "nothing"


_SWEPT = {Left.ALL: Left.JOB_AND_SWEEP, Left.MACHINE: Left.SWEEP}
_CLEAN = {Left.ALL: Left.JOB, Left.JOB_AND_SWEEP: Left.JOB,
          Left.MACHINE: Left.NOTHING, Left.SWEEP: Left.NOTHING}  # fmt: skip
_JOB_OVER = {Left.ALL: Left.MACHINE, Left.JOB_AND_SWEEP: Left.SWEEP, Left.JOB: Left.NOTHING}


@dataclass(frozen=True)
class KeptSlice:
    """What the control slice keeps of a slice, for a module that comes after us."""

    number: int
    job: int
    state: SliceState
    node: str
    rank: int


@dataclass
class Slice:
    """One slice. `rank` is its broker's, or -1 before its agent came."""

    number: int
    job: int = 0
    state: SliceState = SliceState.SUBMITTED
    left: Left = Left.ALL
    agent: Key | None = None
    node: str = ""
    cpus: str = ""
    host: str = ""
    reason: str = ""
    wanted_node: str = ""  # the name that its node shall have; empty: one is found
    rank: int = -1

    # --- Its life ---

    def attached(self, agent: Key, host: str, rank: int) -> None:
        """Its agent came."""
        self.agent, self.host, self.rank = agent, host, rank
        if self.state not in _FINAL:
            self.state = SliceState.STARTING

    def became_ready(self, node: str, cpus: str) -> None:
        """Its node is ready in Kubernetes."""
        self.node, self.cpus = node, cpus
        if self.state not in _FINAL:
            self.state = SliceState.READY

    def agent_lost(self) -> None:
        """Its agent is gone; the end of its job follows."""
        self.agent = None
        if self.state not in _FINAL:
            self.state = SliceState.LOST if self.state.was_ready else SliceState.START_LOST

    def cancelled(self) -> None:
        """The user cancelled its job."""
        if self.state is not SliceState.ENDING:
            self.state = SliceState.CANCELLED

    def told_to_end(self) -> None:
        """It is no longer wanted."""
        self.state = SliceState.ENDING

    def recalled(self, kept: KeptSlice, *, job_runs: bool) -> None:
        """What an earlier module knew of it, unless its agent has told this one already."""
        if self.agent is not None:
            return
        self.node, self.rank = kept.node, kept.rank
        if kept.state in _FINAL:
            self.state = kept.state
        elif kept.state.was_ready:
            self.state = SliceState.EXPECTED if job_runs else SliceState.LOST
        else:
            self.state = SliceState.SUBMITTED if job_runs else SliceState.START_LOST

    # --- Its end ---

    @property
    def machine_clean(self) -> bool:
        """Whether nothing of it is left on its machine, or nobody can say more."""
        return self.left in (Left.JOB, Left.NOTHING)

    def sweep_begins(self) -> bool:
        """Its machine is to be swept in its agent's stead; False if it is being, or is clean."""
        before, self.left = self.left, _SWEPT.get(self.left, self.left)
        return self.left is not before

    def machine_is_clean(self) -> None:
        """Its agent removed all, or a sweep did, or it cannot be reached any more."""
        self.left = _CLEAN.get(self.left, self.left)

    def job_is_over(self) -> None:
        """Flux is done with its job, or would not take it."""
        self.left = _JOB_OVER.get(self.left, self.left)

    # --- For others ---

    def plain(self) -> dict[str, Any]:
        """For status."""
        role = "node" if self.number else "control"
        return {
            "number": self.number, "role": role, "job": self.job, "state": self.state.shown,
            "node": self.node, "cpus": self.cpus, "host": self.host, "rank": self.rank,
            "reason": self.reason,
        }  # fmt: skip

    def kept(self) -> KeptSlice:
        """For whoever comes after this module."""
        return KeptSlice(self.number, self.job, self.state, self.node, self.rank)

    def keep_reason(self, reason: str) -> None:
        """Keep the first reason for its end, which is the cause of the others."""
        self.reason = self.reason or reason

    def described(self) -> str:
        """Its state, for a sentence."""
        reason = f" ({self.reason})" if self.reason else ""
        return f"slice {self.number} is {self.state.shown}{reason}"
