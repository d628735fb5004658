# SPDX-License-Identifier: LGPL-3.0-or-later
"""One slice as the module knows it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dovetail.flux.instance.effects import Key

MOST = 10000  # slices, or cores of one; more is a slip of the finger


@dataclass
class Slice:
    """One slice: `state` is submitted, starting, ready, ending, or lost (its agent is gone)."""

    number: int
    job: int = 0
    state: str = "submitted"
    agent: Key | None = None
    node: str = ""
    cpus: str = ""
    host: str = ""
    reason: str = ""
    called: str = ""  # the name that its node shall have; empty: one is found
    rank: int = -1  # of its broker
    cancelled: bool = False  # by the user
    proven: bool = False  # it was ready once
    watched: bool = False  # its job is followed
    sweeping: bool = False  # its machine, in its agent's stead
    clean: bool = False  # its job is over
    confirmed: bool = False  # nothing of it is left on its machine

    def plain(self) -> dict[str, Any]:
        """For status."""
        role = "node" if self.number else "control"
        return {
            "number": self.number, "role": role, "job": self.job, "state": self.state,
            "node": self.node, "cpus": self.cpus, "host": self.host, "reason": self.reason,
        }  # fmt: skip

    def kept(self) -> dict[str, Any]:
        """For whoever comes after this module."""
        return {"number": self.number, "job": self.job, "state": self.state, "node": self.node,
                "rank": self.rank, "proven": self.proven}  # fmt: skip

    def because(self, reason: str) -> None:
        """Keep the first reason for its end, which is the cause of the others."""
        self.reason = self.reason or reason

    def said(self) -> str:
        """Its state, for a sentence."""
        return f"slice {self.number} is {self.state}" + (f" ({self.reason})" if self.reason else "")
