# SPDX-License-Identifier: LGPL-3.0-or-later
"""Configuration files and command lines of every component.

Inputs: a node's record. Outputs: files below the node's folder, and `Command`s for the
supervisor. Invariants: every listener is a socket in the private folder or is bound to the
node's one address; no secret is in a command line or an environment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from usernetes_setup.node_record import Node, cluster_folder

SERVICES = "10.96.0.0/16"
PODS = "10.244.0.0/16"
RESOLVER = "/etc/resolv.conf"


def address(place: int) -> str:
    """A node's own address inside the network namespace that it has on a bridge; see `carrier`."""
    return f"10.243.0.{place + 1}"


def pods(place: int) -> str:
    """The addresses of its pods there."""
    return f"10.244.{place}.0/24"


CONTROL = address(0)

STORE = (2 << 30) - 1
"""Bytes that etcd may store: for its usual 2 GiB it maps 10, which `ulimit -v` may forbid."""


@dataclass(frozen=True)
class Command:
    """One component: started when `ready` first says so, and again whenever it dies.

    `once` is for work that ends; `folder` is its working directory below the node's; `keep`
    are file descriptors that it inherits; `sockets` are files that a killed one leaves, and
    that would keep the next from starting.
    """

    name: str
    words: list[str]
    ready: Callable[[], bool]
    environment: dict[str, str] = field(default_factory=dict)
    once: bool = False
    folder: str = ""
    keep: tuple[int, ...] = ()
    sockets: tuple[str, ...] = ()


def host_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def count(cpus: str) -> int:
    """How many cores a list such as `0-2,5` names."""
    return len(numbers(cpus))


def numbers(cpus: str) -> list[int]:
    """The cores that a list such as `0-2,5` names; ValueError if it is no list."""
    found: set[int] = set()
    for part in cpus.split(","):
        first, dash, last = part.partition("-")
        found |= set(range(int(first), int(last if dash else first) + 1))
    return sorted(found)


