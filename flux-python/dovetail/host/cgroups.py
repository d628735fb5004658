# SPDX-License-Identifier: LGPL-3.0-or-later
"""CPU weights, freezing and killing for a group of processes.

Inputs: where the kernel's control groups are mounted and which of them this user may extend.
Outputs: child groups named `dovetail-…`, and nothing else: no existing group is changed, except
that the cpu controller is switched on for the children of a delegated group without processes.

Works with version 1 (`cpu` and `freezer`), version 2, and both at once, where weights come
from version 1, and freezing and killing from version 2. Only a comparison that is about limits
gives a group one: a quota burns on the spinning of ranks that wait.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal

from dovetail.host import processes

PERIOD = 100_000  # microseconds, the kernel's own
WEIGHT_MAX = 10000


class Group:
    """One group: a directory that holds its weight and one that can freeze and kill it.

    Under version 2 both are the same directory. Either is empty where it cannot be had.
    """

    def __init__(self, weight: str, control: str) -> None:
        self.weight = weight
        self.control = control

    @property
    def directories(self) -> list[str]:
        """The directories that exist for this group, each once."""
        return [path for path in dict.fromkeys((self.weight, self.control)) if path]

    def create(self) -> Group:
        """Make the directories; OSError where the kernel refuses."""
        for path in self.directories:
            os.mkdir(path)
        return self

    def child(self, name: str, freezable: bool = True) -> Group:
        """The group below this one (not made yet); it may do without freezing of its own."""
        one = bool(self.weight) and self.weight == self.control
        weight = os.path.join(self.weight, name) if self.weight else ""
        control = os.path.join(self.control, name) if self.control else ""
        return Group(weight, control if freezable or one else "")

    def share_out(self) -> None:
        """Let children have weights (version 2); this group must hold no process itself."""
        path = os.path.join(self.weight, "cgroup.subtree_control")
        if self.weight and os.path.exists(path):
            _write(path, "+cpu")

    def set_weight(self, millicores: int) -> None:
        """Give it CPU in proportion to `millicores` among its siblings; OSError if refused.

        Both scales are linear, so that ratios stay true: 1000 millicores are the default
        weight of a process, 1024 shares or a weight of 100 (which ends at 100 cores).
        """
        if not self.weight:
            return
        shares = os.path.join(self.weight, "cpu.shares")
        if os.path.exists(shares):
            _write(shares, str(max(2, round(millicores * 1.024))))
        else:
            weight = min(WEIGHT_MAX, max(1, round(millicores / 10)))
            _write(os.path.join(self.weight, "cpu.weight"), str(weight))

    def set_limit(self, millicores: int, period: int = PERIOD) -> None:
        """Let it use no more than that much CPU in each period, microseconds; OSError if refused.

        Less than the millisecond that the kernel demands becomes that.
        """
        quota = max(1000, round(millicores * period / 1000))
        if os.path.exists(os.path.join(self.weight, "cpu.cfs_quota_us")):
            _write(os.path.join(self.weight, "cpu.cfs_period_us"), str(period))
            _write(os.path.join(self.weight, "cpu.cfs_quota_us"), str(quota))
        else:
            _write(os.path.join(self.weight, "cpu.max"), f"{quota} {period}")

    def throttled(self) -> tuple[int, int, float]:
        """Periods that were enforced, those in which it was throttled, and for how many seconds.

        Zeros where the kernel does not say; the seconds are summed over the CPUs.
        """
        found = {}
        with contextlib.suppress(OSError):
            for line in _read(os.path.join(self.weight, "cpu.stat")).splitlines():
                name, _, value = line.partition(" ")
                found[name] = int(value)
        seconds = found.get("throttled_time", 0) * 1e-9 + found.get("throttled_usec", 0) * 1e-6
        return found.get("nr_periods", 0), found.get("nr_throttled", 0), seconds

    def freeze(self, frozen: bool) -> None:
        """Stop or resume all its processes; takes effect within milliseconds."""
        state = os.path.join(self.control, "freezer.state")
        if os.path.exists(state):
            _write(state, "FROZEN" if frozen else "THAWED")
        else:
            _write(os.path.join(self.control, "cgroup.freeze"), "1" if frozen else "0")

    def add(self, pid: int) -> None:
        """Move a process, with all its threads, into the group."""
        for path in self.directories:
            _write(os.path.join(path, "cgroup.procs"), str(pid))

    def cpu_seconds(self) -> float | None:
        """CPU time of all that ever ran in it and in the groups below; None if that is unknown."""
        for path in self.directories:
            with contextlib.suppress(OSError):
                return int(_read(os.path.join(path, "cpuacct.usage"))) * 1e-9  # version 1
            with contextlib.suppress(OSError):
                for line in _read(os.path.join(path, "cpu.stat")).splitlines():
                    name, _, value = line.partition(" ")
                    if name == "usage_usec":
                        return int(value) * 1e-6
        return None

    def members(self) -> processes.Processes:
        """Its processes and those of the groups below."""
        found = {}
        for top in self.directories:
            for path, _, _ in os.walk(top):
                with contextlib.suppress(OSError):
                    for line in _read(os.path.join(path, "cgroup.procs")).split():
                        ticks = processes.start_ticks(int(line))
                        if ticks:
                            found[int(line)] = ticks
        return found

    def kill(self) -> None:
        """Kill all in one stroke, frozen or not; what forks right now may need another."""
        if not self.control:
            return
        kill = os.path.join(self.control, "cgroup.kill")
        with contextlib.suppress(OSError):
            if os.path.exists(kill):
                _write(kill, "1")
            else:
                self.freeze(True)
                for pid, ticks in self.members().items():
                    processes.send(pid, ticks, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self.freeze(False)  # version 1 does not let the frozen die

    def remove(self) -> None:
        """Remove its directories and those below; OSError if a process is still inside."""
        for top in self.directories:
            for path, _, _ in os.walk(top, topdown=False):
                with contextlib.suppress(FileNotFoundError):
                    os.rmdir(path)


def find(mountinfo: str = "/proc/self/mountinfo", own: str = "/proc/self/cgroup") -> Group:
    """The group under which this user can make children; its directories may be empty.

    The arguments name files in the formats of proc(5).
    """
    places = _places(mountinfo, own)
    weight = control = ""
    if "" in places:
        point, path = places[""]
        weight = _delegated(point, path, cpu=True)
        control = weight
        if not weight and _kernel() >= (5, 2):
            control = _delegated(point, path, cpu=False)  # cgroup.freeze came with 5.2
    if not weight and "cpu" in places and _usable(places["cpu"][1]):
        weight = places["cpu"][1]
    if not control and "freezer" in places and _usable(places["freezer"][1]):
        control = places["freezer"][1]
    return Group(weight, control)


def _kernel() -> tuple[int, ...]:
    """The first two numbers of the kernel's version, which some builders call as 4.19-site-3."""
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return tuple(map(int, found.groups())) if found else ()


