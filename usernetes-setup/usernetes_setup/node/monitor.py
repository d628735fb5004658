# SPDX-License-Identifier: LGPL-3.0-or-later
"""Watches one node from the outside: makes what it needs before, removes it again.

Started by `up` and `join` as `python3 -m usernetes_setup.node.monitor NODE-FOLDER CHANNEL`,
detached from the terminal.
Inputs: `node.json`; a channel to the verb, on which it writes what failed, and reads `ok` once
the verb is content. Invariants: the leases of cores, address, ports and devices are held here
and by the supervisor, and so end with both; when the owner, the supervisor or the verb (before
`ok`) dies, or on SIGTERM, the node is removed; nothing of it is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from select import PIPE_BUF
from typing import IO

from dovetail.host import processes
from dovetail.host.install_paths import package_environment
from dovetail.host.private_files import write_private
from dovetail.host.self_signed import self_signed

from usernetes_setup.control import certificates, resource_metrics
from usernetes_setup.node import (
    bridge_network,
    carrier,
    cgroups,
    components,
    core_leases,
    namespaces,
    removal,
    supervisor,
)
from usernetes_setup.node_record import (
    Node,
    cluster_folder,
    keep,
    read,
    root,
    wait_unlocked,
)


def lease(node: Node) -> list[socket.socket]:
    """Take the node's cores, ports and devices, and its address if that is a loopback one."""
    cores, held = core_leases.take(components.numbers(node.cpus), node.wanted)
    node.cpus = components.listed(cores)
    if not node.address:
        node.address = node.name if node.name.startswith("127.") else ""
        node.address, socket_ = namespaces.lease_loopback(node.address)
        if node.name.startswith("new-"):
            node.name = node.address
        held.append(socket_)
    wanted = {"kubelet": node.address, "stream": components.stream_address(node)}
    if node.control:
        wanted.update({"server": node.address, "metrics": node.address})
    for name, address in wanted.items():
        node.ports[name], socket_ = namespaces.lease_port(address)
        held.append(socket_)
    if node.control:
        node.server = f"https://{node.address}:{node.ports['server']}"
    return held + lease_devices(node)


def lease_devices(node: Node) -> list[socket.socket]:
    """Take what one pod at a time may have, so that no other node here offers it as well.

    Raises OSError where that was asked for and another has it; else it is left out.
    """
    held = []
    for name, offer in list(node.devices.items()):
        free = []
        for unit in offer["units"]:
            taken = namespaces.lease(f"device-{unit[0]}") if offer["each"] == 1 else None
            if taken is None and offer["each"] == 1:
                if offer["asked"]:
                    raise OSError(f"{unit[0]}: another node on this machine offers it already")
                continue
            held += [taken] if taken else []
            free.append(unit)
        offer["units"] = free
        if not free:
            del node.devices[name]
    return held


def founding(node: Node) -> None:
    """Everything in `pki/`, and the administrator's kubeconfig."""
    folder = cluster_folder(node.cluster) / "pki"
    folder.mkdir(mode=0o700, exist_ok=True)
    certificates.authority(folder, node.cluster)
    inside = node.address if node.network == "host" else components.CONTROL
    names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost"]
    this = f"/O=system:nodes/CN=system:node:{node.name}"
    servers = {
        "server": ("/CN=kube-apiserver", [*names, *{node.address, inside, "10.96.0.1"}]),
        f"node-{node.name}": (this, [node.name, inside]),
        "metrics": (f"/CN={resource_metrics.SERVICE}", [resource_metrics.NAME]),
    }
    clients = {
        "admin": "/O=system:masters/CN=dovetail-admin",
        "manager": "/CN=system:kube-controller-manager",
        "scheduler": "/CN=system:kube-scheduler",
        "node": this,
        "kubelet-client": "/CN=dovetail-kubelet-client",
        "front-proxy": f"/CN={resource_metrics.ASKER}",
    }
    if node.network == "bridge":
        clients.update({"proxy": "/CN=system:kube-proxy", "dns": "/CN=dovetail-dns"})
    internal = f"https://{inside}:{node.ports['server']}"
    with (
        ThreadPoolExecutor() as together
    ):  # dozens of short commands, one after the other: a second
        work = [together.submit(certificates.certificate, folder, *(name, *more))
                for name, more in servers.items()]  # fmt: skip
        work += [
            together.submit(certificates.certificate, folder, *pair) for pair in clients.items()
        ]
        for done in work:
            done.result()
    for name in clients:
        user = {"crt": str(folder / f"{name}.crt"), "key": str(folder / f"{name}.key")}
        certificates.kubeconfig(folder / f"{name}.conf", internal, folder / "ca.crt", user)
    certificates.key(folder, "accounts")
    certificates.public_key(folder, "accounts")
    user = {"crt": str(folder / "admin.crt"), "key": str(folder / "admin.key")}
    kubeconfig = cluster_folder(node.cluster) / "kubeconfig"
    certificates.kubeconfig(kubeconfig, node.server, folder / "ca.crt", user)
    if "carrier" in node.ports:
        carrier.found(node)


def joining(node: Node) -> None:
    """What a worker has instead: the authority from the join file."""
    content = json.loads(node.joined)
    node.joined = "yes"  # the token is used once, by the verb, and not kept in the record
    write_private(node.folder / "ca.crt", content["authority"])
    if node.network == "bridge":
        carrier.join(node, content["carrier"])


