# SPDX-License-Identifier: LGPL-3.0-or-later
"""`dovetail env`: what a shell needs so that Flux finds Dovetail."""

from __future__ import annotations

import argparse
import json
import shlex

from dovetail.host import install_paths

HELP = 'print what lets Flux find Dovetail; use as eval "$(dovetail env)"'


def configure(parser: argparse.ArgumentParser) -> None:
    """There are no options but --json."""


def run(args: argparse.Namespace) -> int:
    """Print two variables, each with what is in it already, and bash's completion."""
    found = install_paths.for_flux()
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        for name, value in found.items():
            print(f"export {name}={shlex.quote(value)}")
        completion = shlex.quote(str(install_paths.flux_plugin("completion.bash")))
        print(f"case ${{BASH_VERSION:+$-}} in *i*) . {completion} ;; esac")
    return 0
