# SPDX-License-Identifier: LGPL-3.0-or-later
"""Certificates that the verbs make themselves; what nodes ask for is in test_csr_approver.py."""

from __future__ import annotations

import subprocess
import time

import pytest
from usernetes_setup.control import certificates

pytestmark = pytest.mark.unit


@pytest.fixture
def authority(tmp_path):
    certificates.authority(tmp_path, "test")
    return tmp_path


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


def test_a_certificate_that_a_node_asks_for_is_for_its_key_and_one_use(authority):
    certificates.key(authority, "node")
    asked = certificates.request(authority, "node", "/O=system:nodes/CN=system:node:n1")
    names = {"client": "", "server": "DNS:n1,IP:192.0.2.1"}
    for use, hosts in names.items():
        (authority / f"{use}.crt").write_text(certificates.issued(authority, asked, hosts))
        subprocess.run(["openssl", "verify", "-CAfile", "ca.crt", f"{use}.crt"], cwd=authority,
                       check=True)  # fmt: skip
    words = ["openssl", "x509", "-noout", "-text", "-pubkey", "-nameopt", "rfc2253", "-in"]
    client, server = (
        subprocess.run([*words, f"{use}.crt"], cwd=authority, capture_output=True, text=True,
                       check=True).stdout
        for use in names
    )  # fmt: skip
    certificates.public_key(authority, "node")
    for text in (client, server):
        assert (authority / "node.pub").read_text() in text
        assert "CA:FALSE" in text
        assert "Subject: CN=system:node:n1,O=system:nodes" in text
    assert ("TLS Web Client" in client, "TLS Web Server" in client) == (True, False)
    assert ("TLS Web Client" in server, "TLS Web Server" in server) == (False, True)
    assert "Alternative Name" not in client
    assert "DNS:n1, IP Address:192.0.2.1" in server
    assert not [*authority.glob(".issued-*")]


@pytest.mark.parametrize("days", [-6, 0, 364])
def test_a_clock_that_is_set_back_or_forward_by_days_shuts_nobody_out(authority, days):
    certificates.certificate(authority, "client", "/O=system:masters/CN=c")
    moment = str(int(time.time()) + days * 86400)
    words = ["openssl", "verify", "-CAfile", "ca.crt", "-attime", moment]
    subprocess.run([*words, "client.crt"], cwd=authority, check=True)
    subject = ["openssl", "x509", "-in", "client.crt", "-noout", "-subject", "-nameopt", "rfc2253"]
    said = subprocess.run(subject, cwd=authority, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "subject=CN=c,O=system:masters"
