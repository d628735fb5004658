# SPDX-License-Identifier: LGPL-3.0-or-later
"""LAMMPS is stopped at a restart file and goes on: same atoms on the same ranks."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from dovetail.applications import (
    expected_iterations,
    form,
    lammps_checkpoint,
    prepared_iterations,
)
from dovetail.core.causes import NOTHING_LEFT
from dovetail.core.errors import BadInput
from dovetail.core.protocol import Spec
from support.pipes import pipe

unit = pytest.mark.unit
mpi = [
    pytest.mark.mpi,
    pytest.mark.skipif(not shutil.which("lmp"), reason="LAMMPS is not installed"),
]

STEPS = 400
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
neigh_modify delay 0 every 1 check yes
fix 1 all nvt temp 1.0 2.0 0.5
dump steps all atom 100 steps.dump
dump_modify steps sort id
run {STEPS}
write_dump all custom final.dump id xu yu zu vx vy vz modify sort id format float %.15g
"""

REFUSED = {
    "a second run": (SCRIPT + "run 10\n", "one `run`"),
    "a run of some steps more": (SCRIPT.replace("run 400", "run 400 pre no"), "one `run`"),
    "no run": (SCRIPT.replace("run 400", ""), "without `run`"),
    "a loop": ("label again\n" + SCRIPT, "`label`"),
    "another script": ("include other\n" + SCRIPT, "`include`"),
    "a file of a fix": (SCRIPT.replace("fix 1", "fix 2 all print 5 $n file a\nfix 1"), "anew"),
    "a file of a fix without that word": (
        SCRIPT.replace("fix 1", "fix 2 all reaxff/bonds 100 bonds.out\nfix 1"),
        "anew",
    ),
    "a dump that is packed": (SCRIPT.replace("steps.dump", "steps.gz"), "one file per snapshot"),
    "a dump of a style of its own": (
        SCRIPT.replace("atom 100 steps.dump", "dcd 100 steps.dcd"),
        "one file per snapshot",
    ),
    "a value of the beginning": (
        SCRIPT.replace(
            "fix 1",
            "variable t equal lx\nvariable twice equal 2*v_t\nvariable L0 equal ${twice}\nfix 1",
        ),
        "variable L0 equal .* a later step",
    ),
    "a formula of the beginning": (
        SCRIPT.replace("fix 1", "variable e0 equal $(pe/atoms)\nfix 1"),
        "a later step",
    ),
    "atoms that are still to come": (
        SCRIPT.replace("fix 1", "fix 2 all pour 1000 1 4767548 region slab\nfix 1"),
        "no restart file has",
    ),
    "a sum from the beginning": (
        SCRIPT.replace("fix 1", "fix 2 all ave/time 1 10 10 c_thermo_temp ave running\nfix 1"),
        "no restart file has",
    ),
    "a wall that swings": (
        SCRIPT.replace("fix 1", "fix 2 all wall/gran hooke 1 zplane 0 9 wiggle z 1 2\nfix 1"),
        "no restart file has",
    ),
    "an end of its own": (
        SCRIPT.replace("fix 1", "fix 2 all halt 10 v_far > 1 error continue\nfix 1"),
        "before its last step",
    ),
    "an end by the clock": (
        SCRIPT.replace("fix 1", "timer timeout 1:00:00 every 10\nfix 1"),
        "before its last step",
    ),
    "time since it went on": (
        SCRIPT.replace("fix 1", 'variable push equal "sin(0.1 * time)"\nfix 1'),
        "`step\\*dt` would be right",
    ),
    "steps since it went on": (
        SCRIPT.replace("fix 1", "variable push atom x*elapsed/10\nfix 1"),
        "`elaplong` would be right",
    ),
    "no box": ("run 3\n", "before `create_box`"),
}


@unit
@pytest.mark.parametrize("what", REFUSED)
def test_a_script_that_is_not_plain_is_refused_with_the_reason(tmp_path, what):
    text, why = REFUSED[what]
    (tmp_path / "in.lj.orig").write_text(SCRIPT)  # which is the user's
    (tmp_path / "in.lj").write_text(text)
    with pytest.raises(BadInput, match=why):
        lammps_checkpoint.begin(tmp_path, "in.lj")
    assert (tmp_path / "in.lj").read_text() == text


