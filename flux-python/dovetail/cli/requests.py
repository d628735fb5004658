# SPDX-License-Identifier: LGPL-3.0-or-later
"""`dovetail requests`: CPU requests in proportion to the ranks' load.

Input: weights from exactly one source (the command line, a profile, a decomposed case) and
the CPU to share. Output: one request per rank, in millicores, that add up exactly.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dovetail.applications.openfoam.cell_counts import cells_per_processor
from dovetail.core import cpu_requests
from dovetail.core.errors import BadInput
from dovetail.host.private_files import input_path

HELP = "share CPU among ranks in proportion to their load"


def configure(parser: argparse.ArgumentParser) -> None:
    """Options; see dovetail-requests(1)."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--weights", metavar="W,W,…", help="one weight per rank, e.g. 1,1,5,15")
    source.add_argument(
        "--profile",
        metavar="FILE",
        type=input_path,
        help="load per iteration from `dovetail profile -o`",
    )
    source.add_argument(
        "--case",
        metavar="DIR",
        type=input_path,
        help="cells per processor of a decomposed OpenFOAM case",
    )
    parser.add_argument("--cpus", required=True, help="CPU to share: 4, 2.5 or 2500m")
    parser.add_argument("--floor", default="10m", help="least CPU of a rank (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print the requests; 0."""
    weights = _weights(args)
    total = cpu_requests.parse_cpu(args.cpus)
    floor = cpu_requests.parse_cpu(args.floor, "floor", least=0)
    requests = cpu_requests.proportional(weights, total, floor)
    if args.json:
        print(json.dumps({"weights": weights, "requests_m": requests, "total_m": total}))
    else:
        print(*(f"{request}m" for request in requests))
    return 0


def _weights(args: argparse.Namespace) -> tuple[float, ...]:
    """One weight per rank, from the one source that was given."""
    if args.weights is not None:
        return cpu_requests.parse_weights(args.weights)
    if args.case is not None:
        return tuple(float(cells) for cells in cells_per_processor(args.case))
    return _profile_load(args.profile)


def _profile_load(path: Path) -> tuple[float, ...]:
    from dovetail.mpi import profile  # here, since only this source needs it

    run = profile.load(path)
    try:
        return run.load
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None
