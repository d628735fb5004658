# SPDX-License-Identifier: LGPL-3.0-or-later
"""A case of OpenFOAM on a cluster that stops at a checkpoint, and that a next run goes on with."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import pytest

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
    plan = site.plan(entry)
    run = site.start(plan, out, "--checkpoint")
    site.until(lambda: site.iterations("sim", out) > 5, out)
    assert site.end(run, signal.SIGTERM) == 130, site.errors(out)
    assert site.states(out) == {"sim": "checkpointed"}
    over = site.summary(out)["simulations"][0]["iterations"]
    assert 5 < over < 200
    site.nothing_left()
    assert site.end(site.start(plan, out, "--checkpoint", "--resume")) == 0, site.errors(out)
    (one,) = site.summary(out)["simulations"]
    assert (one["state"], one["iterations"], one["continued"]) == ("done", 200, 1)
    assert [record["iterations"] for record in site.of("Started", out)] == [0, over]
    log = (site.folder / out / "sim/log").read_text()
    steps = [int(step) for step in re.findall(r"(?m)^Time = ([1-9]\d*)$", log)]
    assert steps == list(range(1, 201)), "nothing is computed twice"
