# SPDX-License-Identifier: LGPL-3.0-or-later
"""The CSR approver: who may join, and which certificate a node gets.

Inputs: certificate signing requests, as the API shows them, the join tokens, the nodes, the
cluster's authority. Outputs: each request approved and signed, or denied, with the reason.
Invariants: a join token names its node, is good for that node alone, and is revoked when the node
got its certificate; a certificate names the node that asks and nothing besides; what a request asks
for is read whole, by the same packages as the API server's signer reads it
(`usernetes-setup/kube/describe-request`), and anything that a kubelet does not ask for is refused,
known or not; where it cannot be read nothing is approved.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import json
import re
import secrets
import select
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from dovetail.core.errors import WorkFailed

from usernetes_setup.control import api_client, certificates
from usernetes_setup.control.api_client import BINDINGS, JOIN, NODES, REQUESTS, ROLES, TOKENS

CLIENT = "kubernetes.io/kube-apiserver-client-kubelet"
SERVING = "kubernetes.io/kubelet-serving"

HEARD = 10.0
"""Seconds after which an API server has heard of a token, and of what that may do."""
_AGAIN = 0.05  # seconds between two looks whether it has

READER = "describe-request"
"""The program that reads a request; in the build, whose programs come first on our PATH."""

_ORGANISATION, _COMMON_NAME = "2.5.4.10", "2.5.4.3"
_EXTENSION_REQUEST, _ALTERNATIVE_NAMES = "1.2.840.113549.1.9.14", "2.5.29.17"
_USAGES = {CLIENT: "client auth", SERVING: "server auth"}
_KEY_USAGES = {"digital signature", "key encipherment"}
_NODE, _INVITED = "system:node:", "system:bootstrap:"  # what users' names begin with


@dataclass(frozen=True)
class Request:
    """What a signing request asks for, as `describe-request` prints it; see there."""

    subject: list[list[list[str]]]
    attributes: list[str]
    extensions: list[str]
    names: list[list[str]]


class Unreadable(Exception):
    """A signing request that is none, or that says something which cannot be named in full."""


def read(pem: bytes) -> Request:
    """Parse a signing request. Raises Unreadable, or WorkFailed where nothing can be read."""
    try:
        done = subprocess.run([READER], input=pem, capture_output=True)
    except OSError as error:
        raise WorkFailed(
            f"{READER}: {error.strerror}; without it no request can be read, and none is approved"
        ) from None
    if done.returncode == 1:
        raise Unreadable(done.stderr.decode(errors="replace").strip())
    if done.returncode:
        raise WorkFailed(f"{READER} ended with {done.returncode}, and no request is approved")
    return Request(**json.loads(done.stdout))


def refusal(spec: api_client.Object, invited: str, addresses: set[str]) -> str:
    """Why a signing request is refused, or "" if it is what that node's kubelet asks for.

    `invited` is the node that the asking token was made for; `addresses` are those of the
    asking node as it registered itself.
    """
    signer, user, groups = spec["signerName"], spec["username"], spec.get("groups", [])
    if signer not in _USAGES:
        return "not a request of a node"
    if user.startswith(_NODE) and "system:nodes" in groups:
        node = user[len(_NODE) :]
    elif user.startswith(_INVITED) and "system:bootstrappers" in groups and signer == CLIENT:
        node = invited
    else:
        return f"{user} is no node, nor invited to be one"
    if not node:
        return f"{user} is not invited, or no longer"
    usages = set(spec.get("usages", []))
    if _USAGES[signer] not in usages or usages - {_USAGES[signer]} - _KEY_USAGES:
        return f"a certificate for {', '.join(sorted(usages)) or 'no use'} is not for {signer}"
    try:
        asked = read(base64.b64decode(spec["request"]))
    except Unreadable as error:
        return str(error)
    # In either order, and each alone in its part: not two values in one.
    own = [[[_COMMON_NAME, f"{_NODE}{node}"]], [[_ORGANISATION, "system:nodes"]]]
    if asked.subject not in (own, own[::-1]):
        return f"{user} may not be {_shown(asked.subject)}"
    wanted = ([_EXTENSION_REQUEST], [_ALTERNATIVE_NAMES]) if signer == SERVING else ([], [])
    if (asked.attributes, asked.extensions) != wanted:
        found = " ".join([*asked.attributes, *asked.extensions])
        return f"not what a kubelet asks for: attributes and extensions {found or 'none'}"
    if signer == SERVING and not asked.names:
        return "a serving certificate for no name"
    allowed = {("DNS", node), *(("IP", name) for name in {node, *addresses} if _is_address(name))}
    foreign = {(kind, value) for kind, value in asked.names} - allowed
    if foreign:
        listed = " ".join(f"{kind}:{value}" for kind, value in sorted(foreign))
        return f"{node} may not have the names {listed}"
    return ""


def _shown(subject: list[list[list[str]]]) -> str:
    known = {_ORGANISATION: "O", _COMMON_NAME: "CN"}
    return ", ".join(
        "+".join(f"{known.get(kind, kind)}={value}" for kind, value in part) for part in subject
    )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def accept(client: api_client.Client) -> None:
    """Let who is invited ask to be a node; the built-in role is there a second later."""
    rule = {"apiGroups": ["certificates.k8s.io"], "resources": ["certificatesigningrequests"],
            "verbs": ["create", "get", "list", "watch"]}  # fmt: skip
    client.make(ROLES, {"metadata": {"name": JOIN}, "rules": [rule]})
    client.make(BINDINGS, api_client.binding(JOIN, JOIN, "Group", "system:bootstrappers"))


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


def used(client: api_client.Client, token: str) -> bool:
    """Whether a node got its certificate by a join token, whose own client this is.

    The API server lets a revoked token in for some seconds more, since it remembers whom it let in.
    """
    asked = client.call("GET", f"{REQUESTS}?fieldSelector=spec.signerName={CLIENT}")["items"]
    user = f"{_INVITED}{token.partition('.')[0]}"
    return any(
        one["spec"]["username"] == user and one.get("status", {}).get("certificate")
        for one in asked
    )


def await_known(client: api_client.Client, token: str) -> None:
    """Wait until the API server lets a new token in, whose own client this is.

    Gives up after a while: who asks by it waits as long again.
    """
    deadline = time.monotonic() + HEARD
    while time.monotonic() < deadline:
        with contextlib.suppress(api_client.Refused):
            used(client, token)
            return
        select.select([], [], [], _AGAIN)


def _invited(client: api_client.Client, user: str) -> str:
    """The node that a token's user was invited as; "" if it was not, or no longer."""
    found = re.fullmatch(_INVITED + r"([a-z0-9]{6})", user)
    if not found:
        return ""
    try:
        token = client.call("GET", f"{TOKENS}/bootstrap-token-{found[1]}")
    except api_client.Refused:
        return ""
    return base64.b64decode(token["data"].get("node", "")).decode()


