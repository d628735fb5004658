# SPDX-License-Identifier: LGPL-3.0-or-later
"""Runs on a cluster that goes wrong: every simulation ends done, or failed with a reason.

Parts of the cluster are killed and come back; the API misbehaves, by a proxy in between; the
controller dies and is resumed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from dovetail.core.errors import BadInput
from dovetail.plan import schema
from dovetail.run import resume
from dovetail.run import run as dovetail_run
from support.cluster_runs import ROOT, containers, ends, running, two
from support.clusters import eventually, record
from support.faulty_proxy import FAULTS, Proxy
from support.pod_processes import state

pytestmark = pytest.mark.kube
PARTS = ("kubelet", "containerd", "kube-apiserver", "etcd", "kube-controller-manager")


def check_log(site, out):
    """The log replays to the same decisions."""
    assert resume.replay(site.folder / out / "events.jsonl") is None


def test_parts_of_the_cluster_that_are_killed_in_mid_run_disturb_no_simulation(site, out):
    file, waiting = ends(site, out)
    run = running(site, out, two(site, **waiting))
    before = containers(site)
    for part in PARTS:
        (old,) = eventually(lambda: site.machine.pids(site.made, part))  # noqa: B023
        os.kill(old, signal.SIGKILL)
        site.until_iterating("sim-1", "sim-2", out=out)
        assert eventually(lambda: site.machine.pids(site.made, part) not in ([], [old])), part  # noqa: B023
        assert eventually(lambda: site.kubectl("get", "--raw", "/readyz", check=False))
    site.until_iterating("sim-1", "sim-2", out=out)
    assert containers(site) == before, "no container was restarted"
    file.touch()
    assert site.end(run) == 0, site.errors(out)
    assert set(site.states(out).values()) == {"done"}
    assert {one["restarts"] for one in site.summary(out)["simulations"]} == {0}
    check_log(site, out)


def test_a_killed_controller_is_resumed_and_adopts_what_runs(site, out):
    file, waiting = ends(site, out)
    plan = two(site, **waiting)
    run = running(site, out, plan)
    before = containers(site)
    run.kill()
    site.end(run)
    have = site.iterations("sim-1", out)
    asked, folder = schema.load(plan), site.folder / out
    with pytest.raises(BadInput, match=f"resume it with --kubeconfig {site.kubeconfig}, or"):
        dovetail_run.run(asked, folder, resume=True)
    run = site.start(plan, out, "--resume")
    site.until_iterating("sim-1", "sim-2", out=out)
    assert containers(site) == before
    assert site.iterations("sim-1", out) > have
    file.touch()
    assert site.end(run) == 0, site.errors(out)
    assert set(site.states(out).values()) == {"done"}
    assert {one["restarts"] for one in site.summary(out)["simulations"]} == {0}
    starts = [one["name"] for one in site.of("Started", out)]
    assert sorted(starts) == ["sim-1", "sim-2"], "nothing ran twice"
    check_log(site, out)


def test_ranks_stand_still_while_neither_run_nor_api_answers(site, out):
    """As on a node that is cut off, but that nobody takes it for lost."""
    file, waiting = ends(site, out)
    program, *words = site.busy(10, 30, iterations=0)["command"]
    own = str(shutil.copy(program, site.folder / "stands"))
    run = running(site, out, two(site, **waiting, command=[own, *words]))
    (server,) = site.machine.pids(site.made, "kube-apiserver")
    ranks = [name for name in os.listdir("/proc") if name.isdigit() and program_of(name) == own]
    assert len(ranks) == 4
    try:
        os.kill(server, signal.SIGSTOP)
        run.send_signal(signal.SIGSTOP)
        assert eventually(lambda: {state(rank) for rank in ranks} == {"T"})
    finally:
        os.kill(server, signal.SIGCONT)
        run.send_signal(signal.SIGCONT)
    site.until_iterating("sim-1", "sim-2", out=out)
    file.touch()
    assert site.end(run) == 0, site.errors(out)
    assert {one["restarts"] for one in site.summary(out)["simulations"]} == {0}


def program_of(process):
    """The first word of its command line."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text().split("\0")[0]


def test_what_ended_while_the_controller_was_dead_is_not_run_again(site, out):
    file, waiting = ends(site, out)
    plan = two(site, **waiting)
    run = running(site, out, plan)
    run.kill()
    site.end(run)
    file.touch()
    site.until(lambda: site.over(out), out)
    assert len(site.pods()) == 2, "they wait there to be heard"
    run = site.start(plan, out, "--resume")
    assert site.end(run) == 0, site.errors(out)
    assert set(site.states(out).values()) == {"done"}
    assert len(site.of("Started", out)) == 2


def test_a_dead_runs_simulation_outlives_the_next_run_though_the_clock_was_set(site, out):
    """As the lease has it, its controller died years ago."""
    file, waiting = ends(site, out)
    plan = site.plan(site.busy(10, 10, **waiting), cpus=1)
    run = site.start(plan, out)
    site.until_iterating("sim", out=out)
    run.kill()
    site.end(run)
    old = json.dumps({"spec": {"renewTime": "2001-01-01T00:00:00.000000Z"}})
    site.kubectl("patch", "lease", "dovetail-controller", "--type=merge", "-p", old)
    small = site.plan({"ranks": 1, "command": ["true"]}, cpus="500m")
    other = site.start(small, out + "-next")
    assert site.end(other) == 0, site.errors(out + "-next")
    run = site.start(plan, out, "--resume")
    site.until_iterating("sim", out=out)
    file.touch()
    assert site.end(run) == 0, site.errors(out)
    assert [one["name"] for one in site.of("Started", out)] == ["sim"], "it ran once"
    assert site.states(out) == {"sim": "done"}


