# SPDX-License-Identifier: LGPL-3.0-or-later
"""`dovetail run`: the main job, a plan's simulations packed on a machine or cluster.

Input: a plan. Output: the run's directory, see `run.run`, and a table or JSON on standard output.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.controller.choice import Schedule
from dovetail.controller.widths import by_text
from dovetail.core import eventlog, units
from dovetail.core.errors import WorkFailed
from dovetail.host.private_files import input_path, output_path
from dovetail.plan import schema, yaml_lines
from dovetail.run import run as work
from dovetail.run import target
from dovetail.run.orders import Orders

if TYPE_CHECKING:  # what is shown in the end is loaded then, as simulations wait meanwhile
    from collections.abc import Sequence

    from rich.console import Console

HELP = "run a queue of MPI simulations, packed where that pays"


def configure(parser: argparse.ArgumentParser) -> None:
    """Options; see dovetail-run(1)."""
    parser.add_argument("plan", metavar="PLAN.yaml", type=input_path, help="what to run")
    parser.add_argument(
        "-o", "--output", metavar="DIR", type=output_path, default=Path("dovetail-out"),
        help="where everything is written (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="go on with the run in DIR")
    parser.add_argument(
        "--checkpoint", action="store_true",
        help="where the run is ended, stop simulations at checkpoints, for --resume to go on there",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="check and show, start nothing")
    parser.add_argument(
        "--kubeconfig", metavar="FILE", type=input_path,
        help="run the simulations as pods on this cluster, not as processes here",
    )  # fmt: skip
    parser.add_argument(
        "--network", choices=target.NETWORKS, default="",
        help="the network of the pods: their nodes', or the cluster's own (default: host)",
    )  # fmt: skip
    parser.add_argument(
        "--launcher", choices=[*target.KINDS], default="",
        help="what simulations become on a cluster (default: MiniClusters of the Flux Operator "
        "where it answers, else Jobs)",
    )  # fmt: skip
    parser.add_argument(
        "--metrics", metavar="WHERE",
        help="serve metrics for Prometheus at unix:PATH or ADDRESS:PORT while the run goes on",
    )  # fmt: skip
    parser.add_argument(
        "--plan-copy", metavar="FILE", type=input_path,
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
    place = target.chosen(args.kubeconfig, args.network, args.launcher)
    # Another program asks for what is possible, whatever the plan.
    work.check(asked, place, args.output, checkpoint=args.checkpoint and not args.orders)
    if args.metrics is not None:
        from dovetail.run import metrics_server

        metrics_server.Address.of(args.metrics)  # for a dry run too
    if args.dry_run:
        return show(asked, place.cpu(asked), place.devices(asked), as_json=args.json)
    ended = work.run(
        asked, args.output, place=place, resume=args.resume, quiet=args.json,
        orders=Orders(0 if args.orders else None), scope=_scope,
        checkpoint=args.checkpoint, metrics=args.metrics,
    )  # fmt: skip
    return tell(ended, as_json=args.json)


def _scope() -> Sequence[str]:
    """The words before a command that let it make control groups; seldom needed."""
    from usernetes_setup.node import cgroups

    return cgroups.scope()


def tell(ended: work.RunOutcome, *, as_json: bool) -> int:
    """Print what came of a run; the exit code."""
    if as_json:
        print(json.dumps(ended.summary.to_json(), indent=1, allow_nan=False), flush=True)
    else:
        from rich.console import Console

        from dovetail.report import summary

        console = Console(highlight=False)
        summary.show(ended.summary, console)
        if ended.report:
            console.print(f"report: {ended.report}", soft_wrap=True, markup=False, emoji=False)
    if ended.interrupted:
        if ended.trouble:
            print(f"dovetail: {ended.trouble}", file=sys.stderr)
        kept = ended.summary.counts.get("checkpointed", 0)
        more = "s are" if kept > 1 else " is"
        go_on = f"; {kept} simulation{more} stopped at a checkpoint, --resume goes on there"
        words = f"interrupted by {ended.interrupted}{go_on if kept else ''}"
        print(f"dovetail: {words}", file=sys.stderr)
        return 130
    if ended.trouble:
        raise WorkFailed(ended.trouble)
    return 0 if ended.done else 1


def show(asked: schema.Plan, cpus: int, devices: target.Devices, *, as_json: bool) -> int:
    """What would run on so many millicores, with the first requests: of one simulation alone."""
    rows = [(spec, work.first_requests(spec, cpus)) for spec in asked.specs]
    choice = work.outlook(asked, cpus, devices)
    if as_json:
        found = [{**eventlog.plain(spec), "requests": list(asks)} for spec, asks in rows]
        told: dict[str, object] = {"cpus": cpus, "simulations": found}
        if devices:
            told["devices"] = dict(devices)
        if choice:
            told["choice"] = {
                "widths": {name: by_text(counts) for name, counts in choice.widths_planned.items()},
                "way": choice.name,
                "alternatives": {
                    one.name: one.makespan / choice.makespan for one in choice.alternatives
                },
            }
        print(json.dumps(told))
        return 0
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=f"{units.counted(len(rows), 'simulation')} on {cpus}m of CPU", title_justify="left"
    )
    shown = ("devices",) if devices else ()
    for name in ("simulation", "ranks", "first requests", "slowdown", *shown, "command"):
        table.add_column(name, overflow="fold")
    for spec, asks in rows:
        text = " ".join(f"{one}m" for one in asks[:8]) + (" …" if len(asks) > 8 else "")
        words = " ".join(spec.command)
        open_ranks = ",".join(map(str, spec.widths)) if len(spec.widths) > 1 else str(spec.ranks)
        each = [" ".join(f"{n} {name}" for name, n in spec.devices)] if devices else []
        row = (spec.name, open_ranks, text, f"{spec.slowdown:g}", *each, words)
        table.add_row(*(Text(units.printable(cell)) for cell in row))
    console = Console(highlight=False)
    console.print(table)
    for name, there in devices:
        console.print(f"{name}: {there} there", soft_wrap=True, markup=False)
    if choice:
        show_choice(choice, console)
    return 0


def show_choice(choice: Schedule, console: Console) -> None:
    """On how many ranks the simulations would start, and what else there is."""
    from rich.table import Table

    table = Table(title="Ranks, chosen before anything is measured", title_justify="left")
    table.add_column("simulations", overflow="fold")
    table.add_column("ranks each", justify="right")
    table.add_column("how many", justify="right")
    for name, counts in choice.widths_planned.items():
        for ranks, count in sorted(counts.items()):
            table.add_row(name, str(ranks), str(count))
    console.print(table)
    table = Table(title="Makespan of every way, against the chosen one", title_justify="left")
    table.add_column("way", overflow="fold")
    table.add_column("predicted", justify="right")
    table.add_column("")
    for one in choice.alternatives:
        ratio = f"{one.makespan / choice.makespan:.2f}"
        table.add_row(one.name, ratio, "chosen" if one.name == choice.name else one.description)
    console.print(table)
    console.print("Predictions for equal work everywhere; the run measures, and decides again.")