def above(controller: str, group: str = "") -> list[str]:
    """The folders of our own group and of those above it, as far as we see them, nearest first.

    In the hierarchy of version 1 with this controller, else in that of version 2, and there from
    `group` on if one is given.
    """
    places = _places("/proc/self/mountinfo", "/proc/self/cgroup")
    if controller not in places and "" not in places:
        return []
    point, path = places.get(controller) or (places[""][0], group or places[""][1])
    found = [path]
    while path.startswith(point + "/"):
        path = os.path.dirname(path)
        found.append(path)
    return found


def _places(mountinfo: str, own: str) -> dict[str, tuple[str, str]]:
    """Controller (empty for version 2) to mount point and the folder of our group, where seen."""
    mounts = _mounts(mountinfo)
    places = {}
    for line in _read(own).splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            if name in mounts:
                point, root = mounts[name]
                inside = os.path.relpath(path, root)
                if not inside.startswith(".."):
                    places[name] = (point, os.path.normpath(os.path.join(point, inside)))
    return places


def _mounts(path: str) -> dict[str, tuple[str, str]]:
    """Controller (empty for version 2) to mount point and the part that is mounted there."""
    mounts = {}
    for line in _read(path).splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, point = before.split(" ")[3:5]
        if kind == "cgroup2":
            mounts[""] = (point, root)
        elif kind == "cgroup":
            for option in options.split(","):
                mounts[option] = (point, root)
    return mounts


def _usable(path: str) -> bool:
    """Whether children can be made here and processes moved into them."""
    return os.access(path, os.W_OK | os.X_OK)


def _delegated(point: str, path: str, cpu: bool) -> str:
    """The nearest group above, ourselves included, that this user may extend; empty if none.

    A process may only be moved by who may write to the common parent, hence the second test.
    A group with processes of its own, if it is not the root, cannot give weights to children:
    the kernel lets it have the controller, and then no process into the children.
    """
    while True:
        if _usable(path) and os.access(os.path.join(path, "cgroup.procs"), os.W_OK):
            if not cpu:
                return path
            with contextlib.suppress(OSError):
                root = not os.path.exists(os.path.join(path, "cgroup.type"))
                if not root and _read(os.path.join(path, "cgroup.procs")):
                    raise PermissionError
                if "cpu" not in _read(os.path.join(path, "cgroup.subtree_control")).split():
                    if "cpu" not in _read(os.path.join(path, "cgroup.controllers")).split():
                        raise PermissionError
                    _write(os.path.join(path, "cgroup.subtree_control"), "+cpu")
                return path
        if path == point:
            return ""
        path = os.path.dirname(path)


def _read(path: str) -> str:
    # Somebody's mount, or group, may have a name that is no text here.
    with open(path, errors="surrogateescape") as file:
        return file.read()


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
