# SPDX-License-Identifier: LGPL-3.0-or-later
"""The job that a simulation is for Flux: `flux dovetail simulation`.

Inputs: what names its launch, and its name. Outputs: the simulation's output and exit code,
and an exception of the job where that is not how its program ended. It lives as long as the
simulation's pods, also when it is cancelled: then the control slice's agent, which submitted it,
has the simulation stopped, as it has when we are killed before we can say that. A task of the job
that is not its first, as there is one for each further broker, only waits for the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import sys
from pathlib import Path
from typing import Any

from dovetail.core.errors import WorkFailed
from dovetail.flux.client import Client
from dovetail.flux.load import flux
from dovetail.host import processes
from dovetail.host.file_tail import Tail
from dovetail.host.line_splitter import LineSplitter


class ProxyJob:
    """Follows one simulation."""

    def __init__(self, launch: str, name: str) -> None:
        self.launch, self.name, self.job = launch, name, os.environ["FLUX_JOB_ID"]
        self.first = os.environ["FLUX_TASK_RANK"] == "0"
        self.stopping = False
        self.wake = processes.signal_pipe()
        signal.signal(signal.SIGTERM, self.stop)
        signal.signal(signal.SIGINT, self.stop)
        self.client = Client()
        self.selector = selectors.DefaultSelector()
        self.log: Tail | None = None
        self.end: dict[str, Any] | None = None
        self.splitter = LineSplitter()

    def live(self) -> int:
        """Until the simulation has ended; returns its exit code."""
        self.selector.register(self.wake, selectors.EVENT_READ, self.woken)
        relay = self.client.process.stdout
        assert relay is not None
        self.selector.register(relay, selectors.EVENT_READ, self.heard)
        while self.end is None:
            for key, _ in self.selector.select():
                key.data()
        self.copy()
        self.client.close()
        code, reason = int(self.end["code"]), self.end["reason"]
        if not self.first:
            return 0
        if reason:
            print(f"{self.name}: {reason}", file=sys.stderr, flush=True)
        if self.end["exception"] and not self.stopping:  # else there is one already
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # comes of it
            kind = self.end["exception"]
            with contextlib.suppress(WorkFailed):  # it may have ended by itself
                flux("job", "raise", "--severity=0", f"--type={kind}", self.job, reason)
        return code if 0 < code < 256 else 1 if code or reason else 0

    def stop(self, *_: object) -> None:
        """A signal: the job is to end, or only we are, as by `flux job kill`."""

    def woken(self) -> None:
        """See that the job is told to end; the simulation's end is waited for."""
        os.read(self.wake, 4096)
        with contextlib.suppress(WorkFailed):
            if self.first and not re.search(
                r" exception .*\bseverity=0\b", flux("job", "eventlog", self.job)
            ):
                flux("cancel", self.job)
            self.stopping = True

    def heard(self) -> None:
        """Lines from the module."""
        assert self.client.process.stdout is not None
        block = os.read(self.client.process.stdout.fileno(), 1 << 16)
        if not block:
            self.end = {"code": 1, "reason": "Flux is gone", "exception": ""}
        for line in map(json.loads, self.splitter.take(block)):
            value = line.get("value", {})
            if "event" in line:  # the module was loaded, perhaps anew
                with contextlib.suppress(WorkFailed):
                    self.client.send("dovetail.follow", {"launch": self.launch}, stream=True)
            elif "code" in value:
                self.end = value
            if "log" in value:
                self.follow(Path(value["log"]))

    def follow(self, path: Path) -> None:
        """Copy the log from now on."""
        if self.log is None and self.first:
            with contextlib.suppress(OSError):
                self.log = Tail(path)
                self.selector.register(self.log, selectors.EVENT_READ, self.copy)
        self.copy()

    def copy(self) -> None:
        """Copy what is new."""
        if self.log is not None:
            sys.stdout.buffer.write(self.log.read())
            sys.stdout.flush()


def main(launch: str, name: str) -> int:
    """Be the job of a simulation."""
    return ProxyJob(launch, name).live()
