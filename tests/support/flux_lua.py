# SPDX-License-Identifier: LGPL-3.0-or-later
"""A Flux instance for the tests (tier flux), with plugins written in Lua loaded into it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dovetail.core.errors import BadInput
from dovetail.host import install_paths

LIMIT = 120  # seconds; a limit for hangs, not an expectation
ACTIVE = 62  # all states of a job from DEPEND to CLEANUP
# Answers for an instance, a line for a line: each command of Flux in Python takes half a second.
ASKED = f"""
import json, sys, flux
handle = flux.Flux()
for line in sys.stdin:
    topic, payload = json.loads(line)
    try:
        found = handle.rpc(topic, payload).wait_for({LIMIT}).get()
        print(json.dumps([found, ""]), flush=True)
    except OSError as error:
        print(json.dumps([None, str(error)]), flush=True)
"""

TOPICS = [
    "job.create",
    "job.validate",
    "job.dependency.known",
    "job.new",
    "job.state.depend",
    "job.state.priority",
    "job.state.sched",
    "job.state.run",
    "job.state.cleanup",
    "job.state.inactive",
    "job.inactive-add",
    "job.inactive-remove",
    "job.destroy",
    "job.priority.get",
    "job.update",
    "job.update.attributes.system.duration",
    "job.event.alloc",
    "job.event.start",
    "job.event.finish",
]


def command() -> str:
    """The flux command; skips where there is none."""
    for place in (os.environ.get("FLUX"), shutil.which("flux"), "/opt/flux/bin/flux"):
        if place and os.access(place, os.X_OK):
            return place
    pytest.skip("no flux here")


def host() -> Path:
    """The library that runs Lua plugins; skips where it is not built."""
    try:
        return install_paths.jobtap("carve").resolve()
    except BadInput as error:
        pytest.skip(str(error))


class Instance:
    """A running instance; `run` is a command in it."""

    def __init__(self, flux: str, uri: str, scratch: Path) -> None:
        self.flux, self.uri, self.scratch = flux, uri, scratch
        self._asked: subprocess.Popen[str] | None = None

    def start(self, *words: str, **more: Any) -> subprocess.Popen[str]:
        """Start a flux command."""
        return subprocess.Popen(
            [self.flux, *words], env={**os.environ, "FLUX_URI": self.uri}, cwd=self.scratch,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more,
        )  # fmt: skip

    def run(self, *words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a flux command to its end, whatever that is."""
        with self.start(*words, stdin=subprocess.PIPE) as process:
            try:
                output, errors = process.communicate(stdin, timeout=LIMIT)
            finally:
                process.kill()
        return subprocess.CompletedProcess(words, process.returncode, output, errors)

    def ok(self, *words: str, stdin: str | None = None) -> str:
        """What a flux command prints; it must succeed."""
        done = self.run(*words, stdin=stdin)
        assert done.returncode == 0, f"flux {' '.join(words)}: {done.stderr}"
        return done.stdout.strip()

    def ask(self, topic: str, payload: dict[str, Any] | None = None) -> tuple[Any, str]:
        """What a service answers; or None, and why it refuses."""
        if self._asked is None:
            self._asked = self.start("python", "-c", ASKED, stdin=subprocess.PIPE)
        assert self._asked.stdin
        assert self._asked.stdout
        print(json.dumps([topic, payload]), file=self._asked.stdin, flush=True)
        line = self._asked.stdout.readline()
        found, why = json.loads(line)
        return found, why

    def close(self) -> None:
        """End what asks for us."""
        if self._asked is not None:
            self._asked.communicate()

    # --- plugins ---

    def write(self, name: str, lua: str) -> Path:
        """A plugin of this text; the path to load."""
        (self.scratch / f"{name}.lua").write_text(textwrap.dedent(lua))
        plugin = self.scratch / f"{name}.so"
        if not plugin.exists():
            plugin.symlink_to(host())
        return plugin

    def load(self, name: str, lua: str, *words: str) -> None:
        """Write a plugin and load it, with a configuration as for `flux jobtap load`."""
        self._load(self.write(name, lua), words)

    def _load(self, path: Path, words: tuple[str, ...]) -> None:
        pairs = [word.split("=", 1) for word in words]
        conf = {"conf": {key: json.loads(value) for key, value in pairs}} if words else {}
        _, why = self.ask("job-manager.jobtap", {"load": str(path), **conf})
        assert not why

    @contextlib.contextmanager
    def plugin(self, name: str, lua: str | None = None, *words: str) -> Iterator[None]:
        """A plugin of this text, or one of ours, while in here."""
        path = install_paths.jobtap(name) if lua is None else self.write(name, lua)
        self._load(path, words)
        try:
            yield
        finally:
            self.ask("job-manager.jobtap", {"remove": f"{name}.so"})

    def query(self, name: str) -> dict[str, Any]:
        """What a plugin says of itself."""
        found, why = self.ask("job-manager.jobtap-query", {"name": f"{name}.so"})
        assert not why
        return found

    # --- jobs ---

    def submit(self, *words: str) -> str:
        """A job's id."""
        return self.ok("submit", *words)

    def wait(self, job: str, event: str) -> None:
        """Until an event is in the job's eventlog."""
        self.ok("job", "wait-event", "-t", str(LIMIT), job, event)

    def events(self, job: str) -> list[dict[str, Any]]:
        """A job's eventlog."""
        lines = self.ok("job", "eventlog", "-f", "json", job).splitlines()
        return [json.loads(line) for line in lines]

    def contexts(self, job: str, event: str) -> list[dict[str, Any]]:
        """The contexts of all events of one name."""
        return [e.get("context", {}) for e in self.events(job) if e["name"] == event]

    def state(self, job: str) -> str:
        """A job's state."""
        return self.ok("jobs", "-no", "{state}", job)

    def clear(self) -> None:
        """No jobs and no plugins any more."""
        self.ask("job-manager.jobtap", {"remove": "*"})  # or there is none
        ended = {"userid": os.getuid(), "states": ACTIVE, "severity": 0, "type": "cancel"}
        for topic, payload in (("raiseall", {**ended, "dry_run": False}), ("idle", None)):
            _, why = self.ask(f"job-manager.{topic}", payload)
            assert not why
        self.ok("config", "load", stdin="")

    def log(self) -> str:
        """The brokers' log."""
        return self.ok("dmesg")


