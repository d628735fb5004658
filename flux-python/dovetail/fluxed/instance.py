# SPDX-License-Identifier: LGPL-3.0-or-later
"""The state of Dovetail in one Flux instance (steps 2, 3 and 8): slices, and who waits for what.

Inputs: requests, and news of slice jobs and of their agents. Outputs: effects. Pure: no clock,
no Flux, no files. Invariants: slice 0 holds the control plane; every request that waits is
answered, whatever happens; a slice that ends unasked is replaced if it had been ready, unless
the user cancelled it; nothing starts once the end has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.fluxed.asked import MOST, Asked
from dovetail.fluxed.effects import (
    FAILED, INVALID, NODATA, NOENT, TIMEOUT, Answer, Cancel, Effect, Key, Log, Refuse, Submit,
)  # fmt: skip
from dovetail.fluxed.runs import Runs


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
    cancelled: bool = False  # by the user
    proven: bool = False  # it was ready once

    def plain(self) -> dict[str, Any]:
        """For status."""
        role = "node" if self.number else "control"
        return {"number": self.number, "role": role, "job": self.job, "state": self.state,
                "node": self.node, "cpus": self.cpus, "host": self.host, "reason": self.reason}  # fmt: skip


class Instance:
    """Slices and requests of one Flux instance."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.wanted = asked.nodes
        self.slices: dict[int, Slice] = {}
        self.runs = Runs()
        self.failure = ""  # why it can never be up (again)
        self.ending = False
        self.was_up = False
        self.kubeconfig = ""
        self.last = 0  # highest slice number so far
        self.lost: list[str] = []
        self.up: list[Key] = []
        self.down: list[Key] = []
        self.resizing: list[Key] = []
        self.watching: dict[Key, dict[str, Any]] = {}
        self.joining: dict[int, Key] = {}
        self.asking: dict[int, Key] = {}  # requests that the control slice answers
        self.question = 0

    # --- What there is ---

    @property
    def control(self) -> Slice | None:
        """The slice with the control plane."""
        return self.slices.get(0)

    @property
    def phase(self) -> str:
        """starting, up, degraded (was up, a slice is missing), failed, ending or down."""
        if self.ending:
            return "ending" if self.slices else "down"
        if self.failure:
            return "failed"
        control, ready = self.control, sum(one.state == "ready" for one in self.slices.values())
        if control and control.state == "ready" and ready >= self.wanted:
            return "up"
        return "degraded" if self.was_up else "starting"

    def status(self) -> dict[str, Any]:
        """All that a user may see."""
        return {
            "phase": self.phase, "reason": self.failure, "wanted": self.wanted,
            "slices": [self.slices[number].plain() for number in sorted(self.slices)],
            "lost": self.lost[-20:], "runs": [run.plain() for run in self.runs.all.values()],
        }  # fmt: skip

    # --- Slices ---

    def start(self, adopted: Mapping[int, int]) -> Iterator[Effect]:
        """Submit all slices, or take over those that run (number: job) after a reload."""
        for number, job in adopted.items():
            self.slices[number] = Slice(number, job)
        self.last = max(adopted, default=0)
        self.wanted = len(adopted) or self.wanted
        if adopted and 0 not in adopted:
            yield from self.fail("the control slice ended while the module was not loaded")
        for number in range(0 if adopted else self.wanted):
            yield self.add(number)

    def add(self, number: int) -> Effect:
        """One more slice."""
        self.last = max(self.last, number)
        self.slices[number] = Slice(number)
        return Submit(number)

    def submitted(self, number: int, job: int, why: str = "") -> Iterator[Effect]:
        """Flux took the job, or did not (`job` is 0)."""
        one = self.slices.get(number)
        if one is None:
            return
        one.job = job
        if not job:
            yield from self.gone(number, why)
        elif one.state == "ending":
            yield Cancel(job, "no longer wanted")

    def attached(self, key: Key, news: Mapping[str, Any]) -> Iterator[Effect]:
        """A slice's agent is there; what it knows may be more than we do."""
        number = int(news["number"])
        one = self.slices.get(number)
        if one is None or one.agent is not None:
            yield Refuse(key, INVALID, f"slice {number} is not expected")
            return
        one.agent, one.host = key, str(news.get("host", ""))
        if one.state != "ending":
            one.state = "starting"
        if number == 0:
            self.runs.adopt(news.get("runs", ()))
        if one.state == "ending" or self.ending:
            yield from self.end(one)
        elif news.get("node"):
            yield from self.ready(number, news)
        yield from self.settle()

    def ready(self, number: int, news: Mapping[str, Any]) -> Iterator[Effect]:
        """A slice's node is ready in Kubernetes."""
        one = self.slices[number]
        if one.state == "ending":
            return
        one.state, one.node, one.cpus = "ready", str(news["node"]), str(news.get("cpus", ""))
        one.proven = True
        if number == 0:
            self.kubeconfig = str(news.get("kubeconfig", ""))
            for worker in self.joining:
                yield from self.tell({"invite": worker})
        yield from self.settle()

    def detached(self, number: int) -> Iterator[Effect]:
        """A slice's agent is gone; the end of its job follows."""
        one = self.slices[number]
        one.agent = None
        if one.state != "ending":
            one.state, one.reason = "lost", one.reason or "its agent is gone"
        yield from self.settle()

    def excepted(self, number: int, kind: str, note: str) -> Iterator[Effect]:
        """A slice's job has a fatal exception."""
        one = self.slices.get(number)
        if one is not None and one.state != "lost":
            one.cancelled = kind == "cancel"
            one.reason = one.reason or f"{kind}: {note}".rstrip(": ")
        yield from ()

    def finished(self, number: int, status: int) -> Iterator[Effect]:
        """A slice's processes have ended, with this wait status."""
        one = self.slices.get(number)
        if one is not None and status and not one.reason:
            signal, code = status & 0x7F, status >> 8
            one.reason = f"killed by signal {signal}" if signal else f"exit code {code}"
        yield from ()

    def news(self, number: int, news: Mapping[str, Any]) -> Iterator[Effect]:
        """What a slice's agent tells."""
        one = self.slices.get(number)
        if "node" in news:
            yield from self.ready(number, news)
        elif "failed" in news and one is not None:
            one.reason = str(news["failed"])
        elif "invited" in news:
            yield from self.invited(news["invited"], news.get("join", {}), news.get("why", ""))
        elif "run" in news:
            yield from self.runs.ended(news["run"], news["code"], news.get("why", ""))
            yield from self.settle()
        elif "answer" in news:
            yield from self.answered(news["answer"], news.get("value", {}), news.get("why", ""))

    def gone(self, number: int, why: str = "") -> Iterator[Effect]:
        """A slice's job is over, and nothing of it is left."""
        one = self.slices.pop(number, None)
        if one is None:
            return
        reason = one.reason or why or "its job ended"
        self.joining.pop(number, None)
        if one.node and number:
            yield from self.tell({"forget": one.node})
        if not self.ending and one.state != "ending":
            self.lost.append(f"slice {number}: {reason}")
            yield Log(f"slice {number} is lost: {reason}")
            if number == 0:
                yield from self.fail(f"the control slice ended: {reason}")
            elif one.cancelled:
                self.wanted = max(1, self.wanted - 1)
            elif one.proven:
                yield self.add(self.last + 1)
            elif not self.was_up:
                yield from self.fail(f"slice {number} did not come up: {reason}")
            else:
                self.wanted = max(1, self.wanted - 1)
        yield from self.settle()

    def end(self, one: Slice) -> Iterator[Effect]:
        """Let a slice end by itself, or cancel its job where nobody listens there."""
        one.state = "ending"
        if one.agent is not None:
            yield Answer(one.agent, {"end": True})
        elif one.job:
            yield Cancel(one.job, "no longer wanted")

    def fail(self, why: str) -> Iterator[Effect]:
        """It cannot be up any more: release everything, tell everybody."""
        if self.failure or self.ending:
            return
        self.failure = why
        yield Log(why)
        for one in list(self.slices.values()):
            yield from self.end(one)
        yield from self.runs.end_all(why)
        yield from self.settle()

    def late(self) -> Iterator[Effect]:
        """The time to come up is over."""
        if self.phase == "starting":
            missing = [f"slice {one.number} is {one.state}{': ' * bool(one.reason)}{one.reason}"
                       for one in self.slices.values() if one.state != "ready"]  # fmt: skip
            limit = f"not up after {self.asked.up_timeout:.0f} s"
            yield from self.fail(f"{limit}: {'; '.join(missing)}")

    def late_down(self, *, last: bool) -> Iterator[Effect]:
        """The time to end is over: cancel the jobs, or with `last` say what is left."""
        for one in self.slices.values():
            if one.job and not last:
                yield Cancel(one.job, "did not end in time")
        if last and self.slices:
            left = ", ".join(f"slice {number}" for number in sorted(self.slices))
            for key in self.down:
                yield Refuse(key, TIMEOUT, f"not ended in time: {left}")
            self.down.clear()

    # --- Requests ---

    def wait_up(self, key: Key) -> Iterator[Effect]:
        """Answer when Kubernetes is up, or can no longer come up."""
        self.up.append(key)
        yield from self.settle()

    def join(self, key: Key, number: int) -> Iterator[Effect]:
        """Answer with join data once the control slice has made them."""
        self.joining[number] = key
        control = self.control
        if control and control.state == "ready":
            yield from self.tell({"invite": number})

    def invited(self, number: int, joining: Mapping[str, Any], why: str) -> Iterator[Effect]:
        """Join data are there, or could not be made."""
        key = self.joining.pop(number, None)
        if key is not None:
            yield Answer(key, joining) if joining else Refuse(key, FAILED, why)

    def resize(self, key: Key, nodes: object) -> Iterator[Effect]:
        """Answer when there are so many slices, and all are ready."""
        if not isinstance(nodes, int) or isinstance(nodes, bool) or not 1 <= nodes <= MOST:
            yield Refuse(key, INVALID, f"nodes is a number from 1 to {MOST}, not {nodes!r}")
            return
        if self.failure or self.ending:
            yield Refuse(key, FAILED, self.failure or "Kubernetes is ending")
            return
        self.wanted = nodes
        active = [one for one in self.slices.values() if one.state != "ending"]
        active.sort(key=lambda one: (one.number != 0, one.state != "ready", one.number))
        for one in active[nodes:]:
            yield from self.end(one)
        for _ in range(nodes - len(active)):
            yield self.add(self.last + 1)
        self.resizing.append(key)
        yield from self.settle()

    def submit(self, key: Key, order: Mapping[str, Any]) -> Iterator[Effect]:
        """Queue a plan."""
        if self.failure or self.ending:
            yield Refuse(key, FAILED, self.failure or "Kubernetes is ending")
            return
        yield from self.runs.submit(key, order)
        yield from self.settle()

    def cancel(self, key: Key, payload: Mapping[str, Any]) -> Iterator[Effect]:
        """End runs."""
        numbers, wrong = self.runs.chosen(payload)
        if wrong:
            yield Refuse(key, NOENT, wrong)
            return
        for number in self.runs.cancel(numbers):
            yield from self.tell({"cancel": number})
        yield Answer(key, {"runs": list(numbers)})
        yield from self.runs.settle()
        yield from self.settle()

    def ask(self, key: Key, order: Mapping[str, Any]) -> Iterator[Effect]:
        """Let the control slice answer a request."""
        if not (self.control and self.control.state == "ready" and self.control.agent):
            yield Refuse(key, FAILED, self.failure or "Kubernetes is not up")
            return
        self.question += 1
        self.asking[self.question] = key
        yield from self.tell({**order, "question": self.question})

    def answered(self, question: int, value: Mapping[str, Any], why: str) -> Iterator[Effect]:
        """The control slice's answer."""
        key = self.asking.pop(question, None)
        if key is not None:
            yield Answer(key, value) if not why else Refuse(key, NOENT, why)

    def end_all(self, key: Key) -> Iterator[Effect]:
        """Answer when nothing is left."""
        self.down.append(key)
        if not self.ending:
            self.ending = True
            yield from self.runs.end_all("Kubernetes was taken down")
            for one in list(self.slices.values()):
                yield from self.end(one)
        yield from self.settle()

    def watch(self, key: Key) -> Iterator[Effect]:
        """Answer with the status, now and at every change."""
        self.watching[key] = {}
        yield from self.settle()

    def drop(self, gone: Callable[[Key], bool]) -> Iterator[Effect]:
        """Forget the requests whose sender is gone."""
        for keys in (self.up, self.down, self.resizing):
            keys[:] = [key for key in keys if not gone(key)]
        for held in (self.joining, self.asking):
            for number in [number for number, key in held.items() if gone(key)]:
                del held[number]
        for known in (self.watching, self.runs.waiting):
            for key in [key for key in known if gone(key)]:
                del known[key]  # type: ignore[attr-defined]
        for one in list(self.slices.values()):
            if one.agent is not None and gone(one.agent):
                yield from self.detached(one.number)

    # --- What follows ---

    def tell(self, order: Mapping[str, Any]) -> Iterator[Effect]:
        """An order for the control slice's agent."""
        if self.control and self.control.agent is not None:
            yield Answer(self.control.agent, order)

    def settle(self) -> Iterator[Effect]:
        """Answer everybody whose condition is met now."""
        phase = self.phase
        self.was_up = self.was_up or phase == "up"
        if phase == "up" and (order := self.runs.next()):
            yield from self.tell({"run": order})
        yield from self.told(self.up, phase)
        if phase != "up" or not any(one.state == "ending" for one in self.slices.values()):
            yield from self.told(self.resizing, phase)
        if phase == "down":
            for key in self.down:
                yield Answer(key, {})
            self.down.clear()
        status = self.status()
        for key, seen in self.watching.items():
            if seen != status:
                self.watching[key] = status
                yield Answer(key, status)

    def told(self, keys: list[Key], phase: str) -> Iterator[Effect]:
        """Answer those who wait for `up`."""
        if phase in ("starting", "degraded"):
            return
        for key in keys:
            if phase == "up":
                yield Answer(key, {"nodes": self.wanted})
            else:
                yield Refuse(key, FAILED, self.failure or "Kubernetes was taken down")
        keys.clear()


