# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the components and their containers are told."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest
from dovetail.core.errors import BadInput
from support.clusters import node
from usernetes_setup import __main__ as verbs
from usernetes_setup import cluster, node_record
from usernetes_setup.node import (
    bridge_network,
    components,
    container_runtime,
    namespaces,
    runc_rootless,
)

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("private_state")]


@pytest.mark.parametrize(
    ("cores", "text"),
    [([5], "5"), ([1, 0], "0-1"), ([*range(96)], "0-95"), ([0, 2, 3, 4, 6, 8, 9], "0,2-4,6,8-9")],
)
def test_cores_are_listed_in_ranges(cores, text):
    assert components.listed(cores) == text
    assert components.numbers(text) == sorted(cores)


def config(namespaces):
    return {
        "linux": {"namespaces": namespaces},
        "mounts": [
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
            {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue"},
            {"destination": "/dev/pts", "type": "devpts", "options": ["mode=0620", "gid=5"]},
        ],
    }


def test_a_pod_on_the_hosts_network_gets_the_hosts_sys():
    changed = runc_rootless.change(config([{"type": "pid"}, {"type": "ipc"}]), one_id=False)
    mounts = {mount["destination"]: mount for mount in changed["mounts"]}
    assert mounts["/sys"]["type"] == "bind"
    assert "ro" in mounts["/sys"]["options"]
    assert mounts["/dev/mqueue"]["type"] == "mqueue"
    assert "gid=5" in mounts["/dev/pts"]["options"]


def test_a_pod_with_a_network_of_its_own_keeps_its_sys():
    spaces = [{"type": "network"}, {"type": "ipc"}]
    mounts = runc_rootless.change(config(spaces), one_id=False)["mounts"]
    assert mounts[0]["type"] == "sysfs"


def test_with_one_id_there_is_no_tty_group():
    mounts = runc_rootless.change(config([{"type": "ipc"}]), one_id=True)["mounts"]
    assert mounts[-1]["options"] == ["mode=0620"]


def test_what_is_mounted_to_be_read_keeps_what_its_user_may_not_change(monkeypatch):
    """Else the kernel refuses it; and pods are to be born where /tmp has no programs."""
    flags = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=flags))
    asked = config([])
    asked["mounts"] = [
        {"destination": f"/{how}", "type": "bind", "source": "/tmp/x", "options": ["rbind", how]}
        for how in ("ro", "rw")
    ]
    read, written = runc_rootless.change(asked, one_id=False)["mounts"]
    assert read["options"] == ["rbind", "ro", "nosuid", "nodev", "noexec"]
    assert written["options"] == ["rbind", "rw"]


def test_our_own_namespaces_are_not_joined_again():
    spaces = [{"type": "network", "path": "/proc/self/ns/net"}, {"type": "pid"}]
    changed = runc_rootless.change(config(spaces), one_id=False)
    assert changed["linux"]["namespaces"] == [{"type": "pid"}]
    assert [mount["destination"] for mount in changed["mounts"]] == ["/sys", "/dev/pts"]


def test_a_users_runtime_is_found_in_a_folder_with_a_space_in_its_name(tmp_path):
    runc = tmp_path / "my cache/bin/runc"
    runc.parent.mkdir(parents=True)
    runc.write_text('#!/bin/sh\necho "$@"\n')
    runc.chmod(0o700)
    made = container_runtime._wrapper(node(binaries=str(tmp_path / "my cache")), namespaces.Ids.ONE)
    (tmp_path / "runc").write_text(made)
    done = subprocess.run(["sh", tmp_path / "runc", "state", "x"], capture_output=True, text=True)
    assert done.stdout == "state x\n", done.stderr


