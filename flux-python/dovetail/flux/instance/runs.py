# SPDX-License-Identifier: LGPL-3.0-or-later
"""The plans that were submitted: one runs at a time, the others wait.

A run is one `dovetail run`, a process in the control slice, which keeps the waiting ones too.
Pure: what shall happen comes back as effects. Invariant: a run ends once, and everybody who
waits for it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dovetail.flux.instance.effects import INVALID, NOENT, Answer, Effect, Key, Refuse

ENDED = ("done", "failed", "cancelled")
TOLD = ("plan", "output", "cwd", "content", "environment")


@dataclass
class Run:
    """One submitted plan; `state` is waiting, running, or one of ENDED."""

    number: int
    plan: str
    output: str
    cwd: str = "/"
    state: str = "waiting"
    code: int = -1
    reason: str = ""

    def plain(self) -> dict[str, Any]:
        """For status and wait."""
        return asdict(self)

    def end(self, code: int, reason: str) -> None:
        """Its process ended."""
        self.state = "done" if code == 0 else "cancelled" if self.reason else "failed"
        self.code, self.reason = code, self.reason or reason

    def cancel(self) -> None:
        """It is unwanted; a process of it must be told."""
        if self.state == "waiting":
            self.state, self.code, self.reason = "cancelled", 1, "cancelled before it started"
        elif self.state == "running":
            self.reason = "cancelled"


class Runs:
    """All runs of the instance."""

    def __init__(self) -> None:
        self.all: dict[int, Run] = {}
        self.orders: dict[int, Mapping[str, Any]] = {}  # that the control slice was not told yet
        self.waiting: dict[Key, tuple[int, ...]] = {}

    def submit(self, key: Key, order: Mapping[str, Any]) -> Iterator[Effect]:
        """Queue a plan."""
        if not all(isinstance(order.get(name), str) and order[name] for name in TOLD[:3]):
            yield Refuse(key, INVALID, "submit: plan, output and cwd must be texts")
            return
        if not isinstance(order.get("content", ""), str):
            yield Refuse(key, INVALID, "submit: content must be the text of the plan")
            return
        number = max(self.all, default=0) + 1
        self.all[number] = Run(number, order["plan"], order["output"], order["cwd"])
        known = {name: order[name] for name in TOLD if name in order}
        self.orders[number] = {"number": number, **known}
        yield Answer(key, {"run": number})

    def untold(self) -> list[Mapping[str, Any]]:
        """What the control slice needs to start runs that it was not told of."""
        orders, self.orders = self.orders, {}
        return list(orders.values())

    def next(self) -> int:
        """The run to start now, or 0; it counts as running from here on."""
        if any(run.state == "running" for run in self.all.values()):
            return 0
        number = next((n for n, run in self.all.items() if run.state == "waiting"), 0)
        if number:
            self.all[number].state = "running"
        return number

    def adopt(self, known: Iterable[Mapping[str, Any]]) -> None:
        """Take over what the control slice knows, after the module was loaded anew."""
        for one in known:
            self.all.setdefault(one["number"], Run(**one))

    def ended(self, number: int, code: int, reason: str) -> Iterator[Effect]:
        """A run's process ended."""
        run = self.all.get(number)
        if run is None or run.state in ENDED:
            return
        run.end(code, reason)
        yield from self.settle()

    def end_all(self, reason: str) -> Iterator[Effect]:
        """Nothing can run any more."""
        for run in self.all.values():
            if run.state not in ENDED:
                run.state, run.code, run.reason = "failed", 1, reason
        yield from self.settle()

    def cancel(self, numbers: Iterable[int]) -> list[int]:
        """Mark runs as unwanted; returns those of which the control slice must be told."""
        told = []
        for number in numbers:
            run = self.all[number]
            if run.state not in ENDED and self.orders.pop(number, None) is None:
                told.append(number)
            run.cancel()
        return told

    def chosen(self, payload: Mapping[str, Any]) -> tuple[tuple[int, ...], str]:
        """The runs that a request names (all, if none), or what is wrong with it."""
        asked = payload.get("runs")
        if asked is None:
            return tuple(self.all), ""
        if not isinstance(asked, list) or not all(number in self.all for number in asked):
            return (), f"there is no run {asked}; see `flux dovetail status`"
        return tuple(asked), ""

    def wait(self, key: Key, payload: Mapping[str, Any]) -> Iterator[Effect]:
        """Answer when the named runs have ended."""
        numbers, wrong = self.chosen(payload)
        if wrong:
            yield Refuse(key, NOENT, wrong)
            return
        self.waiting[key] = numbers
        yield from self.settle()

    def drop(self, gone: Callable[[Key], bool]) -> None:
        """Forget the requests whose sender is gone."""
        for key in [key for key in self.waiting if gone(key)]:
            del self.waiting[key]

    def settle(self) -> Iterator[Effect]:
        """Answer those whose runs have all ended."""
        for key, numbers in list(self.waiting.items()):
            runs = [self.all[number] for number in numbers]
            if all(run.state in ENDED for run in runs):
                del self.waiting[key]
                yield Answer(key, {"runs": [run.plain() for run in runs]})
