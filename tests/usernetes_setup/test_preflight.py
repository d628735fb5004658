# SPDX-License-Identifier: LGPL-3.0-or-later
"""Every gap is found, with the command that fixes it and who types it."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import subprocess
import sys
import tempfile

import pytest
from support.other_users import TOP, needs_nobody
from usernetes_setup import node_record
from usernetes_setup.build import debian_packages
from usernetes_setup.node import namespaces
from usernetes_setup.preflight import finding
from usernetes_setup.preflight import kernel as checks_kernel
from usernetes_setup.preflight import machine as checks_machine
from usernetes_setup.preflight import report as whole

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("private_state")]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine that is only written down: what a check reads below /proc, /sys, /dev and so on."""
    for name in ("PROC", "SYS", "DEV", "ETC", "RUN", "VAR"):
        monkeypatch.setattr(finding, name, tmp_path / name)
    monkeypatch.setattr(checks_kernel.cgroups, "ROOT", tmp_path / "SYS/fs/cgroup")
    monkeypatch.setattr(checks_kernel.cgroups, "RUN", tmp_path / "RUN")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(namespaces, "user_name", lambda: "ann")
    monkeypatch.setattr(checks_kernel.shutil, "which", lambda name: f"/usr/bin/{name}")
    (tmp_path / "ETC").mkdir()
    (tmp_path / "ETC/passwd").write_text("ann:x:1000:1000::/home/ann:/bin/sh\n")


CLOCK = "SYS/devices/system/clocksource/clocksource0"
EFA = {"SYS/class/infiniband/efa_0/node_type": "1"}
TWO_NETWORKS = {f"SYS/class/net/{name}/operstate": "up\n" for name in ("eth0", "ib0")}
SYSTEMD = {"RUN/systemd/system/basic.target": ""}
VERSION_2 = {**SYSTEMD, "SYS/fs/cgroup/cgroup.controllers": ""}
FEW_LOCKED = (64 << 10, 64 << 10)


