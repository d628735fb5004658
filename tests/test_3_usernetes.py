# SPDX-License-Identifier: LGPL-3.0-or-later
"""Step 3, the parts of user-space Kubernetes that need no cluster: input, leases, judgement."""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from dovetail.errors import BadInput, WorkFailed
from dovetail.usernetes import (
    build,
    cgroups,
    cluster,
    components,
    images,
    keeper,
    linux,
    pki,
    preflight,
    rootless,
    state,
    steward,
)

pytestmark = pytest.mark.unit
CLIENT = "kubernetes.io/kube-apiserver-client-kubelet"
SERVING = "kubernetes.io/kubelet-serving"


@pytest.fixture(autouse=True)
def private_state(tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_STATE", str(tmp_path / "state"))
    return tmp_path


@pytest.mark.parametrize(
    ("wanted", "meant"),
    [("1Gi", 1 << 30), ("512Mi", 512 << 20), ("2G", 2 * 10**9), ("0.5Gi", 1 << 29)],
)
def test_memory_is_read_with_its_unit(wanted, meant):
    assert cluster.memory(wanted) == meant


@pytest.mark.parametrize("wanted", ["", "1", "-1Gi", "9999Ti", "lots", "1GB", "100Mi"][1:])
def test_absurd_memory_is_refused(wanted):
    with pytest.raises(BadInput, match="--memory"):
        cluster.memory(wanted)


@pytest.mark.parametrize("wanted", ["0", "100000", "-1", "a", "0-", "99999", "1,,2"])
def test_cores_that_are_not_there_are_refused(wanted):
    with pytest.raises(BadInput, match="--cpus"):
        cluster.cores(wanted)


def test_cores_are_ours_and_as_many_as_asked_for():
    usable = os.sched_getaffinity(0)
    assert set(components.numbers(cluster.cores(""))) == usable
    assert set(components.numbers(cluster.cores("1"))) <= usable
    assert components.count(cluster.cores("1")) == 1


@pytest.mark.parametrize("name", ["", "A", "a/b", "..", "-a", "a" * 21, "a b"])
def test_cluster_names_that_could_leave_the_folder_are_refused(name):
    with pytest.raises(BadInput, match="cluster name"):
        state.cluster_folder(name)


@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1", "203.0.113.9", "::1", "host"])
def test_addresses_too_wide_or_not_ours_are_refused(address):
    with pytest.raises(BadInput, match="--address"):
        cluster.own_address(address)


def test_a_state_folder_that_others_can_open_is_refused(private_state):
    (private_state / "state").mkdir(mode=0o755)
    (private_state / "state").chmod(0o755)
    with pytest.raises(BadInput, match="0700"):
        state.root()


def test_a_state_folder_that_is_a_link_is_refused(private_state):
    (private_state / "elsewhere").mkdir(mode=0o700)
    (private_state / "state").symlink_to(private_state / "elsewhere")
    with pytest.raises(BadInput, match="state"):
        state.root()


def test_secrets_are_private_from_their_first_byte(private_state):
    path = private_state / "secret"
    before = os.umask(0)
    try:
        state.write_private(path, "x")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600


def test_two_verbs_do_not_change_one_cluster_at_once():
    with state.locked("one"), pytest.raises(WorkFailed, match="another"), state.locked("one"):
        pass
    with state.locked("one"):
        pass


def test_a_damaged_record_is_not_a_node():
    folder = state.cluster_folder("c") / "nodes/n"
    folder.mkdir(parents=True)
    (folder / "node.json").write_text('{"cluster": "c"')
    assert state.nodes("c") == []


def test_a_lease_ends_with_its_holder_however_it_dies():
    code = (
        "import sys, time; from dovetail.usernetes import linux; h = linux.lease(sys.argv[1]);"
        "print(bool(h), flush=True); time.sleep(600)"
    )
    name = f"test-{os.getpid()}"
    with subprocess.Popen([sys.executable, "-c", code, name], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"True\n"
        assert linux.lease(name) is None
        other.kill()
    held = linux.lease(name)
    assert held
    held.close()


def test_leased_ports_and_addresses_are_all_different():
    leases = [linux.lease_loopback() for _ in range(20)]
    ports = [linux.lease_port("127.0.0.1") for _ in range(20)]
    assert len({address for address, _ in leases}) == 20
    assert len({port for port, _ in ports}) == 20
    for _, held in [*leases, *ports]:
        held.close()


def test_a_child_that_fails_says_why():
    def work():
        raise OSError("no such luck")

    assert linux.in_child(work) == "no such luck"
    assert linux.in_child(lambda: None) == ""


@pytest.fixture
def authority(tmp_path):
    pki.authority(tmp_path, "test")
    return tmp_path


def asked(folder, subject, signer, user, names=()):
    pki.key(folder, "n")
    words = ["req", "-new", "-key", "n.key", "-subj", subject]
    if names:
        words += ["-addext", f"subjectAltName={','.join(names)}"]
    done = subprocess.run(["openssl", *words], cwd=folder, capture_output=True, check=True)
    request = base64.b64encode(done.stdout).decode()
    return {"request": request, "signerName": signer, "username": user}


NODE = "/O=system:nodes/CN=system:node:n1"


@pytest.mark.parametrize(
    ("what", "subject", "signer", "user", "names", "fine"),
    [
        ("an invited node", NODE, CLIENT, "system:bootstrap:abcdef", (), True),
        ("a renewal", NODE, CLIENT, "system:node:n1", (), True),
        ("another node's name", "/O=system:nodes/CN=system:node:n2", CLIENT,
         "system:bootstrap:abcdef", (), False),
        ("another node's renewal", NODE, CLIENT, "system:node:n2", (), False),
        ("an administrator", "/O=system:masters/CN=x", CLIENT, "system:bootstrap:abcdef", (),
         False),
        ("both groups", "/O=system:nodes/O=system:masters/CN=system:node:n1", CLIENT,
         "system:bootstrap:abcdef", (), False),
        ("its own address", NODE, SERVING, "system:node:n1", ("DNS:n1", "IP:192.0.2.1"), True),
        ("the API server's name", NODE, SERVING, "system:node:n1", ("DNS:kubernetes",), False),
        ("a foreign address", NODE, SERVING, "system:node:n1", ("IP:192.0.2.9",), False),
        ("another signer", NODE, "kubernetes.io/kube-apiserver-client", "system:node:n1", (),
         False),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) and " " in value else "",
)  # fmt: skip
def test_only_requests_that_name_their_own_node_are_approved(
    authority, what, subject, signer, user, names, fine
):
    spec = asked(authority, subject, signer, user, names)
    why = steward.verdict(spec, "n1", {"192.0.2.1", "n1"})
    assert (why == "") is fine, (what, why)


def test_a_token_that_was_revoked_gets_nothing(authority):
    spec = asked(authority, NODE, CLIENT, "system:bootstrap:abcdef")
    assert steward.verdict(spec, "", set())


def test_certificates_are_for_one_use(authority):
    pki.certificate(authority, "server", "/CN=s", ["127.0.0.1", "name"])
    pki.certificate(authority, "client", "/CN=c")
    text = {
        name: subprocess.run(["openssl", "x509", "-in", f"{name}.crt", "-noout", "-text"],
                             cwd=authority, capture_output=True, text=True, check=True).stdout
        for name in ("server", "client")
    }  # fmt: skip
    assert "TLS Web Server" in text["server"]
    assert "TLS Web Client" not in text["server"]
    assert "IP Address:127.0.0.1, DNS:name" in text["server"]
    assert "TLS Web Client" in text["client"]
    assert "TLS Web Server" not in text["client"]
    assert {path.stat().st_mode & 0o777 for path in authority.glob("*.key")} == {0o600}


def test_the_same_program_packs_into_the_same_image(tmp_path):
    pause = tmp_path / "pause"
    pause.write_bytes(b"\x7fELF")
    for name in ("a", "b"):
        images.pack(pause, tmp_path / name, ["localhost/x:1"], "amd64")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with tarfile.open(tmp_path / "a") as archive:
        index = json.load(archive.extractfile("index.json"))
        digest = index["manifests"][0]["digest"].split(":")[1]
        assert archive.getmember(f"blobs/sha256/{digest}")


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
    changed = rootless.change(config([{"type": "pid"}, {"type": "ipc"}]), one_id=False)
    mounts = {mount["destination"]: mount for mount in changed["mounts"]}
    assert mounts["/sys"]["type"] == "bind"
    assert "ro" in mounts["/sys"]["options"]
    assert mounts["/dev/mqueue"]["type"] == "mqueue"
    assert "gid=5" in mounts["/dev/pts"]["options"]


def test_a_pod_with_a_network_of_its_own_keeps_its_sys():
    spaces = [{"type": "network"}, {"type": "ipc"}]
    mounts = rootless.change(config(spaces), one_id=False)["mounts"]
    assert mounts[0]["type"] == "sysfs"


def test_with_one_id_there_is_no_tty_group():
    mounts = rootless.change(config([{"type": "ipc"}]), one_id=True)["mounts"]
    assert mounts[-1]["options"] == ["mode=0620"]


def test_our_own_namespaces_are_not_joined_again():
    spaces = [{"type": "network", "path": "/proc/self/ns/net"}, {"type": "pid"}]
    changed = rootless.change(config(spaces), one_id=False)
    assert changed["linux"]["namespaces"] == [{"type": "pid"}]
    assert [mount["destination"] for mount in changed["mounts"]] == ["/sys", "/dev/pts"]


def record(**more):
    fields = {
        "cluster": "c", "name": "n", "address": "127.77.1.2", "cpus": "0", "memory": 1 << 30,
        "network": "host", "user": "u", "group": "/g", "binaries": "/b",
        "ports": {"server": 1, "kubelet": 2, "stream": 3},
    }  # fmt: skip
    return state.Node(**{**fields, **more})


def test_every_component_listens_on_the_nodes_address_alone():
    node = record()
    node.folder.mkdir(parents=True)
    commands = [components.etcd(node), *components.control_plane(node, lambda: True)]
    commands.append(components.containerd(node, rootless=True, few_ids=True))
    commands.append(components.kubelet(node, True, lambda: True))
    text = " ".join(word for command in commands for word in command.words)
    text += (node.folder / "kubelet.json").read_text()
    text += (node.folder / "containerd.toml").read_text()
    assert "0.0.0.0" not in text
    kubelet = json.loads((node.folder / "kubelet.json").read_text())
    assert kubelet["address"] == "127.77.1.2"
    assert kubelet["readOnlyPort"] == kubelet["healthzPort"] == 0
    assert kubelet["authentication"]["anonymous"]["enabled"] is False
    assert kubelet["authorization"]["mode"] == "Webhook"
    assert "--anonymous-auth=false" in text


def test_the_kubelet_reserves_all_that_was_not_given():
    node = record(memory=1 << 30, cpus="0")
    node.folder.mkdir(parents=True)
    components.kubelet(node, False, lambda: True)
    reserved = json.loads((node.folder / "kubelet.json").read_text())["systemReserved"]
    assert int(reserved["memory"]) == components.host_memory() - (1 << 30)


def test_removal_never_follows_a_mount(tmp_path, monkeypatch):
    (tmp_path / "node").mkdir()
    (tmp_path / "node/data").write_text("x")
    stuck = [str(tmp_path / "node")]
    monkeypatch.setattr(linux, "mounts_below", lambda folder: stuck)
    monkeypatch.setattr(linux, "unmount", lambda target: None)
    with pytest.raises(OSError, match="still mounted"):
        linux.remove_folder(tmp_path / "node", "u")
    assert (tmp_path / "node/data").exists()


def test_a_keeper_whose_input_is_wrong_leaves_nothing(private_state):
    folder = state.cluster_folder("c") / "nodes/new-1"
    folder.mkdir(mode=0o700, parents=True)
    node = record(name="new-1", address="", joined='{"no": "authority"}')
    state.write_private(folder / "node.json", json.dumps(vars(node)))
    handle = keeper.start(folder)
    assert handle.answer().startswith("!")
    assert handle.process.wait(20) == 1
    assert not (state.root() / "c").exists()


@pytest.fixture
def bundle(tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "cache"))
    folder = build.cache() / build.key()
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/kube").write_text("program")
    (folder / "bin/kubelet").symlink_to("kube")
    made = {"bin/kube": {"bytes": 7, "sha256": build.checksum(folder / "bin/kube")}}
    (folder / "made.json").write_text(json.dumps(made))
    build.pack(tmp_path / "bundle.tgz")
    return folder, tmp_path / "bundle.tgz"


def test_a_bundle_is_the_same_on_the_other_side(bundle):
    folder, path = bundle
    shutil.rmtree(folder)
    assert build.built() is None
    assert build.unpack(path) == folder
    assert build.built() == folder
    assert os.readlink(folder / "bin/kubelet") == "kube"


def test_a_bundle_with_other_content_than_it_says_is_refused(bundle, tmp_path):
    folder, _ = bundle
    (folder / "bin/kube").write_text("changed")
    with tarfile.open(tmp_path / "bad.tgz", "w:gz") as archive:
        archive.add(folder, arcname=folder.name)
    with pytest.raises(BadInput, match="damaged: bin/kube"):
        build.unpack(tmp_path / "bad.tgz")


@pytest.mark.parametrize("name", ["../evil", "other-build/bin/kube", "/etc/evil"])
def test_a_bundle_that_reaches_elsewhere_is_refused(bundle, tmp_path, name):
    with tarfile.open(tmp_path / "evil.tgz", "w:gz") as archive:
        entry = tarfile.TarInfo(name)
        archive.addfile(entry)
    with pytest.raises(BadInput, match="not a build"):
        build.unpack(tmp_path / "evil.tgz")


def test_a_torn_bundle_is_refused(bundle, tmp_path):
    (tmp_path / "torn.tgz").write_bytes(bundle[1].read_bytes()[:100])
    with pytest.raises(BadInput, match="not a bundle"):
        build.unpack(tmp_path / "torn.tgz")


def test_every_gap_comes_with_a_command_and_who_types_it():
    found = preflight.checks()
    assert len(found) == len(preflight.CHECKS)
    for check in found:
        assert check.level in ("ok", "note", "soft", "hard")
        assert bool(check.fix) == bool(check.who), check
        if check.level == "hard":
            assert check.fix, check


def test_missing_delegation_is_a_hard_gap(monkeypatch):
    monkeypatch.setattr(preflight.cgroups, "problems", lambda: ["/x is missing"])
    assert preflight.control_groups().level == "hard"
    assert any("control groups" in line for line in preflight.hard_gaps())


def test_a_join_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "f").write_text("{}")
    for name in ("f", "missing"):
        args = argparse.Namespace(file=str(tmp_path / name), name="x", node="")
        with pytest.raises(BadInput, match="join file"):
            cluster.join(args, print)


def test_ending_what_is_not_there_is_fine():
    cluster.down("nothing")
    assert list(Path(state.root()).iterdir()) == []


@pytest.mark.parametrize("group", ["", "/", "/dovetail-0", "/user.slice"])
def test_only_a_nodes_own_group_can_ever_be_emptied(group):
    assert cgroups.processes(group) == set()
    assert cgroups.remove(group, 0) == []
