# SPDX-License-Identifier: LGPL-3.0-or-later
"""A run with real OpenFOAM is killed and resumed: its simulations go on where they had written."""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from dovetail.bench.cases import OPENFOAM_ETC, environment, mpirun, pitz_daily
from support import wrong_clock
from support.local_runs import wait_for
from support.openfoam_fields import last_field, off
from support.run_command import AT_ONCE, COMMAND, TOP, TUNED, site  # noqa: F401

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(not shutil.which("simpleFoam"), reason="OpenFOAM is not installed"),
]
END = 60
SHORT = 80
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
    return fields(site.out / "pitz" / "case", END)


def fields(case, end):
    found = {}
    for rank in (0, 1):
        place = case / f"processor{rank}" / str(end)
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
    for number, step in enumerate((20, 40)):
        run = site.start(plan, "-o", "out", *(["--resume"] if number else []))
        wait_for(lambda at=step: written(site, at))
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
    for place in (site.out / "pitz/case/processor1").glob("[1-9]*"):
        (place / "p").write_bytes(b"")
    assert site.run(plan, "-o", "out", "--resume")[0] == 0
    (one,) = site.summary()["simulations"]
    assert (one["state"], one["restarts"], one["continued"]) == ("done", 1, 0)
    assert "begins anew" in (site.out / "pitz/log").read_text()


# --- Stopped at a checkpoint because the run is ended ---


def came_to(site, iteration):  # noqa: F811
    try:
        return f"\nTime = {iteration}\n" in (site.out / "pitz/log").read_text()
    except OSError:
        return False


def shorter(case, made, interval):
    """The same of few steps, written at so many."""
    shutil.copytree(case, made)
    control = made / "system/controlDict"
    text = re.sub(r"(?m)^writeInterval\s+\S+;", f"writeInterval {interval};", control.read_text())
    control.write_text(re.sub(r"(?m)^endTime\s+\S+;", f"endTime {SHORT};", text))
    return made


def test_a_run_that_is_ended_stops_at_checkpoints(site, case, undisturbed):  # noqa: F811
    silent = shorter(case, site.directory / "silent", SHORT)  # it writes nothing by itself
    plan = plan_of(site, silent, checkpoint="allowed")
    numbers = signal.SIGTERM, signal.SIGINT
    before = 0
    for part, number in enumerate(numbers):
        resume = ["--resume"] if part else []
        run = site.start(plan, "-o", "out", "--checkpoint", *resume)
        wait_for(lambda at=before: came_to(site, at + 1))
        code, output, errors = site.end(run, number)
        assert code == 130
        assert "1 simulation is stopped at a checkpoint, --resume goes on there" in errors
        assert "checkpo" in output  # a narrow column
        assert site.states() == {"pitz": "checkpointed"}
        (one,) = site.summary()["simulations"]
        assert before < one["iterations"] < SHORT, "it has stopped in between"
        before = one["iterations"]
        assert f"after {one['iterations']} iterations" in one["reason"]
        assert written(site, one["iterations"])
        assert site.of_type("Ended")[-1]["cause"] == "checkpointed"
        site.assert_clean()
    assert site.run(plan, "-o", "out", "--resume")[0] == 0
    assert site.states() == {"pitz": "done"}
    (one,) = site.summary()["simulations"]
    assert (one["iterations"], one["restarts"], one["continued"]) == (SHORT, 0, 2)
    assert one["checkpoints"] == 2
    # Nothing was computed twice: each part began where the one before had ended.
    log = (site.out / "pitz/log").read_text()
    steps = [int(step) for step in re.findall(r"(?m)^Time = (\d+)$", log)]
    assert steps == list(range(1, SHORT + 1))
    assert fields(site.out / "pitz/case", SHORT) == undisturbed


