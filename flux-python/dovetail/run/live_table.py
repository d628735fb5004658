# SPDX-License-Identifier: LGPL-3.0-or-later
"""Progress of a run on the terminal: a live table, or lines where no terminal can draw one.

Inputs: the controller's views and notes. Output: standard error. Invariants: shows only what the
controller says; a table never grows beyond `ROWS` simulations, the rest is counted; what draws a
table is loaded only for a terminal, as nothing runs meanwhile.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from dovetail.controller.controller import Controller
from dovetail.controller.views import View
from dovetail.core.protocol import Note
from dovetail.core.units import printable, progress, rounded
from dovetail.host import processes

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live as RichLive
    from rich.table import Table

ROWS = 16
NOTES = 4  # decisions shown below the table


def table(controller: Controller, t: float) -> Table:
    """The state of the run as a table: one row for each simulation that is not queued or over."""
    from rich.table import Table

    status = controller.status()
    counts = ", ".join(f"{count} {state}" for state, count in status.counts.items())
    title = f"{t:.0f} s   phase: {status.phase}   N = {status.n}   {counts}"
    made = Table(title=title, title_justify="left", title_style="bold")
    for name in ("simulation", "state"):
        made.add_column(name)
    for name in ("ranks", "iterations", "per second", "CPU request", "slowdown"):
        made.add_column(name, justify="right")
    made.add_column("waits")
    active = controller.active_views()
    for view in active[:ROWS]:
        made.add_row(*row(view))
    if len(active) > ROWS:
        made.add_row(f"and {len(active) - ROWS} more")
    return made


def row(view: View) -> tuple[str, ...]:
    """One simulation; what is not known yet is a dash."""
    return (
        view.name,
        view.state,
        str(view.ranks),
        progress(view.iterations, view.measure),
        speed(view),
        " ".join(f"{request}m" for request in view.requests[:4])
        + (" …" if len(view.requests) > 4 else ""),
        f"{view.slowdown:.2f}" if view.slowdown else "-",
        view.waits,
    )


def speed(view: View) -> str:
    """Its progress in a second, in the unit of its measure, with the error; a dash if unknown."""
    if not view.rate:
        return "-"
    return f"{rounded(view.rate)}{' CPU s' * (view.measure == 'work')}{margin(view)}"


def margin(view: View) -> str:
    """The error of a rate, to be put after it; empty where it is small, or unknown."""
    return f" ±{view.error:.0%}" if view.error is not None and 0.005 <= view.error < 1.0 else ""


class Live:
    """Shows a run until it is left; use as a context manager.

    The table is drawn as long as the run is in the terminal's foreground: beside others, as the
    shell or `dovetail top`, it has lines. Ctrl-Z gives the terminal back before it stops the run.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.notes: list[str] = []
        self.live: RichLive | None = None  # while the table is drawn
        self._console: Console | None = None  # where it can be
        self._paused: list[int] = []  # by Ctrl-Z; looked at between two pictures
        if not quiet and sys.stderr.isatty():
            from rich.console import Console

            console = Console(file=sys.stderr)
            if console.is_terminal and not console.is_dumb_terminal:  # else it would draw nothing
                self._console = console

    def __enter__(self) -> Live:
        if self._console and signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            signal.signal(signal.SIGTSTP, self._pause)
        self._begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stop()
        if signal.getsignal(signal.SIGTSTP) == self._pause:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        if self._paused:
            os.kill(os.getpid(), signal.SIGTSTP)

    def _pause(self, number: int, _: FrameType | None) -> None:
        """Handle Ctrl-Z."""
        self._paused.append(number)

    def _begin(self) -> None:
        """Draw from now on, if that is possible and nobody else does."""
        if self._console and processes.in_front(sys.stderr.fileno()):
            from rich.live import Live as RichLive

            self.live = RichLive(console=self._console, auto_refresh=False, transient=True)
            self.live.start()

    def _stop(self) -> None:
        """Give the terminal back."""
        live, self.live = self.live, None
        if live:
            try:
                live.stop()
            except OSError:
                self._unread()

    def note(self, t: float, note: Note) -> None:
        """Tell a decision: kept below the table, or printed as a line."""
        self.say(printable(f"{t:7.1f} s  {note.what:9} {note.why}"))

    def say(self, line: str) -> None:
        """Tell the user one line."""
        if self.live:
            self.notes = [*self.notes, line][-NOTES:]
            return
        try:
            print(line, file=sys.stderr, flush=True)
        except OSError:
            self._unread()

    def show(self, controller: Controller, t: float) -> None:
        """Draw the table anew; without a terminal the notes alone tell the progress."""
        if self._paused:
            self._stop()
            self._paused.clear()
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTSTP)  # goes on here, in front again or not
            signal.signal(signal.SIGTSTP, self._pause)
        try:
            if not self.live:
                self._begin()
            if self.live:
                self.live.update(self._picture(controller, t), refresh=True)
        except OSError:
            self._unread()

    def _picture(self, controller: Controller, t: float) -> Group:
        from rich.console import Group
        from rich.text import Text

        below = Text("\n".join(self.notes), style="dim", no_wrap=True, overflow="ellipsis")
        lines = controller.decided()
        several = len(lines) > 1  # one alone may be long
        decided = Text("\n".join(lines), no_wrap=several, overflow="ellipsis")
        parts = [decided] if lines else []
        return Group(table(controller, t), *parts, below)

    def _unread(self) -> None:
        """Nobody reads any more, as on a closed terminal, which is no reason to end the run."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        self._console = None
        self._stop()
