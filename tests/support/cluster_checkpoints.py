# SPDX-License-Identifier: LGPL-3.0-or-later
"""Simulations that stop at a checkpoint on a cluster, and go on: in a next run, on other ranks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from dovetail.applications.openfoam.cell_counts import cells_per_processor
from dovetail.bench.cases import OPENFOAM_ETC, pitz_daily
from dovetail.executors.kubernetes import manifests

from support.clusters import LIMIT

LONG = 8 * LIMIT  # seconds, for hundreds of a solver's steps on a busy machine
TOP = Path(__file__).resolve().parents[2]
PITZ = Path("/usr/share/doc/openfoam-examples/examples/incompressible/simpleFoam/pitzDaily")
installed = pytest.mark.skipif(
    not (PITZ.is_dir() and shutil.which("decomposePar")), reason="OpenFOAM is not installed"
)


def stops_and_goes_on(site, out, **more):
    """Two ranks, ended after some steps and resumed: no step is lost, and none taken twice."""
    entry = {
        "name": "sim",
        "case": str(PITZ),
        "ranks": 2,
        "command": "simpleFoam -parallel",
        "prepare": [
            "blockMesh",
            "foamDictionary -entry endTime -set 200 system/controlDict",
            "dovetail decompose --ranks 2 --apply .",
        ],
        "environment": {"WM_PROJECT_DIR": OPENFOAM_ETC},
        "checkpoint": "allowed",
        **more,
    }
    _in_two_parts(site, out, site.plan(entry), 200)
    each_step_once(site, out, "sim", 200)


def each_step_once(site, out, name, end):
    """Nothing is computed twice, and nothing left out, by a solver's log; returns that."""
    log = (site.folder / out / name / "log").read_text()
    assert _steps(log) == list(range(1, end + 1))
    return log


def _steps(log):
    return [int(step) for step in re.findall(r"(?m)^Time = ([1-9]\d*)$", log)]


def ends_once_it_went_on(site, out, name):
    """Have a solver end some steps after its restart, however many it was to take."""
    site.until(lambda: len(site.of("Started", out, name)) == 2, out)
    over, log = site.of("Started", out, name)[1]["iterations"], site.folder / out / name / "log"
    site.until(lambda: _steps(log.read_text())[-1] > over + 3, out)
    control = site.folder / out / name / "case/system/controlDict"
    soon = f"endTime {_steps(log.read_text())[-1] + 50};"
    newer = control.stat().st_mtime + 15  # by more than OpenFOAM's fileModificationSkew
    control.write_text(re.sub(r"(?m)^endTime\s.*$", soon, control.read_text()))
    os.utime(control, (newer, newer))


def lammps_stops_and_goes_on(site, out, **more):
    """The same of LAMMPS's time steps, of which it prints the first and the last."""
    if shutil.which("lmp") is None:
        pytest.skip("LAMMPS is not installed")
    script = (TOP / "examples/in.lj").read_text()
    case = site.folder / f"{out}-case"
    case.mkdir()
    (case / "in.lj").write_text(script.replace("thermo 50", "thermo 0"))
    entry = {
        "name": "sim",
        "case": str(case),
        "ranks": 2,
        "command": "lmp -in in.lj -var steps 4000",
        "checkpoint": "allowed",
        **more,
    }
    _in_two_parts(site, out, site.plan(entry), 4000)


def _in_two_parts(site, out, plan, end):
    """A run that is ended, and resumed: what it counts goes on where it stopped."""
    run = site.start(plan, out, "--checkpoint")
    site.until(lambda: site.iterations("sim", out) > 5, out)
    assert site.end(run, signal.SIGTERM) == 130, site.errors(out)
    assert site.states(out) == {"sim": "checkpointed"}
    over = site.summary(out)["simulations"][0]["iterations"]
    assert 5 < over < end
    site.nothing_left()
    assert site.end(site.start(plan, out, "--checkpoint", "--resume")) == 0, site.errors(out)
    (one,) = site.summary(out)["simulations"]
    assert (one["state"], one["iterations"], one["continued"]) == ("done", end, 1)
    assert [record["iterations"] for record in site.of("Started", out)] == [0, over]


# --- On other ranks, in other pods ---

# Whether a restart pays depends on the machine's other load; here the least gain is enough.
AT_ONCE = """
import functools
import sys
from dovetail.cli.main import main
from dovetail.controller.settings import Settings
from dovetail.run import run
tuned = Settings(restart_pays=0.0, window=1.0, window_limit=2.0, steady=1.0)
run.run = functools.partial(run.run, settings=tuned)
sys.exit(main())
"""


