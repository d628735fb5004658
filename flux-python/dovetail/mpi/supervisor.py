# SPDX-License-Identifier: LGPL-3.0-or-later
"""Runs one simulation, and ends it when nobody is left who wants it; then perhaps another.

One process for each simulation that runs, started by the local executor. Inputs: on stdin the
length of a text of JSON in four bytes, and the text (see `Supervisor`), then commands, one per
line: `stop`, or `checkpoint` to have the program stop at one; and once it has ended `release`, to
remove what is left of it. The next simulation may follow then. End of file on stdin means that the
executor needs nothing more, or has died: everything is ended and removed at once. Outputs:
`log` in the simulation's directory, the count of `Time =` lines in the file `iterations`
of its session directory, and on stdout lines of JSON: `started`, `result`, and `removed` if the
next simulation may follow. Where the nodes of
a simulation have no folder in common, `prepared` comes first, and the command `spread` answers it
once the prepared case is on all of them.

Invariants: no descendant escapes, since orphans become the supervisor's own children; it stays
outside the simulation's control group, so that suspending that does not suspend it; neither a
flood of output nor a full disk stops it. Imports stay few: they cost milliseconds each time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import select
import signal
import sys
import time

from dovetail.core.causes import NOT_NOW, NOTHING_LEFT, Cause
from dovetail.core.errors import BadInput
from dovetail.host import borrowed_python, processes
from dovetail.host.cgroups import Group
from dovetail.host.memory import KernelKills, out_of_memory
from dovetail.host.session import end_simulation, remove_simulation, remove_traces
from dovetail.mpi import launcher, time_lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL when a simulation is stopped."""

PAUSE = 0.25
"""Seconds in which further output waits, once it has told when an iteration began: else each line
would have us on a core of a rank. A run looks no more often at what is counted."""
UNTOLD = 1.0
"""Seconds after which an iteration that began in a pause is told, as none has begun since."""

STUCK = 60.0
"""Seconds that a starter which has said that it ends all may live without any process of its own.
Open MPI's may hang then, where many ranks end at once."""
LOOK = 15.0
"""Seconds between two looks for one that does."""

AGAIN = 2.0
"""Seconds between two tries to copy a case to a disk that is full."""

_TAIL = 1 << 20
_PIECE = 1 << 16
_PIPE_SIZE = 1031, 1 << 20  # F_SETPIPE_SZ, and as much as anybody may have
_KILLED = 128 + signal.SIGKILL


class Log:
    """The simulation's output: the beginning and the end of it in a file.

    `limit` is the largest size of the file, bytes; with `keep` what is there stays. `trouble` says
    why the file is not complete.
    """

    def __init__(self, path: str, limit: int, keep: bool = False) -> None:
        self.trouble = ""
        self.recent = bytearray()
        self._room = max(0, limit - _TAIL)
        self._skipped = 0
        self._file = -1
        try:
            mode = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if keep else os.O_TRUNC)
            self._file = os.open(path, mode, 0o666)
            self._room = max(0, self._room - os.fstat(self._file).st_size)
        except OSError as error:
            self.trouble = f"no log: {error.strerror}"

    def take(self, chunk: bytes) -> None:
        """Keep what the simulation printed."""
        head = chunk[: self._room]
        self._room -= len(head)
        self._write(head)
        self._skipped += len(chunk) - len(head)
        self.recent += chunk
        if len(self.recent) > 2 * _TAIL:
            del self.recent[:-_TAIL]

    def close(self) -> None:
        """Write the end of an output that was too long."""
        if self._skipped and not self.trouble:
            tail = self.recent[-min(self._skipped, _TAIL) :]
            lost = self._skipped - len(tail)
            self.trouble = f"log too long: {lost} bytes left out of the middle"
            self._write(b"\n[dovetail: %d bytes left out here]\n" % lost + tail)

    def _write(self, data: bytes) -> None:
        while data and self._file >= 0:
            try:
                data = data[os.write(self._file, data) :]
            except OSError as error:
                self.trouble = f"log incomplete: {error.strerror}"
                break  # what comes later may find room


