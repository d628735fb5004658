# SPDX-License-Identifier: LGPL-3.0-or-later
"""Says whether user-space Kubernetes can run here, and how to mend what is missing (step 3).

Every check tries the thing itself where that is possible, rather than reading what should
be. Levels: `ok`; `note`, good to know; `soft`, runs but worse; `hard`, cannot run. A gap
comes with the command that mends it and who must type it: `user` or `admin`.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from dovetail.errors import BadInput, WorkFailed
from dovetail.usernetes import build, cgroups, linux, state

NETWORK_DISKS = {0x6969: "NFS", 0xBD00BD0: "Lustre", 0x47504653: "GPFS", 0x65735546: "FUSE",
                 0xFF534D42: "CIFS", 0xFE534D42: "SMB2", 0x19830326: "BeeGFS"}  # fmt: skip
SPACE = 4 << 30  # bytes that a build needs
NEWEST_PAST = 1767225600  # 2026-01-01: a clock before this release is wrong


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    level: str
    found: str
    fix: str = ""
    who: str = ""


def user_namespaces() -> Check:
    """Whether the namespaces can be made."""

    def attempt() -> None:
        if os.getuid() != 0:
            linux.enter_user_namespace(linux.user_name())
        linux.unshare(linux.NEWNS | linux.NEWPID | linux.NEWIPC)

    why = linux.in_child(attempt)
    if not why:
        return Check("user namespaces", "ok", "namespaces can be made")
    knobs = {
        "kernel.unprivileged_userns_clone": "1",
        "user.max_user_namespaces": "15000",
        "kernel.apparmor_restrict_unprivileged_userns": "0",
    }
    wrong = [f"{name}={value}" for name, value in knobs.items() if _differs(name, value)]
    fix = f"sysctl -w {' '.join(wrong)}" if wrong else "allow unshare(2) in this container"
    return Check("user namespaces", "hard", why, fix, "admin")


def _differs(name: str, value: str) -> bool:
    try:
        now = Path("/proc/sys/" + name.replace(".", "/")).read_text().strip()
    except OSError:
        return False
    return int(now) < 1 if name == "user.max_user_namespaces" else now != value


def subordinate_ids() -> Check:
    """Subordinate ids, for images with files of several users."""
    name = "subordinate ids"
    if os.getuid() == 0:
        return Check(name, "ok", "not needed as root")
    missing = [p for p in ("newuidmap", "newgidmap") if not shutil.which(p)]
    ranges = [linux.subordinate_ids(linux.user_name(), f"/etc/sub{kind}id") for kind in "ug"]
    if missing:
        return Check(name, "soft", "no newuidmap: images must have files of one user only",
                     "apt-get install uidmap", "admin")  # fmt: skip
    if not all(ranges):
        fix = f"usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {linux.user_name()}"
        return Check(name, "soft", "no range in /etc/subuid and /etc/subgid", fix, "admin")
    return Check(name, "ok", f"from {ranges[0]}")


def control_groups() -> Check:
    """Control groups that this user may write to."""
    version = "version 2" if cgroups.unified() else "version 1"
    problems = cgroups.problems()
    if not problems:
        return Check("control groups", "ok", f"{version}, below {cgroups.base()}")
    if cgroups.unified():
        fix = ("mkdir -p /etc/systemd/system/user@.service.d && printf "
               "'[Service]\\nDelegate=cpu cpuset io memory pids\\n' "
               "> /etc/systemd/system/user@.service.d/delegate.conf && "
               "systemctl daemon-reload")  # fmt: skip
    elif os.getuid() == 0:
        fix = "mount the cgroup hierarchies of /sys/fs/cgroup writable"
    else:
        fix = f"{build.setup_folder()}/delegate {os.getuid()}   (once after each boot)"
    return Check("control groups", "hard", f"{version}: {problems[0]}", fix, "admin")


def session() -> Check:
    """Whether processes survive logging out."""
    folder = os.environ.get("XDG_RUNTIME_DIR", "")
    linger = Path(f"/var/lib/systemd/linger/{linux.user_name()}").exists()
    if not Path("/run/systemd/system").exists() or os.getuid() == 0 or linger:
        return Check("session", "ok", f"XDG_RUNTIME_DIR {folder or 'unset'}, not needed")
    return Check("session", "soft", "systemd may end your processes when you log out",
                 f"loginctl enable-linger {linux.user_name()}", "user")  # fmt: skip


def overlay() -> Check:
    """Whether image layers can be stacked rather than copied."""
    loaded = "overlay" in Path("/proc/filesystems").read_text()
    if loaded:
        return Check("kernel modules", "ok", "overlay")
    return Check("kernel modules", "soft", "no overlay: images are copied", "modprobe overlay",
                 "admin")  # fmt: skip


def bridge() -> Check:
    """What only --network bridge could stumble over; it has a network namespace of its own."""
    strict = [
        path.parent.name for path in Path("/proc/sys/net/ipv4/conf").glob("*/rp_filter")
        if path.read_text().strip() == "1"
    ]  # fmt: skip
    found = f"rp_filter strict on {' '.join(strict) or 'no interface'}; it does not matter here"
    return Check("bridge", "ok", found)


def locked_memory() -> Check:
    """The limit that InfiniBand needs raised."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    devices = fabrics()
    if soft == resource.RLIM_INFINITY or not devices:
        return Check("locked memory", "ok", "unlimited" if soft < 0 else f"{soft >> 10} KiB")
    who = "user" if hard == resource.RLIM_INFINITY else "admin"
    return Check("locked memory", "soft", f"{soft >> 10} KiB is little for {devices[0]}",
                 "ulimit -l unlimited", who)  # fmt: skip


