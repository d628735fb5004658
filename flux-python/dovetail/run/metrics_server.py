# SPDX-License-Identifier: LGPL-3.0-or-later
"""Gives a run's metrics over HTTP to whoever may have them.

Inputs: where to listen, as the user says it, and what renders the metrics. Outputs: answers to
`GET /metrics`. Invariants: it listens before anything of the run is started, or that is bad input;
on a socket that its owner alone can open, or on a TCP address for who knows the token in a file
that its owner alone can read; both are gone when it is closed. Clients are answered one after the
other in a thread of its own, so that no number of them disturbs the run.
"""

from __future__ import annotations

import contextlib
import hmac
import http.server
import re
import secrets
import signal
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from dovetail.core.errors import BadInput
from dovetail.host.private_files import write_private

TOKEN = "metrics-token"
"""The file with the token, in the run's directory."""
KIND = "text/plain; version=0.0.4; charset=utf-8"
PATIENCE = 2.0
"""Seconds that a client may keep the others waiting."""


@dataclass(frozen=True)
class Address:
    """Where to listen: the `path` of a socket, or a `host` and a `port`."""

    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def of(cls, text: str) -> Address:
        """From `unix:PATH` or `ADDRESS:PORT`."""
        if text.startswith("unix:") and text != "unix:":
            return cls(path=text[len("unix:") :])
        host, _, port = text.rpartition(":")
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not host or not (re.fullmatch("[0-9]{1,5}", port) and int(port) < 1 << 16):
            raise BadInput(f"--metrics {text}: unix:PATH or ADDRESS:PORT would be right")
        return cls(host=host, port=int(port))

    def absolute(self) -> str:
        """The same as text, for a process in another folder."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"unix:{Path(self.path).absolute()}" if self.path else f"{host}:{self.port}"

    def listen(self) -> socket.socket:
        """Listen there; raises OSError."""
        if self.path:
            return _listen_at(Path(self.path))
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        family, _, _, _, where = found[0]
        return socket.create_server((str(where[0]), int(where[1])), family=family)


def _listen_at(path: Path) -> socket.socket:
    """Listen on a socket of the file system that others cannot open."""
    made = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket() and not _answers(path):
            path.unlink()  # of a run that was killed
        made.bind(str(path))
        path.chmod(0o600)  # nobody could connect so far, as it does not listen
        made.listen()
    except OSError:
        made.close()
        raise
    return made


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(PATIENCE)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            pass  # somebody is there, who is busy or not for us
        return True


class Server:
    """Listens at once; answers from `start` until `close`. Use as a context manager."""

    def __init__(self, asked: str) -> None:
        """Listen where the user says; BadInput if that cannot be."""
        self._address = Address.of(asked)
        try:
            self._socket = self._address.listen()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise BadInput(f"--metrics {asked}: cannot listen there: {why}") from None
        self._file: Path | None = None
        self._token = "" if self._address.path else secrets.token_hex(32)
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def keep_token(self, directory: Path) -> None:
        """Write the token, where one is needed, before there is a run in the directory.

        BadInput if that cannot be.
        """
        if not self._token:
            return
        file = directory / TOKEN
        try:
            write_private(file, self._token + "\n")
        except OSError as error:
            raise BadInput(f"{file}: cannot be written: {error.strerror}") from None
        self._file = file

    def start(self, render: Callable[[], bytes]) -> str:
        """Answer with what `render` gives, in a thread; says where, and where the token is."""
        if self._address.path:
            told = f"metrics: unix:{self._address.path}"
        else:
            host, port = self._socket.getsockname()[:2]
            host = f"[{host}]" if ":" in host else host
            told = f"metrics: http://{host}:{port}/metrics, with the token in {self._file}"
        answering = _Answering(self._socket, self._token, render)
        self._thread = threading.Thread(target=self._serve, args=(answering,), daemon=True)
        self._thread.start()
        return told

    def _serve(self, answering: _Answering) -> None:
        # A signal must wake the run's own thread, which waits for it.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while not self._closed.is_set():
            try:
                client, address = self._socket.accept()
            except OSError:
                self._closed.wait(1.0)  # as where too many files are open
                continue
            late = threading.Timer(PATIENCE, _cut, [client])  # one that sends byte by byte
            late.daemon = True
            late.start()
            try:
                answering.process_request(client, address)
            except Exception:  # a client that went away, or spoke something else, is no matter
                answering.shutdown_request(client)
            finally:
                late.cancel()

    def close(self) -> None:
        """Listen no more, and remove socket and token."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # which wakes the thread
        if self._thread is not None:
            self._thread.join(PATIENCE / 4)
        self._socket.close()
        for path in (self._address.path, self._file):
            if path:
                Path(path).unlink(missing_ok=True)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cut(client: socket.socket) -> None:
    """End a connection, for both sides; it may have ended."""
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)


class _Answering(http.server.HTTPServer):
    """What answers a connection; the socket is listened on elsewhere."""

    def __init__(self, listening: socket.socket, token: str, render: Callable[[], bytes]) -> None:
        super().__init__(("", 0), _Answer, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.token, self.render = token, render


class _Answer(http.server.BaseHTTPRequestHandler):
    """One request."""

    server: _Answering
    timeout = PATIENCE

    def do_GET(self) -> None:
        """The metrics, for who may have them."""
        given = self.headers.get("Authorization", "")
        wanted = f"Bearer {self.server.token}"
        if self.server.token and not hmac.compare_digest(given.encode(), wanted.encode()):
            self._say(401, b"the token is missing or wrong\n", ("WWW-Authenticate", "Bearer"))
        elif self.path.partition("?")[0] != "/metrics":
            self._say(404, b"there is /metrics\n")
        else:
            self._say(200, self.server.render(), kind=KIND)

    def _say(
        self, code: int, body: bytes, *more: tuple[str, str], kind: str = "text/plain"
    ) -> None:
        self.send_response(code)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), *more):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:  # noqa: ANN401 (as in the base class)
        """Say nothing: standard error is the run's."""

    def version_string(self) -> str:
        """Who answers."""
        return "dovetail"
