# SPDX-License-Identifier: LGPL-3.0-or-later
"""The real Kubernetes in user space, as root and as an ordinary user.

Every test ends by looking for what is left: processes, control groups, mounts, listeners,
leases, files.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from support.clusters import (
    LIMIT,
    ROOT,
    Machine,
    container_group,
    eventually,
    modes,
    pod,
    record,
    start,
)
from usernetes_setup.node import components

pytestmark = pytest.mark.kube


def test_a_cluster_runs_pods_resizes_them_and_leaves_nothing(machine):
    memory = (components.host_memory() // 2 >> 20) | 1  # odd, so written as Mi
    words = ("--name", "one", "--cpus", "1", "--memory", f"{memory}Mi")
    made = machine.up(*words)
    assert machine.up(*words) == made, "up again is the same cluster"
    assert Path(made["kubeconfig"]).stat().st_mode & 0o777 == 0o600

    def listed():
        done = machine.verb("status", "--json", code=None)
        found = [(entry["cluster"], entry["state"]) for entry in json.loads(done.stdout)]
        return found, done.returncode

    assert eventually(lambda: listed() == ([("one", "ready")], 0)), listed()
    ageing = subprocess.run(["flock", "-n", machine.folder / "s", "true"])
    assert ageing.returncode == 1, "systemd-tmpfiles would take the folder for forgotten"

    offered = machine.get(made, "node", made["node"])["status"]["allocatable"]
    assert offered["cpu"] == "1"
    assert offered["memory"] == f"{memory}Mi"

    said = "echo cores $(grep Cpus_allowed_list /proc/self/status); exec sleep 1000"
    thing = start(machine, made, "first", said)
    cpu = made["cpus"]
    assert eventually(
        lambda: f"Cpus_allowed_list: {cpu}" in machine.kubectl(made, "logs", "first"))  # fmt: skip
    assert machine.kubectl(made, "exec", "first", "--", "echo", "hello") == "hello\n"
    log = (Path(made["folder"]) / "log/controller-manager").read_text()
    assert "Starting Kubernetes Scheduler" in log
    early = [line for line in log.splitlines() if "system:kube-scheduler" in line]
    assert not early, "it asked for what it may not see yet"

    shares = container_group(made, thing, "cpu") / "cpu.shares"
    assert shares.read_text() == "102\n"
    change = {
        "spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": "500m"}}}]}
    }
    machine.kubectl(made, "patch", "pod", "first", "--subresource", "resize",
                    "--patch", json.dumps(change))  # fmt: skip
    assert eventually(lambda: shares.read_text() == "512\n")
    again = machine.get(made, "pod", "first")["status"]["containerStatuses"][0]
    assert again["restartCount"] == 0
    assert again["containerID"] == thing["status"]["containerStatuses"][0]["containerID"]

    machine.verb("down", "--name", "one")
    machine.nothing_left(limit=10)
    machine.verb("down", "--name", "one")


def test_clusters_of_two_users_on_one_host_never_collide(binaries):
    users = [Machine(mode == "rootless", binaries) for mode in modes()]
    made = [(user, user.up("--name", name)) for user in users for name in ("a", "b")]
    assert len({entry["server"] for _, entry in made}) == len(made)
    for user, entry in made:
        names = [node["metadata"]["name"] for node in user.get(entry, "nodes")["items"]]
        assert names == [entry["node"]]
    first, entry = made[0]
    first.verb("down", "--name", "a")
    for user, other in made[1:]:
        assert user.kubectl(other, "get", "--raw", "/readyz") == "ok"
    for user in users:
        user.close()


FETCH = """
import ssl, sys, urllib.error, urllib.request
try:
    context = ssl._create_unverified_context()
    print(urllib.request.urlopen(sys.argv[1], timeout=20, context=context).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


def test_on_a_bridge_pods_reach_services_and_the_api_by_their_addresses(machine):
    made = machine.up("--name", "one", "--network", "bridge")
    server = "cd /tmp && exec /usr/bin/python3 -m http.server 8000"
    first = start(machine, made, "server", server, hostNetwork=False)
    start(machine, made, "client", hostNetwork=False)
    assert first["status"]["podIP"].startswith("10.244.0.")
    machine.kubectl(made, "expose", "pod", "server", "--port", "80", "--target-port", "8000")
    service = machine.get(made, "service", "server")["spec"]["clusterIP"]

    def fetch(url):
        words = ("exec", "client", "--", "/usr/bin/python3", "-c", FETCH, url)
        return machine.kubectl(made, *words, check=False).strip()

    assert eventually(lambda: fetch(f"http://{service}/") == "200")
    assert eventually(lambda: fetch("https://10.96.0.1/api") == "401")
    machine.verb("down", "--name", "one")
    machine.nothing_left(limit=10)


def admitted(invitation):
    """Whether the token of a join file still gets in."""
    header = {"Authorization": f"Bearer {invitation['token']}"}
    request = urllib.request.Request(f"{invitation['server']}/version", headers=header)
    context = ssl.create_default_context(cadata=invitation["authority"])
    try:
        status = urllib.request.urlopen(request, context=context, timeout=LIMIT).status
    except urllib.error.HTTPError as error:
        status = error.code
    assert status in (200, 401)
    return status == 200


def test_nodes_join_by_a_token_for_one_node_and_lost_nodes_are_replaced(any_machine):
    machine = any_machine
    made = machine.up("--name", "one")
    invitation = machine.folder / "join.json"
    machine.verb("join", "--name", "one", "--invite", str(invitation))
    assert invitation.stat().st_mode & 0o777 == 0o600
    assert eventually(lambda: admitted(json.loads(invitation.read_text())))
    secrets = ("get", "secrets", "-n", "kube-system", "-o", "name")
    assert "bootstrap-token" in machine.kubectl(made, *secrets)
    worker = json.loads(machine.verb("join", "--json", str(invitation)).stdout)
    assert json.loads(machine.verb("join", "--json", str(invitation)).stdout) == worker, "again"
    assert len(machine.get(made, "nodes")["items"]) == 2
    assert eventually(lambda: "bootstrap-token" not in machine.kubectl(made, *secrets))
    thing = start(machine, made, "there", nodeName=worker["node"])
    assert thing["spec"]["nodeName"] == worker["node"]
    assert machine.kubectl(made, "exec", "there", "--", "echo", "hello") == "hello\n"

    (control,), kubelets = machine.pids(made, "control"), machine.pids(made, "kubelet")
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in kubelets}
    (kubelet,) = [pid for pid, line in lines.items() if worker["folder"] in line]
    os.kill(kubelet, signal.SIGSTOP)  # away
    assert eventually(lambda: len(machine.get(made, "nodes")["items"]) == 1)
    os.kill(control, signal.SIGKILL)  # as it ends where the API server failed
    os.kill(kubelet, signal.SIGCONT)
    assert eventually(lambda: len(machine.get(made, "nodes")["items"]) == 2)

    os.kill(record(worker)["supervisor"], signal.SIGKILL)  # lost, without a word
    assert eventually(lambda: len(machine.get(made, "nodes")["items"]) == 1)
    refused = subprocess.run(
        machine.words("join", "--timeout", "8", str(invitation)), env=machine.environment,
        capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert refused.returncode == 2, "a token is good for one use"
    assert "has expired, or was used" in refused.stderr
    machine.verb("join", "--name", "one", "--invite", str(invitation))
    machine.verb("join", str(invitation))
    assert len(machine.get(made, "nodes")["items"]) == 2

    machine.verb("join", "--name", "one", "--invite", str(invitation), "--valid", "1")
    assert eventually(lambda: not admitted(json.loads(invitation.read_text())))
    machine.verb("down", "--name", "one")
    machine.nothing_left(limit=10)


@pytest.mark.skipif(not ROOT, reason="only root mounts")
def test_pods_see_what_the_machine_mounts_once_the_cluster_runs(any_machine):
    """As homes that are mounted when somebody looks."""
    homes = any_machine.folder / "homes"
    thing = json.loads(pod("sees", "test -e /homes/late/there && exec sleep 1000"))
    (container,) = thing["spec"]["containers"]
    thing["spec"]["volumes"].append({"name": "homes", "hostPath": {"path": str(homes)}})
    container["volumeMounts"].append({"name": "homes", "mountPath": "/homes"})
    with contextlib.ExitStack() as unmounted:

        def mount(*words):
            subprocess.run(["mount", *words], check=True)
            unmounted.callback(subprocess.run, ["umount", "--lazy", words[-1]], check=True)

        (homes / "late").mkdir(parents=True)
        mount("--bind", homes, homes)
        subprocess.run(["mount", "--make-shared", homes], check=True)  # as systemd has all
        made = any_machine.up("--name", "one")
        mount("-t", "tmpfs", "later", homes / "late")
        (homes / "late/there").touch()
        any_machine.kubectl(made, "apply", "-f", "-", text=json.dumps(thing))
        ready = ("wait", "--for=condition=Ready", "pod/sees", f"--timeout={LIMIT}s")
        any_machine.kubectl(made, *ready)


@pytest.mark.skipif(not ROOT, reason="only root mounts")
def test_cron_jobs_have_time_zones_on_a_machine_that_has_none(any_machine, monkeypatch):
    zones, words = "/usr/share/zoneinfo", any_machine.words
    hide = f'test ! -d {zones} || mount -t tmpfs none {zones}; exec "$@"'
    hidden = ["unshare", "--mount", "sh", "-c", hide, "-"]
    monkeypatch.setattr(any_machine, "words", lambda *more: [*hidden, *words(*more)])
    made = any_machine.up("--name", "one")
    template = {"spec": {**json.loads(pod("x", "true"))["spec"], "restartPolicy": "Never"}}
    spec = {"schedule": "0 3 * * *", "timeZone": "Europe/Berlin", "jobTemplate": {
        "spec": {"template": template}}}  # fmt: skip
    thing = {"apiVersion": "batch/v1", "kind": "CronJob", "metadata": {"name": "n"}, "spec": spec}
    any_machine.kubectl(made, "apply", "-f", "-", text=json.dumps(thing))


def test_a_cluster_runs_where_a_process_may_have_few_addresses(any_machine, monkeypatch):
    """As on login nodes, by `ulimit -v`."""
    few, words = ["prlimit", f"--as={6 << 30}"], any_machine.words
    monkeypatch.setattr(any_machine, "words", lambda *more: [*few, *words(*more)])
    start(any_machine, any_machine.up("--name", "one"), "runs")


@pytest.mark.skipif(modes() != ["root", "rootless"], reason="root mounts, for an ordinary user")
def test_pods_run_where_no_programs_may_be_executed_as_tmp_often_is_mounted(any_machine):
    state = any_machine.folder / "s"
    state.mkdir()
    options = f"noexec,nosuid,nodev,size=2g,mode=700,uid={any_machine.uid},gid={any_machine.uid}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", state], check=True)
    try:
        start(any_machine, any_machine.up("--name", "one"), "runs")
        any_machine.end("--name", "one")
    finally:
        subprocess.run(["umount", "--lazy", state], check=True)
        state.rmdir()


def keys(uid):
    """How many the kernel holds for a user."""
    rows = [line.split() for line in Path("/proc/key-users").read_text().splitlines()]
    return sum(int(row[3].partition("/")[0]) for row in rows if row[0] == f"{uid}:")


@pytest.mark.skipif("rootless" not in modes(), reason="root may have any number")
def test_pods_take_no_keys_of_which_an_ordinary_user_has_200(any_machine):
    made = any_machine.up("--name", "one")
    before = keys(any_machine.uid)
    start(any_machine, made, "runs")
    assert keys(any_machine.uid) == before