@unit
def test_a_script_that_comes_by_a_pipe_is_refused_and_not_waited_for(tmp_path):
    pipe(tmp_path / "in.lj", SCRIPT)
    with pytest.raises(BadInput, match="in.lj: is a pipe, which can be read once"):
        lammps_checkpoint.check(tmp_path, "in.lj")


@unit
@pytest.mark.parametrize(
    "dump", ["atom 100 steps.*.gz", "atom/gz 100 steps.gz", "cfg 100 *.cfg mass type xs ys zs"]
)
def test_a_dump_that_can_be_gone_on_with_is_not_refused(dump):
    lines = SCRIPT.replace("atom 100 steps.dump", dump).splitlines()
    again = lammps_checkpoint.stoppable(lines, "two", "one")
    assert f"dump steps all {dump}\ndump_modify steps append yes\n" in again


@unit
@pytest.mark.parametrize(
    ("log", "later"),
    [("log a.log", "log a.log append"), ("log none", "log none"), ("log a append", "log a append")],
)
def test_a_log_of_the_scripts_own_is_gone_on_with(log, later):
    lines = SCRIPT.replace("units lj", f"units lj\n{log}").splitlines()
    assert f"\n{log}\n" in lammps_checkpoint.stoppable(lines, "one")
    assert f"\n{later}\n" in lammps_checkpoint.stoppable(lines, "two", "one")


@unit
@pytest.mark.parametrize(
    "lines",
    [
        "variable strain equal lx/v_L0\nvariable time_step equal 0.005\ntimestep ${time_step}",
        "variable T index 1.5\nfix 2 all nvt temp $T $T $(100*dt)",
        "variable tmp equal lx\nprint 'a box of ${tmp}'",
        "variable tmp equal temp\nvelocity all scale ${tmp}",
        "variable k equal 1000/xlat\nfix 2 all spring/self ${k}",
        "variable push equal step*dt+elaplong\nfix 2 all ave/time 1 10 10 v_push",
        "variable what string time\nvariable wall_time equal 2\nvariable t equal v_wall_time",
        "fix 2 all halt 10 v_hot > 9 error hard\ntimer timeout off",
    ],
)
def test_a_value_that_stays_or_is_not_kept_is_not_refused(lines):
    assert lammps_checkpoint.stoppable(SCRIPT.replace("fix 1", f"{lines}\nfix 1").splitlines(), "a")


@unit
def test_a_group_that_is_dynamic_stays_so():
    groups = ["group half region box", "group now dynamic half region box every 10"]
    lines = SCRIPT.replace("fix 1", "\n".join([*groups, "fix 1"])).splitlines()
    again = lammps_checkpoint.stoppable(lines, "two", "one")
    assert groups[1] in again
    assert groups[0] not in again, "its atoms would be others"


@unit
def test_how_long_it_takes_is_told_by_the_users_script(tmp_path):
    asked = Spec("a", "a", str(tmp_path), 1, (1.0,), ("lmp", "-in", "in.lj"), ("true",),
                 application="lammps", checkpoint=True)  # fmt: skip
    (tmp_path / "in.lj").write_text(SCRIPT)
    lammps_checkpoint.begin(tmp_path, "in.lj")
    assert prepared_iterations(asked, str(tmp_path)) == STEPS


@unit
def test_a_new_script_in_what_an_earlier_run_left_is_the_one_that_runs(tmp_path):
    asked = Spec("a", "a", str(tmp_path), 1, (1.0,), ("lmp", "-in", "in.lj"),
                 application="lammps", checkpoint=True)  # fmt: skip
    (tmp_path / "in.lj").write_text(SCRIPT)
    lammps_checkpoint.begin(tmp_path, "in.lj")
    new = SCRIPT.replace("run 400", "run 900")
    (tmp_path / "in.lj").write_text(new)
    assert expected_iterations(asked) == 900
    with pytest.raises(BadInput, match="not made ready"):
        lammps_checkpoint.stop(tmp_path, "in.lj")
    assert not lammps_checkpoint.unfinished(tmp_path, "in.lj")
    for _ in range(2):
        lammps_checkpoint.begin(tmp_path, "in.lj")
        assert "run 900 upto" in (tmp_path / "in.lj").read_text()
        assert (tmp_path / ".dovetail-in.lj").read_text() == new


