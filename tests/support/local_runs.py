# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the tests of the local executor share; run as a script it is a controlling process.

As a script: `localrun.py DIRECTORY PHASE` launches a simulation that never ends by itself, prints
the session's name once the simulation is in PHASE, and drives it until somebody ends it.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import time
from pathlib import Path

import pytest
from dovetail.core import protocol
from dovetail.executors.local.executor import LocalExecutor
from dovetail.host import cgroups, processes
from dovetail.host.session import SESSION_ROOT

LIMIT = 120.0  # seconds that any condition may take; a limit, never an expectation

FAKE_MPIRUN = """#!/bin/sh
# Starts the command once per rank and fails if one of them does.
[ "$1" = -np ] || exit 64
n=$2; shift 2; i=0; pids=
while [ $i -lt $n ]; do RANK=$i "$@" & pids="$pids $!"; i=$((i + 1)); done
code=0
for pid in $pids; do wait $pid || code=$?; done
exit $code
"""

WITHOUT_MAIN_THREAD = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(1000,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def scripts(*lines: str) -> tuple[str, ...]:
    """Lines of a shell as prepare lines, which run without one."""
    return tuple(shlex.join(("sh", "-c", line)) for line in lines)


class Site:
    """A place to run simulations of shell commands in, and to check that it is left clean."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.token = f"DOVETAIL_TEST={directory}"
        self.sessions: list[str] = []
        self.executors: list[LocalExecutor] = []
        self.events: list[protocol.Event] = []
        self.case = directory / "source"
        self.bin = directory / "bin"
        if not self.case.exists():
            self.case.mkdir()
            (self.case / "input").write_text("as delivered\n")
            self.bin.mkdir()
            (self.bin / "mpirun").write_text(FAKE_MPIRUN)
            (self.bin / "mpirun").chmod(0o755)

    def executor(self, **options: object) -> LocalExecutor:
        made = LocalExecutor(self.directory / "run", **options)
        self.executors.append(made)
        self.sessions.append(os.path.basename(made.session))
        return made

    def spec(self, name: str, script: str, *prepare: str, **options: object) -> protocol.Spec:
        options.setdefault("ranks", 1)
        options.setdefault("case", str(self.case))
        options.setdefault("command", ("sh", "-c", script))
        path = f"{self.bin}:{os.environ['PATH']}"
        environment = (("PATH", path), ("DOVETAIL_TEST", str(self.directory)))
        return protocol.Spec(
            name, "family", weights=(1.0,) * options["ranks"],
            prepare=scripts(*prepare),
            environment=environment, **options,
        )  # fmt: skip

    def until(self, executor, name, kind=protocol.Finished, limit=LIMIT):
        """Drive the executor until there is such an event for the simulation; returns it."""
        start = time.monotonic()
        while time.monotonic() - start < limit:
            new = executor.observe(time.monotonic())
            self.events += new
            for event in new:
                if isinstance(event, kind) and name in (
                    getattr(event, "names", None) or (event.name,)
                ):
                    return event
            executor.wait(1.0)
        raise AssertionError(f"{name}: no {kind.__name__} in {limit} s; had {self.events}")

    def log(self, name: str) -> str:
        return (self.directory / "run" / name / "log").read_text(errors="replace")

    def assert_clean(self) -> None:
        """No process, control group, shared memory or temporary file is left."""
        wait_for(lambda: not self.traces(), lambda: f"still there: {self.traces()}")

    def traces(self) -> list[str]:
        found = [f"process {pid}" for pid in processes.members(self.token)]
        place = cgroups.find()
        places = [SESSION_ROOT, tempfile.gettempdir(), *place.directories]
        for name in self.sessions:
            found += [f"{top}/{name}" for top in places if os.path.exists(f"{top}/{name}")]
        return found


def wait_for(condition, what="condition", limit=LIMIT):
    """Look again and again until the condition holds; its value.

    To look takes CPU time from what it waits for, so there are pauses.
    """
    start = time.monotonic()
    while True:
        looked = time.monotonic()
        value = condition()
        if value:
            return value
        assert time.monotonic() - start < limit, what() if callable(what) else what
        time.sleep(max(0.02, 2 * (time.monotonic() - looked)))


def share(millicores: int = 1000, **options: object) -> protocol.Share:
    return protocol.Share((millicores,), **options)


@pytest.fixture
def site(tmp_path, monkeypatch):
    # Every supervisor inherits it, so that no process of the test can hide.
    monkeypatch.setenv("DOVETAIL_TEST", str(tmp_path))
    place = Site(tmp_path)
    yield place
    for executor in place.executors:
        executor.close()
    place.assert_clean()


def control(directory: Path, phase: str) -> None:
    """Be a controlling process; see above."""
    site = Site(directory)
    executor = site.executor()
    hang = 'touch "$DOVETAIL_TEST/reached"; trap "" TERM; while :; do sleep 1000; done'
    spec = site.spec("sim", hang, hang if phase == "prepare" else "true")
    if phase != "idle":
        executor.launch(spec, share())
    while phase not in ("idle", "starting") and not (directory / "reached").exists():
        executor.wait(0.05)
        executor.observe(0.0)
    if phase == "suspended":
        executor.resize({"sim": share(suspended=True)})
    print(site.sessions[0], flush=True)
    while True:
        executor.wait(60.0)
        executor.observe(0.0)


if __name__ == "__main__":
    control(Path(sys.argv[1]), sys.argv[2])
