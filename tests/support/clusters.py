# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the tests of user-space Kubernetes share: users, clusters, pods, what is left.

As root two users are tried, root and one that exists only here; as a user only that user.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from dovetail.host import processes
from usernetes_setup import node_record
from usernetes_setup.build import oci_image, programs
from usernetes_setup.node import cgroups
from usernetes_setup.preflight import report

from support.other_users import WHY_NOT

TOP = Path(__file__).resolve().parents[2]
SETUP = TOP / "usernetes-setup"
# Users that nobody has, another two for each run of the tests.
USER, STRANGER = 200_000 + os.getpid(), 10_000_000 + os.getpid()
LIMIT = 120  # seconds that anything may take on a slow machine under load
DOWN = 30  # seconds for `down`, which promises 10: so much only if it waits for what hangs
ROOT = os.getuid() == 0
COMPONENTS = ("etcd", "kube-apiserver", "kube-controller-manager", "containerd",
              "kubelet", "control")  # fmt: skip


TRIED = set()


def pytest_terminal_summary(terminalreporter):
    """Say as whom clusters ran: it depends on what the machine allows."""
    if TRIED:
        why = f", since {WHY_NOT}" if ROOT and WHY_NOT else ""
        terminalreporter.write_line(f"clusters ran: {' and '.join(sorted(TRIED))}{why}")


def pytest_sessionfinish(session):
    """A worker of pytest-xdist hands in as whom its clusters ran."""
    getattr(session.config, "workeroutput", {})["tried"] = sorted(TRIED)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_testnodedown(node):
    """Collect it, where the summary is written."""
    TRIED.update(getattr(node, "workeroutput", {}).get("tried", ()))


def as_user(uid, *words):
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *words]


class Machine:
    """One user's view: verbs, kubectl, and what this user left."""

    def __init__(self, rootless, binaries):
        self.rootless = rootless
        TRIED.add("rootless" if rootless else "as root")
        self.uid = USER if rootless and ROOT else os.getuid()
        self.folder = Path(tempfile.mkdtemp(prefix="dk-", dir="/tmp"))
        self.binaries = binaries
        self.nodes = set()
        self.networks = set()
        self.outside = self.outer_network()
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

    def note(self):
        """Remember the nodes and network namespaces that there are now: by them what is left is
        looked for."""
        for path in map(Path, glob.glob(f"{self.folder}/s/*/nodes/127.*")):  # some may just go
            self.nodes.add(path.name)
            with contextlib.suppress(OSError, ValueError):
                for pid in cgroups.processes(json.loads((path / "node.json").read_text())["group"]):
                    self.networks |= links(f"/proc/{pid}/ns", "net") - links("/proc/self/ns", "net")
        return self.nodes

    def outer_network(self):
        """Links, and tables of packet filters, of the network that this process is in."""
        listed = subprocess.run([self.binaries / "bin/nft", "list", "tables"], capture_output=True)
        tables = listed.stdout.decode().splitlines()  # none for a user, who could make none either
        with contextlib.suppress(OSError):
            tables += Path("/proc/net/ip_tables_names").read_text().splitlines()
        return {*os.listdir("/sys/class/net"), *tables}

    def verb(self, verb, *words, code=0):
        self.note()
        done = subprocess.run(self.words(verb, *words), env=self.environment,
                              capture_output=True, text=True,
                              timeout=DOWN if verb == "down" else LIMIT)  # fmt: skip
        self.note()
        assert code in (done.returncode, None), (verb, done.stdout, done.stderr)
        return done

    def end(self, *words):
        """Take down what a test leaves, again if a busy machine took longer than `down` waits."""
        said = []

        def down():
            self.note()
            done = subprocess.run(self.words("down", *words), env=self.environment,
                                  capture_output=True, text=True, timeout=LIMIT)  # fmt: skip
            said.append(done.stderr)
            return done.returncode == 0

        assert eventually(down), said

    def up(self, *words):
        """Start a cluster, which ends with this process, so also if that is interrupted."""
        usual = ("--json", "--timeout", str(LIMIT), "--owner", str(os.getpid()))
        return json.loads(self.verb("up", *usual, *words).stdout)

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
                line = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                program = line.split(" ")[0].rsplit("/", 1)[-1]
                here = program == name or (name == "control" and "usernetes_setup.control" in line)
                if here and f"/{made['cluster']}/" in line and str(self.folder) in line:
                    found.append(int(folder.name))
        return found

    def left(self):
        """Everything of this user's clusters that is still here."""
        found = []
        with contextlib.suppress(FileNotFoundError):  # it goes with the last of them
            found += [str(path) for path in (self.folder / "s").iterdir()]
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line = (folder / "cmdline").read_bytes().decode(errors="replace")
                if not processes.start_ticks(int(folder.name)):
                    continue  # a zombie that its parent has yet to collect holds nothing
                if str(self.folder) in line or (self.rootless and ROOT
                                                and folder.stat().st_uid == self.uid):  # fmt: skip
                    found.append(f"process {folder.name}: {line}")
            held = links(folder / "ns", "net") | links(folder / "fd", "*")
            found += [f"process {folder.name} holds {name}" for name in held & self.networks]
        # This user may have other clusters on this machine, which are none of our business.
        groups = [p for p in Path("/sys/fs/cgroup").glob(f"*/dovetail-{self.uid}") if p.is_dir()]
        for group in groups:
            inside = [path for path in group.iterdir() if path.is_dir()]
            ours = [path for path in inside if path.name.split(".", 2)[-1] in self.nodes]
            found += map(str, ours or ([] if inside or self.rootless else [group]))
        manager = f"user.slice/user-{self.uid}.slice/user@{self.uid}.service"  # version 2
        groups = Path("/sys/fs/cgroup").glob(f"{manager}/dovetail.*")
        found += [str(path) for path in groups if path.name.split(".", 2)[-1] in self.nodes]
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        found += [line for line in mounts if str(self.folder) in line]
        found += {line.split()[3] for line in mounts} & self.networks
        found += self.outer_network() - self.outside
        addresses = {bytes(map(int, reversed(n.split(".")))).hex().upper() for n in self.nodes}
        listeners = Path("/proc/net/tcp").read_text().splitlines()
        ours = [line.split() for line in listeners[1:]]
        found += [" ".join(f) for f in ours if f[1].split(":")[0] in addresses and f[3] == "0A"]
        sockets = Path("/proc/net/unix").read_text().splitlines()
        leases = [line.split("@dovetail-")[-1] for line in sockets]
        found += [name for name in leases if name.split(":")[0] in self.nodes]
        return found

    def nothing_left(self, limit=30):
        assert eventually(lambda: not self.left(), limit), self.left()

    def close(self):
        self.end("--all")
        self.nothing_left()
        if self.uid != os.getuid():
            subprocess.run([SETUP / "delegate", str(self.uid), "--remove"], check=True)
        shutil.rmtree(self.folder)


