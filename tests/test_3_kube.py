# SPDX-License-Identifier: LGPL-3.0-or-later
"""Step 3, up: the real Kubernetes in user space, as root and as an ordinary user.

As root both are tried, the user being one that exists only here; as a user only that user.
Every test ends by looking for what is left: processes, control groups, mounts, listeners,
leases, files.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from dovetail import process
from dovetail.usernetes import build, components, preflight
from others import WHY_NOT

pytestmark = pytest.mark.kube
SETUP = Path(__file__).resolve().parents[1] / "usernetes-setup"
USER, STRANGER = 15217, 15218
LIMIT = 120  # seconds that anything may take on a slow machine under load
ROOT = os.getuid() == 0
COMPONENTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler",
              "containerd", "kubelet", "steward")  # fmt: skip


def as_user(uid, *words):
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *words]


class Machine:
    """One user's view: verbs, kubectl, and what this user left."""

    def __init__(self, rootless, binaries):
        self.rootless = rootless
        self.uid = USER if rootless and ROOT else os.getuid()
        self.folder = Path(tempfile.mkdtemp(prefix="dk-", dir="/tmp"))
        self.binaries = binaries
        self.environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": str(self.folder),
            "DOVETAIL_STATE": str(self.folder / "s"), "DOVETAIL_CACHE": str(binaries.parents[1]),
        }  # fmt: skip
        if self.uid != os.getuid():
            os.chown(self.folder, self.uid, self.uid)
            subprocess.run([SETUP / "delegate", str(self.uid)], check=True)

    def words(self, verb, *words):
        line = [str(SETUP / verb), *words]
        return line if self.uid == os.getuid() else as_user(self.uid, *line)

    def verb(self, verb, *words, code=0):
        done = subprocess.run(self.words(verb, *words), env=self.environment,
                              capture_output=True, text=True, timeout=LIMIT)  # fmt: skip
        assert done.returncode == code, (verb, done.stdout, done.stderr)
        return done

    def up(self, *words):
        return json.loads(self.verb("up", "--json", "--timeout", str(LIMIT), *words).stdout)

    def kubectl(self, made, *words, text="", check=True):
        line = [str(self.binaries / "bin/kubectl"), "--kubeconfig", made["kubeconfig"], *words]
        done = subprocess.run(line, input=text, capture_output=True, text=True, timeout=LIMIT)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def get(self, made, *words):
        return json.loads(self.kubectl(made, "get", "-o", "json", *words))

    def pids(self, made, name):
        """Processes of a cluster's component, by the folder in its command line."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                program = line.split(" ")[0].rsplit("/", 1)[-1]
                here = program == name or (name == "steward" and "usernetes.steward" in line)
                if here and f"/{made['cluster']}/" in line and str(self.folder) in line:
                    found.append(int(folder.name))
        return found

    def left(self):
        """Everything of this user's clusters that is still here."""
        found = [str(path) for path in (self.folder / "s").glob("*")]
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line = (folder / "cmdline").read_bytes().decode(errors="replace")
                if not process.start_ticks(int(folder.name)):
                    continue  # a zombie that its parent has yet to collect holds nothing
                if str(self.folder) in line or (self.rootless and ROOT
                                                and folder.stat().st_uid == self.uid):  # fmt: skip
                    found.append(f"process {folder.name}: {line}")
        base = f"dovetail-{self.uid}"
        found += [str(p) for p in Path("/sys/fs/cgroup").glob(f"*/{base}/*") if p.is_dir()]
        if not self.rootless:
            found += [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/{base}")]
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        found += [line for line in mounts if str(self.folder) in line]
        listeners = Path("/proc/net/tcp").read_text().splitlines()
        ours = [line.split() for line in listeners[1:]]
        found += [" ".join(f) for f in ours if f[1][4:8] == "4D7F" and f[3] == "0A"]
        sockets = Path("/proc/net/unix").read_text().splitlines()
        found += [line for line in sockets if "@dovetail-127.77." in line]
        return found

    def nothing_left(self, limit=30):
        assert eventually(lambda: not self.left(), limit), self.left()

    def close(self):
        self.verb("down", "--all")
        if self.uid != os.getuid():
            subprocess.run([SETUP / "delegate", str(self.uid), "--remove"], check=True)
        shutil.rmtree(self.folder)


def eventually(question, limit=LIMIT):
    """Ask until the answer is yes; the last answer."""
    deadline = time.monotonic() + limit
    while not (answer := question()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return answer


@pytest.fixture(scope="module")
def binaries():
    """The build, where another user can read it too."""
    folder = build.build(lambda line: print(line, file=sys.stderr))
    top = Path(tempfile.mkdtemp(prefix="dk-cache-", dir="/tmp"))
    top.chmod(0o755)
    target = top / "kube" / folder.name
    target.parent.mkdir()
    try:
        shutil.copytree(folder, target, symlinks=True, copy_function=os.link)
    except OSError:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target, symlinks=True)
    yield target
    shutil.rmtree(top)


def modes():
    if not ROOT:
        return ["rootless"]
    return ["root"] if WHY_NOT else ["root", "rootless"]


@pytest.fixture(params=modes())
def machine(request, binaries):
    gaps = preflight.hard_gaps()
    if gaps:
        pytest.skip(f"cannot run here: {gaps[0]}")
    made = Machine(request.param == "rootless", binaries)
    print(f"as {request.param}", file=sys.stderr)
    yield made
    made.close()


@pytest.fixture
def any_machine(binaries):
    """One user is enough: an ordinary one."""
    if ROOT and WHY_NOT:
        pytest.skip(WHY_NOT)
    gaps = preflight.hard_gaps()
    if gaps:
        pytest.skip(f"cannot run here: {gaps[0]}")
    made = Machine(True, binaries)
    yield made
    made.close()


def pod(name, command, cpu="100m", **more):
    """A pod that runs the host's programs on the host's network."""
    folders = [path for path in ("/usr", "/bin", "/lib", "/lib64", "/etc") if Path(path).exists()]
    names = [f"v{number}" for number in range(len(folders))]
    spec = {
        "hostNetwork": True,
        "terminationGracePeriodSeconds": 1,
        "containers": [{
            "name": "main", "image": components.HOST, "imagePullPolicy": "Never",
            "command": ["/bin/sh", "-c", command],
            "resources": {"requests": {"cpu": cpu, "memory": "32Mi"}},
            "volumeMounts": [{"name": n, "mountPath": f, "readOnly": True}
                             for n, f in zip(names, folders)],
        }],
        "volumes": [{"name": n, "hostPath": {"path": f}} for n, f in zip(names, folders)],
        **more,
    }  # fmt: skip
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {"app": name}},
            "spec": spec,
        }
    )


