# SPDX-License-Identifier: LGPL-3.0-or-later
"""Requests that wait for an answer, and when they get it. Pure.

Invariant: every request that was added is answered or refused once its condition is decided,
or dropped when its sender is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dovetail.flux.instance.effects import FAILED, NOENT, TIMEOUT, Answer, Effect, Key, Refuse

UNDECIDED = ("starting", "degraded")  # phases in which nobody can say whether it will be all up
DOWN = "Kubernetes was taken down"


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

    def drop(self, gone: Callable[[Key], bool]) -> None:
        """Forget the requests whose sender is gone."""
        for keys in (self.up, self.down):
            keys[:] = [key for key in keys if not gone(key)]
        for key in [key for key in self.resizing if gone(key)]:
            del self.resizing[key]
        for numbered in (self.joining, self.asking):
            for number in [number for number, key in numbered.items() if gone(key)]:
                del numbered[number]
        for key in [key for key in self.watching if gone(key)]:
            del self.watching[key]
        for key in [key for key in self.ending if gone(key)]:
            del self.ending[key]

    def settle(self, status: Mapping[str, Any], *, usable: bool, resized: bool) -> Iterator[Effect]:
        """Answer everybody whose condition the new status decides.

        `usable`: simulations can run, perhaps on fewer nodes than are wanted.
        """
        phase = status["phase"]
        yield from self.decide(self.up, status, usable=usable)
        yield from self.overtaken(status)
        if phase != "up" or resized:
            keys = [*self.resizing]
            yield from self.decide(keys, status, usable=phase == "up")
            self.resizing = {key: self.resizing[key] for key in keys}
        if phase == "down":
            for key in self.down:
                yield Answer(key, {})
            self.down.clear()
        for key, seen in self.watching.items():
            if seen != status:
                self.watching[key] = status
                yield Answer(key, status)

    def overtaken(self, status: Mapping[str, Any]) -> Iterator[Effect]:
        """Refuse those whose number of nodes is not wanted any more: a node was lost, say."""
        wanted = status["wanted"]
        for key, (asked, before) in [*self.resizing.items()]:
            if asked != wanted and status["phase"] in ("up", *UNDECIDED):
                del self.resizing[key]
                last = status["lost"][-1:]
                lost = f": {last[0]}" if last != before else ""
                nodes = "node is" if wanted == 1 else "nodes are"
                yield Refuse(key, FAILED, f"{wanted} {nodes} wanted by now, not {asked}{lost}")

    def decide(
        self, keys: list[Key], status: Mapping[str, Any], *, usable: bool
    ) -> Iterator[Effect]:
        """Answer those who wait for nodes."""
        if status["phase"] in UNDECIDED and not usable:
            return
        missing = {"wanted": status["wanted"]} if status["phase"] in UNDECIDED else {}
        for key in keys:
            if usable:
                nodes = status["ready"] if missing else status["wanted"]
                yield Answer(key, {"nodes": nodes, **missing})
            else:
                yield Refuse(key, FAILED, status["reason"] or DOWN)
        keys.clear()
        if not usable:
            for numbered in (self.joining, self.asking):
                for key in numbered.values():
                    yield Refuse(key, FAILED, status["reason"] or DOWN)
                numbered.clear()

    def overdue(self, left: str) -> Iterator[Effect]:
        """The end took too long."""
        for key in self.down:
            yield Refuse(key, TIMEOUT, f"not ended in time: {left}")
        self.down.clear()
