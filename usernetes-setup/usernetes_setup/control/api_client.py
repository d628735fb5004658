# SPDX-License-Identifier: LGPL-3.0-or-later
"""The few calls to the Kubernetes API that the verbs themselves need.

The standard library's HTTPS with a client certificate, since the official client is not
there on a bare node. Failures: `Refused` for what the server declined, OSError (or
http.client.HTTPException) when it cannot be reached.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

Object = dict[str, Any]

NODES = "/api/v1/nodes"
REQUESTS = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
TOKENS = "/api/v1/namespaces/kube-system/secrets"
BINDINGS = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
ROLES = "/apis/rbac.authorization.k8s.io/v1/clusterroles"
ACCOUNTS = "/api/v1/namespaces/default/serviceaccounts"
MAPS = "/api/v1/namespaces/default/configmaps"
JOIN = "dovetail-join"
"""The binding without which no node can join."""


class Refused(Exception):
    """The API server answered with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Client:
    """One user of one API server, known by a certificate or a token."""

    def __init__(
        self, server: str, authority: str, certificate: Path | None, token: str = ""
    ) -> None:
        """`authority` is PEM; `certificate` is NAME.crt with NAME.key beside it, or holds both."""
        self._address = urlsplit(server)
        self._context = ssl.create_default_context(cadata=authority)
        if certificate:
            key = certificate.with_suffix(".key")
            self._context.load_cert_chain(certificate, key if key.exists() else None)
        self._headers = {"Accept": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"

    def _send(
        self, method: str, path: str, body: Object | None, timeout: float | None, kind: str
    ) -> tuple[http.client.HTTPSConnection, http.client.HTTPResponse]:
        host, port = self._address.hostname or "", self._address.port
        link = http.client.HTTPSConnection(host, port, context=self._context, timeout=timeout)
        headers = {**self._headers, "Content-Type": kind}
        link.request(method, path, json.dumps(body) if body is not None else None, headers)
        answer = link.getresponse()
        if answer.status >= 400:
            text = answer.read(4000).decode(errors="replace")
            link.close()
            try:
                text = json.loads(text)["message"]
            except (ValueError, KeyError, TypeError):
                text = text.strip()[:200]
            raise Refused(answer.status, text)
        return link, answer

    def call(
        self, method: str, path: str, body: Object | None = None, timeout: float = 10.0,
        kind: str = "application/json",
    ) -> Any:  # noqa: ANN401  # fmt: skip
        """One request; the answer is decoded JSON, or text where it is not JSON."""
        link, answer = self._send(method, path, body, timeout, kind)
        text = answer.read().decode()
        link.close()
        return json.loads(text) if text.startswith(("{", "[")) else text

    def make(self, path: str, thing: Object) -> None:
        """Make something, unless it is there."""
        try:
            self.call("POST", path, thing)
        except Refused as error:
            if error.status != 409:
                raise

    def ready(self) -> bool:
        """Whether the API can be used.

        That is a second or two before /readyz says so, and the node is waiting.
        """
        try:
            return bool(self.call("GET", "/api/v1/namespaces/default", timeout=2.0))
        except (OSError, Refused, http.client.HTTPException):
            return False

    def watch(
        self, path: str, query: str = "", patience: float | None = None
    ) -> Iterator[tuple[str, Object]]:
        """What is there (as ADDED) and then every change, until the server ends the stream.

        OSError when nothing happens for `patience` seconds.
        """
        # From version 0 on, that is from what the server has in mind: of a kind of which there
        # never was one it has no later version, and would refuse after 3 s to begin with a later.
        words = f"{path}?watch=1&resourceVersion=0&{query}"
        link, answer = self._send("GET", words, None, patience, "")
        try:
            for line in answer:
                change = json.loads(line)
                if change["type"] == "ERROR":
                    raise Refused(change["object"]["code"], change["object"]["message"])
                yield change["type"], change["object"]
        finally:
            link.close()


def delete_pods(client: Client, node: str, timeout: float = 10.0) -> None:
    """Delete the pods of a node on which nothing runs any more, and so no kubelet does that."""
    path = f"/api/v1/pods?fieldSelector=spec.nodeName%3D{node}"
    for pod in client.call("GET", path, timeout=timeout)["items"]:
        this = pod["metadata"]
        at_once = {"gracePeriodSeconds": 0, "preconditions": {"uid": this["uid"]}}
        with contextlib.suppress(Refused):  # it is gone already
            path = f"/api/v1/namespaces/{this['namespace']}/pods/{this['name']}"
            client.call("DELETE", path, at_once, timeout)


def kubelet(node: Object, pki: Path) -> Client:
    """A node's kubelet, for the control plane; the API server connects to none on loopback."""
    status = node["status"]
    addresses = {one["type"]: one["address"] for one in status["addresses"]}
    port = status["daemonEndpoints"]["kubeletEndpoint"]["Port"]
    server = f"https://{addresses['InternalIP']}:{port}"
    return Client(server, (pki / "ca.crt").read_text(), pki / "kubelet-client.crt")


def skew(server: str, timeout: float = 3.0) -> float:
    """Seconds that this machine's clock is ahead of a server's, which need not be trusted.

    Its certificate is not checked: a wrong clock makes every certificate look wrong. Nothing is
    sent but a request without credentials, whose refusal carries the date too. ValueError where
    that has no date, or the server's address is none.
    """
    where = urlsplit(server)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    link = http.client.HTTPSConnection(
        where.hostname or "", where.port, context=context, timeout=timeout
    )
    before = time.time()
    try:
        link.request("GET", "/version")
        date = link.getresponse().getheader("Date") or ""
    finally:
        link.close()
    try:
        theirs, after = parsedate_to_datetime(date).timestamp(), time.time()
    except TypeError:  # before Python 3.10
        raise ValueError(f"{date!r} is no date") from None
    # The header has whole seconds, so the answer was made within [theirs, theirs + 1).
    return max(0.0, before - (theirs + 1)) - max(0.0, theirs - after)


def binding(name: str, role: str, kind: str, subject: str) -> Object:
    """What gives a cluster role to a user or a group, its `kind`."""
    group = "rbac.authorization.k8s.io"
    return {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": group, "kind": kind, "name": subject}],
    }


def condition(thing: Object, kind: str) -> str:
    """Status of one condition: "True", "False", "Unknown", or "" if it is not there."""
    for found in thing.get("status", {}).get("conditions", []):
        if found["type"] == kind:
            return str(found["status"])
    return ""