def test_simulations_whose_controller_never_comes_back_are_ended(site, out):
    plan = two(site)
    run = running(site, out, plan, DOVETAIL_ORPHAN_S="5")
    run.kill()
    site.end(run)
    gone = lambda: all(one["status"]["phase"] in ("Failed", "Succeeded") for one in site.pods())  # noqa: E731
    assert eventually(gone), site.pods()
    run = site.start(site.plan(site.busy(10, 10, iterations=20)), out + "-next")
    assert site.end(run) == 0, site.errors(out + "-next")
    run = site.start(site.plan(site.busy(10, 10, iterations=20)), out + "-last")
    assert site.end(run) == 0, site.errors(out + "-last")


def test_a_deleted_pod_sends_its_simulation_back_to_the_queue(site, out):
    file, waiting = ends(site, out)
    run = running(site, out, two(site, **waiting))
    (victim,) = site.pods("sim-1")
    site.kubectl("delete", "pod", victim["metadata"]["name"], "--wait=false")
    site.until(lambda: site.of("Finished", out), out)
    file.touch()
    assert site.end(run) == 0, site.errors(out)
    assert set(site.states(out).values()) == {"done"}
    restarts = {one["name"]: one["restarts"] for one in site.summary(out)["simulations"]}
    assert restarts == {"sim-1": 1, "sim-2": 0}
    (lost,) = [one for one in site.of("Finished", out) if one["reason"]]
    assert lost["reason"].startswith("pod lost")
    check_log(site, out)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_pods_and_writes_the_summary(site, out, number):
    run = running(site, out, two(site))
    assert site.end(run, number) == 130
    assert set(site.states(out).values()) == {"failed"}
    assert "interrupted by" in site.summary(out)["simulations"][0]["reason"]


# --- a node that is full ---


@pytest.fixture
def small(site, out):
    """A file system of 1 MB under a run's directory, for the node alone."""
    home = site.folder / out
    home.mkdir(mode=0o755)
    os.chown(home, site.machine.uid, -1)
    enter = ["nsenter", "--target", str(record(site.made)["supervisor"]), "--mount", "--pid"]
    enter += [] if ROOT else ["--user", "--preserve-credentials"]
    options = ["-t", "tmpfs", "-o", "size=1m,mode=0777", "dovetail-test"]
    subprocess.run([*enter, "mount", *options, str(home)], check=True)
    yield
    subprocess.run([*enter, "umount", "--lazy", str(home)], check=True)


def test_a_disk_that_fills_up_fails_what_needs_it_and_says_so(site, out, small):
    case = site.folder / f"{out}-case"
    case.mkdir()
    (case / "input").write_text("it takes room on a disk\n" * 500)

    def entry(name, script, **more):
        return {"name": name, "case": str(case), "ranks": 1, "command": ["sh", "-c", script],
                **more}  # fmt: skip

    fill = "cat /dev/zero > ../../fill"
    plan = site.plan(
        entry("before", "cat input"), entry("fills", fill), entry("after", "true", count=3),
        cpus=1,  # so that they run one at a time
    )  # fmt: skip
    assert site.end(site.start(plan, out)) == 1, site.errors(out)
    found = {one["name"]: one for one in site.summary(out)["simulations"]}
    before = found.pop("before")
    assert before["state"] == "done", before["reason"]
    assert sorted(found) == ["after-1", "after-2", "after-3", "fills"]
    for one in found.values():
        assert one["state"] == "failed"
        assert "No space left on device" in one["reason"], one
    check_log(site, out)


# --- an API that misbehaves ---


@pytest.fixture
def proxy(site):
    """The way to the API, for whatever is started now."""
    made = Proxy(site.kubeconfig)
    real, site.kubeconfig = site.kubeconfig, made.kubeconfig(site.folder / "proxy")
    Path(site.kubeconfig).chmod(0o644)
    yield made
    site.kubeconfig = real
    made.shutdown()
    made.server_close()


def test_an_api_that_answers_with_errors_or_not_at_all_is_outlasted(site, proxy, out):
    file, waiting = ends(site, out)
    last = site.busy(20, 30, name="last", **waiting)
    run = site.start(site.plan(site.busy(20, 30, count=2, iterations=200), last), out)
    site.until(lambda: site.of("Launch", out), out)
    proxy.rate = 0.15
    site.until(lambda: proxy.done == {*FAULTS} or run.poll() is not None, out)
    file.touch()
    assert site.end(run) == 0, site.errors(out)
    assert set(site.states(out).values()) == {"done"}
    assert len(site.of("Started", out)) == 3, "nothing ran twice"
    assert proxy.done == {*FAULTS}, "each of them was there"
    check_log(site, out)


def test_simulations_start_and_end_though_watches_are_silent(site, proxy, out):
    proxy.deaf = True
    run = site.start(site.plan(site.busy(20, 30, iterations=50)), out)
    assert site.end(run) == 0, site.errors(out)
    assert site.of("Delayed", out) == [], "it was started once"
    check_log(site, out)
