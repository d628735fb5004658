# SPDX-License-Identifier: LGPL-3.0-or-later
"""A cluster is taken down in mid-run; a file of its own, since nothing can follow."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from support.cluster_runs import running, two
from support.clusters import LIMIT, eventually

pytestmark = pytest.mark.kube


def test_a_cluster_that_goes_down_takes_its_simulations_with_it(site):
    run = running(site, "out", two(site))
    name = json.loads((site.folder / "out" / "status.json").read_text())["run"]
    sessions = f"dovetail-*-{name}.*"
    assert list(Path("/dev/shm").glob(sessions))
    site.machine.verb("down", "--name", "one")
    assert eventually(lambda: not list(Path("/dev/shm").glob(sessions)))
    run.send_signal(signal.SIGTERM)  # it waits for the cluster to come back, but not to end
    run.wait(LIMIT)
    assert run.returncode == 130, site.errors("out")
    assert "left on the cluster: Jobs: " in site.errors("out")
    assert (site.folder / "out" / "summary.json").exists()
