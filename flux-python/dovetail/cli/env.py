# SPDX-License-Identifier: LGPL-3.0-or-later
"""`dovetail env`: what a shell needs so that it, and Flux, find Dovetail."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
from pathlib import Path

from usernetes_setup.build import programs

from dovetail.core.errors import BadInput
from dovetail.host import install_paths

HELP = 'print what lets shells and Flux find Dovetail; use as eval "$(dovetail env)"'
SYSTEM = ("/usr/local/bin", "/usr/bin", "/bin")  # nothing comes before their Python


def configure(parser: argparse.ArgumentParser) -> None:
    """There are no options but --json."""


def run(args: argparse.Namespace) -> int:
    """Print three variables, each with what is in it already, and bash's completion."""
    found = {**install_paths.for_flux(), "PATH": path()}
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        for name, value in found.items():
            print(f"export {name}={shlex.quote(value)}")
        completion = shlex.quote(str(install_paths.flux_plugin("completion.bash")))
        print(f"case ${{BASH_VERSION:+$-}} in *i*) . {completion} ;; esac")
    return 0


def path() -> str:
    """PATH with our commands and kubectl, at its end: beside ours there may be another Python.

    But before another installation's, which may be there first: Flux finds ours first as well.
    """
    ours = str(install_paths.commands())
    there = [part for part in os.environ.get("PATH", "").split(":") if part]
    others = [part for part in there if part not in SYSTEM and shutil.which("dovetail", path=part)]
    first = str(Path(others[0], "dovetail").resolve().parent) if others else ours
    if first != ours and ours not in SYSTEM:
        there = [part for part in there if part != ours]
        there.insert(there.index(others[0]), ours)
    folders = [ours]
    with contextlib.suppress(BadInput):  # it is built, and not for this user
        if kubernetes := programs.built():
            folders.append(str(kubernetes / "bin"))
    return ":".join([*there, *(folder for folder in folders if folder not in there)])
