# SPDX-License-Identifier: LGPL-3.0-or-later
"""The certificate that is trusted by those who hold a copy of it."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

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


@pytest.mark.parametrize("name", ["1234", "10.20", "host"])
def test_a_machine_whose_name_is_a_number_has_a_certificate_for_a_name(tmp_path, name):
    self_signed(tmp_path, "stream", name)
    words = ["openssl", "verify", "-CAfile", "stream.crt", "-partial_chain",
             "-verify_hostname", name, "stream.crt"]  # fmt: skip
    subprocess.run(words, cwd=tmp_path, check=True)


def test_the_folder_may_be_named_from_where_we_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inner").mkdir()
    self_signed(Path("inner"), "stream", "127.77.1.2")
    assert (tmp_path / "inner" / "stream.crt").exists()


@pytest.mark.parametrize("days", [-6, 0, 364])
def test_a_clock_that_is_set_back_or_forward_by_days_does_not_make_it_invalid(tmp_path, days):
    self_signed(tmp_path, "stream", "127.77.1.2")
    moment = str(int(time.time()) + days * 86400)
    words = ["openssl", "verify", "-CAfile", "stream.crt", "-partial_chain", "-attime", moment]
    subprocess.run([*words, "stream.crt"], cwd=tmp_path, check=True)
