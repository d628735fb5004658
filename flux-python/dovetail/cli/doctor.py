# SPDX-License-Identifier: LGPL-3.0-or-later
"""`dovetail doctor`: whether user-space Kubernetes can run here, as `kube preflight`."""

from __future__ import annotations

import argparse

from usernetes_setup.preflight import report

HELP = "say whether user-space Kubernetes can run here, and how to fix what is missing"


def configure(parser: argparse.ArgumentParser) -> None:
    """There are no options but --json."""


def run(args: argparse.Namespace) -> int:
    """Print the findings; 0 if a cluster can run here, else 1."""
    return report.main(args.json)
