# SPDX-License-Identifier: LGPL-3.0-or-later
"""Requests that wait for an answer, and when they get it. Pure.

Invariant: every request that was added is answered or refused once its condition is decided,
or dropped when its sender is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.flux.instance.effects import FAILED, NOENT, TIMEOUT, Answer, Effect, Key, Refuse

UNDECIDED = ("starting", "degraded")  # phases in which nobody can say whether it will be all up
DOWN = "Kubernetes was taken down"


@dataclass(frozen=True)
class Situation:
    """What most answers hang on: of the status that which costs the same with many slices.

    `last` has the last loss of a slice, if there was one.
    """

    phase: str
    reason: str
    wanted: int
    ready: int
    last: list[str]


class PendingRequests:
    """Keys of requests, by what they wait for."""

    def __init__(self) -> None:
        self.up: list[Key] = []
        self.down: list[Key] = []
        self.resizing: dict[Key, tuple[int, list[str]]] = {}  # nodes asked for, last loss before
        self.watching: dict[Key, Mapping[str, Any]] = {}  # with the status seen last
        self.joining: dict[int, Key] = {}  # by slice
        self.asking: dict[int, Key] = {}  # by question, for the control slice
        self.ending: dict[Key, int] = {}  # the slice whose end somebody waits for
        self.questions = 0

    def ask(self, key: Key) -> int:
        """A number for a question to the control slice."""
        self.questions += 1
        self.asking[self.questions] = key
        return self.questions

    def answered(self, question: int, value: Mapping[str, Any], why: str) -> Iterator[Effect]:
        """The control slice's answer to a question, or why it has none."""
        key = self.asking.pop(question, None)
        if key is not None:
            yield Answer(key, value) if not why else Refuse(key, NOENT, why)

    def invited(self, number: int, joining: Mapping[str, Any], why: str) -> Iterator[Effect]:
        """Join data for a slice are there, or could not be made."""
        key = self.joining.pop(number, None)
        if key is not None:
            yield Answer(key, joining) if joining else Refuse(key, FAILED, why)

    def ended(self, number: int, trouble: str) -> Iterator[Effect]:
        """Nothing of a slice is left, or it cannot be said."""
        for key in [key for key, wanted in self.ending.items() if wanted == number]:
            del self.ending[key]
            yield Answer(key, {}) if not trouble else Refuse(key, FAILED, trouble)

    def drop(self, gone: Collection[Key]) -> None:
        """Forget the requests whose sender is gone."""
        for keys in (self.up, self.down):
            keys[:] = [key for key in keys if key not in gone]
        for numbered in (self.joining, self.asking):
            for number in [number for number, key in numbered.items() if key in gone]:
                del numbered[number]
        for key in gone:
            self.resizing.pop(key, None)
            self.watching.pop(key, None)
            self.ending.pop(key, None)

    def settle(
        self, now: Situation, status: Callable[[], Mapping[str, Any]], *, usable: bool,
        resized: bool,
    ) -> Iterator[Effect]:  # fmt: skip
        """Answer everybody whose condition is decided as it is now.

        `usable`: simulations can run, perhaps on fewer nodes than are wanted. The whole `status`
        is for those who watch it.
        """
        yield from self.decide(self.up, now, usable=usable)
        yield from self.overtaken(now)
        if now.phase != "up" or resized:
            keys = [*self.resizing]
            yield from self.decide(keys, now, usable=now.phase == "up")
            self.resizing = {key: self.resizing[key] for key in keys}
        if now.phase == "down":
            for key in self.down:
                yield Answer(key, {})
            self.down.clear()
        whole = status() if self.watching else {}
        for key, seen in self.watching.items():
            if seen != whole:
                self.watching[key] = whole
                yield Answer(key, whole)

    def overtaken(self, now: Situation) -> Iterator[Effect]:
        """Refuse those whose number of nodes is not wanted any more: a node was lost, say."""
        for key, (asked, before) in [*self.resizing.items()]:
            if asked != now.wanted and now.phase in ("up", *UNDECIDED):
                del self.resizing[key]
                lost = f": {now.last[0]}" if now.last != before else ""
                nodes = "node is" if now.wanted == 1 else "nodes are"
                yield Refuse(key, FAILED, f"{now.wanted} {nodes} wanted by now, not {asked}{lost}")

    def decide(self, keys: list[Key], now: Situation, *, usable: bool) -> Iterator[Effect]:
        """Answer those who wait for nodes."""
        if now.phase in UNDECIDED and not usable:
            return
        missing = {"wanted": now.wanted} if now.phase in UNDECIDED else {}
        for key in keys:
            if usable:
                yield Answer(key, {"nodes": now.ready if missing else now.wanted, **missing})
            else:
                yield Refuse(key, FAILED, now.reason or DOWN)
        keys.clear()
        if not usable:
            for numbered in (self.joining, self.asking):
                for key in numbered.values():
                    yield Refuse(key, FAILED, now.reason or DOWN)
                numbered.clear()

    def overdue(self, left: str) -> Iterator[Effect]:
        """The end took too long."""
        for key in self.down:
            yield Refuse(key, TIMEOUT, f"not ended in time: {left}")
        self.down.clear()
