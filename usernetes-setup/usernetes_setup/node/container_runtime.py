# SPDX-License-Identifier: LGPL-3.0-or-later
"""The container runtime of a node: its configuration, its images, its pods' network.

Inputs: a node's record. Outputs: files below the node's folder, and `Command`s for the
supervisor. Invariants: as in `components.py`.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

from usernetes_setup.build.oci_image import PAUSE
from usernetes_setup.node import namespaces
from usernetes_setup.node.components import Command, pods, stream_address
from usernetes_setup.node_record import SHOWN, Node

PROXIES = [form(name) for name in ("http_proxy", "https_proxy", "no_proxy")
           for form in (str.lower, str.upper)]  # fmt: skip
"""Variables that say by whom registries are reached from this machine."""


def containerd(node: Node, ids: namespaces.Ids) -> Command:
    """The container runtime, its state and sockets in the node's folder."""
    runtime, keyring = Path(f"{node.binaries}/bin/runc"), False
    if ids.rootless:
        closed = os.statvfs(node.folder).f_flag & os.ST_NOEXEC  # to programs, as /tmp may be
        runtime = (SHOWN if closed else node.folder) / "runc"
        runtime.write_text(_wrapper(node, ids))
        runtime.chmod(0o700)
        # Each container would have a keyring, and a user 200 keys at most on a machine.
        keyring = namespaces.own_keyring()
    network = node.folder / "cni"
    network.mkdir(exist_ok=True)
    _network(node, network)
    # A shim is told of its address by the containerd that starts it, so this one may be long.
    text = f"""version = 2
root = "{node.folder}/containerd"
state = "{node.folder}/run/c"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.tracing.processor.v1.otlp",
  "io.containerd.internal.v1.tracing"]
[grpc]
address = "{node.folder}/run/containerd.sock"
[ttrpc]
address = "{node.folder}/run/containerd.ttrpc"
[plugins."io.containerd.grpc.v1.cri"]
disable_tcp_service = true
stream_server_address = "{stream_address(node)}"
stream_server_port = "{node.ports["stream"]}"
enable_tls_streaming = true
sandbox_image = "{PAUSE}"
restrict_oom_score_adj = true
disable_apparmor = true
disable_hugetlb_controller = true
tolerate_missing_hugetlb_controller = true
netns_mounts_under_state_dir = true
[plugins."io.containerd.grpc.v1.cri".registry]
config_path = "{registries()}"
[plugins."io.containerd.grpc.v1.cri".x509_key_pair_streaming]
tls_cert_file = "{node.folder}/stream.crt"
tls_key_file = "{node.folder}/stream.key"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{node.binaries}/cni"
conf_dir = "{network}"
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "{snapshotter(node)}"
default_runtime_name = "runc"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
BinaryName = "{runtime}"
Root = "{node.folder}/run/runc"
SystemdCgroup = false
NoNewKeyring = {str(keyring).lower()}
"""
    (node.folder / "containerd.toml").write_text(text)
    words = ["containerd", "--config", f"{node.folder}/containerd.toml", "--log-level", "warn"]
    proxies = {name: os.environ[name] for name in PROXIES if name in os.environ}
    return Command("containerd", words, lambda: True, proxies)


def registries() -> str:
    """Where users and administrators say how a registry is reached, for containerd."""
    own = Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"))
    return f"{own}/dovetail/registries:/etc/containerd/certs.d"


def images(node: Node) -> Command:
    """Loads the two small images; pods wait for nothing from the internet."""
    socket = node.folder / "run/containerd.sock"
    words = ["ctr", "--address", str(socket), "--namespace", "k8s.io", "images", "import",
             "--snapshotter", snapshotter(node), f"{node.binaries}/images.tar"]  # fmt: skip
    return Command("images", words, socket.exists, once=True)


def snapshotter(node: Node) -> str:
    """`overlayfs` where this mount namespace can have it, else plain copies."""
    probe = node.folder / "overlay"
    for name in ("lower", "upper", "work", "merged"):
        (probe / name).mkdir(parents=True, exist_ok=True)
    extra = ",userxattr" if not namespaces.initial_user() else ""
    layers = f"lowerdir={probe}/lower,upperdir={probe}/upper,workdir={probe}/work{extra}"

    def attempt() -> None:
        namespaces.unshare(namespaces.NEWNS)
        namespaces.mount("overlay", str(probe / "merged"), "overlay", 0, layers)

    return "native" if namespaces.in_child(attempt) else "overlayfs"


def _network(node: Node, folder: Path) -> None:
    """A pod network, or only what makes the runtime say that it has one.

    With `host` every pod is on the host's network, so no plugin is ever called. Otherwise
    each pod has its own link to the node (ptp) rather than a common bridge, where replies
    between two pods would miss kube-proxy's translation unless br_netfilter is loaded.
    """
    plugins: list[dict[str, object]] = [{"type": "loopback"}]
    if node.network == "bridge":
        addresses = {
            "type": "host-local",
            "dataDir": f"{node.folder}/ipam",
            "ranges": [[{"subnet": pods(node.place)}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        plugins = [{"type": "ptp", "ipam": addresses}]
    content = {"cniVersion": "0.4.0", "name": "dovetail", "plugins": plugins}
    (folder / "10-dovetail.conflist").write_text(json.dumps(content))


def _wrapper(node: Node, ids: namespaces.Ids) -> str:
    """runc, after the container's configuration is changed to what a user may do.

    By this Python with what it needs to load: the system may have none, or one too old.
    """
    editor = shlex.quote(str(Path(__file__).with_name("runc_rootless.py")))
    libraries = os.environ.get("LD_LIBRARY_PATH")
    python = f"LD_LIBRARY_PATH={shlex.quote(libraries)} " if libraries else ""
    python += shlex.quote(sys.executable)
    return f"""#!/bin/sh
case " $* " in *" create "*) {python} -I -S {editor} {ids.value} "$@" || exit 1 ;; esac
exec {shlex.quote(node.binaries)}/bin/runc "$@"
"""