@pytest.mark.alone
def test_the_last_to_end_goes_on_on_more_ranks(site, case):  # noqa: F811
    made = {}
    for name, end in (("long", 400), ("short", 40)):
        made[name] = site.directory / name
        shutil.copytree(case, made[name])
        control = made[name] / "system/controlDict"
        text = re.sub(r"(?m)^endTime\s+\S+;", f"endTime {end};", control.read_text())
        control.write_text(re.sub(r"(?m)^writeInterval\s+\S+;", f"writeInterval {end};", text))
    entries = [
        {
            "name": name, "case": str(folder), "ranks": "1-2", "command": "simpleFoam",
            "environment": {"WM_PROJECT_DIR": OPENFOAM_ETC}, "checkpoint": "allowed",
            "rebalance": "never",
        }
        for name, folder in made.items()
    ]  # fmt: skip
    command = (sys.executable, "-c", AT_ONCE)
    assert site.run(site.plan(*entries), site.out, command=command)[0] == 0
    assert site.states() == {"long": "done", "short": "done"}
    long, short = site.summary()["simulations"]
    # Where the machine has no time for both, it is measured to be slower, and taken back.
    assert (long["iterations"], long["ranks"], long["continued"]) in ((400, 2, 1), (400, 1, 2))
    assert (short["iterations"], short["continued"]) == (40, 0)
    assert (long["restarts"], long["checkpoints"]) == (0, long["continued"])
    assert site.of_type("Requeued")[0]["cause"] == "checkpointed"
    log = (site.out / "long/log").read_text()
    steps = [int(step) for step in re.findall(r"(?m)^Time = (\d+)$", log)]
    assert steps == list(range(1, 401)), "nothing is computed twice"
    assert {int(n) for n in re.findall(r"(?m)^nProcs : (\d+)$", log)} == {1, 2}
    site.assert_clean()


@pytest.mark.alone
@pytest.mark.skipif(not shutil.which("lmp"), reason="LAMMPS is not installed")
def test_the_last_of_lammps_goes_on_on_more_ranks_whatever_a_clock_says(site, monkeypatch):  # noqa: F811
    variables, put_clock = wrong_clock.made(site.directory)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    script = (TOP / "examples/in.lj").read_text()
    (site.case / "in.lj").write_text(script.replace("thermo 50", "thermo 10"))
    lengths = {"long": 3000, "short": 100}
    entries = [
        {
            "name": name, "case": str(site.case), "ranks": "1-2", "checkpoint": "allowed",
            "rebalance": "never",
            "command": f"lmp -in in.lj -var x 40 -var steps {count}",
        }
        for name, count in lengths.items()
    ]  # fmt: skip
    command = (sys.executable, "-c", AT_ONCE)
    run = site.start(site.plan(*entries), site.out, command=command)
    for what, seconds in (("Started", 3600), ("Sampled", -3600), ("Checkpoint", 3600)):
        site.until(lambda log, what=what: any(one.get("type") == what for one in log))
        put_clock(seconds)
    assert site.end(run)[0] == 0
    assert site.states() == {"long": "done", "short": "done"}
    long, short = site.summary()["simulations"]
    # Where the machine has no time for both, it is measured to be slower, and taken back.
    assert (long["iterations"], long["ranks"], long["continued"]) in ((3000, 2, 1), (3000, 1, 2))
    assert (short["iterations"], short["continued"]) == (100, 0)
    assert (long["restarts"], long["checkpoints"]) == (0, long["continued"])
    told = lammps_steps((site.out / "long/log").read_text())
    assert told == sorted(told)
    assert set(told) == set(range(0, 3001, 10))
    assert len(told) <= len(set(told)) + long["continued"], "the step at the stop is told twice"
    site.assert_clean()


def lammps_steps(log):
    """The steps of which LAMMPS tells, by `thermo`."""
    return [int(step) for step in re.findall(r"(?m)^ +(\d+) +[\d.]+ +-[\d.]+", log)]


