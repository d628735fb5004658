# SPDX-License-Identifier: LGPL-3.0-or-later
"""Devices on the real cluster: who asks gets them, nobody else does, and they are counted.

The devices are FUSE's and TUN's, under names of these tests' own so that every user may open them.
"""

from __future__ import annotations

import json
import os
import signal

import pytest
from support import clusters
from support.cluster_runs import made
from support.clusters import eventually, modes

THERE = all(map(os.path.exists, ("/dev/fuse", "/dev/net/tun")))
pytestmark = [
    pytest.mark.kube,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can make a device file"),
    pytest.mark.skipif(not THERE, reason="this machine has no /dev/fuse or no /dev/net/tun"),
]

ALONE = "mkdir ../../taken && sleep 1 && rmdir ../../taken"
"""Fails where another one does the same at that moment."""


@pytest.fixture(scope="module")
def files():
    """One device for one pod at a time, one that three may share."""
    minors = {"one": 229, "three": 200}  # of /dev/fuse and /dev/net/tun
    found = {name: f"/dev/dovetail-{os.getpid()}-{name}" for name in minors}
    for name, path in found.items():
        os.mknod(path, 0o020666, os.makedev(10, minors[name]))
        os.chmod(path, 0o666)
    yield found
    for path in found.values():
        os.unlink(path)


@pytest.fixture(scope="module")
def site(binaries, files):
    """A cluster that offers both, of an ordinary user where that is possible."""
    found = made(
        binaries, modes()[-1] == "rootless", "--devices", f"{files['one']},{files['three']}=3"
    )
    yield found
    found.close()


def resource(path):
    return f"dovetail/{path.strip('/').replace('/', '.')}"


def started(site, name, command, **limits):
    """A pod that asks for devices by its limits."""
    pod = json.loads(clusters.pod(name, command))
    pod["spec"]["containers"][0]["resources"]["limits"] = limits
    pod["spec"]["restartPolicy"] = "Never"
    # The default service account comes a moment after the API server.
    words = ("get", "serviceaccount", "default", "-o", "name")
    assert eventually(lambda: site.machine.kubectl(site.made, *words, check=False))
    site.machine.kubectl(site.made, "apply", "-f", "-", text=json.dumps(pod))


def removed(site, *names):
    site.machine.kubectl(site.made, "delete", "pod", "--wait", *names)


def phase(site, name):
    return site.machine.get(site.made, "pod", name)["status"].get("phase")


def said(site, name):
    """What a pod printed, once it has ended."""
    assert eventually(lambda: phase(site, name) in ("Succeeded", "Failed")), name
    return site.machine.kubectl(site.made, "logs", name).split()


def test_a_device_is_in_the_pod_that_asks_and_in_no_other(site, files):
    look_into_pods(site, files)


@pytest.mark.skipif(modes()[-1] == "root", reason="the other test is as root already")
def test_as_root_control_groups_keep_others_from_a_device(binaries):
    # What runc 1.1 lets every container open, TUN for one, is not kept from any.
    found = made(binaries, False, "--devices", "/dev/fuse")
    try:
        look_into_pods(found, {"one": "/dev/fuse"})
    finally:
        found.close()


def look_into_pods(site, files):
    """See what a pod with all devices has, and one without; also by a file of their own making."""
    look = f"""
        exec 2>/dev/null
        for path in {" ".join(files.values())}; do
            [ -e $path ] || echo none
            [ ! -e $path ] || {{ true 3<>$path && echo open || echo shut; }}
        done
        mknod /made c 10 229 && true 3<>/made && echo open || echo shut
        [ "$(ulimit -l)" = "$(ulimit -H -l)" ] && echo memory
    """
    started(site, "asks", look, **{resource(path): "1" for path in files.values()})
    started(site, "other", look)
    made = "shut" if site.machine.rootless else "open"
    assert said(site, "asks") == [*["open"] * len(files), made, "memory"]
    assert said(site, "other") == [*["none"] * len(files), "shut", "memory"]
    removed(site, "asks", "other")