@unit
def test_a_script_outside_the_case_is_not_changed(tmp_path):
    theirs, case = tmp_path / "in.lj", tmp_path / "case"
    theirs.write_text(SCRIPT)
    case.mkdir()
    for script in ("../in.lj", str(theirs)):
        with pytest.raises(BadInput, match="own directory"):
            lammps_checkpoint.begin(case, script)
    theirs.write_text(SCRIPT.replace("run 400", "restart 50 ../kept.1 ../kept.2\nrun 400"))
    (tmp_path / "kept.1").touch()
    (case / "in.lj").symlink_to(theirs)
    lammps_checkpoint.begin(case, "in.lj")
    assert (tmp_path / "kept.1").exists()
    (case / "kept").symlink_to(tmp_path)
    theirs.write_text(theirs.read_text().replace("../", "kept/"))
    (case / "in.lj").unlink()
    (case / "in.lj").symlink_to(theirs)
    lammps_checkpoint.begin(case, "in.lj")
    assert (tmp_path / "kept.1").exists()
    assert "dovetail" not in theirs.read_text()
    assert (case / ".dovetail-in.lj").read_text() == theirs.read_text()


@unit
def test_what_the_restart_file_holds_is_not_made_again(tmp_path):
    script = SCRIPT.replace("fix 1", "reset_atom_ids sort yes\nfix 1")
    assert "reset_atom_ids" in lammps_checkpoint.stoppable(script.splitlines(), "one")
    again = lammps_checkpoint.stoppable(script.splitlines(), "two", "one")
    commands = [line.split()[0] for line in again.splitlines()]
    assert commands.count("read_restart") == 1
    assert commands.index("units") < commands.index("read_restart") < commands.index("pair_style")
    assert not {"create_box", "create_atoms", "velocity", "reset_atom_ids"} & set(commands)


@unit
@pytest.mark.parametrize(("start", "order"), [("", "a b"), ("a", "b a"), ("b", "a b")])
def test_the_file_from_which_it_goes_on_is_not_the_first_to_be_written_over(start, order):
    lines = SCRIPT.replace("run 400", "restart 50 a b # in turns\nrun 400").splitlines()
    assert f"\nrestart 50 {order}" in lammps_checkpoint.stoppable(lines, "two", start)


@unit
@pytest.mark.parametrize(
    ("more", "axes"), [("", "xyz"), ("dimension 3\n", "xyz"), ("dimension 2\n", "xy")]
)
def test_what_is_balanced_is_so_once_all_is_set_before_the_run(more, axes):
    lines = (more + SCRIPT).splitlines()
    for start in ("", "one"):
        plain = lammps_checkpoint.stoppable(lines, "two", start).splitlines()
        balanced = lammps_checkpoint.stoppable(lines, "two", start, True).splitlines()
        (at,) = [n for n, line in enumerate(balanced) if line.startswith("balance ")]
        assert balanced.pop(at) == f"balance 1.1 shift {axes} 10 1.05"
        assert balanced == plain
        assert balanced[at - 1].startswith("dump_modify")


@unit
@pytest.mark.parametrize("recut", [False, True])
def test_what_is_cut_anew_is_balanced(recut, tmp_path):
    (tmp_path / "in.lj").write_text(SCRIPT)
    words = ("lmp", "-in", "in.lj")
    asked = Spec("a", "a", str(tmp_path), 2, (1.0, 1.0), words, application="lammps",
                 checkpoint=True, recut=recut)  # fmt: skip
    spec = form(asked, continued=True)
    steps = [*spec.prepare, spec.go_on]
    assert [step.endswith(" balanced") for step in steps] == [recut] * 2
    assert not spec.halt.endswith("balanced")


@unit
def test_where_it_cannot_be_told_there_may_be_more_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["", "halted", "in.lj"])
    for lost, code in (("dovetail.unfinished", NOTHING_LEFT), ("in.lj", 0)):
        (tmp_path / "in.lj").write_text(SCRIPT)
        lammps_checkpoint.begin(tmp_path, "in.lj")
        (tmp_path / lost).unlink()
        with pytest.raises(SystemExit) as ended:
            lammps_checkpoint.main()
        assert ended.value.code == code


