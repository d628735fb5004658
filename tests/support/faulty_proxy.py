# SPDX-License-Identifier: LGPL-3.0-or-later
"""A proxy between the controller and a cluster's API that injects the faults of a bad day.

A fake, since a real API server cannot be made to answer so: what it does forward is real.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import itertools
import json
import random
import ssl
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import yaml


class Proxy(http.server.ThreadingHTTPServer):
    """Between the controller and the API: plain HTTP here, and faults as `rate` says."""

    daemon_threads = True

    def __init__(self, kubeconfig):
        super().__init__(("127.0.0.1", 0), Handler)
        content = yaml.safe_load(Path(kubeconfig).read_text())
        folder = Path(kubeconfig).parent
        self.upstream = urlsplit(content["clusters"][0]["cluster"]["server"])
        self.context = ssl.create_default_context(cafile=str(folder / "pki/ca.crt"))
        self.context.load_cert_chain(folder / "pki/admin.crt", folder / "pki/admin.key")
        self.random = random.Random(7)
        self.rate = 0.0
        self.deaf = False  # whether watches are silent from now on
        self.once: tuple[str, str] | None = None  # the next of that verb and path gets no answer
        self.gate = threading.Event()  # while it is not set, nothing is done and nobody answers
        self.gate.set()
        self.held = 0
        self.faults = itertools.cycle(FAULTS)  # one after the other, so that each has its turn
        self.count = itertools.count(1)
        self.done: set[str] = set()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def kubeconfig(self, path):
        content = {
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {
                "server": f"http://127.0.0.1:{self.server_address[1]}"}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }  # fmt: skip
        path.write_text(json.dumps(content))
        return str(path)


FAULTS = {
    "busy": (429, "TooManyRequests"),
    "broken": (500, "InternalError"),
    "conflict": (409, "Conflict"),
    "silent": (0, ""),
    "lost": (0, ""),
}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def forward(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        draw, proxy = self.server.random.random(), self.server
        # By chance, but often enough that each is there in a short run.
        rare = proxy.rate and len(proxy.done) < len(FAULTS) and next(proxy.count) % 6 == 0
        fault = next(proxy.faults) if rare or draw < proxy.rate else ""
        if proxy.once and self.command == proxy.once[0] and proxy.once[1] in self.path:
            fault, proxy.once = "silent", None
        if fault:
            proxy.done.add(fault)
        if not proxy.gate.is_set():
            proxy.held += 1
            proxy.gate.wait()
            self.close_connection = True
            return
        if fault == "silent":  # nothing is done, and nobody answers
            time.sleep(12)
            self.close_connection = True
            return
        if fault and FAULTS[fault][0]:
            code, reason = FAULTS[fault]
            self.reply(code, json.dumps({"kind": "Status", "code": code, "reason": reason,
                                         "message": f"injected {fault}"}).encode())  # fmt: skip
            return
        link = http.client.HTTPSConnection(
            proxy.upstream.hostname, proxy.upstream.port, context=proxy.context
        )
        with contextlib.closing(link), contextlib.suppress(OSError, http.client.HTTPException):
            kind = {"Content-Type": self.headers.get("Content-Type", "application/json")}
            link.request(self.command, self.path, body or None, kind)
            answer = link.getresponse()
            if "watch=1" in self.path:
                return self.stream(answer)
            text = answer.read()
            if fault == "lost":  # it was done, and the answer is lost
                self.close_connection = True
                return
            self.reply(answer.status, text)

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = forward

    def reply(self, code, text):
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def stream(self, answer):
        """In chunks, as the API server does it."""
        self.send_response(answer.status)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while chunk := answer.read1(65536):
            if not self.server.deaf:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                self.wfile.flush()
            if self.server.random.random() < self.server.rate:
                self.close_connection = True
                return  # watches break too
        self.wfile.write(b"0\r\n\r\n")
