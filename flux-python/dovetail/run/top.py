# SPDX-License-Identifier: LGPL-3.0-or-later
"""Like htop, for the simulations and ranks of a run that goes on elsewhere.

Input: the run's output directory, and keys. Output: a table on the terminal, once a second, until
it is left; one table where there is no terminal. Invariants: nothing of the run is changed but what
the user says twice; the terminal is as before, however it is left.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import termios
import textwrap
import tty
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Callable, get_args

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dovetail.controller.views import View
from dovetail.core.contention import Throttling
from dovetail.core.errors import WorkFailed
from dovetail.core.protocol import EndState
from dovetail.core.units import printable, progress, rounded
from dovetail.run import orders
from dovetail.run.follow import Follower, RankShare
from dovetail.run.live_table import margin

EVERY = 1.0
"""Seconds between two looks."""
ACTIVE = ("preparing", "starting", "running", "suspended", "halting", "terminating")
MOVING = tuple(one for one in ACTIVE if one != "suspended")
"""Whose ranks do what was last seen of them."""
ENDED = get_args(EndState)
HELP = "q quit   s sort   up/down choose   l log   c cancel   a all"
_KEY = re.compile(rb"\x1b(?:[\[O][0-9;]*.?)?|.", re.DOTALL)
_LAST = float("inf")
SORTS: dict[str, Callable[[View], float]] = {
    "plan": lambda view: 0.0,
    "slowdown": lambda view: -(view.slowdown or 0.0),
    "rate": lambda view: -(view.rate or 0.0),
    "end": lambda view: _LAST if view.left is None else view.left,
}
"""The orders that `s` goes through."""


class Screen:
    """What is shown, and how the user wants it."""

    def __init__(self, follower: Follower, directory: Path) -> None:
        self.follower, self.directory = follower, directory
        self.sort, self.all, self.log, self.chosen = "plan", False, False, ""
        self.cancels = ""  # what the user is asked about
        self.said = ""  # in place of the keys, until the next one

    def views(self) -> list[View]:
        """The simulations that are shown, in their order."""
        controller = self.follower.controller
        if not controller:
            return []
        every = self.all or self.follower.over
        found = controller.views() if every else controller.active_views()
        return sorted(found, key=SORTS[self.sort])

    def key(self, key: str) -> bool:
        """Do what a key says; False to quit."""
        names = [view.name for view in self.views()]
        at = names.index(self.chosen) if self.chosen in names else -1
        self.said, asked, self.cancels = "", self.cancels, ""
        if asked:
            if key == "y":
                self._cancel(asked)
        elif key == "c" and self._goes_on(self.chosen):
            self.cancels = self.chosen
        elif key == "s":
            words = [*SORTS]
            self.sort = words[(words.index(self.sort) + 1) % len(words)]
        elif key == "a":
            self.all = not self.all
        elif key == "l":
            self.log = not self.log
        elif key in ("up", "down") and names:
            step = 1 if key == "down" else -1
            self.chosen = names[max(0, min(len(names) - 1, at + step))]
        return key not in ("q", "\x03")

    def _goes_on(self, name: str) -> bool:
        return any(view.name == name and view.state not in ENDED for view in self.views())

    def _cancel(self, name: str) -> None:
        """Ask the run for it; whether it does, the table shows."""
        try:
            orders.cancel(self.directory, name)
            self.said = f"{name}: the run is asked to cancel it"
        except WorkFailed as error:
            self.said = str(error)

    def draw(self, width: int, height: int, keys: bool) -> Group:
        """All of it, in so many columns and lines; with a line about `keys`, if there are any."""
        follower = self.follower
        decided = follower.controller.decided() if follower.controller else []
        decided = [printable(line) for line in decided]
        if len(decided) == 1:
            decided = textwrap.wrap(decided[0], max(1, width))
        parts: list[Any] = [_head(follower, self.sort, self.all)]
        parts += [Text("\n".join(decided))] if decided else []
        views = self.views()
        if self.chosen not in [view.name for view in views]:
            self.chosen = views[0].name if views else ""
        log = 8 if self.log and self.chosen else 0
        below = len(decided) + len(follower.notes) + log + 3
        parts.append(self._table(views, width, max(4, height - below - 4)))
        if log:
            parts.append(Text(printable(f"{self.chosen}/log"), style="bold"))
            parts.append(Text("\n".join(_tail(self.directory / self.chosen / "log", log - 1))))
        parts.append(Text("\n".join(follower.notes), style="dim"))
        if keys:
            asks = f"cancel {self.cancels}? y: yes, any other key: no" if self.cancels else ""
            parts.append(Text(printable(asks or self.said or HELP), style="reverse"))
        for part in parts:
            if isinstance(part, Text):
                part.no_wrap, part.overflow = True, "ellipsis"
        return Group(*parts)

    def _table(self, views: list[View], width: int, rows: int) -> Table:
        wide = width >= 120
        made = Table(box=None, padding=(0, 1, 0, 0), header_style="reverse")
        made.add_column("simulation", no_wrap=True)
        made.add_column("state", no_wrap=True)
        stops = {view.name: self.follower.contention(view.name).throttling for view in views}
        limited = wide and any(stops.values())
        right = ["rank", "duty", "CPU", "request"]
        right += ["lost", "queued", "iterations"] if wide else []
        right += ["per s", "slow", "end in", *["throttled"] * limited]
        for name in right:
            made.add_column(name, justify="right", no_wrap=True)
        if wide:
            made.add_column("waits", no_wrap=True)
        used = 0
        for at, view in enumerate(views):
            shares = self.follower.ranks(view.name) if view.state in MOVING else []
            if used + 1 >= rows and at < len(views) - 1:
                made.add_row(f"and {len(views) - at} more", style="dim")
                break
            first = _row(view, wide, [_percent(stops[view.name])] * limited)
            style = "bold" if view.name == self.chosen else ""
            shown = 6 if wide else 4
            lines = [_rank(view, shares, rank)[:shown] for rank in range(view.ranks)]
            lines = lines or [("-",) * shown]
            room = max(1, min(len(lines), rows - used - (len(views) - at - 1)))
            for n, line in enumerate(lines[:room]):
                name, state, *rest = first if n == 0 else ("", "", *("",) * (len(first) - 2))
                if n == room - 1 and room < len(lines):
                    line = (f"{n}-{len(lines) - 1}", *("…",) * (shown - 1))
                cells = (name, state, *line, *rest)
                made.add_row(*(Text(printable(cell)) for cell in cells), style=style)
            used += room
        return made


def _head(follower: Follower, sort: str, everything: bool) -> Text:
    controller = follower.controller
    if controller is None:
        return Text("the run has not begun", style="bold")
    status = controller.status()
    counts = ", ".join(f"{count} {state}" for state, count in status.counts.items())
    words = f"{follower.t:.0f} s   {counts}   phase: {status.phase}   by {sort}"
    if everything:
        words += ", all"
    if follower.over:
        words += "   the run is over"
    elif follower.silent is not None:
        words += f"   nothing new for {follower.silent:.0f} s: it may have been killed"
    return Text(words, style="bold")


def _rank(view: View, shares: list[RankShare], rank: int) -> tuple[str, ...]:
    """Its number, duty cycle, the CPU that it gets, its request, the time lost, and that queued."""
    share = shares[rank] if rank < len(shares) else RankShare(None, None, None, None)
    request = f"{view.requests[rank]}m" if rank < len(view.requests) else "-"
    cpu = "-" if share.cpu is None else f"{1000 * share.cpu:.0f}m"
    parts = (share.duty, share.lost, share.queued)
    duty, lost, queued = ("-" if part is None else f"{part:.0%}" for part in parts)
    return str(rank), duty, cpu, request, lost, queued


def _percent(stops: Throttling | None) -> str:
    return f"{stops.share:.0%}" if stops else "-"


def _row(view: View, wide: bool, throttled: list[str]) -> tuple[str, ...]:
    """What there is of a simulation as a whole; its rank comes in between."""
    known = [
        "-" if view.rate is None else rounded(view.rate) + margin(view) * wide,
        "-" if view.slowdown is None else f"{view.slowdown:.2f}",
        "-" if view.left is None else _span(view.left),
    ]
    if wide:
        known = [progress(view.iterations, view.measure), *known, *throttled, view.waits]
    return (view.name, view.state, *known)


def _span(seconds: float) -> str:
    whole = round(seconds)
    if whole < 600:
        return f"{whole} s"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"


def _tail(path: Path, lines: int) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 200 * lines))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return [f"no log: {error.strerror}"]
    return [
        "".join(c if c.isprintable() else " " for c in one) for one in text.splitlines()[-lines:]
    ]


def snapshot(follower: Follower) -> dict[str, Any]:
    """The state of the run as plain JSON values; what is unknown is null."""
    controller = follower.controller
    simulations = []
    for view in controller.views() if controller else []:
        shares = follower.ranks(view.name) if view.state in MOVING else []
        stops = follower.contention(view.name).throttling
        ranks = [
            {
                "request": view.requests[rank] if rank < len(view.requests) else None,
                "duty": shares[rank].duty if rank < len(shares) else None,
                "cpu": shares[rank].cpu if rank < len(shares) else None,
                "lost": shares[rank].lost if rank < len(shares) else None,
                "queued": shares[rank].queued if rank < len(shares) else None,
            }
            for rank in range(view.ranks)
        ]
        simulations.append(
            {
                "name": view.name, "state": view.state, "iterations": view.iterations,
                "measure": view.measure, "rate": view.rate, "error": view.error,
                "slowdown": view.slowdown,
                "left": view.left, "wait": view.wait.mode, "ranks": ranks,
                "throttled": stops.share if stops else None,
            }
        )  # fmt: skip
    return {
        "seconds": follower.t,
        "over": follower.over,
        "silent": follower.silent,
        "decided": controller.decided() if controller else [],
        "simulations": simulations,
    }


def show(directory: Path, log: str) -> int:
    """Show a run until the user quits, or once if no terminal can draw it; 0."""
    screen = Screen(Follower(directory, log), directory)
    console = Console(highlight=False)
    shown = console.is_terminal and sys.stdout.isatty()  # the first holds for FORCE_COLOR too
    if not (shown and sys.stdin.isatty()) or console.is_dumb_terminal:  # where nothing is drawn
        if not shown:
            console.width = 160
        console.print(screen.draw(console.width, 1000, keys=False))
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    asked: list[int] = []  # by Ctrl-Z; looked at between two pictures
    while True:
        asked.clear()
        before = signal.signal(signal.SIGTSTP, lambda number, _: asked.append(number))
        if not _follow(screen, console, asked):
            return 0
        signal.signal(signal.SIGTSTP, before or signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # goes on here, in the foreground again


def _follow(screen: Screen, console: Console, asked: list[int]) -> bool:
    """Show the run until the user quits, or asks for a pause: then True."""
    with _keys() as key, Live(console=console, screen=True, auto_refresh=False) as live:
        while not asked:
            screen.follower.look()
            live.update(screen.draw(console.width, console.height, keys=True), refresh=True)
            pressed = key(EVERY)
            if pressed is not None and not screen.key(pressed):
                return False
    return True


def _interrupt(number: int, _: FrameType | None) -> None:
    """Let a signal give the terminal back as Ctrl-C does."""
    raise KeyboardInterrupt


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str | None]]:
    """A function that waits so many seconds for a key, while the terminal gives each at once."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    typed: list[bytes] = []  # what came together with a key that was given already

    def key(seconds: float) -> str | None:
        if not typed:
            if not select.select([fd], [], [], seconds)[0]:
                return None
            typed.extend(_KEY.findall(os.read(fd, 1024)))
            if not typed:
                return "q"  # the terminal is gone
        one = typed.pop(0)
        return {b"\x1b[A": "up", b"\x1b[B": "down"}.get(one, one[:1].decode(errors="replace"))

    try:
        tty.setcbreak(fd)
        yield key
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