@unit
@pytest.mark.parametrize("log", ["log.lammps", "out.log"])
def test_no_log_of_lammps_is_lost(tmp_path, monkeypatch, log):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lammps_checkpoint, "go_on", lambda *_: 50)
    option = ("-log", log) if log != "log.lammps" else ()
    words = ("mpiexec", "-l", "lmp", "-in", "in.lj", *option)
    asked = Spec("a", "a", str(tmp_path), 1, (1.0,), words, application="lammps", checkpoint=True)
    step = shlex.split(form(asked, continued=True).go_on)
    monkeypatch.setattr("sys.argv", step[step.index("go-on") - 1 :])
    for launch in ("first", "second", "third"):  # killed each time before another restart file
        (tmp_path / log).write_text(launch)
        lammps_checkpoint.main()
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {f"{log}.50": "first", f"{log}.50.2": "second", f"{log}.50.3": "third"}


@unit
def test_a_restart_file_that_is_cut_off_has_no_step(tmp_path):
    assert lammps_checkpoint.written_step(tmp_path / "none") is None
    for content in (b"", b"LammpS RestartT\0", b"LammpS RestartT\0" + bytes(9)):
        (tmp_path / "short").write_bytes(content)
        assert lammps_checkpoint.written_step(tmp_path / "short") is None


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
    lammps_checkpoint.begin(case, "in.lj")
    return case


def start(case: Path, ranks: int) -> subprocess.Popen[bytes]:
    """Start it on so many ranks; 0: alone, without mpirun, which ranks outlive for a moment."""
    with (case / "log").open("ab") as log:
        words = ["mpirun", "-np", str(ranks)] if ranks else []
        return subprocess.Popen([*words, "lmp", "-in", "in.lj"], cwd=case, stdout=log, stderr=log)


def finish(case: Path, ranks: int) -> None:
    assert start(case, ranks).wait(300) == 0, (case / "log").read_text()[-2000:]


def stopped(case: Path, ranks: int, after: int) -> None:
    """Run it, and have it stopped once it has come to that step, by its dump of each 100 steps."""
    running, dump = start(case, ranks), case / "steps.dump"
    while not dump.exists() or f"TIMESTEP\n{after}\n" not in dump.read_text():
        assert running.poll() is None, (case / "log").read_text()[-2000:]
        time.sleep(0.005)
    lammps_checkpoint.stop(case, "in.lj")
    assert running.wait(300) == 0, (case / "log").read_text()[-2000:]
    assert lammps_checkpoint.unfinished(case, "in.lj")


def atoms(case: Path) -> list[list[float]]:
    """Position and velocity of each atom at the end."""
    lines = (case / "final.dump").read_text().splitlines()[9:]
    return [[float(word) for word in line.split()] for line in lines]


def most_atoms(case: Path) -> float:
    """Atoms of the rank that has most over the mean, at the end."""
    _, mean, most = re.findall(
        r"(?m)^Nlocal: +(([\d.]+) ave +(\d+) max .*)", (case / "log").read_text()
    )[-1]
    return float(most) / float(mean)


