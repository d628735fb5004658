# SPDX-License-Identifier: LGPL-3.0-or-later
"""Who gets a certificate, and for what."""

from __future__ import annotations

import base64
import subprocess

import pytest
from usernetes_setup.control import certificates, steward

pytestmark = pytest.mark.unit
CLIENT = "kubernetes.io/kube-apiserver-client-kubelet"
SERVING = "kubernetes.io/kubelet-serving"


@pytest.fixture
def authority(tmp_path):
    certificates.authority(tmp_path, "test")
    return tmp_path


def asked(folder, subject, signer, user, names=()):
    certificates.key(folder, "n")
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
    certificates.certificate(authority, "server", "/CN=s", ["127.0.0.1", "name"])
    certificates.certificate(authority, "client", "/CN=c")
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
