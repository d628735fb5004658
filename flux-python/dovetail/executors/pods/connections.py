# SPDX-License-Identifier: LGPL-3.0-or-later
"""Connections of agents and hub: found dead in time, waited for in time, by names short enough."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

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
