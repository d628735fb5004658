# SPDX-License-Identifier: LGPL-3.0-or-later
"""Any program: it runs on any number of ranks, or its plan's prepare lines see to it."""

from __future__ import annotations

from dovetail.core.protocol import Spec


def command(spec: Spec) -> tuple[str, ...]:
    """As the plan has it."""
    return spec.command


def prepare(spec: Spec) -> tuple[str, ...]:
    """Nothing but what the plan has."""
    return ()


def checkpoint(spec: Spec, step: str) -> str:
    """None."""
    return ""


def expected_iterations(spec: Spec) -> int:
    """Not known."""
    return 0
