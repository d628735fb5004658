# SPDX-License-Identifier: LGPL-3.0-or-later
"""`dovetail run` with real MPI programs, whatever happens to them, in every phase."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.other_users import WHY_NOT
from support.run_command import COMMAND, NOBODY, TUNED, busy, site  # noqa: F401

pytestmark = pytest.mark.mpi

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]


def of(log, kind, name):
    return [r for r in log if r.get("type") == kind and r.get("name") == name]


def iterates(log, name):
    return any(min(r["ranks"]["iterations"]) > 0 for r in of(log, "Sampled", name))


def profiled(log):
    return any(r.get("what") == "profile" and "rate" in r["data"] for r in log)


def suspended(log):
    resized = [r for r in log if r["type"] in ("Resize", "Resized")]
    pairs = zip(resized, resized[1:])
    return any(
        a["type"] == "Resize" and any(s["suspended"] for s in a["shares"].values())
        and b["type"] == "Resized" and not b["refused"]
        for a, b in pairs
    )  # fmt: skip


PHASES = {
    "profile": lambda log: iterates(log, "a-1") and not profiled(log),
    "packed": lambda log: iterates(log, "a-2") and not of(log, "Finished", "a-2"),
    "suspended": suspended,
}
"""A run of `mixed` is in the phase, by its log."""


def mixed(site, iterations=10**6):  # noqa: F811
    """Two kinds of simulations with light ranks that sleep: they pack on any machine.

    Each has more ranks than half the cores, so that a profile of the second suspends the first.
    """
    ranks = max(2, len(os.sched_getaffinity(0)))
    milliseconds = [20] + [5] * (ranks - 1)
    return site.plan(
        {"name": "a", "count": 2, "slowdown": 50, **busy(*milliseconds, iterations=iterations)},
        {"name": "b", "count": 2, "slowdown": 50, **busy(*milliseconds, iterations=iterations)},
    )


def come_to(site, phase, plan):  # noqa: F811
    run = site.start(plan, "-o", "out")
    site.until(PHASES[phase], phase)
    return run


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_in_any_phase_leaves_nothing(site, phase, number):  # noqa: F811
    run = come_to(site, phase, mixed(site))
    code, _, errors = site.end(run, number)
    site.assert_clean()
    if number == signal.SIGKILL:
        return
    assert code == 130
    assert errors.endswith(f"dovetail: interrupted by {number.name}\n")
    states = site.states()
    assert set(states) == {"a-1", "a-2", "b-1", "b-2"}
    started = {r["name"] for r in site.of_type("Launch")}
    for name, state in states.items():
        assert state == ("failed" if name in started else "not started")


@pytest.mark.parametrize("phase", ["packed", "suspended"])
def test_after_kill_9_the_run_goes_on(site, phase):  # noqa: F811
    plan = mixed(site, iterations=450)
    run = come_to(site, phase, plan)
    site.end(run, signal.SIGKILL)
    started = {r["name"] for r in site.of_type("Launch")}
    ended = {r["name"] for r in site.of_type("Finished")}
    assert started - ended
    assert site.run(plan, "-o", "out", "--resume")[0] == 0
    assert set(site.states().values()) == {"done"}
    for one in site.summary()["simulations"]:
        assert one["iterations"] == 450
        assert one["restarts"] == (one["name"] in started - ended)


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_a_rank_killed_with_9_fails_its_simulation_alone(site, mpi):  # noqa: F811
    plan = site.plan({"name": "a", "count": 2, **busy(5, 5, iterations=400, mpi=mpi)})
    run = site.start(plan, "-o", "out")
    site.until(lambda log: iterates(log, "a-1"))
    os.kill(rank_of(site, "a-1", 1), signal.SIGKILL)
    assert site.end(run)[0] == 1
    assert site.states() == {"a-1": "failed", "a-2": "done"}
    assert site.summary()["simulations"][0]["reason"] == KILLED[mpi]


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_the_run_is_a_task_of_a_job_and_its_simulations_are_not(site, mpi):  # noqa: F811
    """As by `flux run -n1 dovetail run`: by these a program takes itself for a rank of that job."""
    task = ("FLUX_JOB_ID=ƒ1", "PMI_FD=18", "PMI_RANK=0", "PMI_SIZE=1")
    entry = busy(1, iterations=3, mpi=mpi)
    alone = {**entry, "name": "alone", "application": "lammps", "command": entry["command"][3:]}
    plan = site.plan({**entry, "name": "started"}, alone)
    code, _, errors = site.run(plan, "-o", "out", command=("env", *task, *COMMAND))
    assert code == 0, errors
    assert site.states() == {"started": "done", "alone": "done"}


KILLED = {"openmpi": "rank 1 killed by signal 9", "mpich": "a rank killed by signal 9"}
"""MPICH's launcher kills the other ranks by the same signal and may name one of them."""


def rank_of(site, name, rank):  # noqa: F811
    """The process id of a rank, by the name of its page."""
    (session,) = site.sessions
    (page,) = Path("/dev/shm", session, name).glob(f"rank.{rank}.*")
    return int(page.suffix[1:])


