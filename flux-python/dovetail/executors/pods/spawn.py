# SPDX-License-Identifier: LGPL-3.0-or-later
"""Starts processes in a pod for those outside it that want them there.

Inputs: requests of go-betweens (`rsh_agent`) on the pod's own socket, with open files, and Spawn
messages. Outputs: processes, and how they ended. Invariants: a placed process ends with its
go-between and with us; a Spawn that is repeated is answered again, and not done again; ranks in
different pods of a node never have the same process id.

Open MPI takes a shared memory segment whose maker has its own process id for one that it has made
itself (`opal/mca/shmem`, `segment_attach`), and then reads and writes where nothing is.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import re
import signal
import socket
from dataclasses import dataclass, field

from dovetail.executors.pods import messages, rsh_agent
from dovetail.host import processes
from dovetail.mpi import launcher

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_SAID = 2000  # bytes of a daemon's output that are worth telling
_FILES = 253  # the most that the kernel passes in one message


@dataclass
class _Client:
    """A go-between; `pid` is what was started for it, `number` its Spawn."""

    connection: socket.socket
    held: bytes = b""
    files: list[int] = field(default_factory=list)
    pid: int = 0
    number: int = -1


@dataclass
class _Daemon:
    """A process that another pod asked for; `output` is -1 once it has closed that."""

    asked: messages.Spawn
    pid: int
    output: int
    said: bytes = b""
    code: int = -1
    running: bool = True


class Spawner:
    """The processes of a pod that are not its supervisor's.

    `watch(fd, what)` has `what` called when there is something to read, with None no more;
    `say` passes a message on to the agent.
    """

    def __init__(
        self,
        path: str,
        group: int,
        watch: Callable[[int, Callable[[], None] | None], None],
        say: Callable[[messages.Message], None],
    ) -> None:
        self.directory = os.path.dirname(path)
        self.group = group
        self._hosts: list[dict[str, Any]] = []
        self._early: list[messages.Spawn] = []
        self.requests: dict[int, messages.Spawn] = {}  # ours, not answered yet
        self._watch, self._say = watch, say
        self._clients: dict[int, _Client] = {}
        self._daemons: dict[tuple[int, int], _Daemon] = {}
        self._numbers = 0
        self._listener = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._listener.bind(path)
        self._listener.listen(128)
        self._listener.setblocking(False)
        watch(self._listener.fileno(), self._accept)

    def answers(self) -> list[messages.Message]:
        """What an agent must know that does not know anything: what is open on either side."""
        answers = [_answer(one) for one in self._daemons.values()]
        return [*self.requests.values(), *answers]

    # --- go-betweens ---

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            client = _Client(connection)
            self._clients[connection.fileno()] = client
            self._watch(connection.fileno(), lambda: self._read(client))

    def _read(self, client: _Client) -> None:
        space = socket.CMSG_LEN(_FILES * array.array("i").itemsize)
        try:
            data, ancillary, _, _ = client.connection.recvmsg(
                1 << 16, space, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        for level, kind, raw in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                files = array.array("i")
                files.frombytes(raw[: len(raw) - len(raw) % files.itemsize])
                client.files += files
        if not data:
            self._dismiss(client)
        elif client.pid:
            for number in data:  # a byte is a signal
                with contextlib.suppress(OSError):
                    os.killpg(client.pid, number)
        else:
            client.held += data
            self._request(client)

    def _request(self, client: _Client) -> None:
        if len(client.held) < messages.LENGTH.size:
            return
        (size,) = messages.LENGTH.unpack_from(client.held)
        if len(client.held) < messages.LENGTH.size + size:
            return
        text, client.held = client.held[messages.LENGTH.size :][:size], b""
        try:
            asked = json.loads(text)
            if asked["do"] == "place":
                client.pid = processes.start_child(
                    asked["words"],
                    asked["directory"],
                    asked["environment"],
                    dict(zip(asked["numbers"], client.files)),
                    remainder=(asked["number"], asked["of"]),
                )
                for fd in client.files:
                    os.close(fd)
                client.files = []
            else:
                self._send_off(client, asked)
        except (ValueError, KeyError, TypeError, OSError) as error:
            self._reply(client, {"code": processes.CANNOT_START, "said": str(error)})

    def _send_off(self, client: _Client, asked: dict[str, Any]) -> None:
        """Ask the first rank group on a node to start a daemon."""
        groups = [i for i, host in enumerate(self._hosts) if host["address"] == asked["host"]]
        if not groups:
            raise KeyError(f"no pod on node {asked['host']}")
        self._numbers += 1
        client.number = self._numbers
        self.requests[client.number] = messages.Spawn(
            os.path.basename(self.directory), groups[0], self.group, client.number,
            asked["command"], asked["environment"], self.directory,
        )  # fmt: skip
        self._say(self.requests[client.number])

    def _reply(self, client: _Client, answer: dict[str, Any]) -> None:
        text = json.dumps(answer).encode()
        with contextlib.suppress(OSError):
            client.connection.sendall(messages.LENGTH.pack(len(text)) + text)
        if not answer.get("running"):
            self._dismiss(client)

    def _dismiss(self, client: _Client) -> None:
        """The go-between has gone, or needs nothing more: what it stood for ends."""
        if self._clients.pop(client.connection.fileno(), None) is None:
            return
        self._watch(client.connection.fileno(), None)
        client.connection.close()
        for fd in client.files:
            os.close(fd)
        self.requests.pop(client.number, None)
        if client.pid:
            with contextlib.suppress(OSError):
                os.killpg(client.pid, signal.SIGKILL)

    def answered(self, message: messages.Spawned) -> None:
        """Another pod says how our request goes."""
        for client in list(self._clients.values()):
            if client.number == message.number:
                self._reply(
                    client,
                    {"running": message.running, "code": message.code, "said": message.said},
                )

    # --- for other pods ---

    def meet(self, hosts: list[dict[str, Any]]) -> None:
        """These are the simulation's rank groups; whoever asked before knew them already."""
        self._hosts = hosts
        while self._early:
            self.spawn(self._early.pop())

    def spawn(self, asked: messages.Spawn) -> None:
        """Start a daemon for another pod, unless that has been done."""
        if not self._hosts:
            self._early.append(asked)
            return
        key = (asked.origin, asked.number)
        if key not in self._daemons:
            output, output_end = os.pipe()
            os.set_blocking(output, False)
            address = self._hosts[self.group]["address"]
            listening = launcher.listening(address)
            device = listening.get("HYDRA_IFACE")
            text = asked.command.replace(asked.session, self.directory)
            text = re.sub(r"--iface \S+", f"--iface {device}", text) if device else text
            # Not the first daemon's, which may be on this node in another pod: daemons know
            # nothing of each other, and files of the MPI's shared memory have the same names.
            own = f"{self.directory}/tmp.{self.group}"
            with contextlib.suppress(OSError):  # it is there, or the daemon says what is wrong
                os.mkdir(own, 0o700)
            daemon_has = {**dict.fromkeys(rsh_agent.OWN, own), "DOVETAIL_DIR": self.directory}
            environment = {**rsh_agent.here(asked.environment, daemon_has), **listening}
            environment["DOVETAIL_GROUP"] = str(self.group)
            # How the host files call it, whatever it calls itself: two nodes may be one machine.
            environment["PMIX_HOSTNAME"] = address
            null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            files = {0: null, 1: output_end, 2: output_end}
            pid = processes.start_child(["sh", "-c", text], "/", environment, files)
            os.close(null)
            os.close(output_end)
            daemon = self._daemons[key] = _Daemon(asked, pid, output)
            self._watch(output, lambda: self._listen(daemon))
        self._say(_answer(self._daemons[key]))

    def _listen(self, daemon: _Daemon) -> None:
        """Take in what a daemon says, so that it never waits for a reader."""
        try:
            chunk = os.read(daemon.output, 1 << 16)
        except BlockingIOError:
            return
        daemon.said = (daemon.said + chunk)[-_SAID:]
        if not chunk:
            self._watch(daemon.output, None)
            os.close(daemon.output)
            daemon.output = -1  # its number is another file's soon

    # --- processes ---

    def ended(self, pid: int, status: int) -> None:
        """A child has ended, perhaps one of these."""
        code = os.waitstatus_to_exitcode(status)
        for client in list(self._clients.values()):
            if client.pid == pid:
                client.pid = 0
                self._reply(client, {"code": code})
        for daemon in self._daemons.values():
            if daemon.pid == pid and daemon.running:
                with contextlib.suppress(OSError):
                    self._listen(daemon)
                daemon.running = False
                daemon.code = code if code >= 0 else 128 - code
                self._say(_answer(daemon))

    def close(self, path: str) -> None:
        """Take no more requests; the processes end with the pod."""
        self._watch(self._listener.fileno(), None)
        self._listener.close()
        with contextlib.suppress(OSError):
            os.unlink(path)
        for client in list(self._clients.values()):
            self._dismiss(client)


def _answer(daemon: _Daemon) -> messages.Spawned:
    asked = daemon.asked
    said = daemon.said.decode(errors="replace").strip()
    return messages.Spawned(
        asked.simulation, asked.origin, asked.number, daemon.running, daemon.code, said
    )
