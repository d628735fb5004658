# SPDX-License-Identifier: LGPL-3.0-or-later
"""Nothing that users or their scripts rely on is lost: public_surface.txt is still there.

The file holds what version 0.1 offered before its modules were put in order. A line may be added
when something new is released; one is taken out only after telling those who use it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.public_surface import missing, surface

pytestmark = pytest.mark.unit

BEFORE = Path(__file__).with_name("public_surface.txt")
KINDS = {
    "argument", "choice", "command", "configuration", "exit", "json", "lua", "option", "plan",
    "request", "variable",
}  # fmt: skip


def before() -> list[str]:
    lines = BEFORE.read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_the_list_is_sorted_and_has_every_kind():
    assert before() == sorted(set(before()))
    assert {line.split()[0] for line in before()} == KINDS


def test_no_line_is_lost(tmp_path):
    assert missing(before(), surface(tmp_path)) == []
