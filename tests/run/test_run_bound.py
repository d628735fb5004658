# SPDX-License-Identifier: LGPL-3.0-or-later
"""`dovetail run` measures real ranks bound to cores, and a killed run goes on as its log says."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
from support.local_runs import wait_for
from support.run_command import busy, site  # noqa: F401

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core"),
]


def bound(site):  # noqa: F811
    """The ranks that may run on one core alone."""
    found = []
    for pid in site.processes("burn"):
        with contextlib.suppress(OSError):
            found += [pid] * (len(os.sched_getaffinity(pid)) == 1)
    return found


def test_ranks_are_bound_to_measure_it_and_the_log_says_so(site):  # noqa: F811
    enough = site.directory / "enough"
    entry = busy(5, iterations=0, how="burn")
    plan = site.plan({"name": "a", **entry, "environment": {"BUSY_UNTIL": str(enough)}})
    run = site.start(plan, "-o", "out")
    wait_for(lambda: bound(site), site.errors)
    site.until(lambda log: any(r["type"] == "Resized" and not r["refused"] for r in log))
    site.end(run, signal.SIGKILL)
    site.assert_clean()
    assert any(one["shares"]["a"]["bound"] for one in site.of_type("Resize"))
    run = site.start(plan, "-o", "out", "--resume")
    site.until(lambda log: sum(r.get("type") == "Started" for r in log) == 2)
    enough.touch()
    assert site.end(run)[0] == 0
    assert site.states() == {"a": "done"}