class Supervisor:
    """One simulation from its first step to the removal of its last trace.

    `config` has: `name`, `directory` (session directory of the simulation), `temporary`,
    `case` (to copy from), `home` (its output directory), `ranks`, `command`, `mpi` (the command's,
    empty if it has none; null if that is not known), `prepare` (pairs of
    a line and its words), `alone` (whether its one rank needs no starter), `environment` (to add),
    `libraries` (MPI to preloaded library), `group`
    (weight and control directory of its control group; its processes join the group `job`),
    `cpus`, `log_limit`; and only in a pod `hosts`, those of all its pods (see `launcher.across`),
    and `apart`, whether their nodes have no folder in common; and only in none `room`, for how many
    seconds its case may wait for room on the disk.
    Where it is to go on from an earlier launch, `go_on` has the words for that, and where it can be
    stopped at a checkpoint `halt` and `halted`; see `Spec`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.group = Group(*config["group"])
        self.job = Group(*config["job"])
        self.kills = KernelKills(self.group.control)
        self.case = os.path.join(config["home"], "case")
        processes.adopt_orphans()
        self.null = os.open(os.devnull, os.O_RDONLY)
        self.output, self.output_end = os.pipe()
        os.set_blocking(self.output, False)
        with contextlib.suppress(OSError):  # too many pipes of this user's are as large
            fcntl.fcntl(self.output, *_PIPE_SIZE)
        self.paused = 0.0  # CLOCK_MONOTONIC; until then output waits; 0 if none has waited
        self.log: Log | None = None
        self.time_lines: time_lines.Counter | None = None
        self.child = 0
        self.status: int | None = None
        self.base: dict[str, str] = {}  # the environment of all steps
        self.runs = False  # its own command does
        self.asked = False  # to stop at a checkpoint
        self.spread = not config.get("apart")  # the prepared case is wherever there are ranks
        self.stopping = False
        self.deadline = 0.0  # of the grace after a stop; 0 if none runs
        self.orphaned = False
        self.stuck: dict[int, tuple[int, float]] = {}  # start ticks of starters, and since when
        self.look_at = 0.0  # CLOCK_MONOTONIC
        self.unstuck = False  # one was ended, as it was stuck
        self.released = False  # what is left of it can be removed
        self.waker = processes.signal_pipe()
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, frame: None)

    def run(self) -> bool:
        """All steps, then the result, then the clean-up once the executor has let go.

        True if the next simulation may follow.
        """
        cause, code, reason = self._steps()
        self._await_stopped()
        left = end_simulation(self.config["directory"], self.group, os.getpid())
        self._drain()
        if self.log:
            self.log.close()
        trouble = self.log.trouble if self.log else ""
        if left:
            trouble += f"; processes {left} cannot be ended"
        result = {"cause": cause.value, "code": code, "reason": reason, "trouble": trouble}
        self._tell({"kind": "result", **result})
        while not (self.orphaned or self.released):
            self._wait(None)
        directory, temporary = self.config["directory"], self.config["temporary"]
        if "hosts" in self.config:  # in a pod the entrypoint removes the rest, or else the agent
            end_simulation(directory, self.group, os.getpid())
        elif left or self.orphaned:
            remove_simulation(directory, self.group, temporary, os.getpid())
        else:
            remove_traces(directory, self.group, temporary)
        if left or self.orphaned:
            return False
        signal.set_wakeup_fd(-1)
        os.closerange(3, 1024)  # all that is open here was of this simulation
        self._tell({"kind": "removed"})
        return True

    def _steps(self) -> tuple[Cause, int, str]:
        config = self.config
        try:
            os.makedirs(config["home"], exist_ok=True)
        except OSError as error:
            return Cause.LAUNCH_FAILED, 1, f"cannot make {config['home']}: {error.strerror}"
        kept = bool(config.get("go_on")) and os.path.isdir(self.case)
        self.log = Log(os.path.join(config["home"], "log"), config["log_limit"], kept)
        ours = os.environ if "hosts" in config else launcher.here(os.environ)
        base = self.base = launcher.environment(
            {**ours, **config["environment"]},
            config["directory"],
            config["temporary"],
        )
        code, over = self._go_on(base) if kept else (0, 0)
        # What it could go on from is not to be copied over.
        if code == NOT_NOW or launcher.by_signal(code):
            return self._not_launched("going on from its checkpoint", code)
        if code := 0 if over else self._copy_case(base):
            return self._not_launched("copying the case", code)
        for line, words in [] if over else config["prepare"]:
            if code := self._step(words, self.case, base):
                return self._not_launched(f"prepare step '{line}'", code)
        if not self.spread:
            self._tell({"kind": "prepared"})
        while not (self.spread or self.stopping or self.orphaned):
            self._wait(None)
        path = base.get("PATH", os.defpath)
        program, mpi = config["command"][0], config["mpi"]
        if mpi is None:
            mpi = launcher.flavour(program, path, self.case, base)
        if config.get("alone"):
            words = list(config["command"])
            base.update(launcher.ALONE)
        else:
            words = launcher.command_line(config["command"], config["ranks"], path, mpi)
        # A script runs under its starter's MPI.
        if not mpi and words[0] != program:
            mpi = launcher.flavour(words[0], path, self.case, base)
        if "hosts" in config:
            base.update(launcher.within(config["hosts"], path))
            if len(config["hosts"]) > 1:
                words = self._spread(base, words, path, mpi)
        self.time_lines = time_lines.Counter(config["directory"])  # of the command alone
        self._tell({"kind": "started", "mpi": mpi, "iterations": over})
        self.runs = True
        code = self._step(
            words, self.case, launcher.preload(base, config["libraries"].get(mpi, ""))
        )
        self.runs = False
        if not code:
            # Where that fails, as for want of memory, it goes on, and ends at once if all was done.
            if self.asked and self._step(config["halted"], self.case, base) != NOTHING_LEFT:
                return Cause.CHECKPOINTED, 0, ""
            return Cause.DONE, 0, ""
        starved = self.kills.why()
        why = launcher.explain(code, self._recent(), self._ranks(), self._aborted(), starved)
        if self.unstuck:
            why += f"; then Open MPI's starter hung, and was ended after {STUCK:.0f} s"
        return Cause.FAILED, code, why

    def _not_launched(self, what: str, code: int) -> tuple[Cause, int, str]:
        """The end of a simulation whose step before its own command failed."""
        said = launcher.complaint(self._recent())
        why = f"{what} failed with exit code {code}" + (f": {said}" if said else "")
        starved = self.kills.why() if code == _KILLED else ""
        return Cause.LAUNCH_FAILED, code, out_of_memory(what, starved) if starved else why

    def _copy_case(self, environment: dict[str, str]) -> int:
        """Copy the case, where its disk is full until there is room, for a time; the exit code."""
        until, told = time.monotonic() + self.config.get("room", 0.0), False
        while True:
            words = [*_copy(os.path.lexists(self.case)), self.config["case"], self.case]
            code = self._step(words, "/", environment)
            again = min(until, time.monotonic() + AGAIN)
            if not code or again == until or not _full(self.config["home"]):
                return code
            if not told:
                why = f"there is no room for its case on the disk of {self.config['home']}"
                self._tell({"kind": "delayed", "why": why})
                told = True
            while not (self.stopping or self.orphaned) and time.monotonic() < again:
                self._wait(again - time.monotonic())

    def _go_on(self, environment: dict[str, str]) -> tuple[int, int]:
        """Make the case of an earlier launch ready.

        Returns the exit code, and how many iterations are over; 0 to begin anew.
        """
        code = self._step(self.config["go_on"], self.case, environment)
        said = self._recent().split()
        over = int(said[-1]) if not code and said and said[-1].isdecimal() else 0
        if self.log and not over and code != NOT_NOW and not launcher.by_signal(code):
            self.log.take(b"[dovetail: there is nothing to go on from; it begins anew]\n")
        return code, over

    def _halt(self) -> None:
        """Ask the command to stop at a checkpoint, once; it ends when it has, as at any other end.

        A controller that goes on with what one before it started asks again.
        """
        if self.runs and self.status is None and self.config.get("halt") and not self.asked:
            self.asked = True
            self._ask()

    def _ask(self) -> None:
        """Do so if that was wanted, once there is a process."""
        if self.runs and self.asked and self.child:
            files = {0: self.null, 1: self.output_end, 2: self.output_end}
            base = {**self.base, "DOVETAIL_PID": str(self.child)}
            processes.start_child(self.config["halt"], self.case, base, files, self._confine)

    def _spread(self, base: dict[str, str], words: list[str], path: str, mpi: str) -> list[str]:
        """Have the starter put the ranks into all pods of the simulation; its command line."""
        config = self.config
        from dovetail.host import install_paths  # only where there are several pods

        script = str(install_paths.PACKAGES / "dovetail/executors/pods/rsh_agent.py")
        for name, text in launcher.host_files(config["hosts"]).items():
            with open(os.path.join(config["directory"], f"hosts.{name}"), "w") as file:
                file.write(text)
        base.update(launcher.across(config["hosts"], config["directory"], script))
        if mpi != "mpich":
            return words  # Open MPI takes it from the environment
        place = [*borrowed_python.own(), "-I", "-S", script, "place"]
        return launcher.command_line(config["command"], config["ranks"], path, mpi, place)

    def _step(self, words: list[str], directory: str, environment: dict[str, str]) -> int:
        """Run one program to its end; its exit code, 128 more than the signal that ended it."""
        self.status, self.child = None, 0
        self._wait(0.0)  # what was said between two steps
        if self.stopping or self.orphaned:
            return 128 + signal.SIGTERM
        files = {0: self.null, 1: self.output_end, 2: self.output_end}
        self.child = processes.start_child(words, directory, environment, files, self._confine)
        self._ask()
        while self.status is None:
            if self.orphaned or (self.deadline and time.monotonic() >= self.deadline):
                end_simulation(self.config["directory"], self.group, os.getpid())
                self.deadline = 0.0
                self._reap()
            else:
                self._wait(self.deadline - time.monotonic() if self.deadline else LOOK)
                self._end_stuck()
        self._drain()
        code = os.waitstatus_to_exitcode(self.status)
        code = code if code >= 0 else 128 - code
        return 1 if self.unstuck and code == _KILLED else code

    def _confine(self) -> None:
        """In a step's own process: join the simulation's control group, and keep to its CPUs."""
        self.job.add(os.getpid())
        if self.config["cpus"]:
            os.sched_setaffinity(0, self.config["cpus"])

    def _wait(self, limit: float | None) -> None:
        """Take in whatever comes first: output, a command, a child's end, or `limit` seconds.

        It may also come back earlier, with nothing: as a pause ends, or a line is to be told.
        """
        again = math.inf
        if self.time_lines and self.time_lines.untold:
            self.time_lines.tell(UNTOLD)
            again = UNTOLD
        poller = select.poll()
        sources = [self.waker] + ([] if self.orphaned else [0])
        if self.paused > (now := time.monotonic()):
            again = self.paused - now
        else:
            sources.append(self.output)
            if self.paused and not select.select([self.output], [], [], 0)[0]:
                self.paused = 0.0
        for source in sources:
            poller.register(source, select.POLLIN)
        limit = min(again, math.inf if limit is None else max(0.0, limit))
        for source, _ in poller.poll(None if limit == math.inf else limit * 1000):
            if source == self.output:
                self._read()
            elif source == self.waker:
                if set(os.read(self.waker, 512)) - {int(signal.SIGCHLD)}:
                    self._stop()
                self._reap()
            else:
                words = os.read(0, 512)
                self.orphaned = not words
                self.spread = self.spread or b"spread" in words
                self.released = self.released or b"release" in words
                if b"checkpoint" in words:
                    self._halt()
                if b"stop" in words:
                    self._stop()

    def _stop(self) -> None:
        """Ask the running step to end; `_step` insists when the grace is over."""
        if not self.stopping:
            self.stopping = True
            self.deadline = time.monotonic() + GRACE
            if self.child and self.status is None:
                with contextlib.suppress(OSError):
                    os.killpg(self.child, signal.SIGTERM)

    def _end_stuck(self) -> None:
        """End starters that have nothing left to wait for; a script goes on after its own."""
        now = time.monotonic()
        if now < self.look_at:
            return
        self.look_at = now + LOOK
        if not (self.log and launcher.ends_all(self.log.recent)):
            return
        there = self.group.members() or processes.members(
            f"DOVETAIL_DIR={self.config['directory']}", os.getpid()
        )
        parents = {processes.parent(pid) for pid in there if processes.start_ticks(pid)}
        alone = {
            pid: ticks
            for pid, ticks in there.items()
            if pid not in parents and launcher.may_hang(processes.program(pid))
        }
        self.stuck = {pid: self.stuck.get(pid, (ticks, now)) for pid, ticks in alone.items()}
        for pid, (ticks, since) in self.stuck.items():
            if now - since >= STUCK and processes.send(pid, ticks, signal.SIGKILL):
                self.unstuck = True

    def _await_stopped(self) -> None:
        """After a stop, leave the rest of the grace to those who outlive the step's own process."""
        marker = f"DOVETAIL_DIR={self.config['directory']}"
        while not self.orphaned and self.deadline > time.monotonic():
            if not processes.members(marker, os.getpid()):
                return
            self._wait(self.deadline - time.monotonic())  # each of them becomes our child

    def _reap(self) -> None:
        """Collect the children that have ended, adopted ones included."""
        for pid, status in processes.ended_children():
            if pid == self.child:
                self.status = status

    def _read(self) -> bool:
        try:
            chunk = os.read(self.output, _PIECE)
        except BlockingIOError:
            return False
        if self.log:
            self.log.take(chunk)
        told = not self.time_lines or self.time_lines.take(chunk, late=self.paused > 0)
        if len(chunk) < _PIECE:  # else there may be more that has waited
            self.paused = time.monotonic() + PAUSE if told else 0.0
        return True

    def _drain(self) -> None:
        """Read what is in the pipe now; a daemon that goes on writing must not hold us."""
        for _ in range(64):
            if not self._read():
                break
        self.paused = 0.0
        if self.time_lines:
            self.time_lines.tell()

    def _recent(self) -> str:
        return bytes(self.log.recent[-_TAIL:]).decode(errors="replace") if self.log else ""

    def _ranks(self) -> dict[int, int]:
        """Process id to rank, by the names of the rank pages, where pods do not share an id."""
        pages: list[list[str]] = []
        with contextlib.suppress(OSError):  # somebody has removed the session
            pages = [n.split(".") for n in os.listdir(self.config["directory"])]
        pairs = {(int(p[2]), int(p[1])) for p in pages if p[0] == "rank" and len(p) == 3}
        pids = [pid for pid, _ in pairs]
        return {pid: rank for pid, rank in pairs if pids.count(pid) == 1}

    def _aborted(self) -> list[int]:
        """The simulation's own ranks that called MPI_Abort, as far as their pages can be read."""
        from dovetail.mpi import page  # only where something failed

        with contextlib.suppress(BadInput, OSError):
            pages = page.read_pages(self.config["directory"])
            return [one.rank for one in pages if one.state == "aborted" and one.world == 0]
        return []

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            os.write(1, json.dumps(message).encode() + b"\n")


