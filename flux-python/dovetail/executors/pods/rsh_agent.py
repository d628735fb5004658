# SPDX-License-Identifier: LGPL-3.0-or-later
"""Stands between an MPI starter and a process that belongs into another pod.

    rsh_agent.py spawn HOST COMMAND...   as `ssh` for the starter: runs its daemon in a pod of HOST
    rsh_agent.py place PROGRAM [ARG]...  before each rank: runs it in the pod of its rank group

Inputs: DOVETAIL_DIR and DOVETAIL_GROUP in the environment that the starter's own process was given
(it passes on those of the node where it all began), DOVETAIL_GROUPS (ranks of each group). Output:
what the process does, as if it were here: its open files are ours, signals reach it, and we end
as it ends. Invariant: it does not outlive us. Run as a script, without the rest of the package.
"""

from __future__ import annotations

import array
import json
import os
import re
import resource
import select
import signal
import socket
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

LENGTH = struct.Struct("!I")
_DETACH = 10.0  # seconds; a daemon that lives that long is connected with its starter by itself
_ANSWER = 120.0  # seconds for the other pod to answer at all
_FORWARD = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
    signal.SIGCONT,
)  # fmt: skip


OWN = ("TMPDIR", "OMPI_MCA_btl_vader_backing_directory", "UCX_POSIX_DIR")
"""What names a directory that a starter's daemon shares with its own ranks and nobody else."""


def here(environment: dict[str, str], daemon: Mapping[str, str]) -> dict[str, str]:
    """The environment with the directories and the address of the daemon on whose node it is."""
    names = ("DOVETAIL_DIR", "DOVETAIL_LISTEN", *OWN)
    return {**environment, **{name: daemon[name] for name in names if name in daemon}}


def group_of(rank: int, sizes: list[int]) -> int:
    """The rank group that a rank is in; -1 for a rank beyond all groups."""
    for group, size in enumerate(sizes):
        if rank < size:
            return group
        rank -= size
    return -1


def local_groups(directory: str) -> list[int]:
    """The rank groups whose pods are on this node, in order."""
    found = (re.fullmatch(r"pod\.(\d+)\.sock", name) for name in os.listdir(directory))
    return sorted(int(one[1]) for one in found if one)


def ask(
    directory: str, group: str, request: Mapping[str, object], files: list[int]
) -> socket.socket:
    """A connection to a pod on this node that has been asked for something."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"{directory}/pod.{group}.sock")
    text = json.dumps(request).encode()
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    connection.sendmsg([LENGTH.pack(len(text))], ancillary)
    connection.sendall(text)
    return connection


def answer(connection: socket.socket) -> dict[str, object]:
    """The next message on a connection; empty at its end."""
    text = b""
    wanted = LENGTH.size
    try:
        while len(text) < wanted:
            chunk = connection.recv(wanted - len(text))
            if not chunk:
                return {}
            text += chunk
            if len(text) == LENGTH.size:
                wanted += LENGTH.unpack(text)[0]
    except ConnectionError:
        return {}
    found: dict[str, object] = json.loads(text[LENGTH.size :])
    return found


def _open_files() -> list[int]:
    """Those that a program started from here would have; the starter talks through some."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:
            pass  # the listing itself
    return sorted(found)


def place(words: list[str]) -> None:
    """Become the rank, or stand for it until it ends; never returns."""
    with open(f"/proc/{os.getppid()}/environ", "rb") as file:
        pairs = [os.fsdecode(one).partition("=") for one in file.read().split(b"\0")]
    starter = {name: value for name, _, value in pairs}
    directory, own = starter["DOVETAIL_DIR"], starter["DOVETAIL_GROUP"]
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or -1)
    sizes = [int(size) for size in os.environ["DOVETAIL_GROUPS"].split(",")]
    group = str(group_of(rank, sizes)) if rank >= 0 else own
    groups = local_groups(directory)
    # One in our own pod too, if there are others, as process ids have to differ; see `Spawner`.
    by_its_pod = rank >= 0 and len(groups) > 1 and int(group) in groups
    environment = here(dict(os.environ), starter)
    environment["DOVETAIL_GROUP"] = group if by_its_pod else own
    if "HYDRA_IFACE" in starter and not os.path.exists("/sys/class/infiniband"):
        # MPICH's ranks would listen on every interface, and talk over each.
        environment.setdefault("UCX_NET_DEVICES", starter["HYDRA_IFACE"])
    if not by_its_pod:
        try:
            os.execvpe(words[0], words, environment)
        except OSError as error:
            sys.exit(f"cannot start {words[0]}: {error.strerror}")
    alarm, alarm_end = os.pipe()
    os.set_blocking(alarm_end, False)
    signal.set_wakeup_fd(alarm_end)
    for number in _FORWARD:
        signal.signal(number, lambda number, frame: None)
    files = _open_files()
    request = {
        "do": "place",
        "words": words,
        "environment": environment,
        "directory": os.getcwd(),
        "numbers": files,
        "number": groups.index(int(group)),
        "of": len(groups),
    }
    try:
        connection = ask(directory, group, request, files)
    except OSError as error:
        sys.exit(f"rank {rank}: no pod of rank group {group}: {error.strerror}")
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    poller.register(alarm, select.POLLIN)
    while True:
        for source, _ in poller.poll():
            if source == alarm:
                connection.send(os.read(alarm, 64))
            else:
                _end_as(int(str(answer(connection).get("code", -signal.SIGKILL))))


def _end_as(code: int) -> None:
    """End as a process did whose code is this, or minus the signal that killed it."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def spawn(host: str, words: list[str]) -> int:
    """Run the words in a pod of another node; returns when they end, or once they stand alone."""
    environment = dict(os.environ)
    request = {"do": "spawn", "host": host, "command": " ".join(words), "environment": environment}
    try:
        connection = ask(environment["DOVETAIL_DIR"], environment["DOVETAIL_GROUP"], request, [])
    except OSError as error:
        sys.exit(f"cannot reach node {host}: {error.strerror}")
    connection.settimeout(_ANSWER)
    try:
        while True:
            said = answer(connection)
            if not said.get("running"):
                break
            connection.settimeout(_DETACH)
    except socket.timeout:
        if connection.gettimeout() == _DETACH:
            return 0
        said = {"said": f"node {host} does not answer"}
    if said.get("said"):
        print(said["said"], file=sys.stderr)
    return int(str(said.get("code", 1)))


if __name__ == "__main__":
    if sys.argv[1] == "place":
        place(sys.argv[2:])
    sys.exit(spawn(sys.argv[2], sys.argv[3:]))
