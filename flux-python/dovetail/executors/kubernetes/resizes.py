# SPDX-License-Identifier: LGPL-3.0-or-later
"""Resizes of several pods, each all or none, one after the other.

Inputs: what shall change, as a function that is asked when its turn comes; pods as they are seen.
Outputs: patches of pods/resize, and for each resize one call that says how it ended. A resize is
a `Transaction`, which is pure: it is told the time, what the API answered to each patch, and each
pod as it was seen.

Invariants: no pod is increased before every decrease has reached its node; after a refusal every
pod that was touched gets its old request back, what grew first; a pod has at most one patch
without an answer; a pod that has gone holds nothing up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Callable, Union

from dovetail.executors.kubernetes import manifests
from dovetail.executors.kubernetes.api import Api, NotFound
from dovetail.executors.kubernetes.background_calls import Calls, Outcome
from dovetail.executors.kubernetes.manifests import path
from dovetail.executors.kubernetes.placement import millicores

LIMIT = 8.0
"""Seconds that a round may take where a node says that it has no room."""
SLOW = 60.0
"""Seconds that all may take where nobody says no: then a node is slow, and will get there.
Below the controller's own patience, see `ACK_LIMIT` there."""
_PATIENCE = 20.0  # seconds to try a patch again; less than `SLOW`
_AT_ONCE = 1e-9  # a time that is over


@dataclass(frozen=True)
class Change:
    """One pod's CPU request, and its limit, 0 for none; millicores."""

    pod: str
    old: int
    new: int
    old_limit: int = 0
    new_limit: int = 0

    @classmethod
    def between(cls, pod: str, old: tuple[int, int], new: tuple[int, int]) -> Change:
        """From one request and limit to another."""
        return cls(pod, old[0], new[0], old[1], new[1])

    @property
    def there(self) -> Patch:
        """What makes it."""
        return Patch(self.pod, self.new, self.new_limit)

    @property
    def back(self) -> Patch:
        """What undoes it."""
        return Patch(self.pod, self.old, self.old_limit)


@dataclass(frozen=True)
class Patch:
    """A request to send."""

    pod: str
    cpu: int
    limit: int = 0


@dataclass
class _Open:
    """A patch on its way: `generation` is the pod's after it, 0 while there is no answer."""

    cpu: int
    limit: int
    generation: int = 0
    why: str = ""
    deferred: bool = False


class Progress(Enum):
    """How far one pod's resize is."""

    DONE = "done"
    INFEASIBLE = "infeasible"
    DEFERRED = "deferred"  # its node has no room now
    OPEN = "open"


class Transaction:
    """A resize of several pods, all or none.

    `finished` at the end, with `refused` saying why nothing changed.
    """

    def __init__(self, changes: Iterable[Change], limit: float = LIMIT) -> None:
        self._changes = {change.pod: change for change in changes if change.there != change.back}
        ordered = sorted(self._changes.values(), key=lambda change: change.pod)
        self._rounds = [
            [c.there for c in ordered if c.new < c.old],
            [c.there for c in ordered if c.new >= c.old],
        ]
        self._limit = limit
        self._deadline = self._last = 0.0
        self._open: dict[str, _Open] = {}
        self._held: list[Patch] = []
        self._unanswered: set[str] = set()
        self._touched: dict[str, None] = {}  # in their order
        self._gone: set[str] = set()
        self.refused = ""
        self.finished = False

    @property
    def deadline(self) -> float:
        """When `poll` has to be called at the latest; 0 if there is no such time."""
        return 0.0 if self.finished else self._deadline

    def poll(self, now: float) -> list[Patch]:
        """The patches to send now."""
        self._last = self._last or now + SLOW
        if self._open and now >= self._deadline:
            self._late(now)
        while not self._open and not self._held and not self.finished:
            if not self._rounds:
                self.finished = True
                break
            self._held = [p for p in self._rounds.pop(0) if p.pod not in self._gone]
            self._deadline = now + self._limit
        ready = [patch for patch in self._held if patch.pod not in self._unanswered]
        self._held = [patch for patch in self._held if patch.pod in self._unanswered]
        for patch in ready:
            self._open[patch.pod] = _Open(patch.cpu, patch.limit)
            self._unanswered.add(patch.pod)
            self._touched.setdefault(patch.pod)
        if self._held and not self._open:  # all wait for answers, which come by themselves
            self._deadline = now + self._limit
        return ready

    def accepted(self, pod: str, cpu: int, generation: int) -> None:
        """The API took a patch; the pod is of this generation now."""
        self._unanswered.discard(pod)
        if pod in self._open and self._open[pod].cpu == cpu:
            self._open[pod].generation = generation

    def declined(self, pod: str, cpu: int, why: str) -> None:
        """The API did not take a patch, or nobody knows whether it did."""
        self._unanswered.discard(pod)
        if pod in self._open and self._open[pod].cpu == cpu:
            self._fail(pod, why)

    def gone(self, pod: str) -> None:
        """The pod has ended or was deleted."""
        self._gone.add(pod)
        self._unanswered.discard(pod)
        self._open.pop(pod, None)
        self._held = [patch for patch in self._held if patch.pod != pod]

    def seen(self, pod: str, thing: Mapping[str, Any]) -> None:
        """The pod as the API has it now."""
        waits = self._open.get(pod)
        if waits is None or not waits.generation:
            return
        how, why = progress(thing, waits.generation, waits.cpu, waits.limit)
        if how is Progress.DONE:
            del self._open[pod]
        elif how is Progress.INFEASIBLE:
            self._fail(pod, why)
        else:
            waits.why, waits.deferred = why, how is Progress.DEFERRED

    def _fail(self, pod: str, why: str) -> None:
        """Turn round; a failure on the way back is only recorded."""
        self._open.pop(pod, None)
        if self.refused:
            self.refused += f"; {pod} could not be set back: {why}"
            return
        self.refused = f"{pod}: {why}"
        back = [self._changes[name] for name in reversed(self._touched) if name not in self._gone]
        self._open.clear()
        self._held.clear()
        self._rounds = [
            [c.back for c in back if c.new > c.old],
            [c.back for c in back if c.new <= c.old],
        ]

    def _late(self, now: float) -> None:
        late = sorted(self._open, key=lambda pod: (not self._open[pod].deferred, pod))[0]
        if self.refused:
            self._open.clear()  # what was set back is on its way, and nothing more can be done
        elif self._open[late].deferred:
            self._fail(late, f"not done after {self._limit:g} s: {self._open[late].why}")
        elif now >= self._last:
            self._fail(late, f"not done after {SLOW:g} s: {self._open[late].why or 'no answer'}")
        else:
            self._deadline = min(now + self._limit, self._last)