def test_the_node_tells_how_many_there_are(site, files):
    told = site.machine.kubectl(site.made, "describe", "node")
    for path, number in ((files["one"], 1), (files["three"], 3)):
        lines = [line.split() for line in told.splitlines() if resource(path) in line]
        assert [f"{resource(path)}:", str(number)] in lines
        assert site.made["devices"][resource(path)] == number


def test_simulations_that_need_the_one_device_run_one_after_the_other(site, files):
    of = resource(files["one"])
    started(site, "holder", "exec sleep 1000", **{of: "1"})  # has it first
    assert eventually(lambda: phase(site, "holder") == "Running")
    beside = {"name": "beside", "ranks": 1, "command": ["test", "!", "-e", files["one"]]}
    opens = ["sh", "-c", f"exec 3<>{files['one']} && {ALONE}"]
    wanted = {"ranks": 1, "command": opens, "devices": {files["one"]: 1}}
    run = site.start(site.plan({"name": "dev", "count": 2, **wanted}, beside), "turns")
    why = site.until(lambda: site.of("Delayed", "turns"), "turns")[0]["why"]
    assert why == f"a rank group asks for 1 {of}, and at most 0 are free on a node"
    removed(site, "holder", "--now")
    assert site.end(run) == 0, site.errors("turns")
    assert site.states("turns") == {"dev-1": "done", "dev-2": "done", "beside": "done"}
    assert {one["restarts"] for one in site.summary("turns")["simulations"]} == {0}
    notes = [one["why"] for one in site.of("Note", "turns")]
    assert f"dev-2 waits for 1 of {files['one']}, of which 0 of 1 are free" in notes
    site.nothing_left()


def test_a_device_that_no_node_has_is_refused_before_anything_starts(site, files):
    plan = site.plan({"ranks": 1, "command": ["true"], "devices": {files["three"]: 4}})
    assert site.end(site.start(plan, "refused")) == 2
    (line,) = site.errors("refused").splitlines()
    assert f"asks for 4 of the device {files['three']} for each pod, and on https://" in line
    assert "the node with most of it has 3; see Devices in" in line
    assert not (site.folder / "refused").exists()
    assert site.left() == []


def test_no_other_node_on_the_machine_offers_what_one_pod_at_a_time_may_have(site, files):
    words = ("--name", "two", "--devices", files["one"])
    told = site.machine.verb("up", *words, code=1).stderr
    assert f"{files['one']}: another node on this machine offers it already" in told


def test_devices_are_offered_again_by_a_kubelet_that_starts_again(site, files):
    def offered():
        (node,) = site.machine.get(site.made, "nodes")["items"]
        return node["status"]["allocatable"].get(resource(files["three"]))

    assert offered() == "3"
    (old,) = site.machine.pids(site.made, "kubelet")
    (plugin,) = site.machine.pids(site.made, "offer-devices")
    os.kill(old, signal.SIGKILL)
    assert eventually(lambda: site.machine.pids(site.made, "kubelet") not in ([], [old]))
    assert eventually(lambda: site.machine.pids(site.made, "offer-devices") not in ([], [plugin]))
    assert eventually(lambda: offered() == "3")

    def admitted():
        """A kubelet refuses for good what comes before the plugin that it heard of has answered."""
        opens = f"true 3<>{files['three']} && echo open"
        started(site, "again", opens, **{resource(files["three"]): "3"})
        assert eventually(lambda: phase(site, "again") in ("Succeeded", "Failed"))
        status = site.machine.get(site.made, "pod", "again")["status"]
        if status.get("reason") != "UnexpectedAdmissionError":
            return True
        removed(site, "again")
        return False

    assert eventually(admitted)
    assert said(site, "again") == ["open"]
    removed(site, "again")
