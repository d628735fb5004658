# SPDX-License-Identifier: LGPL-3.0-or-later
"""Sees that what a run needs on its cluster stays there, whoever deletes it.

Inputs: the objects, as they were made. Outputs: those that are gone, made again; news for the user;
and why the run cannot go on, where one that it cannot do without stays away.

Invariants: what our user may not look at is for an administrator, and left alone; what is there
stays as it is, since a site may have changed it; a server that does not answer has deleted nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Callable

from dovetail.executors.kubernetes.api import Api, NotFound, Object, Refused, Unreachable
from dovetail.executors.kubernetes.manifests import NAMESPACE, path

EVERY = 5.0  # seconds between two looks
PATIENCE = 20.0  # seconds that something needed may be away before the run ends
EMPTYING = 120.0  # the same while its namespace is emptied, which takes as long as its pods do
NEEDED = ("Namespace", "Secret", "DaemonSet")
"""Without its namespace a run has no place, without the others no agents."""


class Upkeep:
    """Looks after `things` in a thread until `stop`; `say` takes one line for the user.

    `lost` says why the run cannot go on, if so.
    """

    def __init__(self, api: Api, things: Sequence[Object], say: Callable[[str], None]) -> None:
        self._api, self._things, self._say = api, things, say
        self._seen: set[str] = set()
        self._told: set[str] = set()
        self._since = 0.0  # the first of our last looks that missed something needed
        self._working = threading.Lock()
        self._end = threading.Event()
        self.lost = ""
        threading.Thread(target=self._keep, name="upkeep", daemon=True).start()

    def stop(self) -> None:
        """Make nothing again from now on."""
        self._end.set()
        with self._working:
            pass

    def _keep(self) -> None:
        while not self._end.is_set() and not self.lost:
            try:
                self._look()
            except Unreachable:
                self._since = 0.0
            self._end.wait(EVERY)

    def _look(self) -> None:
        """See whether everything is there, and make what is not."""
        missing, patience, told = "", PATIENCE, set()
        for thing in self._things:
            why, emptied = self._trouble(thing)
            if why:
                told.add(why)
                if why not in self._told:
                    self._say(why)
            if thing["kind"] in NEEDED:
                missing = missing or why
            if emptied:
                patience = EMPTYING
                break  # nothing can be made in there
        self._told = told
        now = time.monotonic()
        self._since = (self._since or now) if missing else 0.0
        if missing and now - self._since > patience:
            self.lost = missing

    def _trouble(self, thing: Object) -> tuple[str, bool]:
        """What is wrong with one of them, in words; and whether it is a namespace that is emptied.

        One that was deleted is made again first.
        """
        kind, name = thing["kind"], thing["metadata"]["name"]
        what, inside = f"{kind} {name}", thing["metadata"].get("namespace", NAMESPACE)
        where = path(kind, name, inside)
        try:
            found = self._api.get(where, patience=0.0)
            self._seen.add(where)
            emptied = kind == "Namespace" and "deletionTimestamp" in found["metadata"]
            return (f"{what} is being deleted, and all in it" if emptied else ""), emptied
        except NotFound:
            pass
        except Refused as error:
            may = error.status != 401 and where not in self._seen
            return ("" if may else f"{what} may not be looked at any more: {error}"), False
        try:
            with self._working:
                if not self._end.is_set():
                    self._api.create(path(kind, namespace=inside), thing, patience=0.0)
                    self._say(f"{what} was deleted; it was made again")
        except Refused as error:
            if error.reason != "AlreadyExists":
                return f"{what} was deleted, and cannot be made again: {error}", False
        return "", False
