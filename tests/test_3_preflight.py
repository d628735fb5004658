# SPDX-License-Identifier: LGPL-3.0-or-later
"""Step 3, the doctor: every gap is found, with the command that mends it and who types it."""

from __future__ import annotations

import pytest
from dovetail.usernetes import preflight

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("private_state")]


def test_every_gap_comes_with_a_command_and_who_types_it():
    found = preflight.checks()
    assert len(found) == len(preflight.CHECKS)
    for check in found:
        assert check.level in ("ok", "note", "soft", "hard")
        assert bool(check.fix) == bool(check.who), check
        if check.level == "hard":
            assert check.fix, check


def test_missing_delegation_is_a_hard_gap(monkeypatch):
    monkeypatch.setattr(preflight.cgroups, "problems", lambda: ["/x is missing"])
    assert preflight.control_groups().level == "hard"
    assert any("control groups" in line for line in preflight.hard_gaps())
