# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the Linux kernel offers and Python's standard library does not.

Namespaces, mounts, leases of addresses and ports. Failing system calls raise OSError with
what was tried.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import fcntl
import ipaddress
import os
import platform
import pwd
import random
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
NEWCGROUP = 0x2000000
BIND, REC, RDONLY, REMOUNT = 0x1000, 0x4000, 0x1, 0x20
PRIVATE, SLAVE = 0x40000, 0x80000
PR_SET_PDEATHSIG = 1
TUNNELS = "/dev/net/tun"
"""The device file that makes tunnels."""

PORTS = range(20000, 30000)
"""Those that are leased: below what the kernel gives to clients, and Kubernetes to services."""

COPIED = ("/run", "/var/lib", "/var/log")
"""System folders that each node has a copy of."""

WRITTEN = {"/run/dovetail"} | {
    f"{folder}/{name}" for folder in COPIED
    for name in ("cni", "containerd", "containers", "kubelet", "netns", "pods")
}  # fmt: skip
"""What components insist on writing to there, and a node has of its own."""

_KEYCTL = {"x86_64": 250, "aarch64": 219, "ppc64le": 271}
"""The number of keyctl(2), for which the C library has no function."""

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """Put the calling process into new namespaces."""
    _check(_libc.unshare(flags), "unshare")


def set_process(option: int, value: int) -> None:
    """prctl(2) with one number."""
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), "prctl")


def own_keyring() -> bool:
    """Put this process, and what it starts, into a session keyring of their own; whether it is.

    So nothing in it has keys of the user's login.
    """
    number = _KEYCTL.get(platform.machine())
    join = 1  # KEYCTL_JOIN_SESSION_KEYRING
    return number is not None and int(_libc.syscall(number, join, None)) >= 0


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    done = _libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode()
    )
    _check(done, f"mount {source} on {target}")


def copy_up(folder: str, staging: Path) -> None:
    """Make a system folder writable for this mount namespace alone.

    An empty file system takes its place, with every entry of the old one bound into it but for
    what is in `WRITTEN`. These stay private, vanish with the namespace, and may be another's.
    """
    staging.mkdir(mode=0o755)
    mount("dovetail", str(staging), "tmpfs", 0, "mode=755,size=16m")
    for entry in os.scandir(folder):
        if entry.path in WRITTEN:
            continue
        copy = staging / entry.name
        if entry.is_symlink():
            copy.symlink_to(os.readlink(entry.path))
            continue
        if entry.is_dir():
            copy.mkdir()
        else:
            copy.touch()
        try:
            mount(entry.path, str(copy), "", BIND | REC)
        except OSError:  # gone since the listing, or not ours to see
            continue
    mount(str(staging), folder, "", BIND | REC)
    unmount(str(staging))


def hidden(path: Path) -> str:
    """The folder that each node has of its own and that this path is in, or ""."""
    real = os.path.realpath(path) + "/"
    return next((own for own in WRITTEN if real.startswith(os.path.realpath(own) + "/")), "")


def unmount(target: str) -> None:
    """umount2(2): at once, with whatever is mounted below."""
    _check(_libc.umount2(target.encode(), 2), f"unmount {target}")


def mounts_below(folder: str) -> list[str]:
    """Mount points at or below a folder in this mount namespace, the latest first.

    The folder's path is without links, as the kernel knows mounts.
    """
    found = []
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        escaped = line.split(b" ")[4].decode("unicode_escape")  # what would end a word is in octal
        target = os.fsdecode(escaped.encode("latin-1"))
        if target == folder or target.startswith(folder + "/"):
            found.append(target)
    return found[::-1]


def remove_folder(folder: Path, user: str) -> None:
    """Remove a folder with all in it, but never anything that is mounted there.

    A bind mount below would lead to the user's own data, so all are taken away first, and if
    one stays nothing is removed. Files of subordinate ids are removed as root of a namespace.
    """
    folder = Path(os.path.realpath(folder.parent), folder.name)  # a link itself is never followed
    for target in mounts_below(str(folder)):
        unmount(target)
    if mounts_below(str(folder)):
        raise OSError(f"{folder}: something is still mounted there; not removed")
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists() and os.getuid() != 0:

        def as_root() -> None:
            enter_user_namespace(user)
            shutil.rmtree(folder, ignore_errors=True)

        in_child(as_root)


