# SPDX-License-Identifier: LGPL-3.0-or-later
"""A case of OpenFOAM is cut in its pods for the ranks that were chosen."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from dovetail.applications.openfoam.mesh import cells_per_processor
from support.cluster_runs import out, site  # noqa: F401

pytestmark = pytest.mark.kube

PITZ = Path("/usr/share/doc/openfoam-examples/examples/incompressible/simpleFoam/pitzDaily")


@pytest.mark.skipif(
    not (PITZ.is_dir() and shutil.which("decomposePar")), reason="OpenFOAM is not installed"
)
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
