# SPDX-License-Identifier: LGPL-3.0-or-later
"""`dovetail profile`: runs an unmodified MPI program and says where its time went.

In: the command. Out: its own output, untouched; then on standard error a table per rank, the
MPI calls that took longest, and the POP efficiencies; with -o a file for other commands; with
--json that same JSON on standard output, where the program's own output goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from dovetail.core import contention, units
from dovetail.core.errors import WorkFailed
from dovetail.core.protocol import WaitPolicy
from dovetail.host import install_paths
from dovetail.host.private_files import check_output, output_path
from dovetail.mpi import detect, profiled_run
from dovetail.mpi import profile as profiles
from dovetail.mpi.control_page import MODES
from dovetail.mpi.profile import Profile, RankProfile

HELP = "run an MPI program and print where each rank's time goes"
WHOLE = 1000
"""Columns, more than the tables have: a terminal folds a long line, nothing cuts a number off."""
TOP = 8  # MPI functions in the table
OUTSIDE = (
    *("MPI_Init", "MPI_Init_thread", "MPI_Finalize"),
    *("MPI_Session_init", "MPI_Session_finalize"),
)
"""Functions that are left out of the table: most of their time is outside the elapsed time."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    options = "[-o FILE] [--wait MODE] [--yields N] [--mpi MPI] [--json]"
    parser.usage = f"dovetail profile {options} -- COMMAND"
    parser.add_argument(
        "-o", "--output", type=output_path, metavar="FILE", help="write the profile here"
    )
    parser.add_argument(
        "--wait", choices=MODES, default="off", help="how ranks wait inside MPI (off)"
    )
    parser.add_argument("--yields", type=int, default=20, help="yields before a rank sleeps (20)")
    parser.add_argument(
        "--mpi", choices=install_paths.MPIS, help="the MPI of the command, if it is hidden"
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run")


def run(args: argparse.Namespace) -> int:
    """Profile one command; 1 if it failed, was no MPI program, or no file could be written."""
    command = args.words[1:] if args.words[:1] == ["--"] else args.words
    mpi = args.mpi or detect.mpi_of(command)
    if args.output:
        check_output("-o", args.output)
    wait = WaitPolicy(args.wait, args.yields)
    ended = profiled_run.run(command, mpi, wait, quiet=args.json)
    profile, trouble = ended.profile, ""
    if args.output:
        try:
            profiles.save(profile, args.output)
        except WorkFailed as error:  # what was measured is shown all the same
            trouble = str(error)
    if args.json:
        print(json.dumps(profiles.to_json(profile), indent=2))
    else:
        show(profile, Console(stderr=True, highlight=False, width=WHOLE))
    for words in filter(None, (ended.unseen, trouble)):
        print(f"dovetail: {words}", file=sys.stderr)
    if ended.interrupted:
        raise KeyboardInterrupt
    if ended.failure:
        raise WorkFailed(ended.failure)
    return 1 if trouble else 0


def show(profile: Profile, console: Console) -> None:
    """Print the profile as tables."""
    console.print(_ranks_table(profile))
    console.print(_calls_table(profile))
    pop = profile.efficiency
    console.print(
        f"Efficiency (POP): parallel {pop.parallel:.3f} = load balance {pop.load_balance:.3f}"
        f" x communication {pop.communication:.3f}; elapsed {pop.elapsed_s:.3f} s"
    )
    stops, pressure = profile.throttling, profile.pressure
    if stops is not None:
        console.print(
            f"Limit of {contention.cores(stops.limit)}: throttled in {stops.throttled} of "
            f"{stops.periods} periods, {stops.seconds:.3f} s, "
            f"{contention.percent(stops.share)} of its time"
        )
    if pressure is not None:
        console.print(f"Pressure: something in its group waited for a core for {pressure:.3f} s")
    names = [_name(rank) for rank in profile.ranks]
    for one in contention.hindrances(profile.contention, own_limit=False, names=names):
        console.print(one.words[0].upper() + one.words[1:])


def _name(rank: RankProfile) -> str:
    return f"{rank.world}:{rank.rank}" if rank.world else str(rank.rank)


def _milli(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def _ranks_table(profile: Profile) -> Table:
    table = Table(box=None, pad_edge=False)
    titles = "rank", "iter.", "duty %", "CPU ms/it", "wall ms/it", "useful s", "MPI s", "CPU s"
    for title in (*titles, "queued s", "gave up", "lost it", "MB", "ended"):
        table.add_column(title, justify="right", no_wrap=True)
    for r in profile.ranks:
        progress = units.progress(r.iterations, r.measure)
        cells: list[Any] = [_name(r), progress, f"{100 * r.duty:.1f}"]
        cells += [_milli(r.cpu_per_iteration), _milli(r.seconds_per_iteration)]
        cells += [f"{t:.3f}" for t in (r.useful_s, r.mpi_s, r.cpu_s)]
        cells += ["-" if r.queued_s is None else f"{r.queued_s:.3f}"]
        cells += ["-" if n is None else str(n) for n in (r.voluntary, r.involuntary)]
        table.add_row(*cells, f"{r.peak_rss / 1e6:.0f}", r.ended)
    return table


def _calls_table(profile: Profile) -> Table:
    """The functions that took longest, all ranks, and the seconds of each rank."""
    total: dict[str, tuple[int, float]] = {}
    for r in profile.ranks:
        for name, (count, seconds) in r.calls.items():
            if name in OUTSIDE:
                continue
            had = total.get(name, (0, 0.0))
            total[name] = (had[0] + count, had[1] + seconds)
    inside = sum(seconds for _, seconds in total.values()) or 1.0  # of all threads
    table = Table(box=None, pad_edge=False)
    for title in ("MPI call", "calls", "s", "% of MPI", "least s", "most s"):
        table.add_column(title, justify="left" if title == "MPI call" else "right", no_wrap=True)
    for name, (count, seconds) in sorted(total.items(), key=lambda item: -item[1][1])[:TOP]:
        each = [r.calls.get(name, (0, 0.0))[1] for r in profile.ranks]
        figures = (f"{seconds:.3f}", f"{100 * seconds / inside:.1f}")
        table.add_row(name, str(count), *figures, f"{min(each):.3f}", f"{max(each):.3f}")
    return table