def interface_up(name: str, address: str = "", mask: str = "255.255.255.255") -> None:
    """Bring an interface up; with an address, as a further one (`lo:1`)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for number, value in ((0x8916, address), (0x891C, mask)):  # SIOCSIFADDR, SIOCSIFNETMASK
            if address:
                data = struct.pack("16sHH4s8x", name.encode(), 2, 0, socket.inet_aton(value))
                fcntl.ioctl(control, number, data)
        data = struct.pack("16sH14x", name.encode(), 0x41)  # up and running
        fcntl.ioctl(control, 0x8914, data)  # SIOCSIFFLAGS


def netlink(protocol: int, kind: int, flags: int, payload: bytes) -> None:
    """One request to the kernel, in this network namespace; OSError if it declines."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as link:
        link.settimeout(5)
        link.send(struct.pack("=IHHII", 16 + len(payload), kind, flags, 1, 0) + payload)
        answer = link.recv(65536)
    (code,) = struct.unpack_from("=i", answer, 16) if answer[4:6] == b"\2\0" else (0,)
    if code:
        raise OSError(-code, os.strerror(-code))


def route(network: str, device: str) -> None:
    """Lead what is for a network to a device; by `lo` it is for this namespace itself."""
    wanted = ipaddress.IPv4Network(network)
    scope, kind = (254, 2) if device == "lo" else (253, 1)  # local, or beyond the device
    main, by_hand = 254, 3
    head = struct.pack("=BBBBBBBBI", socket.AF_INET, wanted.prefixlen, 0, 0, main, by_hand,
                       scope, kind, 0)  # fmt: skip
    target = struct.pack("=HH4s", 8, 1, wanted.network_address.packed)  # RTA_DST
    way = struct.pack("=HHI", 8, 4, socket.if_nametoindex(device))  # RTA_OIF
    netlink(0, 24, 0x405, head + target + way)  # RTM_NEWROUTE, to be created and answered


def tunnel(name: str) -> int:
    """Make an interface whose packets are read from and written to the returned descriptor."""
    made = os.open(TUNNELS, os.O_RDWR)
    os.set_inheritable(made, True)
    flags = 0x5001  # IFF_TUN, IFF_NO_PI, IFF_VNET_HDR: several packets as one
    fcntl.ioctl(made, 0x400454CA, struct.pack("16sH22x", name.encode(), flags))  # TUNSETIFF
    return made


def packet_size(address: str) -> int:
    """Bytes of the largest packet on the interface with that address; 1500 if none has it."""
    if address.startswith("127."):
        return _packet_size("lo")
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):  # one without an address, or that just went
            if _interface(name, 0x8915)[4:8] == socket.inet_aton(address):  # SIOCGIFADDR
                return _packet_size(name)
    return 1500


def _packet_size(name: str) -> int:
    return int.from_bytes(_interface(name, 0x8921)[:4], sys.byteorder)  # SIOCGIFMTU


def _interface(name: str, number: int) -> bytes:
    """What the kernel says of an interface: what comes after its name in `struct ifreq`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        return fcntl.ioctl(control, number, struct.pack("16s24x", name.encode()))[16:]


def clock_in_step() -> bool:
    """Whether the kernel says that something keeps its clock in step with other machines."""
    return bool(_libc.adjtimex(ctypes.create_string_buffer(256)) in range(5))


# --- Identity ---


class Ids(enum.Enum):
    """Whose ids the processes of a node have."""

    ROOT = "root"  # the machine's own: there is no user namespace
    MANY = "many"  # those of a user namespace, with the user's subordinate ids
    ONE = "one"  # those of a user namespace with the user's own id alone

    @property
    def rootless(self) -> bool:
        """Whether the node is in a user namespace."""
        return self is not Ids.ROOT


def user_name() -> str:
    """This user's name, or its number where it has none (as in some containers)."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def initial_user() -> bool:
    """Whether this process is in the machine's own user namespace."""
    return Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]


def subordinate_ids(user: str, table: str) -> tuple[int, int] | None:
    """First id and number of the user's largest range in /etc/subuid or /etc/subgid, if any."""
    try:
        lines = Path(table).read_text().splitlines()
    except OSError:
        return None
    rows = [line.split(":") for line in lines]
    ours = [row for row in rows if len(row) == 3 and row[0] in (user, str(os.getuid()))]
    ranges = [(int(row[1]), int(row[2])) for row in ours]
    return max(ranges, key=lambda found: found[1]) if ranges else None


