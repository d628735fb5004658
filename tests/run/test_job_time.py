# SPDX-License-Identifier: LGPL-3.0-or-later
"""A run knows when its batch job ends, and stops its simulations at checkpoints before."""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from dovetail.applications import lammps_checkpoint
from dovetail.bench.cases import OPENFOAM_ETC, pitz_daily
from dovetail.run import job_time
from support.local_runs import scripts
from support.run_command import COMMAND, TOP, site  # noqa: F401


@pytest.mark.unit
def test_without_flux_there_is_no_end(monkeypatch, tmp_path):
    monkeypatch.delenv("FLUX_URI", raising=False)
    assert job_time.End(job_time.instance(for_us_alone=False)).left == math.inf
    monkeypatch.setenv("FLUX_URI", "local:///nowhere")
    for command in ("false", str(tmp_path / "missing")):
        monkeypatch.setenv("FLUX", command)
        end = job_time.End(job_time.instance(for_us_alone=False))
        assert end.left == math.inf
        assert not end.due()
        end.close()


@pytest.fixture
def answers(monkeypatch, tmp_path):
    """A Flux that says what it is told to, and is asked again at once; to be told so."""
    stub = tmp_path / "flux"
    stub.write_text(f"#!/bin/sh\nexec sh {tmp_path}/answer\n")
    stub.chmod(0o755)
    monkeypatch.setenv("FLUX_URI", "local:///nowhere")
    monkeypatch.setenv("FLUX", str(stub))
    monkeypatch.setattr(job_time, "EVERY", 0.0)
    monkeypatch.setattr(job_time, "FRESH", 0.0)
    return (tmp_path / "answer").write_text


def eventually(condition) -> bool:
    for _ in range(1000):
        if condition():
            return True
        time.sleep(0.01)
    return False


@pytest.mark.unit
def test_a_time_that_is_changed_is_noticed(answers):
    answers("echo 1000")
    end = job_time.End(job_time.instance(for_us_alone=False))
    assert end.left == pytest.approx(1000, abs=10)
    answers("echo 50")
    assert eventually(end.due), "it was shortened"
    answers("echo 5000")
    assert not end.due(), "it was made longer, which is asked before simulations are stopped"
    answers("exit 1")
    assert not any(end.due() for _ in range(50)), "what is known holds"
    answers("sleep 1000; true")
    assert not end.due()
    end.close()


@pytest.mark.unit
def test_flux_is_asked_again_after_a_moment_in_which_no_process_could_be_had(answers, monkeypatch):
    def full(*words, **options):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    answers("echo 1000")
    end = job_time.End(job_time.instance(for_us_alone=False))
    with monkeypatch.context() as now:
        now.setattr(subprocess, "Popen", full)
        assert not end.due()
    answers("echo 10")
    assert eventually(end.due), "the job's time was shortened since"
    end.close()


@pytest.mark.unit
def test_a_time_that_is_over_soon_is_so_though_flux_is_silent(answers, monkeypatch):
    monkeypatch.setattr(job_time, "LIMIT", 0.5)
    answers("echo 16")
    end = job_time.End(job_time.instance(for_us_alone=False))
    answers("exec sleep 1000")
    assert eventually(end.due)
    end.close()


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
    """The job's end is set as the solver begins, and 30 s later it is asked to stop, in a minute.

    So it does both also on a slow machine: of a job that is short from the beginning a quarter
    minute is left to stop in.
    """
    case = pitz_daily(site.directory / "pitz", (1,), 10**6, refine=1)
    job = f"job=$({flux()} getattr jobid); since=$({flux()} --parent jobs -no '{{runtime}}' $job)"
    soon = f"{job}; {flux()} --parent update $job duration=$((${{since%.*}} + 90))s"
    entries = [
        {
            "name": "pitz", "case": str(case), "command": "simpleFoam", "checkpoint": "allowed",
            "environment": {"WM_PROJECT_DIR": OPENFOAM_ETC}, "prepare": list(scripts(soon)),
        }
    ]  # fmt: skip
    if shutil.which("lmp"):
        shutil.copy(TOP / "examples/in.lj", site.case)
        command = f"lmp -in in.lj -var steps {10**7}"
        entries.append({"name": "melt", "command": command, "checkpoint": "allowed"})
    plan = site.plan(*entries)
    run = [*COMMAND, str(plan), "-o", "out", "--checkpoint"]
    words = [flux(), "start", flux(), "alloc", "-n2", "-t", "10m", *run]
    path = f"{Path(flux()).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        words, cwd=site.directory, env={**site.environment(), "PATH": path},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert re.search(r"the job has [0-9]+ s; checkpoints are written [0-9]+ s before", said), said
    assert re.search(f"interrupted by timeout; {len(entries)} simulations? (is|are) stopped", said)
    assert done.returncode == 130
    assert site.states() == {one["name"]: "checkpointed" for one in entries}
    pitz, *melt = site.summary()["simulations"]
    assert pitz["iterations"] > 0
    assert (site.out / f"pitz/case/{pitz['iterations']}/uniform/time").exists()
    for one in melt:
        written = lammps_checkpoint.written_step(site.out / "melt/case/dovetail.restart.1")
        assert one["iterations"] == written > 0
    site.assert_clean()


@pytest.mark.flux
@pytest.mark.parametrize(
    ("asked", "updated", "count", "state"),
    [("60s", "10m", 500, "done"), ("10m", "75s", 400, "checkpointed")],
)
def test_the_time_of_a_job_may_change(site, asked, updated, count, state):  # noqa: F811
    """It is updated as the simulation begins, which takes `count` tenths of a second.

    It would be stopped after 45 s by the first time, and after 15 s by the second one.
    """
    update = f'{flux()} --parent update "$({flux()} getattr jobid)" duration={updated}'
    steps = f"n=0; {update} || exit 9; while [ $n -lt {count} ]; do"
    steps += ' n=$((n+1)); echo "Time = $n"; sleep 0.1; [ ! -e stop ] || { rm stop; exit 0; }; done'
    entry = site.shell(
        steps, iterations=count, checkpoint={"write": "touch stop", "restart": "echo 1"}
    )
    run = [*COMMAND, str(site.plan(entry)), "-o", "out", "--checkpoint"]
    words = [flux(), "start", flux(), "alloc", "-n2", "-t", asked, *run]
    path = f"{Path(flux()).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        words, cwd=site.directory, env={**site.environment(), "PATH": path},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert site.states() == {"sim": state}, done.stdout + done.stderr
    site.assert_clean()
