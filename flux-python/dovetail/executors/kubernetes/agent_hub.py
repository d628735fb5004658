# SPDX-License-Identifier: LGPL-3.0-or-later
"""The controller's end of the agents' connections.

Inputs: what agents say (`messages`), and what the executor tells them. Outputs: messages to take,
in order, each with the name of its node. A thread does all the talking, so no call here waits.
Folders are copied over connections of their own (`copies`).

Invariants: it listens on one address, and on a socket in its folder for nodes of this machine whose
network has no way to that address; TLS, and not a word to whoever does not know the token;
a Result is passed on once; what `tell` said reaches a node whose agent was away, when it is back.
The folder keeps certificate, key, token and port, so that a hub made from it again is the same.
It knows nothing of what ended before, so the executor has it answer the first Ping of each node.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import os
import secrets
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import get_args

from dovetail.core.errors import WorkFailed
from dovetail.core.messages import MessageError
from dovetail.executors.kubernetes.copies import Copies
from dovetail.executors.kubernetes.rank_samples import Clocks
from dovetail.executors.pods import connections, messages
from dovetail.host.private_files import write_private
from dovetail.host.self_signed import self_signed

_PATIENCE = 10.0  # seconds for the handshake, and again for the token
_FROM_AGENTS = (
    messages.Pod, messages.Started, messages.Result, messages.Lost, messages.Sample,
    messages.Used, messages.Counts, messages.Weights, messages.Spawn, messages.Spawned,
    messages.Seen, messages.Staged, messages.Prepared, messages.Broker, messages.Ping,
)  # fmt: skip


class Hub:
    """Listens until it is closed; WorkFailed if it cannot.

    `port` 0 is the one of the last time, unless somebody else has it now. `folder` is private,
    and made if it is not there.
    """

    def __init__(self, address: str, folder: Path, port: int = 0) -> None:
        self.address = address
        self._folder = folder.resolve()  # as pods see it
        context, self._token, last = _credentials(folder, address)
        self._lock = threading.Lock()
        self._heard: list[tuple[str, messages.Message]] = []
        self._bell, self._bell_end = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._bell_end, False)
        self._links: dict[str, asyncio.StreamWriter] = {}
        self._places: dict[str, dict[int, str]] = {}  # simulation to group to node
        self._told: dict[str, dict[type, messages.Message]] = {}
        self._again = bool(last)  # made from a folder that was there
        self._unanswered: set[str] = set()  # nodes whose Ping comes too early for us alone
        self._results: set[str] = set()
        # What pods say to each other, of each simulation: it is repeated to whoever comes back.
        self._passed: dict[str, dict[tuple[object, ...], messages.Spawn | messages.Spawned]] = {}
        self._met: dict[str, messages.Met] = {}  # by simulation,
        self._asking: dict[str, set[str]] = {}  # and the nodes that are to be told
        self.clocks = Clocks()  # of the nodes that have sent samples
        self._look: messages.Look | None = None
        self._seen: dict[str, list[str]] = {}
        self._loop = asyncio.new_event_loop()
        self._ending = self._loop.create_future()
        self._closed = False
        listener = socket.socket()
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address, port or last))
            except OSError as error:
                if port or error.errno != errno.EADDRINUSE:
                    raise
                listener.bind((address, 0))  # agents read in their secret where we are now
            listener.listen(256)
            self.copies = Copies(
                address, str(self._folder / connections.COPIES), context, self._token
            )
        except OSError as error:
            listener.close()
            raise WorkFailed(
                f"cannot listen on {address}:{port or last}: {error.strerror}"
            ) from error
        self.port: int = listener.getsockname()[1]
        write_private(folder / "port", f"{self.port}\n")
        self._socket = self._folder / "hub.sock"
        listeners = [listener, *connections.listen_at(str(self._socket))]
        self._thread = threading.Thread(
            target=self._work, args=(listeners, context), name="hub", daemon=True
        )
        self._thread.start()

    def credentials(self) -> dict[str, str]:
        """The files that an agent needs, by name; secret."""
        return {
            "address": f"{self.address}:{self.port}",
            "socket": str(self._socket),
            "certificate": (self._folder / "hub.crt").read_text(),
            "token": self._token,
        }

    # --- for the executor's thread ---

    def take(self) -> list[tuple[str, messages.Message]]:
        """What was heard since the last call, oldest first, and from which node."""
        with self._lock:
            heard, self._heard = self._heard, []
            with contextlib.suppress(BlockingIOError):  # samples alone came
                os.read(self._bell, 1 << 16)
        return heard

    def fileno(self) -> int:
        """Readable when there is something to take, other than samples.

        These come four times a second from each node, and whoever wants them looks when they like:
        else a run on many nodes would wake for each of them.
        """
        return self._bell

    def nodes(self) -> set[str]:
        """The nodes whose agents are connected."""
        with self._lock:
            return set(self._links)

    def send(self, node: str, message: messages.Message) -> bool:
        """Say something to one node; False if its agent is not connected."""
        with self._lock:
            there = node in self._links
        if there:
            self._do(lambda: self._send(node, message))
        return there

    def tell(self, message: messages.Order) -> None:
        """Say something to every node that has, or gets, pods of the message's simulation."""
        self._do(lambda: self._tell(message))

    def answer(self, node: str) -> None:
        """Say that we are there: what is to be said of all that the node has named was told."""
        self._do(lambda: self._answer(node))

    def look(self, folders: Mapping[str, str], store: str = "") -> None:
        """Ask all nodes, those that come later too, which folders they do not see; see `unseen`.

        Those that saw all of an earlier look see all of this one, which has no other folders.
        """
        with self._lock:
            self._look = messages.Look(dict(folders), store)
            self._seen = {node: names for node, names in self._seen.items() if not names}
            nodes = list(self._links)
        for node in nodes:
            self.send(node, self._look)

    def unseen(self) -> dict[str, list[str]]:
        """The folders that are not there, of each node that has answered the last `look`."""
        with self._lock:
            return dict(self._seen)

    def close(self, forget: bool = False) -> None:
        """End the listeners and all connections; with `forget` remove the folder too."""
        if not self._closed:
            self._closed = True
            self.copies.close()
            self._loop.call_soon_threadsafe(self._ending.set_result, None)
            self._thread.join()
            with contextlib.suppress(OSError):
                self._socket.unlink()
            os.close(self._bell)
            os.close(self._bell_end)
        if forget:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _do(self, work: Callable[[], None]) -> None:
        if not self._closed:
            self._loop.call_soon_threadsafe(work)

    # --- in the hub's own thread ---

    def _work(self, listeners: Sequence[socket.socket], context: ssl.SSLContext) -> None:
        self._loop.run_until_complete(self._serve(listeners, context))
        self._loop.close()

    async def _serve(self, listeners: Sequence[socket.socket], context: ssl.SSLContext) -> None:
        servers = [
            await asyncio.start_server(
                self._welcome, sock=one, ssl=context, ssl_handshake_timeout=_PATIENCE
            )
            for one in listeners
        ]
        await self._ending
        for server in servers:
            server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection from its first byte to its last."""
        decoder = messages.Decoder(messages.FIRST)
        try:
            hello = await connections.within(_PATIENCE, self._authenticate(reader, decoder))
            if hello is None:
                return
            connections.keep_alive(writer.get_extra_info("socket"))
            node = hello.node
            self._join(node, writer)
            try:
                while True:
                    data = await reader.read(1 << 16)
                    if not data:
                        return
                    for message in decoder.feed(data):
                        self._hear(node, message)
            finally:
                self._leave(node, writer)
        except (MessageError, OSError, EOFError, asyncio.TimeoutError):
            pass  # whoever that was may try again
        finally:
            writer.transport.abort()

    async def _authenticate(
        self, reader: asyncio.StreamReader, decoder: messages.Decoder
    ) -> messages.Hello | None:
        """The first message, if it has the token."""
        (size,) = messages.LENGTH.unpack(head := await reader.readexactly(messages.LENGTH.size))
        decoder.feed(head)  # which refuses one that is too long
        hello = decoder.feed(await reader.readexactly(size))[0]
        decoder.longest = messages.LONGEST
        if not isinstance(hello, messages.Hello):
            return None
        known = hmac.compare_digest(hello.token.encode(), self._token.encode())
        return hello if known else None

    def _join(self, node: str, writer: asyncio.StreamWriter) -> None:
        before = self._links.get(node)
        if before is not None:  # the agent knows better than we that this one has ended
            self._leave(node, before)
            before.transport.abort()
        with self._lock:
            self._links[node] = writer
            self.clocks.joined(node)
            look = self._look
        if self._again:
            self._unanswered.add(node)
        self._post(node, messages.Joined())
        if look is not None:
            self._send(node, look)

    def _leave(self, node: str, writer: asyncio.StreamWriter) -> None:
        if self._links.get(node) is writer:
            with self._lock:
                del self._links[node]
            self._post(node, messages.Gone())

    def _hear(self, node: str, message: messages.Message) -> None:
        if not isinstance(message, _FROM_AGENTS):
            raise MessageError(f"{type(message).__name__} is not for an agent to say")
        if isinstance(message, messages.Ping) and node not in self._unanswered:
            self._answer(node)
            return
        if isinstance(message, messages.Seen):
            with self._lock:
                self._seen[node] = message.missing
        told = self._told.get(getattr(message, "simulation", ""), {})
        if isinstance(message, (messages.Spawn, messages.Spawned)):
            if messages.End not in told:
                self._pass_on(message)
            return
        if isinstance(message, messages.Broker):
            if messages.End not in told:
                self._meet(node, message)
            return
        if isinstance(message, messages.Pod):
            self._places.setdefault(message.simulation, {})[message.group] = node
            for kind in get_args(messages.Order):
                if kind in told:
                    self._send(node, told[kind])
            for passed in self._passed.get(message.simulation, {}).values():
                if passed.group == message.group:
                    self._send(node, passed)
        elif isinstance(message, messages.Lost):  # which is to hear of the end like a pod that is
            self._places.setdefault(message.simulation, {}).setdefault(message.group, node)
        if isinstance(message, (messages.Result, messages.Lost)) and messages.End in told:
            self._send(node, told[messages.End])
            return
        if isinstance(message, messages.Result):
            if message.simulation in self._results:
                return
            self._results.add(message.simulation)
        self._post(node, message)

    def _answer(self, node: str) -> None:
        self._unanswered.discard(node)
        self._send(node, messages.Pong())

    def _pass_on(self, message: messages.Spawn | messages.Spawned) -> None:
        """From one rank group to another, whose node may be away, or not known yet."""
        origin = message.origin if isinstance(message, messages.Spawn) else message.group
        known = self._passed.setdefault(message.simulation, {})
        known[type(message), message.group, origin, message.number] = message
        self._send(self._places.get(message.simulation, {}).get(message.group, ""), message)

    def _meet(self, node: str, asked: messages.Broker) -> None:
        """Tell those who ask where a simulation's first broker listens, once it has said so."""
        name = asked.simulation
        self._asking.setdefault(name, set()).add(node)
        if asked.address:
            self._met[name] = messages.Met(name, asked.address)
        if name in self._met:
            for one in self._asking.pop(name):
                self._send(one, self._met[name])

    def _tell(self, message: messages.Order) -> None:
        if isinstance(message, messages.End):
            self._told[message.simulation] = {}
            self._passed.pop(message.simulation, None)
            self._met.pop(message.simulation, None)
            self._asking.pop(message.simulation, None)
        self._told.setdefault(message.simulation, {})[type(message)] = message
        for node in sorted(set(self._places.get(message.simulation, {}).values())):
            self._send(node, message)

    def _send(self, node: str, message: messages.Message) -> None:
        writer = self._links.get(node)
        if writer is not None and not writer.is_closing():
            writer.write(messages.encode(message))

    def _post(self, node: str, message: messages.Message) -> None:
        with self._lock:
            self._heard.append((node, message))
            if isinstance(message, (messages.Sample, messages.Used)):
                self.clocks.heard(node, message.now, time.monotonic())
                return
            with contextlib.suppress(BlockingIOError):  # full: it is readable
                os.write(self._bell_end, b"!")


def _credentials(folder: Path, address: str) -> tuple[ssl.SSLContext, str, int]:
    """What the folder holds, made first if it does not; the last port is 0 if there was none."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        if not (folder / "token").exists():  # which is written last
            self_signed(folder, "hub", address)
            write_private(folder / "token", secrets.token_hex(32))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(folder / "hub.crt", folder / "hub.key")
        port = folder / "port"
        last = int(port.read_text()) if port.exists() else 0
        return context, (folder / "token").read_text().strip(), last
    except (OSError, ValueError) as error:
        raise WorkFailed(f"{folder}: {error}") from error