def fabrics() -> list[str]:
    """InfiniBand, EFA and similar devices."""
    try:
        return sorted(os.listdir("/sys/class/infiniband"))
    except OSError:
        return []


def devices() -> Check:
    """Fast networks, large pages, FUSE."""
    pages = Path("/proc/sys/vm/nr_hugepages")
    huge = pages.read_text().strip() if pages.exists() else "0"
    fuse = "there" if os.access("/dev/fuse", os.R_OK | os.W_OK) else "missing"
    found = f"fabrics: {' '.join(fabrics()) or 'none'}; huge pages: {huge}; /dev/fuse: {fuse}"
    return Check("devices", "note", found)


def disk() -> Check:
    """A local disk with room under clusters and images."""
    folder = state.root()
    probe = subprocess.run(["stat", "-f", "-c", "%t", str(folder)], capture_output=True, text=True)
    kind = NETWORK_DISKS.get(int(probe.stdout.strip() or "0", 16))
    if kind:
        return Check("disk", "hard", f"{folder} is on {kind}: no image can be unpacked there",
                     "export DOVETAIL_STATE=/a/local/disk/dovetail", "user")  # fmt: skip
    free = shutil.disk_usage(folder).free
    if free < 1 << 30:
        return Check("disk", "hard", f"{folder}: {free >> 20} MiB free, 1 GiB needed",
                     "export DOVETAIL_STATE=/a/larger/disk/dovetail", "user")  # fmt: skip
    return Check("disk", "ok", f"{folder}: local, {free >> 30} GiB free")


def ports() -> Check:
    """Whether a loopback address and ports can be leased."""
    try:
        address, held = linux.lease_loopback()
        port, other = linux.lease_port(address)
    except OSError as error:
        return Check("ports", "hard", str(error), "ip link set lo up", "admin")
    held.close()
    other.close()
    return Check("ports", "ok", f"such as {address}:{port}")


def clock() -> Check:
    """A clock that certificates can trust."""
    if time.time() < NEWEST_PAST:
        return Check("clock", "hard", time.strftime("it is said to be %Y-%m-%d"),
                     "timedatectl set-ntp true", "admin")  # fmt: skip
    resolution = time.clock_getres(time.CLOCK_MONOTONIC)
    found = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return Check("clock", "ok", f"{found}, resolution {resolution:.0e} s")


