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


@pytest.mark.parametrize("days", [-6, 0, 364])
def test_a_clock_that_is_set_back_or_forward_by_days_shuts_nobody_out(authority, days):
    certificates.certificate(authority, "client", "/O=system:masters/CN=c")
    moment = str(int(time.time()) + days * 86400)
    words = ["openssl", "verify", "-CAfile", "ca.crt", "-attime", moment]
    subprocess.run([*words, "client.crt"], cwd=authority, check=True)
    subject = ["openssl", "x509", "-in", "client.crt", "-noout", "-subject", "-nameopt", "rfc2253"]
    said = subprocess.run(subject, cwd=authority, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "subject=CN=c,O=system:masters"
