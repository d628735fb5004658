# SPDX-License-Identifier: LGPL-3.0-or-later
"""The way out of a network namespace: what it leads to, and what it does with nonsense."""

from __future__ import annotations

import socket
import threading

import pytest
from dovetail.host import way_out

pytestmark = pytest.mark.unit


@pytest.fixture
def way(tmp_path):
    """A served socket's path."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "way"))
    listening.listen()
    threading.Thread(target=way_out.serve, args=(listening,), daemon=True).start()
    return str(tmp_path / "way")


def test_what_either_side_says_reaches_the_other_and_so_does_an_end(way):
    with socket.create_server(("127.0.0.1", 0)) as server:
        with way_out.connected(way, *server.getsockname()) as here:
            there, _ = server.accept()
            with there:
                here.sendall(b"x" * 1_000_000)
                here.shutdown(socket.SHUT_WR)
                assert sum(map(len, iter(lambda: there.recv(1 << 16), b""))) == 1_000_000
        with way_out.connected(way, *server.getsockname()) as here:
            there, _ = server.accept()
            there.sendall(b"bye")
            there.close()
            assert b"".join(iter(lambda: here.recv(16), b"")) == b"bye"


def test_where_nobody_listens_and_for_nonsense_the_connection_ends(way):
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = server.getsockname()
    with way_out.connected(way, *nobody) as here:
        assert here.recv(1) == b""
    for line in (b"\n", b"host\n", b":port\n", b"127.0.0.1:99999\n", b"\xff:1\n", b"x" * 200_000):
        with socket.socket(socket.AF_UNIX) as here:
            here.settimeout(20)
            here.connect(way)
            try:
                here.sendall(line)
                here.shutdown(socket.SHUT_WR)
                assert here.recv(1) == b"", line[:20]
            except ConnectionError:
                assert len(line) > 1000


def test_without_a_server_the_path_is_refused_at_once(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        way_out.connected(str(tmp_path / "none"), "127.0.0.1", 1)
