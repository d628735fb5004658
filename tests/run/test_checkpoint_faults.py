# SPDX-License-Identifier: LGPL-3.0-or-later
"""Restarts of real OpenFOAM and LAMMPS that go wrong: done once all the same, or failed and why.

By default a few processes are killed at a few moments; all of them with `DOVETAIL_FAULTS=100`.
"""

from __future__ import annotations

import contextlib
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
from dovetail.applications.openfoam import written_times
from dovetail.bench.cases import OPENFOAM_ETC, environment, pitz_daily
from dovetail.host import processes
from support.local_runs import wait_for
from support.openfoam_fields import last_field, off
from support.run_command import AT_ONCE, COMMAND, TOP, site  # noqa: F401

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(not shutil.which("simpleFoam"), reason="OpenFOAM is not installed"),
]
needs_lammps = pytest.mark.skipif(not shutil.which("lmp"), reason="LAMMPS is not installed")
FAULTS = os.environ.get("DOVETAIL_FAULTS")
END = 80
THERMO = r"(?m)^ +(\d+) +[\d.]+ +-[\d.]+"  # lines of LAMMPS, each with a step
TUNED = (sys.executable, "-c", AT_ONCE)
BROKEN_SET = """FoamFile
{
    version 2.0;
    format ascii;
    class cellSet;
    object broken;
}
no list
"""


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A case of 12,225 cells in one piece that writes its fields at each second step."""
    made = pitz_daily(tmp_path_factory.mktemp("cases") / "pitz", (1,), END, refine=1)
    return changed(made, "system/controlDict", r"(?m)^(writeInterval)\s+\S+;", r"\1 2;")


def changed(case, file, pattern, by):
    """The case, with that place of a file changed."""
    path = case / file
    text, count = re.subn(pattern, by, path.read_text())
    assert count, pattern
    path.write_text(text)
    return case


def foam(name, case, **more):
    return {
        "name": name, "case": str(case), "ranks": "1-2", "command": "simpleFoam",
        "environment": {"WM_PROJECT_DIR": OPENFOAM_ETC}, "checkpoint": "allowed", **more,
    }  # fmt: skip


def melt(site, name, line="", **more):  # noqa: F811
    """LAMMPS that tells of each tenth step; `line` comes before its box."""
    folder = site.directory / name
    folder.mkdir()
    script = (TOP / "examples/in.lj").read_text().replace("thermo 50", "thermo 10")
    (folder / "in.lj").write_text(script.replace("create_box", f"{line}\ncreate_box"))
    return {
        "name": name, "case": str(folder), "ranks": "1-2", "command": "lmp -in in.lj",
        "checkpoint": "allowed", **more,
    }  # fmt: skip


def said(site, name):  # noqa: F811
    with contextlib.suppress(OSError):
        return (site.out / name / "log").read_text()
    return ""


def steps(site, name, pattern=r"(?m)^Time = ([1-9]\d*)$"):  # noqa: F811
    """The steps of which its log tells, also those that were lost and taken again."""
    return [int(step) for step in re.findall(pattern, said(site, name))]


def launches(site, name):  # noqa: F811
    return [len(one["share"]["requests"]) for one in site.of_type("Launch", name)]


def of(site, name):  # noqa: F811
    """What the summary has of a simulation."""
    return next(one for one in site.summary()["simulations"] if one["name"] == name)


# --- Ranks on which it cannot run, and numbers that are none ---


@pytest.mark.alone
def test_ranks_for_which_a_case_cannot_be_cut_cost_no_step(site, case):  # noqa: F811
    """It stops for a second rank, its decomposer fails, and it goes on on one."""
    long = shutil.copytree(case, site.directory / "long")
    changed(long, "system/controlDict", r"(?m)^(endTime|writeInterval)\s+\S+;", r"\1 400;")
    (long / "constant/polyMesh/sets").mkdir()
    (long / "constant/polyMesh/sets/broken").write_text(BROKEN_SET)  # no solver reads it
    plan = site.plan(foam("long", long), foam("short", case, ranks=1))
    assert site.run(plan, site.out, command=TUNED)[0] == 0
    assert site.states() == {"long": "done", "short": "done"}
    assert launches(site, "long") == [1, 2, 1]
    stopped, refused = site.of_type("Requeued", "long")
    assert (stopped["cause"], refused["cause"]) == ("checkpointed", "launch failed")
    assert "decomposePar" in refused["why"]
    assert steps(site, "long") == list(range(1, 401)), "nothing is computed twice"
    assert (of(site, "long")["iterations"], of(site, "long")["ranks"]) == (400, 1)
    site.assert_clean()


@needs_lammps
def test_a_width_that_crashes_and_programs_that_diverge_cost_no_other(site, case):  # noqa: F811
    wild = shutil.copytree(case, site.directory / "wild")
    changed(wild, "system/fvSolution", r"(?s)relaxationFactors\s*\{.*\n\}",
            "relaxationFactors { equations { U 1; \".*\" 1; } fields { p 1.9; } }")  # fmt: skip
    narrow = melt(site, "narrow", "processors 1 1 1")
    entries = (foam("wild", wild, ranks=1), melt(site, "blown", "timestep 1"), narrow)
    code, _, errors = site.run(site.plan(*entries, max_packed=1), "-o", "out")
    assert code == 1, errors
    assert site.states() == {"wild": "failed", "blown": "failed", "narrow": "done"}
    assert re.search("loating point|signal 8", of(site, "wild")["reason"]), of(site, "wild")
    assert re.search("ERROR.*([Ll]ost|numeric)", of(site, "blown")["reason"]), of(site, "blown")
    assert [len(launches(site, name)) for name in ("wild", "blown")] == [1, 1]
    assert launches(site, "narrow") == [2, 1], "LAMMPS ends on ranks that its script forbids"
    (refused,) = site.of_type("Requeued", "narrow")
    assert "ERROR" in refused["why"]
    site.assert_clean()


# --- A disk that is full ---

# A file system of its own; all but the end of a restart file fits on it when the run is ended.
FULL = """
mount -t tmpfs -o size=20m dovetail-test out && {run} --checkpoint & run=$!
until grep -q '^ *300 ' out/melt/log; do sleep 0.05; done
cat /dev/zero > out/fill
truncate -s -$((({size} - 1) / 4096 * 4096)) out/fill
kill -TERM $run; wait $run; [ $? -eq 130 ] || exit 3
rm out/fill
{run} --resume && cp -r out/. kept
"""


@needs_lammps
@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount a small file system")
@pytest.mark.parametrize("size", ["1", "$(stat -c %s out/melt/case/one)"], ids=["all", "the end"])
def test_a_restart_file_on_a_full_disk_is_passed_over(site, size):  # noqa: F811
    (site.directory / "kept").mkdir()
    site.out.mkdir()
    entry = melt(site, "melt", ranks=1, command="lmp -in in.lj -var steps 3000")
    changed(Path(entry["case"]), "in.lj", r"(?m)^run ", "restart 100 one two\nrun ")
    run = shlex.join([*COMMAND, str(site.plan(entry)), "-o", "out"])
    script = FULL.replace("{run}", run).replace("{size}", size)
    code, _, errors = site.run(script, command=("unshare", "--mount", "sh", "-c"))
    assert code == 0, errors
    out, site.out = site.out, site.directory / "kept"
    assert of(site, "melt")["state"] == "done"
    began = [one["iterations"] for one in site.of_type("Started")]
    assert len(began) == 2
    assert began[1] >= 300
    assert began[1] % 100 == 0, "from what its script had written before"
    taken = steps(site, "melt", THERMO)
    assert set(range(began[1], 3001, 10)) <= set(taken)
    site.out = out
    site.assert_clean()


# --- Processes that are killed ---


@needs_lammps
def test_lammps_whose_run_is_killed_goes_on_from_what_its_script_wrote(site):  # noqa: F811
    """At four random moments, or at twenty."""
    random.seed(10)
    kills = 20 if FAULTS else 4
    end = 500 * kills
    entry = melt(site, "melt", ranks=1, command=f"lmp -in in.lj -var steps {end}")
    changed(Path(entry["case"]), "in.lj", r"(?m)^run ", "restart 100 one two\nrun ")
    plan = site.plan(entry)

    def taken():
        return len(steps(site, "melt", THERMO))

    def start(kill):
        return site.start(plan, "-o", "out", *["--resume"] * (kill > 0))

    site.kill_at_random(start, kills, taken, 20)
    assert site.run(plan, "-o", "out", "--resume")[0] == 0
    assert site.states() == {"melt": "done"}
    assert of(site, "melt")["iterations"] == end
    began = [one["iterations"] for one in site.of_type("Started")]
    assert began == sorted(began), "what was written was never lost"
    assert began[-1] >= 100
    assert not any(at % 100 for at in began)
    told = re.findall(rf"(?m)^ +(?:0|{end}) +[\d.]+ +\S+ +\S+ +(\S+)", said(site, "melt"))
    assert float(told[-1]) == pytest.approx(float(told[0]), rel=0.01), "its energy is kept"
    site.assert_clean()


RUNNING = ("rank", "starter", "supervisor", "run")
MOMENTS = {
    "before it writes": RUNNING,
    "while it writes": RUNNING,
    "once it has written": ("halted", "supervisor", "run"),
    "as it is cut anew": ("reconstructPar", "go-on", "supervisor", "run"),
    "as it starts": ("rank", "supervisor", "run"),
}
ALL = [(moment, victim) for moment, victims in MOMENTS.items() for victim in victims]
FEW = [("while it writes", "rank"), ("as it is cut anew", "go-on"), ("as it starts", "supervisor")]
CHOSEN = ALL if FAULTS else FEW


@pytest.fixture(scope="module")
def undisturbed(case, tmp_path_factory):
    """Its final fields if nobody interferes, on one rank."""
    alone = shutil.copytree(case, tmp_path_factory.mktemp("undisturbed") / "pitz")
    subprocess.run(["simpleFoam"], cwd=alone, env=environment(), check=True, capture_output=True)
    return {name: last_field(alone, name) for name in ("p", "U")}


def found(site, what):  # noqa: F811
    """Processes of a run that are a rank, its starter, its supervisor, or a step of a restart."""
    pids = []
    for pid in processes.members(site.token):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            first = words[0].rpartition("/")[2]
            known = {"rank": "simpleFoam", "starter": "mpirun"}.get(what, what) == first
            if known or what in words or f"dovetail.mpi.{what}" in " ".join(words):
                pids.append(pid)
    return pids


def signalled(site, run, what, number):  # noqa: F811
    for pid in [run.pid] if what == "run" else found(site, what):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def times(site):  # noqa: F811
    return written_times.times(site.out / "pitz/case/processor1")


@pytest.mark.parametrize(("moment", "victim"), CHOSEN)
def test_whoever_is_killed_as_it_restarts_it_ends_once(site, case, undisturbed, moment, victim):  # noqa: F811
    """It stops on two ranks, as the run is to end, and goes on on one in the next run."""
    both, one = (site.plan(foam("pitz", case), cpus=n, name=f"{n}.yaml") for n in (2, 1))
    run = site.start(both, "-o", "out", "--checkpoint")
    wait_for(lambda: len(steps(site, "pitz")) > 5, site.errors)
    early = moment in ("before it writes", "while it writes")
    if early:
        signalled(site, run, "rank", signal.SIGSTOP)
    before = times(site)
    run.send_signal(signal.SIGTERM)
    if early:
        control = site.out / "pitz/case/system/controlDict"
        wait_for(lambda: "writeNow" in control.read_text(), site.errors)
        if moment == "while it writes":
            signalled(site, run, "rank", signal.SIGCONT)
            wait_for(lambda: times(site) != before, site.errors)
        signalled(site, run, victim, signal.SIGKILL)
        signalled(site, run, "rank", signal.SIGCONT)
    elif moment == "once it has written":
        wait_for(lambda: found(site, "halted"), site.errors)
        signalled(site, run, victim, signal.SIGKILL)
    assert site.end(run)[0] in (130, -signal.SIGKILL)
    site.assert_clean()
    over = 0 if moment in list(MOMENTS)[:3] else of(site, "pitz")["iterations"]

    run = site.start(one, "-o", "out", "--resume")
    if moment in list(MOMENTS)[3:]:
        sign = "go-on" if moment == "as it is cut anew" else "rank"
        if victim == "reconstructPar":
            sign = victim
        wait_for(lambda: found(site, sign), site.errors)
        signalled(site, run, victim, signal.SIGKILL)
    code = site.end(run)[0]
    if code < 0:
        site.assert_clean()
        code = site.run(one, "-o", "out", "--resume")[0]
    site.assert_clean()
    (state,) = site.states().values()
    if state == "failed":  # with it went who would have started it again
        assert (victim, code) == ("supervisor", 1)
        assert over
        assert "its supervisor failed" in of(site, "pitz")["reason"]
        return
    assert (code, state) == (0, "done")
    began = [one["iterations"] for one in site.of_type("Started")]
    assert began[0] == 0
    assert all(at >= max(4, over) for at in began[1:]), "it went on from what it had written last"
    made = site.out / "pitz/case"
    if (made / f"processor0/{END}").is_dir():
        words = ["reconstructPar", "-latestTime"]
        subprocess.run(words, cwd=made, env=environment(), check=True, capture_output=True)
    for (
        name,
        wanted,
    ) in undisturbed.items():  # it has not converged yet: some steps are on two ranks
        assert off(last_field(made, name), wanted) < 1e-2
