# SPDX-License-Identifier: LGPL-3.0-or-later
"""`flux dovetail COMMAND`: what a user types inside a Flux instance.

Each command is one function, `do_NAME(args)`, that sends a request to the broker module and
shows the answer. Exit codes as everywhere: 0 done, 1 the work failed, 2 bad input, 130
interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dovetail.core import units
from dovetail.core.errors import BadInput, WorkFailed
from dovetail.flux import client, format, load, plan_runner
from dovetail.host.private_files import input_path, looking, output_path, written

HELP = {
    "up": "start Kubernetes in this instance if it has none, and wait until it is up",
    "submit": "submit a plan; its simulations run one plan after the other",
    "status": "show slices and runs",
    "top": "show the same, live",
    "wait": "wait until runs have ended",
    "cancel": "end runs",
    "resize": "change the number of Kubernetes nodes, and wait until it is so",
    "kubectl": "run kubectl on the cluster",
    "url": "print where a service can be reached from a bare-metal job",
    "logs": "print the log of a run, or the output of a slice",
    "report": "print what the runs gained, and where their reports are",
    "down": "end Kubernetes and wait until nothing is left of it",
    "doctor": "say whether user-space Kubernetes can run here, and how to fix what is missing",
}


def parser() -> argparse.ArgumentParser:
    """Every command and its options."""
    top = argparse.ArgumentParser(
        prog="flux dovetail", description="User-space Kubernetes and packed simulations in Flux.",
        epilog="See flux-dovetail(1) and dovetail-flux(7).",
    )  # fmt: skip
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    made = {}
    for name, line in HELP.items():
        ours = name != "kubectl"  # what begins with a dash is kubectl's, wherever it stands
        made[name] = commands.add_parser(
            name, help=line, description=line, add_help=ours, prefix_chars="-" if ours else "\0"
        )
        if ours:
            made[name].add_argument("--json", action="store_true", help="print JSON, not text")
    made["up"].add_argument("--dovetail", metavar="nodes=N[,cores=K|all][,provider=P]",
                            help="what to start, where nothing was asked for yet")  # fmt: skip
    add = made["submit"].add_argument
    add("plan", metavar="PLAN.yaml", type=input_path, help="what to run")
    add(
        "-o",
        "--output",
        metavar="DIR",
        type=output_path,
        help="results (default: dovetail-out-NUMBER)",
    )
    add("--wait-up", action="store_true", help="first wait until Kubernetes is up")
    add("--metrics", metavar="WHERE", help="serve metrics of the run at unix:PATH or ADDRESS:PORT")
    for name in ("wait", "cancel", "report"):
        made[name].add_argument("runs", nargs="*", type=int, metavar="RUN", help="number of a run")
        made[name].add_argument("--all", action="store_true", help="all runs")
    made["resize"].add_argument("nodes", type=int, metavar="N", help="so many nodes")
    made["kubectl"].add_argument(  # a `--` among them is kubectl's too, as in `exec POD -- ls -l`
        "words", nargs=argparse.REMAINDER, metavar="...", help="arguments of kubectl"
    )
    made["url"].add_argument("service", metavar="[NAMESPACE/]SERVICE", help="the service")
    made["top"].add_argument("run", nargs="?", type=int, metavar="RUN", help="its ranks instead")
    made["logs"].add_argument("run", nargs="?", type=int, metavar="RUN", help="default: the last")
    made["logs"].add_argument("--slice", type=int, metavar="NUMBER", help="a slice's output")
    agent = commands.add_parser("slice")  # not for users, and so not in the list
    agent.add_argument("--number", type=int, required=True)
    agent.add_argument("--cluster", required=True)
    agent.add_argument("--machine-address", action="store_true")
    agent.add_argument("--timeout", type=float, default=120.0)
    agent.add_argument("--stop-before", type=float, default=0.0)
    agent.add_argument("--devices", default="auto")
    agent.add_argument("--network", default="host")
    agent.add_argument("--usernetes", default="")
    agent.add_argument("--node-image", default="")
    agent.add_argument("--sweep", action="store_true")
    return top


def show(args: argparse.Namespace, value: object, text: str) -> None:
    """The result, as JSON or as text."""
    print(json.dumps(value, indent=1) if args.json else text)


def do_up(args: argparse.Namespace) -> int:
    """Load the module if need be, and wait."""
    if args.dovetail is not None:
        load.load(args.dovetail)
    found = client.call("dovetail.wait-up")
    show(args, found, format.up(found))
    return 0


def do_submit(args: argparse.Namespace) -> int:
    """Send a plan, as it is now; relative paths are relative to where we are."""
    from dovetail.plan import schema, yaml_lines
    from dovetail.run.metrics_server import Address

    metrics = None if args.metrics is None else Address.of(args.metrics).absolute()
    content = yaml_lines.read(args.plan)
    asked = schema.load(args.plan, content)  # complains before anything is sent
    for line in schema.warnings(asked):
        print(f"flux-dovetail: {line}", file=sys.stderr)
    if args.wait_up:
        client.call("dovetail.wait-up")
    with looking("the current folder"):
        places = {"plan": os.path.abspath(args.plan), "cwd": os.getcwd()}
    if args.output is not None:
        with looking(f"-o {args.output}"):
            places["output"] = str(args.output.resolve())
            if args.output.exists() and not args.output.is_dir():
                raise BadInput(f"-o {args.output} is not a directory")
            taken = written(Path(places["output"], plan_runner.EVENTS))
        if taken:
            raise BadInput(f"-o {args.output} holds a run already; name another directory")
    for name, place in places.items():
        if not format.is_text(place):
            raise BadInput(f"{name}: {place!r} is no text in UTF-8; rename its folder")
    made = new_folder() if args.output is None else None
    if made is not None:
        places["output"] = str(made.resolve())
    order = {**places, "content": content.decode(), "environment": environment(),
             "metrics": metrics, "umask": umask()}  # fmt: skip
    try:
        found = client.call("dovetail.submit", order)
    except (BadInput, WorkFailed, KeyboardInterrupt):
        if made is not None:
            with contextlib.suppress(OSError):  # it may have been submitted, and runs
                made.rmdir()
        raise
    show(args, {**found, "output": order["output"]}, str(found["run"]))
    return 0


def environment() -> dict[str, str]:
    """What simulations shall have of ours; what a message cannot hold is left out, and said."""
    whole = format.user_environment(os.environ)
    for name in [name for name, value in whole.items() if not format.is_text(name + value)]:
        why = "is left out of the environment: it is no text in UTF-8"
        print(f"flux-dovetail: {name!a} {why}", file=sys.stderr)
        del whole[name]
    return whole


def umask() -> int:
    """Ours, which only who sets it is told."""
    found = os.umask(0o077)
    os.umask(found)
    return found


def new_folder() -> Path:
    """A directory of nobody else's, however many submit at once; as far as possible by number."""
    number = max((run["number"] for run in client.call("dovetail.status")["runs"]), default=0)
    while True:
        number += 1
        folder = Path(f"dovetail-out-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise BadInput(f"{folder}: {error.strerror}; choose a directory with -o") from None
        return folder


def do_status(args: argparse.Namespace) -> int:
    """Slices and runs, once."""
    found = client.call("dovetail.status")
    show(args, found, format.status(found))
    return 0


def do_top(args: argparse.Namespace) -> int:
    """Slices and runs, at every change, or the ranks of one run; see dovetail-top(1)."""
    if args.run is not None:
        return top_of_run(args)
    with client.connected() as link:
        for found in link.answers("dovetail.status", {}, stream=True):
            if sys.stdout.isatty() and not args.json:
                print("\x1b[H\x1b[2J", end="")
            print(json.dumps(found) if args.json else format.status(found), flush=True)
    return 0


def top_of_run(args: argparse.Namespace) -> int:
    """The simulations and ranks of a run, from its event log."""
    from dovetail.run import follow, top

    runs = {run["number"]: run for run in client.call("dovetail.status")["runs"]}
    if args.run not in runs:
        raise BadInput(f"top: there is no run {args.run}; see `flux dovetail status`")
    output = Path(runs[args.run]["output"])
    if not (output / plan_runner.EVENTS).exists():
        raise BadInput(f"top: run {args.run} is {runs[args.run]['state']}, with nothing to show")
    if args.json:
        show(args, top.snapshot(follow.Follower(output, plan_runner.EVENTS)), "")
        return 0
    return top.show(output, plan_runner.EVENTS)


def chosen(args: argparse.Namespace) -> dict[str, Any]:
    """The runs that the user named."""
    if bool(args.runs) == args.all:
        raise BadInput(f"{args.command}: name runs by their numbers, or say --all")
    return {} if args.all else {"runs": args.runs}


def do_wait(args: argparse.Namespace) -> int:
    """Wait; fails if one of the runs did."""
    found = client.call("dovetail.wait", chosen(args))["runs"]
    show(args, found, format.runs(found))
    return 0 if all(run["state"] == "done" for run in found) else 1


def do_cancel(args: argparse.Namespace) -> int:
    """End runs; their state tells when they have ended."""
    found = client.call("dovetail.cancel", chosen(args))
    show(args, found, " ".join(map(str, found["runs"])))
    return 0


def do_resize(args: argparse.Namespace) -> int:
    """More or fewer nodes."""
    found = client.call("dovetail.resize", {"nodes": args.nodes})
    show(args, found, units.counted(found["nodes"], "node"))
    return 0


def do_kubectl(args: argparse.Namespace) -> int:
    """Become kubectl; the kubeconfig is in memory alone and ends with it."""
    from usernetes_setup.build import programs

    folder = programs.built()
    program = str(folder / "bin/kubectl") if folder else shutil.which("kubectl")
    if not program:
        raise BadInput(
            "kubectl is neither on PATH nor built for this user: type `dovetail kube build` once"
        )
    if args.words not in (["-h"], ["--help"]):  # its help needs no cluster
        content = client.call("dovetail.kubeconfig")["kubeconfig"]
        memory = os.memfd_create("kubeconfig", 0)
        os.write(memory, content.encode())
        os.environ["KUBECONFIG"] = f"/proc/self/fd/{memory}"
        without_proxy(content)
    sys.stdout.flush()
    os.execv(program, ["kubectl", *args.words])


def without_proxy(kubeconfig: str) -> None:
    """Have kubectl reach our own cluster by no proxy, as everything else here does."""
    server = re.search(r'server"?: *"?(https://[^"\s]+)', kubeconfig)
    if server:
        known = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
        hosts = (known, urlsplit(server[1]).hostname)
        os.environ["NO_PROXY"] = ",".join(host for host in hosts if host)


def do_url(args: argparse.Namespace) -> int:
    """A service's address."""
    found = client.call("dovetail.url", {"service": args.service})
    show(args, found, found["url"])
    return 0


def do_logs(args: argparse.Namespace) -> int:
    """A run's log, or a slice's output."""
    if args.run is not None and args.slice is not None:
        raise BadInput("logs: give the number of a run or --slice, not both")
    found = client.call("dovetail.status")
    if args.slice is not None:
        one = next((one for one in found["slices"] if one["number"] == args.slice), None)
        if one is None:
            raise BadInput(f"logs: there is no slice {args.slice}; see `flux dovetail status`")
        try:
            words = ("eventlog", "-fjson", "--path=guest.output", str(one["job"]))
            eventlog = load.flux("job", *words)
        except WorkFailed:
            if one["state"] != "submitted":
                raise
            waits = f"slice {args.slice} waits for cores, and has not started yet"
            raise BadInput(f"logs: {waits}") from None
        log = format.output(eventlog)
        show(args, {"slice": args.slice, "log": log}, log)
        return 0
    runs = {run["number"]: run for run in found["runs"]}
    if args.run is None and not runs:
        raise BadInput("logs: no run was submitted yet")
    number = args.run if args.run is not None else max(runs)
    if number not in runs:
        raise BadInput(f"logs: there is no run {number}; see `flux dovetail status`")
    log = ""
    with contextlib.suppress(FileNotFoundError):
        log = (
            (Path(runs[number]["output"]) / plan_runner.LOG)
            .read_text(errors="replace")
            .rstrip("\n")
        )
    show(args, {"run": number, "log": log}, log)
    return 0


def do_report(args: argparse.Namespace) -> int:
    """What runs gained; all runs that have ended, unless some are named."""
    if args.runs and args.all:
        raise BadInput("report: name runs by their numbers, or say --all")
    runs: Sequence[dict[str, Any]] = client.call("dovetail.status")["runs"]
    unknown = set(args.runs) - {run["number"] for run in runs}
    if unknown:
        raise BadInput(f"report: there is no run {min(unknown)}; see `flux dovetail status`")
    found, missing = [], []
    for run in runs:
        if args.runs and run["number"] not in args.runs:
            continue
        try:
            if not run["reported"]:
                raise BadInput(run["reason"] or f"it is {run['state']}")
            summary = json.loads((Path(run["output"]) / plan_runner.SUMMARY).read_text())
            found.append({**run, "summary": summary})
        except (BadInput, OSError, ValueError) as error:
            missing.append(f"run {run['number']} has no report: {error}")
    if missing and args.runs:
        raise WorkFailed("; ".join(missing))
    lines = filter(None, [format.reports(found), *missing])
    show(args, found, "\n".join(lines) or "no run was submitted yet")
    return 0


def do_down(args: argparse.Namespace) -> int:
    """End everything."""
    client.call("dovetail.down")
    show(args, {"phase": "down"}, "Kubernetes is down")
    return 0


def do_doctor(args: argparse.Namespace) -> int:
    """Whether it can run here."""
    from usernetes_setup.preflight import report as preflight

    return preflight.main(args.json)


def do_slice(args: argparse.Namespace) -> int:
    """Be the agent of a slice; only the broker module starts this."""
    from dovetail.flux import slice_agent as agent

    return agent.main(
        args.number, args.cluster, machine_address=args.machine_address,
        timeout=args.timeout, stop_before=args.stop_before, devices=args.devices,
        network=args.network, usernetes=args.usernetes, node_image=args.node_image,
        only_sweep=args.sweep,
    )  # fmt: skip


def main(words: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    from dovetail.host.exit_codes import guarded

    def work() -> int:
        args = parser().parse_args(words)
        code: int = globals()[f"do_{args.command}"](args)
        return code

    return guarded("flux dovetail", work)
