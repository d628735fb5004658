# SPDX-License-Identifier: LGPL-3.0-or-later
"""The preflight's checks of the machine: disk, ports, time, programs, devices."""

from __future__ import annotations

import ctypes
import http.client
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from dovetail.core.errors import BadInput
from dovetail.host import devices as kinds

from usernetes_setup import node_record
from usernetes_setup.build import debian_packages, go_toolchain, programs
from usernetes_setup.control import api_client
from usernetes_setup.node import namespaces
from usernetes_setup.preflight import finding
from usernetes_setup.preflight.finding import Check, read

NETWORK_DISKS = {0x6969: "NFS", 0xBD00BD0: "Lustre", 0x47504653: "GPFS", 0x65735546: "FUSE",
                 0xFF534D42: "CIFS", 0xFE534D42: "SMB2", 0x19830326: "BeeGFS"}  # fmt: skip
_STATFS = 256  # bytes; statfs(2) needs fewer, of which the kind comes first
SPACE = 4 << 30  # bytes that a build needs
ROOM = 1 << 30  # bytes that a cluster needs
NEWEST_PAST = 1767225600  # 2026-01-01: a clock before this release is wrong
QUICK_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "timebase")
SKEW, MOST_SKEW = 2.0, 60.0  # seconds against an API server: worth a word; refused
UNTOLD = re.compile(r"[^A-Za-z0-9/._+@=~' -]")
"""What means something else in a URL, a list or a setting, or is refused by a kubelet."""
_libc = ctypes.CDLL(None)


def disk() -> Check:
    """A local disk with room under clusters and images."""
    folder = node_record.root()
    fix = f"export DOVETAIL_STATE={_better_place(ROOM)}"
    if own := namespaces.hidden(folder):
        found = f"{folder} is in {own}, of which each node sees its own"
        return Check("disk", "error", found, fix, "user")
    if strange := UNTOLD.search(str(folder)):
        found = f"{folder}: components cannot be told of a path with {strange[0]!r} in it"
        return Check("disk", "error", found, fix, "user")
    place = next(path for path in (folder, *folder.parents) if path.exists())
    if not (place.is_dir() and os.access(place, os.W_OK)):
        found = f"{folder} cannot be used: {place} is no directory that you can write to"
        return Check("disk", "error", found, fix, "user")
    if kind := _network_disk(place):
        found = f"{folder} is on {kind}: no image can be unpacked there"
        return Check("disk", "error", found, fix, "user")
    free = shutil.disk_usage(place).free
    if free < ROOM:
        return Check("disk", "error", f"{folder}: {free >> 20} MiB free, 1 GiB needed", fix, "user")
    return Check("disk", "ok", f"{folder}: local, {free >> 30} GiB free")


def _network_disk(folder: Path) -> str:
    """What kind of network file system a folder is on; "" if it is on none."""
    found = ctypes.create_string_buffer(_STATFS)
    _libc.statfs(os.fsencode(folder), found)  # where it fails all stays 0
    return NETWORK_DISKS.get(ctypes.c_uint.from_buffer(found).value, "")


def _better_place(room: int) -> str:
    """A folder on a local disk with that much room, for the user to put something in."""
    usual = (os.environ.get("TMPDIR", ""), "/tmp", "/var/tmp", "/scratch", "/local",
             os.environ.get("XDG_RUNTIME_DIR", ""))  # fmt: skip
    for place in map(Path, filter(None, usual)):
        fits = os.access(place, os.W_OK) and shutil.disk_usage(place).free >= room
        if fits and not _network_disk(place) and not UNTOLD.search(str(place)):
            return f"{place}/dovetail-{os.getuid()}"
    return "/a/local/disk/dovetail"


