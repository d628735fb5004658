# SPDX-License-Identifier: LGPL-3.0-or-later
"""Whatever is killed, nothing is left of it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.clusters import COMPONENTS, eventually, record, start
from support.other_users import needs_nobody
from usernetes_setup.node import cgroups

pytestmark = pytest.mark.kube


def test_a_component_that_is_killed_comes_back_and_pods_go_on(any_machine):
    made = any_machine.up("--name", "one")
    before = start(any_machine, made, "first")["status"]["containerStatuses"][0]
    for name in COMPONENTS:
        old = eventually(lambda: any_machine.pids(made, name))  # noqa: B023
        assert len(old) == 1, (name, old)
        os.kill(old[0], signal.SIGKILL)
        assert eventually(lambda: any_machine.pids(made, name) not in ([], old)), name  # noqa: B023
    assert eventually(lambda: any_machine.kubectl(made, "get", "--raw", "/readyz", check=False))
    start(any_machine, made, "second")
    after = any_machine.get(made, "pod", "first")["status"]["containerStatuses"][0]
    assert (after["containerID"], after["restartCount"]) == (before["containerID"], 0)
    any_machine.verb("down", "--name", "one")
    any_machine.nothing_left()


@pytest.mark.parametrize(
    ("network", "victims"),
    [("host", ["monitor"]), ("bridge", ["supervisor"]), ("bridge", ["monitor", "supervisor"])],
)
def test_nothing_is_left_when_a_part_is_killed(any_machine, network, victims):
    made = any_machine.up("--name", "one", "--network", network)
    start(any_machine, made, "first", hostNetwork=network == "host")
    any_machine.note()
    assert len(any_machine.networks) == (2 if network == "bridge" else 0), "the node's, the pod's"
    parts = record(made)
    for name in victims:
        os.kill(parts[name], signal.SIGSTOP)  # so that neither can act on the other's death
    for name in victims:
        os.kill(parts[name], signal.SIGKILL)
    if len(victims) == 1:
        any_machine.nothing_left()  # whoever survives cleans up
    else:
        any_machine.verb("down", "--name", "one")
        any_machine.nothing_left(limit=10)


@pytest.mark.parametrize(
    "part", [*COMPONENTS, "containerd-shim-runc-v2", "pause", "program", "monitor", "supervisor"]
)
def test_down_leaves_nothing_whichever_part_was_killed_just_before(any_machine, part):
    made = any_machine.up("--name", "one")
    start(any_machine, made, "first", f"exec sleep 1000{os.getpid()}")
    parts = {name: [pid] for name, pid in record(made).items() if name in ("monitor", "supervisor")}
    found = parts.get(part) or any_machine.pids(made, part)
    found = found or eventually(lambda: inside(made, part))  # it may not be that program yet
    assert len(found) == 1, found
    os.kill(found[0], signal.SIGKILL)
    any_machine.verb("down", "--name", "one")
    any_machine.nothing_left(limit=10)


@pytest.mark.parametrize("part", ["monitor", "supervisor"])
def test_down_does_not_wait_for_a_part_that_hangs(any_machine, part):
    made = any_machine.up("--name", "one")
    os.kill(record(made)[part], signal.SIGSTOP)
    any_machine.verb("down", "--name", "one")
    any_machine.nothing_left(limit=10)


@needs_nobody
def test_down_says_what_it_cannot_end_and_may_be_repeated(any_machine):
    made = any_machine.up("--name", "one")
    with subprocess.Popen(["sleep", "1000"]) as stranger:  # root's, so not the user's to kill
        try:
            for folder in cgroups.folders(made["group"]):
                (folder / "system/cgroup.procs").write_text(str(stranger.pid))
            said = any_machine.verb("down", "--name", "one", code=1).stderr
        finally:
            stranger.kill()
    assert "could not be removed" in said
    assert f"{made['group']}/system" in said
    any_machine.verb("down", "--name", "one")
    any_machine.nothing_left(limit=10)


def inside(made, part):
    """The pod's program, or the program that holds its namespaces."""
    word = {"program": f"1000{os.getpid()}", "pause": "/pause"}[part]
    found = []
    for pid in cgroups.processes(made["group"]):
        with contextlib.suppress(OSError):
            if word in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                found.append(pid)
    return found


def test_a_cluster_ends_with_its_owner(any_machine):
    with subprocess.Popen(["sleep", "1000"]) as owner:
        made = any_machine.up("--name", "one", "--owner", str(owner.pid))
        start(any_machine, made, "first")
        owner.kill()
    any_machine.nothing_left()


def test_nothing_is_left_when_up_itself_is_killed(any_machine):
    words = any_machine.words("up", "--name", "one")
    with subprocess.Popen(words, env=any_machine.environment, start_new_session=True) as caller:
        assert eventually(
            lambda: list((any_machine.folder / "s").glob("one/nodes/127*/run/etcd:0"))
        )
        assert any_machine.note()
        caller.kill()
    any_machine.nothing_left()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_whoever_holds_the_lock_is_killed_last(any_machine, how):
    parts = record(any_machine.up("--name", "one"))
    lock = any_machine.folder / "s" / "one.lock"
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        os.kill(parts["monitor"], how)  # if killed, the supervisor does its work
        assert eventually(lambda: not lock.with_suffix("").exists())
    any_machine.nothing_left()


def test_up_after_a_crash_of_everything_starts_anew(any_machine):
    parts = record(any_machine.up("--name", "one"))
    os.kill(parts["monitor"], signal.SIGSTOP)
    os.kill(parts["supervisor"], signal.SIGKILL)
    os.kill(parts["monitor"], signal.SIGKILL)

    def states():
        listed = json.loads(any_machine.verb("status", "--json", code=1).stdout)
        return [entry["state"] for entry in listed]

    assert eventually(lambda: states() == ["dead"]), states()
    made = any_machine.up("--name", "one")
    assert any_machine.kubectl(made, "get", "--raw", "/readyz") == "ok"
