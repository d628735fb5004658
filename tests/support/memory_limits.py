# SPDX-License-Identifier: LGPL-3.0-or-later
"""A control group of our own whose memory is limited, and a way to run programs inside."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from dovetail.host import cgroups, processes

from support.local_runs import wait_for

LIMIT_MIB = 300
EAT = "b = bytearray(1 << 30)"
"""A program in Python that needs more than there is; only its own group has to pay for it."""


def _make() -> Path:
    """The group, or OSError where we may not make one."""
    above = Path(cgroups.above("memory")[0])
    group = above / f"dovetail-test-memory-{os.getpid()}"
    group.mkdir()
    try:
        for name in ("memory.limit_in_bytes", "memory.max"):
            if (group / name).exists():
                (group / name).write_text(str(LIMIT_MIB << 20))
                return group
        raise OSError("no controller for memory there")
    except OSError:
        group.rmdir()
        raise


@pytest.fixture
def limited():
    """Its folder; nothing that is started in it outlives the test."""
    try:
        group = _make()
    except (OSError, IndexError) as error:
        pytest.skip(f"cannot limit memory here: {error}")
    yield group
    inside = lambda: (group / "cgroup.procs").read_text().split()  # noqa: E731
    for pid in map(int, inside()):
        processes.send(pid, processes.start_ticks(pid), 9)
    wait_for(lambda: not inside(), "processes in the group")
    for folder in (*filter(Path.is_dir, group.iterdir()), group):
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()


def within(group: Path) -> tuple[str, ...]:
    """Put before a command, this has it run in the group."""
    return ("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh")
