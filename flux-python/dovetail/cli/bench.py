# SPDX-License-Identifier: LGPL-3.0-or-later
"""`dovetail bench`: measures the claims of the README on this machine.

Input: which comparison. Output: each figure with the spread of its repeats, and whether it keeps
its bound. Exit code 1 when one does not, or, of all, one could not be measured: a comparison that
cannot fail would be no comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.table import Table

from dovetail.bench import (
    batch,
    calls,
    choice,
    demo,
    figures,
    hosts,
    hybrid,
    jobtap,
    kube,
    moldable,
    pods,
    queues,
    scale,
)
from dovetail.bench.harness import Claim, on_cores
from dovetail.bench.papers import papers, scales
from dovetail.bench.papers.page import Outcome, disturbance, row
from dovetail.cli import run as run_command
from dovetail.core.errors import BadInput, WorkFailed
from dovetail.host.private_files import output_path

HELP = "measure the gain against the alternatives, interleaved, with the spread"

COMPARISONS: dict[str, tuple[str, Callable[..., list[Claim]]]] = {
    "calls": ("what a wrapped MPI call costs", calls.calls),
    "wait": ("what blocking waits save and cost alone", figures.wait),
    "pack": ("two imbalanced simulations, packed and in other ways", figures.pack),
    "queue": ("a queue of imbalanced simulations under the controller", figures.queue),
    "balanced": ("a queue of balanced simulations under the controller", figures.balanced),
    "model": ("predictions against measurements", figures.model),
    "choice": ("random queues under the choice of widths, calculated", choice.choice_of_widths),
    "batch": ("a batch job's Kubernetes: up, resized and down", batch.batch),
    "jobtap": ("Lua in Flux's job manager", jobtap.jobtap),
    "kube": ("user-space Kubernetes from up to down", kube.kube),
    "hybrid": ("LAMMPS and messages, bare and in pods", hybrid.hybrid),
    "hosts": ("Kubernetes on the hosts of a Flux instance against bare metal", hosts.hosts),
    "pods": ("simulations as pods against processes, and 64 pods at once", pods.pods),
    "moldable": ("OpenFOAM queues whose ranks are left open", moldable.openfoam),
    "lastwave": ("a queue whose last wave does not fill the cores", moldable.last_wave),
    "lammps": ("a LAMMPS queue whose ranks are left open", moldable.lammps),
    "queues": ("ten unlike queues, ranks open and not", queues.ten),
    "short": ("sixty simulations of a second each", moldable.short),
    "scale": ("what ranks, slices, pods and brokers cost against their number", scale.scale),
}

APART = ("hosts", "kube", "lastwave", "queues", "short")
"""What `all` leaves out: nothing in the README's table of performance is from these."""
ON_TWO_CORES = (
    "wait", "pack", "queue", "balanced", "model", "moldable", "lastwave", "lammps", "queues",
    "short",
)  # fmt: skip
"""What compares ways that use two cores; Dovetail, which would use all, gets no more of them."""
ROUNDS = 5
SCALE_IN_ALL = ("ranks",)
"""What `all` takes of `scale`; the README's table has no more of it."""
MISSING = "not_measured"
"""What `--json` calls the comparisons of `all` that have none, each with its reason."""
QUEUES_IN_ALL = 500
"""Random queues of `choice` in `all`, where 10,000 would take hours."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Options; see dovetail-bench(1)."""
    parser.add_argument(
        "what", metavar="WHAT", choices=["demo", "papers", "all", *COMPARISONS],
        help="demo, papers, all, or one of: " + ", ".join(COMPARISONS),
    )  # fmt: skip
    parser.add_argument(
        "names", metavar="NAME", nargs="*",
        help=f"queues of `queues`, parts of `scale` ({', '.join(scale.PARTS)}), or experiments of "
        "`papers`: " + ", ".join(papers.EXPERIMENTS),
    )  # fmt: skip
    parser.add_argument("--repeat", metavar="N", type=int, help=f"rounds (default: {ROUNDS})")
    parser.add_argument(
        "--queues", metavar="N", type=int,
        help=f"random queues of `choice` (default: {choice.QUEUES}, with all {QUEUES_IN_ALL})",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", metavar="DIR", type=output_path,
        help="where the demo writes (default: demo-out), or `choice` and `papers` (default: "
        "papers-out) keep results to go on with",
    )  # fmt: skip
    parser.add_argument(
        "--executor", choices=papers.EXECUTORS, help="what simulations of `papers` are (local)"
    )
    parser.add_argument("--scale", choices=scales.SCALES, help="how much `papers` measures (small)")
    parser.add_argument(
        "--price", metavar="DOLLARS", type=float, help="of a vCPU-hour, for `papers`"
    )
    by_itself = parser.parse_known_args

    def parse(
        words: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """With names after options too, where argparse looks for no more of them."""
        found, left = by_itself(words, namespace)
        found.names += [word for word in left if not word.startswith("-")]
        return found, [word for word in left if word.startswith("-")]

    parser.parse_known_args = parse  # type: ignore[assignment]
    parser.add_argument(
        "--kubernetes", action="store_true",
        help="run the demo as pods, on a cluster started for it, and compare with processes",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure and print; 0 if every figure keeps its bound, else 1."""
    if args.repeat is not None and args.what in ("demo", "papers"):
        instead = "it has one round" if args.what == "demo" else "--scale says how many rounds"
        raise BadInput(f"--repeat: not with {args.what}: {instead}")
    args.repeat = ROUNDS if args.repeat is None else args.repeat
    if not 1 <= args.repeat <= 1000:
        raise BadInput(f"--repeat {args.repeat}: give 1 to 1000")
    if args.queues is not None and args.what not in ("choice", "all"):
        raise BadInput(f"--queues: only with choice and all, not with {args.what}")
    if args.queues is not None and not 1 <= args.queues <= 1_000_000:
        raise BadInput(f"--queues {args.queues}: give 1 to 1000000")
    if args.what == "papers":
        return run_papers(args)
    named = {"queues": queues.check, "scale": scale.check}
    if args.what in named:
        named[args.what](args.names)
    for option in ("names", "executor", "scale", "price"):
        if getattr(args, option) and not (option == "names" and args.what in named):
            given, right = f"--{option}", "papers"
            if option == "names":
                given, right = args.names[0], ", ".join((*named, "papers"))
            raise BadInput(f"{given}: only with {right}, not with {args.what}")
    if args.output and args.what not in ("demo", "choice", "all"):
        raise BadInput(f"-o: only with demo, choice, all and papers, not with {args.what}")
    clean_up_when_ended()
    if args.what == "demo":
        ended = demo.run_demo(
            args.output or Path("demo-out"), tell, quiet=args.json, kubernetes=args.kubernetes
        )
        return run_command.tell(ended, as_json=args.json)
    if args.kubernetes:
        raise BadInput(f"--kubernetes: only with demo, not with {args.what}")
    found: dict[str, list[Claim]] = {}
    missing: dict[str, str] = {}
    try:
        for name in every() if args.what == "all" else (args.what,):
            try:
                found[name] = measure(name, args)
            except (BadInput, WorkFailed, OSError) as error:
                if args.what != "all":
                    raise
                missing[name] = str(error)
                tell(f"{name}: not measured: {error}")
    finally:  # interrupted after hours, too
        if found or missing:
            show(found, missing, as_json=args.json)
    kept = all(c.met is not False for claims in found.values() for c in claims)
    return 0 if kept and not missing else 1


def every() -> list[str]:
    """What `all` measures: all that the README's table of performance holds."""
    return [name for name in COMPARISONS if name not in APART]


def measure(name: str, args: argparse.Namespace) -> list[Claim]:
    """One comparison, in a scratch directory of its own."""
    tell(f"{name}: {COMPARISONS[name][0]}; load average {os.getloadavg()[0]:.2f} before")
    more: dict[str, object] = {}
    if name == "choice":
        queues = args.queues or (QUEUES_IN_ALL if args.what == "all" else None)
        more = {"queues": queues, "output": args.output}
    elif name == "queues":
        more = {"names": args.names}
    elif name == "scale":
        more = {"names": SCALE_IN_ALL if args.what == "all" else args.names}
    with contextlib.ExitStack() as stack:
        if name in ON_TWO_CORES:
            stack.enter_context(on_cores(2, name))
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="dovetail-bench-"))
        return COMPARISONS[name][1](Path(scratch), args.repeat, tell, **more)


