# SPDX-License-Identifier: LGPL-3.0-or-later
"""How a joined node asks for its certificates."""

from __future__ import annotations

import base64
import math
import socket

import pytest
from usernetes_setup.control.csr_approver import CLIENT
from usernetes_setup.node import joining

pytestmark = pytest.mark.unit


class Api:
    """A stand-in for the API: gives a certificate, if a socket can wait as long as it is told."""

    def call(self, method, path, body, timeout):
        self.wait(timeout)
        return {"metadata": {"name": "node-csr-1"}}

    def watch(self, path, query, patience):
        self.wait(patience)
        yield "ADDED", {"status": {"certificate": base64.b64encode(b"it").decode()}}

    def wait(self, seconds):
        with socket.socket() as link:
            link.settimeout(seconds)


@pytest.mark.parametrize("deadline", [math.inf, 1e10])
def test_a_node_may_wait_for_its_certificate_without_end(deadline):
    assert joining._asked(Api(), "it", CLIENT, [], deadline) == "it"
