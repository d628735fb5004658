# SPDX-License-Identifier: LGPL-3.0-or-later
"""Process 1 of a node: starts every component, and again when one dies.

Run by the monitor inside the node's fresh namespaces. Inputs: `node.json`, a pipe whose other
end the monitor holds. Outputs: the running components, `log/`. Invariants: when the monitor
goes, for whatever reason, this process removes the node; when this process goes, the kernel
kills every other one, and the monitor removes the rest.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import http.client
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dovetail.core.errors import BadInput
from dovetail.host import processes, way_out

from usernetes_setup.build import programs as build
from usernetes_setup.control import api_client, csr_approver
from usernetes_setup.node import (
    bridge_network,
    cgroups,
    components,
    container_runtime,
    joining,
    namespaces,
    removal,
    volumes,
)
from usernetes_setup.node_record import SHOWN, Node, cluster_folder

TICK = 0.05  # seconds between looks at what a component waits for, while any waits
STEADY = 20.0  # seconds after which a start counts as a success
BACKOFF = 0.2  # seconds before the first restart of a component; doubles up to 5
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""Disks, processes, memory and files that are used up for now."""


class ComponentState(enum.Enum):
    """What a component does: WAITING -> RUNNING, then WAITING again, or DONE if its work ends."""

    WAITING = enum.auto()  # for its turn, and after a failure for a while
    RUNNING = enum.auto()
    DONE = enum.auto()


@dataclass
class Component:
    """One command, and how it went so far; times are of the monotonic clock."""

    command: components.Command
    state: ComponentState = ComponentState.WAITING
    pid: int = 0
    started: float = 0.0
    failures: int = 0
    not_before: float = 0.0

    def may_start(self) -> bool:
        """Whether it is this one's turn now."""
        turn = self.state is ComponentState.WAITING and self.not_before <= time.monotonic()
        return turn and self.command.ready()

    def runs(self, pid: int) -> None:
        """WAITING -> RUNNING: it was started."""
        self.state, self.pid, self.started = ComponentState.RUNNING, pid, time.monotonic()

    def ended(self, code: int) -> None:
        """RUNNING -> DONE, or WAITING: it will be started again, later each time."""
        if self.command.once and code == 0:
            self.state = ComponentState.DONE
            return
        now = time.monotonic()
        self.failures = 1 if now - self.started > STEADY else self.failures + 1
        doublings = min(self.failures - 1, 10)  # of thousands there is no number
        self.not_before = now + min(5, BACKOFF * 2**doublings)
        self.state = ComponentState.WAITING
        with contextlib.suppress(OSError):  # the disk is full, which is no reason to end the node
            print(f"{self.command.name} ended with {code}, start {self.failures + 1}", flush=True)


class Supervisor:
    """The components of one node."""

    def __init__(self, node: Node, commands: list[components.Command]) -> None:
        self.node = node
        self.components = [Component(command) for command in commands]

    def waiting(self) -> bool:
        """Whether any component waits for something."""
        return any(one.state is ComponentState.WAITING for one in self.components)

    def start_ready(self) -> None:
        """Start whatever waits and is ready."""
        for one in self.components:
            if one.may_start():
                try:
                    one.runs(self._start(one.command))
                except OSError as error:
                    if error.errno not in PASSING:
                        raise
                    one.runs(0)
                    one.ended(1)  # there may be room later

    def _start(self, command: components.Command) -> int:
        path = f"{self.node.binaries}/bin"
        log = os.open(
            self.node.folder / f"log/{command.name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )
        system = f"{path}:/usr/sbin:/usr/bin:/sbin:/bin"
        environment = {"PATH": system, "HOME": str(self.node.folder), **command.environment}
        for name in ("PYTHONPATH", "DOVETAIL_STATE"):  # what the monitor set for our helpers
            environment[name] = os.environ[name]
        if command.words[0] == sys.executable and "LD_LIBRARY_PATH" in os.environ:
            environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]  # of this Python
        for name in command.sockets:
            (self.node.folder / command.folder / name).unlink(missing_ok=True)
        program = shutil.which(command.words[0], path=system) or command.words[0]
        try:
            process = subprocess.Popen(
                [program, *command.words[1:]], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment, cwd=self.node.folder / command.folder, umask=0o022,
                pass_fds=command.keep,
            )  # fmt: skip
        finally:
            os.close(log)
        process.returncode = 0  # reaped by `reap`, never by this object
        return process.pid

    def reap(self) -> None:
        """Collect the dead, of which some are components."""
        for pid, status in processes.ended_children():
            for one in self.components:
                if one.state is ComponentState.RUNNING and one.pid == pid:
                    one.ended(os.waitstatus_to_exitcode(status))


