# SPDX-License-Identifier: LGPL-3.0-or-later
"""A run's agent on one node, between the controller's hub and the pods.

Inputs: what hub and entrypoints say (`messages`), and the rank pages in the session directory.
Outputs: the same the other way, one Sample per period with what changed, and the control pages.

Invariants: agent, hub and entrypoints may each die and come back, and nothing is lost: what is not
answered is said again on every new connection. A dead entrypoint is known by the lock that it held,
not by a connection that ended. What a dead pod left of its simulation on this node is removed; so
is the session, by the last to leave it, and the store of folders that are copied, if there is one.
While neither hub nor Kubernetes API answers, ranks stand still: another node may have been given
what they do, in the same folders. Without a controller for DOVETAIL_ORPHAN_S all is ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import fcntl
import json
import os
import re
import signal
import socket
import ssl
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

from dovetail.core import protocol
from dovetail.core.messages import MessageError
from dovetail.executors.pods import connections, messages, orphan_limit, staging, weights
from dovetail.executors.pods.samples import Reader
from dovetail.host import way_out
from dovetail.host.cgroups import Group
from dovetail.host.private_files import write_private
from dovetail.host.session import (
    end_simulation,
    join_session,
    leave_session,
    remove_simulation,
    remove_tree,
    shared_session,
    sweep_sessions,
)
from dovetail.mpi import page
from dovetail.mpi.control_page import Control

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

PERIOD = 0.25  # seconds between looks at the pages
COUNT = 5.0  # seconds between looks at what keeps ranks from their cores
FIND = 1.0  # seconds between two looks for a pod's control group
UNTOLD = 1.0  # seconds after which a pod's CPU is told of whose ranks' pages nothing is new
SHORT_TIMEOUTS = (100, 500)  # microseconds; for networks of which the kernel hears nothing
ASK = 2.0  # seconds between two questions whether the hub is there, or else the API
CUT_OFF = 15.0  # without an answer of either, after which ranks stand still; a run waits for longer
SETTLED = 60.0  # of an API's answers alone, in which a node that is back ends pods it was to end
_ANSWER = 4.0  # for the API to say anything, either way
_REACH = 10.0  # seconds for a connection to the hub, either way
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}")
_LINKS = 40  # on the way to one folder, as path_resolution(7) has it
_ORPHANED = 128 + signal.SIGTERM
_ANSWERS = 8  # of copies that are done, kept for a controller that may not have heard them


@dataclass
class Place:
    """One rank group on this node; `writer` is None while its entrypoint is not connected.

    In a pod that earlier simulations had, `earlier` is what kept their ranks from their cores, as
    in messages.Counts.
    """

    pod: messages.Pod
    writer: asyncio.StreamWriter | None = None
    cgroup: str = ""  # its pod's folder, once it was looked for
    used: float = 0.0  # CPU seconds of its pod when its ranks' pages last told anything
    earlier: list[float] = field(default_factory=list)


@dataclass
class Simulation:
    """One simulation, as far as it is on this node."""

    name: str
    directory: str
    reader: Reader
    places: dict[int, Place] = field(default_factory=dict)
    told: dict[type, messages.Message] = field(default_factory=dict)  # what the hub must hear
    lost: dict[int, messages.Lost] = field(default_factory=dict)
    spawns: dict[tuple[type, int], messages.Message] = field(default_factory=dict)
    stages: dict[int, messages.Staged | None] = field(default_factory=dict)  # None: under way
    unkept: dict[str, staging.Listing] = field(default_factory=dict)  # records without room
    links: set[connections.Channel] = field(default_factory=set)  # over which they come and go
    control: Control | None = None
    end: messages.End | None = None
    told_at: float = 0.0  # CLOCK_MONOTONIC; when a page of it last told anything
    find_at: float = 0.0  # the same; when its pods' folders are looked for next


def dead(file: str) -> bool:
    """Whether the entrypoint that locked this file has ended."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return True  # it has removed it
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(handle)


