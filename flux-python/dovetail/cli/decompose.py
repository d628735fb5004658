# SPDX-License-Identifier: LGPL-3.0-or-later
"""`dovetail decompose`: write OpenFOAM's manual decomposition.

Input: a meshed case, and weights. Output: `constant/cellDecomposition` and
`system/decomposeParDict` in the case, for `decomposePar`, which is run too if that is asked for;
cells per rank on stdout.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.applications.openfoam import control_dict, processors, shared_cut
from dovetail.core import cpu_requests
from dovetail.core.errors import BadInput
from dovetail.host.private_files import input_path, looking
from dovetail.host.progress import Progress

if TYPE_CHECKING:  # numpy takes longer to load than it takes to see that a case is cut so already
    from dovetail.applications.openfoam.cut import Cut, Point

HELP = "cut an OpenFOAM mesh for ranks of any weights"

_FARTHEST = 1e15
"""Metres of a centre; the squares of distances are added up."""
_MOST = 1_000_000
"""Ranks; each has a weight in memory and a folder, and there are no meshes for so many."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Options; see dovetail-decompose(1)."""
    parser.add_argument("case", metavar="CASE", type=input_path, help="case directory, meshed")
    parser.add_argument("--ranks", type=int, required=True, help="number of MPI ranks")
    parser.add_argument(
        "--weights",
        metavar="W,W,…",
        help="one weight per rank, from the centre outwards (default: all equal)",
    )
    parser.add_argument(
        "--centre", metavar="X,Y,Z", help="centre of the zones, metres (default: the mesh's)"
    )
    parser.add_argument(
        "--method",
        choices=("bisection", "concentric"),
        help="planes with few faces between ranks, or zones around a centre "
        "(default: bisection for equal weights without --centre)",
    )
    parser.add_argument("--force", action="store_true", help="replace what dovetail did not write")
    parser.add_argument(
        "--apply",
        action="store_true",
        help="run decomposePar too; nothing is done where the case is cut so already",
    )


def run(args: argparse.Namespace) -> int:
    """Write the decomposition and print it; 0."""
    if args.ranks < 1:
        raise BadInput(f"--ranks: {args.ranks} is not 1 or more")
    if args.ranks > _MOST:
        raise BadInput(f"--ranks: {args.ranks} is more than {_MOST}")
    weights = (1.0,) * args.ranks
    if args.weights is not None:
        weights = cpu_requests.parse_weights(args.weights)
    if len(weights) != args.ranks:
        raise BadInput(
            f"--weights: {len(weights)} weights for {args.ranks} ranks; give one per rank"
        )
    if args.method == "bisection" and args.centre is not None:
        raise BadInput("--centre: bisection has none; it goes with --method concentric")
    with looking(args.case):
        there = args.case.is_dir()
    if not there:
        raise BadInput(f"{args.case}: is not a directory")
    centre = None if args.centre is None else _parse_centre(args.centre)
    copied = "DOVETAIL_DIR" in os.environ  # as in a run's prepare step
    if args.apply:
        if processors.are_cut(args.case, weights, copied=copied):
            print(json.dumps({"kept": True}) if args.json else f"{args.case} is cut so already")
            return 0
        if args.ranks > 1:
            processors.check_regions(args.case)
        processors.check(args.case, copied=copied)
        _make_room(control_dict.directories(args.case), args.force)
        if args.ranks == 1:
            processors.make(args.case, 1)
            print(json.dumps({"kept": False}) if args.json else f"{args.case} is in one piece")
            return 0
        processors.check_program()
    same = other = ""
    if args.apply and copied:
        same, other = _cut_of_another(args, (str(weights), args.method or "", str(centre)))
    if other:
        told = json.dumps({"kept": False, "copied_from": other})
        print(told if args.json else f"{args.case} is cut as that of {other} is")
        return 0
    from dovetail.applications.openfoam.cut import cut
    from dovetail.applications.openfoam.mesh import read_mesh, write_decomposition

    with Progress(_say, "reading the mesh") as progress:
        mesh = read_mesh(args.case)
        progress.turn(f"cutting {len(mesh.centres):,} cells for {args.ranks} ranks")
        made = cut(mesh, weights, args.method or "", centre)
        if copied:
            processors.own_folders(args.case)
        kept = _make_room_for_files(args.case, args.force)
        progress.turn("writing the ranks of cells")
        try:
            write_decomposition(args.case, made.rank_of_cell, args.ranks)
        except BadInput:
            for path, saved in kept:
                saved.replace(path)
            raise
    if args.apply:  # decomposePar has words of its own
        processors.make(args.case, args.ranks)
        shared_cut.offer(args.case, same)
    _tell(made, weights, args)
    return 0


