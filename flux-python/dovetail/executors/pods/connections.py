# SPDX-License-Identifier: LGPL-3.0-or-later
"""Connections of agents and hub: found dead in time, waited for in time, by names short enough.

Copies of folders have connections of their own, each a thread that waits: without an event loop
between them, TLS gives a block at a time and is four times as fast (`bench hosts`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, Callable, TypeVar

COPIES = "copies.sock"
"""The socket for copies, in the folder of the hub's."""

_T = TypeVar("_T")


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel find out within half a minute that the other side has gone without a word.

    On the same machine it knows at once.
    """
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 10),
        (socket.TCP_KEEPINTVL, 5),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 30000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def stranger() -> ssl.SSLContext:
    """For a connection to whose certificate is looked at afterwards."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def within(limit: float, work: Coroutine[Any, Any, _T]) -> _T:
    """What the work gives, in at most so many seconds; raises asyncio.TimeoutError.

    asyncio.wait_for forgets before Python 3.12 that it was cancelled if the work is done just then
    (github.com/python/cpython/issues/86296): who cancels would wait for its task for ever.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait([task], timeout=limit)
        if not done:
            raise asyncio.TimeoutError
        return task.result()
    finally:
        task.cancel()


@contextlib.contextmanager
def short(path: str) -> Iterator[str]:
    """Another name of a socket, for as long as this lasts: theirs have at most 107 bytes."""
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)


def listen_at(path: str) -> list[socket.socket]:
    """Listen there, in place of who was killed; nothing where the disk takes no sockets."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        with short(path) as name:
            listener.bind(name)
        listener.listen(256)
        return [listener]
    except OSError:
        listener.close()
        return []


class Channel:
    """A connection for one thread, which waits. Another one may end it."""

    def __init__(self, tls: ssl.SSLSocket) -> None:
        self._tls = tls
        self.ended = False

    def fill(self, place: memoryview) -> None:
        """With what comes; EOFError if that is less."""
        while place:
            count = self._tls.recv_into(place)
            if not count:
                raise EOFError
            place = place[count:]

    def write(self, data: bytes) -> None:
        """All of it."""
        self._tls.sendall(data)

    def end(self) -> None:
        """Whoever waits has an error, and nobody waits again."""
        self.ended = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._tls, socket.SHUT_RDWR)  # SSLSocket's own forgets its keys

    def close(self) -> None:
        """Without a word to the other side."""
        self._tls.close()


async def in_own_thread(work: Callable[..., None], *of: object) -> None:
    """Wait for work that waits, perhaps for long; the process may end without it."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def tell(error: BaseException | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def whole() -> None:
        error = None
        try:
            work(*of)
        except Exception as one:  # it is raised where it is waited for
            error = one
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, error)

    threading.Thread(target=whole, daemon=True).start()
    await done
