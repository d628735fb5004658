# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the tests of agents and entrypoints share: nodes and pods are processes of this machine."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dovetail.executors import pods
from dovetail.executors.kubernetes.agent_hub import Hub
from dovetail.executors.pods import messages
from dovetail.host import install_paths, processes
from dovetail.host.session import SESSION_ROOT, join_session, shared_session
from dovetail.plan import command_line

from support.local_runs import FAKE_MPIRUN, LIMIT, scripts, wait_for

ADDRESSES = ("127.0.0.1", "127.0.0.2")


class Cluster:
    """A hub, and on its nodes agents and entrypoints, each a process of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run = "t" + secrets.token_hex(4)
        self.token = f"DOVETAIL_TEST={directory}"
        self.hub = Hub("127.0.0.1", directory / "hub")
        self.heard: list[tuple[str, messages.Message]] = []
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.entrypoints: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self.uids = itertools.count()
        self.case = directory / "source"
        self.case.mkdir()
        (self.case / "input").write_text("as delivered\n")
        self.bin = directory / "bin"
        self.bin.mkdir()
        (self.bin / "mpirun").write_text(FAKE_MPIRUN)
        (self.bin / "mpirun").chmod(0o755)
        self.credentials = directory / "credentials"
        self.write_credentials()

    def write_credentials(self) -> None:
        self.credentials.mkdir(exist_ok=True)
        for name, text in self.hub.credentials().items():
            (self.credentials / name).write_text(text)

    def session(self, node: str) -> Path:
        return Path(shared_session(self.run, node))

    @contextlib.contextmanager
    def another_pod(self, node: str = "one") -> Iterator[None]:
        """Keep a node's session, as the run's other pods there do.

        Without any process in it, the agents of other runs, such as of tests beside, sweep it.
        """
        handle = join_session(str(self.session(node)))
        try:
            yield
        finally:
            os.close(handle)

    def command(self, module: str, *words: str) -> list[str]:
        return [
            *pods.command(f"executors.pods.{module}", (sys.executable,)),
            "--run",
            self.run,
            *words,
        ]

    def agent(
        self, node: str = "one", *prefix: str, cgroups: str = "", machine: str = "",
        seconds: dict[str, float] | None = None, log: Path | None = None, **more: str
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        """A node's agent, with other `seconds` than its module has; it adds to its `log`."""
        words = self.command("agent", "--node", node, "--credentials", str(self.credentials))
        words += ["--cgroups", cgroups] if cgroups else []
        words += ["--machine", machine] if machine else []
        change = "".join(f"agent.{name} = {value}; " for name, value in (seconds or {}).items())
        change = f"; from dovetail.executors.pods import agent; {change}main()"
        words = [word.replace("; main()", change) for word in words]
        with open(log, "ab") if log else contextlib.nullcontext() as errors:
            self.agents[node] = subprocess.Popen(
                [*prefix, *words], env={**os.environ, **more}, stderr=errors
            )
        return self.agents[node]

    def entrypoint(
        self, simulation: str, group: int = 0, node: str = "one", *prefix: str, **more: str
    ) -> subprocess.Popen[bytes]:
        words = self.command("entrypoint", "--node", node, "--simulation", simulation)
        words += ["--group", str(group), "--uid", f"uid{next(self.uids)}"]
        started = subprocess.Popen([*prefix, *words], env={**os.environ, **more})
        self.entrypoints[simulation, group] = started
        return started

    def until(self, kind: type, simulation: str = "", limit: float = LIMIT, **wanted: object):
        """The next such message about the simulation; those before it are kept in `heard`."""
        start = time.monotonic()
        while time.monotonic() - start < limit:
            for place, (_, message) in enumerate(self.heard):
                fits = isinstance(message, kind)
                fits = fits and (not simulation or message.simulation == simulation)
                if fits and all(getattr(message, k) == v for k, v in wanted.items()):
                    del self.heard[place]
                    return message
            self.heard += wait_for(
                self.hub.take, lambda: f"no {kind.__name__} of {simulation}: {self.heard}"
            )
        raise AssertionError(f"no {kind.__name__} of {simulation} in {limit} s: {self.heard}")

    def config(self, name: str, command: tuple[str, ...], ranks: int = 1, *prepare: str, **more):
        environment = {"DOVETAIL_TEST": str(self.directory), **more}
        return {
            "name": name,
            "case": str(self.case),
            "home": str(self.directory / "run" / name),
            "ranks": ranks,
            "command": list(command),
            "prepare": [(line, command_line.split(line)) for line in scripts(*prepare)],
            "environment": {"PATH": f"{self.bin}:{os.environ['PATH']}", **environment},
            "mpi": None,
            "libraries": install_paths.libraries(),
            "log_limit": 64 << 20,
        }

    def launch(self, name: str, script: str, *prepare: str, prefix: tuple[str, ...] = ()) -> None:
        """Run a shell script as a simulation of one rank in one pod on node one."""
        self.entrypoint(name, 0, "one", *prefix)
        self.until(messages.Pod, name)
        config = self.config(name, ("sh", "-c", script), 1, *prepare)
        self.hub.tell(messages.Run(name, config, [{"address": ADDRESSES[0], "ranks": 1}]))

    def log(self, name: str) -> str:
        path = self.directory / "run" / name / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def end(self, name: str, code: int = 0) -> None:
        """End the simulation; its entrypoints exit with the code."""
        self.hub.tell(messages.End(name, code))
        for (simulation, _), entrypoint in self.entrypoints.items():
            if simulation == name:
                assert entrypoint.wait(LIMIT) == code

    def close(self) -> None:
        for entrypoint in self.entrypoints.values():
            if entrypoint.poll() is None:
                entrypoint.kill()
            entrypoint.wait()
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)
            agent.wait()
        self.hub.close(forget=True)
        wait_for(lambda: not self.traces(), lambda: f"still there: {self.traces()}")

    def traces(self) -> list[str]:
        """Processes, and what is in shared memory, that a test has left behind."""
        found = [f"process {pid} {name_of(pid)}" for pid in processes.members(self.token)]
        found += [name for name in os.listdir(SESSION_ROOT) if self.run in name]
        return found


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def state(pid):
    """The process's state letter; T is stopped."""
    with contextlib.suppress(OSError):
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return "T" if letter in "ZX" else letter
    return "T"  # a short sleep that is over, and that a parent which stands may not have collected


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    # Every agent and entrypoint inherits it, so that no process of the test can hide.
    monkeypatch.setenv("DOVETAIL_TEST", str(tmp_path))
    made = Cluster(tmp_path)
    yield made
    made.close()
