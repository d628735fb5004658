# SPDX-License-Identifier: LGPL-3.0-or-later
"""`dovetail decompose`: write OpenFOAM's manual decomposition.

Input: a meshed case, and weights. Output: `constant/cellDecomposition` and
`system/decomposeParDict` in the case, for `decomposePar`; cells per rank on stdout.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np

from dovetail.applications.openfoam.concentric import concentric, zones
from dovetail.applications.openfoam.mesh import is_ours, read_mesh, write_decomposition
from dovetail.core import cpu_requests
from dovetail.core.errors import BadInput

HELP = "cut an OpenFOAM mesh into concentric zones of any weights"


def configure(parser: argparse.ArgumentParser) -> None:
    """Options; see dovetail-decompose(1)."""
    parser.add_argument("case", metavar="CASE", type=Path, help="case directory, meshed")
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
        "--force", action="store_true", help="replace files that dovetail did not write"
    )


def run(args: argparse.Namespace) -> int:
    """Write the decomposition and print it; 0."""
    if args.ranks < 1:
        raise BadInput(f"--ranks: {args.ranks} is not 1 or more")
    weights = (1.0,) * args.ranks
    if args.weights is not None:
        weights = cpu_requests.parse_weights(args.weights)
    if len(weights) != args.ranks:
        raise BadInput(
            f"--weights: {len(weights)} weights for {args.ranks} ranks; give one per rank"
        )
    centre = None if args.centre is None else _parse_centre(args.centre)
    mesh = read_mesh(args.case)
    middle = (mesh.low + mesh.high) / 2 if centre is None else np.array(centre)
    rank_of_cell = concentric(mesh.centres, weights, middle)
    _make_room(args.case, args.force)
    write_decomposition(args.case, rank_of_cell, args.ranks)

    inner = len(mesh.neighbour)
    cut = int((rank_of_cell[mesh.owner[:inner]] != rank_of_cell[mesh.neighbour]).sum())
    cells = np.bincount(rank_of_cell, minlength=args.ranks).tolist()
    wanted = [weight / math.fsum(weights) * len(rank_of_cell) for weight in weights]
    if args.json:
        print(
            json.dumps(
                {
                    "cells": cells,
                    "wanted": wanted,
                    "zones": zones(weights),
                    "centre": middle.tolist(),
                    "cut_faces": cut,
                }
            )
        )
        return 0
    where = "given" if centre is not None else "of the mesh's bounding box"
    print(f"centre ({middle[0]:g} {middle[1]:g} {middle[2]:g}) m, {where}")
    print(f"{'rank':>4} {'zone':>4} {'wanted':>12} {'cells':>10}")
    for rank, zone in enumerate(zones(weights)):
        print(f"{rank:>4} {zone:>4} {wanted[rank]:>12.1f} {cells[rank]:>10}")
    print(f"{cut} of {inner} inner faces lie between ranks")
    print(f"wrote constant/cellDecomposition and system/decomposeParDict in {args.case}")
    return 0


def _parse_centre(text: str) -> tuple[float, ...]:
    """`X,Y,Z` in metres."""
    try:
        centre = tuple(float(word) for word in text.split(","))
    except ValueError:
        centre = ()
    if len(centre) != 3 or not all(map(math.isfinite, centre)):
        raise BadInput(f"--centre: {text!r} is not three numbers X,Y,Z in metres")
    return centre


def _make_room(case: Path, force: bool) -> None:
    """Keep what others wrote: refuse without --force, else save it as NAME.orig first."""
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
    for path in theirs:
        saved = path.with_name(path.name + ".orig")
        try:
            if not saved.exists():
                path.rename(saved)
        except OSError as error:
            raise BadInput(f"{path}: cannot be kept as {saved.name}: {error.strerror}") from None