@pytest.mark.parametrize(
    ("name", "files", "level", "fix", "who"),
    [
        ("rp_filter", {**TWO_NETWORKS, "PROC/sys/net/ipv4/conf/all/rp_filter": "1\n"},
         "warning", "sysctl -w net.ipv4.conf.all.rp_filter=2", "admin"),
        ("rp_filter", {**TWO_NETWORKS, "PROC/sys/net/ipv4/conf/all/rp_filter": "2\n",
                       "PROC/sys/net/ipv4/conf/ib0/rp_filter": "1\n"}, "ok", "", ""),
        ("subordinate ids", {"ETC/subuid": "bob:100000:65536\n", "ETC/subgid": ""},
         "warning", "usermod --add-subuids 165536-231071 --add-subgids 165536-231071 ann", "admin"),
        ("subordinate ids", {"ETC/passwd": "", "ETC/subuid": "bob:100000:65536\n"},
         "warning", "echo ann:165536:65536 | tee -a ", "admin"),
        ("subordinate ids", {"ETC/subuid": "ann:100000:10\n", "ETC/subgid": "ann:100000:10\n"},
         "warning", "--add-subuids 100010-165545", "admin"),
        ("subordinate ids", {"ETC/subuid": "ann:100000:65536\n", "ETC/subgid": "ann:1:65536\n"},
         "ok", "", ""),
        ("clock", {f"{CLOCK}/current_clocksource": "hpet\n",
                   f"{CLOCK}/available_clocksource": "hpet tsc \n"},
         "warning", "echo tsc > ", "admin"),
        ("clock", {f"{CLOCK}/current_clocksource": "hpet\n",
                   f"{CLOCK}/available_clocksource": "hpet \n"}, "ok", "", ""),
        ("/dev/fuse", {}, "warning", "modprobe fuse", "admin"),
        ("/dev/fuse", {"DEV/fuse": ""}, "ok", "", ""),
        ("huge pages", EFA, "warning", "sysctl -w vm.nr_hugepages=", "admin"),
        ("huge pages", {**EFA, "SYS/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "9"},
         "note", "", ""),
        ("huge pages", {}, "note", "", ""),
        ("fabrics", EFA, "warning", "modprobe ib_uverbs", "admin"),
        ("fabrics", {**EFA, "DEV/infiniband/uverbs0": ""}, "ok", "", ""),
        ("fabrics", {}, "note", "", ""),
        ("devices", {}, "note", "", ""),
        ("devices", {"DEV/nvidia0": "", "DEV/net/tun": ""}, "note", "", ""),
        ("memlock", EFA, "warning", "ann - memlock unlimited", "admin"),
        ("memlock", {}, "ok", "", ""),
        ("linger", SYSTEMD, "warning", "loginctl enable-linger ann", "user"),
        ("linger", {**SYSTEMD, "VAR/lib/systemd/linger/ann": ""}, "ok", "", ""),
        ("linger", {}, "ok", "", ""),
        ("XDG_RUNTIME_DIR", VERSION_2, "warning", "loginctl enable-linger ann", "admin"),
        ("XDG_RUNTIME_DIR", {**VERSION_2, "RUN/user/1000/bus": ""},
         "warning", "/RUN/user/1000", "user"),
        ("XDG_RUNTIME_DIR", SYSTEMD, "ok", "", ""),
    ],
)  # fmt: skip
def test_a_gap_is_told_with_what_fixes_it(
    machine, monkeypatch, tmp_path, name, files, level, fix, who
):
    monkeypatch.setattr(resource, "getrlimit", lambda _: FEW_LOCKED)
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    found = next(one() for one in whole.CHECKS if named(one) == name)
    assert (found.name, found.level, found.who) == (name, level, who), found
    assert fix in found.fix
    assert bool(fix) == bool(found.fix)


SEEN = (
    "29 25 0:24 / /scratch rw shared:8 - tmpfs  rw\n"  # mounted without a word for its source
    "30 25 0:26 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,{}\n"
)


@pytest.mark.parametrize(
    ("mounted", "told"),
    [("cpu,cpuacct", ""), ("cpuacct,cpu", ""),
     ("memory", "cpu,cpuacct is in use and mounted nowhere")],
)  # fmt: skip
def test_a_hierarchy_that_nobody_can_see_is_told(machine, monkeypatch, tmp_path, mounted, told):
    monkeypatch.setattr(checks_kernel.cgroups, "problems", list)
    monkeypatch.setattr(checks_kernel.cgroups, "base", lambda: "/here")
    (tmp_path / "PROC/self").mkdir(parents=True)
    (tmp_path / "PROC/self/cgroup").write_text("4:cpu,cpuacct:/\n0::/\n")
    (tmp_path / "PROC/self/mountinfo").write_text(SEEN.format(mounted))
    found = checks_kernel.control_groups()
    assert found.level == ("warning" if told else "ok")
    assert told in found.found
    assert not told or "mount -t cgroup -o cpu,cpuacct cgroup" in found.fix


@pytest.mark.parametrize("uid", [0, 1000])
def test_a_controller_that_is_not_mounted_is_mounted(machine, monkeypatch, tmp_path, uid):
    """No delegation, and no mount anew, would bring it."""
    root, cgroups = tmp_path / "SYS/fs/cgroup", checks_kernel.cgroups
    mounts = "".join(f"cgroup {root}/{name} cgroup rw 0 0\n" for name in ("cpu,cpuacct", "memory"))
    (tmp_path / "mounts").write_text(mounts)
    monkeypatch.setattr(cgroups, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(os, "getuid", lambda: uid)
    found = checks_kernel.control_groups()
    assert (found.level, found.found) == ("error", "version 1: no cpuset controller")
    assert found.fix == " && ".join(
        f"mkdir -p /sys/fs/cgroup/{name} && mount -t cgroup -o {name} cgroup /sys/fs/cgroup/{name}"
        for name in ("cpuset", "pids")
    )


def test_a_mount_of_somebody_may_have_a_name_that_is_no_text(machine, monkeypatch, tmp_path):
    root, cgroups = tmp_path / "SYS/fs/cgroup", checks_kernel.cgroups
    mounts = b"/dev/sdb /media/caf\xe9 ext4 rw 0 0\n" + f"cgroup {root}/pids cgroup rw\n".encode()
    (tmp_path / "mounts").write_bytes(mounts)
    monkeypatch.setattr(cgroups, "MOUNTS", tmp_path / "mounts")
    assert cgroups.hierarchies() == [root / "pids"]
    assert "ext4" in checks_kernel.read(tmp_path / "mounts")


@pytest.mark.parametrize("pair", ["cpu,cpuacct", "cpuacct,cpu"])
def test_controllers_that_share_a_hierarchy_are_both_there(machine, monkeypatch, tmp_path, pair):
    """As systemd mounts them on version 1."""
    root, cgroups = tmp_path / "SYS/fs/cgroup", checks_kernel.cgroups
    mounts = [root / name for name in (pair, "cpuset", "memory", "pids", "net_cls,net_prio")]
    for folder in mounts:
        (folder / "dovetail-1000").mkdir(parents=True)
        (folder / "dovetail-1000/cgroup.procs").touch()
    for name in ("cpu", "cpuacct"):
        (root / name).symlink_to(pair)
    (tmp_path / "mounts").write_text("".join(f"cgroup {path} cgroup rw 0 0\n" for path in mounts))
    monkeypatch.setattr(cgroups, "MOUNTS", tmp_path / "mounts")
    assert cgroups.problems() == []
    assert cgroups.folders("/dovetail-1000") == [path / "dovetail-1000" for path in mounts]
    (mounts[0] / "dovetail-1000/cgroup.procs").unlink()
    assert cgroups.problems() == [f"{mounts[0]}/dovetail-1000 is missing or not writable"]


@pytest.mark.parametrize(
    ("kind", "inside", "given", "fix"),
    [
        ("", "1\n", "", ""),  # the machine's own root
        ("domain\n", "1\n", "", "mkdir -p /sys/fs/cgroup/init && "),
        ("domain\n", "1\n", "cpuset cpu io memory pids\n", ""),
        ("domain\n", "", "", ""),
        ("domain\n", "1\n", None, "mount -o remount,rw /sys/fs/cgroup"),  # read-only
    ],
)
def test_root_in_a_container_is_told_that_its_groups_can_have_no_controllers(
    machine, monkeypatch, tmp_path, kind, inside, given, fix
):
    root = tmp_path / "SYS/fs/cgroup"
    root.mkdir(parents=True)
    files = {"controllers": "cpuset cpu io memory pids\n", "procs": inside, "type": kind,
             "subtree_control": given or ""}  # fmt: skip
    for name, text in files.items():
        if text or name != "type":
            (root / f"cgroup.{name}").write_text(text)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    if given is None:
        monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(checks_kernel, "_mounted_nowhere", list)
    found = checks_kernel.control_groups()
    assert found.level == ("error" if fix else "ok")
    assert found.fix.startswith(fix)


@pytest.mark.parametrize(("number", "who"), [(None, "user"), (errno.ENOSYS, "admin")])
def test_without_handles_of_processes_nothing_can_run(monkeypatch, number, who):
    """A Python that was built for an old kernel has none, and an old kernel refuses."""

    def refused(pid):
        raise OSError(number, os.strerror(number))

    if number:
        monkeypatch.setattr(os, "pidfd_open", refused)
    else:
        monkeypatch.delattr(os, "pidfd_open")
    found = checks_kernel.process_handles()
    assert (found.level, found.who) == ("error", who)
    assert any("pidfd_open" in line for line in whole.errors())


def test_without_newuidmap_missing_ids_are_told_as_well(machine, monkeypatch):
    monkeypatch.setattr(checks_kernel.shutil, "which", lambda name: None)
    found = checks_kernel.subordinate_ids()
    assert found.fix.startswith("apt-get install uidmap && usermod --add-subuids ")


@pytest.mark.parametrize("systemd", [True, False])
def test_a_service_manager_that_is_not_there_sets_no_clock(machine, tmp_path, systemd):
    if systemd:
        (tmp_path / "RUN/systemd/system").mkdir(parents=True)
    assert (checks_machine.keep_in_step() == "timedatectl set-ntp true") is systemd


CHECK = (
    "from usernetes_setup.preflight import kernel; found = kernel.subordinate_ids();"
    "print(found.level if found.level == 'ok' else found.fix)"
)
FOLLOW = """
set -eu; umask 022
cp -a /etc etc
mount --bind etc /etc
mkdir bin
for name in newuidmap newgidmap; do printf '#!/bin/sh\\n' >bin/$name; chmod 755 bin/$name; done
PATH=$PWD/bin:$PATH
for table in /etc/subuid /etc/subgid; do printf "$1" >$table; done
check() { cd /; setpriv --reuid=65534 --regid=65534 --clear-groups "$2" -c "$3"; }
fix=$(check "$@")
echo "$fix"
eval "$fix" >&2
check "$@"
"""


@needs_nobody
@pytest.mark.parametrize("table", ["", "nobody:100000:10\\n", "bob:100000:65536\\n"])
def test_who_follows_the_advice_on_ids_has_no_gap_left(table):
    environment = {**os.environ, "PYTHONPATH": f"{TOP}/flux-python:{TOP}/usernetes-setup",
                   "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
    # A folder of its own: pytest's are closed to others again whenever another pytest begins.
    with tempfile.TemporaryDirectory(prefix="dovetail-ids-") as folder:
        os.chmod(folder, 0o755)
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", FOLLOW, "sh", table, sys.executable, CHECK],
            env=environment, cwd=folder, capture_output=True, text=True,
        )  # fmt: skip
    fix, after = done.stdout.splitlines()
    assert fix.startswith("usermod --add-subuids "), done.stderr
    assert after == "ok", done.stderr


NAMES = {
    "node_programs": "programs",
    "reverse_paths": "rp_filter", "fuse": "/dev/fuse", "locked_memory": "memlock",
    "runtime_folder": "XDG_RUNTIME_DIR", "modules": "kernel modules", "engine": "container engine",
}  # fmt: skip


def named(one):
    """What a check is called where people read it."""
    return NAMES.get(one.__name__, one.__name__.replace("_", " "))


@pytest.mark.parametrize(
    ("without_ids", "files", "fix"),
    [
        ("", {}, "chmod u+s /usr/bin/newuidmap /usr/bin/newgidmap"),
        ("", {"kernel/apparmor_restrict_unprivileged_userns": "1"},  # as Ubuntu has it
         "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
        ("no", {"user/max_user_namespaces": "0"}, "sysctl -w user.max_user_namespaces=15000"),
        ("no", {"user/max_user_namespaces": "9", "kernel/unprivileged_userns_clone": "0"},
         "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("no", {"kernel/apparmor_restrict_unprivileged_userns": "1"},
         "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
        ("no", {}, "docker run --security-opt seccomp=unconfined --security-opt apparmor="),
    ],
)  # fmt: skip
def test_whoever_refuses_namespaces_is_found(
    machine, monkeypatch, tmp_path, without_ids, files, fix
):
    for path, text in files.items():
        (tmp_path / "PROC/sys" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "PROC/sys" / path).write_text(text)
    answers = iter(("no", without_ids))  # this kernel allows both
    monkeypatch.setattr(namespaces, "in_child", lambda _: next(answers))
    found = checks_kernel.user_namespaces()
    assert (found.level, found.who) == ("error", "admin")
    assert found.fix.startswith(fix)


def test_namespaces_in_which_nothing_can_be_mounted_are_of_no_use(monkeypatch):
    """AppArmor lets them be made, and forbids that."""

    def forbidden(*_):
        raise OSError(errno.EACCES, "mount none on /: Permission denied")

    if checks_kernel.user_namespaces().level != "ok":
        pytest.skip("no namespaces here")
    monkeypatch.setattr(namespaces, "mount", forbidden)
    found = checks_kernel.user_namespaces()
    assert (found.level, found.who) == ("error", "admin")
    assert "mount none on /: Permission denied" in found.found


def test_a_container_that_hides_parts_of_its_proc_is_told_to_be_started_otherwise():
    """There the kernel lets nobody mount another /proc, as each node does."""

    def hidden():
        namespaces.enter_user_namespace(namespaces.user_name())
        namespaces.unshare(namespaces.NEWNS)
        namespaces.mount("none", "/", "", namespaces.REC | namespaces.PRIVATE)
        namespaces.mount("/dev/null", "/proc/meminfo", "", namespaces.BIND)
        namespaces.enter_user_namespace(namespaces.user_name())  # a container's user's
        found = checks_kernel.user_namespaces()
        raise OSError(f"{found.level}: {found.found}; {found.fix}")

    if checks_kernel.user_namespaces().level != "ok":
        pytest.skip("no namespaces here")
    said = namespaces.in_child(hidden)
    assert said.startswith("error: ")
    assert "mount proc on /proc: Operation not permitted" in said
    assert "--security-opt systempaths=unconfined" in said


def test_without_loopback_there_is_no_port():
    def alone():
        checks_kernel._in_own_network()
        found = checks_machine.ports()
        raise OSError(f"{found.level}, {found.who}: {found.fix}")

    if namespaces.in_child(checks_kernel._in_own_network):
        pytest.skip("no network namespaces here")
    assert namespaces.in_child(alone) == "error, admin: ip link set lo up"


def test_a_clock_before_this_release_is_an_error(monkeypatch):
    monkeypatch.setattr(checks_machine, "NEWEST_PAST", 1 << 40)
    found = checks_machine.clock()
    assert (found.level, found.fix, found.who) == (
        "error", checks_machine.keep_in_step(), "admin"
    )  # fmt: skip
    assert any("clock" in line for line in whole.errors())


def test_a_device_that_is_not_the_users_to_open_is_a_gap(machine, monkeypatch, tmp_path):
    (tmp_path / "DEV/infiniband").mkdir(parents=True)
    for path in ("DEV/fuse", "DEV/infiniband/uverbs0"):
        (tmp_path / path).touch()
    (tmp_path / "SYS/class/infiniband/mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert checks_machine.fuse().fix == f"chmod 666 {tmp_path}/DEV/fuse"
    assert checks_machine.fabrics().fix == f"chmod 666 {tmp_path}/DEV/infiniband/uverbs0"


def test_locked_memory_that_the_user_may_raise_is_the_users_to_raise(
    machine, tmp_path, monkeypatch
):
    (tmp_path / "SYS/class/infiniband/mlx5_0").mkdir(parents=True)
    limits = (64 << 10, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    found = checks_machine.locked_memory()
    assert (found.level, found.fix, found.who) == ("warning", "ulimit -l unlimited", "user")


def test_who_may_lock_memory_is_added_to_who_may_already(machine, tmp_path, monkeypatch):
    (tmp_path / "SYS/class/infiniband/mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(resource, "getrlimit", lambda _: FEW_LOCKED)
    for user in ("ann", "bob"):
        monkeypatch.setattr(namespaces, "user_name", lambda who=user: who)
        command = checks_machine.locked_memory().fix.partition("   (")[0]
        command = command.replace("/etc/security/limits.d", str(tmp_path))
        subprocess.run(["sh", "-c", command], check=True)
    told = (tmp_path / "95-memlock.conf").read_text()
    assert told == "ann - memlock unlimited\nbob - memlock unlimited\n"


def test_a_missing_module_is_named_with_what_it_is_for(monkeypatch):
    def refused():
        raise OSError("Operation not supported")

    monkeypatch.setattr(checks_kernel, "_veth", refused)
    monkeypatch.setattr(checks_kernel, "_overlay", refused)
    monkeypatch.setattr(checks_kernel, "_nftables", lambda: None)
    found = checks_kernel.modules()
    assert (found.level, found.fix, found.who) == ("warning", "modprobe -a overlay veth", "admin")
    assert "images are copied" in found.found


@pytest.mark.parametrize(
    ("there", "fix"), [(True, "chmod 666 {}"), (False, "modprobe tun")], ids=["closed", "missing"]
)
def test_without_a_device_for_tunnels_a_cluster_on_a_bridge_has_one_node(
    monkeypatch, tmp_path, there, fix
):
    device = tmp_path / "tun"
    if there:
        device.touch()
        monkeypatch.setattr(checks_kernel.os, "access", lambda *_: False)
    monkeypatch.setattr(namespaces, "TUNNELS", str(device))
    found = checks_kernel.tunnels()
    assert (found.level, found.who, found.fix) == ("warning", "admin", fix.format(device))
    assert found.found.endswith("one node on --network bridge")


def test_the_kernel_is_asked_for_what_it_cannot_have(monkeypatch):
    """What tells a missing module from one that is there: a kind of link that nobody has."""

    def unknown_kind():
        checks_kernel._in_own_network()
        kind = checks_kernel.struct.pack("=HHHH", 12, 18, 8, 1) + b"none"
        namespaces.netlink(0, 16, 0x605, bytes(16) + kind)

    if namespaces.in_child(checks_kernel._in_own_network):
        pytest.skip("no network namespaces here")
    assert "not supported" in namespaces.in_child(unknown_kind)


@pytest.mark.parametrize("login", ["session-1.scope", "user@1000.service/app.slice"])
@pytest.mark.parametrize("offered", ["cpu cpuset io memory pids", "memory pids"])
def test_on_version_2_a_scope_is_taken_where_the_service_manager_may(
    machine, monkeypatch, tmp_path, login, offered
):
    cgroups, user = checks_kernel.cgroups, tmp_path / "user.slice/user-1000.slice"
    ours = [user / "user@1000.service", user / "user@1000.service/app.slice"]
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    monkeypatch.setattr(cgroups, "base", lambda: f"/user.slice/user-1000.slice/{login}")
    monkeypatch.setattr(cgroups, "_owned", lambda folder: folder in ours)
    (tmp_path / "cgroup.controllers").touch()
    for folder in (*ours, user / "session-1.scope"):
        folder.mkdir(parents=True)
        (folder / "cgroup.controllers").write_text(offered)
    assert cgroups.scope() == []
    (tmp_path / "RUN/user/1000/systemd").mkdir(parents=True)
    (tmp_path / "RUN/user/1000/systemd/private").touch()
    assert (cgroups.scope() != []) == login.startswith("session")
    found = checks_kernel.control_groups()
    if offered == "memory pids":
        assert (found.level, found.who) == ("error", "admin")
        assert "Delegate=cpu cpuset io memory pids" in found.fix
    else:
        assert found.level == "ok"


def test_every_gap_comes_with_a_command_and_who_types_it():
    found = whole.checks()
    assert len(found) == len(whole.CHECKS)
    assert [one.name for one in found] == [named(one) for one in whole.CHECKS]
    for one in found:
        assert one.level in ("ok", "note", "warning", "error")
        assert bool(one.fix) == bool(one.who), one
        assert one.fix or one.level in ("ok", "note"), one


@pytest.mark.parametrize(("level", "code"), [("warning", 0), ("error", 1)])
def test_only_an_error_fails_the_doctor(monkeypatch, capsys, level, code):
    gap = finding.Check("memlock", level, "little", "ulimit -l unlimited", "user")
    monkeypatch.setattr(whole, "CHECKS", (lambda: gap,))
    assert whole.main(as_json=False) == code
    assert "user types:       ulimit -l unlimited\n" in capsys.readouterr().out
    assert whole.main(as_json=True) == code
    said = json.loads(capsys.readouterr().out)
    assert said["can_run"] is (code == 0)
    assert said["checks"] == [{"name": "memlock", "level": level, "found": "little",
                               "fix": "ulimit -l unlimited", "who": "user"}]  # fmt: skip


def test_missing_delegation_is_an_error(monkeypatch):
    monkeypatch.setattr(checks_kernel.cgroups, "problems", lambda: ["/x is missing"])
    assert checks_kernel.control_groups().level == "error"
    assert any("control groups" in line for line in whole.errors())


@pytest.mark.parametrize(
    ("said", "state"),
    [("echo '[name=seccomp name=rootless]'", "rootless"), ("echo '[name=seccomp]'", "as root"),
     ("exit 1", "does not run")],
)  # fmt: skip
def test_a_container_engine_is_asked_whether_it_is_rootless(tmp_path, monkeypatch, said, state):
    (tmp_path / "docker").write_text(f"#!/bin/sh\n{said}\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr(checks_machine, "ENGINES", {"docker": ("info",)})
    assert f"docker ({state})" in checks_machine.engine().found


def test_a_network_disk_is_left_for_a_local_one_with_room(tmp_path, monkeypatch):
    (tmp_path / "local").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "local"))
    kinds = {node_record.root(make=True).name: "NFS"}
    monkeypatch.setattr(checks_machine, "_network_disk", lambda path: kinds.get(path.name, ""))
    found = checks_machine.disk()
    assert (found.level, found.who) == ("error", "user")
    assert found.fix == f"export DOVETAIL_STATE={tmp_path}/local/dovetail-{os.getuid()}"
    assert "is on NFS" in found.found


def test_what_kind_a_disk_is_needs_no_program(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(checks_machine, "NETWORK_DISKS", {0x9FA0: "proc"})
    kinds = [checks_machine._network_disk(path) for path in ("/proc", "/sys", "/none")]
    assert kinds == ["proc", "", ""]


def test_a_full_disk_is_an_error(monkeypatch):
    monkeypatch.setattr(checks_machine, "ROOM", 1 << 60)
    assert checks_machine.disk().level == "error"


def test_where_no_go_can_be_had_its_archive_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checks_machine.go_toolchain, "obtainable", lambda: False)
    found = checks_machine.node_programs()
    assert (found.level, found.who) == ("error", "user")
    assert re.search(r"curl -L https://\S+/go1\.\d+\.\d+\.linux-\w+\.tar\.gz \| tar", found.fix)


def test_apt_get_is_needed_only_where_a_program_is_lacking(tmp_path, monkeypatch):
    for name in ("go", "cc", "nft", *debian_packages.TOOLS):
        (tmp_path / name).write_text("#!/bin/sh\necho version 9.9\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(debian_packages, "CNI", tmp_path / "nft")
    assert checks_machine.node_programs().level == "warning"
    (tmp_path / "etcd").unlink()
    found = checks_machine.node_programs()
    assert (found.level, found.found) == ("error", "not built, and no apt-get to fetch etcd-server")
    assert found.fix.startswith("dovetail kube bundle --unpack "), "apt-get is no cure for its lack"


def test_doctor_says_which_devices_plans_may_ask_for(machine, tmp_path):
    for name in ("nvidia0", "nvidia1", "infiniband/uverbs0", "net/tun"):
        (tmp_path / "DEV" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "DEV" / name).touch()
    found = checks_machine.devices().found
    assert found == f"rdma, 2 gpu, {tmp_path}/DEV/net/tun; for `devices` in a plan"
