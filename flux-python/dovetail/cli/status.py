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
from rich.text import Text

from dovetail.core.errors import BadInput
from dovetail.core.units import printable
from dovetail.host.private_files import input_path

HELP = "show the wanted and the real CPU share of each rank group of a run on a cluster"
FILE = "status.json"


def configure(parser: argparse.ArgumentParser) -> None:
    """Options; see dovetail-status(1)."""
    parser.add_argument(
        "directory", metavar="DIR", type=input_path, help="the run's output directory"
    )


def run(args: argparse.Namespace) -> int:
    """Show it."""
    found = read(args.directory)
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    title = printable(f"run {found['run']}, unchanged for {_age(found):.0f} s")
    table = Table(title=Text(title), title_justify="left")
    for name in ("simulation", "ranks", "node", "request", "on disk", "wanted", "real"):
        numeric = name in ("request", "on disk", "wanted", "real")
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in found["groups"]:
        table.add_row(*(Text(printable(cell)) for cell in _cells(row)))
    Console(highlight=False).print(table)
    return 0


def _age(found: dict[str, Any]) -> float:
    return max(0.0, time.time() - float(found["written"]))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    first, last = row["ranks"]
    return (
        str(row["simulation"]),
        f"{first}-{last}" if last > first else f"{first}",
        str(row["node"]),
        f"{row['cpu']}m",
        f"{row['file']} {row['value']}" if row["file"] else "-",
        f"{row['wanted']:.1%}",
        "-" if row["real"] is None else f"{row['real']:.1%}",
    )


def read(directory: Path) -> dict[str, Any]:
    """The run's status file; BadInput where there is none, or it is damaged."""
    path = directory / FILE
    try:
        if not path.is_file() and path.exists():
            raise ValueError("not a file")
        found = json.loads(path.read_text())
        if found["schema"] != 1:
            raise ValueError(f"schema {found['schema']!r}; this version reads 1")
        _age(found), found["run"], [_cells(row) for row in found["groups"]]
        json.dumps(found, allow_nan=False)
    except FileNotFoundError:
        raise BadInput(
            f"{directory}: has no {FILE}; a run on a cluster (--kubeconfig) writes one"
        ) from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise BadInput(f"{path}: cannot be read: {why}") from None
    return dict(found)
