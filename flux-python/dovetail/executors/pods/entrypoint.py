# SPDX-License-Identifier: LGPL-3.0-or-later
"""The first process of a pod: one rank group of a simulation, from first to last; then of the next.

Inputs: what the node's agent says (`messages`); requests of go-betweens (`spawn`). Outputs:
answers; in the first rank group a supervisor (`dovetail.mpi.supervisor`), which runs the
simulation as on a single machine.

Invariants: nothing that was started here outlives the entrypoint, nor, but for the supervisor, the
simulation; no other has a pod in which it has left a process, or something where `written` looks.
An agent may die and come back at any time, and hears all again; there is one supervisor and one
Result, whatever is asked for twice, and the Result is repeated until an End answers it. The file
`pod.GROUP` is locked as long as the simulation has the pod, which is how others know. Exit code:
the last simulation's.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import sys
import time
from dataclasses import replace

from dovetail.core.causes import Cause
from dovetail.core.messages import MessageError
from dovetail.executors.pods import command, messages, orphan_limit
from dovetail.executors.pods.spawn import Spawner
from dovetail.host import borrowed_python, processes
from dovetail.host.cgroups import Group
from dovetail.host.line_splitter import LineSplitter
from dovetail.host.memory import KernelKills, lost
from dovetail.host.session import (
    end_simulation,
    join_session,
    leave_session,
    remove_tree,
    shared_session,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = 10.0  # seconds for the supervisor to clean up before it is ended itself
_TERMINATED = 128 + signal.SIGTERM


class Supervisor:
    """The supervisor of the simulation whose directory this is; `pid` is 0 while it does not run.

    One that dies without a Result gets one from us, and what it leaves is ended. It has the next
    simulation too: until that starts it is `spare`.
    `watch` and `say` are as in `spawn.Spawner`; `told` is what has been said, by kind.
    """

    def __init__(
        self,
        directory: str,
        watch: Callable[[int, Callable[[], None] | None], None],
        say: Callable[[messages.Message], None],
    ) -> None:
        self.pid = 0
        self.spare = False
        self._watch, self._say = watch, say
        self._commands = self.messages = -1
        self._splitter = LineSplitter()
        self.follow(directory)

    def follow(self, directory: str) -> None:
        """From now on it is that of the simulation with this directory."""
        self.told: dict[str, messages.Prepared | messages.Started | messages.Result] = {}
        self._directory = directory
        self._simulation = os.path.basename(directory)
        self._kills = KernelKills()
        self._last_words = b""  # what it complained of, which is no message
        self._evicted = False

    @property
    def pending(self) -> bool:
        """Whether there is a Result to come."""
        return self._runs and "result" not in self.told

    @property
    def _runs(self) -> bool:
        return bool(self.pid) and not self.spare

    def code(self, otherwise: int) -> int:
        """The exit code of the Result, `otherwise` if there is none."""
        result = self.told.get("result")
        return result.code & 255 if isinstance(result, messages.Result) else otherwise

    def start(self, run: messages.Run) -> None:
        """Start the simulation, the first time."""
        if self._runs or "result" in self.told:
            return
        own = {
            "directory": self._directory,
            "temporary": self._directory + "/tmp",
            "group": ["", ""],
            "job": ["", ""],
            "cpus": [],
            "hosts": run.hosts,
        }
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._directory + "/tmp", 0o700)
        text = json.dumps({**run.config, **own}).encode()
        if not self.spare:
            self._begin()
        self.spare = False
        self._tell(len(text).to_bytes(4, "little") + text)

    def _begin(self) -> None:
        read_end, self._commands = os.pipe()
        self.messages, write_end = os.pipe()
        ends = (read_end, write_end, write_end)
        actions = [(os.POSIX_SPAWN_DUP2, end, number) for number, end in enumerate(ends)]
        words = command("mpi.supervisor", borrowed_python.own())
        self.pid = os.posix_spawn(words[0], words, os.environ, file_actions=actions, setpgroup=0)
        os.close(read_end)
        os.close(write_end)
        os.set_blocking(self.messages, False)
        self._watch(self.messages, self._hear)

    def checkpoint(self) -> None:
        """Ask the simulation to stop at a checkpoint, if its command runs."""
        if self._runs:
            self._tell(b"checkpoint\n")

    def spread(self) -> None:
        """The prepared case is on all nodes."""
        self.told.pop("prepared", None)
        if self._runs:
            self._tell(b"spread\n")

    def stop(self) -> None:
        """Ask the simulation to end, in its grace; what has not started never will."""
        if self._runs:
            self._tell(b"stop\n")
        else:
            self._conclude(Cause.LAUNCH_FAILED, 128 + signal.SIGTERM, "stopped before it started")

    def evict(self) -> None:
        """The node ends the pod, as a kubelet does where memory runs out; the API knows it later.

        So how the simulation now fails is not its own doing.
        """
        self._evicted = True
        self.stop()

    def release(self) -> None:
        """Nothing more is needed of the simulation: it ends what is left, and becomes `spare`."""
        if self._runs:
            self._tell(b"release\n")

    def let_go(self) -> None:
        """Nothing more is needed of the supervisor either: it goes."""
        if self._commands >= 0:
            os.close(self._commands)
            self._commands = -1

    def bury(self, code: int) -> None:
        """It has ended, with this code or by minus this signal: its last words first."""
        self.pid = 0
        if self.messages >= 0:
            self._hear()
        if self.spare:
            self.spare = False
            self.let_go()
        elif "result" not in self.told:
            end_simulation(self._directory, Group("", ""), os.getpid())
            words = self._splitter.rest or self._last_words
            end = lost("its supervisor", code, words, self._kills)
            self._conclude(Cause.SUPERVISOR_LOST, *end)

    def _tell(self, text: bytes) -> None:
        with contextlib.suppress(OSError):  # it has gone, which `bury` hears of
            while text and self._commands >= 0:
                text = text[os.write(self._commands, text) :]

    def _hear(self) -> None:
        """Take in the supervisor's messages."""
        try:
            chunk = os.read(self.messages, 1 << 16)
        except BlockingIOError:
            return
        for line in self._splitter.take(chunk):
            try:
                said = json.loads(line)
            except ValueError:
                self._last_words = line
                with contextlib.suppress(OSError):
                    os.write(2, line + b"\n")  # the pod's log has all of it
                continue
            if said["kind"] == "started":
                self.told["started"] = messages.Started(
                    self._simulation, said["mpi"], said["iterations"]
                )
                self._say(self.told["started"])
            elif said["kind"] == "prepared":
                self.told["prepared"] = messages.Prepared(self._simulation)
                self._say(self.told["prepared"])
            elif said["kind"] == "removed":
                self.spare = True
            else:
                self._conclude(Cause(said["cause"]), said["code"], said["reason"], said["trouble"])
        if not chunk:
            self._watch(self.messages, None)
            os.close(self.messages)
            self.messages = -1

    def _conclude(self, cause: Cause, code: int, reason: str, trouble: str = "") -> None:
        if "result" not in self.told:
            if self._evicted and code:
                cause, reason = Cause.POD_LOST, "pod lost: its node told it to end"
            result = messages.Result(self._simulation, cause, code, reason, trouble)
            self.told["result"] = result
            self._say(result)