@contextlib.contextmanager
def instance(size: int = 1, *options: str) -> Iterator[Instance]:
    """An instance of `size` brokers on this machine; gone afterwards, with its jobs.

    The options are those of flux-start(1).
    """
    flux = command()
    host()
    with tempfile.TemporaryDirectory(prefix="dovetail-flux-") as scratch:
        process = subprocess.Popen(
            [flux, "start", "-s", str(size), *options,
             "sh", "-c", "echo $FLUX_URI; cat >/dev/null"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=scratch,
            env={k: v for k, v in os.environ.items() if not k.startswith("FLUX_")},
        )  # fmt: skip
        try:
            assert process.stdout
            assert process.stdin
            uri = process.stdout.readline().strip()
            assert uri, "flux start failed"
            with contextlib.closing(Instance(flux, uri, Path(scratch))) as made:
                yield made
            subprocess.run(
                [flux, "cancel", "--all"], env={**os.environ, "FLUX_URI": uri}, timeout=LIMIT,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            process.stdin.close()
            assert process.wait(LIMIT) == 0
        finally:
            if process.poll() is None:
                process.terminate()  # lets the brokers end; killing it would leave them
                process.wait(LIMIT)


@pytest.fixture(scope="module")
def running() -> Iterator[Instance]:
    with instance() as one:
        yield one


@pytest.fixture
def flux(running: Instance) -> Iterator[Instance]:
    yield running
    running.clear()