def _addresses(client: api_client.Client, user: str) -> set[str]:
    """Addresses that a node registered itself with; none for another user."""
    if not re.fullmatch(_NODE + r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", user):
        return set()
    try:
        node = client.call("GET", f"{NODES}/{user[len(_NODE) :]}")
    except api_client.Refused:
        return set()
    return {entry["address"] for entry in node["status"].get("addresses", [])}


def decide(client: api_client.Client, request: api_client.Object, pki: Path) -> None:
    """Approve or deny a new signing request; revoke the token of an issued one.

    What is approved is signed here too, by the authority in `pki`: the controller manager would do
    it, but begins seconds after the API server answers.
    """
    spec, status = request["spec"], request.get("status", {})
    user = spec["username"]
    if status.get("certificate") and user.startswith(_INVITED):
        with contextlib.suppress(api_client.Refused):
            client.call("DELETE", f"{TOKENS}/bootstrap-token-{user[len(_INVITED) :]}")
    if status.get("conditions"):
        return
    why = refusal(spec, _invited(client, user), _addresses(client, user))
    kind = "Denied" if why else "Approved"
    print(f"{user} {kind.lower()} {spec['signerName']} {why}", flush=True)
    request["status"] = {"conditions": [{
        "type": kind, "status": "True", "reason": "Dovetail", "message": why or "as invited",
    }]}  # fmt: skip
    where = f"{REQUESTS}/{request['metadata']['name']}"
    with contextlib.suppress(api_client.Refused):  # changed meanwhile: the watch brings it again
        approved = client.call("PUT", f"{where}/approval", request)
        if not why and "expirationSeconds" not in spec:  # whose wish is seldom, and kept there
            approved["status"]["certificate"] = _issued(spec, pki)
            client.call("PUT", f"{where}/status", approved)


def _issued(spec: api_client.Object, pki: Path) -> str:
    """The certificate for an approved request, as the API has it."""
    asked = base64.b64decode(spec["request"])
    names = read(asked).names if spec["signerName"] == SERVING else []
    hosts = ",".join(f"{kind}:{name}" for kind, name in names)
    made = certificates.issued(pki, asked.decode(), hosts)
    return base64.b64encode(made.encode()).decode()


def run(client: api_client.Client, pki: Path) -> None:
    """Decide on every signing request, for ever; `pki` has the cluster's authority."""
    while True:
        for kind, request in client.watch(REQUESTS):
            if kind in ("ADDED", "MODIFIED"):
                decide(client, request, pki)
