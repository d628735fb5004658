# SPDX-License-Identifier: LGPL-3.0-or-later
"""A run from its plan to its report: joins plan, controller, executor and event log.

Inputs: a plan, where its simulations go, an output directory. Outputs: `events.jsonl`,
`summary.json`, `report.html` and, per simulation, its log and case, all in that directory; what
came of it as a `RunOutcome`. Invariants: bad input is found before anything is written; one run
at a time writes to a directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import math
import os
import platform
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail import applications
from dovetail.controller.choice import Schedule
from dovetail.controller.controller import Controller
from dovetail.controller.settings import Settings
from dovetail.controller.shares import fit_requests, rank_needs
from dovetail.core import eventlog
from dovetail.core.errors import BadInput, WorkFailed
from dovetail.core.protocol import Action, Capacity, Node, Spec
from dovetail.host.private_files import looking, written
from dovetail.plan import schema
from dovetail.report import alternatives
from dovetail.run import job_time, target
from dovetail.run.live_table import Live
from dovetail.run.loop import Loop, Signals
from dovetail.run.orders import Orders
from dovetail.run.resume import taken_up

if TYPE_CHECKING:  # the report's libraries take a while to import, see `execute`
    from dovetail.report import summary
    from dovetail.run.metrics_server import Server

LOG = "events.jsonl"
REPORT = "dovetail.report.html"
BEGUN = 0.05  # seconds in which the first simulations are launched; their ranks come later


@dataclass(frozen=True)
class RunOutcome:
    """What came of a run.

    `report` is the file for the user, None if it could not be written; `trouble` says what went
    wrong beside the simulations, `interrupted` names the first signal; both are empty for none.
    """

    summary: summary.Summary
    report: Path | None
    trouble: str
    interrupted: str

    @property
    def done(self) -> bool:
        """Whether every simulation is."""
        return all(one.state == "done" for one in self.summary.simulations)


def check(
    asked: schema.Plan, place: target.Place, directory: Path, *, checkpoint: bool = False
) -> None:
    """Refuse a plan that can never run there, and a directory where a case would be written to,
    what is of no run replaced, or the report fail as its alternatives are damaged.

    So it is with a simulation that may be stopped at a checkpoint, and cannot, and with a run that
    is to stop its simulations at a `checkpoint` where none may.
    """
    if checkpoint and not any(spec.checkpoint for spec in asked.specs):
        raise BadInput("checkpoint: no simulation of the plan has `checkpoint: allowed`")
    place.check(asked)
    for spec in {spec.family: spec for spec in asked.specs if spec.checkpoint}.values():
        try:
            applications.check_checkpoints(spec)
        except BadInput as error:
            raise BadInput(f"{spec.family}: `checkpoint: allowed` cannot be: {error}") from None
    with looking(directory):
        path = directory.resolve()
    for name in (str(path), *(spec.case for spec in asked.specs)):
        if name.encode(errors="replace").decode() != name:
            raise BadInput(
                f"{name!r}: this path is no text in UTF-8, as the event log has to be; "
                "rename its folder, or use a UTF-8 locale"
            )
    cases = {Path(case).resolve(): case for case in {spec.case for spec in asked.specs}}
    homes = _homes(directory, {spec.name for spec in asked.specs})
    for real, case in cases.items():
        if real in _up(path):
            raise BadInput(f"{directory}: lies in the case {case}, of which copies go there")
    inside = [(homes[at], case) for real, case in cases.items() for at in _up(real) if at in homes]
    inside += [(name, cases[at]) for home, name in homes.items() for at in _up(home) if at in cases]
    for name, case in inside:
        raise BadInput(
            f"{directory}: simulation {name} would be written into the case {case}; "
            "choose another -o"
        )
    with looking(directory):
        taken = () if (path / LOG).exists() else homes  # those of a run that is there are its own
        theirs = [(homes[one], "case") for one in taken if (one / "case").exists()]
        theirs += [(homes[one], "log") for one in taken if (one / "log").exists()]
        if path.is_dir():
            alternatives.read(directory)  # else the report would fail, once all has run
    for name, what in theirs:
        raise BadInput(
            f"{directory}: has {name}/{what} of no run, which simulation {name} would replace; "
            "choose another -o"
        )
    strange = re.search(r"[\s'\"]", str(path))
    if strange and any(spec.application == "openfoam" for spec in asked.specs):
        raise BadInput(
            f"{directory}: OpenFOAM reads no case in a folder with {strange[0]!r} in its name; "
            "choose another -o"
        )


def _homes(directory: Path, names: set[str]) -> dict[Path, str]:
    """The simulations' folders that are there already, with their names; links are followed."""
    with looking(directory):
        there = os.listdir(directory) if directory.is_dir() else ()
        return {(directory / name).resolve(): name for name in names.intersection(there)}


