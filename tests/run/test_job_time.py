# SPDX-License-Identifier: LGPL-3.0-or-later
"""A run knows when its batch job ends, and stops its simulations at checkpoints before."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from dovetail.bench.cases import OPENFOAM_ETC, pitz_daily
from dovetail.run import job_time
from support.run_command import COMMAND, site  # noqa: F401


@pytest.mark.unit
def test_without_flux_there_is_no_end(monkeypatch, tmp_path):
    monkeypatch.delenv("FLUX_URI", raising=False)
    assert job_time.left() == math.inf
    monkeypatch.setenv("FLUX_URI", "local:///nowhere")
    for command in ("false", str(tmp_path / "missing")):
        monkeypatch.setenv("FLUX", command)
        assert job_time.left() == math.inf


@pytest.mark.unit
@pytest.mark.parametrize(("left", "early"), [(30, 15), (600, 60), (86400, 120), (math.inf, 120)])
def test_longer_jobs_are_stopped_earlier_within_bounds(left, early):
    assert job_time.before(left) == early


def flux() -> str:
    """The flux command, or a skip."""
    for place in (os.environ.get("FLUX"), shutil.which("flux"), "/opt/flux/bin/flux"):
        if place and os.access(place, os.X_OK):
            return place
    pytest.skip("no flux here")


@pytest.mark.flux
@pytest.mark.skipif(not shutil.which("simpleFoam"), reason="OpenFOAM is not installed")
def test_before_a_batch_job_ends_its_simulations_stop_at_checkpoints(site):  # noqa: F811
    case = pitz_daily(site.directory / "pitz", (1, 1), 10**6, refine=1)
    plan = site.plan(
        {
            "name": "pitz", "case": str(case), "ranks": 2, "command": "simpleFoam -parallel",
            "environment": {"WM_PROJECT_DIR": OPENFOAM_ETC}, "checkpoint": "allowed",
        }
    )  # fmt: skip
    run = [*COMMAND, str(plan), "-o", "out", "--checkpoint"]
    words = [flux(), "start", flux(), "alloc", "-n2", "-t", "60s", *run]
    path = f"{Path(flux()).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        words, cwd=site.directory, env={**site.environment(), "PATH": path},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert re.search(r"the job has [0-9]+ s; checkpoints are written 15 s before", said), said
    assert "interrupted by timeout; 1 simulation is stopped" in said
    assert done.returncode == 130
    assert site.states() == {"pitz": "checkpointed"}
    (one,) = site.summary()["simulations"]
    assert one["iterations"] > 0
    for rank in (0, 1):
        time = site.out / "pitz/case" / f"processor{rank}" / str(one["iterations"])
        assert (time / "uniform/time").exists()
    site.assert_clean()