def run_papers(args: argparse.Namespace) -> int:
    """The papers' tables: measure what is missing, print, and write the page; 1 if one failed."""
    if args.kubernetes:
        raise BadInput("--kubernetes: only with demo; for papers say --executor kubernetes")
    price = args.price or 0.0
    if not 0 <= price <= 1e6:
        raise BadInput(f"--price {price:g}: give dollars for a vCPU-hour")
    output = args.output or Path("papers-out")
    executor, scale = args.executor or papers.EXECUTORS[0], args.scale or next(iter(scales.SCALES))
    asked = papers.check(output, args.names, executor, scale, price)
    clean_up_when_ended()
    outcomes, well = papers.run(asked, tell)
    if args.json:
        print((output / "papers.json").read_text(), end="")
    else:
        show_papers(outcomes, papers.machine(output))
        print(f"page: {output / 'papers.html'}")
    return 0 if well else 1


def show_papers(outcomes: list[Outcome], machine: str) -> None:
    """What the papers say, and what was measured."""
    table = Table(title=machine, title_justify="left", show_lines=False)
    for heading in ("", "figure", "paper", "here", "lowest to highest", "n", "ratio", "verdict"):
        right = heading in ("paper", "here", "n", "ratio")
        table.add_column(heading, justify="right" if right else "left", no_wrap=right)
    for one in outcomes:
        for finding in one.findings:
            if finding.detail:
                continue
            cells = row(finding)
            verdict = cells["verdict"] + (f": {finding.why}" if finding.why else "")
            table.add_row(one.name, cells["what"], cells["theirs"], cells["ours"],
                          cells["spread"], cells["n"], cells["ratio"], verdict)  # fmt: skip
    width = 170 if not sys.stdout.isatty() else None
    console = Console(highlight=False, markup=False, emoji=False, width=width)
    console.print(table)
    for one in outcomes:
        said = disturbance(one)
        if said:
            console.print(f"{one.name}: {said[0].lower()}{said[1:]}")


