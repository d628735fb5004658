# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the tests of `dovetail run` share: plans, the command as a process, and its traces."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from dovetail.core import eventlog
from dovetail.host import cgroups, processes
from dovetail.host.session import SESSION_ROOT
from dovetail.run import resume

from support import known_programs
from support.local_runs import FAKE_MPIRUN, LIMIT, scripts, wait_for

TOP = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "dovetail", "run")
LONG = 3 * LIMIT  # for a whole run: ranks that spin beside another test's may all be on one core
ENDED = ("done", "failed", "checkpointed", "not started")

TUNED = """
import sys
from pathlib import Path
from dovetail.cli.run import tell
from dovetail.controller.settings import Settings
from dovetail.plan import schema
from dovetail.run.run import run
settings = Settings(**{settings!r})
more = dict(settings=settings, checkpoint="--checkpoint" in sys.argv)
ended = run(schema.load(sys.argv[1]), Path(sys.argv[2]), quiet=True, **more)
sys.exit(tell(ended, as_json=True))
"""
"""`dovetail run` with other settings, as a program; its arguments are a plan and a directory."""

# Whether a restart pays depends on the machine's other load; here the least gain is enough.
AT_ONCE = TUNED.replace(
    "{settings!r}", repr({"restart_pays": 0.0, "window": 1.0, "window_limit": 2.0, "steady": 1.0})
)

NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


