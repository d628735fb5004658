# SPDX-License-Identifier: LGPL-3.0-or-later
"""`dovetail status`: what each rank group of a run on a cluster shall have, and has.

Input: a run's directory. Output: a table, or JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dovetail.core.errors import BadInput

HELP = "show the wanted and the real CPU share of each rank group of a run on a cluster"
FILE = "status.json"


def configure(parser: argparse.ArgumentParser) -> None:
    """Options; see dovetail-status(1)."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="the run's output directory")


def run(args: argparse.Namespace) -> int:
    """Show it."""
    found = read(args.directory)
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    age = max(0.0, time.time() - found["written"])
    table = Table(title=f"run {found['run']}, {age:.0f} s ago", title_justify="left")
    for name in ("simulation", "ranks", "node", "request", "on disk", "wanted", "real"):
        numeric = name in ("request", "on disk", "wanted", "real")
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in found["groups"]:
        first, last = row["ranks"]
        table.add_row(
            row["simulation"],
            f"{first}-{last}" if last > first else f"{first}",
            row["node"],
            f"{row['cpu']}m",
            f"{row['file']} {row['value']}" if row["file"] else "-",
            f"{row['wanted']:.1%}",
            "-" if row["real"] is None else f"{row['real']:.1%}",
        )
    Console(highlight=False).print(table)
    return 0


def read(directory: Path) -> dict[str, Any]:
    """The run's status file; BadInput where there is none, or it is damaged."""
    path = directory / FILE
    try:
        found = json.loads(path.read_text())
        if found["schema"] != 1:
            raise ValueError(f"schema {found['schema']!r}; this version reads 1")
        [row["real"] for row in found["groups"]], found["written"], found["run"]
    except FileNotFoundError:
        raise BadInput(
            f"{directory}: has no {FILE}; a run on a cluster (--kubeconfig) writes one"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from None
    return dict(found)