def _up(path: Path) -> tuple[Path, ...]:
    """A folder and those that it lies in."""
    return (path, *path.parents)


def run(
    asked: schema.Plan,
    directory: Path,
    *,
    place: target.Place | None = None,
    resume: bool = False,
    quiet: bool = False,
    settings: Settings | None = None,
    orders: Orders | None = None,
    scope: Callable[[], Sequence[str]] = tuple,
    checkpoint: bool = False,
    metrics: str | None = None,
) -> RunOutcome:
    """Run a plan to its end and write its report.

    `place` is this machine by default, `settings` are for a new run, not a resumed one. `scope`
    gives the words to put before a command so that control groups can be made here. With
    `checkpoint`, an end that comes too early stops simulations at checkpoints where it can.
    `metrics` is where these are served, if they are; see dovetail-metrics(5).
    """
    place = place or target.here()
    check_directory(directory, resume=resume)
    with contextlib.ExitStack() as open_now:
        server = None
        if metrics is not None:
            from dovetail.run import metrics_server

            server = open_now.enter_context(metrics_server.Server(metrics))
        open_now.enter_context(held(directory))
        check_directory(directory, resume=resume)  # now that nobody else writes it
        # Simulations on a cluster outlive us, and are taken over; those here end with us.
        with Signals(hangup=isinstance(place, target.Here)) as signals:
            if server:
                server.keep_token(directory)
            log = execute(
                asked, directory, signals, place=place, resume=resume, quiet=quiet,
                settings=settings, orders=orders, scope=scope, checkpoint=checkpoint, server=server,
            )  # fmt: skip
            return publish(directory, log, signals)


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Make the directory and lock it, since two runs would mix their logs.

    The kernel ends the lock, however the process ends.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if not os.access(directory, os.W_OK | os.X_OK):
            os.close(lock)
            read_only = os.statvfs(directory).f_flag & os.ST_RDONLY
            raise OSError(0, os.strerror(errno.EROFS if read_only else errno.EACCES))
    except OSError as error:
        raise BadInput(f"{directory}: cannot be used: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"{directory}: another run is using it; choose another -o") from None
        except OSError:
            pass  # many network file systems cannot lock a directory, and are good for all else
        yield
    finally:
        os.close(lock)


def check_directory(directory: Path, *, resume: bool) -> None:
    """Refuse a directory that holds a run, or with `resume` one that holds none."""
    with looking(directory):
        there = written(directory / LOG)
    if there and not resume:
        raise BadInput(f"{directory}: holds a run already; go on with --resume or choose another")
    if resume and not there:
        why = f"{LOG} is empty" if (directory / LOG).exists() else f"there is no {LOG}"
        raise BadInput(f"{directory}: holds no run to resume; {why}")


def execute(
    asked: schema.Plan,
    directory: Path,
    signals: Signals,
    *,
    place: target.Place | None = None,
    resume: bool = False,
    quiet: bool = False,
    settings: Settings | None = None,
    orders: Orders | None = None,
    scope: Callable[[], Sequence[str]] = tuple,
    checkpoint: bool = False,
    server: Server | None = None,
) -> eventlog.Log:
    """Drive the simulations to their ends; returns the log. The parameters are those of `run`.

    `server` is what serves metrics. The plan's `max_packed` is put into the settings.
    """
    tuned = replace(settings or Settings(), max_packed=asked.limits.max_packed or 0)
    spent = resumable(directory / LOG, asked) if resume else 0.0
    origin = time.monotonic() - spent
    place = place or target.here()
    signals.hurry = place.hurry
    instance = job_time.instance(for_us_alone=bool(orders and orders.given))
    executor = place.start(asked, directory, origin, resume=resume)
    try:
        capacity = executor.capacity()
        first: list[Action] = []
        if resume:
            controller, untold = taken_up(directory / LOG)
            log = eventlog.Log.append(directory / LOG)  # or what runs there is left to itself
            alive = place.adopt(controller)
            for action in untold:
                log.write(action)
            log.resume(spent, capacity, alive)
            first = controller.resume(spent, capacity, alive)
        else:
            specs = tuple(map(expected, asked.specs))
            controller = Controller(specs, capacity, tuned)
            used = versions(place.launcher())
            head = eventlog.header(specs, capacity, tuned.plain(), used)
            log = eventlog.Log.create(directory / LOG, head)
        with Live(quiet=quiet) as live:
            if place.launcher():
                live.say(f"simulations become {place.launcher()}")
            for line in moldable(asked.specs):
                live.say(line)
            if not capacity.weights:
                live.say("no control group can be made here: simulations run without CPU weights")
                if words := scope():
                    live.say(f"with `{shlex.join(words)} dovetail run` they would have them")
            wanted = min(asked.limits.max_packed or len(asked.specs), capacity.cpu // 1000)
            if 0 < (most := capacity.simulations) < wanted:
                live.say(f"at most {most} run at once: no more files may be open here (ulimit -Hn)")
            allowed = checkpoint and any(spec.checkpoint for spec in asked.specs)
            end = job_time.End(instance) if allowed else None
            if end and end.left < math.inf:
                told = f"the job has {end.left:.0f} s; checkpoints are written {end.early:.0f} s"
                live.say(f"{told} before")
            watcher = None
            if server:
                from dovetail.run.metrics import Metrics

                watcher = Metrics(directory, capacity, place.launcher())
                watcher.look(controller, spent)
                live.say(server.start(watcher.render))
            # What the report needs is loaded while simulations run, not while they wait for it.
            threading.Thread(target=load_report, args=(quiet,), daemon=True).start()
            asks = orders or Orders()
            asks.listen(directory)
            loop = Loop(controller, executor, log, live, origin, signals, asks, end, watcher)
            try:
                loop.drive(first)
            finally:
                asks.forget()
                if end:
                    end.close()
        for line in place.troubles():
            live.say(line)
        log.close()
        return log
    except eventlog.LogStopped as error:
        raise WorkFailed(f"the event log cannot be written: {error}") from error
    except KeyboardInterrupt:
        executor.hurry()
        raise
    finally:
        executor.close()


def load_report(quiet: bool) -> None:
    """Make ready what makes reports, and what shows them, once the first simulations are launched.

    None of it is waited for at the end then.
    """
    time.sleep(BEGUN)
    importlib.import_module(REPORT).templates().get_template("report.html")
    eventlog.make_readers()
    if not quiet:
        importlib.import_module("rich.table")


def resumable(log: Path, asked: schema.Plan) -> float:
    """Seconds that the run in `log` has taken so far; BadInput if it was of another plan."""
    head, entries = eventlog.scan(log)
    packed = head.settings.get("max_packed", 0)
    same = len(head.specs) == len(asked.specs) and all(map(_same, head.specs, asked.specs))
    if not same or packed != (asked.limits.max_packed or 0):
        raise BadInput(f"{log}: the run was started with another plan; resume with the same one")
    return max((entry.t for entry in entries if hasattr(entry, "t")), default=0.0)


def expected(spec: Spec) -> Spec:
    """With the iterations that its case says it takes."""
    return replace(spec, iterations=applications.expected_iterations(spec))


def _same(recorded: Spec, asked: Spec) -> bool:
    """Whether a simulation is the recorded one; how long it takes may have been read off since."""
    unknown = bool(asked.widths or asked.checkpoint) and not asked.iterations
    return asked == (replace(recorded, iterations=0) if unknown else recorded)


def moldable(specs: Sequence[Spec]) -> list[str]:
    """For each plan entry whose ranks are seen to by its application, which that is, in words."""
    entries = {spec.family: spec for spec in specs if spec.widths}
    found = []
    for name, spec in entries.items():
        *others, most = map(str, spec.widths)
        on = f"{', '.join(others)} or {most}" if others else most
        found.append(f"{name}: {spec.application}, on {on} ranks")
    return found


def versions(launcher: str) -> dict[str, str]:
    """What ran the run."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    return {**found, "launcher": launcher} if launcher else found


def publish(directory: Path, log: eventlog.Log, signals: Signals) -> RunOutcome:
    """Write summary and report."""
    from dovetail.report import html, summary

    found, history = summary.load(directory, log.held)
    path: Path | None = None
    try:
        path, trouble = html.publish(directory, found, history), log.failed
    except (BadInput, WorkFailed) as error:
        trouble = str(error)
    return RunOutcome(found, path, trouble, signals.caught)


def outlook(asked: schema.Plan, cpus: int, devices: target.Devices = ()) -> Schedule | None:
    """How a plan's ranks would be chosen on so many millicores, before anything is measured."""
    tuned = replace(Settings(), max_packed=asked.limits.max_packed or 0)
    specs = tuple(map(expected, asked.specs))
    capacity = Capacity((Node("here", cpus, 0),), devices=devices)
    return Controller(specs, capacity, tuned).outlook()


def first_requests(spec: Spec, cpus: int) -> tuple[int, ...]:
    """Requests of a simulation that runs alone and has not been measured, millicores."""
    capacity = Capacity((Node("here", cpus, 0),))
    return fit_requests([rank_needs(spec, None)], capacity)[0]
