# SPDX-License-Identifier: LGPL-3.0-or-later
"""Simulations that follow one another in the same pods, on the real cluster."""

from __future__ import annotations

import json

import pytest
from dovetail.executors.kubernetes import manifests
from support.cluster_runs import containers, ends

pytestmark = pytest.mark.kube


def followed(site, out):
    """A run of which short simulations were over before one that does not end by itself."""
    file, waiting = ends(site, out)
    # Over before their load is known, by which they would ask for less than the last one does.
    first = {**site.busy(10, 30, iterations=3, count=3), "name": "first"}
    last = {**site.busy(10, 30, **waiting), "name": "last"}
    plan = site.plan(first, last)
    run = site.start(plan, out)
    site.until(lambda: run.poll() is not None or len(site.of("Started", out)) == 4, out)
    assert run.poll() is None, site.errors(out)
    site.until_iterating("last", out=out)
    return file, plan, run


def made(site, out):
    """The pods that Jobs of the run have made so far."""
    run = json.loads((site.folder / out / "status.json").read_text())["run"]
    events = [e for e in site.get("events")["items"] if e["reason"] == "SuccessfulCreate"]
    return {e["message"] for e in events if run in e["involvedObject"]["name"]
            and e["involvedObject"]["kind"] == "Job"}  # fmt: skip


def test_pods_have_the_next_simulation_and_say_which_and_a_resumed_run_knows_it(site, out):
    file, plan, run = followed(site, out)
    assert len(made(site, out)) < 4
    site.until(lambda: len(site.pods("last")) == 1, out)
    (pod,) = site.pods("last")
    name = pod["metadata"]["labels"][manifests.JOB]
    assert not name.startswith("last-"), "another simulation's Job has made it"
    labels = site.get("job", name)["metadata"]["labels"]
    assert labels[manifests.SIMULATION] == "last"
    before = containers(site)
    run.kill()
    site.end(run)
    run = site.start(plan, out, "--resume")
    site.until_iterating("last", out=out)
    assert containers(site) == before
    file.touch()
    assert site.end(run) == 0, site.errors(out)
    assert set(site.states(out).values()) == {"done"}
    assert {one["restarts"] for one in site.summary(out)["simulations"]} == {0}


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_ranks_in_pods_of_their_own_have_those_of_the_ranks_before(site, out, mpi):
    """Which have had a daemon of the MPI, or a starter, and shared memory with one another."""
    entry = site.busy(1, 1, 1, iterations=20, ranks_per_pod=1, count=4, mpi=mpi)
    run = site.start(site.plan(entry), out)
    assert site.end(run) == 0, site.errors(out)
    assert set(site.states(out).values()) == {"done"}
    assert all(one["iterations"] == 20 for one in site.summary(out)["simulations"])
    assert len(made(site, out)) < 12


def test_a_simulation_that_loses_a_pod_another_had_before_it_runs_again(site, out):
    file, _, run = followed(site, out)
    (pod,) = site.until(lambda: site.pods("last"), out)
    site.kubectl("delete", "pod", pod["metadata"]["name"], "--wait=false")
    site.until(lambda: len(site.of("Started", out, "last")) == 2, out)
    site.until_iterating("last", out=out)
    file.touch()
    assert site.end(run) == 0, site.errors(out)
    told = {one["name"]: one["restarts"] for one in site.summary(out)["simulations"]}
    assert told == {"first-1": 0, "first-2": 0, "first-3": 0, "last": 1}


def test_no_simulation_finds_what_another_has_left_in_its_pod(site, out):
    """Neither a file nor a process that has left its session, its parent and its environment."""
    script = site.case / "leaves"
    script.write_text(
        "test ! -e /tmp/left || exit 7\n"
        "for one in /proc/[0-9]*/comm\n"
        "do read -r name < $one; test $name != sleep || exit 8; done\n"
        "case $PWD in */clean-*) ;; *) touch /tmp/left ;; esac\n"
        "setsid env -i /bin/sleep 1000 </dev/null >/dev/null 2>&1 &\n"
    )
    usual = {"command": ["sh", str(script)], "ranks": 1, "count": 3}
    run = site.start(site.plan({**usual, "name": "clean"}, {**usual, "name": "leaves"}), out)
    assert site.end(run) == 0, site.errors(out)
    assert set(site.states(out).values()) == {"done"}
    assert 3 <= len(made(site, out)) < 6


def test_pods_of_what_asked_for_little_grow_for_what_asks_for_more(site, out):
    light = {**site.busy(1, 10, iterations=20), "name": "light"}
    even = {**site.busy(10, 10, iterations=20), "name": "even"}
    run = site.start(site.plan(light, even, max_packed=1), out)
    assert site.end(run) == 0, site.errors(out)
    assert set(site.states(out).values()) == {"done"}
    first, second = (sum(one["share"]["requests"]) for one in site.of("Launch", out))
    assert second > first
    assert len(made(site, out)) == 1
    assert "runs with less" not in site.errors(out)
