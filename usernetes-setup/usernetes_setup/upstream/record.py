# SPDX-License-Identifier: LGPL-3.0-or-later
"""What is known about a node that upstream Usernetes made on this machine.

    <root>/<cluster>/usernetes.json     this record
    <root>/<cluster>/usernetes/         a copy of the checkout, where its verbs are typed
    <root>/<cluster>/compose.yaml       what is added to upstream's compose file
    <root>/<cluster>/kubeconfig         the administrator's, on the control node
    <root>/<cluster>/log                what the verbs said

Invariants: a cluster has one such node on a machine; all of it is private to its user; the record
is replaced as a whole, and goes last.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dovetail.core.errors import BadInput
from dovetail.host import processes
from dovetail.host.private_files import write_private

from usernetes_setup import node_record

FILE = node_record.USERNETES
PORTS = ("apiserver", "etcd", "kubelet", "flannel", "calico", "calico_typha")
"""As upstream's variables name them; all nodes of a cluster have the kubelet's and flannel's in
common. Gen 3 publishes those of Calico too, though flannel is used, and Gen 2 has none such."""


@dataclass
class Record:
    """One node: `engine` and `compose` are commands, `image` a node image or "" for upstream's.

    `subnet` is the one of its container, `mounts` folders of this machine that it has too, `owner`
    the process with which it ends, or 0. `join` is the join file of a worker, as read; it is not
    kept. `given` counts the subnets that invitations gave away. `alone` tells that the engine ran
    nothing before. `settings` are the user's variables for the engine. `ready` is set once.
    """

    cluster: str
    node: str
    address: str
    engine: str
    compose: str
    image: str = ""
    project: str = ""
    worker: bool = False
    ports: dict[str, int] = field(default_factory=dict)
    subnet: str = ""
    mounts: list[str] = field(default_factory=list)
    owner: int = 0
    timeout: float = 0.0
    given: int = 1
    alone: bool = False
    settings: dict[str, str] | None = None
    ready: bool = False
    monitor: int = 0
    monitor_ticks: int = 0

    @property
    def folder(self) -> Path:
        """Everything that this node has outside the container engine."""
        return node_record.cluster_folder(self.cluster)

    @property
    def checkout(self) -> Path:
        """This node's own copy of it."""
        return self.folder / "usernetes"

    @property
    def unit(self) -> str:
        """The service of the user's service manager that watches over it."""
        return f"{self.project}.service"

    @property
    def server(self) -> str:
        """Where its API is, on the control node."""
        return "" if self.worker else f"https://127.0.0.1:{self.ports.get('apiserver', 0)}"

    def alive(self) -> bool:
        """Whether its monitor runs: without that it is removed."""
        return processes.alive(self.monitor, self.monitor_ticks)

    def save(self) -> None:
        """Write it."""
        write_private(self.folder / FILE, json.dumps(asdict(self), indent=1))

    def described(self) -> dict[str, Any]:
        """What a caller needs to know."""
        known = {"cluster": self.cluster, "node": self.node, "provider": "usernetes",
                 "server": self.server, "folder": str(self.folder)}  # fmt: skip
        if not self.worker:
            known["kubeconfig"] = str(self.folder / "kubeconfig")
        return known


def refuse(cluster: str) -> None:
    """Refuse a cluster's name that one of upstream's nodes has on this machine. Raises BadInput."""
    if here(cluster):
        raise BadInput(f"cluster {cluster}: is one of provider usernetes; give another --name")


def refuse_other(cluster: str) -> None:
    """Refuse a cluster's name that Dovetail's own nodes have on this machine. Raises BadInput."""
    if node_record.nodes(cluster):
        raise BadInput(f"cluster {cluster}: is one of provider dovetail; give another --name")


def here(cluster: str) -> Record | None:
    """The cluster's node on this machine, if upstream Usernetes made one."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Record(**json.loads((node_record.cluster_folder(cluster) / FILE).read_text()))
    return None
