# SPDX-License-Identifier: LGPL-3.0-or-later
"""`dovetail run`: the main job, a plan's simulations packed on a machine or cluster.

Input: a plan. Output: the run's directory with `events.jsonl`, `summary.json`, `report.html` and,
per simulation, its log and case. Invariant: bad input is found before anything is written.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import json
import os
import platform
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from usernetes_setup.node import cgroups

from dovetail.controller import settings as policy
from dovetail.controller.controller import Controller
from dovetail.core import eventlog
from dovetail.core.errors import BadInput, WorkFailed
from dovetail.core.protocol import Action, Capacity, Node, Spec
from dovetail.plan import schema, yaml_lines
from dovetail.report import summary
from dovetail.run import resume as replay
from dovetail.run import target
from dovetail.run.live_table import Live
from dovetail.run.loop import Loop, Orders, Signals

HELP = "run a queue of MPI simulations, packed where that pays"
LOG = "events.jsonl"


def configure(parser: argparse.ArgumentParser) -> None:
    """Options; see dovetail-run(1)."""
    parser.add_argument("plan", metavar="PLAN.yaml", type=Path, help="what to run")
    parser.add_argument(
        "-o", "--output", metavar="DIR", type=Path, default=Path("dovetail-out"),
        help="where everything is written (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="go on with the run in DIR")
    parser.add_argument("--dry-run", action="store_true", help="check and show, start nothing")
    parser.add_argument(
        "--kubeconfig", metavar="FILE", type=Path,
        help="run the simulations as pods on this cluster, not as processes here",
    )  # fmt: skip
    parser.add_argument(
        "--network", choices=("host", "bridge"), default="",
        help="the network of the pods: their nodes', or the cluster's own (default: host)",
    )  # fmt: skip
    parser.add_argument(
        "--plan-copy", metavar="FILE", type=Path,
        help="read the plan from FILE, a copy; paths in it are still relative to PLAN.yaml",
    )  # fmt: skip
    parser.add_argument(
        "--orders", action="store_true", help="read lines `stop NAME` from standard input"
    )


def run(args: argparse.Namespace) -> int:
    """Run a plan; 0 if all simulations are done, 1 if not, 130 if interrupted."""
    asked = schema.load(args.plan, args.plan_copy and yaml_lines.read(args.plan_copy))
    for line in schema.warnings(asked):
        print(f"dovetail: {line}", file=sys.stderr)
    if args.kubeconfig is not None:
        place = target.cluster(args.kubeconfig, args.network)
    elif args.network:
        raise BadInput("--network is for pods; name their cluster with --kubeconfig")
    else:
        place = target.here()
    place.check(asked)
    check_output(asked, args.output)
    if args.dry_run:
        return show(asked, place.cpu(asked), as_json=args.json)
    check_directory(args.output, resume=args.resume)
    held = lock(args.output)
    try:
        check_directory(args.output, resume=args.resume)  # now that nobody else writes it
        with Signals() as signals:
            log = execute(
                asked, args.output, signals, resume=args.resume, quiet=args.json, place=place,
                orders=Orders(0 if args.orders else None),
            )  # fmt: skip
            return finish(args.output, signals, log, as_json=args.json)
    finally:
        os.close(held)


def lock(directory: Path) -> int:
    """Make the directory and hold it, since two runs would mix their logs.

    Returns a file to close; the kernel does so, however the process ends.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise BadInput(f"{directory}: cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise BadInput(f"{directory}: another run is using it; choose another -o") from None
    except OSError:
        pass  # many network file systems cannot lock a directory, and are good for all else
    return held


def check_output(asked: schema.Plan, directory: Path) -> None:
    """Refuse a directory that lies in a case."""
    path = directory.resolve()
    for case in {spec.case for spec in asked.specs}:
        if Path(case).resolve() in (path, *path.parents):
            raise BadInput(f"{directory}: lies in the case {case}, of which copies go there")


def check_directory(directory: Path, *, resume: bool) -> None:
    """Refuse a directory that holds a run, or with `resume` one that holds none."""
    there = (directory / LOG).exists()
    if there and not resume:
        raise BadInput(f"{directory}: holds a run already; go on with --resume or choose another")
    if resume and not there:
        raise BadInput(f"{directory}: holds no run to resume; there is no {LOG}")


def execute(
    asked: schema.Plan,
    directory: Path,
    signals: Signals,
    *,
    resume: bool = False,
    quiet: bool = False,
    settings: policy.Settings | None = None,
    place: target.Place | None = None,
    orders: Orders | None = None,
) -> eventlog.Log:
    """Drive the run to its end; returns its log. `settings` are for a new run, not a resumed one.

    The plan's `max_packed` is put into the settings. `place` is this machine by default.
    """
    tuned = replace(settings or policy.Settings(), max_packed=asked.limits.max_packed or 0)
    spent = resumable(directory / LOG, asked) if resume else 0.0
    origin = time.monotonic() - spent
    place = place or target.here()
    executor = place.start(asked, directory, origin, resume=resume)
    try:
        capacity = executor.capacity()
        first: list[Action] = []
        if resume:
            controller = replay.rebuild(directory / LOG)
            alive = place.adopt(controller)
            log = eventlog.Log.append(directory / LOG)
            log.resume(spent, capacity, alive)
            first = controller.resume(spent, capacity, alive)
        else:
            controller = Controller(asked.specs, capacity, tuned)
            used = versions(place.launcher())
            head = eventlog.header(asked.specs, capacity, tuned.plain(), used)
            log = eventlog.Log.create(directory / LOG, head)
        with Live(quiet=quiet) as live:
            if place.launcher():
                live.say(f"simulations become {place.launcher()}")
            if not capacity.weights:
                live.say("no control group can be made here: simulations run without CPU weights")
                if scope := cgroups.scope():
                    live.say(f"with `{shlex.join(scope)} dovetail run` they would have them")
            Loop(controller, executor, log, live, origin, signals, orders).drive(first)
        for line in place.troubles():
            live.say(line)
        log.close()
        return log
    except eventlog.LogStopped as error:
        raise WorkFailed(f"the event log cannot be written: {error}") from error
    finally:
        executor.close()


def resumable(log: Path, asked: schema.Plan) -> float:
    """Seconds that the run in `log` has taken so far; BadInput if it was of another plan."""
    head, entries = eventlog.read(log)
    packed = head.settings.get("max_packed", 0)
    if head.specs != asked.specs or packed != (asked.limits.max_packed or 0):
        raise BadInput(f"{log}: the run was started with another plan; resume with the same one")
    return max((entry.t for entry in entries if hasattr(entry, "t")), default=0.0)


def versions(launcher: str) -> dict[str, str]:
    """What ran the run."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    return {**found, "launcher": launcher} if launcher else found


def finish(directory: Path, signals: Signals, log: eventlog.Log, *, as_json: bool) -> int:
    """Write summary and report, print the table; the exit code."""
    found, history = summary.load(directory, log.held)
    from dovetail.report import html  # the template engine takes a while to import

    try:
        path, trouble = html.publish(directory, found, history), log.failed
    except (BadInput, WorkFailed) as error:
        path, trouble = None, str(error)
    if as_json:
        print(json.dumps(found.to_json(), indent=1, allow_nan=False), flush=True)
    else:
        console = Console(highlight=False)
        summary.show(found, console)
        if path:
            console.print(f"report: {path}", soft_wrap=True, markup=False)
    if signals.caught:
        print(f"dovetail: interrupted by {signals.caught}", file=sys.stderr)
        return 130
    if trouble:
        raise WorkFailed(trouble)
    return 0 if all(one.state == "done" for one in found.simulations) else 1


def show(asked: schema.Plan, cpus: int, *, as_json: bool) -> int:
    """What would run on so many millicores, with the first requests: of one simulation alone."""
    rows = [(spec, first_requests(spec, cpus)) for spec in asked.specs]
    if as_json:
        found = [{**eventlog.plain(spec), "requests": list(asks)} for spec, asks in rows]
        print(json.dumps({"cpus": cpus, "simulations": found}))
        return 0
    table = Table(title=f"{len(rows)} simulations on {cpus}m of CPU", title_justify="left")
    for name in ("simulation", "ranks", "first requests", "slowdown", "command"):
        table.add_column(name)
    for spec, asks in rows:
        text = " ".join(f"{one}m" for one in asks[:8]) + (" …" if len(asks) > 8 else "")
        words = " ".join(spec.command)
        table.add_row(spec.name, str(spec.ranks), text, f"{spec.slowdown:g}", words)
    Console(highlight=False).print(table)
    return 0


def first_requests(spec: Spec, cpus: int) -> tuple[int, ...]:
    """Requests of a simulation that runs alone and has not been measured, millicores."""
    capacity = Capacity((Node("here", cpus, 0),))
    return policy.fit_requests([policy.rank_needs(spec, None)], capacity)[0]