def start(machine, made, name, command="exec sleep 1000", **more):
    """Make a pod and wait until it runs; what it is called by is also its label."""
    # The default service account comes a moment after the API server.
    assert eventually(lambda: machine.kubectl(
        made, "get", "serviceaccount", "default", "-o", "name", check=False))  # fmt: skip
    machine.kubectl(made, "apply", "-f", "-", text=pod(name, command, **more))
    machine.kubectl(made, "wait", "--for=condition=Ready", f"pod/{name}", f"--timeout={LIMIT}s")
    return machine.get(made, "pod", name)


def container_group(made, thing, controller):
    """The folder of a pod's container in one hierarchy, once it is there."""
    identity = thing["status"]["containerStatuses"][0]["containerID"].split("//")[1]
    top = Path(f"/sys/fs/cgroup/{controller}{made['group']}")
    return next(top.rglob(identity))


def test_a_cluster_runs_pods_resizes_them_and_leaves_nothing(machine):
    memory = (components.host_memory() // 2 >> 20) | 1  # odd, so written as Mi
    words = ("--name", "one", "--cpus", "1", "--memory", f"{memory}Mi")
    made = machine.up(*words)
    assert machine.up(*words) == made, "up again is the same cluster"
    assert Path(made["kubeconfig"]).stat().st_mode & 0o777 == 0o600
    listed = json.loads(machine.verb("status", "--json").stdout)
    assert [(entry["cluster"], entry["state"]) for entry in listed] == [("one", "ready")]

    offered = machine.get(made, "node", made["node"])["status"]["allocatable"]
    assert offered["cpu"] == "1"
    assert offered["memory"] == f"{memory}Mi"

    said = "echo cores $(grep Cpus_allowed_list /proc/self/status); exec sleep 1000"
    thing = start(machine, made, "first", said)
    cpu = made["cpus"]
    assert f"Cpus_allowed_list: {cpu}" in machine.kubectl(made, "logs", "first")
    assert machine.kubectl(made, "exec", "first", "--", "echo", "hello") == "hello\n"

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
    machine.nothing_left(limit=1)
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
    for user in users:
        user.folder.mkdir()
        user.nothing_left()
        user.folder.rmdir()


def test_a_component_that_is_killed_comes_back_and_pods_go_on(any_machine):
    made = any_machine.up("--name", "one")
    before = start(any_machine, made, "first")["status"]["containerStatuses"][0]
    for name in COMPONENTS:
        old = any_machine.pids(made, name)
        assert len(old) == 1, (name, old)
        os.kill(old[0], signal.SIGKILL)
        assert eventually(lambda: any_machine.pids(made, name) not in ([], old)), name  # noqa: B023
    assert eventually(lambda: any_machine.kubectl(made, "get", "--raw", "/readyz", check=False))
    start(any_machine, made, "second")
    after = any_machine.get(made, "pod", "first")["status"]["containerStatuses"][0]
    assert (after["containerID"], after["restartCount"]) == (before["containerID"], 0)
    any_machine.verb("down", "--name", "one")
    any_machine.nothing_left()


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
    machine.nothing_left(limit=1)


def record(made):
    return json.loads((Path(made["folder"]) / "node.json").read_text())


@pytest.mark.parametrize("victims", [["keeper"], ["supervisor"], ["keeper", "supervisor"]])
def test_nothing_is_left_when_a_part_is_killed(any_machine, victims):
    made = any_machine.up("--name", "one")
    start(any_machine, made, "first")
    parts = record(made)
    for name in victims:
        os.kill(parts[name], signal.SIGSTOP)  # so that neither can act on the other's death
    for name in victims:
        os.kill(parts[name], signal.SIGKILL)
    if len(victims) == 1:
        any_machine.nothing_left()  # whoever survives cleans up
    else:
        any_machine.verb("down", "--name", "one")
        any_machine.nothing_left(limit=1)


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
        caller.kill()
    any_machine.nothing_left()


def test_up_after_a_crash_of_everything_starts_anew(any_machine):
    parts = record(any_machine.up("--name", "one"))
    os.kill(parts["keeper"], signal.SIGSTOP)
    os.kill(parts["supervisor"], signal.SIGKILL)
    os.kill(parts["keeper"], signal.SIGKILL)
    listed = json.loads(any_machine.verb("status", "--json", code=1).stdout)
    assert [entry["state"] for entry in listed] == ["dead"]
    made = any_machine.up("--name", "one")
    assert any_machine.kubectl(made, "get", "--raw", "/readyz") == "ok"


def test_nodes_join_by_a_token_for_one_node_and_lost_nodes_are_replaced(any_machine):
    machine = any_machine
    made = machine.up("--name", "one")
    invitation = machine.folder / "join.json"
    machine.verb("join", "--name", "one", "--invite", str(invitation))
    assert invitation.stat().st_mode & 0o777 == 0o600
    secrets = ("get", "secrets", "-n", "kube-system", "-o", "name")
    assert "bootstrap-token" in machine.kubectl(made, *secrets)
    worker = json.loads(machine.verb("join", "--json", str(invitation)).stdout)
    assert len(machine.get(made, "nodes")["items"]) == 2
    assert eventually(lambda: "bootstrap-token" not in machine.kubectl(made, *secrets))
    thing = start(machine, made, "there", nodeName=worker["node"])
    assert thing["spec"]["nodeName"] == worker["node"]
    assert machine.kubectl(made, "exec", "there", "--", "echo", "hello") == "hello\n"

    os.kill(record(worker)["supervisor"], signal.SIGKILL)  # lost, without a word
    assert eventually(lambda: len(machine.get(made, "nodes")["items"]) == 1)
    refused = subprocess.run(
        machine.words("join", "--timeout", "8", str(invitation)), env=machine.environment,
        capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert refused.returncode == 1, "a token is good for one use"
    machine.verb("join", "--name", "one", "--invite", str(invitation))
    machine.verb("join", str(invitation))
    assert len(machine.get(made, "nodes")["items"]) == 2
    machine.verb("down", "--name", "one")
    machine.nothing_left(limit=1)


ATTEMPTS = """
import json, os, signal, socket, ssl, sys, urllib.error, urllib.request
made = json.load(sys.stdin)
got = []
context = ssl._create_unverified_context()
for url in made["urls"]:
    try:
        urllib.request.urlopen(url, context=context, timeout=20).read()
        got.append(url)
    except urllib.error.HTTPError as error:
        if error.code not in (401, 403, 404):
            got.append(f"{url} {error.code}")
    except OSError:
        pass
for path in made["files"]:
    try:
        os.listdir(path) if os.path.isdir(path) else open(path).read()
        got.append(path)
    except OSError:
        pass
for path in made["sockets"]:
    try:
        socket.socket(socket.AF_UNIX).connect(path)
        got.append(path)
    except OSError:
        pass
for pid in made["pids"]:
    try:
        os.kill(pid, signal.SIGTERM)
        got.append(pid)
    except OSError:
        pass
    for name in ("environ", "root", "fd", "mem"):
        try:
            path = f"/proc/{pid}/{name}"
            os.listdir(path) if os.path.isdir(path) else open(path).read(1)
            got.append(path)
        except OSError:
            pass
print(json.dumps(got))
"""


@pytest.mark.skipif(not ROOT, reason="only root can play another user")
def test_another_user_of_the_host_gets_nothing(machine):
    made = machine.up("--name", "one")
    start(machine, made, "first")
    parts, folder = record(made), Path(made["folder"])
    kubelet = f"https://{parts['address']}:{parts['ports']['kubelet']}"
    streams = f"http://{parts['address']}:{parts['ports']['stream']}"
    inside = [str(path) for path in folder.rglob("*") if path.is_file() or path.is_socket()]
    attempts = {
        "urls": [f"{made['server']}{path}" for path in
                 ("/api", "/version", "/readyz", "/healthz", "/metrics", "/api/v1/secrets")]
        + [f"{kubelet}{path}" for path in
           ("/pods", "/metrics", "/runningpods/", "/healthz", "/configz",
            "/run/default/first/main?cmd=id", "/logs/")]
        + [f"{streams}{path}" for path in ("/", "/exec/x", "/attach/x", "/portforward/x")],
        "files": [made["kubeconfig"], str(folder), str(folder.parents[1] / "pki"), *inside[:2000]],
        "sockets": [path for path in inside if Path(path).is_socket()],
        "pids": [parts["keeper"], parts["supervisor"],
                 *(pid for name in COMPONENTS for pid in machine.pids(made, name))],
    }  # fmt: skip
    assert attempts["sockets"]
    assert len(attempts["pids"]) == 2 + len(COMPONENTS)
    done = subprocess.run(as_user(STRANGER, "/usr/bin/python3", "-c", ATTEMPTS),
                          input=json.dumps(attempts), capture_output=True, text=True,
                          timeout=LIMIT)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_every_listener_is_bound_to_the_nodes_address(any_machine):
    made = any_machine.up("--name", "one")
    parts = record(made)
    inside = os.readlink(f"/proc/{parts['supervisor']}/ns/pid")
    sockets = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(folder / "ns/pid") == inside:
                for descriptor in (folder / "fd").iterdir():
                    target = os.readlink(descriptor)
                    if target.startswith("socket:["):
                        sockets.add(target[8:-1])
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                addresses.add(fields[1].split(":")[0])
    wanted = bytes(reversed([int(part) for part in parts["address"].split(".")])).hex().upper()
    assert addresses == {wanted}
