# SPDX-License-Identifier: LGPL-3.0-or-later
"""The broker module `dovetail`, on rank 0 of the user's own Flux instance.

Inputs: the table `dovetail` of the configuration, or the same keys as arguments (`nodes=2`);
requests, see dovetail-flux(7). Outputs: slice jobs, answers. Invariants: nothing here blocks,
since all that takes time is done by the slices' agents; no exception leaves a handler; a
module that is loaded anew finds its slices again, and they find it by the event
`dovetail.loaded`. What is decided is in `instance/`; this file only carries it out.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import signal
import socket
import syslog
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import flux.job
import flux.resource
import flux.subprocess as subprocess
from _flux._core import ffi, lib
from flux.brokermod import BrokerModule, request_handler
from flux.constants import FLUX_JOB_LOOKUP_CURRENT, FLUX_MSGTYPE_REQUEST, FLUX_POLLIN
from flux.hostlist import Hostlist
from flux.idset import IDset

from dovetail.core.errors import BadInput
from dovetail.core.messages import MessageError
from dovetail.flux import jobspec, option
from dovetail.flux.instance import effects
from dovetail.flux.instance.effects import Key
from dovetail.flux.instance.requests import REQUESTS, STREAMS
from dovetail.flux.instance.state import Instance
from dovetail.host import processes

ALL_UP = 10.0  # seconds for all brokers to be up, before slices go to those that are
STRAYS = 10.0  # seconds until jobs are there that a module before us may have submitted at its end
AGAIN = 1.0  # seconds until somebody who did not answer is asked again
HELD = lib.FLUX_JOB_URGENCY_HOLD  # of a job that waits for the answer to its submission
JOBS = {
    "max_entries": 0, "since": 0.0, "attrs": ["name", "urgency"],
    "constraint": {"states": ["pending", "running"]},
}  # fmt: skip
PARENT = 10.0  # seconds for the instance around us to say what our job may have
Message = Any  # these three are of Flux, which has no types
Future = Any
Handle = Any


def guarded(handler: Callable[..., None]) -> Callable[..., None]:
    """A callback of which no exception escapes; a request is then refused with its text."""

    @functools.wraps(handler)
    def guard(self: Dovetail, *args: Any) -> None:  # noqa: ANN401
        try:
            handler(self, *args)
        except Exception as error:
            self.log.error(f"{handler.__name__}: {type(error).__name__}: {error}")
            if handler.__name__ == "requested":
                kind = "" if isinstance(error, MessageError) else f"{type(error).__name__}: "
                self.refuse(args[0], errno.EINVAL, f"{kind}{error}")

    return guard


class Log:
    """The log of the instance, which gets the very words.

    Flux's own binding takes them for a format of printf(3): a `%s` in them, perhaps in the reason
    that a user gives, would end the module.
    """

    def __init__(self, handle: Handle) -> None:
        self.handle = handle

    def write(self, level: int, words: str) -> None:
        """Write a line."""
        text = ffi.new("char[]", words.encode(errors="replace"))
        lib.flux_log(self.handle.handle, level, b"%s", text)

    def error(self, words: str) -> None:
        """Something failed."""
        self.write(syslog.LOG_ERR, words)

    def notice(self, words: str) -> None:
        """Something to be known."""
        self.write(syslog.LOG_NOTICE, words)

    def info(self, words: str) -> None:
        """Something of interest."""
        self.write(syslog.LOG_INFO, words)

    def debug(self, words: str) -> None:
        """Something for developers."""
        self.write(syslog.LOG_DEBUG, words)


def of_our_job(h: Handle) -> list[object]:
    """What our own job asked for, and what is left of it by the policy of the instance around us.

    Both are None if there is none, or it does not answer.
    """
    try:
        parent = flux.Flux(h.attr_get("parent-uri"))
        job, found = flux.job.JobID(h.attr_get("jobid")), []
        for flags in (0, FLUX_JOB_LOOKUP_CURRENT):
            query = {"id": job, "keys": ["jobspec"], "flags": flags}
            answer = parent.rpc("job-info.lookup", query).wait_for(PARENT).get()
            user = json.loads(answer["jobspec"])["attributes"].get("user", {})
            found.append(user.get("dovetail"))
        return found
    except OSError:
        return [None, None]


class Dovetail(BrokerModule):
    """Carries requests and news to the state, and out what it decides."""

    def __init__(self, h: Handle, *args: str) -> None:
        super().__init__(h, *args)
        self.log = Log(h)
        h.attr_set("broker.module-nopanic", "1")  # whatever happens here, the user's work goes on
        table = dict(h.conf_get("dovetail", default={}))
        table.update((key, _number(value)) for key, _, value in (a.partition("=") for a in args))
        try:
            wanted = option.from_table(table)
            option.check_provider(table)
        except BadInput as error:
            raise ValueError(str(error)) from None
        denied = ""
        try:
            self.request = option.granted(wanted, *of_our_job(h))
        except BadInput as error:  # which is no reason for the user's script not to run
            self.request, denied = wanted, str(error)
        if self.request != wanted:
            self.log.notice(f"the site grants {self.request.plain()} of {wanted.plain()}")
        if self.request.address == "auto":
            several = self.request.upstream or len(set(Hostlist(h.attr_get("hostlist")))) > 1
            self.request = replace(self.request, address="machine" if several else "loopback")
        self.state = Instance(self.request.nodes, self.request.executor, self.request.up_timeout)
        place = f"{socket.gethostname()}:{h.attr_get('rundir')}"
        self.cluster = "f-" + hashlib.sha256(place.encode()).hexdigest()[:8]
        self.messages: dict[Key, Message] = {}  # requests that wait for an answer, by their key,
        self.senders: dict[str, set[Key]] = {}  # and the keys by who sent them
        self.keys = 0
        self.watchers: list[object] = []  # Flux keeps no reference
        self.ends: object = None
        self.fresh_begun = False
        self.submitting: set[int] = set()  # slices, until we are told which jobs they are
        self.limited = jobspec.has_default_duration(h.conf_get())
        self.near = False  # whether the control slice is for our broker alone
        for topic in {**REQUESTS, **STREAMS}:
            watcher = h.msg_watcher_create(
                lambda _handle, _type, message, _: self.requested(message),
                FLUX_MSGTYPE_REQUEST, f"{self.name}.{topic}",
            )  # fmt: skip
            watcher.start()
            self.watchers.append(watcher)
        self.timer(self.request.up_timeout, lambda: self.do(self.state.late()))
        self.follow_shell(int(h.attr_get("broker.pid")))
        if denied:
            self.do(self.state.fail(denied))
        self.find_slices()

    # --- Start ---

    @guarded
    def follow_shell(self, broker: int) -> None:
        """End the instance once the shell of its job is killed, which then cannot tell it to.

        Where jobs are not in control groups of the system's, all would go on, on others' cores.
        """
        shell = processes.parent(broker)
        if processes.name(shell) != "flux-shell":  # but `flux start`, or a user's terminal
            return
        handle = os.pidfd_open(shell)

        @guarded
        def ended(self: Dovetail, watcher: Any) -> None:  # noqa: ANN401
            watcher.stop()
            self.log.error("the shell of our job was killed; the instance ends")
            os.kill(broker, signal.SIGTERM)

        watcher = self.handle.fd_watcher_create(
            handle, lambda _handle, watcher, *_: ended(self, watcher), FLUX_POLLIN
        )
        watcher.start()
        self.watchers.append(watcher)

    def find_slices(self) -> None:
        """Ask which slices run already; the answer starts everything."""
        self.handle.rpc("job-list.list", JOBS).then(self.listed)

    @guarded
    def listed(self, future: Future) -> None:
        """Look up which slice each job is that has the name of one."""
        try:
            jobs = future.get()["jobs"]
        except OSError as error:  # who lists them may just be loaded anew
            self.log.error(f"slices of before cannot be looked for: {error}")
            self.timer(AGAIN, self.find_slices)
            return
        jobs = [job for job in jobs if jobspec.SLICE_NAME.fullmatch(job["name"])]
        named = [job["id"] for job in jobs]
        self.held = {job["id"] for job in jobs if job["urgency"] == HELD}
        self.unknown, self.adopting = set(named), dict[int, int]()
        for job in named:
            self.look_up(job)
        if not named:
            self.start_fresh()

    def look_up(self, job: int) -> None:
        """Ask what a job is."""
        query = {"id": job, "keys": ["jobspec"], "flags": 0}
        self.handle.rpc("job-info.lookup", query).then(self.looked_up, job)

    def start_fresh(self) -> None:
        """There are no slices; begin once all brokers are up."""
        # A scheduler may deny for good what asks for brokers that are not up yet: Fluxion does.
        up = {"up": int(self.handle.attr_get("size"))}
        self.handle.rpc("resource.monitor-waitup", up).then(self.fresh)
        self.timer(ALL_UP, self.fresh)

    @guarded
    def looked_up(self, future: Future, job: int) -> None:
        """What a job is, perhaps a slice of ours; with the last of them, go on."""
        try:
            number = jobspec.slice_number(json.loads(future.get()["jobspec"]), self.cluster)
        except OSError as error:
            if error.errno != errno.ENOENT:  # as above
                self.log.error(f"job {job} cannot be looked up: {error}")
                self.timer(AGAIN, lambda: self.look_up(job))
                return
            number = None  # it has ended and is forgotten
        self.unknown.discard(job)
        # Of two with one number, of which one was never let go, the other is the slice.
        if number is not None and (number not in self.adopting or job not in self.held):
            self.adopting[number] = job
        if self.unknown:
            return
        for held in self.held.intersection(self.adopting.values()):
            self.release(held)
        if self.adopting:
            flux.resource.resource_list(self.handle).then(self.room_known)
        else:
            self.start_fresh()

    @guarded
    def room_known(self, future: Future) -> None:
        """Take over slices that run; they are there already, wherever they have room."""
        with contextlib.suppress(OSError):
            self.state.room = option.room_on(self.request, cores_of(future.get().all))
        self.begin(self.adopting)

    @guarded
    def fresh(self, *_: object) -> None:
        """All brokers are up, or one takes too long; whichever comes first."""
        if not self.fresh_begun:
            self.fresh_begun = True
            flux.resource.resource_list(self.handle).then(self.free_known)

    @guarded
    def free_known(self, future: Future) -> None:
        """Begin; the control slice goes to our broker, where the user's script is, if it can."""
        with contextlib.suppress(OSError):  # then to any
            found = future.get()
            free, most = (one.copy_ranks(IDset("0")).ncores for one in (found.free, found.all))
            self.near = 0 < (self.request.cores or most) <= free
            self.check_room(found.all)
        self.begin({})

    def check_room(self, resources: Any) -> None:  # noqa: ANN401
        """Fail at once where slices would wait for cores that there are not."""
        nodes = cores_of(resources)
        self.state.room = option.room_on(self.request, nodes)
        try:
            option.check_room(replace(self.request, nodes=self.state.wanted), nodes)
        except BadInput as error:
            self.do(self.state.fail(str(error)))

    def begin(self, adopted: dict[int, int]) -> None:
        """Submit slices, or watch those that are there."""
        self.do(self.state.start(adopted))
        self.handle.event_send("dovetail.loaded")
        self.log.info(f"cluster {self.cluster}: {self.state.wanted} slices, {len(adopted)} adopted")
        self.timer(STRAYS, self.find_strays)

    def find_strays(self) -> None:
        """Ask for slices whose submission nobody was told of, as the module before us was gone."""
        if self.submitting:  # of which one might be taken for such a slice
            self.timer(AGAIN, self.find_strays)
        else:
            self.handle.rpc("job-list.list", JOBS).then(self.strays_listed)

    @guarded
    def strays_listed(self, future: Future) -> None:
        """Look up what is held, looks like one of those, and is no slice that we know."""
        if self.submitting:
            self.find_strays()
            return
        ours = {one.job for one in self.state.slices.values()}
        for job in future.get()["jobs"]:
            held = job["urgency"] == HELD and jobspec.SLICE_NAME.fullmatch(job["name"])
            if held and job["id"] not in ours:
                query = {"id": job["id"], "keys": ["jobspec"], "flags": 0}
                self.handle.rpc("job-info.lookup", query).then(self.stray_looked_up, job["id"])

    @guarded
    def stray_looked_up(self, future: Future, job: int) -> None:
        """Cancel it if it is one."""
        if jobspec.slice_number(json.loads(future.get()["jobspec"]), self.cluster) is not None:
            self.cancel_job(job, "the module that submitted it is gone")

    # --- Carrying out ---

    def do(self, wanted: Iterator[effects.Effect]) -> None:
        """Carry out effects, in order."""
        for effect in wanted:
            if isinstance(effect, effects.Submit):
                self.submit_slice(effect.number)
            elif isinstance(effect, effects.Watch):
                self.watch_job(effect.number, effect.job)
            elif isinstance(effect, effects.Sweep):
                self.sweep(effect.number, effect.rank)
            elif isinstance(effect, effects.Cancel):
                self.cancel_job(effect.job, effect.why)
            elif isinstance(effect, effects.Answer):
                self.answer(effect.key, effect.value)
            elif isinstance(effect, effects.Refuse):
                message = self.forget(effect.key)
                if message is not None:
                    self.refuse(message, effect.code, effect.why)
            else:
                self.log.notice(effect.line)
        if self.ends is None and (self.state.ending or self.state.failure):
            limit = self.request.down_timeout
            self.ends = self.timer(limit, lambda: self.do(self.state.late_down(last=False)))
            self.timer(2 * limit, lambda: self.do(self.state.late_down(last=True)))

    def key(self, message: Message) -> int:
        """Keep a request until it is answered."""
        self.keys += 1
        self.messages[self.keys] = message
        self.senders.setdefault(sender(message), set()).add(self.keys)
        return self.keys

    def forget(self, key: Key) -> Message | None:
        """It waits for no answer any more."""
        message = self.messages.pop(key, None)
        if message is not None:
            of = self.senders[sender(message)]
            of.discard(key)
            if not of:
                del self.senders[sender(message)]
        return message

    def answer(self, key: Key, value: Mapping[str, Any]) -> None:
        """Respond; a request that streams stays open."""
        message = self.messages.get(key)
        if message is None:
            return
        if not lib.flux_msg_is_streaming(message.handle):
            self.forget(key)
        try:
            self.handle.respond(message, dict(value))
        except OSError as error:
            self.log.debug(f"respond: {error}")

    def refuse(self, message: Message, code: int, why: str) -> None:
        """Respond with an error."""
        text = why.encode()[:1000].decode(errors="ignore").encode()  # no half letter
        lib.flux_respond_error(self.handle.handle, message.handle, code, text)

    def timer(self, after: float, call: Callable[[], None]) -> object:
        """Call once, later."""

        @guarded
        def fire(self: Dovetail, *_: object) -> None:
            call()

        watcher = self.handle.timer_watcher_create(after, lambda *_: fire(self))
        watcher.start()
        self.watchers.append(watcher)
        return watcher

    def submit_slice(self, number: int) -> None:
        """Submit a slice's job."""
        environment = jobspec.environment()
        if self.request.cache:
            environment["DOVETAIL_CACHE"] = self.request.cache
        near = self.near and number == 0
        spec = jobspec.slice_job(self.request, number, self.cluster, environment, near=near)
        self.submitting.add(number)
        submitted = flux.job.submit_async(self.handle, json.dumps(spec), urgency=HELD)
        submitted.then(self.slice_submitted, number)

    @guarded
    def slice_submitted(self, future: Future, number: int) -> None:
        """A slice has a job id, or was refused.

        Only now that it is known which job it is, it may run: of one that was submitted as we end
        nobody would know, and the module that comes after us may submit another one in its stead.
        """
        self.submitting.discard(number)
        try:
            job = int(future.get_id())
        except OSError as error:
            self.do(self.state.submitted(number, 0, error.strerror or str(error)))
            return
        self.release(job)
        self.do(self.state.submitted(number, job))

    def release(self, job: int) -> None:
        """Let a slice's job run."""
        payload = {"id": job, "urgency": lib.FLUX_JOB_URGENCY_DEFAULT}
        self.handle.rpc("job-manager.urgency", payload).then(self.told, "urgency")

    def watch_job(self, number: int, job: int) -> None:
        """Follow a slice's job."""
        flux.job.event_watch_async(self.handle, job).then(self.job_event, number, job)

    def watch_again(self, number: int, job: int) -> None:
        """Follow a slice's job from its beginning; what was known already changes nothing."""
        if number in self.state.slices:
            self.watch_job(number, job)

    @guarded
    def job_event(self, future: Future, number: int, job: int) -> None:
        """Something happened to a slice's job."""
        try:
            event = future.get_event()
        except OSError as error:
            if error.errno == errno.ENOENT:  # it has ended and is forgotten
                self.do(self.state.finished(number, 0))
                self.do(self.state.cleaned(number))
                return
            # Who tells us of them may just be loaded anew.
            self.log.error(f"slice {number}: its events cannot be followed: {error}")
            self.timer(AGAIN, lambda: self.watch_again(number, job))
            return
        if event is None:
            return
        if event.name == "exception" and event.context["severity"] == 0:
            kind, note = event.context["type"], event.context.get("note", "")
            self.do(self.state.excepted(number, kind, note))
        elif event.name == "start" and self.limited:  # the scheduler sees no earlier update
            update = jobspec.without_limit(job)
            self.handle.rpc("job-manager.update", update).then(self.told, "update")
        elif event.name == "finish":
            self.do(self.state.finished(number, event.context["status"]))
        elif event.name == "clean":
            self.do(self.state.cleaned(number))

    def sweep(self, number: int, rank: int) -> None:
        """Run the agent's last act in its stead, on the same machine."""
        words = [self.request.command, "slice", "--number", str(number), "--cluster", self.cluster]
        label = f"dovetail-sweep-{number}"
        call = {"cwd": "/", "env": jobspec.environment(), "label": label, "waitable": True}
        subprocess.rexec_bg(self.handle, [*words, "--sweep"], nodeid=rank, **call).then(
            self.sweeping, number, rank, label, timeout=self.request.down_timeout
        )  # a broker that is dying may never answer

    @guarded
    def sweeping(self, future: Future, number: int, rank: int, label: str) -> None:
        """It runs, or its broker is gone, and with it all that we could do."""
        try:
            future.get()
        except OSError as error:
            self.do(self.state.swept(number, f"rank {rank}: {error}"))
            return
        ended = subprocess.wait(self.handle, label=label, nodeid=rank)
        ended.then(self.swept, number, timeout=self.request.down_timeout)

    @guarded
    def swept(self, future: Future, number: int) -> None:
        """It has ended."""
        try:
            status = future.get_status()
            trouble = "" if status == 0 else f"sweeping it ended with status {status}"
        except OSError as error:
            trouble = str(error)
        self.do(self.state.swept(number, trouble))

    def cancel_job(self, job: int, why: str) -> None:
        """Raise an exception on a slice's job."""
        payload = {"id": job, "type": "cancel", "severity": 0, "note": f"dovetail: {why}"}
        self.handle.rpc("job-manager.raise", payload).then(self.told, "cancel")

    @guarded
    def told(self, future: Future, what: str) -> None:
        """Whether a slice's job could be told something; it may have ended by itself."""
        try:
            future.get()
        except OSError as error:
            self.log.debug(f"{what}: {error}")

    # --- Requests ---

    @guarded
    def requested(self, message: Message) -> None:
        """Answer a request, now or later."""
        topic = message.topic.partition(".")[2]
        known = STREAMS if lib.flux_msg_is_streaming(message.handle) else REQUESTS
        if topic not in known:
            self.refuse(message, errno.EPROTO, f"{message.topic} cannot be streamed")
            return
        payload = json.loads(message.payload_str or "{}")
        self.do(known[topic](self.state, self.key(message), payload))

    @request_handler("disconnect")
    @guarded
    def disconnected(self, message: Message) -> None:
        """A client or agent is gone; nothing is answered."""
        of = self.senders.get(sender(message), set())
        match = functools.partial(lib.flux_disconnect_match, message.handle)
        gone = {key for key in of if match(self.messages[key].handle)}
        self.do(self.state.drop(gone))
        for key in gone:
            self.forget(key)


def cores_of(resources: Any) -> list[int]:  # noqa: ANN401
    """How many cores each node has."""
    return [resources.copy_ranks([rank]).ncores for rank in resources.ranks]


def sender(message: Message) -> str:
    """Who sent it, to the broker that it came to first; unique in the instance."""
    first = lib.flux_msg_route_first(message.handle)
    return ffi.string(first).decode() if first else ""


def _number(value: str) -> int | float | str:
    """An argument's value, as the configuration would have it."""
    try:
        return int(value)
    except ValueError:
        try:
            return float(value)
        except ValueError:
            return value
