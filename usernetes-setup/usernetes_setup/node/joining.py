# SPDX-License-Identifier: LGPL-3.0-or-later
"""How a joined node gets its certificate, before its kubelet starts.

Started by the node's supervisor as a component that ends: `python3 -m usernetes_setup.node.joining
NODE.json`. Inputs: the token of its invitation. Outputs: the kubelet's key and certificate, where
the kubelet keeps them and renews them, and last the kubeconfig that names them. A kubelet can ask
for the first one too, but begins all else beside that, is refused, and waits to ask again.
"""

from __future__ import annotations

import base64
import http.client
import json
import select
import sys
import tempfile
import time
from pathlib import Path

from dovetail.core.errors import WorkFailed
from dovetail.host.private_files import write_private

from usernetes_setup.control import api_client, certificates
from usernetes_setup.control.api_client import REQUESTS
from usernetes_setup.control.csr_approver import CLIENT
from usernetes_setup.node.components import Command
from usernetes_setup.node_record import Node, read

CURRENT = "kubelet/pki/kubelet-client-current.pem"
"""The kubelet's own name for its client certificate and key; a link, which it sets anew."""
INVITATION = "bootstrap.conf"
"""A kubeconfig with the token, which the monitor writes."""
KUBECONFIG = "kubelet/kubeconfig"
_AGAIN = 0.2  # seconds between two tries to reach the API server


def join(node: Node) -> None:
    """Ask for the certificate, wait for it and write it. WorkFailed if it is refused."""
    folder = node.folder / "kubelet/pki"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    invitation = json.loads((node.folder / INVITATION).read_text())
    server = invitation["clusters"][0]["cluster"]["server"]
    token = invitation["users"][0]["user"]["token"]
    client = api_client.Client(server, (node.folder / "ca.crt").read_text(), None, token)
    with tempfile.TemporaryDirectory(prefix=".asked-", dir=folder) as made:
        certificates.key(Path(made), "it")
        subject = f"/O=system:nodes/CN=system:node:{node.name}"
        asked = certificates.request(Path(made), "it", subject)
        key = Path(made, "it.key").read_text()
    certificate = _asked(client, asked)
    target = folder / time.strftime("kubelet-client-%Y-%m-%d-%H-%M-%S.pem")
    write_private(target, certificate + key)
    current = node.folder / CURRENT
    current.unlink(missing_ok=True)
    current.symlink_to(target.name)
    own = {"pem": str(current)}
    certificates.kubeconfig(node.folder / KUBECONFIG, server, node.folder / "ca.crt", own)


def command(node: Node) -> Command:
    """This, as a component."""
    words = [sys.executable, "-m", __name__, str(node.folder / "node.json")]
    return Command("joining", words, lambda: True, once=True)


def _asked(client: api_client.Client, asked: str) -> str:
    """The certificate for a signing request, both PEM; the server is waited for."""
    request = {
        "apiVersion": "certificates.k8s.io/v1",
        "kind": "CertificateSigningRequest",
        "metadata": {"generateName": "node-csr-"},
        "spec": {
            "request": base64.b64encode(asked.encode()).decode(),
            "signerName": CLIENT,
            "usages": ["digital signature", "client auth"],
        },
    }
    name = ""
    while True:
        try:
            name = name or client.call("POST", REQUESTS, request)["metadata"]["name"]
            for _, found in client.watch(REQUESTS, f"fieldSelector=metadata.name={name}"):
                status = found.get("status", {})
                if "certificate" in status:
                    return base64.b64decode(status["certificate"]).decode()
                for one in status.get("conditions", []):
                    if one["type"] in ("Denied", "Failed"):
                        raise WorkFailed(f"the cluster refuses the node: {one['message']}")
        except (OSError, http.client.HTTPException):
            select.select([], [], [], _AGAIN)
        except api_client.Refused as error:
            raise WorkFailed(f"the cluster refuses the node: {error}") from None


def main(record: str) -> None:
    """Join, unless that is done."""
    node = read(Path(record))
    if (node.folder / KUBECONFIG).exists():
        return
    try:
        join(node)
    except WorkFailed as error:
        sys.exit(f"join: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
