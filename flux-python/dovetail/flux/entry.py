# SPDX-License-Identifier: LGPL-3.0-or-later
"""The program `flux-dovetail`: loads `flux dovetail`, which takes a while, and is it.

Invariant: an interrupt meanwhile ends it as one does later, without a traceback.
"""

from __future__ import annotations

import importlib

from dovetail.host.exit_codes import guarded

COMMAND = "dovetail.flux.command"


def main() -> int:
    """Run one command; returns its exit code."""
    return guarded("flux dovetail", lambda: int(importlib.import_module(COMMAND).main()))