def launches(site, out, name):
    """On how many ranks it was launched, each time."""
    return [len(one["share"]["requests"]) for one in site.of("Launch", out, name)]


def pods(site, name):
    """What tells its pods from any others."""
    return {one["metadata"]["uid"] for one in site.pods(name)}


def goes_on(site, out, name):
    """Whether it iterates on other ranks than at first."""
    seen = site.of("Sampled", out, name)
    ranks = seen[-1]["ranks"]["iterations"] if seen else []
    return len(ranks) != launches(site, out, name)[0] and min(ranks) > 3


def counted(site, out, name):
    """How it ended, and what its one row has of stops and starts."""
    (one,) = [one for one in site.summary(out)["simulations"] if one["name"] == name]
    return one["state"], one["iterations"], one["restarts"], one["checkpoints"], one["continued"]


def foam(case, **more):
    return {
        "case": str(case), "ranks": "1-2", "command": "simpleFoam", "checkpoint": "allowed",
        "environment": {"WM_PROJECT_DIR": OPENFOAM_ETC}, **more,
    }  # fmt: skip


def is_widened_and_narrowed(site, out, **more):
    """One rank while another one runs, two when that has ended, and one in the next run."""
    ends = {"long": 600, "short": 40}
    entries = [
        foam(pitz_daily(site.folder / f"{out}-{name}", (1,), end, refine=1), name=name, **more)
        for name, end in ends.items()
    ]
    run = site.start(site.plan(*entries), out, "--checkpoint", program=("-c", AT_ONCE))
    site.until(lambda: len(site.of("Started", out, "long")) == 2, out)
    keys = {one["metadata"]["labels"][manifests.KEY] for one in site.pods("long")}
    assert len(keys) == 1, "of the first launch nothing is left"
    assert len(site.pods("long")) == (2 if more else 1)
    site.until(lambda: goes_on(site, out, "long"), out)
    assert site.end(run, signal.SIGTERM) == 130, site.errors(out)
    assert site.states(out) == {"long": "checkpointed", "short": "done"}
    site.nothing_left()
    run = site.start(site.plan(*entries, cpus=1), out, "--checkpoint", "--resume")
    assert site.end(run, limit=LONG) == 0, site.errors(out)
    ranks = launches(site, out, "long")
    assert (ranks[:2], ranks[-1]) == ([1, 2], 1)
    stops = len(ranks) - 1  # more than two where the machine has no time for two ranks at once
    assert counted(site, out, "long") == ("done", 600, 0, stops, stops)
    assert counted(site, out, "short") == ("done", 40, 0, 0, 0)
    log = each_step_once(site, out, "long", 600)
    assert [int(n) for n in re.findall(r"(?m)^nProcs : (\d+)$", log)] == ranks


def is_cut_anew(site, out, **more):
    """Two ranks that are loaded 1 to 4 stop, and go on with as many cells each."""
    uneven = pitz_daily(site.folder / f"{out}-uneven", (1, 4), 10**5, refine=1)
    own = {"name": "uneven", "ranks": 2, "weights": [1, 4], "command": "simpleFoam -parallel"}
    entry = foam(uneven, **own, **more)
    run = site.start(site.plan(entry), out, program=("-c", AT_ONCE))
    ends_once_it_went_on(site, out, "uneven")
    assert site.end(run, limit=LONG) == 0, site.errors(out)
    asked = [one["why"] for one in site.of("Checkpoint", out)]
    assert asked == ["to be cut anew"], site.of("Note", out)
    end = counted(site, out, "uneven")[1]
    assert counted(site, out, "uneven") == ("done", end, 0, 1, 1)
    cells = cells_per_processor(site.folder / out / "uneven/case")
    assert max(cells) < 1.1 * min(cells)
    each_step_once(site, out, "uneven", end)


