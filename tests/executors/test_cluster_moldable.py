# SPDX-License-Identifier: LGPL-3.0-or-later
"""A case of OpenFOAM in pods: cut for the ranks that were chosen, stopped, and gone on with."""

from __future__ import annotations

import pytest
from dovetail.applications.openfoam.cell_counts import cells_per_processor
from support.cluster_checkpoints import (
    PITZ,
    installed,
    is_cut_anew,
    is_killed_as_one_stops,
    is_widened_and_narrowed,
    lammps_stops_and_goes_on,
    stops_and_goes_on,
)
from support.cluster_runs import out, site  # noqa: F401

pytestmark = [pytest.mark.kube, installed]


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
    stops_and_goes_on(site, out)


def test_in_pods_time_steps_of_lammps_go_on(site, out):  # noqa: F811
    lammps_stops_and_goes_on(site, out)


def test_in_pods_the_last_one_is_widened_and_goes_on_on_fewer_ranks_in_the_next_run(site, out):  # noqa: F811
    is_widened_and_narrowed(site, out)


def test_in_pods_uneven_ranks_are_cut_anew(site, out):  # noqa: F811
    is_cut_anew(site, out)


def test_a_controller_is_killed_as_pods_stop_for_more_ranks(site, out):  # noqa: F811
    is_killed_as_one_stops(site, out)