def below(folder):
    """All files below a folder, of which some may just go."""
    return [Path(top, name) for top, _, names in os.walk(folder) for name in names]


def links(folder, names):
    """Where the links in a folder lead, as far as they can be read."""
    found = set()
    with contextlib.suppress(OSError):
        for path in Path(folder).glob(names):
            with contextlib.suppress(OSError):
                found.add(os.readlink(path))
    return found


def eventually(question, limit=LIMIT):
    """Ask until the answer is yes; the last answer.

    A question that is a command takes CPU time from what it waits for, so there are pauses.
    """
    deadline = time.monotonic() + limit
    while True:
        asked = time.monotonic()
        answer = question()
        took = time.monotonic() - asked
        if answer or asked + took > deadline:
            return answer
        time.sleep(max(0.1, 4 * took))


@pytest.fixture(scope="session")
def binaries():
    """The build, where another user can read it too."""
    folder = programs.build(lambda line: print(line, file=sys.stderr))
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
    """As whom clusters can run here; an ordinary user last."""
    if not ROOT:
        return ["rootless"]
    return ["root"] if WHY_NOT else ["root", "rootless"]


@pytest.fixture(params=modes())
def machine(request, binaries):
    errors = report.errors()
    if errors:
        pytest.skip(f"cannot run here: {errors[0]}")
    made = Machine(request.param == "rootless", binaries)
    yield made
    made.close()


@pytest.fixture
def any_machine(binaries):
    """One user is enough: an ordinary one where that is possible."""
    errors = report.errors()
    if errors:
        pytest.skip(f"cannot run here: {errors[0]}")
    made = Machine(modes()[-1] == "rootless", binaries)
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
            "name": "main", "image": oci_image.HOST, "imagePullPolicy": "Never",
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


def own_address() -> str:
    """An address of this machine that is not loopback, or ""; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return ""


def container_group(made, thing, controller):
    """The folder of a pod's container in one hierarchy, once it is there."""
    identity = thing["status"]["containerStatuses"][0]["containerID"].split("//")[1]
    return next(groups_of(made, controller).rglob(identity))


def groups_of(made, controller):
    """The folder of a node's group, in one hierarchy of version 1 or in the only one."""
    return cgroups.ROOT / ("" if cgroups.unified() else controller) / made["group"][1:]


def record(made):
    """A node's own record: pids, ports."""
    return json.loads((Path(made["folder"]) / "node.json").read_text())


def node(**more):
    """A node that is only written down."""
    fields = {
        "cluster": "c", "name": "n", "address": "127.77.1.2", "cpus": "0", "memory": 1 << 30,
        "network": "host", "user": "u", "group": "/g", "binaries": "/b",
        "ports": {"server": 1, "kubelet": 2, "stream": 3},
    }  # fmt: skip
    return node_record.Node(**{**fields, **more})


@pytest.fixture(autouse=True)
def private_state(tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_STATE", str(tmp_path / "state"))
    return tmp_path
