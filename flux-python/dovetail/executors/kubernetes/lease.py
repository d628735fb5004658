# SPDX-License-Identifier: LGPL-3.0-or-later
"""One controller at a time on a cluster, by a Lease.

Inputs: the API, a run's id. Output: the lease, renewed by a thread. Invariant: whoever renews has
it, whatever the clocks of two machines say: a lease is taken over only after it was watched
through its whole duration without a renewal.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone

from dovetail.core.errors import BadInput
from dovetail.executors.kubernetes import manifests
from dovetail.executors.kubernetes.api import Api, NotFound, Object, Refused, Unreachable
from dovetail.executors.kubernetes.manifests import path

DURATION, RENEW = 15, 4.0  # seconds
_LOOKS = 3  # at a lease that is to be given back and changes meanwhile


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Lease:
    """The right to control simulations in the namespace, renewed by a thread until `release`.

    `lost` says why we have it no more, if so. `left` is True if a controller that died had it
    before. When that was, no two clocks agree on.
    """

    def __init__(self, api: Api, run: str, say: Callable[[str], None] = lambda line: None) -> None:
        """Take it; BadInput if another controller has it. `say` takes a line for the user."""
        self._api, self._say = api, say
        self._holder = f"{run} {socket.gethostname()} {os.getpid()}"
        self._path = path("Lease", "dovetail-controller")
        self._end = threading.Event()
        self.lost = ""
        self.left = False  # who had it and has not let go of it
        self._held = self._take(run)
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def _take(self, run: str) -> Object:
        body = manifests.lease(self._holder, _now(), DURATION)
        try:
            try:
                found = self._api.get(self._path)
            except NotFound:
                return self._api.create(path("Lease"), body)
            holder = found["spec"].get("holderIdentity", "")
            if holder.split(" ")[0] != run:  # our own run is known dead: its directory is locked
                if self._await_release(found, holder):
                    return self._api.create(path("Lease"), body)
                self.left = True
            body["metadata"]["resourceVersion"] = found["metadata"]["resourceVersion"]
            return self._api.call("PUT", self._path, body, patience=0.0)
        except (Refused, Unreachable) as error:
            raise BadInput(
                f"{self._api.path}: another controller is starting there, or: {error}"
            ) from None

    def _await_release(self, found: Object, holder: str) -> bool:
        """Wait until it is given back, or has not been renewed for its duration, by our own clock.

        Returns whether it was given back. Raises BadInput once it is renewed.
        """
        until = time.monotonic() + DURATION
        while time.monotonic() < until:
            self._end.wait(0.5)
            try:
                now = self._api.get(self._path)["spec"].get("renewTime")
            except NotFound:
                return True
            if now != found["spec"].get("renewTime"):
                run, host, pid = [*holder.split(" "), "?", "?"][:3]
                raise BadInput(
                    f"{self._api.path}: this cluster is used by run {run} on {host} (process "
                    f"{pid}); let it end first"
                )
        return False

    def _keep(self) -> None:
        while not self._end.wait(RENEW):
            self._held["spec"]["renewTime"] = _now()
            try:
                self._held = self._api.call("PUT", self._path, self._held, patience=0.0)
            except (Refused, Unreachable):
                self._look()

    def _look(self) -> None:
        """A renewal failed: nobody answers, somebody deleted it, or it is another's now?"""
        with contextlib.suppress(Refused, Unreachable):
            try:
                found = self._api.get(self._path, patience=0.0)
            except NotFound:
                body = manifests.lease(self._holder, _now(), DURATION)
                self._held = self._api.create(path("Lease"), body, patience=0.0)
                self._say("Lease dovetail-controller was deleted; it was made again")
                return
            holder = found["spec"].get("holderIdentity", "")
            if holder == self._holder:
                self._held = found
            else:
                self.lost = f"another controller has taken the cluster over: {holder}"
                self._end.set()

    def release(self) -> None:
        """Let the next one have it at once. After a suspension it may be another's already."""
        self._end.set()
        self._thread.join()
        with contextlib.suppress(Unreachable):
            for _ in range(_LOOKS):
                try:
                    return self._give_back()
                except Refused as error:
                    if error.status != 409:  # else it has changed, as by a late renewal of ours
                        return

    def _give_back(self) -> None:
        found = self._api.get(self._path)
        if not self.lost and found["spec"].get("holderIdentity", "") == self._holder:
            self._api.delete(self._path, version=found["metadata"]["resourceVersion"])
