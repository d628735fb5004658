# SPDX-License-Identifier: LGPL-3.0-or-later
"""Looks after the cluster from its control node: access, joining nodes, lost nodes.

Inputs: the API, as administrator. Invariants: a join token names its node, is good for that
node alone, and is revoked when the node got its certificate; a serving certificate names
nothing but its node and that node's own address; a node silent for long is removed, so
that its pods count as lost and another may take its name.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from usernetes_setup.control import api_client
from usernetes_setup.control import certificates as pki
from usernetes_setup.node import components
from usernetes_setup.node_record import Node, cluster_folder

REQUESTS = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
BINDINGS = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
ACCOUNTS = "/api/v1/namespaces/default/serviceaccounts"
MAPS = "/api/v1/namespaces/default/configmaps"
TOKENS = "/api/v1/namespaces/kube-system/secrets"
NODES = "/api/v1/nodes"
LOST_AFTER = 10.0  # seconds that the controller manager has called a node unknown
LOOK_EVERY = 2.0


def command(node: Node, ready: Callable[[], bool]) -> components.Command:
    """This module as a component."""
    words = [sys.executable, "-m", __name__, str(node.folder / "node.json")]
    return components.Command("steward", words, ready)


def bindings() -> list[api_client.Object]:
    """Who may do what, besides what Kubernetes itself sets up."""

    def binding(name: str, role: str, kind: str, subject: str) -> api_client.Object:
        group = "rbac.authorization.k8s.io"
        return {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": name},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role},
            "subjects": [{"apiGroup": group, "kind": kind, "name": subject}],
        }

    return [
        binding("dovetail-kubelets", "system:kubelet-api-admin", "User", "dovetail-kubelet-client"),
        binding("dovetail-join", "system:node-bootstrapper", "Group", "system:bootstrappers"),
    ]


def invite(client: api_client.Client, node_name: str, seconds: int) -> str:
    """Make a join token for one node; returns it."""
    identity, secret = secrets.token_hex(3), secrets.token_hex(8)
    expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))
    content = {
        "token-id": identity, "token-secret": secret, "expiration": expires,
        "usage-bootstrap-authentication": "true", "node": node_name,
    }  # fmt: skip
    client.call("POST", TOKENS, {
        "metadata": {"name": f"bootstrap-token-{identity}"},
        "type": "bootstrap.kubernetes.io/token",
        "stringData": content,
    })  # fmt: skip
    return f"{identity}.{secret}"


def verdict(spec: api_client.Object, invited: str, addresses: set[str]) -> str:
    """Why a signing request is refused, or "" if it is fine.

    `invited` is the node that the asking token was made for; `addresses` are those of the
    asking node as it registered itself.
    """
    subject, names = pki.describe_request(base64.b64decode(spec["request"]).decode())
    if spec["signerName"] == "kubernetes.io/kube-apiserver-client-kubelet":
        renewal = spec["username"].startswith("system:node:")
        node = spec["username"].split(":", 2)[2] if renewal else invited
        allowed: set[str] = set()
    elif spec["signerName"] == "kubernetes.io/kubelet-serving":
        node = spec["username"].split("system:node:")[-1]
        allowed = {f"DNS:{node}", f"IP Address:{node}"}
        allowed |= {f"IP Address:{address}" for address in addresses}
    else:
        return "not a request of a node"
    if not node or set(subject.split(",")) != {"O=system:nodes", f"CN=system:node:{node}"}:
        return f"{spec['username']} may not be {subject}"
    if names - allowed:
        return f"{node} may not have the names {' '.join(sorted(names - allowed))}"
    return ""


class Steward:
    """The two watches, each in a thread; any failure ends the process, which starts again."""

    def __init__(self, client: api_client.Client, own: str, authority: str) -> None:
        self.client, self.own, self.authority = client, own, authority

    def prepare(self) -> None:
        """Grant the access that nodes need; safe to repeat."""
        # The controller manager makes these two as well, but seconds later, and no pod can be
        # made without the one or started without the other.
        account = {"metadata": {"name": "default"}}
        root = {"metadata": {"name": "kube-root-ca.crt"}, "data": {"ca.crt": self.authority}}
        things = [(BINDINGS, thing) for thing in bindings()]
        for path, thing in [*things, (ACCOUNTS, account), (MAPS, root)]:
            try:
                self.client.call("POST", path, thing)
            except api_client.Refused as error:
                if error.status != 409:
                    raise

    def invited(self, username: str) -> str:
        """The node that a token's user was invited as; "" if it was not, or no longer."""
        found = re.fullmatch(r"system:bootstrap:([a-z0-9]{6})", username)
        if not found:
            return ""
        try:
            token = self.client.call("GET", f"{TOKENS}/bootstrap-token-{found[1]}")
        except api_client.Refused:
            return ""
        return base64.b64decode(token["data"].get("node", "")).decode()

    def addresses(self, username: str) -> set[str]:
        """Addresses that a node registered itself with."""
        name = username.split("system:node:")[-1]
        try:
            node = self.client.call("GET", f"{NODES}/{name}")
        except api_client.Refused:
            return set()
        return {entry["address"] for entry in node["status"].get("addresses", [])}

    def judge(self, request: api_client.Object) -> None:
        """Approve or deny a new signing request; revoke the token of an issued one."""
        spec, status = request["spec"], request.get("status", {})
        user = spec["username"]
        if status.get("certificate") and user.startswith("system:bootstrap:"):
            with contextlib.suppress(api_client.Refused):
                self.client.call("DELETE", f"{TOKENS}/bootstrap-token-{user.split(':')[2]}")
        if status.get("conditions"):
            return
        why = verdict(spec, self.invited(user), self.addresses(user))
        kind = "Denied" if why else "Approved"
        print(f"{user} {kind.lower()} {spec['signerName']} {why}", flush=True)
        request["status"] = {"conditions": [{
            "type": kind, "status": "True", "reason": "Dovetail", "message": why or "as invited",
        }]}  # fmt: skip
        with contextlib.suppress(
            api_client.Refused
        ):  # changed meanwhile: the watch brings it again
            self.client.call("PUT", f"{REQUESTS}/{request['metadata']['name']}/approval", request)

    def watch_requests(self) -> None:
        """Judge every signing request, for ever."""
        while True:
            for kind, request in self.client.watch(REQUESTS):
                if kind in ("ADDED", "MODIFIED"):
                    self.judge(request)

    def watch_nodes(self, wait: Callable[[float], object]) -> None:
        """Remove nodes that have been silent for long, for ever."""
        since: dict[str, float] = {}
        while True:
            now = time.monotonic()
            items = self.client.call("GET", NODES)["items"]
            silent = {
                node["metadata"]["name"] for node in items
                if api_client.condition(node, "Ready") == "Unknown"
            }  # fmt: skip
            since = {name: since.get(name, now) for name in silent}
            for name, first in since.items():
                if now - first > LOST_AFTER and name != self.own:
                    print(f"node {name} is lost and removed", flush=True)
                    self.client.call("DELETE", f"{NODES}/{name}")
            wait(LOOK_EVERY)


def main(record: str) -> None:
    """Serve until something fails."""
    node = Node(**json.loads(Path(record).read_text()))
    folder = cluster_folder(node.cluster) / "pki"
    admin = json.loads((folder / "admin.conf").read_text())
    server = admin["clusters"][0]["cluster"]["server"]
    authority = (folder / "ca.crt").read_text()
    client = api_client.Client(server, authority, folder / "admin.crt")
    steward = Steward(client, node.name, authority)
    steward.prepare()
    failed = threading.Event()

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # whatever it is, a fresh start is the cure
            print(f"{work}: {error}", flush=True)
        failed.set()

    never = threading.Event()
    for work in (steward.watch_requests, lambda: steward.watch_nodes(never.wait)):
        threading.Thread(target=run, args=(work,), daemon=True).start()
    failed.wait()


if __name__ == "__main__":
    main(sys.argv[1])
    sys.exit(1)
