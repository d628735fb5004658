# SPDX-License-Identifier: LGPL-3.0-or-later
"""How far this machine's is from a cluster's, for the doctor and before joining."""

from __future__ import annotations

import argparse
import contextlib
import http.server
import json
import os
import re
import ssl
import threading
import time
from email.utils import formatdate

import pytest
from dovetail.core.errors import BadInput
from dovetail.host.self_signed import self_signed
from support.clusters import node
from usernetes_setup import __main__ as verbs
from usernetes_setup import cluster, node_record
from usernetes_setup.control import api_client
from usernetes_setup.node import namespaces
from usernetes_setup.preflight import machine

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("private_state")]


@contextlib.contextmanager
def server(folder, ahead):
    """An API server that declines every request, and whose clock is ahead by so many seconds."""

    class Declines(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response_only(401)
            self.send_header("Date", formatdate(time.time() + ahead, usegmt=True))
            self.end_headers()

        def log_message(self, *_):
            pass

    self_signed(folder, "server", "127.0.0.1")
    listening = http.server.HTTPServer(("127.0.0.1", 0), Declines)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    listening.socket = context.wrap_socket(listening.socket, server_side=True)
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"https://127.0.0.1:{listening.server_port}"
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


@pytest.mark.parametrize("ahead", [-3600, 0, 3600])
def test_a_clock_is_compared_with_a_servers(tmp_path, ahead):
    with server(tmp_path, ahead) as url:
        assert api_client.skew(url, timeout=60) == pytest.approx(-ahead, abs=30)


@pytest.mark.parametrize(
    ("ahead", "level", "says"),
    [(3600, "error", r"3\d\d\d s behind"), (-3600, "error", r"3\d\d\d s ahead of"),
     (0, "ok", "API server")],
)  # fmt: skip
def test_the_doctor_asks_the_server_of_the_users_kubeconfig(
    tmp_path, monkeypatch, ahead, level, says
):
    monkeypatch.setattr(machine, "SKEW", 30.0)  # the server may be slow here
    with server(tmp_path, ahead) as url:
        (tmp_path / "config").write_text(f"clusters:\n- cluster:\n    server: {url}\n")
        monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/none:{tmp_path}/config")
        found = machine.time_skew()
    assert found.level == level
    assert re.search(says, found.found)
    assert found.fix == ("" if level == "ok" else machine.keep_in_step())


@pytest.mark.parametrize(("kept", "level"), [(True, "ok"), (False, "warning")])
def test_without_a_server_the_kernel_says_whether_its_clock_is_kept(monkeypatch, kept, level):
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setattr(namespaces, "clock_in_step", lambda: kept)
    assert machine.time_skew().level == level


def test_a_joined_nodes_server_is_known():
    here = node(joined="yes", server="https://192.0.2.1:6443")
    node_record.root(make=True)
    here.folder.mkdir(parents=True)
    here.save()
    assert "https://192.0.2.1:6443" in machine.servers()


STATE = f"/tmp/dovetail-test-{os.getpid()}"  # short: a node's sockets have room


def join_file(tmp_path, url):
    content = {"cluster": "c", "node": "127.77.9.9", "server": url, "authority": "", "token": ""}
    (tmp_path / "join.json").write_text(json.dumps(content))
    parser = argparse.ArgumentParser()
    verbs.configure(parser, "join")
    return parser.parse_args([str(tmp_path / "join.json")])


@pytest.mark.parametrize(
    ("ahead", "says"), [(3600, "s behind that of"), (-3600, "s ahead of that of")]
)
def test_a_node_with_a_wrong_clock_is_not_started(tmp_path, monkeypatch, ahead, says):
    monkeypatch.setenv("DOVETAIL_STATE", STATE)
    monkeypatch.setattr(cluster, "binaries", lambda _: tmp_path)
    with server(tmp_path, ahead) as url, pytest.raises(BadInput, match=says):
        cluster.join(join_file(tmp_path, url), print)
    assert not os.path.exists(STATE)


@pytest.mark.parametrize(
    "url", ["https://127.77.255.254:1", "https://127.77.255.254:70000", "https://[::1", "c"]
)
def test_a_node_whose_cluster_cannot_be_reached_is_not_started(tmp_path, monkeypatch, url):
    monkeypatch.setenv("DOVETAIL_STATE", STATE)
    monkeypatch.setattr(cluster, "binaries", lambda _: tmp_path)
    with pytest.raises(BadInput, match="cannot be reached"):
        cluster.join(join_file(tmp_path, url), print)
    assert not os.path.exists(STATE)


def test_who_tells_no_date_is_no_cluster_to_join(tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_STATE", STATE)
    monkeypatch.setattr(cluster, "binaries", lambda _: tmp_path)
    monkeypatch.setitem(globals(), "formatdate", lambda *_, **more: "")
    with server(tmp_path, 0) as url, pytest.raises(BadInput, match="cannot be reached"):
        cluster.join(join_file(tmp_path, url), print)


def test_a_node_whose_invitation_is_good_no_more_is_not_started(tmp_path, monkeypatch):
    """By whoever listens now where its cluster was; or by its cluster, which declines the token."""
    monkeypatch.setenv("DOVETAIL_STATE", STATE)
    monkeypatch.setattr(cluster, "binaries", lambda _: tmp_path)
    with server(tmp_path, 0) as url:
        args = join_file(tmp_path, url)
        content = json.loads((tmp_path / "join.json").read_text())
        self_signed(tmp_path, "other", "127.0.0.1")
        own, other = ((tmp_path / f"{name}.crt").read_text() for name in ("server", "other"))
        for authority, says in ((other, "is not the cluster"), (own, "has expired, or was used")):
            text = json.dumps({**content, "authority": authority, "token": "abcdef.0123"})
            (tmp_path / "join.json").write_text(text)
            with pytest.raises(BadInput, match=says):
                cluster.join(args, print)
    assert not os.path.exists(STATE)
