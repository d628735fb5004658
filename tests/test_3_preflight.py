# SPDX-License-Identifier: LGPL-3.0-or-later
"""Step 3, the doctor: every gap is found, with the command that mends it and who types it."""

from __future__ import annotations

import argparse
import contextlib
import http.server
import json
import os
import re
import resource
import ssl
import threading
import time
from email.utils import formatdate

import pytest
from clusters import node
from dovetail.errors import BadInput
from dovetail.usernetes import api, check, checks_kernel, checks_machine, cluster, linux, pki
from dovetail.usernetes import preflight as whole

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("private_state")]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine that is only written down: what a check reads below /proc, /sys, /dev and /etc."""
    for name in ("PROC", "SYS", "DEV", "ETC"):
        monkeypatch.setattr(check, name, tmp_path / name)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(linux, "user_name", lambda: "ann")
    monkeypatch.setattr(checks_kernel.shutil, "which", lambda name: f"/usr/bin/{name}")


CLOCK = "SYS/devices/system/clocksource/clocksource0"
EFA = {"SYS/class/infiniband/efa_0/node_type": "1"}
TWO_NETWORKS = {f"SYS/class/net/{name}/operstate": "up\n" for name in ("eth0", "ib0")}
FEW_LOCKED = (64 << 10, 64 << 10)


@pytest.mark.parametrize(
    ("name", "files", "level", "mends", "who"),
    [
        ("rp_filter", {**TWO_NETWORKS, "PROC/sys/net/ipv4/conf/all/rp_filter": "1\n"},
         "soft", "sysctl -w net.ipv4.conf.all.rp_filter=2", "admin"),
        ("rp_filter", {**TWO_NETWORKS, "PROC/sys/net/ipv4/conf/all/rp_filter": "2\n",
                       "PROC/sys/net/ipv4/conf/ib0/rp_filter": "1\n"}, "ok", "", ""),
        ("subordinate ids", {"ETC/subuid": "bob:100000:65536\n", "ETC/subgid": ""},
         "soft", "usermod --add-subuids 165536-231071 --add-subgids 165536-231071 ann", "admin"),
        ("subordinate ids", {"ETC/subuid": "ann:100000:10\n", "ETC/subgid": "ann:100000:10\n"},
         "soft", "--add-subuids 100010-165545", "admin"),
        ("subordinate ids", {"ETC/subuid": "ann:100000:65536\n", "ETC/subgid": "ann:1:65536\n"},
         "ok", "", ""),
        ("clock", {f"{CLOCK}/current_clocksource": "hpet\n",
                   f"{CLOCK}/available_clocksource": "hpet tsc \n"},
         "soft", "echo tsc > ", "admin"),
        ("clock", {f"{CLOCK}/current_clocksource": "hpet\n",
                   f"{CLOCK}/available_clocksource": "hpet \n"}, "ok", "", ""),
        ("/dev/fuse", {}, "soft", "modprobe fuse", "admin"),
        ("/dev/fuse", {"DEV/fuse": ""}, "ok", "", ""),
        ("huge pages", EFA, "soft", "sysctl -w vm.nr_hugepages=", "admin"),
        ("huge pages", {**EFA, "SYS/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "9"},
         "note", "", ""),
        ("huge pages", {}, "note", "", ""),
        ("fabrics", EFA, "soft", "modprobe ib_uverbs", "admin"),
        ("fabrics", {**EFA, "DEV/infiniband/uverbs0": ""}, "ok", "", ""),
        ("fabrics", {}, "note", "", ""),
        ("memlock", EFA, "soft", "ann - memlock unlimited", "admin"),
        ("memlock", {}, "ok", "", ""),
    ],
)  # fmt: skip
def test_a_gap_is_told_with_what_mends_it(
    machine, monkeypatch, tmp_path, name, files, level, mends, who
):
    monkeypatch.setattr(resource, "getrlimit", lambda _: FEW_LOCKED)
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    found = next(one() for one in whole.CHECKS if named(one) == name)
    assert (found.name, found.level, found.who) == (name, level, who), found
    assert mends in found.fix
    assert bool(mends) == bool(found.fix)


NAMES = {
    "reverse_paths": "rp_filter", "fuse": "/dev/fuse", "locked_memory": "memlock",
    "runtime_folder": "XDG_RUNTIME_DIR", "modules": "kernel modules", "engine": "container engine",
}  # fmt: skip


def named(one):
    """What a check is called where people read it."""
    return NAMES.get(one.__name__, one.__name__.replace("_", " "))


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
    assert (found.level, found.fix, found.who) == ("soft", "ulimit -l unlimited", "user")


def test_a_missing_module_is_named_with_what_it_is_for(monkeypatch):
    def refused():
        raise OSError("Operation not supported")

    monkeypatch.setattr(checks_kernel, "_veth", refused)
    monkeypatch.setattr(checks_kernel, "_overlay", refused)
    monkeypatch.setattr(checks_kernel, "_nftables", lambda: None)
    found = checks_kernel.modules()
    assert (found.level, found.fix, found.who) == ("soft", "modprobe -a overlay veth", "admin")
    assert "images are copied" in found.found


def test_the_kernel_is_asked_for_what_it_cannot_have(monkeypatch):
    """What tells a missing module from one that is there: a kind of link that nobody has."""

    def unknown_kind():
        checks_kernel._in_own_network()
        kind = checks_kernel.struct.pack("=HHHH", 12, 18, 8, 1) + b"none"
        checks_kernel._netlink(0, 16, 0x605, bytes(16) + kind)

    if linux.in_child(checks_kernel._in_own_network):
        pytest.skip("no network namespaces here")
    assert "not supported" in linux.in_child(unknown_kind)


@pytest.mark.parametrize(
    ("manager", "mends", "who"),
    [("cpu cpuset io memory pids", "systemd-run --user --scope -p Delegate=yes", "user"),
     ("memory pids", "Delegate=cpu cpuset io memory pids", "admin")],
)  # fmt: skip
def test_on_version_2_the_user_opens_a_scope_where_the_manager_may(
    machine, monkeypatch, tmp_path, manager, mends, who
):
    monkeypatch.setattr(checks_kernel.cgroups, "ROOT", tmp_path)
    monkeypatch.setattr(checks_kernel.cgroups, "problems", lambda: ["not delegated"])
    (tmp_path / "cgroup.controllers").touch()
    folder = tmp_path / "user.slice/user-1000.slice/user@1000.service"
    folder.mkdir(parents=True)
    (folder / "cgroup.controllers").write_text(manager)
    found = checks_kernel.control_groups()
    assert (found.level, found.who) == ("hard", who)
    assert mends in found.fix


def test_every_gap_comes_with_a_command_and_who_types_it():
    found = whole.checks()
    assert len(found) == len(whole.CHECKS)
    assert [one.name for one in found] == [named(one) for one in whole.CHECKS]
    for one in found:
        assert one.level in ("ok", "note", "soft", "hard")
        assert bool(one.fix) == bool(one.who), one
        assert one.fix or one.level in ("ok", "note"), one


@pytest.mark.parametrize(("level", "code"), [("soft", 0), ("hard", 1)])
def test_only_a_hard_gap_fails_the_doctor(monkeypatch, capsys, level, code):
    gap = check.Check("memlock", level, "little", "ulimit -l unlimited", "user")
    monkeypatch.setattr(whole, "CHECKS", (lambda: gap,))
    assert whole.main(as_json=False) == code
    assert "user types:       ulimit -l unlimited\n" in capsys.readouterr().out
    assert whole.main(as_json=True) == code
    said = json.loads(capsys.readouterr().out)
    assert said["can_run"] is (code == 0)
    assert said["checks"] == [{"name": "memlock", "level": level, "found": "little",
                               "fix": "ulimit -l unlimited", "who": "user"}]  # fmt: skip


def test_missing_delegation_is_a_hard_gap(monkeypatch):
    monkeypatch.setattr(checks_kernel.cgroups, "problems", lambda: ["/x is missing"])
    assert checks_kernel.control_groups().level == "hard"
    assert any("control groups" in line for line in whole.hard_gaps())


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


# --- time skew ---


@contextlib.contextmanager
def server(folder, ahead):
    """An API server that declines every request, and whose clock is ahead by so many seconds."""

    class Declines(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response_only(401)
            self.send_header("Date", formatdate(time.time() + ahead, usegmt=True))
            self.end_headers()

        def log_message(self, *_):
            pass

    pki.alone(folder, "server", "127.0.0.1")
    listening = http.server.HTTPServer(("127.0.0.1", 0), Declines)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    listening.socket = context.wrap_socket(listening.socket, server_side=True)
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"https://127.0.0.1:{listening.server_port}"
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


@pytest.mark.parametrize("ahead", [-3600, 0, 3600])
def test_a_clock_is_compared_with_a_servers(tmp_path, ahead):
    with server(tmp_path, ahead) as url:
        assert api.skew(url, timeout=60) == pytest.approx(-ahead, abs=30)


@pytest.mark.parametrize(
    ("ahead", "level", "says"),
    [(3600, "hard", r"3\d\d\d s behind"), (-3600, "hard", r"3\d\d\d s ahead of"),
     (0, "ok", "API server")],
)  # fmt: skip
def test_the_doctor_asks_the_server_of_the_users_kubeconfig(
    tmp_path, monkeypatch, ahead, level, says
):
    monkeypatch.setattr(checks_machine, "SKEW", 30.0)  # the server may be slow here
    with server(tmp_path, ahead) as url:
        (tmp_path / "config").write_text(f"clusters:\n- cluster:\n    server: {url}\n")
        monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/none:{tmp_path}/config")
        found = checks_machine.time_skew()
    assert found.level == level
    assert re.search(says, found.found)
    assert found.fix == ("" if level == "ok" else "timedatectl set-ntp true")


@pytest.mark.parametrize(("kept", "level"), [(True, "ok"), (False, "soft")])
def test_without_a_server_the_kernel_says_whether_its_clock_is_kept(monkeypatch, kept, level):
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setattr(linux, "clock_in_step", lambda: kept)
    assert checks_machine.time_skew().level == level


def test_a_joined_nodes_server_is_known():
    here = node(joined="yes", server="https://192.0.2.1:6443")
    here.folder.mkdir(parents=True)
    here.save()
    assert "https://192.0.2.1:6443" in checks_machine.servers()


def join_file(tmp_path, url):
    content = {"cluster": "c", "node": "127.77.9.9", "server": url, "authority": "", "token": ""}
    (tmp_path / "join.json").write_text(json.dumps(content))
    return argparse.Namespace(file=str(tmp_path / "join.json"), name="c", node="")


@pytest.mark.parametrize(
    ("ahead", "says"), [(3600, "s behind that of"), (-3600, "s ahead of that of")]
)
def test_a_node_with_a_wrong_clock_is_not_started(tmp_path, monkeypatch, ahead, says):
    monkeypatch.setattr(cluster, "binaries", lambda _: tmp_path)
    with server(tmp_path, ahead) as url, pytest.raises(BadInput, match=says):
        cluster.join(join_file(tmp_path, url), print)
    assert not list((tmp_path / "state").iterdir())


def test_a_node_whose_cluster_cannot_be_reached_is_not_started(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "binaries", lambda _: tmp_path)
    with pytest.raises(BadInput, match="cannot be reached"):
        cluster.join(join_file(tmp_path, "https://127.77.255.254:1"), print)
    assert not list((tmp_path / "state").iterdir())