def test_a_simulation_that_hangs_is_ended_and_the_rest_goes_on(site):  # noqa: F811
    plan = site.plan({"name": "a", "count": 2, **busy(5, 5, iterations=400)})
    program = TUNED.replace("{settings!r}", repr({"stall": 2.0, "stall_iterations": 1.0}))
    run = site.start(plan, site.out, command=(sys.executable, "-c", program))
    site.until(lambda log: iterates(log, "a-1"))
    os.kill(rank_of(site, "a-1", 0), signal.SIGSTOP)
    code, output, _ = site.end(run)
    assert code == 1
    assert json.loads(output) == site.summary()
    assert site.states() == {"a-1": "failed", "a-2": "done"}
    assert site.summary()["simulations"][0]["reason"].startswith("hung: no iteration for")


@pytest.fixture
def busy_core():
    """A core on which some other programs compute, whatever their user or session gets."""
    core = str(min(os.sched_getaffinity(0)))
    words = ["taskset", "-c", core, "sh", "-c", "while :; do :; done"]
    others = [subprocess.Popen(words, start_new_session=True) for _ in range(6)]
    yield core
    for one in others:
        one.kill()
        one.wait()


@pytest.mark.parametrize("who", [{}, {"BUSY_CHILD": "1"}], ids=["itself", "by another program"])
def test_one_that_is_busy_for_long_between_two_iterations_does_not_hang(
    site,  # noqa: F811
    who,
    busy_core,
):
    """Even where it gets hardly any of a core, as others do much there."""
    environment = {"BUSY_LONG": "0.8", **who}
    entry = busy(5, 5, iterations=105)
    entry["command"][3:3] = ["taskset", "-c", busy_core]
    plan = site.plan({"name": "a", **entry, "environment": environment})
    program = TUNED.replace("{settings!r}", repr({"stall": 4.0, "stall_iterations": 1.0}))
    program = f"from dovetail.mpi import page; page.QUIET = 0.5\n{program}"
    program = f"from dovetail.executors.local import executor; executor._COUNT = 0.5\n{program}"
    code, output, _ = site.end(site.start(plan, site.out, command=(sys.executable, "-c", program)))
    assert (code, site.states()) == (0, {"a": "done"}), output


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_a_rank_ten_times_slower_than_its_peers(site, mpi):  # noqa: F811
    plan = site.plan({"name": "a", "count": 2, **busy(40, 4, iterations=90, how="burn", mpi=mpi)})
    assert site.run(plan, "-o", "out")[0] == 0
    assert site.states() == {"a-1": "done", "a-2": "done"}
    (note,) = (r for r in site.log() if r.get("what") == "profile" and "load" in r["data"])
    light, heavy = sorted(note["data"]["load"])
    assert heavy > 0
    assert [one["iterations"] for one in site.summary()["simulations"]] == [90, 90]
    assert light < heavy


def test_an_ordinary_user_packs_without_weights(site):  # noqa: F811
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    plan = mixed(site, iterations=300)
    for path in (site.directory, site.temporary, site.case):
        os.chown(path, 65534, 65534)
    program = Path(json.loads(plan.read_text())["simulations"][0]["command"][3])
    program.parent.chmod(0o755)
    site.prefix = NOBODY
    code, _, errors = site.run(plan, "-o", "out")
    assert code == 0, errors
    assert set(site.states().values()) == {"done"}
    assert "simulations run without CPU weights" in errors


PITZ = Path("/usr/share/doc/openfoam-examples/examples/incompressible/simpleFoam/pitzDaily")


def test_openfoam_is_prepared_run_and_counted(site):  # noqa: F811
    if not PITZ.is_dir() or shutil.which("simpleFoam") is None:
        pytest.skip("OpenFOAM or its examples are not installed")
    entry = {
        "name": "pitz",
        "case": str(PITZ),
        "ranks": 2,
        "weights": [1, 3],
        "prepare": [
            "blockMesh",
            "foamDictionary -entry endTime -set 60 system/controlDict",
            f"{sys.executable} -m dovetail decompose --ranks 2 --weights 1,3 .",
            "decomposePar",
        ],
        "command": "simpleFoam -parallel",
        "count": 2,
        "environment": {"WM_PROJECT_DIR": "/usr/share/openfoam"},
    }
    code, _, errors = site.run(site.plan(entry), "-o", "out")
    assert code == 0, errors
    assert site.states() == {"pitz-1": "done", "pitz-2": "done"}
    assert [one["iterations"] for one in site.summary()["simulations"]] == [60, 60]


def test_what_sleeps_outside_mpi_is_not_called_robbed(site):  # noqa: F811
    run = site.start(site.plan({"name": "a", **busy(20, iterations=300)}), "-o", "out")
    code, _, errors = site.end(run)
    assert code == 0, errors
    notes = [one for one in site.log() if one.get("what") == "profile" and "rate" in one["data"]]
    assert notes
    assert "other programs took" not in notes[0]["why"]