def clean_up_when_ended() -> None:
    """At SIGTERM, and as the terminal goes; not where that is to be outlived, as with nohup."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)


def interrupt(number: int, _: FrameType | None) -> None:
    """Let a signal clean up as Ctrl-C does."""
    raise KeyboardInterrupt


def tell(line: str) -> None:
    """Progress, on standard error."""
    print(line, file=sys.stderr, flush=True)


def plain(claim: Claim) -> dict[str, object]:
    """A claim as JSON."""
    return {
        "name": claim.row.name,
        "unit": claim.unit,
        "median": claim.row.median if claim.row.values else None,
        "values": claim.row.values,
        "bound": f"{claim.relation} {claim.bound:g}" if claim.relation else None,
        "met": claim.met,
        **({"why": claim.why} if claim.why else {}),
    }


def show(found: dict[str, list[Claim]], missing: dict[str, str], *, as_json: bool) -> None:
    """The table for the README, or the same as JSON."""
    if as_json:
        told: dict[str, object] = {name: list(map(plain, some)) for name, some in found.items()}
        print(json.dumps({**told, MISSING: missing} if missing else told))
        return
    title = f"{os.cpu_count()} cores, Linux {platform.release()}"
    table = Table(title=title, title_justify="left")
    for heading in ("", "figure", "median", "smallest to largest", "n", "bound"):
        table.add_column(heading, justify="right" if heading in ("median", "n") else "left")
    for name, claims in found.items():
        for claim in claims:
            median = spread = ""
            if claim.row.values:
                low, high = claim.row.spread
                median, spread = f"{claim.row.median:.3g} {claim.unit}", f"{low:.3g} to {high:.3g}"
            verdict = "" if claim.met is None else ("kept" if claim.met else "MISSED")
            table.add_row(
                name,
                claim.row.name,
                median,
                spread,
                str(len(claim.row.values)),
                f"{claim.relation} {claim.bound:.3g} {verdict}" if claim.relation else "",
            )
    width = 140 if not sys.stdout.isatty() else None
    Console(highlight=False, markup=False, emoji=False, width=width).print(table)
    for name, claims in found.items():
        for claim in claims:
            if claim.why:
                print(f"{name}: {claim.row.name}: not measured: {claim.why}")
    for name, why in missing.items():
        print(f"{name}: not measured: {why}")
