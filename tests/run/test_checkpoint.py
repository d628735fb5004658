# SPDX-License-Identifier: LGPL-3.0-or-later
"""Any program stops at checkpoints, and goes on, by its plan's own commands."""

from __future__ import annotations

import random
import shutil
import signal

import pytest
from support.local_runs import wait_for
from support.run_command import site  # noqa: F401

END = 60
# It writes where it is at each tenth step, and when it is asked to stop: by a file or by a signal,
# which Open MPI's starter sends to all of its process group, and so ends a `mv`.
STEPS = f"""
trap 'touch stop' USR1
n=0 sum=7
[ ! -e state ] || read n sum < state
while [ $n -lt {END} ]; do
    n=$((n + 1)) sum=$(((sum * 31 + n) % 1000003))
    sleep 0.02
    echo "$n" >> ../../steps-$NAME
    if [ -e stop ] || [ $((n % 10)) = 0 ]; then
        echo $n $sum > state.new
        while [ -e state.new ]; do mv state.new state; done
        [ ! -e stop ] || exit 0
    fi
done
echo $sum > result
echo done >> ../../ends-$NAME
"""
RESTART = ["sh", "-c", "rm -f stop; read n sum < state && echo $n"]


def stepping(site, name, write="touch stop", **more):  # noqa: F811
    entry = site.shell(STEPS)
    lines = {"write": write, "restart": f"sh -c '{RESTART[2]}'"}
    environment = {**entry["environment"], "NAME": name}
    return {**entry, "name": name, "environment": environment, "checkpoint": lines, **more}


def steps(site, name):  # noqa: F811
    """The steps that it took, also those that were lost and taken again."""
    path = site.out / f"steps-{name}"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def right_sum():
    """What it comes to if nobody interferes."""
    total = 7
    for step in range(1, END + 1):
        total = (total * 31 + step) % 1000003
    return total


def results(site, name):  # noqa: F811
    """Its result, and how often it came to its end."""
    return (
        int((site.out / name / "case/result").read_text()),
        (site.out / f"ends-{name}").read_text(),
    )


@pytest.mark.slow
@pytest.mark.unit
def test_by_its_own_commands_a_program_stops_and_goes_on(site):  # noqa: F811
    stops_and_goes_on(site, stepping(site, "walk"))


@pytest.mark.mpi
@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_a_starter_passes_on_the_signal_that_asks_for_a_checkpoint(site, mpi):  # noqa: F811
    starter = shutil.which(f"mpirun.{mpi}")
    if not starter:
        pytest.skip(f"no {mpi} here")
    entry = stepping(site, "walk", "sh -c 'kill -USR1 $DOVETAIL_PID'")
    stops_and_goes_on(site, {**entry, "command": [starter, "-np", "1", *entry["command"]]})


def stops_and_goes_on(site, entry):  # noqa: F811
    plan = site.plan(entry)
    run = site.start(plan, "-o", "out", "--checkpoint")
    wait_for(lambda: len(steps(site, "walk")) >= 13)
    code, _, errors = site.end(run, signal.SIGTERM)
    assert (code, "--resume goes on there" in errors) == (130, True)
    assert site.states() == {"walk": "checkpointed"}
    site.assert_clean()
    assert site.run(plan, "-o", "out", "--resume")[0] == 0
    assert site.states() == {"walk": "done"}
    assert steps(site, "walk") == list(range(1, END + 1)), "no step is lost, and none twice"
    assert results(site, "walk") == (right_sum(), "done\n")
    site.assert_clean()


@pytest.mark.unit
@pytest.mark.parametrize("restart", [RESTART[2], "exit 255"])
def test_with_nothing_to_go_on_from_it_begins_anew_and_says_so(site, restart):  # noqa: F811
    """The exit code 255, as of a script in Perl that dies, is that of no signal."""
    entry = stepping(site, "walk")
    entry["checkpoint"]["restart"] = f"sh -c '{restart}'"
    plan = site.plan(entry)
    run = site.start(plan, "-o", "out")
    wait_for(lambda: steps(site, "walk"))
    site.end(run, signal.SIGKILL)
    site.assert_clean()  # it writes no more
    (site.out / "walk/case/state").unlink(missing_ok=True)
    taken = len(steps(site, "walk"))
    assert site.run(plan, "-o", "out", "--resume")[0] == 0
    assert steps(site, "walk")[taken:] == list(range(1, END + 1))
    assert results(site, "walk") == (right_sum(), "done\n")
    assert "there is nothing to go on from; it begins anew" in (site.out / "walk/log").read_text()


def killed_somewhere(site, plan, asked):  # noqa: F811
    """Start or resume the run and kill it after some steps, `asked` to stop just before."""

    def taken():
        return len([line for file in site.out.glob("steps-*") for line in file.open()])

    words = ["--resume"] if site.log() else []
    run = site.start(plan, "-o", "out", "--checkpoint", *words)
    end = taken() + random.randrange(16)
    wait_for(lambda: run.poll() is not None or (taken() >= end and site.of_type("Started")))
    site.end(run, *[signal.SIGTERM] * asked, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.unit
def test_a_run_killed_at_twenty_moments_comes_to_the_same_results(site):  # noqa: F811
    random.seed(20)
    names = ["one", "two", "three", "four"]
    plan = site.plan(*(stepping(site, name) for name in names))
    for kill in range(20):
        killed_somewhere(site, plan, kill % 3 == 0)
    site.run(plan, "-o", "out", "--resume")
    assert site.states() == dict.fromkeys(names, "done")
    for name in names:
        assert results(site, name)[0] == right_sum()
        assert sorted(set(steps(site, name))) == list(range(1, END + 1))
    site.assert_clean()


@pytest.mark.unit
def test_a_case_that_is_edited_meanwhile_ends_no_run(site):  # noqa: F811
    """What begins later has no checkpoint if its script cannot be gone on with any more."""
    script = site.case / "in.box"
    script.write_text("create_box 1 box\nrun 10\n")
    (site.case / "lmp").write_text(f"#!/bin/sh\necho run 10 >>{script}\n")
    (site.case / "lmp").chmod(0o755)
    entry = {"command": "./lmp -in in.box", "checkpoint": "allowed", "count": 2}
    assert site.run(site.plan(entry, cpus=1), "-o", "out")[0] == 0
    assert site.states() == {"sim-1": "done", "sim-2": "done"}
    assert "no checkpoint: " in (site.out / "sim-2/log").read_text()
    site.assert_clean()
