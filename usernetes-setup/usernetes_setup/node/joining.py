# SPDX-License-Identifier: LGPL-3.0-or-later
"""How a joined node gets its certificates, before its kubelet starts.

Inputs: the join file, of which the token is for this node. Outputs: the kubelet's keys and
certificates, as client and as server, where the kubelet keeps them and renews them, and last the
kubeconfig that names the first, for which the supervisor waits. A kubelet can ask for its first
ones too, but begins all else beside that, is refused, waits to ask again, and looks only once a
second whether it knows its addresses.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import select
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from dovetail.core.errors import WorkFailed
from dovetail.host.private_files import write_private

from usernetes_setup.control import api_client, certificates
from usernetes_setup.control.api_client import NODES, REQUESTS
from usernetes_setup.control.csr_approver import CLIENT, HEARD, SERVING
from usernetes_setup.node import components
from usernetes_setup.node_record import Node

CURRENT = "kubelet/pki/kubelet-client-current.pem"
"""The kubelet's own name for its client certificate and key; a link, which it sets anew."""
SERVED = "kubelet/pki/kubelet-server-current.pem"
"""The same for those of its server; without them logs and exec are refused."""
KUBECONFIG = "kubelet/kubeconfig"
_AGAIN = 0.2  # seconds between two tries to reach the API server
_ONCE = 3600.0  # most seconds of one try: a socket cannot wait for ever, as a user may


def join(node: Node, content: Mapping[str, str], deadline: float) -> None:
    """Ask for the certificates, wait for them until then at most, CLOCK_MONOTONIC, and write them.

    Raises WorkFailed if one is refused, or does not come.
    """
    server, address = node.server, node.address
    if node.network == "bridge":  # inside, they are others
        server = f"https://{components.CONTROL}:{urlsplit(server).port}"
        address = components.address(node.place)
    try:
        for folder in ("kubelet", "kubelet/pki"):
            (node.folder / folder).mkdir(mode=0o700, exist_ok=True)  # the node may have ended
        client = api_client.Client(node.server, content["authority"], None, content["token"])
        _certify(node, CURRENT, client, CLIENT, [], deadline)
        client = api_client.Client(node.server, content["authority"], node.folder / CURRENT)
        if _register(node, client, address):
            hosts = sorted({node.name, address})
            _certify(node, SERVED, client, SERVING, hosts, deadline)
        own = {"pem": str(node.folder / CURRENT)}
        certificates.kubeconfig(node.folder / KUBECONFIG, server, node.folder / "ca.crt", own)
    except (OSError, http.client.HTTPException) as error:
        raise WorkFailed(f"node {node.name}: has no certificate: {error}") from None


def _register(node: Node, client: api_client.Client, address: str) -> bool:
    """Tell the API of the node, as its kubelet will: who signs for it wants to know its address.

    False where that fails, or it knows one of that name, whose address may be another's: then the
    kubelet sees to it.
    """
    addresses = [{"type": "InternalIP", "address": address},
                 {"type": "Hostname", "address": node.name}]  # fmt: skip
    known = {"metadata": {"name": node.name}, "status": {"addresses": addresses}}
    with contextlib.suppress(OSError, http.client.HTTPException, api_client.Refused):
        client.call("POST", NODES, known)
        return True
    return False


def _certify(
    node: Node, link: str, client: api_client.Client, signer: str, hosts: list[str], deadline: float
) -> None:
    """Get a certificate, and write it with its key where the link then leads to."""
    current = node.folder / link
    with tempfile.TemporaryDirectory(prefix=".asks-", dir=current.parent) as made:
        certificates.key(Path(made), "it")
        subject = f"/O=system:nodes/CN=system:node:{node.name}"
        asked = certificates.request(Path(made), "it", subject, hosts)
        key = Path(made, "it.key").read_text()
    usages = ["digital signature", "server auth" if signer == SERVING else "client auth"]
    certificate = _asked(client, asked, signer, usages, deadline)
    kind = current.name[: -len("current.pem")]
    target = current.with_name(time.strftime(f"{kind}%Y-%m-%d-%H-%M-%S.pem"))
    write_private(target, certificate + key)
    current.symlink_to(target.name)


def _asked(
    client: api_client.Client, asked: str, signer: str, usages: list[str], deadline: float
) -> str:
    """The certificate for a signing request, both PEM; a server that does not answer may yet."""
    request = {
        "apiVersion": "certificates.k8s.io/v1",
        "kind": "CertificateSigningRequest",
        "metadata": {"generateName": "node-csr-"},
        "spec": {
            "request": base64.b64encode(asked.encode()).decode(),
            "signerName": signer,
            "usages": usages,
        },
    }
    name, trouble, begun = "", "it decides on no node", time.monotonic()
    while (left := min(deadline - time.monotonic(), _ONCE)) > 0.0:
        try:
            name = name or client.call("POST", REQUESTS, request, left)["metadata"]["name"]
            for _, found in client.watch(REQUESTS, f"fieldSelector=metadata.name={name}", left):
                status = found.get("status", {})
                if "certificate" in status:
                    return base64.b64decode(status["certificate"]).decode()
                for one in status.get("conditions", []):
                    if one["type"] in ("Denied", "Failed"):
                        raise WorkFailed(f"the cluster refuses the node: {one['message']}")
        except (OSError, http.client.HTTPException, api_client.Refused) as error:
            trouble = str(error)
            if isinstance(error, api_client.Refused) and time.monotonic() > begun + HEARD:
                raise WorkFailed(f"the cluster refuses the node: {error}") from None
            select.select([], [], [], _AGAIN)
    raise WorkFailed(f"the cluster gives the node no certificate in time: {trouble}")
