# SPDX-License-Identifier: LGPL-3.0-or-later
"""Makes a node by upstream's verbs, watches over it, and ends with it.

Started by `up` and `join` as a service of the user's own service manager, since containers are
that manager's and outlive whatever ends a batch job: `python3 -m usernetes_setup.upstream.service
FOLDER`. Inputs: the record there, a socket beside it on which the verb listens. Outputs: lines to
the verb, of which the last begins with `=` when the node is ready or with `!` when it failed; a
node. Invariants: the leases are held here; when the owner or the verb (before `ok`) dies, or on
SIGTERM, it ends; what follows, whatever ended it, is the service's: `removal`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from base64 import b64decode
from pathlib import Path

from dovetail.core.errors import WorkFailed
from dovetail.host import processes
from dovetail.host.private_files import write_private

from usernetes_setup import node_record
from usernetes_setup.control import api_client
from usernetes_setup.upstream import engine, leases
from usernetes_setup.upstream.record import Record, here

SOCKET = "verb.sock"
JOIN = "join.json"
EVERY = 2.0  # seconds between two looks for nodes that joined
LONGEST = 3600.0  # seconds; the kernel takes no wait without an end
UNINITIALIZED = "node.cloudprovider.kubernetes.io/uninitialized"
SELF = ("kubectl", "--kubeconfig=/etc/kubernetes/kubelet.conf", "wait", "--for=condition=ready",
        "--timeout=5s")  # fmt: skip
"""How a worker asks about itself."""
BOOTED = r"""set -e
group=/sys/fs/cgroup
[ ! -f $group/cgroup.controllers ] || echo $$ >$group/init.scope/cgroup.procs
systemctl is-system-running --wait | grep -qxE 'running|degraded'
[ ! -f $group/cgroup.controllers ] || /kind/bin/create-kubelet-cgroup-v2.sh
"""
"""Waits for the node's services, and makes the groups that the kubelet makes as it starts.

With control groups version 2 a command of the engine's is in the node's top group until that has
groups with controllers. As long as one is there it cannot have any, and the kubelet cannot start:
not beside this one while systemd starts, and not beside kubeadm, which waits for it.
"""
CONTROL = "node-role.kubernetes.io/control-plane"


class Monitor:
    """One node's."""

    def __init__(self, record: Record, verb: socket.socket) -> None:
        self.record, self.verb = record, verb
        self.deadline = time.monotonic() + record.timeout
        wake = processes.signal_pipe()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        self.reasons = {wake: "asked to"}
        if record.owner:
            self.reasons[os.pidfd_open(record.owner)] = f"its owner, process {record.owner}, died"
        self.reasons[verb.fileno()] = "the command that started it died"

    def say(self, line: str) -> None:
        """To the verb, and into the log."""
        print(line, flush=True)
        with contextlib.suppress(OSError):
            self.verb.sendall(f"{line}\n".encode())

    def wait(self, seconds: float, *more: int) -> int:
        """Wait so long, an hour at most, or for a descriptor: that one, or 0. Raises Ended."""
        watched = [one for one in (*self.reasons, *more) if one >= 0]
        found, _, _ = select.select(watched, [], [], min(max(0.0, seconds), LONGEST))
        for one in found:
            if one == self.verb.fileno() and self.verb.recv(16) == b"ok\n":
                del self.reasons[one]
                self.verb.close()
            elif one in self.reasons:
                raise Ended(self.reasons[one])
            else:
                return int(one)
        return 0

    def run(self, child: subprocess.Popen[bytes], what: str) -> None:
        """Wait for a command of this node's making. Raises WorkFailed, Ended."""
        handle = os.pidfd_open(child.pid)
        try:
            while not self.wait(self.deadline - time.monotonic(), handle):
                if time.monotonic() > self.deadline:
                    raise WorkFailed(f"{what}: not done after {self.record.timeout:.0f} s")
            if code := child.wait():
                raise WorkFailed(f"{what}: exit code {code}")
        finally:
            os.close(handle)
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)  # with what it started
                child.wait()

    def verbs(self, *verbs: str) -> None:
        """Type upstream's verbs, one after the other."""
        for verb in verbs:
            self.say(f"make {verb}")
            self.run(engine.make(self.record, verb), f"make {verb}")

    def command(self, *words: str) -> None:
        """Run a command in the node."""
        child = subprocess.Popen(
            engine.inside(self.record, *words), stdin=subprocess.DEVNULL,
            env=engine.settings(self.record), start_new_session=True,
        )  # fmt: skip
        self.run(child, words[0])

    def until(self, what: str, *words: str) -> None:
        """Run a command in the node until it succeeds."""
        while True:
            with contextlib.suppress(WorkFailed):
                return self.command(*words)
            if time.monotonic() > self.deadline:
                raise WorkFailed(f"{what}: not after {self.record.timeout:.0f} s")
            self.wait(1.0)

    # --- What is done ---

    def make(self) -> None:
        """The container, with systemd and containerd in it."""
        self.verbs("up")
        self.say("waiting for the node's services")
        self.until("the node's services", "sh", "-c", BOOTED)

    def found(self) -> None:
        """A control node, which pods may run on too."""
        self.make()
        self.verbs("kubeadm-init", "install-flannel", "kubeconfig")
        text = (self.record.checkout / "kubeconfig").read_text()
        write_private(self.record.folder / "kubeconfig", text[text.index("apiVersion") :])
        client = api(self.record)
        self.say("waiting for the node to be ready")
        self.command("kubectl", "taint", "nodes", self.record.node, f"{CONTROL}:NoSchedule-")
        while not is_ready(client, self.record.node):
            if time.monotonic() > self.deadline:
                raise WorkFailed(f"the node is not ready after {self.record.timeout:.0f} s")
            self.wait(0.5)

    def join(self, command: str) -> None:
        """A worker, by the command that an invitation brought."""
        write_private(self.record.checkout / "join-command", command)
        self.make()
        self.verbs("kubeadm-join")
        (self.record.checkout / "join-command").unlink()
        self.say("waiting for the node to be ready")
        self.until("the node", *SELF, f"node/{self.record.node}")

    def watch(self) -> None:
        """See to nodes that join, until there is a reason to end. Raises Ended."""
        client = None if self.record.worker else api(self.record)
        while True:
            self.wait(EVERY if client else LONGEST)
            if client and any(is_new(one) for one in nodes(client)):
                with contextlib.suppress(WorkFailed, OSError):  # it is tried again
                    self.deadline = time.monotonic() + self.record.timeout
                    self.verbs("sync-external-ip")