def beneath(root: str, path: str) -> str:
    """Where an absolute path leads on a machine whose root folder is `root`, without links.

    Links that are absolute lead from `root`, as after chroot(2), and none leads out of it. OSError
    where a link cannot be read, or there are more of them than Linux would follow.
    """
    found: list[str] = []
    left, links = path.split("/"), 0
    while left:
        name = left.pop(0)
        here = "/".join([root, *found, name])
        if name == "..":
            found = found[:-1]
        elif name in ("", "."):
            continue
        elif os.path.islink(here):
            links += 1
            if links > _LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = os.readlink(here)
            found = [] if target.startswith("/") else found
            left = target.split("/") + left
        else:
            found.append(name)
    return "/".join([root, *found])


class Agent:
    """See above. `credentials` is a folder with the files that `Hub.credentials` gives.

    `machine` is where the node's own root folder is.
    """

    def __init__(
        self, session: str, node: str, credentials: Path, cgroups: str, machine: str
    ) -> None:
        self.session = session
        self.node = node
        self.credentials = credentials
        self.cgroups = cgroups
        self.machine = machine
        self.store = ""  # where folders are copied to, as we see it
        self.tasks: set[asyncio.Task[None]] = set()
        self.hub: asyncio.StreamWriter | None = None
        self.seen = time.monotonic()  # when there was a hub
        self.limit = orphan_limit()
        self.answered = time.monotonic()  # when the hub was there, or the API
        self.api_since = 0.0  # when it began to answer, if it does where the hub does not
        self.reachable = False  # whether the API ever answered: else its silence says nothing
        self.cut_off: bool | None = None  # None: nobody has answered us yet
        self.count_at = 0.0
        self.simulations: dict[str, Simulation] = {}
        self.brokers: dict[asyncio.StreamWriter, messages.Broker] = {}  # that are being prepared

    async def run(self) -> None:
        """Work until a signal, or until nobody wants anything any more."""
        ending = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ending.set)
        self._find()
        path = self.session + "/agent.sock"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # an earlier agent's
        server = await asyncio.start_unix_server(self._serve, path)
        tasks = [
            asyncio.create_task(work)
            for work in (ending.wait(), self._connect(), self._ask(), self._watch(ending))
        ]
        done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        server.close()
        for task in rest:
            task.cancel()
        for one in self.simulations.values():  # before the store goes, which nobody takes for news
            one.end = one.end or messages.End(one.name, _ORPHANED)
            for link in list(one.links):
                link.end()
        for task in done:
            task.result()  # raises what ended it

    # --- entrypoints ---

    def _find(self) -> None:
        """The simulations that an earlier agent of this session knew; their pods will call."""
        for name in os.listdir(self.session):
            directory = os.path.join(self.session, name)
            if _NAME.fullmatch(name) and os.path.isdir(directory):
                one = self._simulation(name)
                for file in os.listdir(directory):
                    if re.fullmatch(r"pod\.\d+", file):
                        with contextlib.suppress(OSError):  # it leaves this moment
                            group, uid = int(file[4:]), Path(directory, file).read_text()
                            one.places[group] = Place(messages.Pod(name, group, uid))

    def _simulation(self, name: str) -> Simulation:
        if not _NAME.fullmatch(name):
            raise MessageError(f"{name!r} is no name of a simulation")
        if name not in self.simulations:
            directory = os.path.join(self.session, name)
            self.simulations[name] = Simulation(name, directory, Reader(directory))
        return self.simulations[name]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One entrypoint, or what prepares its broker, from its first message to its last."""
        place: Place | None = None
        decoder = messages.Decoder()
        try:
            while data := await reader.read(1 << 16):
                for message in decoder.feed(data):
                    if isinstance(message, messages.Pod):
                        place = self._admit(message, writer)
                    elif isinstance(message, messages.Broker):
                        self.brokers[writer] = message
                        self._report(message)
                    elif place is not None:
                        self._from_entrypoint(message)
        except (OSError, MessageError):
            pass  # it comes again, or `_check_places` finds that it is dead
        finally:
            self.brokers.pop(writer, None)
            if place is not None and place.writer is writer:
                place.writer = None
            writer.transport.abort()

    def _admit(self, pod: messages.Pod, writer: asyncio.StreamWriter) -> Place:
        one = self._simulation(pod.simulation)
        place = one.places[pod.group] = Place(pod, writer, used=pod.used)
        if pod.used:
            one.find_at = 0.0
            self._find_folders(one)
            place.earlier = weights.counts(place.cgroup) if place.cgroup else []
        directory = Path(one.directory)
        if one.control is None and not (directory / "control").exists():
            with contextlib.suppress(OSError, page.PageError):  # full: ranks wait as shipped
                one.control = Control.create(directory, protocol.WaitPolicy())
        self._report(pod)
        if one.end:
            self._say(place, one.end)
        elif self.cut_off is not None:
            self._say(place, messages.Fence(one.name, self.cut_off))
        return place

    def _from_entrypoint(self, message: messages.Message) -> None:
        if isinstance(message, (messages.Started, messages.Prepared, messages.Result)):
            self._simulation(message.simulation).told[type(message)] = message
            if isinstance(message, messages.Result):
                self._sample()  # the last iterations come before the end
            self._report(message)
        elif isinstance(message, (messages.Spawn, messages.Spawned)):
            self._relay(message)
        elif isinstance(message, messages.Lost):
            self._report(message)

    def _relay(self, message: messages.Spawn | messages.Spawned) -> None:
        """Pass it on to its group, here or elsewhere; it is kept for a hub that comes later.

        One that is here, and has not called since we came, hears it from the hub once it has.
        """
        one = self._simulation(message.simulation)
        place = one.places.get(message.group)
        if place is not None and place.writer is not None:
            self._say(place, message)
        else:
            one.spawns[type(message), message.number] = message
            self._report(message)

    def _say(self, place: Place, message: messages.Message) -> None:
        if place.writer is not None and not place.writer.is_closing():
            place.writer.write(messages.encode(message))

    # --- the hub ---

    def _report(self, message: messages.Message) -> None:
        if self.hub is not None and not self.hub.is_closing():
            self.hub.write(messages.encode(message))

    async def _connect(self) -> None:
        """Be connected with the hub, again and again."""
        pause = 0.1
        while True:
            with contextlib.suppress(OSError, EOFError, ValueError, asyncio.TimeoutError):
                reader, writer = await self._dial()
                try:
                    self.hub = writer
                    self._introduce()
                    pause = 0.1
                    decoder = messages.Decoder()
                    while data := await reader.read(1 << 16):
                        for message in decoder.feed(data):
                            self._from_hub(message)
                except MessageError:
                    pass
                finally:
                    self.hub = None
                    self.seen = time.monotonic()
                    writer.transport.abort()
            await asyncio.sleep(pause)
            pause = min(2.0, 2 * pause)

    def _place(self) -> tuple[str, int, str]:
        """Address and port of the hub, and its socket, which is for where no way leads to that.

        This is so where the node has a network of its own on the hub's machine. On another one only
        the way out of that network is left.
        """
        address, _, port = (self.credentials / "address").read_text().strip().rpartition(":")
        return address, int(port), self.machine + (self.credentials / "socket").read_text().strip()

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the hub."""
        address, port, path = self._place()
        context = connections.stranger()
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            far = asyncio.open_connection(address, port, ssl=context)
            return self._trusted(*await connections.within(_REACH, far))
        with contextlib.suppress(OSError, asyncio.TimeoutError), connections.short(path) as path:
            near = asyncio.open_unix_connection(path, ssl=context, server_hostname="")
            return self._trusted(*await connections.within(_REACH, near))
        led = way_out.connected(self.machine + way_out.PATH, address, port)
        out = asyncio.open_unix_connection(sock=led, ssl=context, server_hostname="")
        return self._trusted(*await connections.within(_REACH, out))

    def _trusted(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            self._trust(writer.get_extra_info("ssl_object"))
        except OSError:
            writer.transport.abort()
            raise
        connections.keep_alive(writer.get_extra_info("socket"))
        return reader, writer

    def _trust(self, there: ssl.SSLObject | ssl.SSLSocket) -> None:
        """ConnectionError unless whoever is there has the very certificate that we were given.

        That it is the very one is a stricter test than a signature, and needs no right clock.
        """
        wanted = ssl.PEM_cert_to_DER_cert((self.credentials / "certificate").read_text())
        if there.getpeercert(binary_form=True) != wanted:
            raise ConnectionError("a stranger listens there")

    def _dial_copies(self, port: int) -> ssl.SSLSocket:
        """A connection for one folder."""
        address, _, path = self._place()
        with contextlib.suppress(OSError):
            return self._secured(socket.create_connection((address, port), _REACH))
        with contextlib.suppress(OSError), contextlib.ExitStack() as undone:
            place = f"{os.path.dirname(path)}/{connections.COPIES}"
            near = undone.enter_context(socket.socket(socket.AF_UNIX))
            near.settimeout(_REACH)
            near.connect(undone.enter_context(connections.short(place)))
            return self._secured(near)
        return self._secured(way_out.connected(self.machine + way_out.PATH, address, port))

    def _secured(self, connection: socket.socket) -> ssl.SSLSocket:
        with contextlib.ExitStack() as undone:
            undone.enter_context(connection)
            tls = undone.enter_context(connections.stranger().wrap_socket(connection))
            self._trust(tls)
            connections.keep_alive(tls)
            tls.settimeout(None)
            undone.pop_all()
            return tls

    def _introduce(self) -> None:
        """Say who we are and all that a hub must know, since it may be a new one."""
        self._report(messages.Hello(self.node, (self.credentials / "token").read_text().strip()))
        for asked in self.brokers.values():
            self._report(asked)
        for one in self.simulations.values():
            one.reader.forget()
            for place in one.places.values():
                if place.writer is not None:
                    self._report(place.pod)
            staged = filter(None, one.stages.values())
            for message in (*one.told.values(), *one.lost.values(), *one.spawns.values(), *staged):
                self._report(message)
        self._report(messages.Ping())

    def _from_hub(self, message: messages.Message) -> None:
        if isinstance(message, messages.Check):
            self._report(messages.Weights(weights.read(self.cgroups, message.uids)))
        elif isinstance(message, messages.Pong):
            self.answered = time.monotonic()
            self._go_on()
        elif isinstance(message, messages.Look):
            self._begin(self._look(message))
        elif isinstance(message, messages.Met):
            for writer, asked in self.brokers.items():
                if asked.simulation == message.simulation and not writer.is_closing():
                    writer.write(messages.encode(message))
        elif isinstance(message, messages.Stage):
            one = self.simulations.get(message.simulation)
            if one and message.number not in one.stages:
                one.stages[message.number] = None
                self._begin(self._stage(one, message))
            elif one and (done := one.stages[message.number]):
                self._report(done)
        elif isinstance(message, (messages.Spawn, messages.Spawned)):
            one = self.simulations.get(message.simulation)
            if one and message.group in one.places:
                self._say(one.places[message.group], message)
        elif isinstance(message, get_args(messages.Order)):
            one = self.simulations.get(message.simulation)
            if one:
                self._act(one, message)

    def _act(self, one: Simulation, message: messages.Order) -> None:
        if isinstance(message, messages.Wait):
            with contextlib.suppress(page.PageError, ValueError):
                one.control = one.control or Control(Path(one.directory))
                one.control.set(protocol.WaitPolicy(message.mode, message.yields))
            return
        if isinstance(message, messages.Run) and len({h.get("address") for h in message.hosts}) > 1:
            with contextlib.suppress(page.PageError):
                one.control = one.control or Control(Path(one.directory))
                one.control.set_timeouts(*SHORT_TIMEOUTS)
        if isinstance(message, messages.Spread):
            one.told.pop(messages.Prepared, None)
        if isinstance(message, messages.End):
            if one.end is None:
                self._count(one)
            one.end = message
            for link in list(one.links):
                link.end()
            one.stages.clear()
            one.told.clear()
            one.lost.clear()
            one.spawns.clear()
        for place in one.places.values():
            self._say(place, message)

    # --- a node that is cut off ---

    async def _ask(self) -> None:
        """Ask the hub whether it is there, and the API while it is not.

        Where ranks stand still the hub goes on with those that it still wants, and ends others. The
        API alone cannot say which these are: before they go on their pods must outlast `SETTLED`.
        """
        while True:
            asked = time.monotonic()
            self._report(messages.Ping())
            await asyncio.sleep(ASK)
            if self.reachable and self.answered >= asked:
                continue
            if not await self._api_answers():
                self.api_since = 0.0
                continue
            self.reachable, self.answered = True, time.monotonic()
            self.api_since = self.api_since or self.answered
            if self.answered - self.api_since > SETTLED:
                self._go_on()

    async def _api_answers(self) -> bool:
        """Whether the API says anything, be it that it refuses us; by the ways that `_dial` has."""
        try:
            server = urlsplit((self.credentials / "server").read_text().strip())
            address, tls = server.hostname or "", server.scheme == "https"
            port = server.port or (443 if tls else 80)
        except (OSError, ValueError):
            return False
        context = connections.stranger() if tls else None

        async def answered(opening: Coroutine[Any, Any, Streams]) -> bool:
            reader, writer = await opening
            try:
                writer.write(b"GET /livez HTTP/1.0\r\n\r\n")
                return bool(await reader.read(1))
            finally:
                writer.transport.abort()

        with contextlib.suppress(OSError, ValueError, asyncio.TimeoutError):
            far = asyncio.open_connection(address, port, ssl=context)
            if await connections.within(_ANSWER, answered(far)):
                return True
        with contextlib.suppress(OSError, ValueError, asyncio.TimeoutError):
            led = way_out.connected(self.machine + way_out.PATH, address, port)
            name = "" if tls else None
            out = asyncio.open_unix_connection(sock=led, ssl=context, server_hostname=name)
            return await connections.within(_ANSWER, answered(out))
        return False

    def _go_on(self) -> None:
        """What still stands still here is not to."""
        if self.cut_off:
            self._log("ranks go on: there is an answer again")
        self._fence(False)

    def _check_answers(self) -> None:
        """Have ranks stand still before the run takes the node for lost."""
        if self.reachable and not self.cut_off and time.monotonic() - self.answered > CUT_OFF:
            self._log(f"ranks are suspended: neither run nor API has answered for {CUT_OFF:g} s")
            self._fence(True)
            self.api_since = 0.0
            if self.hub is not None:  # a connection that hangs; the next one may not
                self.hub.transport.abort()

    def _fence(self, cut_off: bool) -> None:
        """Tell all that are not to end; those that come later are told as they come."""
        if self.cut_off is not cut_off:
            self.cut_off = cut_off
            for one in self.simulations.values():
                for place in one.places.values() if one.end is None else ():
                    self._say(place, messages.Fence(one.name, cut_off))

    def _log(self, line: str) -> None:
        """Into the log of our pod."""
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)

    # --- folders that are not on this node ---

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it beside all else."""
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _look(self, asked: messages.Look) -> None:
        """Tell which folders are not here; and have a store, if there is to be one."""

        def missing() -> list[str]:
            found = []
            for folder, mark in asked.folders.items():
                try:
                    here = beneath(self.machine, folder)
                    same = staging.mark(here) == mark if mark else os.path.exists(here)
                except OSError:
                    same = False
                found += [] if same else [folder]
            return found

        absent = await asyncio.to_thread(missing)
        if asked.store:
            self.store = staging.own_store(self.machine + asked.store)
            absent += [] if self.store else [asked.store]
        self._report(messages.Seen(absent))

    async def _stage(self, one: Simulation, asked: messages.Stage) -> None:
        """Copy a folder of a simulation, as often as it takes to have a connection that holds.

        And, for some minutes, until there is room where the disk is full.
        """
        trouble, pause, full = None, 0.1, 0.0
        while trouble is None and one.end is None:
            try:
                await self._transfer(one, asked)
                trouble = ""
            except (staging.StagingError, OSError) as error:
                if staging.is_full(error):
                    full = full or time.monotonic()
                    late = time.monotonic() - full > staging.ROOM
                    trouble = str(error) if late else None
                elif isinstance(error, staging.StagingError):
                    trouble = str(error)
            except (EOFError, ValueError, RuntimeError, asyncio.TimeoutError):
                pass  # too many threads, for one
            except Exception as error:  # who waits for an answer has one
                trouble = f"{type(error).__name__}: {error}"
            if trouble is None:
                await asyncio.sleep(pause)
                pause = min(2.0, 2 * pause)
        if one.end is None:
            done = one.stages[asked.number] = messages.Staged(one.name, asked.number, trouble or "")
            self._report(done)
            for old in [number for number, said in one.stages.items() if said][:-_ANSWERS]:
                del one.stages[old]

    async def _transfer(self, one: Simulation, asked: messages.Stage) -> None:
        """Over a connection of its own. What both sides have in common afterwards is kept.

        Where two nodes are one machine they share the store: one after the other.
        """
        if not self.store:
            raise ConnectionError("the store is still being made")
        await connections.in_own_thread(self._copy, one, asked)

    def _copy(self, one: Simulation, asked: messages.Stage) -> None:
        base, lock = staging.records(self.store, asked.folder)
        folder = os.path.join(self.store, asked.folder)
        with contextlib.ExitStack() as afterwards:
            try:
                fcntl.flock(afterwards.enter_context(open(lock, "w")), fcntl.LOCK_EX)
            except OSError as error:
                if asked.way == "in" or error.errno != errno.EROFS:  # else it is as it stays
                    raise staging.of_store(error, lock) from None
            link = connections.Channel(afterwards.enter_context(self._dial_copies(asked.port)))
            one.links.add(link)
            afterwards.callback(one.links.discard, link)
            if one.end is not None:
                raise ConnectionError("nobody wants it any more")
            token = (self.credentials / "token").read_text().strip()
            first = messages.Transfer(self.node, token, asked.folder, asked.way)
            link.write(messages.encode(first))
            if asked.way == "in":
                if not os.path.exists(base):  # what has not come yet was not removed here
                    write_private(Path(base), "{}")
                known = staging.receive(folder, link)
            else:
                before = json.loads(Path(base).read_text()) if os.path.exists(base) else None
                known = staging.send(folder, one.unkept.get(folder, before), link)
            try:
                write_private(Path(base), json.dumps(known))
                one.unkept.pop(folder, None)
            except OSError as error:
                if asked.way == "in":
                    raise staging.of_store(error, base) from None
                one.unkept[folder] = known  # our disk is full, and all has come where there is room

    def _forgotten(self, folder: str) -> bool:
        """Remove a folder of the store, unless it is copied at this moment."""
        base, lock = staging.records(self.store, folder)
        with contextlib.ExitStack() as afterwards:
            with contextlib.suppress(OSError):  # mostly as nothing of it was copied yet
                held = afterwards.enter_context(open(lock))
                try:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
            for path in (f"{self.store}/{folder}", base, lock):
                remove_tree(path)
        return True

    # --- the periodic look ---

    async def _watch(self, ending: asyncio.Event) -> None:
        while True:
            self._check_answers()
            self._sample()
            if time.monotonic() >= self.count_at:
                self.count_at = time.monotonic() + COUNT
                for one in self.simulations.values():
                    self._count(one)
            for one in list(self.simulations.values()):
                self._check_places(one)
            if self.hub is None and time.monotonic() - self.seen > self.limit:
                for one in self.simulations.values():
                    if one.end is None:
                        self._act(one, messages.End(one.name, _ORPHANED))
                if not self.simulations:
                    ending.set()
            await asyncio.sleep(PERIOD)

    def _sample(self) -> None:
        if self.hub is None:
            return
        ranks, lines, used = {}, {}, {}
        for one in self.simulations.values():
            new, log = one.reader.look()
            if new:
                ranks[one.name] = new
            if log:
                lines[one.name] = log
            if one.end is None and not one.reader.counts and (pods := self._used(one, bool(new))):
                used[one.name] = pods
        if ranks or lines:
            self._report(messages.Sample(time.monotonic(), ranks, lines))
        if used:
            self._report(messages.Used(time.monotonic(), used))

    def _used(self, one: Simulation, told: bool) -> dict[str, list[float]]:
        """What its rank groups used since their pages `told` anything, if that is long ago."""
        now, found = time.monotonic(), {}
        if told:
            one.told_at = now
        self._find_folders(one)
        for group, place in one.places.items():
            values = weights.used(self.cgroups, place.cgroup) if place.cgroup else None
            if values and told:
                place.used = values[0]
            elif values and now - one.told_at >= UNTOLD:
                found[str(group)] = [max(0.0, values[0] - place.used), values[1]]
        return found

    def _find_folders(self, one: Simulation) -> None:
        """Look for the pods' control groups that were not found yet, once a second at most."""
        new = [place for place in one.places.values() if not place.cgroup]
        if not new or time.monotonic() < one.find_at:
            return
        one.find_at = time.monotonic() + FIND
        folders = weights.find(self.cgroups, [place.pod.uid for place in new])
        for place in new:
            place.cgroup = folders.get(place.pod.uid, "")

    def _count(self, one: Simulation) -> None:
        """Tell what keeps its ranks from their cores."""
        if self.hub is None:
            return
        self._find_folders(one)
        groups = {}
        for group, place in one.places.items():
            if place.cgroup:
                groups[str(group)] = weights.since(place.earlier, weights.counts(place.cgroup))
        cpus = len(os.sched_getaffinity(0))
        self._report(messages.Counts(one.name, cpus, groups, one.reader.waits()))

    def _check_places(self, one: Simulation) -> None:
        """Find pods that have died, and remove the simulation when none is left."""
        for group, place in list(one.places.items()):
            if place.writer is None and dead(os.path.join(one.directory, f"pod.{group}")):
                del one.places[group]
                if one.end is None and messages.Result not in one.told:
                    one.lost[group] = messages.Lost(one.name, group, place.pod.uid)
                    self._report(one.lost[group])
                    end_simulation(one.directory, Group("", ""))
        if not one.places:
            self._clear(one)

    def _clear(self, one: Simulation) -> None:
        """Remove what is left of a simulation, and forget it once the hub knows how it ended.

        Until then what it wrote to the store may be fetched.
        """
        over = one.end is not None or not (one.told or one.lost)
        if self.store and not over:
            return
        if os.path.exists(one.directory):
            one.reader.close()
            remove_simulation(one.directory, Group("", ""), "")
        # Its case may be needed by others.
        if self.store and not self._forgotten(one.name):
            return  # until the next look
        if one.control is not None:
            one.control.close()
            one.control = None
        if over:
            del self.simulations[one.name]


def main() -> None:
    """Sweep what dead runs left on the node, and be the agent until the end."""
    parser = argparse.ArgumentParser(prog="dovetail-agent")
    parser.add_argument("--run", required=True, help="id of the run")
    parser.add_argument("--node", required=True, help="name of this node")
    parser.add_argument("--credentials", required=True, type=Path, help="folder with the hub's")
    parser.add_argument("--cgroups", default="/sys/fs/cgroup", help="where they are mounted")
    parser.add_argument("--machine", default="", help="where the node's root folder is")
    args = parser.parse_args()
    os.umask(0o077)
    ending = (signal.SIGTERM, signal.SIGINT)
    for number in ending:  # until here they end us, and nothing is left either
        signal.signal(number, lambda *_: sys.exit(0))
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    session = shared_session(args.run, args.node)
    held = join_session(session)  # first: what this run's dead pods left is news for the hub
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        sweep_sessions()
        staging.sweep_stores(args.machine)
        asyncio.run(Agent(session, args.node, args.credentials, args.cgroups, args.machine).run())
    finally:
        with contextlib.suppress(OSError):
            os.unlink(session + "/agent.sock")
        if leave_session(session, held):
            staging.sweep_stores(args.machine)
