# SPDX-License-Identifier: LGPL-3.0-or-later
"""Why a simulation ended, or will not start, as a value.

Inputs and outputs: none. Whoever decides about a simulation that has ended looks at its cause,
never at the sentence beside it, which is for the user. In a file of its own because the
supervisor of a simulation imports it, and starts in milliseconds.
"""

from __future__ import annotations

from enum import Enum

NOTHING_LEFT = 3
"""Exit code of `halted` (see `Spec`) where all is done; a Python program that fails has others."""
NOT_NOW = 75
"""Exit code of `go_on` (see `Spec`) where there is something to go on from, but it cannot be made
ready, or not on these ranks; EX_TEMPFAIL of sysexits.h."""


class Cause(str, Enum):
    """A cause; its value is what stands in the event log and in messages."""

    DONE = "done"
    """Its own command ended well."""
    FAILED = "failed"
    """Its own command ended otherwise, by itself."""
    LAUNCH_FAILED = "launch failed"
    """Its own command never ran: its case, a prepare step or its pods could not be had."""
    SUPERVISOR_LOST = "supervisor lost"
    """The process that runs it on its node ended before it."""
    NODE_LOST = "node lost"
    """A node that it ran on is gone."""
    POD_LOST = "pod lost"
    """A pod that it ran in is gone, by nobody's wish in the run."""
    CANCELLED = "cancelled"
    """The user wanted this one to end."""
    INTERRUPTED = "interrupted"
    """The user, or what the run lives in, wanted the whole run to end."""
    HUNG = "hung"
    """The controller ended it, because it made no progress."""
    SHORT_OF_MEMORY = "short of memory"
    """The controller ended it for its memory, to run it again."""
    TAKEN_BACK = "taken back"
    """The controller ended it because it did not pay beside the others, to run it again."""
    CHECKPOINTED = "checkpointed"
    """It stopped at a checkpoint, as it was asked to, and can go on from there."""
    TOO_LARGE = "too large"
    """It needs more memory than there is; it never started."""
    NO_NODE = "no node left"
    """Nothing is left to run it on; it never started."""

    @property
    def lost(self) -> bool:
        """Whether what it ran on is gone: it is not the simulation's fault."""
        return self in (Cause.NODE_LOST, Cause.POD_LOST)

    @property
    def stopped(self) -> bool:
        """Whether the run ended it, for the user or for others of the queue."""
        return self in _STOPPED


_STOPPED = frozenset(
    (
        Cause.CANCELLED,
        Cause.INTERRUPTED,
        Cause.HUNG,
        Cause.SHORT_OF_MEMORY,
        Cause.TAKEN_BACK,
        Cause.CHECKPOINTED,
    )
)
