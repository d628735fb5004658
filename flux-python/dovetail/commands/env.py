# SPDX-License-Identifier: LGPL-3.0-or-later
"""`dovetail env`: what a shell needs so that Flux finds Dovetail (step 1)."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

from dovetail import fluxed
from dovetail.errors import BadInput

HELP = 'print what lets Flux find Dovetail; use as eval "$(dovetail env)"'


def configure(parser: argparse.ArgumentParser) -> None:
    """There are no options but --json."""


def run(args: argparse.Namespace) -> int:
    """Print two variables, each with what is in it already, and bash's completion."""
    commands = Path(sys.argv[0]).resolve().parent
    if not (commands / "flux-dovetail").exists():
        raise BadInput(f"there is no flux-dovetail in {commands}: install Dovetail first")
    plugins = Path(fluxed.__file__).resolve().parent / "cli"
    found = {}
    for name, folder in (("FLUX_EXEC_PATH_PREPEND", commands), ("FLUX_CLI_PLUGINPATH", plugins)):
        parts = [part for part in os.environ.get(name, "").split(":") if part]
        found[name] = ":".join([str(folder), *(part for part in parts if part != str(folder))])
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        for name, value in found.items():
            print(f"export {name}={shlex.quote(value)}")
        completion = shlex.quote(str(plugins.parent / "completion.bash"))
        print(f"case ${{BASH_VERSION:+$-}} in *i*) . {completion} ;; esac")
    return 0