def _cut_of_another(args: argparse.Namespace, options: Sequence[str]) -> tuple[str, str]:
    """What decides how the case is cut, and the simulation whose cut it has now; "" if of none."""
    with Progress(_say, "comparing the case with others that are cut") as progress:
        same = shared_cut.key(args.case, options)
        other = shared_cut.find(args.case, same)
        if other is None:
            return same, ""
        processors.own_folders(args.case)
        _make_room_for_files(args.case, args.force)
        progress.turn("copying the cut of another")
        return same, other.parent.name if shared_cut.take(other, args.case) else ""


def _say(line: str) -> None:
    """Progress, for people."""
    print(f"dovetail: {line}", file=sys.stderr, flush=True)


def _tell(made: Cut, weights: Sequence[float], args: argparse.Namespace) -> None:
    """Print what each rank got."""
    whole = math.fsum(weights)
    wanted = [weight / whole * len(made.rank_of_cell) for weight in weights]
    if args.json:
        found = {"method": made.method, "cells": made.cells, "wanted": wanted, "zones": made.zones}
        more = {"kept": False} if args.apply else {}
        print(json.dumps({**found, "centre": made.centre, "cut_faces": made.faces, **more}))
        return
    if made.centre:
        where = "given" if args.centre is not None else "of the mesh's bounding box"
        x, y, z = made.centre
        print(f"centre ({x:g} {y:g} {z:g}) m, {where}")
    print(f"{'rank':>4} {'zone':>4} {'wanted':>12} {'cells':>10}")
    for rank, count in enumerate(made.cells):
        zone = made.zones[rank] if made.zones else "-"
        print(f"{rank:>4} {zone:>4} {wanted[rank]:>12.1f} {count:>10}")
    print(f"{made.faces} of {made.inner_faces} inner faces lie between ranks ({made.method})")
    print(f"wrote constant/cellDecomposition and system/decomposeParDict in {args.case}")


def _parse_centre(text: str) -> Point:
    """`X,Y,Z` in metres."""
    try:
        x, y, z = map(float, text.split(","))
    except ValueError:
        x = y = z = math.nan
    if not all(abs(one) <= _FARTHEST for one in (x, y, z)):
        raise BadInput(f"--centre: {text!r} is not three numbers X,Y,Z in metres, up to 1e15")
    return x, y, z


def _make_room(there: Sequence[Path], force: bool) -> None:
    """Refuse to replace processor directories without --force."""
    if there and not force:
        raise BadInput(f"{there[0]}: is of another cut; give --force to replace it and its like")


def _make_room_for_files(case: Path, force: bool) -> list[tuple[Path, Path]]:
    """Keep what others wrote: refuse without --force, else save it as NAME.orig first.

    Returns what was saved, and where it is now.
    """
    from dovetail.applications.openfoam.mesh import is_ours

    theirs = [
        path
        for path in (case / "constant" / "cellDecomposition", case / "system" / "decomposeParDict")
        if not is_ours(path)
    ]
    if theirs and not force:
        raise BadInput(
            f"{theirs[0]}: not written by dovetail; give --force to replace it "
            f"(it is kept as {theirs[0].name}.orig)"
        )
    kept = []
    for path in theirs:
        saved = path.with_name(path.name + ".orig")
        try:
            if not saved.exists():
                path.rename(saved)
                kept.append((path, saved))
        except OSError as error:
            raise BadInput(f"{path}: cannot be kept as {saved.name}: {error.strerror}") from None
    return kept
