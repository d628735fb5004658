# SPDX-License-Identifier: LGPL-3.0-or-later
"""The preflight's checks of what the kernel and the login session allow.

Every check tries the thing itself where that is possible, rather than reading what should be.
"""

from __future__ import annotations

import os
import shutil
import struct
import sys
import tempfile
from pathlib import Path

from usernetes_setup.build import programs as build
from usernetes_setup.node import cgroups, namespaces
from usernetes_setup.preflight import finding
from usernetes_setup.preflight.finding import Check, read

ENOUGH_IDS = 65536  # what images of common distributions use


def user_namespaces() -> Check:
    """Whether the namespaces can be made, and get their ids."""
    name = "user namespaces"

    def attempt() -> None:
        if os.getuid() != 0:
            namespaces.enter_user_namespace(namespaces.user_name())
        namespaces.unshare(namespaces.NEWNS | namespaces.NEWPID | namespaces.NEWIPC)
        namespaces.mount("none", "/", "", namespaces.REC | namespaces.PRIVATE)
        if why := namespaces.in_child(lambda: namespaces.mount("proc", "/proc", "proc")):
            raise OSError(why)  # where parts of this container's are hidden

    why = namespaces.in_child(attempt)
    if not why:
        return Check(name, "ok", "namespaces can be made")
    knobs = {
        "kernel.unprivileged_userns_clone": "1",
        "user.max_user_namespaces": "15000",
        "kernel.apparmor_restrict_unprivileged_userns": "0",
    }
    wrong = [f"{name}={value}" for name, value in knobs.items() if _differs(name, value)]
    if wrong:  # also where AppArmor lets the namespace be made, and nothing be done in it
        return Check(name, "error", why, f"sysctl -w {' '.join(wrong)}", "admin")
    if os.getuid() != 0 and not namespaces.in_child(lambda: namespaces.unshare(namespaces.NEWUSER)):
        programs = [shutil.which(word) or word for word in ("newuidmap", "newgidmap")]
        return Check(name, "error", why, f"chmod u+s {' '.join(programs)}", "admin")
    # With the kernel willing it is the filter of a container that we are in.
    # Docker's profile of AppArmor forbids mounts; where there is no AppArmor the word does nothing.
    lifted = [f"--security-opt {one}=unconfined" for one in ("seccomp", "apparmor", "systempaths")]
    fix = f"docker run {' '.join(lifted)}   (to start this container)"
    return Check(name, "error", why, fix, "admin")


def _differs(name: str, value: str) -> bool:
    now = read(finding.PROC / "sys" / name.replace(".", "/"))
    if not now:
        return False
    return int(now) < 1 if name == "user.max_user_namespaces" else now != value


def process_handles() -> Check:
    """By which a node's monitor sees a process end; old kernels and Pythons have none."""
    name = "process handles"
    if not hasattr(os, "pidfd_open"):
        found = f"{sys.executable} was built without os.pidfd_open"
        return Check(name, "error", found, "export PATH=/usr/bin:$PATH", "user")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Check(name, "error", f"pidfd_open: {error.strerror}; Linux 5.3 or later has it",
                     "apt-get install linux-image-generic && reboot", "admin")  # fmt: skip
    return Check(name, "ok", "there")


def subordinate_ids() -> Check:
    """Subordinate ids, for images with files of several users."""
    name, user = "subordinate ids", namespaces.user_name()
    if os.getuid() == 0:
        return Check(name, "ok", "not needed as root")
    missing = [p for p in ("newuidmap", "newgidmap") if not shutil.which(p)]
    lacks = ["no newuidmap"] if missing else []
    fixes = ["apt-get install uidmap"] if missing else []
    tables = [finding.ETC / f"sub{kind}id" for kind in "ug"]
    ranges = [namespaces.subordinate_ids(user, str(table)) for table in tables]
    enough = all(found and found[1] >= ENOUGH_IDS for found in ranges)
    if enough and not missing:
        return Check(name, "ok", f"from {ranges[0]}")
    if not enough:
        lacks.append(f"fewer than {ENOUGH_IDS} in /etc/subuid and /etc/subgid")
        fixes.append(_more_ids(user, tables))
    found = f"{' and '.join(lacks)}: images must have files of one user only"
    return Check(name, "warning", found, " && ".join(fixes), "admin")


