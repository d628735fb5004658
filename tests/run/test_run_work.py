# SPDX-License-Identifier: LGPL-3.0-or-later
"""`dovetail run` with programs that tell no iterations: their work decides what runs at once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support import known_programs
from support.run_command import TUNED, site  # noqa: F401

pytestmark = [pytest.mark.mpi, pytest.mark.alone]  # what pays is measured

CORES = len(os.sched_getaffinity(0))
VERDICTS = ("keep", "rollback")
QUICK = {"rhythm": 1.0, "window": 0.5, "cooldown": 1.0, "harm": 1.0}


def run(site, *entries):  # noqa: F811
    """Run them with settings for short programs; its notes by what they are about, in order."""
    program = TUNED.replace("{settings!r}", repr(QUICK))
    plan = site.plan(*entries)
    code, _, errors = site.run(plan, site.out, command=(sys.executable, "-c", program))
    assert code == 0, errors
    assert set(site.states().values()) == {"done"}
    assert {one["measure"] for one in site.summary()["simulations"]} == {"work"}
    notes = {}
    for one in site.of_type("Note"):
        notes.setdefault(one["what"], []).append(one)
    (profile,) = (one for one in notes["profile"] if "rate" in one["data"])
    assert profile["data"]["measure"] == "work"
    assert profile["data"]["error"] >= 0.1
    return notes, profile["data"]


@pytest.mark.parametrize(("kind", "mpi"), [("master", "openmpi"), ("last", "mpich")])
def test_ranks_that_wait_make_room_for_another_simulation(site, kind, mpi):  # noqa: F811
    """Of as many ranks as there are cores one is idle, and nothing tells when it is how far."""
    program = known_programs.build(mpi, "known/tasks.c")
    words = [known_programs.LAUNCHERS[mpi], "-np", str(CORES), program, kind, "6"]
    notes, profile = run(site, {"count": 3, "ranks": CORES, "slowdown": 50, "command": words})
    assert 0.0 < profile["rate"] < CORES - 0.5
    assert profile["need"] < CORES - 0.2
    second = notes["admit"][1]["data"]
    assert second["n"] == 2
    measured = notes["policy"][0]["data"]
    assert (measured["measures"], measured["mix"]) == (["work"], [["sim", 2]])
    verdict = (notes.get("keep") or notes["rollback"])[0]["data"]
    pays = verdict["throughput"] > 1.03 and verdict["throughput"] - 1.0 >= verdict["error"]
    assert pays == ("keep" in notes)


def test_a_program_of_as_many_threads_as_cores_runs_alone(site, tmp_path):  # noqa: F811
    source = known_programs.TOP / "pmpi" / "known" / "team.c"
    program = str(tmp_path / "team")
    subprocess.run(["cc", "-O1", "-pthread", "-o", program, str(source)], check=True)
    words = [program, str(max(2, CORES)), "3"]
    notes, profile = run(site, site.shell("", count=3) | {"command": words})
    assert profile["need"] > 0.6 * CORES
    told = {what: [one["data"] for one in notes.get(what, ())] for what in ("admit", *VERDICTS)}
    for kept in told["keep"]:  # as beside other programs, where two of them get more than one
        assert kept["throughput"] - 1.0 >= kept["error"], told
    if not told["keep"]:
        assert [one["measures"] for one in told["rollback"][:1]] == [["work"]], told
        assert told["admit"][-1]["n"] == 1, told


# It computes for a tenth of its time, however fast the core is.
SLEEPER = """
import time
for _ in range(50):
    time.sleep(0.2)
    end = time.thread_time() + 0.02
    while time.thread_time() < end:
        pass
"""


def test_scripts_that_sleep_run_on_more_than_a_core_each(site):  # noqa: F811
    words = [sys.executable, "-c", SLEEPER]
    notes, profile = run(site, site.shell("", count=CORES + 2) | {"command": words})
    assert profile["need"] < 0.7
    assert site.summary()["n_max"] > CORES
    more = [["sim", CORES + 1]]
    tried = next(one["data"] for one in notes["policy"] if one["data"]["mix"] == more)
    assert tried["before"] >= CORES, "each did what it does alone"
