# SPDX-License-Identifier: LGPL-3.0-or-later
"""A recorded run again: to check its decisions, or to take it up where it ended.

Inputs: an event log. Outputs: the first decision that differs, or the controller as it was.

Invariants: the log is not changed.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from dataclasses import dataclass

from dovetail.controller.controller import Controller
from dovetail.controller.settings import Settings
from dovetail.core import eventlog, protocol, schema1
from dovetail.core.errors import BadInput


@dataclass(frozen=True)
class Difference:
    """Where a replay left the record: after entry `seq`, one of both may be None."""

    seq: int
    recorded: protocol.Action | None
    replayed: protocol.Action | None


def replay(path: str | os.PathLike[str]) -> Difference | None:
    """The first decision that differs from the recorded one, None if all are the same.

    Raises BadInput for a log that cannot be read.
    """
    return _feed(path)[1]


def rebuild(path: str | os.PathLike[str]) -> Controller:
    """The controller after all that was logged; `Controller.resume` then goes on.

    Decisions are those of this version, whatever was recorded. Raises BadInput.
    """
    return _feed(path)[0]


def taken_up(path: str | os.PathLike[str]) -> tuple[Controller, list[protocol.Action]]:
    """The same, with what it decided last and the log has not, as its writer was killed.

    It belongs into the log before anything else: nobody says again what became of a simulation.
    What would have changed shares or started one is left out, as it never came to that.
    """
    controller, _, untold = _feed(path)
    started = (protocol.Resize, protocol.Launch)
    words = itertools.takewhile(lambda action: not isinstance(action, started), untold)
    return controller, list(words)


def _feed(
    path: str | os.PathLike[str],
) -> tuple[Controller, Difference | None, list[protocol.Action]]:
    head, entries = eventlog.scan(path)  # a run of days has a million of them
    try:
        controller = Controller(head.specs, head.capacity, Settings.of(head.settings))
    except ValueError as error:
        raise BadInput(f"{path}: line 1: {error}") from None
    # What schema 1 did not record cannot be compared.
    left_out = schema1.ADDED if head.old else ()
    entries = (entry for entry in entries if not isinstance(entry, left_out))
    found: Difference | None = None
    untold: list[protocol.Action] = []
    seq, entry = 0, next(entries, None)
    while entry is not None:
        seq += 1
        if isinstance(entry, protocol.ACTIONS):
            found = found or Difference(seq, entry, None)  # an answer to no event
            entry = next(entries, None)
            continue
        if isinstance(entry, eventlog.Resumed):
            answer = controller.resume(entry.t, entry.capacity, entry.alive)
        else:
            answer = controller.handle(entry)
        answer = [action for action in answer if not isinstance(action, left_out)]
        recorded: list[protocol.Action] = []
        while isinstance(entry := next(entries, None), protocol.ACTIONS):
            recorded.append(entry)
        # The writer may have been killed between an event and the last of its answers.
        torn = entry is None or isinstance(entry, eventlog.Resumed)
        differs = _compare(seq, recorded, answer, torn)
        found = found or differs
        untold = [] if differs else answer[len(recorded) :]
        seq += len(recorded)
    return controller, found, untold


def _compare(
    seq: int, recorded: list[protocol.Action], replayed: list[protocol.Action], torn: bool
) -> Difference | None:
    length = max(len(recorded), len(replayed))
    for k in range(length):
        old = recorded[k] if k < len(recorded) else None
        new = replayed[k] if k < len(replayed) else None
        if old is None and torn:
            return None
        if old is None or new is None or not _same(old, new):
            return Difference(seq + k + 1, old, new)
    return None


def _same(old: protocol.Action, new: protocol.Action) -> bool:
    """A note decides nothing by its sentence, which another version may word otherwise.

    Nor by what it says besides that an earlier version did not say.
    """
    if isinstance(old, protocol.Note) and isinstance(new, protocol.Note):
        old = dataclasses.replace(old, why=new.why, data={**new.data, **old.data})
    return eventlog.encode(old) == eventlog.encode(new)
