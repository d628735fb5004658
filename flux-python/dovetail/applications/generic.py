# SPDX-License-Identifier: LGPL-3.0-or-later
"""Any program: what its plan does not say is not known.

It runs on any number of ranks, or its plan's prepare lines see to it; it goes on from what it has
written where its plan has commands for that.
"""

from __future__ import annotations

from dovetail.core.protocol import Spec


def command(spec: Spec) -> tuple[str, ...]:
    """As the plan has it."""
    return spec.command


def prepare(spec: Spec) -> tuple[str, ...]:
    """Nothing but what the plan has."""
    return ()


def checkpoint(spec: Spec, step: str) -> str:
    """The plan's commands; that the program has ended well once it was asked to is enough."""
    return {"halt": spec.write, "halted": "true", "go-on": spec.restart}.get(step, "")


def expected_iterations(spec: Spec) -> int:
    """Not known."""
    return 0
