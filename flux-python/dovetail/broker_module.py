# SPDX-License-Identifier: LGPL-3.0-or-later
"""The broker module `dovetail`, on rank 0 of the user's own Flux instance (steps 2, 3 and 8).

Inputs: the table `dovetail` of the configuration, or the same keys as arguments (`nodes=2`);
requests, see dovetail-flux(7). Outputs: slice jobs, answers. Invariants: nothing here blocks,
since all that takes time is done by the slices' agents; no exception leaves a handler; a
module that is loaded anew finds its slices again, and they find it by the event
`dovetail.loaded`. What is decided is in `fluxed/instance.py`; this file only carries it out.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flux.job
from _flux._core import lib
from flux.brokermod import BrokerModule, request_handler

sys.path.append(str(Path(__file__).resolve().parents[1]))

from dovetail.errors import BadInput  # noqa: E402
from dovetail.fluxed import asked, effects  # noqa: E402
from dovetail.fluxed.instance import Instance  # noqa: E402

NAMES = ("dovetail-control", "dovetail-node")
PRIVATE = ("FLUX_MODULE_URI", "FLUX_URI", "FLUX_JOB_", "FLUX_TASK_", "FLUX_KVS_NAMESPACE")
Payload = dict[str, Any]


def guarded(handler: Callable[..., None]) -> Callable[..., None]:
    """A callback of which no exception escapes; a request is then refused with its text."""

    @functools.wraps(handler)
    def guard(self: Dovetail, *args: Any) -> None:  # noqa: ANN401
        try:
            handler(self, *args)
        except Exception as error:
            self.log.error(f"{handler.__name__}: {type(error).__name__}: {error}")
            if args and isinstance(args[0], flux.message.Message) and handler.__name__ != "gone":
                self.refuse(args[0], errno.EINVAL, f"{type(error).__name__}: {error}")

    return guard


class Dovetail(BrokerModule):
    """Carries requests and news to the state, and out what it decides."""

    def __init__(self, h: Any, *args: str) -> None:  # noqa: ANN401
        super().__init__(h, *args)
        h.attr_set("broker.module-nopanic", "1")  # whatever happens here, the user's work goes on
        table = dict(h.conf_get("dovetail", default={}))
        table.update((key, _number(value)) for key, _, value in (a.partition("=") for a in args))
        try:
            self.asked = asked.from_table(table)
        except BadInput as error:
            raise ValueError(str(error)) from None
        self.state = Instance(self.asked)
        place = f"{socket.gethostname()}:{h.attr_get('rundir')}"
        self.cluster = "f-" + hashlib.sha256(place.encode()).hexdigest()[:8]
        self.messages: dict[int, Any] = {}  # requests that wait for an answer, by their key
        self.keys = 0
        self.timers: list[Any] = []
        self.ends: Any = None
        self.find_slices()

    # --- Start ---

    def find_slices(self) -> None:
        """Ask which slices run already; the answer starts everything."""
        payload = {
            "max_entries": 0, "since": 0.0, "attrs": ["name"],
            "constraint": {"and": [{"states": ["pending", "running"]}, {"name": list(NAMES)}]},
        }  # fmt: skip
        self.handle.rpc("job-list.list", payload).then(self.listed)

    @guarded
    def listed(self, future: Any) -> None:  # noqa: ANN401
        """Look up the number of each slice that runs."""
        self.adopting = {job["id"]: -1 for job in future.get()["jobs"]}
        for job in self.adopting:
            query = {"id": job, "keys": ["jobspec"], "flags": 0}
            self.handle.rpc("job-info.lookup", query).then(self.looked_up, job)
        if not self.adopting:
            self.begin({})

    @guarded
    def looked_up(self, future: Any, job: int) -> None:  # noqa: ANN401
        """One slice's number; with the last of them, go on."""
        spec = json.loads(future.get()["jobspec"])
        self.adopting[job] = spec["attributes"]["user"]["dovetail"]["slice"]
        if -1 not in self.adopting.values():
            self.begin({number: job for job, number in self.adopting.items()})

    def begin(self, adopted: dict[int, int]) -> None:
        """Submit slices, or watch those that are there."""
        self.do(self.state.start(adopted))
        for number, job in adopted.items():
            self.watch_job(number, job)
        self.timer(self.asked.up_timeout, lambda: self.do(self.state.late()))
        self.handle.event_send("dovetail.loaded")
        self.log.info(f"cluster {self.cluster}: {self.state.wanted} slices, {len(adopted)} adopted")

    # --- Carrying out ---

    def do(self, wanted: Iterator[effects.Effect]) -> None:
        """Carry out effects, in order."""
        for effect in wanted:
            if isinstance(effect, effects.Submit):
                self.submit_slice(effect.number)
            elif isinstance(effect, effects.Cancel):
                self.cancel_job(effect.job, effect.why)
            elif isinstance(effect, effects.Answer):
                self.answer(effect.key, effect.value)
            elif isinstance(effect, effects.Refuse):
                message = self.messages.pop(effect.key, None)
                if message is not None:
                    self.refuse(message, effect.code, effect.why)
            else:
                self.log.notice(effect.line)
        if self.ends is None and (self.state.ending or self.state.failure):
            limit = self.asked.down_timeout
            self.ends = self.timer(limit, lambda: self.do(self.state.late_down(last=False)))
            self.timer(2 * limit, lambda: self.do(self.state.late_down(last=True)))

    def key(self, message: Any) -> int:  # noqa: ANN401
        """Keep a request until it is answered."""
        self.keys += 1
        self.messages[self.keys] = message
        return self.keys

    def answer(self, key: Any, value: Any) -> None:  # noqa: ANN401
        """Respond; a request that streams stays open."""
        message = self.messages.get(key)
        if message is None:
            return
        if not lib.flux_msg_is_streaming(message.handle):
            del self.messages[key]
        try:
            self.handle.respond(message, dict(value))
        except OSError as error:
            self.log.debug(f"respond: {error}")

    def refuse(self, message: Any, code: int, why: str) -> None:  # noqa: ANN401
        """Respond with an error."""
        text = why.encode()[:1000]
        lib.flux_respond_error(self.handle.handle, message.handle, code, text)

    def timer(self, after: float, call: Callable[[], None]) -> Any:  # noqa: ANN401
        """Call once, later."""

        @guarded
        def fire(self: Dovetail, *_: object) -> None:
            call()

        watcher = self.handle.timer_watcher_create(after, lambda *_: fire(self))
        watcher.start()
        self.timers.append(watcher)
        return watcher

    def submit_slice(self, number: int) -> None:
        """Submit a slice's job."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(PRIVATE)}
        spec = asked.jobspec(self.asked, number, self.cluster, kept)
        flux.job.submit_async(self.handle, json.dumps(spec)).then(self.slice_submitted, number)

    @guarded
    def slice_submitted(self, future: Any, number: int) -> None:  # noqa: ANN401
        """A slice has a job id, or was refused."""
        try:
            job = int(future.get_id())
        except OSError as error:
            self.do(self.state.submitted(number, 0, str(error)))
            return
        self.watch_job(number, job)
        self.do(self.state.submitted(number, job))

    def watch_job(self, number: int, job: int) -> None:
        """Follow a slice's job."""
        flux.job.event_watch_async(self.handle, job).then(self.job_event, number)

    @guarded
    def job_event(self, future: Any, number: int) -> None:  # noqa: ANN401
        """Something happened to a slice's job."""
        try:
            event = future.get_event()
        except OSError as error:
            self.log.error(f"slice {number}: its events cannot be followed: {error}")
            return
        if event is None:
            return
        if event.name == "exception" and event.context["severity"] == 0:
            kind, note = event.context["type"], event.context.get("note", "")
            self.do(self.state.excepted(number, kind, note))
        elif event.name == "finish":
            self.do(self.state.finished(number, event.context["status"]))
        elif event.name == "clean":
            self.do(self.state.gone(number))

    def cancel_job(self, job: int, why: str) -> None:
        """Raise an exception on a slice's job."""
        payload = {"id": job, "type": "cancel", "severity": 0, "note": f"dovetail: {why}"}
        self.handle.rpc("job-manager.raise", payload).then(self.cancelled)

    @guarded
    def cancelled(self, future: Any) -> None:  # noqa: ANN401
        """Whether the job could be cancelled; it may have ended by itself."""
        try:
            future.get()
        except OSError as error:
            self.log.debug(f"cancel: {error}")

    # --- Requests ---

    @request_handler("status")
    @guarded
    def status(self, msg: Any) -> None:  # noqa: ANN401
        """The state, once or, streaming, at every change."""
        if lib.flux_msg_is_streaming(msg.handle):
            self.do(self.state.watch(self.key(msg)))
        else:
            self.handle.respond(msg, {"cluster": self.cluster, **self.state.status()})

    @request_handler("wait-up")
    @guarded
    def wait_up(self, msg: Any) -> None:  # noqa: ANN401
        """Answered when Kubernetes is up; refused, with the reason, when it cannot be."""
        self.do(self.state.wait_up(self.key(msg)))

    @request_handler("submit")
    @guarded
    def submit(self, msg: Any) -> None:  # noqa: ANN401
        """A plan to run."""
        order = msg.payload
        self.do(self.state.submit(self.key(msg), order))

    @request_handler("wait")
    @guarded
    def wait(self, msg: Any) -> None:  # noqa: ANN401
        """Answered when runs have ended."""
        payload = msg.payload
        self.do(self.state.runs.wait(self.key(msg), payload))

    @request_handler("cancel")
    @guarded
    def cancel(self, msg: Any) -> None:  # noqa: ANN401
        """End runs."""
        payload = msg.payload
        self.do(self.state.cancel(self.key(msg), payload))

    @request_handler("resize")
    @guarded
    def resize(self, msg: Any) -> None:  # noqa: ANN401
        """More or fewer slices."""
        nodes = msg.payload.get("nodes")
        self.do(self.state.resize(self.key(msg), nodes))

    @request_handler("kubeconfig")
    @guarded
    def kubeconfig(self, msg: Any) -> None:  # noqa: ANN401
        """The administrator's kubeconfig, for the owner of the instance alone."""
        if not self.state.kubeconfig:
            self.refuse(msg, errno.EIO, self.state.failure or "Kubernetes is not up")
        else:
            self.handle.respond(msg, {"kubeconfig": self.state.kubeconfig})

    @request_handler("url")
    @guarded
    def url(self, msg: Any) -> None:  # noqa: ANN401
        """Where a service can be reached from the instance's nodes."""
        order = {"url": str(msg.payload["service"])}
        self.do(self.state.ask(self.key(msg), order))

    @request_handler("down")
    @guarded
    def down(self, msg: Any) -> None:  # noqa: ANN401
        """Answered when nothing is left of the cluster."""
        self.do(self.state.end_all(self.key(msg)))

    # --- Requests of the slices' agents ---

    @request_handler("attach")
    @guarded
    def attach(self, msg: Any) -> None:  # noqa: ANN401
        """An agent that listens for orders; its going away tells that it is lost."""
        news = msg.payload
        self.do(self.state.attached(self.key(msg), news))

    @request_handler("join")
    @guarded
    def join(self, msg: Any) -> None:  # noqa: ANN401
        """Answered with what a node needs to join, as soon as there is a cluster."""
        number = int(msg.payload["number"])
        self.do(self.state.join(self.key(msg), number))

    @request_handler("tell")
    @guarded
    def tell(self, msg: Any) -> None:  # noqa: ANN401
        """News from an agent."""
        number, news = int(msg.payload["number"]), msg.payload
        self.do(self.state.news(number, news))
        self.handle.respond(msg, {})

    @request_handler("disconnect")
    @guarded
    def gone(self, msg: Any) -> None:  # noqa: ANN401
        """A client or agent is gone; nothing is answered."""

        def matches(key: Any) -> bool:  # noqa: ANN401
            held = self.messages.get(key)
            return held is not None and lib.flux_disconnect_match(msg.handle, held.handle)

        self.do(self.state.drop(matches))
        for key in [key for key in self.messages if matches(key)]:
            del self.messages[key]


def _number(value: str) -> int | float | str:
    """An argument's value, as the configuration would have it."""
    try:
        return int(value)
    except ValueError:
        try:
            return float(value)
        except ValueError:
            return value