@pytest.mark.alone
def test_uneven_ranks_are_cut_anew(site, tmp_path):  # noqa: F811
    uneven = pitz_daily(tmp_path / "uneven", (1, 4), 300, refine=1)
    entry = {
        "name": "uneven", "case": str(uneven), "ranks": 2, "weights": [1, 4], "count": 2,
        "command": "simpleFoam -parallel", "environment": {"WM_PROJECT_DIR": OPENFOAM_ETC},
        "checkpoint": "allowed",
    }  # fmt: skip
    command = (sys.executable, "-c", AT_ONCE)
    assert site.run(site.plan(entry), site.out, command=command)[0] == 0
    first, second = site.summary()["simulations"]
    assert (first["state"], first["iterations"], first["continued"]) == ("done", 300, 1)
    assert (second["state"], second["iterations"], second["continued"]) == ("done", 300, 0)
    (asked,) = site.of_type("Checkpoint")
    assert (asked["name"], asked["why"]) == ("uneven-1", "to be cut anew")
    for name in ("uneven-1", "uneven-2"):
        log = (site.out / name / "log").read_text()
        steps = [int(step) for step in re.findall(r"(?m)^Time = ([1-9]\d*)$", log)]
        assert steps == list(range(1, 301)), "nothing is computed twice"
        owners = [
            site.out / name / f"case/processor{rank}/constant/polyMesh/owner" for rank in (0, 1)
        ]
        cells = [
            int(re.search(r"nCells: *(\d+)", path.read_text(errors="replace"))[1])
            for path in owners
        ]
        assert max(cells) < 1.1 * min(cells)
    site.assert_clean()


def steps(site, name):  # noqa: F811
    """The steps that it took, also those that were lost and taken again."""
    try:
        log = (site.out / name / "log").read_text()
    except OSError:
        return []
    return [int(step) for step in re.findall(r"(?m)^Time = ([1-9]\d*)$", log)]


@pytest.mark.slow
def test_what_is_cut_anew_and_killed_at_twenty_moments_has_the_same_results(site):  # noqa: F811
    random.seed(10)
    end, names = 1200, ("uneven", "free")
    source, alone = site.directory / "source", site.directory / "alone"
    control = pitz_daily(source, (1, 6), end, refine=1) / "system/controlDict"
    control.write_text(re.sub(r"(?m)^(writeInterval)\s+\S+;", r"\1 25;", control.read_text()))
    shutil.copytree(source, alone)
    subprocess.run(["simpleFoam"], cwd=alone, env=environment(), check=True, capture_output=True)

    usual = {"case": str(source), "environment": {"WM_PROJECT_DIR": OPENFOAM_ETC}}
    usual["checkpoint"] = "allowed"
    uneven = {"ranks": 2, "weights": [1, 6], "command": "simpleFoam -parallel"}
    free = {"ranks": "1-2", "command": "simpleFoam"}
    plan = site.plan(*({**usual, **one, "name": n} for n, one in zip(names, (uneven, free))))

    def taken():
        return sum(len(steps(site, name)) for name in names)

    def start(kill):
        if kill:
            return site.start(plan, "-o", site.out, "--resume")
        return site.start(plan, site.out, command=(sys.executable, "-c", AT_ONCE))

    site.kill_at_random(start, 20, taken, 250)
    assert site.end(start(20))[0] == 0
    assert site.states() == dict.fromkeys(names, "done")
    assert "to be cut anew" in {one["why"] for one in site.of_type("Checkpoint")}
    for name, one in zip(names, site.summary()["simulations"]):
        assert (one["name"], one["iterations"]) == (name, end)
        assert sorted(set(steps(site, name))) == list(range(1, end + 1))
        case = site.out / name / "case"
        if (case / f"processor0/{end}").is_dir():
            words = ["reconstructPar", "-latestTime"]
            subprocess.run(words, cwd=case, env=environment(), check=True, capture_output=True)
        for field, tolerance in (("p", 1e-2), ("U", 1e-3)):  # those of the tutorial's residuals
            assert off(last_field(case, field), last_field(alone, field)) < tolerance
    site.assert_clean()


