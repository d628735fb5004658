# SPDX-License-Identifier: LGPL-3.0-or-later
"""One slice as the module knows it: the state of its life, and what is left of it at its end. Pure.

Inputs: what happened to it, one method each. Outputs: its state, and what users see of it; and of
all slices how many are in a state, and which have changed. Invariants: only the methods change the
state; a slice that is to end, or that the user cancelled, stays so whatever its agent says; what is
asked for at each event costs the same with a thousand slices as with one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
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
class Tally:
    """How many slices are in each state, and the numbers of those that have changed."""

    states: Counter[SliceState] = field(default_factory=Counter)
    changed: set[int] = field(default_factory=set)


@dataclass
class Slice:
    """One slice. `rank` is its broker's, or -1 before its agent came; `tally` is of all slices."""

    number: int
    job: int = 0
    state: SliceState = SliceState.SUBMITTED
    left: Left = Left.ALL
    agent: Key | None = None
    node: str = ""
    cpus: str = ""
    host: str = ""
    reason: str = ""
    doubt: str = ""  # why it is not known whether all that ran there has ended
    wanted_node: str = ""  # the name that its node shall have; empty: one is found
    rank: int = -1
    tally: Tally = field(default_factory=Tally, repr=False, compare=False)

    def __post_init__(self) -> None:
        """It counts from now on."""
        self.tally.states[self.state] += 1
        self.tally.changed.add(self.number)

    def _become(self, state: SliceState) -> None:
        self.tally.states[self.state] -= 1
        self.tally.states[state] += 1
        self.tally.changed.add(self.number)
        self.state = state

    @property
    def node_failed(self) -> bool:
        """Whether Flux lost its node: the scheduler, told last, may just have given it out anew."""
        return "node failure" in self.reason.replace("-", " ")

    # --- Its life ---

    def submitted(self, job: int) -> None:
        """Flux took its job."""
        self.job = job
        self.tally.changed.add(self.number)

    def attached(self, agent: Key, host: str, rank: int) -> None:
        """Its agent came."""
        self.agent, self.host, self.rank = agent, host, rank
        self._become(self.state if self.state in _FINAL else SliceState.STARTING)

    def became_ready(self, node: str, cpus: str) -> None:
        """Its node is ready in Kubernetes."""
        self.node, self.cpus = node, cpus
        self._become(self.state if self.state in _FINAL else SliceState.READY)

    def agent_lost(self) -> None:
        """Its agent is gone; the end of its job follows."""
        self.agent = None
        if self.state not in _FINAL:
            self._become(SliceState.LOST if self.state.was_ready else SliceState.START_LOST)

    def cancelled(self) -> None:
        """The user cancelled its job."""
        if self.state is not SliceState.ENDING:
            self._become(SliceState.CANCELLED)

    def told_to_end(self) -> None:
        """It is no longer wanted."""
        self._become(SliceState.ENDING)

    def recalled(self, kept: KeptSlice, *, job_runs: bool) -> None:
        """What an earlier module knew of it, unless its agent has told this one already."""
        if self.agent is not None:
            return
        self.node, self.rank = kept.node, kept.rank
        if kept.state in _FINAL:
            self._become(kept.state)
        elif kept.state.was_ready:
            self._become(SliceState.EXPECTED if job_runs else SliceState.LOST)
        else:
            self._become(SliceState.SUBMITTED if job_runs else SliceState.START_LOST)

    # --- Its end ---

    @property
    def machine_clean(self) -> bool:
        """Whether nothing of it is left on its machine, or nobody can say more."""
        return self.left in (Left.JOB, Left.NOTHING)

    def sweep_begins(self) -> bool:
        """Its machine is to be swept in its agent's stead; False if it is being, or is clean."""
        before, self.left = self.left, _SWEPT.get(self.left, self.left)
        return self.left is not before

    def machine_is_clean(self, doubt: str = "") -> None:
        """Its agent removed all, or a sweep did, or nobody can say so: the `doubt`."""
        if not self.machine_clean:
            self.doubt = doubt
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


class Slices(dict[int, Slice]):
    """The slices of an instance by their numbers, which are ever higher."""

    def __init__(self) -> None:
        super().__init__()
        self._tally = Tally()

    def add(self, number: int, job: int = 0) -> Slice:
        """A slice that is new here."""
        self[number] = Slice(number, job, tally=self._tally)
        return self[number]

    def remove(self, number: int) -> None:
        """Nothing of a slice is left."""
        self._tally.states[self.pop(number).state] -= 1
        self._tally.changed.add(number)

    def count(self, state: SliceState) -> int:
        """How many are in this state."""
        return self._tally.states[state]

    def take_changed(self) -> tuple[tuple[KeptSlice, ...], tuple[int, ...]]:
        """What is to be kept of slices that changed since this was asked last, and who is gone.

        Of one without a job nothing is kept.
        """
        numbers, self._tally.changed = sorted(self._tally.changed), set()
        kept = tuple(self[number].kept() for number in numbers if number in self)
        gone = tuple(number for number in numbers if number not in self)
        return tuple(one for one in kept if one.job), gone