class Entrypoint:
    """See above; `run` returns the exit code."""

    def __init__(self, session: str, simulation: str, group: int, uid: str) -> None:
        self.session = session
        self.link: socket.socket | None = None
        self.outbox = bytearray()
        self.decoder = messages.Decoder()
        self.seen = time.monotonic()  # when there was an agent
        self.limit = orphan_limit()
        self.held: list[int] = []
        self.spawner: Spawner | None = None
        self._serve(messages.Pod(simulation, group, uid))
        self.supervisor = Supervisor(self.directory, self.watch, self.say)
        self.terminated = False
        self.files = written()
        self.poller = select.poll()
        self.watched: dict[int, Callable[[], None]] = {}
        processes.adopt_orphans()
        self.waker = processes.signal_pipe()
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, frame: None)
        self.watch(self.waker, self._wake)

    def _serve(self, pod: messages.Pod) -> None:
        """Be there for this simulation."""
        self.pod = pod
        self.directory = os.path.join(self.session, pod.simulation)
        self.path = os.path.join(self.directory, f"pod.{pod.group}")
        if len(self.path) + len(".sock") > 107:
            raise ValueError(f"{self.path}: too long for the name of a socket")
        self.code: int | None = None
        self.next = ""
        self.suspended = self.cut_off = self.stopped = False

    def run(self) -> int:
        """Serve until no simulation has the pod any more; of each leave nothing behind."""
        code = self._until_over()
        while self.next:
            used = processes.cpu_seconds([os.getpid(), self.supervisor.pid])
            self._serve(replace(self.pod, simulation=self.next, used=used))
            self.supervisor.follow(self.directory)
            code = self._until_over()
        return code

    def _until_over(self) -> int:
        """Serve until the simulation is over; its exit code."""
        pause, again = 0.1, 0.0
        while self.code is None:
            now = time.monotonic()
            if self.link is None and now >= again:
                self._connect()
                again, pause = now + pause, 0.1 if self.link else min(1.0, 2 * pause)
            limit = None if self.link else max(0.0, again - now)
            for fd, events in self.poller.poll(None if limit is None else limit * 1000 + 1):
                if fd in self.watched:
                    if events & select.POLLOUT:
                        self._flush()
                    if events & ~select.POLLOUT and fd in self.watched:
                        self.watched[fd]()
            if self.link is None and time.monotonic() - self.seen > self.limit:
                self.code = _TERMINATED
            if self.terminated and not self.supervisor.pending:
                self.code = self.supervisor.code(_TERMINATED)
        self._clean_up()
        return self.code

    def _is_as_new(self) -> bool:
        """Whether the next simulation finds nothing of what was done in this pod before it."""

        def others() -> processes.Processes:
            self._reap()
            return processes.all_but({1, self.supervisor.pid})

        if self.terminated or (self.supervisor.pid and not self.supervisor.spare):
            return False
        return not processes.end_all(others) and written() == self.files

    def watch(self, fd: int, what: Callable[[], None] | None) -> None:
        """Have `what` called when there is something to read; with None no more."""
        if what is None:
            self.poller.unregister(fd)
            del self.watched[fd]
        else:
            self.poller.register(fd, select.POLLIN)
            self.watched[fd] = what

    # --- the agent ---

    def _connect(self) -> None:
        link = socket.socket(socket.AF_UNIX)
        link.settimeout(1.0)
        try:
            link.connect(self.session + "/agent.sock")
            self._settle()
        except OSError:
            link.close()
            return
        link.setblocking(False)
        self.link, self.outbox, self.decoder = link, bytearray(), messages.Decoder()
        self.watch(link.fileno(), self._read)
        assert self.spawner
        for message in (self.pod, *self.supervisor.told.values(), *self.spawner.answers()):
            self.say(message)

    def _settle(self) -> None:
        """Take our place in the session, which an agent has made."""
        if self.spawner:
            return
        while self.held:  # of a try that failed
            os.close(self.held.pop())
        self.held.append(join_session(self.session))
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.directory, 0o700)
        # Locked before it has its name, so that nobody ever sees it unlocked.
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        self.held.append(os.open(self.path + ".new", flags, 0o600))
        fcntl.flock(self.held[-1], fcntl.LOCK_EX)
        with contextlib.suppress(OSError):  # shared memory is full; the lock is what counts
            os.write(self.held[-1], self.pod.uid.encode())
        os.rename(self.path + ".new", self.path)
        self.spawner = Spawner(self.path + ".sock", self.pod.group, self.watch, self.say)

    def say(self, message: messages.Message) -> None:
        """Tell the agent; without one this is lost, and said again to the next."""
        if self.link is not None:
            self.outbox += messages.encode(message)
            self._flush()

    def _flush(self) -> None:
        if self.link is None:
            return
        try:
            while self.outbox:
                del self.outbox[: self.link.send(self.outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self._disconnect()
            return
        waiting = select.POLLOUT if self.outbox else 0
        self.poller.modify(self.link.fileno(), select.POLLIN | waiting)

    def _read(self) -> None:
        assert self.link
        try:
            data = self.link.recv(1 << 16)
            heard = self.decoder.feed(data)
        except BlockingIOError:
            return
        except (OSError, MessageError):
            data, heard = b"", []
        for message in heard:
            self._obey(message)
        if not data:
            self._disconnect()

    def _disconnect(self) -> None:
        if self.link is not None:
            self.watch(self.link.fileno(), None)
            self.link.close()
            self.link = None
            self.seen = time.monotonic()

    def _obey(self, message: messages.Message) -> None:
        assert self.spawner
        if isinstance(message, messages.Run):
            self.spawner.meet(message.hosts)
            if self.pod.group == 0:
                self.supervisor.start(message)
        elif isinstance(message, messages.Spread):
            self.supervisor.spread()
        elif isinstance(message, messages.Checkpoint):
            self._suspend(False)
            if self.pod.group == 0:
                self.supervisor.checkpoint()
        elif isinstance(message, messages.Stop):
            self._stop()
        elif isinstance(message, messages.Suspend):
            self._suspend(message.suspended)
        elif isinstance(message, messages.Fence):
            self.cut_off = message.cut_off
            self._hold()
        elif isinstance(message, messages.Spawn):
            self.spawner.spawn(message)
        elif isinstance(message, messages.Spawned):
            self.spawner.answered(message)
        elif isinstance(message, messages.End):
            self.code = message.code & 255
            self.next = message.next if os.getpid() == 1 else ""  # else there are others here

    def _stop(self) -> None:
        """Ask the simulation to end; what is suspended could not."""
        self._suspend(False)
        if self.pod.group == 0:
            self.supervisor.stop()

    def _suspend(self, suspended: bool) -> None:
        """Stop the processes of the simulation, or let them go on once the node is not cut off."""
        self.suspended = suspended
        self._hold()

    def _hold(self) -> None:
        """Stop the processes of the simulation in this pod, or let them go on.

        Those that run are left alone: a starter says so in the log when it is continued.
        """
        stopped = self.suspended or self.cut_off
        if stopped or self.stopped:
            root = self.supervisor.pid or os.getpid()
            processes.pause_all(f"DOVETAIL_DIR={self.directory}", root, stopped)
        self.stopped = stopped

    # --- signals, and the end ---

    def _wake(self) -> None:
        if set(os.read(self.waker, 512)) - {int(signal.SIGCHLD)}:
            self.terminated = True
            self._suspend(False)
            self.supervisor.evict()
        self._reap()

    def _reap(self) -> None:
        for pid, status in processes.ended_children():
            if pid == self.supervisor.pid:
                self.supervisor.bury(os.waitstatus_to_exitcode(status))
            elif self.spawner:
                self.spawner.ended(pid, status)

    def _left(self) -> processes.Processes:
        """The processes of the simulation that are still there."""
        found = processes.members(f"DOVETAIL_DIR={self.directory}", os.getpid())
        if self.supervisor.spare:
            found.pop(self.supervisor.pid, None)
        return found

    def _clean_up(self) -> None:
        """End all, remove what is ours, and the rest if we are the last."""
        if self.next:
            self.supervisor.release()
        else:
            self.supervisor.let_go()
        deadline = time.monotonic() + PATIENCE
        while self.supervisor.pid and not self.supervisor.spare and time.monotonic() < deadline:
            for fd, _ in self.poller.poll(100):
                if fd in self.watched and fd in (self.waker, self.supervisor.messages):
                    self.watched[fd]()
        if self.spawner:
            self.spawner.close(self.path + ".sock")
            processes.end_all(self._left)
            self._flush()
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            with contextlib.suppress(OSError):
                if not any(name.startswith("pod.") for name in os.listdir(self.directory)):
                    remove_tree(self.directory)
            self.spawner = None
        if self.next and not self._is_as_new():
            self.say(messages.Lost(self.next, self.pod.group, self.pod.uid))
            self.next = ""
        self._disconnect()
        for handle in self.held[1:]:
            os.close(handle)
        if self.held:
            leave_session(self.session, self.held[0])
        self.held.clear()


def written() -> list[str]:
    """What programs have left in the pod's own folders, and of System V's IPC; the names alone."""
    found = []
    for folder in ("/", "/tmp", "/var/tmp", os.environ.get("HOME", "/")):
        with contextlib.suppress(OSError):
            found += sorted(f"{folder}/{name}" for name in os.listdir(folder))
    for kind in ("shm", "sem", "msg"):
        with contextlib.suppress(OSError), open(f"/proc/sysvipc/{kind}") as file:
            found += [" ".join([kind, *line.split()[:2]]) for line in file]
    return found


def main() -> None:
    """Be a pod's first process."""
    parser = argparse.ArgumentParser(prog="dovetail-entrypoint")
    parser.add_argument("--run", required=True, help="id of the run")
    parser.add_argument("--node", required=True, help="name of this node")
    parser.add_argument("--simulation", required=True, help="its name, one for each launch")
    parser.add_argument("--group", required=True, type=int, help="rank group, from 0")
    parser.add_argument("--uid", required=True, help="of the pod")
    args = parser.parse_args()
    session = shared_session(args.run, args.node)
    sys.exit(Entrypoint(session, args.simulation, args.group, args.uid).run())
