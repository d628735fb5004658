# SPDX-License-Identifier: LGPL-3.0-or-later
"""Control groups of a node: made, pinned to cores, emptied and removed.

Version 1 and hybrid have a folder for each controller, version 2 one for all. Invariants: nothing
outside the node's own groups is written, but that on version 2 the groups above it, where they
are the user's, let it have controllers; and every process of the node is in them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time
from pathlib import Path

from usernetes_setup.node import namespaces
from usernetes_setup.node.components import numbers

ROOT = Path("/sys/fs/cgroup")
RUN = Path("/run")
MOUNTS = Path("/proc/self/mounts")
MARK = "dovetail."
NEEDED = ("cpu", "cpuacct", "cpuset", "memory", "pids")
NEEDED_2 = {"cpu", "cpuset", "memory", "pids"}


def unified() -> bool:
    """Whether this machine has version 2 alone."""
    return (ROOT / "cgroup.controllers").exists()


def hierarchies(kind: str = "cgroup") -> list[Path]:
    """Mount points of the hierarchies: one on version 2, one for each controller on version 1.

    Some controllers share one, and it has the names of both: systemd mounts `cpu,cpuacct`.
    On a hybrid machine `cgroup2` is the further one of version 2, where only runc writes.
    """
    if unified():
        return [ROOT] if kind == "cgroup" else []
    found = []
    for line in MOUNTS.read_text(errors="surrogateescape").splitlines():
        fields = line.split()
        if fields[2] == kind and Path(fields[1]).parent == ROOT:
            found.append(Path(fields[1]))
    return found


def base() -> str:
    """The group below which this user may make groups, as a path within the hierarchies.

    Version 1: the one that an administrator made, or root makes. Version 2: the highest of the
    groups above this process that the user owns, or if none is, its own; see `scope`.
    """
    if not unified():
        return f"/dovetail-{os.getuid()}"
    own = next(
        line.split("::", 1)[1]
        for line in Path("/proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
        if line.startswith("0::")
    )
    if os.getuid() == 0:
        return "/dovetail-0"
    path = Path(own)
    while path != path.parent and os.access(ROOT / str(path.parent)[1:], os.W_OK):
        path = path.parent
    return str(path)


def scope() -> list[str]:
    """What to put before a command so that there are groups that the user owns above it.

    On version 2 a login's or a job's are not, but a service manager's are, which most users have.
    """
    if not unified() or os.getuid() == 0 or _owned(ROOT / base()[1:]):
        return []
    usable = _owned(_manager()) and os.access(_runtime() / "systemd/private", os.W_OK)
    return ["systemd-run", "--user", "--scope", "--quiet", "--"] if usable else []


def scope_environment() -> dict[str, str]:
    """The variables without which a scope cannot be asked for; a job may lack them."""
    return {"XDG_RUNTIME_DIR": str(_runtime())}


def _runtime() -> Path:
    """Where this user's service manager listens."""
    return RUN / f"user/{os.getuid()}"


def _manager() -> Path:
    """The group of this user's service manager."""
    return ROOT / f"user.slice/user-{os.getuid()}.slice/user@{os.getuid()}.service"


def _owned(folder: Path) -> bool:
    return os.access(folder / "cgroup.subtree_control", os.W_OK)


def problems() -> list[str]:
    """Why no node can run here, one line for each reason; empty if one can."""
    if unified():
        return _problems_2()
    mounts = hierarchies()
    lines = [f"no {name} controller" for name in absent()]
    if os.getuid() == 0:
        closed = [path for path in mounts if not os.access(path, os.W_OK)]
    else:
        own = [path / base()[1:] for path in mounts]
        closed = [path for path in own if not os.access(path / "cgroup.procs", os.W_OK)]
    return lines + [f"{path} is missing or not writable" for path in closed]


def absent() -> list[str]:
    """Controllers that a node needs and that no hierarchy of version 1 has."""
    mounted = {name for path in hierarchies() for name in path.name.split(",")}
    return [] if unified() else [name for name in NEEDED if name not in mounted]


def _problems_2() -> list[str]:
    """The same on version 2."""
    top = ROOT
    if os.getuid() != 0:
        top = _manager() if scope() else ROOT / base()[1:]
    elif not os.access(ROOT, os.W_OK):
        return ["/sys/fs/cgroup is read-only"]
    try:
        offered = set((top / "cgroup.controllers").read_text().split())
    except OSError as error:
        return [f"{top}: {error.strerror}"]
    missing = NEEDED_2 - offered
    lines = [f"controllers not delegated: {' '.join(sorted(missing))}"] if missing else []
    if not _owned(top):
        lines.append(f"{top} is not delegated to this user")
    return lines or ([f"{top} holds processes, so that no group can have controllers"]
                     if os.getuid() == 0 and busy() else [])  # fmt: skip


def busy() -> bool:
    """Whether what root sees as the root of all groups is a container's, with processes in it.

    Only the machine's own root may hold processes and hand controllers to groups (version 2).
    """
    if not (ROOT / "cgroup.type").exists() or not _owned(ROOT):
        return False
    given = set((ROOT / "cgroup.subtree_control").read_text().split())
    return not given >= NEEDED_2 and bool((ROOT / "cgroup.procs").read_text().strip())


def group_of(cluster: str, node: str) -> str:
    """The path of a node's group."""
    return f"{base().rstrip('/')}/{MARK}{cluster}.{node}"


