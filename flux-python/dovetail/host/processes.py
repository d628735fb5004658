# SPDX-License-Identifier: LGPL-3.0-or-later
"""Processes: found, recognised and ended through /proc; children started and collected.

Inputs: process ids and start ticks; programs to start. Outputs: signals, children and how they
ended. Invariants: another's process is always named by its id together with its start time, so
that an id which the kernel gave to somebody else in the meantime is never touched; a child that
was started here does not outlive its parent. Imports stay few: the supervisor starts once per
simulation.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping
    from types import FrameType
    from typing import NoReturn, Union

    _Handler = Union[Callable[[int, Union[FrameType, None]], object], int, None]

Processes = dict[int, int]
"""Process id to start ticks (clock ticks since boot, field 22 of /proc/PID/stat)."""

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
CANNOT_START = 127
"""Exit code of a child that could not become its program, as a shell has it."""

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_libc = ctypes.CDLL(None, use_errno=True)


# --- Any process of this machine ---


def _stat(place: int | str) -> tuple[str, int, int] | None:
    """State letter, parent's id and start ticks; None if there is no such process.

    `place` is its id, or a thread's folder below /proc.
    """
    try:
        with open(f"/proc/{place}/stat", "rb") as file:
            # The name, in parentheses, may itself hold spaces and parentheses.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), int(fields[1]), int(fields[19])


def _living(pid: int, state: str) -> str:
    """The folder below /proc of a process in this state, or of a thread of it that lives.

    Empty if it has ended. One whose main thread has ended looks like a zombie, and lives on as
    long as any other does.
    """
    if state not in "ZX":
        return str(pid)
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            stat = _stat(f"{pid}/task/{thread}")
            if stat is not None and stat[0] not in "ZX":
                return f"{pid}/task/{thread}"
    return ""


def start_ticks(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 if it is gone or a zombie."""
    stat = _stat(pid)
    return stat[2] if stat is not None and _living(pid, stat[0]) else 0


def parent(pid: int) -> int:
    """The id of the process that it is a child of; 0 if there is none."""
    stat = _stat(pid)
    return 0 if stat is None else stat[1]


def name(pid: int) -> str:
    """What the kernel calls it, 15 letters at most; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return os.fsdecode(file.read().rstrip(b"\n"))
    except OSError:
        return ""


def program(pid: int) -> str:
    """The file that it runs; empty if it is gone, or not ours to look into."""
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


def namespace() -> str:
    """What tells the set of processes that we see, by ids of its own, from others."""
    return os.readlink("/proc/self/ns/pid")


def in_front(terminal: int) -> bool:
    """Whether we are in the foreground of a terminal, or of one that has none."""
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # it is not our session's
        return True


def alive(pid: int, ticks: int) -> bool:
    """Whether exactly that process still runs: ids are reused, start times are not."""
    return ticks > 0 and start_ticks(pid) == ticks


def peak_memory(pids: Iterable[int]) -> int:
    """The sum of the largest resident sets that these processes had so far, bytes."""
    total = 0
    for pid in pids:
        # As bytes: its name is there too, and may be cut within a letter.
        with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
            total += sum(int(line.split()[1]) << 10 for line in file if line.startswith(b"VmHWM:"))
    return total


def queued(pids: Iterable[int]) -> float | None:
    """Seconds that the threads which these processes have now waited for a core, added up.

    None where the kernel does not tell.
    """
    total, known = 0, False
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                    total += int(file.read().split()[1])
                    known = True
    return total * 1e-9 if known else None


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time of these processes, and of those of their children that they have collected."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
            total += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    return total / os.sysconf("SC_CLK_TCK")


def all_but(pids: Container[int]) -> Processes:
    """All live processes that we see but these."""
    there = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    found = {pid: start_ticks(pid) for pid in there if pid not in pids}
    return {pid: ticks for pid, ticks in found.items() if ticks}


def members(marker: str, root: int = 0) -> Processes:
    """This user's live processes below `root`, or with `marker` in their environment.

    `marker` is `NAME=value`. Either criterion alone has a gap: a program may clear its
    environment, and the children of a dead `root` belong to somebody else.
    """
    uid = os.getuid()
    wanted = b"\0" + os.fsencode(marker) + b"\0"
    parents: dict[int, int] = {}
    ticks: Processes = {}
    found = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        pid = int(entry)
        stat = _stat(pid)
        living = "" if stat is None else _living(pid, stat[0])
        if stat is None or not living:
            continue
        parents[pid], ticks[pid] = stat[1], stat[2]
        try:
            if os.stat(f"/proc/{pid}").st_uid == uid:
                with open(f"/proc/{living}/environ", "rb") as file:
                    if wanted in b"\0" + file.read() + b"\0":
                        found.add(pid)
        except OSError:
            pass  # it ended, or is not ours to look into
    for pid in parents:
        above = parents[pid]
        while root and above > 1 and above != root:
            above = parents.get(above, 0)
        if root and above == root:
            found.add(pid)
    found.discard(os.getpid())
    return {pid: ticks[pid] for pid in found}


def send(pid: int, ticks: int, number: int) -> bool:
    """Send a signal to exactly this process; False if it is gone or not ours."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except (OSError, AttributeError):
        handle = -1  # an old kernel: check and hope, the gap is microseconds
    try:
        if start_ticks(pid) != ticks:
            return False
        if handle >= 0:
            signal.pidfd_send_signal(handle, number)
        else:
            os.kill(pid, number)
        return True
    except OSError:
        return False
    finally:
        if handle >= 0:
            os.close(handle)


