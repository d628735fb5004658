# SPDX-License-Identifier: LGPL-3.0-or-later
"""Sessions of runs: whose is swept, and whose is waited for."""

from __future__ import annotations

import os

import pytest
from dovetail.host import processes, session
from dovetail.host.cgroups import Group

pytestmark = pytest.mark.unit


def made(root, run_id="other"):
    return session.create_session(run_id, Group("", ""), "", str(root))


def test_the_session_of_a_live_run_is_left_alone(tmp_path):
    path, handle = made(tmp_path)
    try:
        assert session.sweep_sessions(str(tmp_path)) == []
    finally:
        os.close(handle)
    assert session.sweep_sessions(str(tmp_path)) == [os.path.basename(path)]


def test_a_run_that_cannot_be_seen_is_not_waited_for(tmp_path, monkeypatch):
    """As an agent in a pod cannot see a run beside its cluster; it had waited ten seconds."""
    path, handle = made(tmp_path)
    monkeypatch.setattr(processes, "namespace", lambda: "pid:[another]")
    monkeypatch.setattr(processes, "alive", lambda pid, ticks: False)
    monkeypatch.setattr(session.select, "select", lambda *_: pytest.fail("it was waited for"))
    try:
        assert session.sweep_sessions(str(tmp_path)) == []
        assert os.path.isdir(path)
    finally:
        os.close(handle)
