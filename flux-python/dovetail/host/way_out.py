# SPDX-License-Identifier: LGPL-3.0-or-later
"""The way out of a network namespace that sees nothing of its machine's network.

A process outside serves a Unix socket, by its file: whoever connects there from inside says in a
line which address and port it wants, and from then on has that connection. So a process in there
reaches what a user of the machine reaches, and nothing outside reaches in.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

PATH = "/run/dovetail/way-out"
"""Where a node's processes find the socket, in the node's own /run."""

SOCKET = "run/way-out"
"""Where it is served, in the node's folder."""

_BLOCK = 1 << 16


async def carry(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int
) -> None:
    """Make a connection there, and carry what either side says to the other until both ended."""

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(_BLOCK):
                target.write(data)
                await target.drain()
        except OSError:
            pass
        finally:
            target.close()

    try:
        there_in, there_out = await asyncio.open_connection(host, port)
    except (OSError, OverflowError, ValueError):  # the last two of no port, and of no name
        writer.close()
        return
    await asyncio.gather(copy(reader, there_out), copy(there_in, writer))


async def _handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    host = port = ""
    with contextlib.suppress(OSError, ValueError):  # it went, or its line has no end
        host, _, port = (await reader.readline()).decode().strip().rpartition(":")
    if port.isdigit():
        await carry(reader, writer, host, int(port))
    else:
        writer.close()


async def _serve(listening: socket.socket) -> None:
    server = await asyncio.start_unix_server(_handle, sock=listening)
    await server.serve_forever()


def serve(listening: socket.socket) -> None:
    """Serve the socket for ever."""
    asyncio.run(_serve(listening))


def connected(path: str, address: str, port: int) -> socket.socket:
    """A connection to `address` by the socket at `path`. Raises OSError if nobody serves that."""
    found = socket.socket(socket.AF_UNIX)
    try:
        found.connect(path)
        found.sendall(f"{address}:{port}\n".encode())
    except BaseException:
        found.close()
        raise
    return found
