# SPDX-License-Identifier: LGPL-3.0-or-later
"""`dovetail report`: a run's HTML page, again, from its event log (step 8).

Input: a run's output directory. Output: one HTML file and the summary's table, or JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil

from rich.console import Console

from dovetail import summary
from dovetail.errors import BadInput, WorkFailed

HELP = "write the HTML report of a run from its event log"


def configure(parser: argparse.ArgumentParser) -> None:
    """Options; see dovetail-report(1)."""
    parser.add_argument("directory", metavar="DIR", type=pathlib.Path, help="a run's output")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=pathlib.Path, help="default: DIR/report.html"
    )


def run(args: argparse.Namespace) -> int:
    """Write the page, print the summary; 0."""
    found, history = summary.load(args.directory)
    if args.json:
        print(json.dumps(found.to_json(), allow_nan=False))
        if args.output is None:
            return 0
    # The template engine and the charts are only needed here, and take a while to import.
    from dovetail import report

    path = args.output or args.directory / "report.html"
    write(path, report.page(found, history))
    if not args.json:
        # Into a pipe or a file, lines must not be wrapped at a terminal's 80 columns.
        width = shutil.get_terminal_size((140, 24)).columns
        console = Console(width=width, highlight=False)
        summary.show(found, console)
        console.print(f"report: {path}", soft_wrap=True, markup=False)
    return 0


def write(path: pathlib.Path, text: str) -> None:
    """Replace `path` in one step. Raises BadInput where there is no such directory."""
    if path.is_dir() or not path.parent.is_dir():
        raise BadInput(f"{path}: not a file in an existing directory")
    draft = path.with_name(f".{path.name}.new")
    try:
        draft.write_text(text, encoding="utf-8", errors="replace")
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise WorkFailed(f"{path}: {error.strerror}") from error
