# SPDX-License-Identifier: LGPL-3.0-or-later
"""The certificate that is trusted by those who hold a copy of it."""

from __future__ import annotations

import subprocess

import pytest
from dovetail.host.self_signed import self_signed

pytestmark = pytest.mark.unit


def test_a_certificate_for_a_server_alone_is_trusted_by_itself_and_for_its_address(tmp_path):
    self_signed(tmp_path, "stream", "127.77.1.2")
    for address, fine in (("127.77.1.2", True), ("127.77.1.3", False)):
        words = ["openssl", "verify", "-CAfile", "stream.crt", "-partial_chain",
                 "-purpose", "sslserver", "-verify_ip", address, "stream.crt"]  # fmt: skip
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode == 0) is fine, done.stderr
    assert (tmp_path / "stream.key").stat().st_mode & 0o777 == 0o600
    text = subprocess.run(["openssl", "x509", "-in", "stream.crt", "-noout", "-text"], cwd=tmp_path,
                          capture_output=True, text=True).stdout  # fmt: skip
    assert "CA:FALSE" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stream.crt", "stream.key"]