class Site:
    """A directory to run plans in, and a watch on what they leave behind.

    `prefix` is put before each command, as for another user.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.out = directory / "out"
        self.temporary = directory / "tmp"
        self.case = directory / "case"
        self.token = f"DOVETAIL_TEST={directory}"
        self.prefix: tuple[str, ...] = ()
        self.sessions: set[str] = set()
        self.started: list[subprocess.Popen[str]] = []
        self.bin = directory / "bin"
        for made in (self.temporary, self.case, self.bin):
            made.mkdir()
        (self.bin / "mpirun").write_text(FAKE_MPIRUN)
        (self.bin / "mpirun").chmod(0o755)
        (self.case / "input").write_text("as delivered\n")

    def plan(self, *entries: dict, name: str = "plan.yaml", **limits: object) -> Path:
        """Write a plan; JSON is YAML. An entry gets a case, one rank and a command."""
        usual = {"case": str(self.case), "ranks": 1, "command": ["true"]}
        simulations = [{"name": "sim", **usual, **entry} for entry in entries]
        path = self.directory / name
        path.write_text(json.dumps({"simulations": simulations, **limits}))
        return path

    def shell(self, script: str, *prepare: str, **more: object) -> dict:
        """An entry of a plan whose command, and prepare lines, are scripts."""
        return {
            "command": ["sh", "-c", script],
            "prepare": list(scripts(*prepare)),
            "environment": {"PATH": f"{self.bin}:{os.environ['PATH']}"},
            **more,
        }

    def start(self, *words: object, command: tuple[str, ...] = COMMAND) -> subprocess.Popen[str]:
        """Start `dovetail run` with these words; returns once it has a session, or has ended."""
        run = subprocess.Popen(
            [*self.prefix, *command, *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=(self.directory / "stderr").open("w"),
            env=self.environment(),
            cwd=self.directory,
            start_new_session=True,
            text=True,
        )
        self.started.append(run)
        wait_for(lambda: run.poll() is not None or self.note_session(run.pid), self.errors, LONG)
        return run

    def environment(self) -> dict[str, str]:
        """What every process of the test inherits, and is known by."""
        return {
            **os.environ,
            "PYTHONPATH": str(TOP / "flux-python"),
            "TMPDIR": str(self.temporary),
            "DOVETAIL_TEST": str(self.directory),
            "HOME": str(self.directory),
            "TERM": "xterm",
        }

    def note_session(self, pid: int) -> bool:
        """Remember the session that a process owns."""
        for owner in Path(SESSION_ROOT).glob("dovetail-*/owner"):
            try:
                mine = json.loads(owner.read_text()).get("pid") == pid
            except (OSError, ValueError):
                continue
            if mine:
                self.sessions.add(owner.parent.name)
                return True
        return False

    def run(self, *words: object, **options: object) -> tuple[int, str, str]:
        """Run it to its end; its exit code, output and errors."""
        return self.end(self.start(*words, **options))

    def end(self, run: subprocess.Popen[str], *numbers: signal.Signals) -> tuple[int, str, str]:
        """Send signals to a run as a terminal would, and wait for its end."""
        for number in numbers:
            os.killpg(run.pid, number)
        output, _ = run.communicate(timeout=LONG)
        return run.returncode, output, self.errors()

    def kill_at_random(
        self,
        start: Callable[[int], subprocess.Popen[str]],
        kills: int,
        taken: Callable[[], int],
        steps: int,
    ) -> None:
        """Kill so many runs, which `start` begins by number, each of which goes on from the last.

        Every other one within a second, perhaps before it takes a step; the others up to so many
        `steps` after their start.
        """
        for kill in range(kills):
            until = taken() + random.randrange(steps)
            run = start(kill)
            if kill % 2:
                time.sleep(random.random())
            else:
                wait_for(lambda run=run, at=until: run.poll() is not None or taken() >= at)
            assert run.poll() is None, f"over after {kill} kills"
            self.end(run, signal.SIGKILL)

    def errors(self) -> str:
        return (self.directory / "stderr").read_text()

    def log(self, out: Path | None = None) -> list[dict]:
        """The event log so far, as plain records; a torn line is left out."""
        try:
            text = ((out or self.out) / "events.jsonl").read_text()
        except OSError:
            return []
        return [json.loads(line) for line in text.split("\n")[1:-1]]

    def until(self, condition, what: str = "condition"):
        """Wait for something to be in the event log; `condition` is given the records."""
        why = lambda: f"{what}: {self.errors()}\n{self.log()[-20:]}"  # noqa: E731
        return wait_for(lambda: condition(self.log()), why)

    def of_type(self, kind: str, name: str = "") -> list[dict]:
        """The records of a type, about a simulation if one is named."""
        return [r for r in self.log() if r.get("type") == kind and name in (r.get("name"), "")]

    def summary(self, out: Path | None = None) -> dict:
        return json.loads(((out or self.out) / "summary.json").read_text())

    def states(self, out: Path | None = None) -> dict[str, str]:
        """Name to state, of a run that has ended: checks that all is accounted for."""
        found = self.summary(out)["simulations"]
        assert all(one["state"] in ENDED for one in found), found
        assert all(one["reason"] for one in found if one["state"] != "done"), found
        self.check_log(out)
        return {one["name"]: one["state"] for one in found}

    def check_log(self, out: Path | None = None) -> None:
        """The log replays to the same decisions, and tells what the controller knew."""
        path = (out or self.out) / "events.jsonl"
        assert resume.replay(path) is None
        views = {view.name: view for view in resume.rebuild(path).views()}
        found = self.summary(out)["simulations"]
        told = {one["name"]: (one["state"], one["reason"]) for one in found}
        known = {name: (view.state, view.reason) for name, view in views.items()}
        assert told == known, f"{told}\n{known}"
        head, _ = eventlog.read(path)
        assert [one["name"] for one in found] == [spec.name for spec in head.specs]

    def assert_clean(self) -> None:
        """No process, control group, shared memory or temporary file is left."""
        wait_for(lambda: not self.traces(), lambda: f"still there: {self.traces()}")

    def traces(self) -> list[str]:
        found = [f"process {pid}" for pid in processes.members(self.token)]
        found += [f"{self.temporary}/{name}" for name in os.listdir(self.temporary)]
        found += [str(path) for path in self.directory.glob("out*/.*")]
        for top in (SESSION_ROOT, tempfile.gettempdir(), *cgroups.find().directories):
            found += [f"{top}/{n}" for n in self.sessions if os.path.exists(f"{top}/{n}")]
        return found

    def processes(self, word: str) -> list[int]:
        """The processes of the test with `word` in their command line."""
        found = []
        for pid in processes.members(self.token):
            try:
                if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
            except OSError:
                continue
        return found


@pytest.fixture
def site():
    # Not pytest's own directory: each pytest that starts closes that to other users.
    with tempfile.TemporaryDirectory(prefix="dovetail-test-") as name:
        os.chmod(name, 0o755)
        place = Site(Path(name))
        yield place
        for run in place.started:
            if run.poll() is None:
                run.kill()
            run.communicate()
        place.assert_clean()


def busy(*milliseconds: int, iterations: int = 10**6, how: str = "sleep", mpi: str = "openmpi"):
    """An entry of a plan: ranks that work so long per iteration, and meet."""
    program = known_programs.build(mpi, "known/busy.c")
    words = [program, how, str(iterations), *map(str, milliseconds)]
    return {
        "ranks": len(milliseconds),
        "weights": list(milliseconds),
        "command": [known_programs.LAUNCHERS[mpi], "-np", str(len(milliseconds)), *words],
    }