def ports() -> Check:
    """Whether a loopback address and ports can be leased, and connected to."""
    try:
        address, held = namespaces.lease_loopback()
        port, other = namespaces.lease_port(address)
        with socket.create_server((address, port)):
            socket.create_connection((address, port), 5).close()
    except OSError as error:
        return Check("ports", "error", str(error), "ip link set lo up", "admin")
    held.close()
    other.close()
    return Check("ports", "ok", f"such as {address}:{port}")


def clock() -> Check:
    """A clock that certificates can trust, and that is quick to read."""
    if time.time() < NEWEST_PAST:
        return Check("clock", "error", time.strftime("it is said to be %Y-%m-%d"),
                     keep_in_step(), "admin")  # fmt: skip
    folder = finding.SYS / "devices/system/clocksource/clocksource0"
    source = read(folder / "current_clocksource")
    offered = read(folder / "available_clocksource").split()
    better = next((name for name in QUICK_CLOCKS if name in offered), "")
    if source and source not in QUICK_CLOCKS and better:
        return Check("clock", "warning", f"{source} is slow to read: profiling costs more",
                     f"echo {better} > {folder}/current_clocksource", "admin")  # fmt: skip
    found = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return Check("clock", "ok", f"{found}, {source or 'unknown source'}")


def keep_in_step() -> str:
    """What an administrator types so that the clock is set, and stays so.

    Without systemd a daemon is started by itself; a container's start script knows that there the
    clock is another's to set, and says so.
    """
    if (finding.RUN / "systemd/system").exists():
        return "timedatectl set-ntp true"
    start = "service chrony start"
    return start if shutil.which("chronyd") else f"apt-get install -y chrony && {start}"


def servers() -> list[str]:
    """API servers elsewhere that this user has to do with: $KUBECONFIG, and clusters joined."""
    texts = [read(Path(name)) for name in os.environ.get("KUBECONFIG", "").split(":") if name]
    found = [url for text in texts for url in re.findall(r'server"?:\s*"?(https://[^"\s,]+)', text)]
    joined = [
        node for name in node_record.clusters() for node in node_record.nodes(name) if node.joined
    ]
    return sorted({*found, *(node.server for node in joined)})


def time_skew() -> Check:
    """This clock against the API servers that are known, else whether it is kept in step at all."""
    name, fix = "time skew", keep_in_step()
    seen = {}
    for server in servers():
        try:
            seen[server] = api_client.skew(server)
        except (OSError, http.client.HTTPException, ValueError):
            continue
    for server, seconds in seen.items():
        if abs(seconds) > SKEW:
            level = "error" if abs(seconds) > MOST_SKEW else "warning"
            return Check(name, level, f"{describe_skew(seconds)} {server}", fix, "admin")
    if seen:
        worst = max(map(abs, seen.values()))
        return Check(name, "ok", f"at most {worst:.1f} s against {len(seen)} API server(s)")
    if namespaces.clock_in_step():
        return Check(name, "ok", "the clock is kept in step")
    found = "nothing keeps the clock in step with other machines"
    return Check(name, "warning", found, fix, "admin")


def describe_skew(seconds: float) -> str:
    """How this machine's clock stands, as the beginning of a sentence."""
    return f"{abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'}"


def openssl() -> Check:
    """The command that makes certificates."""
    if shutil.which("openssl"):
        return Check("openssl", "ok", "there")
    return Check("openssl", "error", "not installed", "apt-get install openssl", "admin")


