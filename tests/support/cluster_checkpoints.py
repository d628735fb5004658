# SPDX-License-Identifier: LGPL-3.0-or-later
"""Cases of OpenFOAM and LAMMPS that stop at a checkpoint on a cluster, and go on in a next run."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import pytest

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
        "environment": {"WM_PROJECT_DIR": "/usr/share/openfoam"},
        "checkpoint": "allowed",
        **more,
    }
    _in_two_parts(site, out, site.plan(entry), 200)
    log = (site.folder / out / "sim/log").read_text()
    steps = [int(step) for step in re.findall(r"(?m)^Time = ([1-9]\d*)$", log)]
    assert steps == list(range(1, 201)), "nothing is computed twice"


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
