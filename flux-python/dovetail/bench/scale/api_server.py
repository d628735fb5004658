# SPDX-License-Identifier: LGPL-3.0-or-later
"""An API server and its store alone: no controllers, no scheduler, no kubelet, no nodes.

Inputs: a folder, the build of Kubernetes. Outputs: `Server`, with a kubeconfig. They are the
programs and the options of our own control nodes, but for what waits for controllers that are not
there. Invariant: both end with this process, however that ends, and listen on a loopback address
that no node has.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from usernetes_setup import node_record
from usernetes_setup.build import programs as build
from usernetes_setup.control import api_client
from usernetes_setup.node import components, monitor, namespaces

from dovetail.bench.harness import Progress
from dovetail.core.errors import WorkFailed
from dovetail.host import processes

NAME = "scale"
PATIENCE = 120.0  # seconds for the server to answer, on a machine that is busy with other things
GRACE = 10.0  # seconds for each to end by itself
WITHOUT = "--disable-admission-plugins=ResourceQuota,ServiceAccount"
"""What would refuse pods until controllers have counted quotas and made accounts."""


@dataclass(frozen=True)
class Server:
    """Where it is: `pids` are those of the store and of the server."""

    kubeconfig: Path
    url: str
    authority: str
    certificate: Path
    pids: tuple[int, int]

    def client(self) -> api_client.Client:
        """Its administrator."""
        return api_client.Client(self.url, self.authority, self.certificate)


@contextlib.contextmanager
def alone(folder: Path, progress: Progress) -> Iterator[Server]:
    """Start both in a new folder, whose path is short enough for sockets."""
    binaries = build.built() or build.build(progress)
    before = os.environ.get("DOVETAIL_STATE")
    os.environ["DOVETAIL_STATE"] = str(folder)  # where records of nodes are looked for
    with contextlib.ExitStack() as undo:
        undo.callback(_restore, before)
        folder.mkdir(mode=0o700)
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        address, held = namespaces.lease_loopback()
        undo.callback(held.close)
        port, taken = namespaces.lease_port(address)
        undo.callback(taken.close)
        node = node_record.Node(
            cluster=NAME, name=address, address=address, cpus="0", memory=0, network="host",
            user="", group="", binaries=str(binaries), ports={"server": port},
            server=f"https://{address}:{port}",
        )  # fmt: skip
        for name in ("log", "run"):
            (node.folder / name).mkdir(mode=0o700, parents=True)
        monitor.founding(node)
        pki = node_record.cluster_folder(NAME) / "pki"
        authority = (pki / "ca.crt").read_text()
        client = api_client.Client(node.server, authority, pki / "admin.crt")
        store = components.etcd(node)
        server = components.control_plane(node, client.ready)[0]
        server.words.append(WITHOUT)
        pids: list[int] = []
        for command in (store, server):
            until(command.ready, f"what {command.name} waits for", pids)
            pids.append(_start(node, command))
            undo.callback(_end, pids[-1])
        until(client.ready, "the API server", pids)
        kubeconfig = node_record.cluster_folder(NAME) / "kubeconfig"
        yield Server(kubeconfig, node.server, authority, pki / "admin.crt", (pids[0], pids[1]))


def _restore(before: str | None) -> None:
    if before is None:
        os.environ.pop("DOVETAIL_STATE", None)
    else:
        os.environ["DOVETAIL_STATE"] = before


def _start(node: node_record.Node, command: components.Command) -> int:
    path = f"{node.binaries}/bin"
    program = shutil.which(command.words[0], path=f"{path}:/usr/sbin:/usr/bin")
    if program is None:
        raise WorkFailed(f"there is no {command.words[0]}")
    environment = {"PATH": path, "HOME": str(node.folder), **command.environment}
    with open(node.folder / "log" / command.name, "wb") as log, open(os.devnull, "rb") as nothing:
        return processes.start_child(
            [program, *command.words[1:]], str(node.folder / command.folder), environment,
            {0: nothing.fileno(), 1: log.fileno(), 2: log.fileno()},
        )  # fmt: skip


def until(question: Callable[[], bool], what: str, pids: list[int]) -> None:
    """Wait for something; WorkFailed if it does not come, or one of these processes ends."""
    end = time.monotonic() + PATIENCE
    while not question():
        for pid in pids:
            if os.waitpid(pid, os.WNOHANG)[0]:
                pids.remove(pid)
                raise WorkFailed(f"{what}: a process that it needs has ended")
        if time.monotonic() > end:
            raise WorkFailed(f"{what} did not come in {PATIENCE:.0f} s")
        time.sleep(0.05)  # nothing can be waited on, as there is no server yet


def _end(pid: int) -> None:
    """Have a process end, and wait for it."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + GRACE
        while not os.waitpid(pid, os.WNOHANG)[0]:
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return
            time.sleep(0.02)
