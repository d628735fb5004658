# SPDX-License-Identifier: LGPL-3.0-or-later
"""Where a cluster's files are, and what is known about its nodes.

    <root>/<cluster>/kubeconfig         the administrator's, on the control node
    <root>/<cluster>/pki/               keys and certificates, control node only
    <root>/<cluster>/nodes/<node>/      one node: node.json, log/, run/ and its components' data
    <root>/<cluster>/invite-<number>    a join file on its way to another machine
    <root>/<cluster>.lock               held by a verb that changes the cluster

The root is $DOVETAIL_STATE, else /tmp/dovetail-kube-<uid>: a local disk, and short, since
Unix socket paths end at 107 bytes. It may be a folder where the user has more than clusters.
Invariants: every folder is 0700 and every file with a secret 0600; `node.json` is replaced as a
whole; a folder that is not a cluster's is not touched, nor what a cluster's has besides.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypedDict

from dovetail.core.errors import BadInput, WorkFailed
from dovetail.host import processes
from dovetail.host.private_files import write_private

SHOWN = Path("/run/dovetail")
"""What a node shows its pods of its own, in its own /run."""

USERNETES = "usernetes.json"
"""The record of a node that upstream Usernetes made, in its cluster's folder."""

OWN = re.compile(
    r"nodes|pki|kubeconfig|invite-\d+|\.(kubeconfig|invite-\d+|usernetes\.json)\.\d+\.new"
)
"""What is in a cluster's folder by our own doing, with what was being written."""

SIGNS = ("monitor.log", "log/kubelet", "log/containerd", "log/etcd", "log/apiserver",
         "etcd/member", "containerd/io.containerd.metadata.v1.bolt", "kubelet/pods")  # fmt: skip
"""What is in a node's folder, each of which may be in another's by chance."""

LOCK = ".lock"
"""What the name of a cluster's lock ends in."""

LONGEST = 107
"""Bytes in the path of a Unix socket, without its end."""

SOCKET = "kubelet/pod-resources/4294967295"
"""The one of a node's sockets with the longest path: the kubelet binds it under some number."""

# Names of fields in records of clusters that an earlier version started and that may still run.
_FORMER = {"keeper": "monitor", "keeper_ticks": "monitor_ticks"}


class NodeState(enum.Enum):
    """What runs of a node. Every change but the first and the last is a failure.

    MONITOR_ALONE -> RUNNING -> MONITOR_ALONE -> DEAD is the usual way: the monitor makes what the
    node needs, starts the supervisor, and removes the node when that has ended. RUNNING ->
    UNMONITORED -> DEAD if the monitor is killed: then the supervisor removes the node.
    """

    MONITOR_ALONE = "its monitor alone"
    RUNNING = "supervisor and monitor"
    UNMONITORED = "its supervisor alone"
    DEAD = "neither"


class Offer(TypedDict):
    """What a node offers of a device, and whether its user `asked` for it by name.

    The `units` are lists of device files; so many pods may have `each` of them at once.
    """

    units: list[list[str]]
    each: int
    asked: bool


@dataclass
class Node:
    """One node on this machine.

    `supervisor_ticks` and `monitor_ticks` are start times that tell a process from a later one
    with the same pid. `cpus` is a list as the kernel writes it (`0-1`), of which the monitor
    takes as many as are `wanted`; then it is a list of these; `memory` is bytes,
    `user` is who maps subordinate ids, `group` the node's control group. `joined` is the join
    file of a worker, empty on the control node; `place` is which addresses it has on a bridge.
    `devices` are by the resource that pods ask for.
    """

    cluster: str
    name: str
    address: str
    cpus: str
    memory: int
    network: str
    user: str
    group: str
    binaries: str
    wanted: int = 0
    ports: dict[str, int] = field(default_factory=dict)
    devices: dict[str, Offer] = field(default_factory=dict)
    server: str = ""
    joined: str = ""
    place: int = 0
    owner: int = 0
    monitor: int = 0
    monitor_ticks: int = 0
    supervisor: int = 0
    supervisor_ticks: int = 0

    @property
    def folder(self) -> Path:
        """Everything that this node writes."""
        return cluster_folder(self.cluster) / "nodes" / self.name

    @property
    def control(self) -> bool:
        """Whether this node holds the control plane."""
        return not self.joined

    def state(self) -> NodeState:
        """What of it runs now."""
        inside = processes.alive(self.supervisor, self.supervisor_ticks)
        outside = processes.alive(self.monitor, self.monitor_ticks)
        if inside:
            return NodeState.RUNNING if outside else NodeState.UNMONITORED
        return NodeState.MONITOR_ALONE if outside else NodeState.DEAD

    def alive(self) -> bool:
        """Whether its supervisor runs; the components die with it."""
        return self.state() in (NodeState.RUNNING, NodeState.UNMONITORED)

    def save(self) -> None:
        """Write `node.json`."""
        write_private(self.folder / "node.json", json.dumps(asdict(self), indent=1))


def read(record: Path) -> Node:
    """The node of a `node.json`. Raises OSError, or ValueError or TypeError if it is damaged."""
    fields = json.loads(record.read_text())
    for former, name in _FORMER.items():
        if former in fields:
            fields[name] = fields.pop(former)
    return Node(**fields)


def _place() -> Path:
    """Where the folder of all of this user's clusters is, if it exists.

    By a path that is the same from a monitor's working directory, and without links, by which the
    kernel knows mounts. Whether the folder itself is one is for `root` to see.
    """
    wanted = Path(os.environ.get("DOVETAIL_STATE") or f"/tmp/dovetail-kube-{os.getuid()}")
    known = "" if wanted.name == ".." else wanted.name
    return Path(os.path.realpath(wanted.parent if known else wanted), known)