def about_to_stop(site, out, **more):
    """A run in which one was asked to stop for more ranks, and its plan.

    It stops once there is a file `go` in the run's directory; and it would never end, but for a
    file `stop` in its case. Two ranks are much faster than one also on a busy machine: else it
    would soon have only one again.
    """
    wait = "echo asked >> ../../asked; until [ -e ../../go ]; do sleep 0.1; done; touch stop"
    long = {
        **site.busy(200, 200, iterations=0), "name": "long", "ranks": "1-2", "iterations": 10**6,
        "environment": {"BUSY_UNTIL": "stop", "BUSY_SHARED": "1"},
        "checkpoint": {"write": f"sh -c '{wait}'", "restart": "sh -c 'rm -f stop; echo 1'"},
        **more,
    }  # fmt: skip
    short = {**site.busy(20, 20, iterations=50), "name": "short", "ranks": "1-2"}
    for one in (long, short):
        del one["weights"]
    plan = site.plan(long, {**short, "iterations": 50, **more})
    run = site.start(plan, out)
    site.until(lambda: site.of("Checkpoint", out), out)
    return run, plan


def let_end(site, out, run):
    """It runs on two ranks now, and is told that it is enough."""
    site.until(lambda: goes_on(site, out, "long"), out)
    assert launches(site, out, "long") == [1, 2]

    def over():
        (site.folder / out / "long/case/stop").touch()  # another restart would remove it
        return run.poll() is not None

    site.until(over, out)
    assert site.end(run) == 0, site.errors(out)


# Of these, those beside a pod are killed on demand.
LOSSES = {
    "pod": "pod lost",
    "entrypoint": "pod lost",
    "rank": "rank 0 killed",
    "supervisor": "its supervisor",
    "agent": "",
}
"""What may be killed in a pod, and how the reason begins; without an agent it goes on to stop."""
VICTIMS = [*LOSSES] if os.environ.get("DOVETAIL_FAULTS") else ["pod"]


def loses_as_it_stops(site, out, victim, **more):
    """What is lost while its simulation stops for more ranks costs a restart, or is told."""
    run, _ = about_to_stop(site, out, **more)
    (pod,) = site.pods("long")
    if victim == "pod":
        site.kubectl("delete", "pod", pod["metadata"]["name"], "--wait=false")
    else:
        (pid,) = in_pod(site, out, pod["metadata"]["labels"][manifests.KEY], victim)
        os.kill(pid, signal.SIGKILL)
    if victim == "agent":
        (site.folder / out / "go").touch()
    elif victim == "supervisor":
        assert site.end(run) == 1
        assert counted(site, out, "long")[0] == "failed"
    if victim != "supervisor":
        let_end(site, out, run)
        state, _, *counts = counted(site, out, "long")
        assert (state, counts) == ("done", [0, 1, 1] if victim == "agent" else [1, 0, 1])
    ends = [one for one in site.of("Finished", out, "long") if one["cause"] != "done"]
    (lost,) = [one for one in ends if one["cause"] != "checkpointed"] or [{"reason": ""}]
    assert lost["reason"].startswith(LOSSES[victim]), lost


def in_pod(site, out, key, victim):
    """The process of a simulation's one pod, or the agent of its node."""
    run = json.loads((site.folder / out / "status.json").read_text())["run"]
    lines, parents = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pid, line = int(folder.name), (folder / "cmdline").read_bytes().decode()
            lines[pid] = line.replace("\0", " ")
            parents[pid] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])

    def of(module, *words):
        return [p for p, line in lines.items() if all(w in line for w in (module, run, *words))]

    if victim == "agent":
        return of("executors.pods.agent")
    inside = of("executors.pods.entrypoint", key)
    if victim == "entrypoint":
        return inside
    for _ in lines:
        inside += [p for p, parent in parents.items() if parent in inside and p not in inside]
    word = {"supervisor": "mpi.supervisor", "rank": " sleep 0 "}[victim]
    return [p for p in inside if word in lines.get(p, "") and "mpirun" not in lines[p]]


def is_killed_as_one_stops(site, out, **more):
    """Killed before it stops and after, the controller's next one knows for what it stops."""
    run, plan = about_to_stop(site, out, **more)
    before = pods(site, "long")
    run.kill()
    site.end(run)
    run = site.start(plan, out, "--resume")
    site.until(lambda: len(site.of("Checkpoint", out)) == 2, out)
    assert pods(site, "long") == before, "it is asked once more, and has not stopped yet"
    run.kill()
    site.end(run)
    (site.folder / out / "go").touch()
    site.until(lambda: site.over(out), out)
    run = site.start(plan, out, "--resume")
    let_end(site, out, run)
    state, _, *counts = counted(site, out, "long")
    assert (state, counts) == ("done", [0, 1, 1])
    assert (site.folder / out / "asked").read_text() == "asked\n", "its program is asked once"
