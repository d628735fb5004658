# SPDX-License-Identifier: LGPL-3.0-or-later
"""A case of OpenFOAM in pods: cut for the ranks that were chosen, stopped, and gone on with."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import pytest
from dovetail.applications.openfoam.mesh import cells_per_processor
from support.cluster_runs import out, site  # noqa: F401

PITZ = Path("/usr/share/doc/openfoam-examples/examples/incompressible/simpleFoam/pitzDaily")
pytestmark = [
    pytest.mark.kube,
    pytest.mark.skipif(
        not (PITZ.is_dir() and shutil.which("decomposePar")), reason="OpenFOAM is not installed"
    ),
]


def test_a_case_is_cut_in_its_pods_for_the_ranks_that_were_chosen(site, out):  # noqa: F811
    entry = {
        "case": str(PITZ),
        "ranks": [1, 2, 3],
        "command": "simpleFoam",
        "prepare": ["blockMesh", "foamDictionary -entry endTime -set 40 system/controlDict"],
        "environment": {"WM_PROJECT_DIR": "/usr/share/openfoam"},
        "count": 3,
    }
    cut = {**entry, "name": "cut", "ranks": [2, 3], "count": 1, "checkpoint": "allowed"}
    assert site.end(site.start(site.plan(entry, cut), out)) == 0, site.errors(out)
    assert set(site.states(out).values()) == {"done"}
    assert {one["iterations"] for one in site.summary(out)["simulations"]} == {40}
    for name in ("sim-1", "sim-2", "sim-3", "cut"):
        ranks = len(site.of("Launch", out, name)[-1]["share"]["requests"])
        case = site.folder / out / name / "case"
        if ranks == 1:
            assert list(case.glob("processor*")) == []
        else:
            assert max(cells_per_processor(case)) == -(-12225 // ranks)
    assert len(site.of("Launch", out, "cut")[-1]["share"]["requests"]) > 1


def test_in_pods_it_stops_at_a_checkpoint_and_goes_on_there(site, out):  # noqa: F811
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