def end_all(find: Callable[[], Processes], limit: float = 10.0) -> Processes:
    """SIGKILL whatever `find` finds until it finds nothing; returns what outlived `limit` seconds.

    The loop is what catches processes that fork while they are being killed.
    """
    deadline = time.monotonic() + limit
    while True:
        found = find()
        if not found or time.monotonic() > deadline:
            return found
        poller = select.poll()
        handles = []
        for pid, ticks in found.items():
            try:
                handles.append(os.pidfd_open(pid))
                poller.register(handles[-1], select.POLLIN)
            except (OSError, AttributeError):
                pass
            send(pid, ticks, signal.SIGKILL)
        poller.poll(20)  # until one of them is gone; ms
        for handle in handles:
            os.close(handle)


def pause_all(marker: str, root: int, paused: bool) -> None:
    """SIGSTOP or SIGCONT what `members` finds, again and again until nothing new appears."""
    number = signal.SIGSTOP if paused else signal.SIGCONT
    done: Processes = {}
    while True:
        new = {p: t for p, t in members(marker, root).items() if done.get(p) != t}
        if not new:
            return
        for pid, ticks in new.items():
            send(pid, ticks, number)
        done.update(new)


# --- Our own children ---


def adopt_orphans() -> None:
    """From now on a descendant whose parent ends becomes our own child."""
    _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def signal_pipe() -> int:
    """The end of a pipe from which the number of each signal that comes can be read, as a byte.

    Signals that have a handler, that is; the pipe does not block.
    """
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


def restore_handlers(before: Iterable[tuple[int, _Handler]]) -> None:
    """Give signals the handlers back that `signal.signal` or `getsignal` said they had.

    Python says None for a handler that a C library installed, such as UCX by the user's
    LD_PRELOAD, and cannot install that again: the signal then does what it does by default.
    """
    for number, handler in before:
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def ended_children() -> Iterator[tuple[int, int]]:
    """Collect the children that have ended: process id and wait status."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            yield pid, status


def start_child(
    words: list[str],
    directory: str,
    environment: Mapping[str, str],
    files: Mapping[int, int],
    ready: Callable[[], None] = lambda: None,
    remainder: tuple[int, int] = (0, 1),
) -> int:
    """Start a program as the leader of a process group; its process id.

    `files` has what is open in it: its number there, and ours. `ready` is called in the child.
    Its process id, divided by the second number of `remainder`, leaves the first.
    What fails there is told on its standard error, and the exit code is CANNOT_START. A signal
    that is to end the program does so from the first, and is not taken by our own handlers.
    """
    parent = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        while True:
            pid = os.fork()
            fits = (pid or os.getpid()) % remainder[1] == remainder[0]
            if pid == 0:
                if not fits:
                    os._exit(0)
                _become(parent, mask, words, directory, environment, files, ready)
            if fits:
                break
            os.waitpid(pid, 0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # as in the child, whoever comes first
    return pid


def _become(
    parent: int,
    mask: set[int | signal.Signals],
    words: list[str],
    directory: str,
    environment: Mapping[str, str],
    files: Mapping[int, int],
    ready: Callable[[], None],
) -> NoReturn:
    try:
        os.setpgid(0, 0)
        _libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(CANNOT_START)
        signal.set_wakeup_fd(-1)
        handled = [one for one in _ENDING if callable(signal.getsignal(one))]
        for one in (*handled, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(one, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # First out of each other's way: a number may be that of another file.
        above = max([2, *files, *files.values()]) + 1
        high = {n: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for n, fd in files.items()}
        for number, fd in high.items():
            os.dup2(fd, number)
        ready()
        os.chdir(directory)
        os.execvpe(words[0], words, environment)
    except OSError as error:
        os.write(2, f"cannot start {words[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(CANNOT_START)