class TestStopped:
    pytestmark = mpi

    @pytest.mark.parametrize(("ranks", "after"), [(1, 1), (2, 2), (2, 1)])
    def test_it_ends_with_the_atoms_of_an_undisturbed_run(self, tmp_path, ranks, after):
        undisturbed, case = prepared(tmp_path / "undisturbed"), prepared(tmp_path / "case")
        finish(undisturbed, ranks)
        assert not lammps_checkpoint.unfinished(undisturbed, "in.lj")
        over = 0
        for at in (0, 100):  # twice, as restart files take turns
            stopped(case, ranks, at)
            assert not (case / "final.dump").exists()
            step = lammps_checkpoint.go_on(case, "in.lj")
            assert step is not None
            assert over < step < STEPS
            over = step
        finish(case, after)
        assert not lammps_checkpoint.unfinished(case, "in.lj")
        assert len(atoms(case)) == 4 * 6**3
        # LAMMPS sorts its atoms as it starts, so that sums have another order: 1e-12 by now.
        np.testing.assert_allclose(atoms(case), atoms(undisturbed), atol=1e-7)
        lines = [(each / "steps.dump").read_text().splitlines() for each in (case, undisturbed)]
        assert [line for line in lines[0] if " " not in line] == [
            line for line in lines[1] if " " not in line
        ]

    @pytest.mark.parametrize("sees", [0, 1])
    def test_ranks_stop_together_when_one_sees_that_they_are_to(self, tmp_path, sees):
        """Each looks for itself: here the other one, in a folder of its own, never sees it."""
        case, other = prepared(tmp_path / "case"), tmp_path / "other"
        lammps_checkpoint.stop(case, "in.lj")
        other.mkdir()
        shutil.copy(case / "in.lj", other)
        script = f'[ "$OMPI_COMM_WORLD_RANK" = {sees} ] || cd ../other; exec lmp -in in.lj'
        subprocess.run(
            ["mpirun.openmpi", "-np", "2", "sh", "-c", script], cwd=case, check=True, timeout=120,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        written = (other if sees else case) / "dovetail.restart.1"  # by rank 0
        assert lammps_checkpoint.written_step(written) == 10

    def test_a_full_disk_does_not_make_it_seem_done(self, tmp_path):
        """LAMMPS ends well though the last block of its restart file is not on the disk."""
        case = prepared(tmp_path / "case")
        stopped(case, 1, 0)
        size = (case / "dovetail.restart.1").stat().st_size
        lammps_checkpoint.go_on(case, "in.lj")
        (case / lammps_checkpoint._STOP).touch()
        limit = f"trap '' XFSZ; ulimit -f {(size - 1) // 512}; exec lmp -in in.lj >full"
        few = {**os.environ, "OMPI_MCA_ess_singleton_isolated": "1", "OMPI_MCA_btl": "self"}
        assert subprocess.run(["sh", "-c", limit], cwd=case, env=few, check=False).returncode == 0
        assert lammps_checkpoint.written_step(case / "dovetail.restart.2") is None
        assert lammps_checkpoint.unfinished(case, "in.lj")
        assert lammps_checkpoint.go_on(case, "in.lj"), "from the one before"
        finish(case, 1)
        assert not lammps_checkpoint.unfinished(case, "in.lj")

    def test_a_restart_file_that_is_cut_off_is_passed_over(self, tmp_path):
        case = prepared(tmp_path / "case")
        stopped(case, 1, 0)
        step = lammps_checkpoint.go_on(case, "in.lj")
        stopped(case, 1, 100)
        last = case / "dovetail.restart.2"
        os.truncate(last, last.stat().st_size - 1)
        assert lammps_checkpoint.unfinished(case, "in.lj"), "there are steps left all the same"
        assert lammps_checkpoint.go_on(case, "in.lj") == step
        os.truncate(case / "dovetail.restart.1", 100)
        assert lammps_checkpoint.go_on(case, "in.lj") is None

    @pytest.mark.parametrize(("balanced", "uneven"), [(False, 1.4), (True, 1.0)])
    def test_uneven_ranks_stay_so_or_are_balanced_as_it_goes_on(self, tmp_path, balanced, uneven):
        undisturbed, case = tmp_path / "undisturbed", tmp_path / "case"
        text = SCRIPT.replace("mass 1 1.0", "mass 1 1.0\nbalance 1.0 x 0.75")
        for each in (undisturbed, case):
            each.mkdir()
            (each / "in.lj").write_text("processors 2 1 1\n" + text)
            lammps_checkpoint.begin(each, "in.lj")
        finish(undisturbed, 2)
        stopped(case, 2, 0)
        assert lammps_checkpoint.go_on(case, "in.lj", balanced)
        finish(case, 2)
        assert most_atoms(undisturbed) > 1.4
        assert uneven <= most_atoms(case) < uneven + 0.2
        np.testing.assert_allclose(atoms(case), atoms(undisturbed), atol=1e-7)

    def test_killed_it_goes_on_from_what_its_own_script_wrote(self, tmp_path):
        case = tmp_path / "case"
        case.mkdir()
        (case / "kept").mkdir()
        text = SCRIPT.replace("run 400", "restart 50 kept/one kept/two\nrun ${steps}")
        (case / "in.lj").write_text(f"variable steps index {STEPS}\n{text}")
        two = case / "kept/two"
        two.write_bytes(b"of an earlier run")
        lammps_checkpoint.begin(case, "in.lj")
        assert not two.exists()
        running = start(case, 0)
        while lammps_checkpoint.written_step(two) is None:
            assert running.poll() is None, (case / "log").read_text()[-2000:]
            time.sleep(0.005)
        running.kill()
        running.wait()
        step = lammps_checkpoint.go_on(case, "in.lj")
        assert step is not None
        assert step >= 100
        assert step % 50 == 0
        finish(case, 2)
        assert len(atoms(case)) == 4 * 6**3