def engine() -> Check:
    """A container engine; none is needed."""
    found = [name for name in ("docker", "podman", "nerdctl", "apptainer") if shutil.which(name)]
    return Check("container engine", "note", f"{' '.join(found) or 'none'}; none is needed")


def programs() -> Check:
    """The build, or what is needed to make it."""
    if build.built():
        return Check("programs", "ok", f"{build.cache()}/{build.key()}")
    free = shutil.disk_usage(_existing(build.cache())).free
    if free < SPACE:
        return Check("programs", "hard", f"{build.cache()}: {free >> 20} MiB free, 4 GiB needed",
                     "export DOVETAIL_CACHE=/a/larger/disk", "user")  # fmt: skip
    try:
        go = build.go()
    except WorkFailed:
        # Any Go from 1.21 on fetches the newer one that go.mod asks for by itself.
        return Check("programs", "hard", "not built, and there is no Go 1.21 or later",
                     "usernetes-setup/bundle --unpack FILE, made where there is one, or "
                     "install Go from https://go.dev/dl/", "user")  # fmt: skip
    done = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True)
    if build.numbers(done.stdout.replace("go", "v")) < (1, 21):
        return Check("programs", "hard", f"not built, and {go} is {done.stdout.strip()}: Go 1.21 "
                     "or later fetches the right one by itself", "install Go from "
                     "https://go.dev/dl/", "user")  # fmt: skip
    missing = [name for name in ("cc", "apt-get", "dpkg-deb") if not shutil.which(name)]
    if missing:
        return Check("programs", "hard", f"not built, and there is no {' '.join(missing)}",
                     "apt-get install gcc libc6-dev, or unpack a bundle", "admin")  # fmt: skip
    return Check("programs", "soft", "not built yet", f"{build.setup_folder()}/build", "user")


def openssl() -> Check:
    """The command that makes certificates."""
    if shutil.which("openssl"):
        return Check("openssl", "ok", "there")
    return Check("openssl", "hard", "not installed", "apt-get install openssl", "admin")


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


CHECKS: tuple[Callable[[], Check], ...] = (
    user_namespaces, control_groups, subordinate_ids, disk, ports, clock, openssl, programs,
    overlay, session, locked_memory, bridge, devices, engine,
)  # fmt: skip


def checks() -> list[Check]:
    """Every check, in order; one that cannot even be made is a soft gap."""
    found = []
    for check in CHECKS:
        try:
            found.append(check())
        except (OSError, ValueError, BadInput) as error:
            name = check.__name__.replace("_", " ")
            level = "hard" if isinstance(error, BadInput) else "soft"
            found.append(Check(name, level, f"could not be checked: {error}"))
    return found


def hard_gaps() -> list[str]:
    """Why no cluster can run here; what `build` would mend is left to it."""
    wanted = (user_namespaces, control_groups, disk, ports, clock, openssl)
    found = [check() for check in wanted]
    return [f"{check.name}: {check.found}" for check in found if check.level == "hard"]


def main(as_json: bool) -> int:
    """Print the findings; 0 if a cluster can run here, else 1."""
    found = checks()
    can = not any(check.level == "hard" for check in found)
    if as_json:
        machine = f"{platform.system()} {platform.release()} {platform.machine()}"
        print(json.dumps({"can_run": can, "user": linux.user_name(), "machine": machine,
                          "checks": [asdict(check) for check in found]}, indent=1))  # fmt: skip
        return 0 if can else 1
    for check in found:
        print(f"{check.level:<5} {check.name:<17} {check.found}")
        if check.fix:
            print(f"      {check.who} types:       {check.fix}")
    how = "as root" if os.getuid() == 0 else "rootless"
    print(f"user-space Kubernetes {'can run' if can else 'cannot run'} here, {how}")
    return 0 if can else 1