def listed(cpus: Iterable[int]) -> str:
    """Such a list of these cores, as the kernel writes it."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][-1] + 1:
            ranges[-1].append(cpu)
        else:
            ranges.append([cpu])
    return ",".join(f"{one[0]}-{one[-1]}" if one[1:] else str(one[0]) for one in ranges)


def etcd(node: Node) -> Command:
    """The store, on Unix sockets that only this user can reach; nothing else connects to it.

    It waits for others once or twice its election timeout, usually a second, before it begins.
    """
    client, peer = "unix://etcd:0", "unix://etcd-peer:0"  # names of files in its folder, run/
    words = ["etcd", "--name", "store", "--data-dir", str(node.folder / "etcd"),
             "--listen-client-urls", client, "--advertise-client-urls", client,
             "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
             "--initial-cluster", f"store={peer}",
             "--heartbeat-interval=20", "--election-timeout=100",
             f"--quota-backend-bytes={STORE}",
             "--logger", "zap", "--log-level", "warn"]  # fmt: skip
    return Command("etcd", words, lambda: True, folder="run", sockets=("etcd:0", "etcd-peer:0"))


def control_plane(node: Node, answers: Callable[[], bool]) -> list[Command]:
    """API server, and controller manager with scheduler; `answers` says if the first is up."""
    pki = cluster_folder(node.cluster) / "pki"
    return [
        Command("apiserver", _server(node, pki), (node.folder / "run/etcd:0").exists),
        Command("controller-manager", _manager(node, pki), answers),
    ]


def _server(node: Node, pki: Path) -> list[str]:
    return [
        "kube-apiserver",
        f"--etcd-servers=unix://{node.folder}/run/etcd:0",
        f"--bind-address={node.address}",
        f"--secure-port={node.ports['server']}",
        f"--advertise-address={node.address}",
        f"--service-cluster-ip-range={SERVICES}",
        f"--client-ca-file={pki}/ca.crt",
        f"--tls-cert-file={pki}/server.crt",
        f"--tls-private-key-file={pki}/server.key",
        f"--kubelet-certificate-authority={pki}/ca.crt",
        f"--kubelet-client-certificate={pki}/kubelet-client.crt",
        f"--kubelet-client-key={pki}/kubelet-client.key",
        "--kubelet-preferred-address-types=InternalIP",
        f"--proxy-client-cert-file={pki}/front-proxy.crt",
        f"--proxy-client-key-file={pki}/front-proxy.key",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki}/accounts.pub",
        f"--service-account-signing-key-file={pki}/accounts.key",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        # It would mark each new node as not ready until the controller manager, seconds later,
        # looks; a node that really is not ready gets the mark from there all the same.
        "--disable-admission-plugins=TaintNodesByCondition",
        "--anonymous-auth=false",
        "--enable-bootstrap-token-auth=true",
        "--allow-privileged=true",
        "--profiling=false",
        # For each kind of object it would look every minute how large its store is, which an etcd
        # of this age cannot say, and log that for ever: 10 MB a day.
        "--feature-gates=SizeBasedListCostEstimate=false",
        # An endpoint may not be a loopback address, and without kube-proxy nothing reads it.
        *(["--endpoint-reconciler-type=none"] if node.network == "host" else []),
    ]


def _manager(node: Node, pki: Path) -> list[str]:
    return [
        "kube-controller-manager",
        f"--kubeconfig={pki}/manager.conf",
        f"--scheduler-kubeconfig={pki}/scheduler.conf",
        "--secure-port=0",
        "--leader-elect=false",
        "--use-service-account-credentials=true",
        # It asks for some hundred things when it starts; at its usual 20 a second that takes 5 s.
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
        # Only our own CSR approver does: the built-in approver would accept any node's name.
        "--controllers=*,-csrapproving,tokencleaner",
        f"--cluster-signing-cert-file={pki}/ca.crt",
        f"--cluster-signing-key-file={pki}/ca.key",
        f"--root-ca-file={pki}/ca.crt",
        f"--service-account-private-key-file={pki}/accounts.key",
        "--node-monitor-period=2s",
        "--node-monitor-grace-period=16s",
        "--profiling=false",
        *([f"--cluster-cidr={PODS}"] if node.network == "bridge" else []),
    ]


def kubelet(node: Node, group: str, rootless: bool, ready: Callable[[], bool]) -> Command:
    """The kubelet: offers the node's memory alone, by reserving the rest.

    Its cores are all that it sees; see `supervisor.private_view`. The `group` is the
    node's, as it is called in there.
    """
    pki, data = cluster_folder(node.cluster) / "pki", node.folder / "kubelet"
    spare_memory = host_memory() - node.memory
    content = {
        "kind": "KubeletConfiguration",
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "address": node.address,
        "port": node.ports["kubelet"],
        "readOnlyPort": 0,
        "healthzPort": 0,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True, "cacheTTL": "10s"},
            "x509": {"clientCAFile": str((node.folder if node.joined else pki) / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{node.folder}/run/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": group,
        "failCgroupV1": False, "failSwapOn": False,
        "makeIPTablesUtilChains": False,
        "oomScoreAdj": 0,
        "systemReserved": {"memory": f"{spare_memory}"},
        "enforceNodeAllocatable": ["pods"],
        # With control groups version 2 the kernel would else kill the whole pod, and with it who
        # says which rank it was.
        "singleProcessOOMKill": True,
        # By these the kubelet would judge the whole machine, which is not the node's alone. The
        # limit of the pods' group guards memory, and kills one process where it must.
        "evictionHard": {
            "memory.available": "0%", "nodefs.available": "0%",
            "nodefs.inodesFree": "0%", "imagefs.available": "0%", "imagefs.inodesFree": "0%",
        },
        "imageGCHighThresholdPercent": 100,
        # A resize of many pods is several requests for each, and the server is the user's own.
        "kubeAPIQPS": 500, "kubeAPIBurst": 1000,
        "nodeStatusUpdateFrequency": "4s", "nodeLeaseDurationSeconds": 12,
        "registerNode": True,
        "podLogsDir": f"{node.folder}/pods",
        "volumePluginDir": f"{node.folder}/plugins",
        "featureGates": {"KubeletInUserNamespace": rootless},
        "memorySwap": {},
        "shutdownGracePeriod": "0s",
    }  # fmt: skip
    if not os.access(RESOLVER, os.R_OK):  # no pod could be made without it
        content["resolvConf"] = ""
    words = ["kubelet", f"--root-dir={data}", f"--config={node.folder}/kubelet.json",
             f"--hostname-override={node.name}", f"--cert-dir={data}/pki"]  # fmt: skip
    if node.network == "bridge":
        content.update({"clusterDNS": [CONTROL], "clusterDomain": "cluster.local"})
    if node.joined:
        content.update({"rotateCertificates": True, "serverTLSBootstrap": True})
        words += [f"--kubeconfig={data}/kubeconfig"]  # see `joining`
    else:
        own = f"{pki}/node-{node.name}"
        content.update({"tlsCertFile": f"{own}.crt", "tlsPrivateKeyFile": f"{own}.key"})
        words += [f"--kubeconfig={pki}/node.conf"]
    if node.name != node.address:  # the kubelet refuses a loopback --node-ip, but not as a name
        words += [f"--node-ip={node.address}"]
    (node.folder / "kubelet.json").write_text(json.dumps(content, indent=1))
    # The only server that it checks by the system's authorities is its own runtime's, which
    # serves exec and attach; this is that one's certificate.
    return Command("kubelet", words, ready, {"SSL_CERT_FILE": f"{node.folder}/stream.crt"})


PLUGINS = Path("/var/lib/kubelet/device-plugins")
"""Where kubelets and device plugins meet; in the node's own /var/lib."""


def devices(node: Node) -> list[Command]:
    """The device plugin, where there is something to offer; it ends with each kubelet."""
    if not node.devices:
        return []
    file = node.folder / "devices.json"
    file.write_text(json.dumps(node.devices))
    words = [f"{node.binaries}/bin/offer-devices", str(file)]
    return [Command("devices", words, (PLUGINS / "kubelet.sock").exists)]


def stream_address(node: Node) -> str:
    """Where exec and attach are served, to this node's kubelet alone: always a loopback address."""
    own = node.network == "host" and node.address.startswith("127.")
    return node.address if own else "127.0.0.1"
