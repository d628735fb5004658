# SPDX-License-Identifier: LGPL-3.0-or-later
"""Simulations as Flux sees them: each is a job that follows its pods. Pure.

The jobs are submitted by the control slice's agent, once for each launch that does not go on from
a checkpoint at which the one before it stopped. Invariant: whoever
follows a simulation is told its end, however that comes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from dovetail.core.causes import Cause
from dovetail.flux.instance.effects import Answer, Effect, Key

CANCEL, LOST = "cancel", "dovetail"  # types of exceptions


@dataclass
class Simulation:
    """One launch of a simulation; `code` and `cause` are None until it has ended.

    `cause` stays None where nobody said how it ended. It is its own message, by which the control
    slice tells of it.
    """

    launch: str
    run: int
    name: str
    log: str
    code: int | None = None
    reason: str = ""
    cause: Cause | None = None

    @property
    def exception(self) -> str:
        """The type of its job's exception; empty where its program ended by itself."""
        if self.code is None:
            return ""
        if self.cause is None or self.cause.lost:
            return LOST
        return CANCEL if self.cause.stopped else ""

    def told(self) -> dict[str, Any]:
        """For whoever follows it."""
        if self.code is None:
            return {"log": self.log}
        return {**asdict(self), "exception": self.exception}


class Simulations:
    """Launches of simulations, by what the control slice names them."""

    def __init__(self) -> None:
        self.all: dict[str, Simulation] = {}
        self.following: dict[Key, str] = {}

    def known(self, one: Simulation) -> Iterator[Effect]:
        """A simulation starts; or it did before us, and may have ended."""
        self.all[one.launch] = one
        yield from self.answer(one)

    def answer(self, one: Simulation) -> Iterator[Effect]:
        """Tell those who follow a simulation, for the last time if it has ended."""
        for key in [key for key, wanted in self.following.items() if wanted == one.launch]:
            if one.code is not None:
                del self.following[key]
            yield Answer(key, one.told())

    def ended(
        self, launch: str, code: int, reason: str, cause: Cause | None = None
    ) -> Iterator[Effect]:
        """A simulation has ended; no pod of it is left. `cause` is None if nobody said how."""
        one = self.all.get(launch)
        if one is not None and one.code is None:
            one.code, one.reason, one.cause = code, reason, cause
            yield from self.answer(one)

    def end_all(self, run: int | None, reason: str) -> Iterator[Effect]:
        """A run is over, or all are (None): nothing of its simulations goes on."""
        for one in list(self.all.values()):
            if run in (None, one.run):
                yield from self.ended(one.launch, 1, reason)
        if run is None:
            yield from self.end_unknown(reason)

    def end_unknown(self, reason: str) -> Iterator[Effect]:
        """Whoever knows of launches has told all: others are of a control slice that is no more."""
        for key in [key for key, launch in self.following.items() if launch not in self.all]:
            del self.following[key]
            yield Answer(key, {"code": 1, "reason": reason, "exception": LOST})

    def follow(self, key: Key, launch: str) -> Iterator[Effect]:
        """Tell where its log is, and then its end; an unknown one may be told of later."""
        one = self.all.get(launch)
        if one is None or one.code is None:
            self.following[key] = launch
        if one is not None:
            yield Answer(key, one.told())

    def drop(self, gone: Collection[Key]) -> None:
        """Forget those who are gone."""
        for key in gone:
            self.following.pop(key, None)
