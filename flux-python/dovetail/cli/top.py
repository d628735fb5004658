# SPDX-License-Identifier: LGPL-3.0-or-later
"""`dovetail top`: the simulations and ranks of a run, while it goes on.

Input: a run's output directory. Output: a table that follows the run, or JSON once.
"""

from __future__ import annotations

import argparse
import json

from dovetail.host.private_files import input_path
from dovetail.run import top
from dovetail.run.follow import Follower
from dovetail.run.run import LOG

HELP = "follow the ranks of a run on the terminal"


def configure(parser: argparse.ArgumentParser) -> None:
    """Options; see dovetail-top(1)."""
    parser.add_argument(
        "directory", metavar="DIR", type=input_path, help="the run's output directory"
    )


def run(args: argparse.Namespace) -> int:
    """Show it; 0."""
    if args.json:
        print(json.dumps(top.snapshot(Follower(args.directory, LOG)), allow_nan=False))
        return 0
    return top.show(args.directory, LOG)