@pytest.mark.alone
@pytest.mark.skipif(not shutil.which("lmp"), reason="LAMMPS is not installed")
def test_uneven_ranks_of_lammps_are_balanced(site):  # noqa: F811
    script = (TOP / "examples/in.lj").read_text()
    uneven = "mass 1 1.0\nbalance 1.0 x 0.75\n"  # the box is longest along x, where it is cut
    (site.case / "in.lj").write_text(script.replace("mass 1 1.0\n", uneven))
    command = "lmp -in in.lj -var x 40 -var steps 1200"
    entry = {
        "name": "melt", "case": str(site.case), "ranks": 2, "count": 2, "command": command,
        "checkpoint": "allowed",
    }  # fmt: skip
    tuned = (sys.executable, "-c", AT_ONCE)
    assert site.run(site.plan(entry), site.out, command=tuned)[0] == 0
    first, second = site.summary()["simulations"]
    assert (first["state"], first["iterations"], first["continued"]) == ("done", 1200, 1)
    assert (second["state"], second["iterations"], second["continued"]) == ("done", 1200, 0)
    (asked,) = site.of_type("Checkpoint")
    assert (asked["name"], asked["why"]) == ("melt-1", "to be cut anew")
    energies = []
    for name in ("melt-1", "melt-2"):
        log = (site.out / name / "log").read_text()
        last = re.findall(r"(?m)^ +1200 +([\d.]+) +([-\d.]+) ", log)
        energies += [float(value) for value in last[-1]]
        mean, most = re.findall(r"(?m)^Nlocal: +([\d.]+) ave +(\d+) max ", log)[-1]
        assert float(most) < 1.1 * float(mean)
    assert energies[:2] == pytest.approx(energies[2:], rel=0.02), "temperature and energy"
    site.assert_clean()


@pytest.fixture(scope="module")
def undisturbed(case, tmp_path_factory):
    """The final fields of both ranks of a short run if nobody interferes."""
    alone = shorter(case, tmp_path_factory.mktemp("undisturbed") / "pitz", SHORT)
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    yielding = {"OMPI_MCA_mpi_yield_when_idle": "1"}
    done = subprocess.run(mpirun(2), cwd=alone, env={**environment(), **root, **yielding},
                          capture_output=True)  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    return fields(alone, SHORT)


@pytest.mark.parametrize("moment", ["asked", "writing", "written"])
def test_a_run_killed_at_a_checkpoint_ends_done_once(site, case, undisturbed, moment):  # noqa: F811
    often = shorter(case, site.directory / "often", 2)
    plan = plan_of(site, often, checkpoint="allowed")
    run = site.start(plan, "-o", "out", "--checkpoint")
    wait_for(lambda: came_to(site, 5))
    run.send_signal(signal.SIGTERM)
    site.until(lambda log: any(one.get("type") == "Checkpoint" for one in log))
    if moment == "writing":
        control = site.out / "pitz/case/system/controlDict"
        wait_for(lambda: "writeNow" in control.read_text())
    elif moment == "written":
        site.until(lambda log: any(one.get("type") == "Finished" for one in log))
    if run.poll() is None:
        site.end(run, signal.SIGKILL)
    site.assert_clean()
    if moment == "written":  # and the disk lost the end of it
        places = (site.out / "pitz/case/processor1").glob("[1-9]*")
        *_, before, last = sorted(places, key=lambda place: int(place.name))
        (last / "p").write_bytes((last / "p").read_bytes()[:-10])
    assert site.run(plan, "-o", "out", "--resume")[0] == 0
    assert site.states() == {"pitz": "done"}
    went_on = site.of_type("Started")[-1]["iterations"]
    assert went_on >= 4
    assert moment != "written" or went_on == int(before.name)
    assert fields(site.out / "pitz/case", SHORT) == undisturbed
    site.assert_clean()


