# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a process needs that keeps others: signals to poll for, orphans, a clean start.

Outputs: a pipe, children and how they ended. Invariant: a child that was started here does not
outlive its parent. Imports stay few: the keeper starts once per simulation.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import NoReturn

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
CANNOT_START = 127
"""Exit code of a child that could not become its program, as a shell has it."""

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_libc = ctypes.CDLL(None, use_errno=True)


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


def ended() -> Iterator[tuple[int, int]]:
    """Collect the children that have ended: process id and wait status."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            yield pid, status


def start(
    words: list[str],
    directory: str,
    environment: Mapping[str, str],
    files: Mapping[int, int],
    ready: Callable[[], None] = lambda: None,
) -> int:
    """Start a program as the leader of a process group; its process id.

    `files` has what is open in it: its number there, and ours. `ready` is called in the child.
    What fails there is told on its standard error, and the exit code is CANNOT_START. A signal
    that is to end the program does so from the first, and is not taken by our own handlers.
    """
    parent = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        pid = os.fork()
        if pid == 0:
            _become(parent, mask, words, directory, environment, files, ready)
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