def map_ids(pid: int, user: str) -> Ids:
    """Give a new user namespace its ids: MANY when subordinate ids were there to use, else ONE.

    Inside, the user is root. Without newuidmap or a range only that one id exists.
    """
    ranges = [subordinate_ids(user, f"/etc/sub{kind}id") for kind in "ug"]
    if all(ranges) and shutil.which("newuidmap") and shutil.which("newgidmap"):
        for kind, own, found in zip("ug", (os.getuid(), os.getgid()), ranges):
            first, count = found or (0, 0)
            words = [0, own, 1, 1, first, count]
            done = subprocess.run(
                [f"new{kind}idmap", str(pid), *map(str, words)], capture_output=True, text=True
            )
            if done.returncode:
                why = done.stderr.strip() or f"new{kind}idmap: exit code {done.returncode}"
                raise OSError(why)
        return Ids.MANY
    Path(f"/proc/{pid}/setgroups").write_text("deny")
    Path(f"/proc/{pid}/uid_map").write_text(f"0 {os.getuid()} 1")
    Path(f"/proc/{pid}/gid_map").write_text(f"0 {os.getgid()} 1")
    return Ids.ONE


def enter_user_namespace(user: str) -> Ids:
    """Move this process into a user namespace of its own, as root there; MANY or ONE.

    The maps are written by a child that stayed outside, since newuidmap only works from there.
    """
    ready_in, ready_out = os.pipe()
    answer_in, answer_out = os.pipe()
    me = os.getpid()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(ready_out)
            os.read(ready_in, 1)
            os.write(answer_out, map_ids(me, user).value.encode())
            code = 0
        except BaseException as error:
            os.write(answer_out, str(error).encode()[:4000])
        finally:
            os._exit(code)
    os.close(ready_in)
    os.close(answer_out)
    try:
        unshare(NEWUSER)
    finally:
        os.close(ready_out)
        with os.fdopen(answer_in, "rb") as answer:
            said = answer.read().decode(errors="replace")
        failed = os.waitpid(child, 0)[1]
    if failed:
        raise OSError(f"the user namespace got no ids: {said or 'who gives them died'}")
    os.setgid(0)
    os.setuid(0)
    return Ids(said)


def in_child(work: Callable[[], None]) -> str:
    """Run `work` in a forked child; returns "" if it returned, else its error."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            os.write(writing, str(error).encode()[:4000])
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        message = answer.read().decode(errors="replace")
    failed = os.waitpid(child, 0)[1]
    return (message or "it died") if failed else ""


# --- Leases ---


def lease(name: str) -> socket.socket | None:
    """Hold a name on this host until the process ends; None if another holds it.

    An abstract Unix socket: one name space for all users of the host, nothing on disk, and
    the kernel gives it back when the last holder dies, however it dies.
    """
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        held.bind(f"\0dovetail-{name}")
    except OSError:
        held.close()
        return None
    return held


def lease_port(address: str = "", wanted: int = 0) -> tuple[int, socket.socket]:
    """Lease a port that nobody listens on now, there or on any address: the wanted one, or any.

    Between lease and use no connection of a client's can take it, since it is below their ports.
    """
    for port in [wanted] if wanted else random.sample(PORTS, len(PORTS)):
        if (held := lease(f"port-{port}")) and _nobody_listens(address, port):
            return port, held
    if wanted:
        raise OSError(f"port {wanted}, which the cluster's nodes need, is in use on this machine")
    raise OSError(f"no port from {PORTS[0]} to {PORTS[-1]} is free on this machine")


def _nobody_listens(address: str, port: int) -> bool:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_INET, kind) as probe:
            try:
                probe.bind((address, port))
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    raise
                return False
    return True


def any_loopback() -> str:
    """Some address of 127.77.0.0/16."""
    return f"127.77.{random.randrange(256)}.{random.randrange(1, 255)}"


def lease_loopback(wanted: str = "") -> tuple[str, socket.socket]:
    """Lease a loopback address that belongs to one node alone: the wanted one, or any."""
    for _ in range(1 if wanted else 1000):
        address = wanted or any_loopback()
        held = lease(address)
        if held:
            return address, held
    raise OSError(f"{wanted or 'every loopback address'} is in use")
