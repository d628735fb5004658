# SPDX-License-Identifier: LGPL-3.0-or-later
"""The `dovetail` command: finds the subcommand and does it.

Each other module of this package is one subcommand: `HELP` is its line in the overview,
`configure(parser)` adds its options, `run(args)` does it and returns 0 (done) or 1 (the work
failed). Errors end as `host.exit_codes` says.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from dovetail import __version__
from dovetail.host.exit_codes import guarded

COMMANDS = (
    "profile",
    "requests",
    "decompose",
    "predict",
    "run",
    "advise",
    "report",
    "status",
    "top",
    "bench",
    "kube",
    "doctor",
    "env",
)


def parser(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """The argument parser, of all subcommands or of those named (imports are slow)."""
    top = argparse.ArgumentParser(
        prog="dovetail",
        description="Runs MPI simulations packed into the CPU time that their ranks leave idle.",
        epilog="Each command has --help and a man page, dovetail-COMMAND(1).",
    )
    top.add_argument("--version", action="version", version=f"dovetail {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in names:
        module = importlib.import_module(f"dovetail.cli.{name}")
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
        module.configure(command)
        command.set_defaults(run=module.run)
    return top


def entry() -> NoReturn:
    """Be the command, and end without taking the interpreter apart, which takes a while."""
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    named = tuple(name for name in COMMANDS if [name] == words[:1])
    names = named if named or words == ["--version"] else COMMANDS

    def work() -> int:
        args = parser(names).parse_args(words)
        return int(args.run(args))

    return guarded("dovetail", work)


if __name__ == "__main__":
    entry()