def folders(group: str, kind: str = "cgroup") -> list[Path]:
    """The group's folder in every hierarchy."""
    return [path / group[1:] for path in hierarchies(kind)]


def make(group: str, cpus: str) -> None:
    """Make a node's group with its cores, and below it `system` for the node's own processes.

    Every user can list them, as is the custom: a kubelet walks the whole tree, and one of
    another cluster would fail on a folder that it cannot open.
    """
    before = os.umask(0o022)
    for folder in folders(group):
        _make(folder)
        if unified():
            for parent in reversed(folder.relative_to(ROOT).parents):
                _delegate(ROOT / parent)
        if (folder / "cpuset.cpus").exists():
            _fill_cpuset(folder, cpus)
        # As much as that many processes of the host would have: with the default a cluster of
        # any size would get as much as one process that runs beside it.
        for shared, cores in ((folder.parent, os.cpu_count()), (folder, len(numbers(cpus)))):
            for file, one, most in (("cpu.shares", 1024, 262144), ("cpu.weight", 100, 10000)):
                with contextlib.suppress(OSError):  # a user's parent group is its maker's
                    if (shared / file).exists():
                        (shared / file).write_text(str(min(most, one * (cores or 1))))
        (folder / "system").mkdir(exist_ok=True)
        if not unified() and (folder / "cpuset.cpus").exists():
            _fill_cpuset(folder / "system", cpus)
    os.umask(before)


def _make(folder: Path) -> None:
    """Make it and the one above, which another node that ends may remove between the two."""
    while not folder.is_dir():
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            folder.mkdir(parents=True, exist_ok=True)


def _delegate(folder: Path) -> None:
    """Switch the controllers on for the groups below, if this group is ours (version 2)."""
    wanted = {"cpu", "cpuset", "memory", "pids", "io"}
    if _owned(folder):
        for name in wanted & set((folder / "cgroup.controllers").read_text().split()):
            (folder / "cgroup.subtree_control").write_text(f"+{name}")


def show(group: str, staging: Path) -> None:
    """On version 2, let this mount namespace have the group as the root of all groups.

    A kubelet insists on every controller that the root has, and a user is never given all. Then
    the controllers are switched on for the groups below: only until then a process can be in it.
    """

    def mount() -> None:
        enter(group)
        namespaces.unshare(namespaces.NEWCGROUP)
        namespaces.mount("cgroup2", str(staging), "cgroup2")

    staging.mkdir()
    if problem := namespaces.in_child(mount):
        raise OSError(f"cannot mount the node's control groups: {problem}")
    namespaces.mount(
        str(staging), str(ROOT), "", namespaces.BIND
    )  # the kernel refuses it on itself else
    namespaces.unmount(str(staging))
    _delegate(ROOT)


def root(group: str) -> str:
    """What the node's group is called in its own mount namespace."""
    return "/" if unified() else group


def _fill_cpuset(folder: Path, cpus: str) -> None:
    """On version 1 a set starts empty, and can hold no process until it is filled."""
    parent = folder.parent
    if not unified() and not (parent / "cpuset.cpus").read_text().strip():
        _fill_cpuset(parent, (parent.parent / "cpuset.effective_cpus").read_text().strip())
    mems = (parent / "cpuset.mems").read_text().strip()
    if mems:
        (folder / "cpuset.mems").write_text(mems)
    (folder / "cpuset.cpus").write_text(cpus)


def enter(group: str) -> None:
    """Move this process into a group, in every hierarchy."""
    for folder in folders(group):
        (folder / "cgroup.procs").write_text("0")


def leave(group: str) -> None:
    """Move this process out of the node's group, as far as its user may; OSError if it cannot.

    On version 2 the group above has none but groups in it: the service manager's own holds us.
    """
    if os.getuid() == 0 and namespaces.initial_user():
        enter("/")
    elif unified():
        enter(f"{Path(group).parent}/init.scope")
    else:
        enter(str(Path(group).parent))


def _tree(group: str) -> list[Path]:
    """Every folder of the group and below, deepest first."""
    found: list[Path] = []
    if not Path(group).name.startswith(MARK):
        return found  # never any other group: all in it would be killed
    for folder in [*folders(group), *folders(group, "cgroup2")]:
        found += [Path(path) for path, _, _ in os.walk(folder, topdown=False)]
    return found


def processes(group: str) -> set[int]:
    """Every process in the group or below."""
    found: set[int] = set()
    for folder in _tree(group):
        try:
            found |= {int(line) for line in (folder / "cgroup.procs").read_text().split()}
        except OSError:
            continue
    return found - {0}  # one of another process namespace shows as 0


def remove(group: str, deadline: float) -> list[str]:
    """Kill what is in the group and remove it; returns what is left at the monotonic deadline."""
    while True:
        for pid in processes(group) - {os.getpid()}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for folder in _tree(group):
            try:
                folder.rmdir()
            except OSError as error:
                if error.errno not in (errno.EBUSY, errno.ENOENT, errno.ENOTEMPTY):
                    return [f"{folder}: {error.strerror}"]
        left = _tree(group)
        if not left and group.startswith("/dovetail-0/"):  # a user's was made by root, and stays
            for folder in [*folders("/dovetail-0"), *folders("/dovetail-0", "cgroup2")]:
                with contextlib.suppress(OSError):
                    folder.rmdir()
        if not left or time.monotonic() > deadline:
            return [str(path) for path in left]
        select.select([], [], [], 0.02)  # a dying process leaves its group without notice