def root(make: bool = False) -> Path:
    """The folder of all of this user's clusters; refused if others can get in.

    Made only for who is about to put something in. Raises BadInput.
    """
    wanted = _place()
    while True:
        try:
            found = wanted.lstat()
            break
        except (FileNotFoundError, NotADirectoryError):
            if not make:
                return wanted
        except OSError as error:  # it is below what is another's, as after su
            raise BadInput(
                f"{wanted} cannot be looked at: {error.strerror}; "
                "set DOVETAIL_STATE to a folder on a local disk that you can write to"
            ) from None
        try:
            wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(
                f"{wanted} cannot be made: {error.strerror}; "
                "set DOVETAIL_STATE to a folder on a local disk that you can write to"
            ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise BadInput(
            f"{wanted}: must be a directory of yours that nobody else can open (mode 0700); "
            "remove it or set DOVETAIL_STATE to another"
        )
    return wanted


def keep() -> int:
    """Keep systemd-tmpfiles from ageing clusters in /tmp, for as long as this descriptor is open.

    It leaves alone a folder that it cannot lock, with all that is below (tmpfiles.d(5)). Programs
    that are started do not inherit it.
    """
    descriptor = os.open(root(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # no node shall wait for it
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


def cluster_folder(cluster: str) -> Path:
    """The folder of one cluster, whether it exists or not."""
    return root() / checked_name(cluster, "cluster", 20)


def room(cluster: str) -> int:
    """Bytes that the name of a cluster's node may have here, so that it can have its sockets."""
    return LONGEST - len(os.fsencode(cluster_folder(cluster) / "nodes" / SOCKET)) - len("/")


def checked_name(name: str, what: str, longest: int) -> str:
    """The name, if Kubernetes and socket paths allow it."""
    if len(name) > longest or not re.fullmatch(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", name):
        raise BadInput(
            f"{what} name {name!r}: at most {longest} lower-case letters, digits, '-' and '.'"
        )
    return name


def nodes(cluster: str) -> list[Node]:
    """The cluster's nodes on this machine, the control node first; damaged records are left out."""
    found = []
    for record in cluster_folder(cluster).glob("nodes/*/node.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(read(record))
    return sorted(found, key=lambda node: (bool(node.joined), node.name))


def clusters() -> list[str]:
    """Names of this user's clusters on this machine, running or not."""
    return sorted(path.name for path in root().glob("*") if path.is_dir() and _is_cluster(path))


def _is_cluster(folder: Path) -> bool:
    """Whether a folder is a cluster's, or what is left of one.

    What a verb that was killed left has a lock; of what systemd-tmpfiles aged, two files are no
    chance. A folder that this user may not search is none.
    """
    with contextlib.suppress(FileNotFoundError, PermissionError):  # it may have just gone
        if (folder / USERNETES).exists() or any(folder.glob("nodes/*/node.json")):
            return True
        for node in folder.glob("nodes/*"):
            if sum((node / sign).exists() for sign in SIGNS) > 1:
                return True
        if folder.with_name(f"{folder.name}{LOCK}").exists():
            names = os.listdir(folder)
            return not names or any(OWN.fullmatch(name) for name in names)
    return False


def refuse_strange(cluster: str) -> None:
    """Refuse a name that something else has which the user keeps here. Raises BadInput."""
    folder = cluster_folder(cluster)
    if cluster.endswith(LOCK) and not folder.is_dir():  # what an earlier version made may be ended
        raise BadInput(
            f"cluster {cluster}: its folder would be in the place of another's lock; "
            f"give a --name that does not end in {LOCK}"
        )
    try:
        names = sorted(os.listdir(folder))
        if not names or _is_cluster(folder) or not folder.exists():
            return  # it may just have gone, with its lock
    except FileNotFoundError:
        return
    except NotADirectoryError:
        names = ["no files"]
    except PermissionError:
        names = ["what you may not see"]
    raise BadInput(
        f"cluster {cluster}: {folder} is no cluster's, and holds {names[0]}; "
        "give another --name, or set DOVETAIL_STATE to a folder for clusters alone"
    )


@contextlib.contextmanager
def locked(cluster: str) -> Iterator[None]:
    """One verb at a time changes a cluster; the lock dies with its holder.

    What is empty at the end is removed: the lock's file with the cluster, and the root with the
    last cluster. Raises WorkFailed if another verb holds the lock, and BadInput for a name whose
    folder is not a cluster's.
    """
    checked_name(cluster, "cluster", 20)
    refuse_strange(cluster)
    while True:
        path = root(make=True) / f"{cluster}{LOCK}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # a node's end removed the root between our two steps
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise WorkFailed(
                f"cluster {cluster}: another `dovetail kube` command is changing it; try again"
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                break
        os.close(descriptor)  # the last holder removed the file between our two steps
    try:
        yield
    finally:
        _release(path, descriptor)


def wait_unlocked(cluster: str) -> None:
    """Wait for all verbs that have the lock, and remove what is empty if the last was killed.

    Makes nothing, not even for a moment: whoever comes after the verb may count on its clean-up.
    """
    path = _place() / f"{cluster}{LOCK}"
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            with contextlib.suppress(OSError):  # of a verb that was killed before it had a lock
                path.parent.rmdir()
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                return _release(path, descriptor)
        os.close(descriptor)  # its holder removed the file, and there may be another already


def _release(path: Path, descriptor: int) -> None:
    """Give a cluster's lock back, with what is empty."""
    if not path.with_suffix("").exists():
        path.unlink(missing_ok=True)
    os.close(descriptor)
    with contextlib.suppress(OSError):
        path.parent.rmdir()
