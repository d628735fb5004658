# SPDX-License-Identifier: LGPL-3.0-or-later
"""A run with real OpenFOAM is killed and resumed: its simulations go on where they had written."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import pytest
from dovetail.bench.cases import OPENFOAM_ETC, pitz_daily
from support.local_runs import wait_for
from support.run_command import site  # noqa: F401

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(not shutil.which("simpleFoam"), reason="OpenFOAM is not installed"),
]
END = 60
FIELDS = ("U", "p", "k", "epsilon", "nut", "phi")


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A case of 12,225 cells on two ranks that writes its fields at each tenth step."""
    made = pitz_daily(tmp_path_factory.mktemp("cases") / "pitz", (1, 1), END, refine=1)
    control = made / "system/controlDict"
    text = re.sub(r"(?m)^writeInterval\s+\S+;", "writeInterval 10;", control.read_text())
    control.write_text(text.replace("ascii", "binary"))
    return made


def plan_of(site, case, **options):  # noqa: F811
    return site.plan(
        {
            "name": "pitz",
            "case": str(case),
            "ranks": 2,
            "command": "simpleFoam -parallel",
            "application": "openfoam",
            "environment": {"WM_PROJECT_DIR": OPENFOAM_ETC},
            **options,
        }
    )


def final(site):  # noqa: F811
    """The final fields of both ranks."""
    found = {}
    for rank in (0, 1):
        place = site.out / "pitz" / "case" / f"processor{rank}" / str(END)
        found.update({(rank, field): (place / field).read_bytes() for field in FIELDS})
    return found


def written(site, time):  # noqa: F811
    return (site.out / "pitz/case/processor1" / str(time) / "uniform/time").exists()


def test_after_kills_a_simulation_goes_on_from_its_checkpoints(site, case):  # noqa: F811
    plan = plan_of(site, case)
    assert site.run(plan, "-o", "out")[0] == 0
    undisturbed = final(site)
    shutil.rmtree(site.out)
    before = sorted((str(path), path.stat().st_mtime_ns) for path in Path(case).rglob("*"))

    plan = plan_of(site, case, checkpoint="allowed")
    for number, time in enumerate((20, 40)):
        run = site.start(plan, "-o", "out", *(["--resume"] if number else []))
        wait_for(lambda at=time: written(site, at))
        site.end(run, signal.SIGKILL)
    assert site.run(plan, "-o", "out", "--resume")[0] == 0
    (one,) = site.summary()["simulations"]
    assert (one["state"], one["iterations"]) == ("done", END)
    assert (one["restarts"], one["continued"]) == (2, 2)
    went_on = [record["iterations"] for record in site.of_type("Started")]
    assert went_on[0] == 0
    assert 10 <= went_on[1] < went_on[2] < END
    assert [record["continued"] for record in site.of_type("Launch")] == [False, True, True]
    assert final(site) == undisturbed
    assert sorted((str(p), p.stat().st_mtime_ns) for p in Path(case).rglob("*")) == before
    site.assert_clean()


def test_with_nothing_whole_to_go_on_from_it_begins_anew_and_says_so(site, case):  # noqa: F811
    plan = plan_of(site, case, checkpoint="allowed")
    run = site.start(plan, "-o", "out")
    wait_for(lambda: written(site, 10))
    site.end(run, signal.SIGKILL)
    site.assert_clean()
    for time in (site.out / "pitz/case/processor1").glob("[1-9]*"):
        (time / "p").write_bytes(b"")
    assert site.run(plan, "-o", "out", "--resume")[0] == 0
    (one,) = site.summary()["simulations"]
    assert (one["state"], one["restarts"], one["continued"]) == ("done", 1, 0)
    assert "begins anew" in (site.out / "pitz/log").read_text()
