# SPDX-License-Identifier: LGPL-3.0-or-later
"""Carries out resizes, one transaction after the other.

Inputs: what shall change, as a function that is asked when its turn comes; pods as they are seen.
Outputs: patches of pods/resize, and for each resize one call that says how it ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Callable, Union

from dovetail.executors.kubernetes import manifests
from dovetail.executors.kubernetes.api import Api, NotFound
from dovetail.executors.kubernetes.background_calls import Calls, Outcome
from dovetail.executors.kubernetes.manifests import path
from dovetail.executors.kubernetes.resize_transaction import Change, Patch, Transaction

Changes = Callable[[], Union[Sequence[Change], str]]
"""Asked for the changes, or for the reason why there can be none."""
Done = Callable[[str], None]
"""Called at the end; with the reason if nothing was changed."""

_AT_ONCE = 1e-9  # a time that is over
_PATIENCE = 20.0  # seconds to try a patch again; less than `resizing.SLOW`


class Resizes:
    """The queue of resizes."""

    def __init__(self, api: Api, calls: Calls) -> None:
        self._api, self._calls = api, calls
        self._queue: deque[tuple[Changes, Done]] = deque()
        self._now: tuple[Transaction, Done] | None = None
        self._pods: dict[str, dict[str, Any]] = {}

    @property
    def busy(self) -> bool:
        """Whether any resize is not over."""
        return self._now is not None or bool(self._queue)

    @property
    def deadline(self) -> float:
        """When `poll` is needed at the latest; 0 for no such time."""
        if self._now is None:
            return _AT_ONCE if self._queue else 0.0
        return self._now[0].deadline

    def add(self, changes: Changes, done: Done) -> None:
        """One more transaction."""
        self._queue.append((changes, done))

    def poll(self, now: float) -> None:
        """Send what is to be sent, and go on to the next resize when one is over."""
        while self._now or self._queue:
            if self._now is None:
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
