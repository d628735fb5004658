# SPDX-License-Identifier: LGPL-3.0-or-later
"""The control node's own loops, in one process: CSR approver, node lifecycle, volumes, metrics.

Started by the node's supervisor as a component, once the API answers: `python3 -m
usernetes_setup.control NODE.json IDS`, the second as in `node.namespaces.Ids`. First it grants the
access that nodes need, but for what those that join need to ask. Invariant: when any loop fails,
whatever it is, the process ends, and the supervisor starts it again.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from usernetes_setup.control import (
    admission,
    api_client,
    csr_approver,
    local_volumes,
    lost_nodes,
    resource_metrics,
)
from usernetes_setup.control.api_client import ACCOUNTS, BINDINGS, MAPS, ROLES
from usernetes_setup.node_record import Node, cluster_folder, read

_DNS = "dovetail-dns"


def bindings() -> list[api_client.Object]:
    """Who may do what, besides what Kubernetes itself sets up."""
    binding = api_client.binding
    return [
        binding("dovetail-kubelets", "system:kubelet-api-admin", "User", "dovetail-kubelet-client"),
        binding(_DNS, _DNS, "User", _DNS),
        # What makes services' addresses work on other nodes has their kubelets' certificates.
        binding("dovetail-proxies", "system:node-proxier", "Group", "system:nodes"),
    ]


def names_reader() -> api_client.Object:
    """The role of who answers for the names of services, on a bridge."""
    groups = {"": ["services", "namespaces"], "discovery.k8s.io": ["endpointslices"]}
    rules = [{"apiGroups": [group], "resources": kinds, "verbs": ["list", "watch"]}
             for group, kinds in groups.items()]  # fmt: skip
    return {"metadata": {"name": _DNS}, "rules": rules}


def prepare(
    client: api_client.Client, authority: str, node: Node, address: str, one_id: bool
) -> None:
    """Grant the access that nodes need, and refuse what cannot work; safe to repeat."""
    # The controller manager makes these two as well, but seconds later, and no pod can be
    # made without the one or started without the other.
    account = {"metadata": {"name": "default"}}
    root = {"metadata": {"name": "kube-root-ca.crt"}, "data": {"ca.crt": authority}}
    wanted = [(BINDINGS, thing) for thing in bindings()]
    wanted += [(ACCOUNTS, account), (MAPS, root), (ROLES, names_reader())]
    wanted += [(local_volumes.CLASSES, local_volumes.storage_class())]
    wanted += resource_metrics.registration(address, node.ports["metrics"], authority)
    wanted += admission.policies(node.network, one_id)
    for path, thing in wanted:
        client.make(path, thing)


def main(record: str, ids: str) -> None:
    """Serve until something fails."""
    node = read(Path(record))
    folder = cluster_folder(node.cluster) / "pki"
    admin = json.loads((folder / "admin.conf").read_text())
    server = admin["clusters"][0]["cluster"]["server"]
    authority = (folder / "ca.crt").read_text()
    client = api_client.Client(server, authority, folder / "admin.crt")
    address = urlsplit(server).hostname or ""  # on a bridge another than outside
    metrics = resource_metrics.server(client, address, node.ports["metrics"], folder)
    prepare(client, authority, node, address, ids == "one")
    failed, never = threading.Event(), threading.Event()
    kept = Path(record).parent / "run/removed-nodes.json"

    def run(name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # whatever it is, a fresh start is the cure
            print(f"{name}: {error}", flush=True)
        failed.set()

    loops = {
        "CSR approver": lambda: csr_approver.run(client, folder),
        "node lifecycle": lambda: lost_nodes.run(client, node.name, folder, kept, never.wait),
        "volumes": lambda: local_volumes.serve(client),
        "metrics": metrics.serve_forever,
        "volumes given back": lambda: local_volumes.reclaim(client, node.cluster),
    }
    for loop in loops.items():
        threading.Thread(target=run, args=loop, daemon=True).start()
    failed.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.exit(1)