def launch(
    node: Node, sockets: bridge_network.Outside | None, verb: socket.socket
) -> tuple[int, int, IO[str]]:
    """Start the supervisor as process 1 of new namespaces.

    Returns its pid, our pipe to it, and one from it, on which it says why it ends unasked.
    """
    reading, writing = os.pipe()
    answer_in, answer_out = os.pipe()
    processes.adopt_orphans()
    between = os.fork()
    if between == 0:
        try:
            os.close(writing)
            verb.close()
            cgroups.enter(f"{node.group}/system")
            ids = namespaces.Ids.ROOT
            if os.getuid() != 0:
                ids = namespaces.enter_user_namespace(node.user)
            flags = namespaces.NEWNS | namespaces.NEWPID | namespaces.NEWIPC
            namespaces.unshare(flags | (namespaces.NEWNET if node.network == "bridge" else 0))
            pid = os.fork()
            if pid:
                os.write(answer_out, f"{pid}\n".encode())
                os._exit(0)
            os.setsid()
            tunnel = bridge_network.enter(node, sockets) if sockets else -1
            supervisor.serve(node, reading, ids, sockets, tunnel)
        except BaseException as error:
            why = " ".join(str(error).split()) or type(error).__name__
            with contextlib.suppress(OSError):
                os.write(answer_out, f"{why}\n".encode()[:PIPE_BUF])
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(reading)
    os.close(answer_out)
    answer = os.fdopen(answer_in, errors="replace")
    text = answer.readline().strip()
    os.waitpid(between, 0)
    if not text.isdigit():
        raise OSError(text or "no namespaces; see `dovetail doctor`")
    return int(text), writing, answer


def tidy(cluster: str) -> None:
    """Remove what a verb that holds the lock would remove at its end, should it be killed.

    In a process of its own, since the verb may wait for ours to end.
    """
    if os.fork() == 0:
        os.closerange(3, 4096)  # above all the leases
        wait_unlocked(cluster)
        os._exit(0)


def watch(node: Node, last_words: IO[str], verb: socket.socket) -> str:
    """Wait for a reason to end the node, of which its supervisor may have said more."""
    wake_in = processes.signal_pipe()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    inside = os.pidfd_open(node.supervisor)
    reasons = {inside: "its supervisor died", wake_in: "asked to"}
    if node.owner:
        reasons[os.pidfd_open(node.owner)] = f"its owner, process {node.owner}, died"
    poll = select.poll()
    for descriptor in [*reasons, verb.fileno()]:
        poll.register(descriptor, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == inside:
                why = last_words.readline().strip()
                return f"{reasons[inside]}{why and ': '}{why}"
            if descriptor in reasons:
                return reasons[descriptor]
            said = b""
            with contextlib.suppress(ConnectionResetError):  # it died before it read what we said
                said = verb.recv(16)
            if said != b"ok\n":
                return "the command that started it died"
            poll.unregister(verb)
            verb.close()


def main(folder: str, verb: int) -> int:
    """Keep the node until there is a reason to end it."""
    os.umask(0o077)
    node = read(Path(folder) / "node.json")
    channel = socket.socket(fileno=verb)
    os.environ["DOVETAIL_STATE"] = str(root())  # inside, this user is root and has another path
    sockets = None
    try:
        held = lease(node)
        node.group = cgroups.group_of(node.cluster, node.name)
        if Path(folder) != node.folder:  # its name was not known before its address
            Path(folder).rename(node.folder)
        for name in ("log", "run"):
            (node.folder / name).mkdir(mode=0o700, exist_ok=True)
        if node.network == "bridge":
            sockets = bridge_network.outside(node)
        founding(node) if node.control else joining(node)
        self_signed(node.folder, "stream", components.stream_address(node))
        node.monitor, node.monitor_ticks = os.getpid(), processes.start_ticks(os.getpid())
        node.save()
        cgroups.make(node.group, node.cpus)
        node.supervisor, _pipe, last_words = launch(node, sockets, channel)
        node.supervisor_ticks = processes.start_ticks(node.supervisor)
        node.save()
        if sockets:
            bridge_network.let_out(sockets)
        keep()
        channel.sendall(f"{node.name}\n".encode())
    except Exception as error:
        with contextlib.suppress(OSError):
            channel.sendall(f"!{error}\n".encode())
        with contextlib.suppress(OSError):  # the log's disk may be full
            traceback.print_exc()
        removal.from_outside(node)
        tidy(node.cluster)
        return 1
    reason = watch(node, last_words, channel)
    with contextlib.suppress(OSError):  # on a full disk it is removed too
        print(f"node {node.name} ends: {reason}", flush=True)
    with contextlib.suppress(OSError):  # the verb is not there, or content
        channel.sendall(f"!{reason}\n".encode())
    left = removal.from_outside(node)
    tidy(node.cluster)
    del held
    return 1 if left else 0


@dataclass
class Handle:
    """A monitor that this process started, and our end of its channel."""

    process: subprocess.Popen[bytes]
    channel: socket.socket

    def answer(self) -> str:
        """The node's name once it runs, or `!` and what failed; then `!` and why it ended."""
        line = b""
        with contextlib.suppress(ConnectionResetError):
            while not line.endswith(b"\n") and (more := self.channel.recv(1)):
                line += more
        return line.decode(errors="replace").strip() or "!its monitor died"


def start(folder: Path) -> Handle:
    """Start a monitor in the background for the node that is described in the folder."""
    ours, theirs = socket.socketpair()
    # It and the helpers among the components must find this package from anywhere.
    environment = {**package_environment(), "DOVETAIL_STATE": str(root())}  # from anywhere, too
    log = os.open(folder / "monitor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    command = [
        sys.executable,
        "-m",
        "usernetes_setup.node.monitor",
        str(folder),
        str(theirs.fileno()),
    ]
    if scope := cgroups.scope():
        command = [*scope, *command]
        environment.update(cgroups.scope_environment())
    started = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True,
        pass_fds=[theirs.fileno()], env=environment,
    )  # fmt: skip
    os.close(log)
    theirs.close()
    return Handle(started, ours)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