def private_view(node: Node) -> None:
    """Mounts of this node alone: its own /proc, and copies of what the components write to.

    What the machine mounts later on, as a home that somebody looks at, is here as well.
    """
    namespaces.mount("none", "/", "", namespaces.REC | namespaces.SLAVE)
    namespaces.mount("proc", "/proc", "proc")
    staging = node.folder / "view"
    staging.mkdir(exist_ok=True)
    for folder in namespaces.COPIED:
        namespaces.copy_up(folder, staging / folder.strip("/").replace("/", "-"))
    # The kubelet, and programs in pods, take this for all the cores that there are.
    (staging / "online").write_text(f"{node.cpus}\n")
    namespaces.mount(str(staging / "online"), "/sys/devices/system/cpu/online", "", namespaces.BIND)
    # The kubelet sets these for the whole machine; here it finds them set, and sets a file.
    for name, value in (
        ("vm/overcommit_memory", 1),
        ("kernel/panic", 10),
        ("kernel/panic_on_oops", 1),
    ):
        stand_in = staging / name.replace("/", "-")
        stand_in.write_text(f"{value}\n")
        with contextlib.suppress(OSError):
            namespaces.mount(str(stand_in), f"/proc/sys/{name}", "", namespaces.BIND)
    if cgroups.unified():
        cgroups.show(node.group, staging / "cgroup")
    show_programs()
    if node.network == "bridge":
        show_way_out(node)


def raise_locked_memory() -> None:
    """Let pods lock as much memory as this user may: adapters write to memory that stays.

    No pod can ask for it, and all get what their node's processes have.
    """
    _, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    for limit in (resource.RLIM_INFINITY, most):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
            return


def show_programs() -> None:
    """Let manifests name our Python and the examples, wherever they were installed."""
    try:
        for name, source in (("python", Path(sys.prefix)), ("examples", build.examples())):
            (SHOWN / name).mkdir(parents=True, exist_ok=True)
            namespaces.mount(str(source), str(SHOWN / name), "", namespaces.BIND | namespaces.REC)
    except (OSError, BadInput) as error:  # simulations do without
        print(f"pods cannot use {SHOWN}: {error}", flush=True)


def show_way_out(node: Node) -> None:
    """Let agents of simulations find the way out of the node's network."""
    place = Path(way_out.PATH)
    place.touch()
    namespaces.mount(str(node.folder / way_out.SOCKET), str(place), "", namespaces.BIND)


def commands(
    node: Node, ids: namespaces.Ids, sockets: bridge_network.Outside | None, tunnel: int
) -> list[components.Command]:
    """Every component of this node; the last two are None and -1 where it is on no bridge."""
    socket = (node.folder / "run/containerd.sock").exists
    if not node.control:
        admitted = (node.folder / joining.KUBECONFIG).exists
        return [
            container_runtime.containerd(node, ids),
            container_runtime.images(node),
            components.kubelet(
                node, cgroups.root(node.group), ids.rootless, lambda: socket() and admitted()
            ),
            *components.devices(node),
            *(bridge_network.commands(node, sockets, tunnel, admitted) if sockets else []),
        ]
    pki = cluster_folder(node.cluster) / "pki"
    server = f"https://{node.address}:{node.ports['server']}"
    admin = api_client.Client(server, (pki / "ca.crt").read_text(), pki / "admin.crt")
    up = Latch(lambda: takes_nodes(admin))
    record = str(node.folder / "node.json")
    control = [sys.executable, "-m", "usernetes_setup.control", record, ids.value]
    return [
        components.etcd(node),
        *components.control_plane(node, up),
        container_runtime.containerd(node, ids),
        container_runtime.images(node),
        components.kubelet(node, cgroups.root(node.group), ids.rootless, socket),
        *components.devices(node),
        components.Command("control", control, up),
        *(bridge_network.commands(node, sockets, tunnel, up) if sockets else []),
    ]


def takes_nodes(admin: api_client.Client) -> bool:
    """Whether the API can be used, and whoever is invited may ask to be a node.

    That is granted here, as a node may be waiting; all else by `usernetes_setup.control`, later.
    """
    try:
        if admin.ready():
            csr_approver.accept(admin)
            return True
    except (OSError, http.client.HTTPException, api_client.Refused):
        pass
    return False


class Latch:
    """True for good once a question was answered with yes; asked at most once in a tick."""

    def __init__(self, question: Callable[[], bool]) -> None:
        self.question, self.answer, self.asked = question, False, 0.0

    def __call__(self) -> bool:
        """Ask again if it has not been yes yet."""
        now = time.monotonic()
        if not self.answer and now - self.asked >= TICK:
            self.answer = self.question()
            self.asked = time.monotonic()
        return self.answer


def serve(
    node: Node,
    monitor: int,
    ids: namespaces.Ids,
    sockets: bridge_network.Outside | None,
    tunnel: int,
) -> None:
    """Run the node until the monitor goes or says so."""
    wake_in = processes.signal_pipe()
    stop: list[int] = []
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    private_view(node)
    claimed = volumes.show(node)
    if node.devices:
        raise_locked_memory()
    supervisor = Supervisor(node, commands(node, ids, sockets, tunnel))
    poll = select.poll()
    poll.register(monitor, select.POLLIN)
    poll.register(wake_in, select.POLLIN)
    if claimed.notes >= 0:
        poll.register(claimed.notes, select.POLLIN)
    while not stop:
        supervisor.start_ready()
        ready = dict(poll.poll(TICK * 1000 if supervisor.waiting() else None))
        if monitor in ready:
            break  # the other end is closed: the monitor is gone
        if claimed.notes in ready:
            claimed.open_new()
        with contextlib.suppress(BlockingIOError):
            os.read(wake_in, 4096)
        supervisor.reap()
    removal.from_inside(node)


if __name__ == "__main__":
    sys.exit("this module is started by usernetes_setup.node.monitor")
