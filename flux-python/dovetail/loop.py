# SPDX-License-Identifier: LGPL-3.0-or-later
"""The run loop: carries events from an executor to the controller and actions back (steps 4 to 8).

Inputs: simulations, an executor, an output directory. Outputs: `events.jsonl`, and the exit code.
Invariants: every event is logged before it is decided on and every decision before it is acted
on; the executor is closed whatever happens; the clock of a resumed run goes on where it stopped.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from types import FrameType
from typing import Protocol

from dovetail.controller import Controller
from dovetail.core import Action, Event, Executor, Interrupted, Launch, Note, Resize, Stop, Tick
from dovetail.events import Log, LogStopped
from dovetail.live import Live

PERIOD = 0.25  # seconds between looks at the ranks; far below the shortest judging window


class Waiting(Executor, Protocol):
    """An executor that the loop can sleep on."""

    def wait(self, timeout: float) -> bool:
        """Sleep until something happens or `timeout` seconds are over; True if it happened."""


class Signals:
    """Turns the first SIGINT or SIGTERM into a wish to end, and the second into an exception."""

    def __init__(self) -> None:
        self.caught = ""
        self.before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def __enter__(self) -> Signals:
        for number in self.before:
            signal.signal(number, self.catch)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def catch(self, number: int, _: FrameType | None) -> None:
        """Handle a signal."""
        if self.caught:
            raise KeyboardInterrupt
        self.caught = signal.Signals(number).name


class Loop:
    """One run, from the first launch to the end of the last simulation."""

    def __init__(
        self, controller: Controller, executor: Waiting, log: Log, live: Live, origin: float
    ) -> None:
        self.controller = controller
        self.executor = executor
        self.log: Log | None = log
        self.live = live
        self.origin = origin  # CLOCK_MONOTONIC at time 0 of the run
        self.log_error = ""

    def now(self) -> float:
        """Seconds on the run's clock."""
        return time.monotonic() - self.origin

    def drive(self, first: Sequence[Action] = ()) -> str:
        """Take the `first` actions and run until nothing is left to do.

        Returns the name of the signal that ended it, or an empty string.
        """
        told = False
        with Signals() as signals:
            try:
                self.act_on(first)
                self.step([Tick(self.now())])
                while not self.controller.finished:
                    self.executor.wait(PERIOD)
                    t = self.now()
                    events: list[Event] = [*self.executor.observe(t), Tick(t)]
                    if signals.caught and not told:
                        events.append(Interrupted(t, f"interrupted by {signals.caught}"))
                        told = True
                    self.step(events)
                    self.live.show(self.controller, t)
            finally:
                self.executor.close()
        return signals.caught

    def step(self, events: Sequence[Event]) -> None:
        """Decide on events and act."""
        for event in events:
            self.record(event)
            self.act_on(self.controller.handle(event))

    def act_on(self, actions: Sequence[Action]) -> None:
        """Log actions and take them."""
        for action in actions:
            self.record(action)
            self.act(action)

    def act(self, action: Action) -> None:
        """Pass an action to the executor, or a note to the reader."""
        if isinstance(action, Launch):
            self.executor.launch(self.controller.spec(action.name), action.share)
        elif isinstance(action, Resize):
            self.executor.resize(action.shares)
        elif isinstance(action, Stop):
            self.executor.stop(action.name, action.why)
        elif isinstance(action, Note):
            self.live.note(self.now(), action)

    def record(self, entry: Event | Action) -> None:
        """Log; a full disk ends the log and not the run."""
        if self.log is None:
            return
        try:
            self.log.write(entry)
        except LogStopped as error:
            self.log, self.log_error = None, str(error)
            self.live.note(self.now(), Note("fail", f"the event log ends here: {error}"))