def test_a_users_runtime_wants_no_python_of_the_systems(tmp_path):
    for name, script in (("bin/runc", 'echo "$@"'), ("python3", "exit 1")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o700)
    (tmp_path / "config.json").write_text(json.dumps(config([])))
    made = container_runtime._wrapper(node(binaries=str(tmp_path)), namespaces.Ids.ONE)
    (tmp_path / "runc").write_text(made)
    words = ["/bin/sh", tmp_path / "runc", "create", "--bundle", str(tmp_path), "x"]
    done = subprocess.run(words, capture_output=True, text=True, env={"PATH": str(tmp_path)})
    assert done.stdout == f"create --bundle {tmp_path} x\n", done.stderr


def test_a_users_runtime_gives_a_modules_python_its_libraries(tmp_path, monkeypatch):
    for name in ("python", "bin/runc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} ${{LD_LIBRARY_PATH-none}}"\n')
        (tmp_path / name).chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/a module/lib")
    made = container_runtime._wrapper(node(binaries=str(tmp_path)), namespaces.Ids.ONE)
    (tmp_path / "runc").write_text(made)
    words = ["/bin/sh", tmp_path / "runc", "create", "x"]
    done = subprocess.run(words, capture_output=True, text=True, env={})
    assert done.stdout == "python /a module/lib\nbin/runc none\n", done.stderr


def test_name_servers_find_their_kubeconfig_in_a_folder_with_a_space_in_its_name(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("DOVETAIL_STATE", str(tmp_path / "my state"))
    made = node(network="bridge")
    node_record.root(make=True)
    made.folder.mkdir(parents=True)
    bridge_network.dns(made, lambda: True)
    (line,) = re.findall("kubeconfig .*", (made.folder / "Corefile").read_text())
    assert shlex.split(line)[1:] == [f"{tmp_path}/my state/c/pki/dns.conf"]


def test_every_component_listens_on_the_nodes_address_alone():
    here = node()
    node_record.root(make=True)
    here.folder.mkdir(parents=True)
    commands = [components.etcd(here), *components.control_plane(here, lambda: True)]
    commands.append(container_runtime.containerd(here, namespaces.Ids.ONE))
    commands.append(components.kubelet(here, here.group, True, lambda: True))
    text = " ".join(word for command in commands for word in command.words)
    text += (here.folder / "kubelet.json").read_text()
    text += (here.folder / "containerd.toml").read_text()
    assert "0.0.0.0" not in text
    kubelet = json.loads((here.folder / "kubelet.json").read_text())
    assert kubelet["address"] == "127.77.1.2"
    assert kubelet["readOnlyPort"] == kubelet["healthzPort"] == 0
    assert kubelet["authentication"]["anonymous"]["enabled"] is False
    assert kubelet["authorization"]["mode"] == "Webhook"
    assert "--anonymous-auth=false" in text


def test_an_api_server_asks_its_store_for_nothing_that_it_cannot_say():
    """Each failure was a line in its log, one each second of a cluster that does nothing."""
    server, _ = components.control_plane(node(), lambda: True)
    assert "--feature-gates=SizeBasedListCostEstimate=false" in server.words


def test_a_node_of_the_longest_name_has_room_for_every_socket(monkeypatch):
    with tempfile.TemporaryDirectory() as top:
        monkeypatch.setenv("DOVETAIL_STATE", f"{top}/s")
        node_record.root(make=True)
        here = node(name="n" * node_record.room("c"))
        here.folder.mkdir(parents=True)
        commands = [components.etcd(here), *components.control_plane(here, lambda: True)]
        commands.append(container_runtime.containerd(here, namespaces.Ids.ROOT))
        kubelet = components.kubelet(here, here.group, True, lambda: True)
        text = " ".join(word for command in commands for word in command.words)
        text += (here.folder / "containerd.toml").read_text()
        sockets = re.findall(rf'{here.folder}/run/[^\s",]+', text)
        (root,) = (word for word in kubelet.words if word.startswith("--root-dir="))
        sockets.append(f"{root.partition('=')[2]}/pod-resources/{2**32 - 1}")
        assert max(map(len, sockets)) == 107  # unix(7); Python and Go refuse longer ones
        assert f"unix://{sockets[0]}" in text


def test_a_node_that_would_have_no_room_for_a_socket_is_refused(monkeypatch):
    parser = argparse.ArgumentParser()
    verbs.configure(parser, "up")
    with tempfile.TemporaryDirectory() as top:
        monkeypatch.setenv("DOVETAIL_STATE", top)
        longest = "s" * (node_record.room("default") - len("/127.77.255.254"))
        monkeypatch.setenv("DOVETAIL_STATE", f"{top}/{longest}")
        assert cluster.plan(parser.parse_args([]), "", "host")
        for words in (["--name", "default1"], ["--node", "n" * 15, "--network", "bridge"]):
            args = parser.parse_args(words)
            with pytest.raises(BadInput, match="paths of 108 bytes, and 107 are the most"):
                cluster.plan(args, "", args.network)


def test_the_kubelet_reserves_all_that_was_not_given():
    here = node(memory=1 << 30, cpus="0")
    node_record.root(make=True)
    here.folder.mkdir(parents=True)
    components.kubelet(here, here.group, False, lambda: True)
    reserved = json.loads((here.folder / "kubelet.json").read_text())["systemReserved"]
    assert int(reserved["memory"]) == components.host_memory() - (1 << 30)


@pytest.mark.parametrize("there", [True, False])
def test_a_kubelet_does_without_name_servers_where_the_machine_has_none(
    tmp_path, monkeypatch, there
):
    here = node()
    node_record.root(make=True)
    here.folder.mkdir(parents=True)
    monkeypatch.setattr(components, "RESOLVER", str(tmp_path / "resolv.conf"))
    (tmp_path / "resolv.conf").symlink_to(tmp_path / "of-systemd")
    if there:
        (tmp_path / "of-systemd").touch()
    components.kubelet(here, here.group, False, lambda: True)
    told = json.loads((here.folder / "kubelet.json").read_text())
    assert told.get("resolvConf") == (None if there else "")


@pytest.mark.parametrize(
    ("network", "address", "served"),
    [
        ("host", "127.77.1.2", "127.77.1.2"),
        ("host", "192.0.2.10", "127.0.0.1"),
        ("bridge", "127.77.1.2", "127.0.0.1"),
    ],
)
def test_exec_and_attach_are_served_by_tls_on_loopback_alone(network, address, served):
    here = node(network=network, address=address)
    node_record.root(make=True)
    here.folder.mkdir(parents=True)
    container_runtime.containerd(here, namespaces.Ids.ROOT)
    text = (here.folder / "containerd.toml").read_text()
    assert f'stream_server_address = "{served}"' in text
    assert "enable_tls_streaming = true" in text
    assert f'tls_cert_file = "{here.folder}/stream.crt"' in text
    kubelet = components.kubelet(here, here.group, False, lambda: True)
    assert kubelet.environment["SSL_CERT_FILE"] == f"{here.folder}/stream.crt"


def test_registries_are_looked_up_where_users_and_administrators_put_them(monkeypatch):
    thing = node(address="127.77.1.2")
    node_record.root(make=True)
    thing.folder.mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/home/me/settings")
    container_runtime.containerd(thing, namespaces.Ids.ROOT)
    told = (thing.folder / "containerd.toml").read_text()
    where = "/home/me/settings/dovetail/registries:/etc/containerd/certs.d"
    assert f'.registry]\nconfig_path = "{where}"\n' in told


def test_images_are_pulled_by_the_proxy_of_whoever_starts_the_node(monkeypatch):
    thing = node(address="127.77.1.2")
    node_record.root(make=True)
    thing.folder.mkdir(parents=True)
    proxies = {"https_proxy": "http://192.0.2.1:3128", "NO_PROXY": "example.org"}
    for name in container_runtime.PROXIES:
        monkeypatch.delenv(name, raising=False)
    for name, value in proxies.items():
        monkeypatch.setenv(name, value)
    assert container_runtime.containerd(thing, namespaces.Ids.ROOT).environment == proxies
