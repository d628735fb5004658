# SPDX-License-Identifier: LGPL-3.0-or-later
"""Sessions of runs: whose is swept, and whose is waited for."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
from dovetail.host import processes, session
from dovetail.host.cgroups import Group
from support.other_users import let_in, needs_nobody
from support.run_command import NOBODY

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


def test_of_a_session_that_cannot_be_written_nothing_is_left(tmp_path, monkeypatch):
    """As where shared memory is full."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(session.os, "write", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/dovetail-"):
        made(tmp_path)
    assert not os.listdir(tmp_path)


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


@needs_nobody
def test_folders_that_their_owner_may_not_write_to_are_removed_too(tmp_path):
    let_in(tmp_path)
    elsewhere, top = tmp_path / "elsewhere", tmp_path / "store" / "top"
    (top / "read" / "alone").mkdir(parents=True)
    elsewhere.mkdir(mode=0o755)
    (top / "read" / "alone" / "points").touch()
    (top / "closed").mkdir()
    (top / "closed" / "points").touch()
    (top / "link").symlink_to(elsewhere)
    for path in (elsewhere, tmp_path / "store", top, *top.rglob("*")):
        os.chown(path, 65534, 65534, follow_symlinks=False)
    for name, mode in (("read/alone", 0o555), ("read", 0o500), ("closed", 0), (".", 0o500)):
        (top / name).chmod(mode)
    words = f"from dovetail.host.session import remove_tree; remove_tree({str(top)!r})"
    subprocess.run([*NOBODY, sys.executable, "-c", words], check=True)
    assert not top.exists()
    assert elsewhere.stat().st_mode & 0o777 == 0o755
