# SPDX-License-Identifier: LGPL-3.0-or-later
"""Requests for programs without Flux's bindings: a program, run by `flux python relay.py`.

`client.py` starts it, for commands and slice agents, which need no Flux bindings then. Inputs:
requests, lines of JSON on standard input, {"id", "topic", "payload", "stream"}, where the topic
`submit` has a jobspec `spec` submitted on the cores that `jobs` have, or else the job that we are
in, and answers again if that is told to end. Outputs, on standard output: answers, as lines {"id",
"value"} or {"id", "error": [number, text]}, and events: first {"event": "connected", "rank"}, and
{"event": "loaded"} whenever the module was loaded. Invariants: it ends with its input, or with the
broker, and then the module sees a disconnect; it reads on while nobody reads what it writes, so
that the two never wait for each other.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The files beside this one must not be taken for modules of Python's; their package is found.
    sys.path[:1] = []
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import flux
import flux.constants
import flux.job
from flux.resource import ResourceSet

from dovetail.flux import jobspec
from dovetail.flux.client import NO_INSTANCE, SUBMIT
from dovetail.host.line_splitter import LineSplitter

Handle = Any  # these two are of Flux, which has no types
Future = Any
SIGNALLED = 128  # plus the signal: the exit code that a job shell gives a killed task


class Relay:
    """Carries requests from standard input to Flux, and answers back."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.lines = LineSplitter()
        self.unwritten = bytearray()
        handle.event_subscribe("dovetail.loaded")
        self.events = handle.msg_watcher_create(
            self.loaded, flux.constants.FLUX_MSGTYPE_EVENT, "dovetail.loaded"
        )
        self.events.start()
        os.set_blocking(1, False)
        self.output = handle.fd_watcher_create(1, self.writable, flux.constants.FLUX_POLLOUT)
        self.say({"event": "connected", "rank": handle.get_rank()})
        os.set_blocking(0, False)
        self.input = handle.fd_watcher_create(0, self.readable)
        self.input.start()

    def say(self, line: dict[str, Any]) -> None:
        """One line of output."""
        self.unwritten += json.dumps(line).encode() + b"\n"
        self.writable()

    def writable(self, *_: object) -> None:
        """Write what can be written, the rest later; when nobody is there to read it, this ends."""
        try:
            while self.unwritten:
                del self.unwritten[: os.write(1, self.unwritten)]
        except BlockingIOError:
            self.output.start()
            return
        except OSError:
            self.handle.reactor_stop()
        self.output.stop()

    def loaded(self, *_: object) -> None:
        """The module was loaded, perhaps anew."""
        self.say({"event": "loaded"})

    def readable(self, *_: object) -> None:
        """Requests, or the end of them."""
        try:
            block = os.read(0, 1 << 16)
        except BlockingIOError:
            return
        if not block:
            self.handle.reactor_stop()
            return
        for line in self.lines.take(block):
            self.request(json.loads(line))

    def request(self, request: dict[str, Any]) -> None:
        """Send one request."""
        if request["topic"] == SUBMIT:
            self.submit(request)
            return
        flags = flux.constants.FLUX_RPC_STREAMING if request.get("stream") else 0
        future = self.handle.rpc(
            request["topic"], request.get("payload", {}), nodeid=0, flags=flags
        )
        future.then(self.answered, request)

    def submit(self, request: dict[str, Any]) -> None:
        """Submit a job on cores that others have."""
        wanted = request["payload"]
        found = []
        try:
            for job in wanted["jobs"] or [flux.job.JobID(os.environ["FLUX_JOB_ID"])]:
                # As it is now: with the time of before, the job would end when that is over.
                flags = flux.constants.FLUX_JOB_LOOKUP_CURRENT
                query = {"id": job, "keys": ["R"], "flags": flags}
                answer = self.handle.rpc("job-info.lookup", query, nodeid=0)
                found.append(ResourceSet(answer.get()["R"]))
        except OSError as error:
            self.say({"id": request["id"], "error": [error.errno, str(error)]})
            return
        held = found[0].union(*found[1:])
        spec = wanted["spec"]
        spec["resources"][0]["count"] = held.nnodes
        spec["attributes"]["system"]["alloc-bypass"] = {"R": held.to_dict()}
        flux.job.submit_async(self.handle, json.dumps(spec)).then(self.submitted, request)

    def submitted(self, future: Future, request: dict[str, Any]) -> None:
        """Pass on which job it is, or why there is none."""
        try:
            job = future.get_id()
        except OSError as error:
            self.say({"id": request["id"], "error": [error.errno, str(error)]})
            return
        self.say({"id": request["id"], "value": {"job": int(job)}})
        flux.job.event_watch_async(self.handle, job).then(self.happened, request, int(job))

    def happened(self, future: Future, request: dict[str, Any], job: int) -> None:
        """Pass on that a job which we submitted was told to end, or was killed."""
        try:
            event = future.get_event()
        except OSError:  # it has ended and is forgotten
            return
        told = event.context if event is not None else {}
        started = event is not None and event.name == "start"
        if started and jobspec.has_default_duration(self.handle.conf_get()):
            update = jobspec.without_limit(job)
            self.handle.rpc("job-manager.update", update, nodeid=0).then(lambda _: None)
        fatal = told.get("severity") == 0
        killed = told.get("status", 0) >> 8 > SIGNALLED
        if fatal and told["type"] == "exec":
            request["lost"] = True  # by Flux, and not for the user's wish: one without may go on
        elif fatal or (killed and "lost" not in request):
            self.say({"id": request["id"], "value": {"cancelled": True}})

    def answered(self, future: Future, request: dict[str, Any]) -> None:
        """Pass an answer on."""
        try:
            value = future.get()
        except OSError as error:
            text = future.error_string() or os.strerror(error.errno or 0)
            self.say({"id": request["id"], "error": [error.errno, text]})
            return
        self.say({"id": request["id"], "value": value})
        if request.get("stream"):
            future.reset()


def main() -> int:
    """Relay until the input ends."""
    try:
        handle = flux.Flux()
    except OSError:
        return NO_INSTANCE  # who started us says so
    try:
        relay = Relay(handle)
        handle.reactor_run()
        del relay  # which had to live so long
    except OSError as error:
        print(f"no Flux instance: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
