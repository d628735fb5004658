# SPDX-License-Identifier: LGPL-3.0-or-later
"""A cluster is taken down in mid-run, for good."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from support.cluster_runs import running, two
from support.clusters import LIMIT, eventually

pytestmark = [pytest.mark.kube, pytest.mark.first]


def taken_down(site, **environment):
    """A run whose cluster is gone, with all that it ran."""
    run = running(site, "out", two(site), **environment)
    name = json.loads((site.folder / "out" / "status.json").read_text())["run"]
    sessions = f"dovetail-*-{name}.*"
    assert list(Path("/dev/shm").glob(sessions))
    site.machine.verb("down", "--name", "one")
    assert eventually(lambda: not list(Path("/dev/shm").glob(sessions)))
    return run


def test_a_cluster_that_goes_down_takes_its_simulations_with_it(doomed):
    run = taken_down(doomed)
    run.send_signal(signal.SIGTERM)  # it waits for the cluster to come back, but not to end
    run.wait(LIMIT)
    assert run.returncode == 130, doomed.errors("out")
    assert "left on the cluster: Jobs: " in doomed.errors("out")
    assert (doomed.folder / "out" / "summary.json").exists()


def test_a_cluster_that_does_not_come_back_is_not_waited_for_for_ever(doomed):
    run = taken_down(doomed, DOVETAIL_ORPHAN_S="3")
    run.wait(LIMIT)
    assert run.returncode == 1, doomed.errors("out")
    why = f"{doomed.made['server']} has not answered for 3 s, and nothing runs there"
    assert f"the run is ended: {why}" in doomed.errors("out")
    assert set(doomed.states().values()) == {"unfinished"}
