# SPDX-License-Identifier: LGPL-3.0-or-later
"""`dovetail advise`: would packing, fewer ranks, other weights or a limit pay.

Input: profile files of `dovetail profile`, or output directories of runs. Output: advice with
its evidence, what pays most first, as text or JSON; on standard error, on whom there is none.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace

from rich.console import Console
from rich.padding import Padding

from dovetail.core import units
from dovetail.core.errors import BadInput
from dovetail.host.private_files import input_path, looking
from dovetail.report import advise, summary

HELP = "say what would pay: packing, fewer ranks, other weights or a limit"


def configure(parser: argparse.ArgumentParser) -> None:
    """Options; see dovetail-advise(1)."""
    parser.add_argument(
        "profiles",
        metavar="PROFILE",
        nargs="+",
        type=input_path,
        help="a profile file, or a run's output directory",
    )
    parser.add_argument(
        "--cores", type=float, help="cores to share (default: the run's, or this machine's)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the advice; 0."""
    if args.cores is not None and not (math.isfinite(args.cores) and 0 < args.cores <= 1e6):
        raise BadInput(f"--cores: {args.cores:g} is not a number of cores above 0, up to 1e6")
    known: list[tuple[pathlib.Path, advise.Known]] = []
    unknown: list[str] = []
    cores = args.cores
    for path in args.profiles:
        with looking(path):
            is_run = path.is_dir()
        if is_run:
            found, _ = summary.load(path)
            cores = cores or found.cores
            told = {one.name: one for one in advise.from_summary(found, cores)}
            known += [(path, one) for one in told.values()]
            rest = [one for one in found.families if one.name not in told]
            unknown += [f"{path}: {one.name}: {advise.why_unknown(one)}" for one in rest]
        else:
            known.append((path, advise.from_file(path)))
    if not known:
        more = f", and likewise {len(unknown) - 1} more" if unknown[1:] else ""
        raise BadInput(f"nothing to give advice by: {unknown[0]}{more}")
    for words in unknown:
        print(f"dovetail: no advice on {units.printable(words)}", file=sys.stderr)
    cores = cores or float(len(os.sched_getaffinity(0)))
    given = advise.advise(_told_apart(known), cores)
    if args.json:
        print(json.dumps({"cores": cores, "advice": [asdict(one) for one in given]}))
        return 0
    console = Console(highlight=False)
    for one in given:
        console.print(summary.printable(f"- {one.statement} [{one.source}]"))
        console.print(Padding(summary.printable(one.evidence), (0, 0, 0, 2)), style="dim")
    return 0


def _told_apart(known: Sequence[tuple[pathlib.Path, advise.Known]]) -> list[advise.Known]:
    """Those of each path, with it in their names where these are the same."""
    names = Counter(one.name for _, one in known)
    return [
        replace(one, name=f"{path}: {one.name}") if names[one.name] > 1 else one
        for path, one in known
    ]