def _more_ids(user: str, tables: list[Path]) -> str:
    """The command that gives a user ids which nobody has yet."""
    lines = [line.split(":") for table in tables for line in read(table).splitlines()]
    ends = [int(line[1]) + int(line[2]) for line in lines if len(line) == 3]
    first = max([100000, *ends])
    known = [line.partition(":")[0] for line in read(finding.ETC / "passwd").splitlines()]
    if user not in known:  # of a site's directory, whose users are unknown to usermod
        return f"echo {user}:{first}:{ENOUGH_IDS} | tee -a {' '.join(map(str, tables))}"
    span = f"{first}-{first + ENOUGH_IDS - 1}"
    return f"usermod --add-subuids {span} --add-subgids {span} {user}"


def control_groups() -> Check:
    """Control groups that this user may write to."""
    name, version = "control groups", "version 2" if cgroups.unified() else "version 1"
    problems = cgroups.problems()
    if not problems and (lost := _mounted_nowhere()):
        where = f"/sys/fs/cgroup/{lost[0]}"
        return Check(
            name, "warning",
            f"{version}: {lost[0]} is in use and mounted nowhere: no container's memory can be "
            "told, nor that the kernel killed one",
            f"mkdir {where} && mount -t cgroup -o {lost[0]} cgroup {where}", "admin",
        )  # fmt: skip
    if not problems:
        place = "in a scope of its own" if cgroups.scope() else f"below {cgroups.base()}"
        return Check(name, "ok", f"{version}, {place}")
    who = "admin"
    if lost := cgroups.absent():
        places = {name: f"/sys/fs/cgroup/{name}" for name in lost}
        fix = " && ".join(f"mkdir -p {place} && mount -t cgroup -o {name} cgroup {place}"
                          for name, place in places.items())  # fmt: skip
    elif os.getuid() == 0:
        fix = "mount -o remount,rw /sys/fs/cgroup"
        if cgroups.unified() and cgroups.busy():
            fix = ("mkdir -p /sys/fs/cgroup/init && for pid in $(cat /sys/fs/cgroup/cgroup.procs); "
                   "do echo $pid >/sys/fs/cgroup/init/cgroup.procs; done")  # fmt: skip
    elif cgroups.unified():
        fix = ("mkdir -p /etc/systemd/system/user@.service.d && printf "
               "'[Service]\\nDelegate=cpu cpuset io memory pids\\n' "
               "> /etc/systemd/system/user@.service.d/delegate.conf && "
               "systemctl daemon-reload")  # fmt: skip
    else:
        fix = f"{build.setup_folder()}/delegate {os.getuid()}   (once after each boot)"
    return Check(name, "error", f"{version}: {problems[0]}", fix, who)


def _mounted_nowhere() -> list[str]:
    """Hierarchies of version 1 that processes are in and nobody sees; containerd wants to see all.

    They stay as long as they have groups, such as those of a container that had mounted them.
    """
    mounts = read(finding.PROC / "self/mountinfo").splitlines()
    fields = [line.rpartition(" - ")[2].split() for line in mounts]
    seen = {one for kind, *_, options in fields if kind == "cgroup" for one in options.split(",")}
    lines = [line.split(":", 2) for line in read(finding.PROC / "self/cgroup").splitlines()]
    return [
        names for number, names, _ in lines if number != "0" and not {*names.split(",")} <= seen
    ]


def linger() -> Check:
    """Whether processes survive logging out."""
    user = namespaces.user_name()
    if not (finding.RUN / "systemd/system").exists() or os.getuid() == 0:
        return Check("linger", "ok", "not needed: nothing ends processes at logout")
    if (finding.VAR / "lib/systemd/linger" / user).exists():
        return Check("linger", "ok", "on")
    return Check("linger", "warning", "systemd may end your processes when you log out",
                 f"loginctl enable-linger {user}", "user")  # fmt: skip


def runtime_folder() -> Check:
    """XDG_RUNTIME_DIR, through which a user talks to systemd."""
    name, folder = "XDG_RUNTIME_DIR", os.environ.get("XDG_RUNTIME_DIR", "")
    if folder and os.path.isdir(folder) and os.stat(folder).st_uid == os.getuid():
        return Check(name, "ok", folder)
    if not (finding.RUN / "systemd/system").exists() or os.getuid() == 0 or not cgroups.unified():
        return Check(name, "ok", f"{folder or 'unset'}; not needed")
    usual = finding.RUN / f"user/{os.getuid()}"
    if usual.is_dir():
        return Check(name, "warning", f"{folder or 'unset'}: systemd-run --user cannot work",
                     f"export XDG_RUNTIME_DIR={usual}", "user")  # fmt: skip
    return Check(name, "warning", f"{folder or 'unset'}, and there is no {usual}",
                 f"loginctl enable-linger {namespaces.user_name()}", "admin")  # fmt: skip