def node_programs() -> Check:
    """The build, or what is needed to make it."""
    fix = "have DOVETAIL_CACHE, Python and Dovetail in another folder"
    for used in (programs.cache(), Path(sys.prefix), Path(__file__)):
        if own := namespaces.hidden(used):
            found = f"{used} is in {own}, of which each node sees its own"
            return Check("programs", "error", found, fix, "user")
        if strange := re.search(r'[:"\\\n]', str(used)):
            found = f"{used}: components cannot be told of a path with {strange[0]!r} in it"
            return Check("programs", "error", found, fix, "user")
    if path := programs.closed():
        return Check("programs", "error", *programs.how_to_open(path))
    if programs.built():
        return Check("programs", "ok", f"{programs.cache()}/{programs.key()}")
    place = _existing(programs.cache())
    if not os.access(place, os.W_OK):
        found = f"not built, and {place} is no folder that you can write to"
        wanted = os.environ.get("DOVETAIL_CACHE")
        fix = "unset DOVETAIL_CACHE" if wanted else f"export DOVETAIL_CACHE={_better_place(SPACE)}"
        return Check("programs", "error", found, fix, "user")
    free = shutil.disk_usage(place).free
    if free < SPACE:
        found = f"{programs.cache()}: {free >> 20} MiB free, 4 GiB needed"
        return Check("programs", "error", found,
                     f"export DOVETAIL_CACHE={_better_place(SPACE)}", "user")  # fmt: skip
    lacking = sorted(debian_packages.lacking())
    if lacking and not shutil.which("apt-get"):
        return Check("programs", "error", f"not built, and no apt-get to fetch {' '.join(lacking)}",
                     "dovetail kube bundle --unpack kube.tgz   (made where there is apt-get, by "
                     "`dovetail kube bundle -o kube.tgz`)", "user")  # fmt: skip
    if not go_toolchain.obtainable():
        return _needs_go()
    needed = ("cc", "dpkg-deb") if lacking else ("cc",)
    missing = [name for name in needed if not shutil.which(name)]
    if missing:
        return Check("programs", "error", f"not built, and there is no {' '.join(missing)}",
                     "apt-get install gcc libc6-dev dpkg", "admin")  # fmt: skip
    return Check("programs", "warning", "not built yet", "dovetail kube build", "user")


def check_buildable() -> None:
    """Refuse a build that would fail, before it takes its minutes. Raises BadInput."""
    found = node_programs()
    if found.level == "error":
        raise BadInput(f"{found.name}: {found.found}; {found.who} types: {found.fix}")


def _needs_go() -> Check:
    """Where there are Debian packages, or any Go, the right one is fetched by the build."""
    machine = go_toolchain.ARCHITECTURES.get(platform.machine(), platform.machine())
    archive = f"https://go.dev/dl/go{programs.go_version()}.linux-{machine}.tar.gz"
    fix = (f"mkdir -p ~/.local && curl -L {archive} | tar -xz -C ~/.local && "
           "export PATH=~/.local/go/bin:$PATH")  # fmt: skip
    found = "not built, and there is neither Go nor apt-get to fetch it, nor a bundle"
    return Check("programs", "error", found, fix, "user")


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def adapters() -> list[str]:
    """InfiniBand, EFA and similar devices."""
    return sorted(path.name for path in (finding.SYS / "class/infiniband").glob("*"))