class Ended(Exception):
    """There is a reason for the node to end."""


def api(record: Record) -> api_client.Client:
    """The API of a cluster that was founded here, as its administrator. Raises OSError."""
    text = (record.folder / "kubeconfig").read_text()
    found = dict(re.findall(r"([a-z-]+)-data: (\S+)", text))
    certificate = record.folder / "admin.crt"
    if not certificate.exists():
        write_private(certificate.with_suffix(".key"), b64decode(found["client-key"]).decode())
        write_private(certificate, b64decode(found["client-certificate"]).decode())
    authority = b64decode(found["certificate-authority"]).decode()
    return api_client.Client(record.server, authority, certificate)


def is_ready(client: api_client.Client, node: str) -> bool:
    """Whether the API says that the node is ready, and pods can be made."""
    try:
        found = client.call("GET", f"{api_client.NODES}/{node}", timeout=10.0)
        client.call("GET", f"{api_client.ACCOUNTS}/default", timeout=10.0)
    except (OSError, api_client.Refused, http.client.HTTPException):
        return False
    return api_client.condition(found, "Ready") == "True" and not is_new(found)


def nodes(client: api_client.Client) -> list[api_client.Object]:
    """All nodes of the cluster; none while it cannot be asked."""
    try:
        return list(client.call("GET", api_client.NODES, timeout=10.0)["items"])
    except (OSError, api_client.Refused, http.client.HTTPException):
        return []


def is_new(node: api_client.Object) -> bool:
    """Whether nobody has told yet where the node is reached from others."""
    return any(taint["key"] == UNINITIALIZED for taint in node["spec"].get("taints", []))


def main(folder: str) -> int:
    """Make the node and keep it until there is a reason to end it."""
    os.umask(0o077)
    os.environ["DOVETAIL_STATE"] = str(Path(folder).parent)
    record = here(Path(folder).name)
    if record is None:
        return 1
    verb = socket.socket(socket.AF_UNIX)
    verb.connect(f"{folder}/{SOCKET}")
    try:
        monitor = Monitor(record, verb)
        node_record.keep()
        held = leases.take(record)
        record.monitor, record.monitor_ticks = os.getpid(), processes.start_ticks(os.getpid())
        record.save()
        join = Path(folder) / JOIN
        if record.worker:
            command = json.loads(join.read_text())["command"]
            join.unlink()
            monitor.join(command)
        else:
            monitor.found()
        record.ready = True
        record.save()
        monitor.say("=ready")
        monitor.watch()
        del held
    except Ended as reason:
        print(f"node {record.node} ends: {reason}", flush=True)
        return 0
    except (OSError, ValueError, KeyError, WorkFailed) as error:
        print(f"node {record.node}: {error}", flush=True)
        with contextlib.suppress(OSError):
            verb.sendall(f"!{error}\n".encode())
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
