# SPDX-License-Identifier: LGPL-3.0-or-later
"""The controller's end of the connections over which nodes copy folders.

Inputs: folders that are opened to nodes, and what agents ask for (`messages.Transfer`). Outputs:
copies, by `pods.staging`, and how far they are.

Invariants: it listens where the hub does, on a port of its own, and on a socket in the hub's
folder; TLS, and not a word to whoever does not know the token; a node gets and changes only files
of folders that are open to it; once it is closed, no copy goes on, and no part of one is left,
and what a killed controller left goes before the first copy once the folder is opened again.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from dovetail.core.messages import MessageError
from dovetail.executors.pods import connections, messages, staging

_PATIENCE = 10.0  # seconds for each step until the token is known
_PAUSE = 0.1  # seconds to wait where no connection can be taken
_WRITES = 5.0  # seconds that a disk may need for a last block


@dataclass
class _Folder:
    """One that is open: where it is, and which way it may be copied; `links` serve it.

    `parts` says that there may be some that a killed controller left.
    """

    path: str
    way: str
    parts: bool
    links: set[connections.Channel] = field(default_factory=set)


class Copies:
    """Listens until it is closed. OSError if it cannot."""

    def __init__(self, address: str, path: str, context: ssl.SSLContext, token: str) -> None:
        self._context = context
        self._token = token
        self._lock = threading.Lock()
        self._sweep = threading.Lock()  # of who looks for parts, which may take long
        self._closed = False
        self._links: dict[threading.Thread, connections.Channel] = {}
        self._folders: dict[str, _Folder] = {}  # by what nodes call them
        self._listings: dict[str, staging.Listing] = {}
        self._held: dict[str, str] = {}  # files of cases, by their digests
        self._copied: dict[tuple[str, str], tuple[int, int]] = {}
        listener = socket.create_server((address, 0), backlog=256)
        self.port: int = listener.getsockname()[1]
        self._path = Path(path)
        self._listeners = [listener, *connections.listen_at(path)]
        for one in self._listeners:
            threading.Thread(target=self._accept, args=(one,), name="copies", daemon=True).start()

    def open(self, folder: str, path: str, way: str) -> None:
        """Let nodes have a folder ("in"), or change it too ("out"), by this name of it."""
        with self._lock:
            self._folders[folder] = _Folder(path, way, way == "out")

    def shut(self, folder: str) -> None:
        """Let no node have it any more, or change it; copies that are under way end."""
        with self._lock:
            shut = self._folders.pop(folder, None)
            if shut and shut.way == "out":
                self._listings.pop(shut.path, None)
            for link in shut.links if shut else ():
                link.end()

    def copied(self, node: str, folder: str) -> tuple[int, int]:
        """Bytes that have gone to a node or come from it, of so many; zeros if none have yet."""
        with self._lock:
            return self._copied.get((node, folder), (0, 0))

    def close(self) -> None:
        """End the listeners and all copies."""
        with self._lock:
            self._closed = True
            links = dict(self._links)
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes who waits there
            listener.close()
        with contextlib.suppress(OSError):
            self._path.unlink()
        for link in links.values():
            link.end()
        for thread in links:
            thread.join(_WRITES)

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                connection, _ = listener.accept()
                connections.keep_alive(connection)
                connection.settimeout(_PATIENCE)
                tls = self._context.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
            except OSError:  # it is closed, the other side has gone, or too many files are open
                time.sleep(_PAUSE)
                continue
            link = connections.Channel(tls)
            thread = threading.Thread(target=self._serve, args=(tls, link), name="copy")
            thread.daemon = True
            with self._lock:
                if self._closed:
                    return link.close()
                try:
                    thread.start()
                    self._links[thread] = link
                except RuntimeError:  # there are too many threads
                    link.close()

    def _serve(self, tls: ssl.SSLSocket, link: connections.Channel) -> None:
        """One connection; what goes wrong, as where a folder is not open, both sides know."""
        try:
            tls.do_handshake()
            asked = self._asked(link)
            if asked is not None:
                tls.settimeout(None)
                self._copy(asked, link)
        except (staging.StagingError, OSError, EOFError, KeyError, TypeError, ValueError):
            pass  # whoever that was may try again
        except RuntimeError:  # there are too many threads
            pass
        finally:
            link.close()
            with self._lock:
                self._links.pop(threading.current_thread(), None)

    def _asked(self, link: connections.Channel) -> messages.Transfer | None:
        """The first message, if it has the token."""
        decoder = messages.Decoder(messages.FIRST)
        link.fill(memoryview(head := bytearray(messages.LENGTH.size)))
        decoder.feed(bytes(head))  # which refuses one that is too long
        (size,) = messages.LENGTH.unpack(head)
        link.fill(memoryview(text := bytearray(size)))
        found = decoder.feed(bytes(text))
        asked = found[0] if found else None
        if not isinstance(asked, messages.Transfer):
            raise MessageError("not the message that is due")
        known = hmac.compare_digest(asked.token.encode(), self._token.encode())
        return asked if known else None

    def _copy(self, asked: messages.Transfer, link: connections.Channel) -> None:
        with self._lock:
            folder = self._folders.get(asked.folder, _Folder("", "", False))
            folder.links.add(link)
        path, most = folder.path, folder.way

        def progress(done: int, total: int) -> None:
            with self._lock:
                self._copied[asked.node, asked.folder] = done, total

        try:
            if folder.parts:
                with self._sweep:
                    if folder.parts:
                        staging.remove_parts(path)
                    folder.parts = False
            if asked.way == "in":
                with self._lock:
                    known = self._listings.get(path)  # many simulations may have one case
                sent = staging.send(path, None, link, known, progress)
                with self._lock:
                    if asked.folder in self._folders:
                        self._listings[path] = sent
                    if most == "in":
                        self._held = {**self._held, **staging.by_digest(path, sent)}
            else:
                target = path if most == "out" else ""
                staging.receive(target, link, progress, self._held)
        finally:
            with self._lock:
                self._copied.pop((asked.node, asked.folder), None)
                folder.links.discard(link)
