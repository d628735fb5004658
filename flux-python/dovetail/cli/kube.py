# SPDX-License-Identifier: LGPL-3.0-or-later
"""`dovetail kube VERB`: user-space Kubernetes; see `usernetes_setup`."""

from __future__ import annotations

import argparse
import signal
import sys

from usernetes_setup import __main__ as verbs

HELP = "start, join, inspect and end user-space Kubernetes"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verbs, each with its own options."""
    verbs.add_verbs(parser)


def run(args: argparse.Namespace) -> int:
    """Do the verb; returns its exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was begun ends, too
    return verbs.run(args.verb, args)