# A file system of its own, full but for so much when the run is ended; then it has room again.
FULL = """
mount -t tmpfs -o size=60m dovetail-test out && {run} --checkpoint & run=$!
until grep -q '^Time = 5$' out/pitz/log; do sleep 0.05; done
cat /dev/zero > out/fill; truncate -s -{left} out/fill
kill -TERM $run; wait $run; [ $? -eq 130 ] || exit 3
rm out/fill
{run} --resume && cp -r out/pitz kept
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount a small file system")
@pytest.mark.parametrize("left", ["1", "100K"])
def test_a_checkpoint_on_a_full_disk_is_passed_over(site, case, undisturbed, left):  # noqa: F811
    site.out.mkdir()
    plan = plan_of(site, shorter(case, site.directory / "often", 2), checkpoint="allowed")
    run = shlex.join([*COMMAND, str(plan), "-o", "out"])
    script = FULL.replace("{run}", run).replace("{left}", left)
    code, _, errors = site.run(script, command=("unshare", "--mount", "sh", "-c"))
    assert code == 0, errors
    assert "pitz failed: " in errors
    assert "as it was to stop at a checkpoint" in " ".join(errors.split())
    assert fields(site.directory / "kept/case", SHORT) == undisturbed
    site.assert_clean()


def test_a_program_that_does_not_stop_at_a_checkpoint_is_ended_in_time(site):  # noqa: F811
    entry = site.shell("while :; do sleep 1; done", application="openfoam", checkpoint="allowed")
    plan = site.plan({**entry, "name": "endless"})
    tuned = TUNED.replace("{settings!r}", repr({"halt": 2.0}))
    run = site.start(plan, site.out, "--checkpoint", command=(sys.executable, "-c", tuned))
    site.until(lambda log: any(one.get("type") == "Started" for one in log))
    assert site.end(run, signal.SIGTERM)[0] == 130
    assert site.states() == {"endless": "failed"}
    (one,) = site.summary()["simulations"]
    assert "did not stop at a checkpoint in time" in one["reason"]
    assert "not made ready" in (site.out / "endless/log").read_text()
    site.assert_clean()


def test_checkpoints_that_no_plan_allows_are_refused(site):  # noqa: F811
    code, _, errors = site.run(site.plan({}), "-o", "out", "--checkpoint")
    assert (code, "no simulation of" in errors, errors.count("\n")) == (2, True, 1)
    assert not site.out.exists()


@pytest.mark.skipif(not shutil.which("lmp"), reason="LAMMPS is not installed")
def test_lammps_stops_and_goes_on(site):  # noqa: F811
    script = (TOP / "examples/in.lj").read_text()
    (site.case / "in.lj").write_text(re.sub(r"(?m)^run\s.*", "thermo 10\nrun 2000", script))
    plan = site.plan(
        {
            "name": "melt",
            "case": str(site.case),
            "ranks": 2,
            "command": "lmp -in in.lj",
            "checkpoint": "allowed",
        }
    )
    run = site.start(plan, "-o", "out", "--checkpoint")
    log = site.out / "melt/log"
    wait_for(lambda: log.exists() and re.search(r"(?m)^ +300 ", log.read_text()))
    assert site.end(run, signal.SIGTERM)[0] == 130
    assert site.states() == {"melt": "checkpointed"}
    before = site.summary()["simulations"][0]["iterations"]
    assert 300 <= before < 2000, "time steps"
    site.assert_clean()
    assert site.run(plan, "-o", "out", "--resume")[0] == 0
    (one,) = site.summary()["simulations"]
    assert (one["state"], one["continued"]) == ("done", 1)
    assert (one["iterations"], one["measure"]) == (2000, "iterations")
    assert [record["iterations"] for record in site.of_type("Started")] == [0, before]
    assert before in {min(record["ranks"]["iterations"]) for record in site.of_type("Sampled")}
    steps = lammps_steps(log.read_text())
    assert steps == sorted(steps)
    assert set(steps) == set(range(0, 2001, 10))
    assert len(steps) == len(set(steps)) + 1, "nothing but the step at the stop is told twice"
    assert "dovetail" not in (site.case / "in.lj").read_text()
    site.assert_clean()