def modules() -> Check:
    """Overlay file systems for images; links and nftables for pods on a bridge."""
    tries = {
        "overlay": (_overlay, "images are copied"),
        "veth": (_veth, "no --network bridge"),
        "nf_tables": (_nftables, "no --network bridge"),
    }
    missing = {}
    for name, (attempt, without) in tries.items():
        if why := namespaces.in_child(attempt):
            missing[name] = f"{name} ({without}: {why})"
    if not missing:
        return Check("kernel modules", "ok", " ".join(tries))
    return Check("kernel modules", "warning", f"no {', no '.join(missing.values())}",
                 f"modprobe -a {' '.join(missing)}", "admin")  # fmt: skip


def tunnels() -> Check:
    """The device by which nodes on a bridge reach each other."""

    def attempt() -> None:
        _in_own_network()
        namespaces.tunnel("dovetail")

    device = namespaces.TUNNELS
    why = namespaces.in_child(attempt)
    if not why:
        return Check("tunnels", "ok", device)
    closed = os.path.exists(device) and not os.access(device, os.R_OK | os.W_OK)
    fix = f"chmod 666 {device}" if closed else "modprobe tun"
    found = f"{why}: one node on --network bridge"
    return Check("tunnels", "warning", found, fix, "admin")


def _overlay() -> None:
    with tempfile.TemporaryDirectory() as place:
        for name in ("lower", "upper", "work", "merged"):
            os.mkdir(f"{place}/{name}")
        layers = f"lowerdir={place}/lower,upperdir={place}/upper,workdir={place}/work"

        def attempt() -> None:
            if os.getuid() != 0:
                namespaces.enter_user_namespace(namespaces.user_name())
            namespaces.unshare(namespaces.NEWNS)
            namespaces.mount("none", "/", "", namespaces.REC | namespaces.PRIVATE)
            namespaces.mount("overlay", f"{place}/merged", "overlay", 0,
                        layers + ("" if namespaces.initial_user() else ",userxattr"))  # fmt: skip

        if why := namespaces.in_child(attempt):
            raise OSError(why)


def _in_own_network() -> None:
    if os.getuid() != 0:
        namespaces.enter_user_namespace(namespaces.user_name())
    namespaces.unshare(namespaces.NEWNET)


def _veth() -> None:
    """Make a pair of links, as pods on a bridge get, in a network namespace that ends at once."""
    _in_own_network()
    name = struct.pack("=HH", 12, 3) + b"dovetail"  # IFLA_IFNAME
    kind = struct.pack("=HHHH", 12, 18, 8, 1) + b"veth"  # IFLA_LINKINFO, IFLA_INFO_KIND
    namespaces.netlink(
        0, 16, 0x605, bytes(16) + name + kind
    )  # RTM_NEWLINK, to be created and answered


def _nftables() -> None:
    """List the tables, of which there are none, as kube-proxy would, in a network of our own."""
    _in_own_network()
    namespaces.netlink(12, 10 << 8 | 1, 0x301, bytes(4))  # NFT_MSG_GETTABLE, all


def reverse_paths() -> Check:
    """Strict filters drop what comes in by another interface than replies would leave by."""
    settings = finding.PROC / "sys/net/ipv4/conf"
    common = int(read(settings / "all/rp_filter", "0"))
    strict = [
        path.name for path in sorted((finding.SYS / "class/net").glob("*"))
        if path.name != "lo" and read(path / "operstate") == "up"
        and max(common, int(read(settings / path.name / "rp_filter", "0"))) == 1
    ]  # fmt: skip
    if len(strict) < 2:
        return Check("rp_filter", "ok", f"strict on {' '.join(strict) or 'no interface'}")
    return Check("rp_filter", "warning", f"strict on {' '.join(strict)}: nodes that are reached by "
                 "one of them and answer by another are cut off",
                 "sysctl -w net.ipv4.conf.all.rp_filter=2", "admin")  # fmt: skip
