# SPDX-License-Identifier: LGPL-3.0-or-later
"""The run loop: carries events from an executor to the controller and actions back.

Inputs: simulations, an executor, an output directory. Outputs: `events.jsonl`, and the exit code.
Invariants: every event is logged before it is decided on and every decision before it is acted
on; the executor is closed whatever happens; the clock of a resumed run goes on where it stopped.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Protocol

from dovetail import applications
from dovetail.controller.controller import Controller
from dovetail.core.eventlog import Log
from dovetail.core.protocol import (
    Action,
    Checkpoint,
    Event,
    Executor,
    Interrupted,
    Launch,
    Note,
    Resize,
    Stop,
    Tick,
    Unwanted,
)
from dovetail.host import processes
from dovetail.run import job_time
from dovetail.run.live_table import Live
from dovetail.run.orders import Orders

LOOK = 0.25
"""Seconds between looks at the ranks while something is measured: far below the window of one."""
REST = 1.0
"""The same while nothing is: each look is logged, and a day has 86,400 seconds."""


class Waiting(Executor, Protocol):
    """An executor that the loop can sleep on."""

    def wait(self, timeout: float) -> bool:
        """Sleep until something happens or `timeout` seconds are over; True if it happened."""

    def silent(self) -> bool:
        """Whether nobody answers any more who could end the simulations."""

    def hurry(self) -> None:
        """Have `close` take no more than a few seconds; from a signal's handler too."""

    def news(self) -> Sequence[str]:
        """What the user should know of the place where simulations run, since the last call."""


WISHES = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip


class Signals:
    """SIGINT, SIGTERM, SIGHUP and others as wishes: to end, by the first, at once, by the second.

    SIGALRM says that the job's time is over; before that batch systems send SIGUSR1 or SIGUSR2. A
    terminal that is closed sends SIGHUP more than once, which is no second wish. `caught` is the
    first one's name, or `timeout` at the end of that time, and `hurry` what the second does
    besides. The third is an exception, should the second not help.
    """

    def __init__(self, *, hangup: bool = True) -> None:
        """Without `hangup` SIGHUP does what it did."""
        self.caught = ""
        self.count = 0
        self.hurry: Callable[[], None] = lambda: None
        heeded = [one for one in WISHES if hangup or one != signal.SIGHUP]
        self.before = {one: signal.getsignal(one) for one in heeded}

    def __enter__(self) -> Signals:
        for number, handler in self.before.items():
            if handler != signal.SIG_IGN:  # as for a job in the background of a script
                signal.signal(number, self.catch)
        return self

    def __exit__(self, *_: object) -> None:
        processes.restore_handlers(self.before.items())

    def catch(self, number: int, _: FrameType | None) -> None:
        """Handle a signal."""
        if number == signal.SIGHUP and self.caught:
            return
        self.count += 1
        name = "timeout" if number == signal.SIGALRM else signal.Signals(number).name
        self.caught = self.caught or name
        if self.count == 2:
            self.hurry()
        elif self.count > 2:
            raise KeyboardInterrupt


class Watcher(Protocol):
    """Who follows a run from within; no call takes longer than a moment."""

    def take(self, entry: Event | Action) -> None:
        """What goes into the event log."""

    def look(self, controller: Controller, t: float) -> None:
        """The run as it is now."""


class Loop:
    """One run, from the first launch to the end of the last simulation."""

    def __init__(
        self,
        controller: Controller,
        executor: Waiting,
        log: Log,
        live: Live,
        origin: float,
        signals: Signals,
        orders: Orders,
        job_end: job_time.End | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        """With `job_end`, simulations are stopped at checkpoints where the run is ended.

        It is when what the run is in ends by itself. Another program, which gives orders, has the
        run end at once by its signals: then checkpoints are for the end of that time alone.
        """
        self.controller = controller
        self.executor = executor
        self.log = log
        self.live = live
        self.origin = origin  # CLOCK_MONOTONIC at time 0 of the run
        self.signals = signals
        self.orders = orders
        self.job_end = job_end
        self.watcher = watcher
        self.unwatched = False  # told that the watcher fails
        self.unlogged = False  # told that the log cannot be written

    def now(self) -> float:
        """Seconds on the run's clock."""
        return time.monotonic() - self.origin

    def drive(self, first: Sequence[Action] = ()) -> None:
        """Take the `first` actions and run until nothing is left to do, or a signal ends it.

        A run that is to end does not wait for a cluster that is silent: its pods end by themselves.
        """
        told = False
        self.signals.hurry = self.executor.hurry
        try:
            self.act_on(first)
            if not self.signals.caught:
                self.step([Tick(self.now())])
            while not self.controller.finished and self.signals.count < 2:
                self.executor.wait(LOOK if self.controller.measuring else REST)
                t = self.now()
                if self.job_end and not self.signals.caught and self.job_end.due():
                    self.signals.caught = "timeout"
                new = self.interrupted(t) if self.signals.caught and not told else Tick(t)
                told = told or isinstance(new, Interrupted)
                unwanted = [Unwanted(t, name, "cancelled") for name in self.orders.take()]
                seen = self.executor.observe(t)
                told = told or any(isinstance(event, Interrupted) for event in seen)
                self.step([*seen, *unwanted, new])
                self.tell(t)
                self.show(t)
                if told and self.executor.silent():
                    break
        finally:
            self.executor.close()
            self.tell(self.now())
        if not self.controller.finished:
            t = self.now()
            self.step([*([] if told else [self.interrupted(t)]), *self.executor.observe(t)])
            self.show(t)

    def show(self, t: float) -> None:
        """Let who looks on see the run."""
        self.live.show(self.controller, t)
        self.watch(lambda watcher: watcher.look(self.controller, t))

    def tell(self, t: float) -> None:
        """Pass on what the user should know of the place where simulations run."""
        for line in self.executor.news():
            self.live.note(t, Note("place", line))

    def interrupted(self, t: float) -> Interrupted:
        """What the controller is told of a signal, or of the end of the job's time."""
        within = 0.0
        if self.job_end and (not self.orders.given or self.signals.caught == "timeout"):
            left = self.job_end.at - time.monotonic() - job_time.RESERVE
            within = max(1.0, min(self.controller.settings.halt, left))
        return Interrupted(t, f"interrupted by {self.signals.caught}", within)

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
            spec = applications.form(self.controller.spec(action.name), action.continued)
            self.executor.launch(spec, action.share)
        elif isinstance(action, Resize):
            self.executor.resize(action.shares)
        elif isinstance(action, Stop):
            self.executor.stop(action.name, action.why, action.cause)
        elif isinstance(action, Checkpoint):
            self.executor.checkpoint(action.name)
        elif isinstance(action, Note):
            self.live.note(self.now(), action)

    def record(self, entry: Event | Action) -> None:
        """Log; a full disk delays the log and does not end the run."""
        self.log.write(entry)
        if self.log.failed and not self.unlogged:
            why = f"the event log is kept in memory until it can be written: {self.log.failed}"
            self.live.note(self.now(), Note("hold", why))
        self.unlogged = bool(self.log.failed)
        self.watch(lambda watcher: watcher.take(entry))

    def watch(self, how: Callable[[Watcher], None]) -> None:
        """Let the watcher follow; whatever it fails at does not end the run, and is said once."""
        if not self.watcher:
            return
        try:
            how(self.watcher)
        except Exception as error:
            if not self.unwatched:
                self.live.say(f"metrics are not all right from now on: {error!r}")
            self.unwatched = True
