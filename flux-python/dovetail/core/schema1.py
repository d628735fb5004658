# SPDX-License-Identifier: LGPL-3.0-or-later
"""Event logs of schema 1, as this version reads them.

Inputs: a header or a record of schema 1, as plain JSON; then all of its entries. Outputs: the same
as schema 2 has them.

Schema 1 called a suspended simulation frozen. Why a simulation ended stood in sentences alone, of
which `Records` makes causes; what the controller made of that stood in notes, and `complete` puts
a Requeued or an Ended before them.

Invariants: nothing is decided here, but read from what was recorded; a record that is damaged
stays so, for the reader to refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from dovetail.core import protocol
from dovetail.core.causes import Cause

SCHEMA = 1
Record = dict[str, Any]
ADDED = (protocol.Requeued, protocol.Ended)
"""Actions that schema 1 does not have."""

_BEGINNINGS = (
    ("node lost", Cause.NODE_LOST),
    ("pod lost", Cause.POD_LOST),
    ("its keeper failed", Cause.SUPERVISOR_LOST),
    ("its supervisor failed", Cause.SUPERVISOR_LOST),
    ("cannot be started", Cause.LAUNCH_FAILED),
    ("cannot make ", Cause.LAUNCH_FAILED),
    ("copying the case failed", Cause.LAUNCH_FAILED),
    ("prepare step ", Cause.LAUNCH_FAILED),
    ("Kubernetes does not take its pods", Cause.LAUNCH_FAILED),
    ("image ", Cause.LAUNCH_FAILED),
)
_STOPS = (
    ("hung: ", Cause.HUNG),
    ("memory is short", Cause.SHORT_OF_MEMORY),
    ("taken back", Cause.TAKEN_BACK),
    ("interrupted", Cause.INTERRUPTED),
    ("the run ended", Cause.INTERRUPTED),
)


def header(old: Record) -> Record:
    """The first line."""
    return {**old, "capacity": _capacity(old.get("capacity"))}


class Records:
    """The other lines, in order."""

    def __init__(self) -> None:
        self._interrupt = ""

    def converted(self, old: Record) -> Record:
        """The next one."""
        new = dict(old)
        kind = old.get("type")
        if "capacity" in old:
            new["capacity"] = _capacity(old["capacity"])
        if "share" in old:
            new["share"] = _share(old["share"])
        if isinstance(old.get("shares"), dict):
            new["shares"] = {name: _share(share) for name, share in old["shares"].items()}
        if kind == "Interrupted":
            self._interrupt = str(old.get("reason")) or "interrupted"
        elif kind == "Stop":
            new["cause"] = self._of_stop(str(old.get("why")))
        elif kind == "Finished":
            new["cause"] = self._of_end(old.get("code"), str(old.get("reason", "")))
        return new

    def _of_stop(self, why: str) -> str:
        if self._interrupt and why == self._interrupt:
            return Cause.INTERRUPTED.value
        return next((cause for words, cause in _STOPS if why.startswith(words)), _ELSE).value

    def _of_end(self, code: object, reason: str) -> str:
        if reason.startswith("stopped"):
            return self._of_stop(reason.partition(": ")[2])
        failed = Cause.FAILED if code or reason else Cause.DONE
        return next(
            (cause for words, cause in _BEGINNINGS if reason.startswith(words)), failed
        ).value


_ELSE = Cause.CANCELLED


def complete(specs: Sequence[protocol.Spec], entries: Sequence[Any]) -> list[Any]:
    """All entries, and among them what the controller made of ends."""
    found: list[Any] = []
    # What is known of each simulation: where it is, and if it has ended, by what.
    place = {spec.name: "queued" for spec in specs}
    causes: dict[str, Cause] = {}
    stops: dict[str, protocol.Stop] = {}
    interrupt, cpu = "", 1

    def requeue(name: str, cause: Cause, why: str) -> None:
        place[name] = "queued"
        found.append(protocol.Requeued(name, cause, why))

    def end(name: str, state: protocol.EndState, cause: Cause, why: str) -> None:
        place[name], causes[name] = state, cause
        found.append(protocol.Ended(name, state, cause, why))

    for at, entry in enumerate(entries):
        name = getattr(entry, "name", "")
        if isinstance(entry, protocol.Note) and entry.what == "fail":
            name = entry.data.get("name", "")
            if " cannot run: " in entry.why and place.get(name) == "queued":
                why = entry.why.partition(" cannot run: ")[2]
                end(name, "not started", Cause.TOO_LARGE, why)
        found.append(entry)
        if isinstance(entry, protocol.Launch):
            place[name] = "started"
            stops.pop(name, None)
        elif isinstance(entry, protocol.Stop):
            stops[name] = entry
        elif isinstance(entry, protocol.CapacityChanged):
            cpu = entry.capacity.cpu
        elif isinstance(entry, protocol.Interrupted) and not interrupt:
            interrupt = entry.reason or "interrupted"
            for one in [one for one, where in place.items() if where == "queued"]:
                end(one, "not started", Cause.INTERRUPTED, interrupt)
        elif isinstance(entry, protocol.Finished) and place.get(name) == "started":
            why, stop = _failed(name, entries[at + 1 :]), stops.get(name)
            if entry.cause is Cause.DONE:
                end(name, "done", Cause.DONE, "")
            elif why and stop and not stop.requeue:
                end(name, "failed", stop.cause, why)
            elif why:
                end(name, "failed", entry.cause, why)
            elif stop:
                requeue(name, stop.cause, stop.why)
            else:
                requeue(name, entry.cause, entry.reason)
        elif not isinstance(entry, (*protocol.ACTIONS, *get_args(protocol.Event))):  # resumed
            for one, where in list(place.items()):
                if where == "started" and one not in entry.alive:
                    requeue(one, Cause.INTERRUPTED, "the run was killed and resumed")
                elif where == "failed" and causes[one] is Cause.INTERRUPTED:
                    requeue(one, Cause.INTERRUPTED, interrupt)
                elif where == "not started":
                    requeue(one, causes[one], interrupt)
            interrupt = ""
    if not cpu and not interrupt:
        for one in [one for one, where in place.items() if where == "queued"]:
            end(one, "not started", Cause.NO_NODE, "no node is left")
    return found


def _failed(name: str, rest: Sequence[Any]) -> str:
    """Why a simulation failed, by the note that answers its end; empty if none does."""
    begin = f"{name} failed: "
    for entry in rest:
        if not isinstance(entry, protocol.ACTIONS):
            break
        if not isinstance(entry, protocol.Note) or entry.data.get("name") != name:
            continue
        if entry.what == "fail" and entry.why.startswith(begin):
            return entry.why[len(begin) :]
    return ""


def _capacity(old: Any) -> Any:  # noqa: ANN401
    return _renamed(old, "freeze", "suspend")


def _share(old: Any) -> Any:  # noqa: ANN401
    return _renamed(old, "frozen", "suspended")


def _renamed(old: Any, before: str, after: str) -> Any:  # noqa: ANN401
    if not isinstance(old, dict):
        return old
    return {after if key == before else key: value for key, value in old.items()}