def locked_memory() -> Check:
    """The limit that InfiniBand and EFA need raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or not adapters():
        return Check("memlock", "ok", "unlimited" if soft < 0 else f"{soft >> 10} KiB")
    found = f"{soft >> 10} KiB is little for {adapters()[0]}"
    if hard == resource.RLIM_INFINITY:
        return Check("memlock", "warning", found, "ulimit -l unlimited", "user")
    fix = (f"echo '{namespaces.user_name()} - memlock unlimited' "
           ">> /etc/security/limits.d/95-memlock.conf   (for logins from then on)")  # fmt: skip
    return Check("memlock", "warning", found, fix, "admin")


def fuse() -> Check:
    """FUSE, for pods that mount file systems of their own."""
    device = finding.DEV / "fuse"
    if os.access(device, os.R_OK | os.W_OK):
        return Check("/dev/fuse", "ok", "there")
    if device.exists():
        return Check("/dev/fuse", "warning", "not yours to open: pods cannot mount FUSE",
                     f"chmod 666 {device}", "admin")  # fmt: skip
    return Check("/dev/fuse", "warning", "missing: pods cannot mount FUSE",
                 f"modprobe fuse && chmod 666 {device}", "admin")  # fmt: skip


def huge_pages() -> Check:
    """Huge pages, which EFA wants and others may use."""
    found = []
    for folder in sorted((finding.SYS / "kernel/mm/hugepages").glob("hugepages-*")):
        total, free = (read(folder / f"{kind}_hugepages", "0") for kind in ("nr", "free"))
        if total != "0":
            found.append(f"{total} of {folder.name.split('-')[1]}, {free} free")
    elastic = [name for name in adapters() if name.startswith("efa")]
    if found or not elastic:
        return Check("huge pages", "note", "; ".join(found) or "none; none are needed")
    return Check("huge pages", "warning", f"none: {elastic[0]} falls back to small ones",
                 "sysctl -w vm.nr_hugepages=512", "admin")  # fmt: skip


def fabrics() -> Check:
    """Whether this user can open the fast networks that there are."""
    found = adapters()
    if not found:
        return Check("fabrics", "note", "no InfiniBand or EFA device: MPI uses TCP between nodes")
    nodes = sorted((finding.DEV / "infiniband").glob("uverbs*"))
    closed = [str(node) for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
    if not nodes:
        return Check("fabrics", "warning", f"{' '.join(found)}, but programs cannot use it",
                     "modprobe ib_uverbs", "admin")  # fmt: skip
    if closed:
        why = f"{' '.join(found)}, but {closed[0]} is not yours to open"
        return Check("fabrics", "warning", why,
                     f"chmod 666 {' '.join(closed)}", "admin")  # fmt: skip
    return Check("fabrics", "ok", f"{' '.join(found)} by {' '.join(node.name for node in nodes)}")


def devices() -> Check:
    """What a plan's `devices` may name here; adapters that are closed are told by `fabrics`."""
    found = []
    for name in kinds.KINDS:
        there = kinds.units(name, finding.DEV, finding.SYS)
        if shut := [path for unit in there for path in kinds.closed(unit)] if name == "gpu" else []:
            why = f"{len(there)} gpu, of which {shut[0]} is not yours to open"
            return Check("devices", "warning", why, f"chmod 666 {' '.join(dict.fromkeys(shut))}",
                         "admin")  # fmt: skip
        if there:
            found.append(f"{len(there)} {name}" if name == "gpu" else name)
    for path in (finding.DEV / name for name in ("fuse", "kvm", "net/tun")):
        if os.access(path, os.R_OK | os.W_OK):
            found.append(str(path))
    return Check("devices", "note", f"{', '.join(found) or 'none'}; for `devices` in a plan")


ENGINES = {
    "docker": ("info", "--format", "{{.SecurityOptions}}"),
    "podman": (),  # and asked, it would leave a process of its own behind
    "nerdctl": ("info", "--format", "{{.SecurityOptions}}"),
    "apptainer": (),
}


def engine() -> Check:
    """Container engines and whether they run rootless; none is needed."""
    found = [f"{name} ({_state(name, words)})" for name, words in ENGINES.items()
             if shutil.which(name)]  # fmt: skip
    return Check("container engine", "note", f"{', '.join(found) or 'none'}; none is needed")


def _state(name: str, words: tuple[str, ...]) -> str:
    if not words:
        return "needs no service"
    try:
        done = subprocess.run([name, *words], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return "does not answer"
    if done.returncode:
        return "does not run"
    return "rootless" if "rootless" in done.stdout else "as root"


def join_skew(server: str) -> None:
    """Refuse to join a cluster that cannot be reached, or whose certificates look wrong here."""
    try:
        seconds = api_client.skew(server, timeout=10.0)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise BadInput(f"{server}: cannot be reached from here: {error}") from None
    if abs(seconds) > MOST_SKEW:
        raise BadInput(
            f"this clock is {describe_skew(seconds)} that of {server}, so that its certificates "
            f"would not be valid here; an administrator types: {keep_in_step()}"
        )
