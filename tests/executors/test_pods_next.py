# SPDX-License-Identifier: LGPL-3.0-or-later
"""A pod that has one simulation after the other, of which none finds what others left.

Pods are namespaces: of processes, and of the folders where programs leave files.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from dovetail.executors.pods import messages
from dovetail.host import install_paths, processes
from support.local_runs import LIMIT, wait_for
from support.pod_processes import ADDRESSES, cluster, name_of  # noqa: F401

pytestmark = pytest.mark.unit

NAMESPACES = ("unshare", "--pid", "--ipc", "--mount", "--fork", "--mount-proc", "--kill-child")
OWN = """
set -e
for folder in /tmp /var/tmp
do
    mount --bind $folder /mnt
    mount -t tmpfs none $folder
    for name in $0
    do
        [ -d "/mnt/$name" ] || continue
        mkdir "$folder/$name"
        mount --bind "/mnt/$name" "$folder/$name"
    done
    umount /mnt
done
HOME=/tmp exec "$@"
"""
"""Shell that has folders for itself which others write to, but for those named in its $0."""


def beside(folder):
    """What of the two a pod cannot do without: the test's own folder, and perhaps this checkout."""
    needed = (folder, sys.prefix, install_paths.PACKAGES, Path(__file__))
    parts = (Path(path).resolve().parts for path in needed)
    return " ".join({top[top.index("tmp") + 1] for top in parts if "tmp" in top[1:3]})


@pytest.fixture
def pod(cluster):  # noqa: F811
    """A pod of the simulation `sim` that is to be there for `two` afterwards; both on node one."""
    if subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces for this user")
    cluster.agent()
    prefix = (*NAMESPACES, "sh", "-c", OWN, beside(cluster.directory))

    def start():
        made = cluster.entrypoint("sim", 0, "one", *prefix)
        cluster.until(messages.Pod, "sim")
        return made

    def run(name, script):
        config = cluster.config(name, ("sh", "-c", script), 1)
        cluster.hub.tell(messages.Run(name, config, [{"address": ADDRESSES[0], "ranks": 1}]))

    def hand_over():
        assert cluster.until(messages.Result, "sim").code == 0
        cluster.hub.tell(messages.End("sim", 0, "two"))

    def first(script):
        made = start()
        run("sim", script)
        hand_over()
        return made

    cluster.start, cluster.then, cluster.hand_over, cluster.first = start, run, hand_over, first
    return cluster


def entrypoint(pod, made):
    """The process that is the pod's first, as it is called outside."""
    found = processes.members(f"DOVETAIL_TEST={pod.directory}", made.pid)
    (first,) = (pid for pid in found if processes.parent(pid) == made.pid)
    return first


def supervisors(pod):
    marker = f"DOVETAIL_TEST={pod.directory}"
    return [pid for pid in processes.members(marker) if "mpi.supervisor" in name_of(pid)]


def test_the_next_simulation_runs_in_the_same_pod_under_the_same_supervisor(pod):
    made = pod.first("cat input; exec sleep 0.5")
    there = pod.until(messages.Pod, "two")
    assert (there.uid, there.group) == ("uid0", 0)
    assert there.used > 0.0
    (supervisor,) = supervisors(pod)
    wait_for(lambda: sorted(os.listdir(pod.session("one"))) == ["agent.sock", "owner", "two"])
    pod.then("two", "cat input; exit 3")
    result = pod.until(messages.Result, "two")
    assert (result.code, result.reason) == (3, "exit code 3: as delivered")
    assert pod.log("sim") == pod.log("two") == "as delivered\n"
    assert supervisors(pod) == [supervisor]
    pod.hub.tell(messages.End("two", 3))
    assert made.wait(LIMIT) == 3


def test_what_hides_from_its_simulation_and_what_came_from_outside_do_not_outlive_it(pod):
    """As by kubectl exec: it is nobody's child in the pod. The other has left its session."""
    made = pod.start()
    inside = ["nsenter", "-t", str(entrypoint(pod, made)), "-p", "-m", "sleep", "988"]
    with subprocess.Popen(inside) as guest:
        pod.then("sim", "setsid env -i sleep 987 & sleep 0.1")
        pod.hand_over()
        pod.until(messages.Pod, "two")
        assert guest.wait(LIMIT) in (-signal.SIGKILL, 128 + signal.SIGKILL)
    pod.then("two", "ls /proc/[0-9]*/cmdline | xargs -n 1 cat | tr '\\0' ' '")
    assert pod.until(messages.Result, "two").code == 0
    assert "sleep 98" not in pod.log("two")
    pod.hub.tell(messages.End("two", 0))
    assert made.wait(LIMIT) == 0


@pytest.mark.parametrize(
    "leave", ["touch /tmp/left", "touch /var/tmp/left", "touch $HOME/left", "ipcmk -M 4096"]
)
def test_a_pod_in_which_something_was_left_is_no_others(pod, leave):
    made = pod.first(leave)
    assert pod.until(messages.Lost, "two") == messages.Lost("two", 0, "uid0")
    assert made.wait(LIMIT) == 0


def test_a_pod_that_is_told_to_end_while_nobody_has_it_does_so(pod):
    made = pod.first("true")
    pod.until(messages.Pod, "two")
    os.kill(entrypoint(pod, made), signal.SIGTERM)
    assert made.wait(LIMIT) == 128 + signal.SIGTERM


def test_a_supervisor_that_dies_while_it_has_nothing_to_do_is_not_missed(pod):
    made = pod.first("true")
    pod.until(messages.Pod, "two")
    (supervisor,) = supervisors(pod)
    os.kill(supervisor, signal.SIGKILL)
    wait_for(lambda: not supervisors(pod))
    pod.then("two", "exit 4")
    assert pod.until(messages.Result, "two").code == 4
    pod.hub.tell(messages.End("two", 4))
    assert made.wait(LIMIT) == 4


def test_an_agent_that_comes_back_finds_the_pod_with_its_next_simulation(pod):
    made = pod.first("true")
    there = pod.until(messages.Pod, "two")
    pod.agents["one"].kill()
    pod.agents["one"].wait()
    pod.agent()
    assert pod.until(messages.Pod, "two") == there
    pod.then("two", "exit 5")
    assert pod.until(messages.Result, "two").code == 5
    pod.hub.tell(messages.End("two", 5))
    assert made.wait(LIMIT) == 5


def test_a_process_that_is_not_alone_with_its_simulation_has_no_other(cluster):  # noqa: F811
    """As in a pod that shares its processes with another's: whose is what is left?"""
    cluster.agent()
    cluster.launch("sim", "true")
    cluster.until(messages.Result, "sim")
    cluster.hub.tell(messages.End("sim", 0, "two"))
    assert cluster.entrypoints["sim", 0].wait(LIMIT) == 0