def progress(
    thing: Mapping[str, Any], generation: int, cpu: int, limit: int = 0
) -> tuple[Progress, str]:
    """How far a pod's resize is, and why. Millicores."""
    status = thing.get("status", {})
    if thing["metadata"].get("generation", 0) < generation:
        return Progress.OPEN, "an older state was seen"
    for one in status.get("conditions", []):
        if one.get("observedGeneration", generation) < generation or one.get("status") != "True":
            continue
        said = one.get("message") or one.get("reason", "")
        if one["type"] == "PodResizePending":
            reason = one.get("reason", "pending")
            found = {"Infeasible": Progress.INFEASIBLE, "Deferred": Progress.DEFERRED}
            return found.get(reason, Progress.OPEN), f"{reason}: {said}"
        if one["type"] == "PodResizeInProgress":
            return Progress.OPEN, f"in progress: {said}" if said else "in progress"
    if status.get("phase") == "Pending" and not status.get("containerStatuses"):
        return Progress.DONE, ""  # it will be born so
    if status.get("observedGeneration", generation) < generation:
        return Progress.OPEN, "its node has not looked yet"
    real = manifests.own(status.get("containerStatuses", [])).get("resources", {})
    request, most = (real.get(name, {}).get("cpu", "0") for name in ("requests", "limits"))
    if millicores(request) != cpu:
        return Progress.OPEN, f"it has {request} still"
    if limit and millicores(most) != limit:  # if none is wanted, it has none or the site's
        return Progress.OPEN, f"its limit is {most} still"
    return Progress.DONE, ""


Changes = Callable[[], Union[Sequence[Change], str]]
"""Asked for the changes, or for the reason why there can be none."""
Done = Callable[[str], None]
"""Called at the end; with the reason if nothing was changed."""


class Resizes:
    """The queue of resizes."""

    def __init__(self, api: Api, calls: Calls) -> None:
        self._api, self._calls = api, calls
        self._queue: deque[tuple[Changes, Done]] = deque()
        self._now: tuple[Transaction, Done] | None = None
        self.held = False  # no other is begun
        self._pods: dict[str, dict[str, Any]] = {}

    @property
    def busy(self) -> bool:
        """Whether any resize is not over."""
        return self._now is not None or bool(self._queue)

    @property
    def deadline(self) -> float:
        """When `poll` is needed at the latest; 0 for no such time."""
        if self._now is None:
            return _AT_ONCE if self._queue and not self.held else 0.0
        return self._now[0].deadline

    def add(self, changes: Changes, done: Done) -> None:
        """One more transaction."""
        self._queue.append((changes, done))

    def poll(self, now: float) -> None:
        """Send what is to be sent, and go on to the next resize when one is over."""
        while self._now or self._queue:
            if self._now is None:
                if self.held:
                    return
                ask, done = self._queue.popleft()
                changes = ask()
                if isinstance(changes, str):
                    done(changes)
                    continue
                self._now = Transaction(changes), done
            transaction, done = self._now
            for patch in transaction.poll(now):
                self._send(patch)
            if not transaction.finished:
                return
            self._now = None
            done(transaction.refused)

    def seen(self, pod: dict[str, Any]) -> None:
        """A pod as the API has it now."""
        name = pod["metadata"]["name"]
        self._pods[name] = pod
        if self._now:
            self._now[0].seen(name, pod)

    def gone(self, pod: str) -> None:
        """The pod has ended or was deleted."""
        self._pods.pop(pod, None)
        if self._now:
            self._now[0].gone(pod)

    def _send(self, patch: Patch) -> None:
        where = path("Pod", patch.pod) + "/resize"
        body = manifests.resize(patch.cpu, patch.limit)
        self._calls.submit(
            lambda: self._api.patch(where, body, "strategic", patience=_PATIENCE),
            lambda found: self._answered(patch, found),
        )

    def _answered(self, patch: Patch, found: Outcome[dict[str, Any]]) -> None:
        if isinstance(found, NotFound):
            self.gone(patch.pod)
        elif self._now is None:
            return
        elif isinstance(found, Exception):
            self._now[0].declined(patch.pod, patch.cpu, str(found))
        else:
            self._now[0].accepted(patch.pod, patch.cpu, found["metadata"].get("generation", 0))
            if patch.pod in self._pods:  # its node may have been quicker than the answer
                self._now[0].seen(patch.pod, self._pods[patch.pod])
