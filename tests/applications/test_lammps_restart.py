# SPDX-License-Identifier: LGPL-3.0-or-later
"""LAMMPS is stopped at a restart file and goes on: same atoms on the same ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from dovetail.applications import lammps_restart
from dovetail.core.errors import BadInput

unit = pytest.mark.unit
mpi = [
    pytest.mark.mpi,
    pytest.mark.skipif(not shutil.which("lmp"), reason="LAMMPS is not installed"),
]

STEPS = 400
EVERY = 20
SCRIPT = f"""\
units lj
atom_style atomic
lattice fcc 0.8442
region box block 0 6 0 6 &
    0 6
create_box 1 box
create_atoms 1 box
mass 1 1.0
velocity all create 1.44 87287 loop geom
pair_style lj/cut 2.5
pair_coeff 1 1 1.0 1.0 2.5
neighbor 0.3 bin
neigh_modify delay 0 every 20 check no
fix 1 all nvt temp 1.0 2.0 0.5
dump steps all atom 100 steps.dump
dump_modify steps sort id
run {STEPS}
write_dump all custom final.dump id x y z vx vy vz modify sort id format float %.15g
"""

REFUSED = {
    "a second run": (SCRIPT + "run 10\n", "one `run`"),
    "a run of steps in a variable": (SCRIPT.replace("run 400", "run $n"), "one `run`"),
    "no run": (SCRIPT.replace("run 400", ""), "without `run`"),
    "a loop": ("label again\n" + SCRIPT, "`label`"),
    "another script": ("include other\n" + SCRIPT, "`include`"),
    "no box": ("run 3\n", "before `create_box`"),
}


@unit
@pytest.mark.parametrize("what", REFUSED)
def test_a_script_that_is_not_plain_is_refused_with_the_reason(tmp_path, what):
    text, why = REFUSED[what]
    (tmp_path / "in.lj").write_text(text)
    with pytest.raises(BadInput, match=why):
        lammps_restart.begin(tmp_path, "in.lj", EVERY)
    assert (tmp_path / "in.lj").read_text() == text


@unit
def test_a_script_outside_the_case_is_not_changed(tmp_path):
    theirs, case = tmp_path / "in.lj", tmp_path / "case"
    theirs.write_text(SCRIPT)
    case.mkdir()
    for script in ("../in.lj", str(theirs)):
        with pytest.raises(BadInput, match="own directory"):
            lammps_restart.begin(case, script, EVERY)
    (case / "in.lj").symlink_to(theirs)
    lammps_restart.begin(case, "in.lj", EVERY)
    assert theirs.read_text() == SCRIPT
    assert (case / "in.lj.orig").read_text() == SCRIPT


@unit
def test_what_the_restart_file_holds_is_not_made_again(tmp_path):
    again = lammps_restart.stoppable(SCRIPT.splitlines(), EVERY, "dovetail.restart.1")
    commands = [line.split()[0] for line in again.splitlines()]
    assert commands.count("read_restart") == 1
    assert commands.index("units") < commands.index("read_restart") < commands.index("pair_style")
    assert not {"create_box", "create_atoms", "velocity"} & set(commands)


@unit
def test_a_restart_file_that_is_cut_off_has_no_step(tmp_path):
    assert lammps_restart.written_step(tmp_path / "none") is None
    for content in (b"", b"LammpS RestartT\0", b"LammpS RestartT\0" + bytes(9)):
        (tmp_path / "short").write_bytes(content)
        assert lammps_restart.written_step(tmp_path / "short") is None


# --- Real runs ---


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMPI_MCA_rmaps_base_oversubscribe", "1")
    monkeypatch.setenv("OMPI_MCA_mpi_yield_when_idle", "1")


def prepared(case: Path) -> Path:
    case.mkdir()
    (case / "in.lj").write_text(SCRIPT)
    lammps_restart.begin(case, "in.lj", EVERY)
    return case


def start(case: Path, ranks: int) -> subprocess.Popen[bytes]:
    with (case / "log").open("ab") as log:
        words = ["mpirun", "-np", str(ranks), "lmp", "-in", "in.lj"]
        return subprocess.Popen(words, cwd=case, stdout=log, stderr=log)


def finish(case: Path, ranks: int) -> None:
    assert start(case, ranks).wait(300) == 0, (case / "log").read_text()[-2000:]


def stopped(case: Path, ranks: int, after: int) -> None:
    """Run it, and have it stopped once a restart file of that step is there."""
    running = start(case, ranks)
    while max(steps(case), default=0) < after:
        assert running.poll() is None, (case / "log").read_text()[-2000:]
        time.sleep(0.005)
    lammps_restart.stop(case)
    assert running.wait(300) == 0, (case / "log").read_text()[-2000:]


def steps(case: Path) -> list[int]:
    found = map(lammps_restart.written_step, case.glob("dovetail.restart.*"))
    return [step for step in found if step is not None]


def atoms(case: Path) -> list[list[float]]:
    """Position and velocity of each atom at the end."""
    lines = (case / "final.dump").read_text().splitlines()[9:]
    return [[float(word) for word in line.split()] for line in lines]


class TestStopped:
    pytestmark = mpi

    @pytest.mark.parametrize(("ranks", "after"), [(1, 1), (2, 2), (2, 1)])
    def test_it_ends_with_the_atoms_of_an_undisturbed_run(self, tmp_path, ranks, after):
        undisturbed, case = prepared(tmp_path / "undisturbed"), prepared(tmp_path / "case")
        finish(undisturbed, ranks)
        stopped(case, ranks, 40)
        assert not (case / "final.dump").exists()
        step = lammps_restart.go_on(case, "in.lj", EVERY)
        assert step is not None
        assert 40 <= step < STEPS
        finish(case, after)
        assert len(atoms(case)) == 4 * 6**3
        # LAMMPS sorts its atoms as it starts, so that sums have another order: 1e-12 by now.
        np.testing.assert_allclose(atoms(case), atoms(undisturbed), atol=1e-7)
        lines = [(each / "steps.dump").read_text().splitlines() for each in (case, undisturbed)]
        assert [line for line in lines[0] if " " not in line] == [
            line for line in lines[1] if " " not in line
        ]

    def test_a_restart_file_that_is_cut_off_is_passed_over(self, tmp_path):
        case = prepared(tmp_path / "case")
        stopped(case, 1, 60)
        before, last = sorted(
            case.glob("dovetail.restart.*"), key=lambda p: lammps_restart.written_step(p) or 0
        )
        earlier = lammps_restart.written_step(before)
        os.truncate(last, last.stat().st_size - 1)
        assert lammps_restart.go_on(case, "in.lj", EVERY) == earlier
        os.truncate(before, 100)
        assert lammps_restart.go_on(case, "in.lj", EVERY) is None
