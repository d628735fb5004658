# SPDX-License-Identifier: LGPL-3.0-or-later
"""The `dovetail` command: finds the subcommand, turns errors into one line and an exit code.

Each other module of this package is one subcommand: `HELP` is its line in the overview,
`configure(parser)` adds its options, `run(args)` does it and returns 0 (done) or 1 (the work
failed). Bad input is exit code 2, an interrupt is 130.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Callable

from dovetail import __version__
from dovetail.core.errors import BadInput, WorkFailed

COMMANDS = (
    "profile",
    "requests",
    "decompose",
    "predict",
    "run",
    "advise",
    "report",
    "status",
    "bench",
    "kube",
    "doctor",
    "env",
)


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """The whole argument parser, or with `only` the one subcommand's (imports are slow)."""
    top = argparse.ArgumentParser(
        prog="dovetail",
        description="Runs MPI simulations packed into the CPU time that their ranks leave idle.",
        epilog="Each command has --help and a man page, dovetail-COMMAND(1).",
    )
    top.add_argument("--version", action="version", version=f"dovetail {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS if only is None else (only,):
        module = importlib.import_module(f"dovetail.cli.{name}")
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
        module.configure(command)
        command.set_defaults(run=module.run)
    return top


def open_streams() -> None:
    """Put /dev/null where a standard stream is closed, before another file gets its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 (until the end)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    only = words[0] if words and words[0] in COMMANDS else None

    def work() -> int:
        args = parser(only).parse_args(words)
        return int(args.run(args))

    return guarded("dovetail", work)


def guarded(name: str, work: Callable[[], int]) -> int:
    """Do the work; errors become one line that begins with the name, and an exit code."""
    open_streams()
    try:
        code = work()
        sys.stdout.flush()
        return code
    except BadInput as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except WorkFailed as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        # Mostly of standard output: its disk is full, or its reader has left, as in
        # `dovetail … | head`. Python would try again at exit, and complain.
        if not isinstance(error, BrokenPipeError):
            print(f"{name}: {error}", file=sys.stderr)
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
