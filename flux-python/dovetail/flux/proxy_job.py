# SPDX-License-Identifier: LGPL-3.0-or-later
"""The job that a simulation is for Flux: a program, run by `flux python proxy_job.py LAUNCH NAME`.

Inputs: what names its launch, and its name. Outputs: the simulation's output and exit code,
and an exception of the job where that is not how its program ended. It lives as long as the
simulation's pods, also when it is cancelled: then the control slice's agent, which submitted it,
has the simulation stopped, as it has when we are killed before we can say that. A task of the job
that is not its first, as there is one for each further broker, only waits for the end. There may be
a hundred of these on a node for hours, so each is one process, of Flux's own Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
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

from dovetail.host.file_tail import Tail

Handle = Any  # these two are of Flux, which has no types
Future = Any


class ProxyJob:
    """Follows one simulation."""

    def __init__(self, handle: Handle, launch: str, name: str) -> None:
        self.handle, self.launch, self.name = handle, launch, name
        self.job = int(flux.job.JobID(os.environ["FLUX_JOB_ID"]))
        self.first = os.environ["FLUX_TASK_RANK"] == "0"
        self.stopping = False
        self.log: Tail | None = None
        self.end: dict[str, Any] = {"code": 1, "reason": "Flux is gone", "exception": ""}
        handle.event_subscribe("dovetail.loaded")
        self.watchers = [
            handle.msg_watcher_create(
                self.follow, flux.constants.FLUX_MSGTYPE_EVENT, "dovetail.loaded"
            ),
            handle.signal_watcher_create(signal.SIGTERM, self.stop),
            handle.signal_watcher_create(signal.SIGINT, self.stop),
        ]
        for watcher in self.watchers:
            watcher.start()
        self.follow()

    def live(self) -> int:
        """Until the simulation has ended; returns its exit code."""
        with contextlib.suppress(OSError):  # Flux is gone
            self.handle.reactor_run()
        self.copy()
        code, reason = int(self.end["code"]), self.end["reason"]
        if not self.first:
            return 0
        if reason:
            print(f"{self.name}: {reason}", file=sys.stderr, flush=True)
        if self.end["exception"] and not self.stopping:  # else there is one already
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # comes of it
            self.raise_exception(self.end["exception"], reason)
        return code if 0 < code < 256 else 1 if code or reason else 0

    def stop(self, *_: object) -> None:
        """See whether the job is to end, or only we are, as by `flux job kill`: then it is to.

        The simulation's end is waited for.
        """
        with contextlib.suppress(OSError):
            query = {"id": self.job, "keys": ["eventlog"], "flags": 0}
            answer = self.handle.rpc("job-info.lookup", query, nodeid=0).get()
            events = map(json.loads, answer["eventlog"].splitlines())
            if self.first and not any(
                event["name"] == "exception" and event["context"]["severity"] == 0
                for event in events
            ):
                self.raise_exception("cancel", "")
            self.stopping = True

    def raise_exception(self, kind: str, note: str) -> None:
        """End our job, which may have ended by itself."""
        wanted = {"id": self.job, "type": kind, "severity": 0, **({"note": note} if note else {})}
        with contextlib.suppress(OSError):
            self.handle.rpc("job-manager.raise", wanted, nodeid=0).get()

    def follow(self, *_: object) -> None:
        """Ask the module, which may have been loaded anew, how the simulation goes on."""
        streaming = flux.constants.FLUX_RPC_STREAMING
        wanted = {"launch": self.launch}
        self.handle.rpc("dovetail.follow", wanted, nodeid=0, flags=streaming).then(self.told)

    def told(self, future: Future) -> None:
        """The module says where the log is, or how the simulation ended."""
        try:
            value = future.get()
        except OSError:  # the module is not there (yet, or any more) and will say when it is
            return
        if "log" in value:
            self.tail(Path(value["log"]))
        if "code" in value:
            self.end = value
            self.handle.reactor_stop()
        future.reset()

    def tail(self, path: Path) -> None:
        """Copy the log from now on."""
        if self.log is None and self.first:
            with contextlib.suppress(OSError):
                self.log = Tail(path)
                watcher = self.handle.fd_watcher_create(self.log.fileno(), self.copy)
                self.watchers.append(watcher)
                watcher.start()
        self.copy()

    def copy(self, *_: object) -> None:
        """Copy what is new."""
        if self.log is not None:
            sys.stdout.buffer.write(self.log.read())
            sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(ProxyJob(flux.Flux(), *sys.argv[1:]).live())
