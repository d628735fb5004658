# SPDX-License-Identifier: LGPL-3.0-or-later
"""A cluster whose store is destroyed: an API that runs and does nothing is not taken for life."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from support.cluster_runs import ends, running, two
from support.clusters import eventually

pytestmark = [pytest.mark.kube, pytest.mark.first]


def destroy_store(site):
    """Overwrite what etcd has written, and end it; it cannot start again."""
    (pid,) = site.machine.pids(site.made, "etcd")
    for file in (Path(site.made["folder"]) / "etcd").rglob("*"):
        if file.is_file():
            with file.open("r+b") as content:
                content.write(b"\xff" * file.stat().st_size)
    with suppress(ProcessLookupError):  # it may have seen that, and ended
        os.kill(pid, signal.SIGKILL)
    answers = lambda: site.kubectl("get", "nodes", "--request-timeout=1s", check=False)  # noqa: E731
    assert eventually(lambda: not answers())


def test_nobody_takes_a_destroyed_store_for_a_cluster(doomed):
    file, waiting = ends(doomed, "out")
    run = running(doomed, "out", two(doomed, **waiting))
    destroy_store(doomed)
    doomed.until(lambda: "does not answer" in doomed.errors())
    file.touch()
    assert doomed.end(run) == 0, doomed.errors()
    assert set(doomed.states().values()) == {"done"}
    assert "left on the cluster" in doomed.errors()
    state = doomed.machine.verb("status", code=1).stdout
    assert "not ready" in state
    up = doomed.machine.verb("up", "--name", "one", "--timeout", "3", code=1)
    assert "cluster one runs, and is not ready after 3 s" in up.stderr
    assert "\n  etcd: " in up.stderr, "why"
