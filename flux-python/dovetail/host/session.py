# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a run leaves on a machine while it runs, and how all of it is removed.

A run has a session: the directory `/dev/shm/dovetail-<uid>-<run id>`, and in it the file
`owner`, which the controlling process keeps locked as long as it lives. It lists the run's
control groups and temporary directory. The kernel drops the lock with the process, so a
session whose lock is free belongs to a dead run, whoever has its process id now. A local run
has a warden, a process that sleeps on that lock and removes the session as soon as it gets it,
and so has a profiled program.
A run in pods has a session on each node, whose lock agent and entries share: the last of them
to leave removes it. What is left if all are killed, the next run of the same user sweeps.

Invariant: only what `owner` lists and what carries the session's own name is ever removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import select
import time
import zlib
from collections.abc import Iterator

from dovetail.core.errors import BadInput
from dovetail.host import processes
from dovetail.host.cgroups import Group

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess

SESSION_ROOT = "/dev/shm"
_YOUNG = 60.0  # seconds that a session may exist without its owner file
_PATIENCE = 10.0  # seconds to go on trying to remove one
_RUN_WARDEN = "from dovetail.host.session import sweep_session; sweep_session(sys.argv[1], True)"


def create_session(
    run_id: str, group: Group, temporary: str, root: str = SESSION_ROOT
) -> tuple[str, int]:
    """Make a run's session; returns its directory, and the locked file to keep open.

    Raises OSError with the directory, of which nothing is left then.
    """
    session = os.path.join(root, f"dovetail-{os.getuid()}-{run_id}")
    os.mkdir(session, 0o700)
    record = {
        "pid": os.getpid(),
        "start_ticks": processes.start_ticks(os.getpid()),
        "pid_namespace": processes.namespace(),
        "weight": group.weight,
        "control": group.control,
        "temporary": temporary,
    }
    handle = -1
    try:
        # Locked before it has its name, so that no sweep ever sees it unlocked.
        handle = os.open(session + "/owner.new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.write(handle, json.dumps(record).encode() + b"\n")
        os.rename(session + "/owner.new", session + "/owner")
    except OSError as error:  # as where memory for it is full, which a write does not name
        if handle >= 0:
            os.close(handle)
        remove_tree(session)
        raise OSError(error.errno, error.strerror, session) from None
    return session, handle


def start_warden(session: str) -> subprocess.Popen[bytes]:
    """The warden of a session that this process has just created."""
    import subprocess  # a supervisor needs neither, and is to start at once

    from dovetail.host import install_paths

    return subprocess.Popen(
        [*install_paths.python_command(_RUN_WARDEN), session],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


@contextlib.contextmanager
def temporary_session(run_id: str) -> Iterator[str]:
    """A session without control groups; removed, with the processes of its simulations, after.

    Raises BadInput if it cannot be made.
    """
    try:
        path, handle = create_session(run_id, Group("", ""), "")
    except OSError as error:
        raise BadInput(f"session {run_id} in {SESSION_ROOT}: {error.strerror}") from error
    try:
        yield path
    finally:
        remove_session(path, os.pread(handle, 65536, 0))
        os.close(handle)


def shared_session(run_id: str, node: str, root: str = SESSION_ROOT) -> str:
    """The name of a run's session on a node: two nodes may be one machine, with one memory.

    Short, as sockets in it have names of at most 107 bytes.
    """
    digest = f"{zlib.crc32(node.encode()):08x}"
    return os.path.join(root, f"dovetail-{os.getuid()}-{run_id}.{digest}")


def join_session(session: str) -> int:
    """Take part in a session that several processes share; returns the file to keep open."""
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(session, 0o700)
        with contextlib.suppress(FileNotFoundError):  # another sweep takes it away this moment
            if os.lstat(session).st_uid != os.getuid() or os.path.islink(session):
                raise PermissionError(errno.EPERM, "belongs to somebody else", session)
            handle = os.open(session + "/owner", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            fcntl.flock(handle, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(session + "/owner")):
                    os.pwrite(handle, json.dumps({"shared": True}).encode() + b"\n", 0)
                    return handle
            os.close(handle)


def leave_session(session: str, handle: int) -> bool:
    """Leave a shared session and remove it if nobody else is in it; True if that is done."""
    os.close(handle)  # first: of several who leave at once, the last finds nobody
    return sweep_session(session)


def sweep_sessions(root: str = SESSION_ROOT) -> list[str]:
    """Remove what this user's dead runs left; returns the names of their sessions."""
    removed = []
    for name in sorted(os.listdir(root)):
        session = os.path.join(root, name)
        # A pod's user 0 is the one that started its cluster: whose it is, the file system knows.
        if re.match(r"dovetail-\d+-", name) and sweep_session(session):
            removed.append(name)
    return removed


def sweep_session(session: str, wait: bool = False) -> bool:
    """Remove one session if its run is dead; False if it lives, or is not ours.

    With `wait` until it is dead: so the warden sleeps for as long as the run lives.
    """
    with contextlib.suppress(OSError):
        status = os.lstat(session)
        if status.st_uid != os.getuid() or not os.path.isdir(session) or os.path.islink(session):
            return False
        try:
            handle = os.open(session + "/owner", os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            # Where the clock was set back, a time may be later than now.
            if abs(time.time() - status.st_mtime) < _YOUNG:
                return False
            remove_tree(session)
            return True
        try:
            if not _lock(handle, wait):
                return False
            if not os.path.samestat(os.fstat(handle), os.stat(session + "/owner")):
                return False  # removed by another sweep, and the name taken by another run
            remove_session(session, os.read(handle, 65536))
            return True
        finally:
            os.close(handle)
    return False


def _lock(handle: int, wait: bool) -> bool:
    """Lock a session's file; with `wait` however long it takes.

    A dead run whose lock is held is being removed by its warden: let that one end.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            return True
        if time.monotonic() > deadline or _lives(os.pread(handle, 65536, 0)):
            return False
        select.select([], [], [], 0.02)


def _lives(record: bytes) -> bool:
    """Whether those who hold a session's lock live: the one that made it, by id and start time.

    A shared lock is held by the living alone. Of those whom we cannot see, as an agent in a pod
    cannot see a run beside its cluster, we take it that they live: they have a warden.
    """
    with contextlib.suppress(ValueError, KeyError, TypeError):
        owner = json.loads(record)
        if owner.get("shared"):
            return True
        if owner.get("pid_namespace", "") not in ("", processes.namespace()):
            return True
        return processes.alive(int(owner["pid"]), int(owner["start_ticks"]))
    return False


def remove_session(session: str, record: bytes) -> None:
    """End and remove everything of a session; the caller holds its lock."""
    try:
        owner = json.loads(record)
        paths = [str(owner[key]) for key in ("weight", "control", "temporary")]
    except (ValueError, KeyError, TypeError):
        paths = ["", "", ""]
    name = os.path.basename(session)
    weight, control, temporary = (p if os.path.basename(p) == name else "" for p in paths)
    group = Group(weight, control)
    deadline = time.monotonic() + _PATIENCE
    while True:
        inside = set(os.listdir(session)) if os.path.isdir(session) else set()
        for simulation in inside - {"owner"}:
            remove_simulation(os.path.join(session, simulation), group.child(simulation), "")
        with contextlib.suppress(OSError):
            group.remove()
        if temporary:
            remove_tree(temporary)
        # A supervisor or launcher that has not noticed yet may have put something in: then look
        # again.
        late = inside - {"owner"} or any(map(os.path.exists, [*group.directories, temporary]))
        if not late or time.monotonic() > deadline:
            remove_tree(session)
            return
        select.select([], [], [], 0.02)


def remove_simulation(directory: str, group: Group, temporary: str, root: int = 0) -> list[int]:
    """End every process of one simulation, remove its directories and control groups.

    `root` is its supervisor if that one lives. Returns the processes that could not be ended.
    """
    left = end_simulation(directory, group, root)
    remove_traces(directory, group, temporary)
    return left


def remove_traces(directory: str, group: Group, temporary: str) -> None:
    """Remove the directories and control groups of a simulation whose processes have ended."""
    with contextlib.suppress(OSError):
        group.remove()
    for path in filter(None, (temporary, directory)):
        remove_tree(path)


def end_simulation(directory: str, group: Group, root: int = 0) -> list[int]:
    """Kill every process of one simulation; returns those that did not die within seconds."""

    def find() -> processes.Processes:
        group.kill()
        return {**processes.members(f"DOVETAIL_DIR={directory}", root), **group.members()}

    return sorted(processes.end_all(find))


def remove_tree(top: str) -> None:
    """Remove a directory and all in it, following no links; what cannot be removed stays."""
    if os.path.islink(top) or not os.path.isdir(top):
        with contextlib.suppress(OSError):
            os.unlink(top)
        return
    _remove_all(top)
    if os.path.isdir(top):  # folders to which their owner may not write, as some copy them
        for path, directories, _ in os.walk(top):
            for one in [path, *(os.path.join(path, name) for name in directories)]:
                with contextlib.suppress(OSError):
                    if not os.path.islink(one):
                        os.chmod(one, 0o700)
        _remove_all(top)


def _remove_all(top: str) -> None:
    for path, directories, files in os.walk(top, topdown=False):
        for name in files + directories:  # a link to a directory counts as one
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(path, name))
        with contextlib.suppress(OSError):
            os.rmdir(path)
