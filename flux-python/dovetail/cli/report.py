# SPDX-License-Identifier: LGPL-3.0-or-later
"""`dovetail report`: a run's HTML page and summary, again, from its event log.

Input: a run's output directory. Output: `report.html` and `summary.json` there, or one page
elsewhere, and the summary's table, or JSON.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil

from rich.console import Console

from dovetail.core.errors import WorkFailed
from dovetail.host.private_files import input_path, output_path
from dovetail.report import summary
from dovetail.report.history import History

HELP = "write the HTML report of a run from its event log"


def configure(parser: argparse.ArgumentParser) -> None:
    """Options; see dovetail-report(1)."""
    parser.add_argument("directory", metavar="DIR", type=input_path, help="a run's output")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=output_path, help="default: DIR/report.html"
    )


def run(args: argparse.Namespace) -> int:
    """Write the page, and print the summary; 0."""
    found, history = summary.load(args.directory)
    if args.json and args.output is None:
        print(json.dumps(found.to_json(), allow_nan=False))
        return 0
    # Into a pipe or a file, lines must not be wrapped at a terminal's 80 columns.
    console = Console(width=shutil.get_terminal_size((140, 24)).columns, highlight=False)
    try:  # first, as who reads the table may leave before its end
        path = _write(args, found, history)
    finally:
        if args.json:
            print(json.dumps(found.to_json(), allow_nan=False))
        else:
            summary.show(found, console)
    if not args.json:
        console.print(f"report: {path}", soft_wrap=True, markup=False, emoji=False)
    return 0


def _write(args: argparse.Namespace, found: summary.Summary, history: History) -> pathlib.Path:
    """Write the page, and where it belongs to the run the summary; the page's path."""
    # The template engine and the charts are only needed here, and take a while to import.
    from dovetail.report import html

    if args.output is not None:
        html.replace_file(args.output, html.page(found, history))
        return pathlib.Path(args.output)
    try:
        return html.publish(args.directory, found, history)
    except WorkFailed as error:  # as in another user's directory
        raise WorkFailed(f"{error}; with -o FILE the page is written elsewhere") from None