def _copy(there: bool) -> list[str]:
    """The words that copy the first folder which follows to the second, in place of what is there.

    Whose the case is does not matter: in a pod others' ids may not even have a number. What is
    there may have folders to which their owner may not write. A link to the case is followed: a
    copy of it would be a way into what must not change.
    """
    own = borrowed_python.own()
    if len(own) == 1:
        copy = ["cp", "-a", "-H", "--no-preserve=ownership", "-T", "--"]
        if not there:
            return copy
        remove = 'rm -rf -- "$1" 2>/dev/null || { chmod -R u+rwX -- "$1"; rm -rf -- "$1"; }'
        script = f'{remove} && {" ".join(copy)} "$0" "$1"'
        return ["sh", "-c", script]
    # An image may have a cp that knows less. Pipes, sockets and devices are left out.
    script = (
        "import os, shutil, stat, sys; where = sys.argv[1:]; "
        "kind = lambda *path: stat.S_IFMT(os.lstat(os.path.join(*path)).st_mode); "
        "known = stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK; "
        "others = lambda top, names: [name for name in names if kind(top, name) not in known]; "
        "[os.chmod(top, 0o700) for top, _, _ in os.walk(where[1])]; "
        "shutil.rmtree(where[1], ignore_errors=True); "
        "shutil.copytree(*where, symlinks=True, ignore=others)"
    )
    return [*own, "-I", "-S", "-c", script]


def _full(folder: str) -> bool:
    """Whether its disk, or what the user may have of that, is full."""
    probe = os.path.join(folder, ".room")
    try:
        with open(probe, "wb", buffering=0) as file:
            written = file.write(bytes(_PIECE))  # as much of it as there is room for
            os.fsync(file)
            return written < _PIECE
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(probe)


def main() -> None:
    """Supervise one simulation after the other, as long as there is a configuration.

    One that waited in vain, as there was no simulation for it, just ends.
    """
    while Supervisor(_configuration()).run():
        pass


def _configuration() -> dict[str, Any]:
    """The next one from standard input."""
    head, text = os.read(0, 4), b""
    size = int.from_bytes(head, "little") if head else sys.exit()
    while len(text) < size:
        text += os.read(0, size - len(text)) or sys.exit(1)
    config: dict[str, Any] = json.loads(text)
    return config


if __name__ == "__main__":
    main()
