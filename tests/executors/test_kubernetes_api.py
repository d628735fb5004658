# SPDX-License-Identifier: LGPL-3.0-or-later
"""Watches and credentials, with a server that answers a list and then says nothing."""

from __future__ import annotations

import base64
import http.server
import json
import ssl
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import urllib3
from dovetail.core.errors import BadInput
from dovetail.executors.kubernetes.api import SILENCE, Api, Watch
from dovetail.executors.kubernetes.session import Session
from dovetail.host.self_signed import openssl, self_signed

pytestmark = pytest.mark.unit


class Silent(http.server.BaseHTTPRequestHandler):
    """Lists nothing, and lets a watch wait until the test is over."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.server.declines:
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if "watch=1" in self.path:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.flush()
            self.server.watched.set()
            self.server.over.wait()
            self.close_connection = True
            return
        text = json.dumps({"items": [], "metadata": {"resourceVersion": "1"}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture(params=["plain", "tls"])
def server(request, tmp_path):
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    found.daemon_threads = True
    found.watched, found.over = threading.Event(), threading.Event()
    found.declines = False
    found.address = f"http://127.0.0.1:{found.server_address[1]}"
    self_signed(tmp_path, "server", "127.0.0.1")
    if request.param == "tls":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
        found.socket = context.wrap_socket(found.socket, server_side=True)
        found.address = found.address.replace("http:", "https:")
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.over.set()
    found.shutdown()
    found.server_close()


def kubeconfig(folder, server):
    """Access by certificate, all of it in the kubeconfig itself."""
    made = {name: base64.b64encode((folder / name).read_bytes()).decode()
            for name in ("server.crt", "server.key")}  # fmt: skip
    content = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {
            "server": server.address, "certificate-authority-data": made["server.crt"]}}],
        "users": [{"name": "u", "user": {
            "client-certificate-data": made["server.crt"],
            "client-key-data": made["server.key"]}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }  # fmt: skip
    path = folder / "kubeconfig"
    path.write_text(json.dumps(content))
    return path


def test_a_watch_that_reads_ends_when_it_is_told_to(server, tmp_path):
    heard = []
    watch = Watch(
        Api(kubeconfig(tmp_path, server)), "/api/v1/nodes", lambda *news: heard.append(news)
    )
    assert server.watched.wait(10)
    time.sleep(0.2)  # it has the head of the answer, and waits for the rest
    watch.stop()
    watch.join(5)
    assert not watch.is_alive()
    assert heard == [("LISTED", [])]


def test_no_file_with_credentials_is_left_however_often_they_are_read(
    server, tmp_path, monkeypatch
):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    path = kubeconfig(tmp_path, server)
    for _ in range(3):
        api = Api(path)
        assert list(scratch.iterdir()) == []
        assert api.get("/api/v1/nodes")["items"] == []
        api.close()


NOBODY = "http://127.0.0.1:9"


def environment(monkeypatch, **has):
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in has.items():
        monkeypatch.setenv(name, value)


def test_no_proxy_is_between_us_and_a_server_on_this_machine(server, tmp_path, monkeypatch):
    environment(monkeypatch, http_proxy=NOBODY, https_proxy=NOBODY)
    found = Api(kubeconfig(tmp_path, server)).get("/api/v1/nodes", patience=0.0)
    assert found["items"] == []


@pytest.mark.parametrize(
    ("ours", "has", "by"),
    [
        (False, {"https_proxy": NOBODY}, True),
        (False, {"http_proxy": NOBODY}, False),
        (False, {"https_proxy": NOBODY, "no_proxy": "192.0.2.0/24"}, False),
        (False, {"https_proxy": NOBODY, "NO_PROXY": "example.org,192.0.2.1"}, False),
        (True, {"https_proxy": NOBODY}, False),
    ],
    ids=["asked for", "for another scheme", "not to this network", "not to it", "our own cluster"],
)
def test_a_proxy_leads_to_a_server_elsewhere_as_the_environment_says(
    tmp_path, monkeypatch, ours, has, by
):
    environment(monkeypatch, **has)
    self_signed(tmp_path, "server", "192.0.2.1")
    path = kubeconfig(tmp_path, SimpleNamespace(address="https://192.0.2.1:6443"))
    content = json.loads(path.read_text())
    name = "dovetail" if ours else "c"
    content["clusters"][0]["name"] = content["contexts"][0]["context"]["cluster"] = name
    path.write_text(json.dumps(content))
    pools = Api(path)._client.rest_client.pool_manager
    assert isinstance(pools, urllib3.ProxyManager) is by


def test_who_cannot_be_reached_by_a_proxy_is_told_so(tmp_path, monkeypatch):
    environment(monkeypatch, https_proxy=NOBODY)
    self_signed(tmp_path, "server", "192.0.2.1")
    path = kubeconfig(tmp_path, SimpleNamespace(address="https://192.0.2.1:6443"))
    with pytest.raises(BadInput, match=r"cannot be reached by https_proxy \("):
        Api(path).check()


def test_a_run_that_cannot_be_set_up_asks_a_silent_server_no_more_than_once_for_anything(
    tmp_path, monkeypatch
):
    """Else its user waits minutes for a line that is known."""
    self_signed(tmp_path, "server", "192.0.2.1")
    api = Api(kubeconfig(tmp_path, SimpleNamespace(address="https://192.0.2.1:6443")))
    asked = []

    def gone(method, path, *more):
        assert (method, path) not in asked
        asked.append((method, path))
        raise OSError

    monkeypatch.setattr(api, "_once", gone)
    api._silent_since = time.monotonic() - SILENCE - 1
    session = Session.__new__(Session)
    session.api, session.run, session.hub, session.upkeep = api, "r", None, None
    session.launcher = SimpleNamespace(kinds=("Job",))
    session.lease = SimpleNamespace(release=lambda: None)
    assert len(session.close()) == 4, "what may be left is told"
    assert len(asked) == 5


@pytest.mark.parametrize("server", ["tls"], indirect=True)
def test_an_expired_certificate_is_told_from_credentials_that_are_of_no_use(server, tmp_path):
    server.declines = True
    path = kubeconfig(tmp_path, server)
    with pytest.raises(BadInput, match="its credentials are not valid there"):
        Api(path).check()
    asked = openssl("req", "-new", "-key", "server.key", "-subj", "/CN=late", folder=tmp_path)
    openssl("x509", "-req", "-signkey", "server.key", "-days", "-1", "-out", "late.crt",
            folder=tmp_path, data=asked)  # fmt: skip
    content = json.loads(path.read_text())
    late = base64.b64encode(Path(tmp_path, "late.crt").read_bytes()).decode()
    content["users"][0]["user"]["client-certificate-data"] = late
    path.write_text(json.dumps(content))
    with pytest.raises(BadInput, match=r"its certificate expired on \d{4}-\d\d-\d\d;"):
        Api(path).check()
