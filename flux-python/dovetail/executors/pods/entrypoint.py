# SPDX-License-Identifier: LGPL-3.0-or-later
"""The first process of a pod: one rank group of one simulation, from first to last.

Inputs: what the node's agent says (`wire`); requests of go-betweens (`placing`). Outputs: answers;
in the first rank group the keeper, which runs the simulation as on a single machine.

Invariants: nothing that was started here outlives the entry; an agent may die and come back at
any time, and hears all again; a result is repeated until an End answers it. The file `pod.GROUP`
is locked as long as the entry lives, which is how others know. Exit code: the simulation's.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import select
import signal
import socket
import sys
import time

from dovetail.executors.pods import messages as wire
from dovetail.executors.pods import orphan_limit
from dovetail.executors.pods.spawn import Placing
from dovetail.executors.pods.supervised import Keeping
from dovetail.host import processes
from dovetail.host.session import join_session, leave_session, remove_tree, shared_session

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = 10.0  # seconds for the keeper to clean up before it is ended itself
_TERMINATED = 128 + signal.SIGTERM


class Entry:
    """See above; `run` returns the exit code."""

    def __init__(self, session: str, simulation: str, group: int, uid: str) -> None:
        self.session = session
        self.directory = os.path.join(session, simulation)
        self.pod = wire.Pod(simulation, group, uid)
        self.path = os.path.join(self.directory, f"pod.{group}")
        if len(self.path) + len(".sock") > 107:
            raise ValueError(f"{self.path}: too long for the name of a socket")
        self.link: socket.socket | None = None
        self.outbox = bytearray()
        self.decoder = wire.Decoder()
        self.seen = time.monotonic()  # when there was an agent
        self.limit = orphan_limit()
        self.held: list[int] = []
        self.placing: Placing | None = None
        self.keeping = Keeping(self.directory, self.watch, self.say)
        self.code: int | None = None
        self.terminated = self.suspended = False
        self.poller = select.poll()
        self.watched: dict[int, Callable[[], None]] = {}
        processes.adopt_orphans()
        self.waker = processes.signal_pipe()
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, frame: None)
        self.watch(self.waker, self._wake)

    def run(self) -> int:
        """Serve until the simulation is over; then leave nothing behind."""
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
            if self.terminated and not self.keeping.pending:
                self.code = self.keeping.code(_TERMINATED)
        self._clean_up()
        return self.code

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
        self.link, self.outbox, self.decoder = link, bytearray(), wire.Decoder()
        self.watch(link.fileno(), self._read)
        assert self.placing
        for message in (self.pod, *self.keeping.told.values(), *self.placing.answers()):
            self.say(message)

    def _settle(self) -> None:
        """Take our place in the session, which an agent has made."""
        if self.placing:
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
        self.placing = Placing(self.path + ".sock", self.pod.group, self.watch, self.say)

    def say(self, message: wire.Message) -> None:
        """Tell the agent; without one this is lost, and said again to the next."""
        if self.link is not None:
            self.outbox += wire.encode(message)
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
            messages = self.decoder.feed(data)
        except BlockingIOError:
            return
        except (OSError, wire.WireError):
            data, messages = b"", []
        for message in messages:
            self._obey(message)
        if not data:
            self._disconnect()

    def _disconnect(self) -> None:
        if self.link is not None:
            self.watch(self.link.fileno(), None)
            self.link.close()
            self.link = None
            self.seen = time.monotonic()

    def _obey(self, message: wire.Message) -> None:
        assert self.placing
        if isinstance(message, wire.Run):
            self.placing.meet(message.hosts)
            if self.pod.group == 0:
                self.keeping.start(message)
        elif isinstance(message, wire.Stop):
            self._stop()
        elif isinstance(message, wire.Suspend):
            self._suspend(message.suspended)
        elif isinstance(message, wire.Spawn):
            self.placing.spawn(message)
        elif isinstance(message, wire.Spawned):
            self.placing.answered(message)
        elif isinstance(message, wire.End):
            self.code = message.code & 255

    def _stop(self) -> None:
        """Ask the simulation to end; what is suspended could not."""
        self._suspend(False)
        if self.pod.group == 0:
            self.keeping.stop()

    def _suspend(self, suspended: bool) -> None:
        """Stop the processes of the simulation in this pod, or let them go on.

        Those that run are left alone: a starter says so in the log when it is continued.
        """
        if suspended or self.suspended:
            root = self.keeping.pid or os.getpid()
            processes.pause_all(f"DOVETAIL_DIR={self.directory}", root, suspended)
        self.suspended = suspended

    # --- signals, and the end ---

    def _wake(self) -> None:
        if set(os.read(self.waker, 512)) - {int(signal.SIGCHLD)}:
            self.terminated = True
            self._stop()
        self._reap()

    def _reap(self) -> None:
        for pid, status in processes.ended_children():
            if pid == self.keeping.pid:
                self.keeping.bury(os.waitstatus_to_exitcode(status))
            elif self.placing:
                self.placing.ended(pid, status)

    def _clean_up(self) -> None:
        """End all, remove what is ours, and the rest if we are the last."""
        self.keeping.let_go()
        deadline = time.monotonic() + PATIENCE
        while self.keeping.pid and time.monotonic() < deadline:
            for fd, _ in self.poller.poll(100):
                if fd == self.waker:
                    os.read(self.waker, 512)
            self._reap()
        if self.placing:
            self.placing.close(self.path + ".sock")
            marker = f"DOVETAIL_DIR={self.directory}"
            processes.end_all(lambda: processes.members(marker, os.getpid()))
            self._flush()
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            with contextlib.suppress(OSError):
                if not any(name.startswith("pod.") for name in os.listdir(self.directory)):
                    remove_tree(self.directory)
        self._disconnect()
        for handle in self.held[1:]:
            os.close(handle)
        if self.held:
            leave_session(self.session, self.held[0])


def main() -> None:
    """Be a pod's first process."""
    parser = argparse.ArgumentParser(prog="dovetail-entry")
    parser.add_argument("--run", required=True, help="id of the run")
    parser.add_argument("--node", required=True, help="name of this node")
    parser.add_argument("--simulation", required=True, help="its name, one for each launch")
    parser.add_argument("--group", required=True, type=int, help="rank group, from 0")
    parser.add_argument("--uid", required=True, help="of the pod")
    args = parser.parse_args()
    session = shared_session(args.run, args.node)
    sys.exit(Entry(session, args.simulation, args.group, args.uid).run())
