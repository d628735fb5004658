# SPDX-License-Identifier: LGPL-3.0-or-later
"""A pod's keeper, which runs its simulation, as a child of the pod's entry.

Inputs: a Run, a stop, the keeper's messages on a pipe (see `dovetail.mpi.supervisor`).
Outputs: Started and Result. Invariants: there is one keeper and one Result, whatever is asked for
twice; a keeper that dies without one gets one, and what it leaves is ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys

from dovetail.executors.pods import command, messages
from dovetail.host.cgroups import Group
from dovetail.host.line_splitter import LineSplitter
from dovetail.host.session import end_simulation

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class Keeping:
    """The keeper of the simulation whose directory this is; `pid` is 0 while it does not run.

    `watch` and `say` are as in `placing.Placing`; `told` is what has been said, by kind.
    """

    def __init__(
        self,
        directory: str,
        watch: Callable[[int, Callable[[], None] | None], None],
        say: Callable[[messages.Message], None],
    ) -> None:
        self.pid = 0
        self.told: dict[str, messages.Started | messages.Result] = {}
        self._directory = directory
        self._simulation = os.path.basename(directory)
        self._watch, self._say = watch, say
        self._commands = self._messages = -1
        self._splitter = LineSplitter()

    @property
    def pending(self) -> bool:
        """Whether there is a Result to come."""
        return bool(self.pid) and "result" not in self.told

    def code(self, otherwise: int) -> int:
        """The exit code of the Result, `otherwise` if there is none."""
        result = self.told.get("result")
        return result.code & 255 if isinstance(result, messages.Result) else otherwise

    def start(self, run: messages.Run) -> None:
        """Start the keeper, the first time."""
        if self.pid or "result" in self.told:
            return
        own = {
            "directory": self._directory,
            "temporary": self._directory + "/tmp",
            "group": ["", ""],
            "job": ["", ""],
            "cpus": [],
            "hosts": run.hosts,
        }
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._directory + "/tmp", 0o700)
        text = json.dumps({**run.config, **own}).encode()
        read_end, self._commands = os.pipe()
        self._messages, write_end = os.pipe()
        actions = [(os.POSIX_SPAWN_DUP2, read_end, 0), (os.POSIX_SPAWN_DUP2, write_end, 1)]
        words = command("mpi.supervisor", sys.executable)
        self.pid = os.posix_spawn(words[0], words, os.environ, file_actions=actions, setpgroup=0)
        os.close(read_end)
        os.close(write_end)
        os.set_blocking(self._messages, False)
        self._watch(self._messages, self._hear)
        self._tell(len(text).to_bytes(4, "little") + text)

    def stop(self) -> None:
        """Ask the simulation to end, in its grace; what has not started never will."""
        if self.pid:
            self._tell(b"stop\n")
        else:
            self._conclude(128 + signal.SIGTERM, "stopped before it started")

    def let_go(self) -> None:
        """Nothing more is needed of the keeper: it ends what is left, and goes."""
        if self._commands >= 0:
            os.close(self._commands)
            self._commands = -1

    def bury(self, code: int) -> None:
        """The keeper has ended, with this code or by minus this signal. Its last words first."""
        self.pid = 0
        if self._messages >= 0:
            self._hear()
        if "result" not in self.told:
            end_simulation(self._directory, Group("", ""), os.getpid())
            why = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
            self._conclude(128 - code if code < 0 else 1, f"its keeper failed: {why}")

    def _tell(self, text: bytes) -> None:
        with contextlib.suppress(OSError):  # it has gone, which `bury` hears of
            while text and self._commands >= 0:
                text = text[os.write(self._commands, text) :]

    def _hear(self) -> None:
        """Take in the keeper's messages."""
        try:
            chunk = os.read(self._messages, 1 << 16)
        except BlockingIOError:
            return
        for line in self._splitter.take(chunk):
            said = json.loads(line)
            if said["kind"] == "started":
                self.told["started"] = messages.Started(self._simulation, said["mpi"])
                self._say(self.told["started"])
            else:
                self._conclude(said["code"], said["reason"], said["trouble"])
        if not chunk:
            self._watch(self._messages, None)
            os.close(self._messages)
            self._messages = -1

    def _conclude(self, code: int, reason: str, trouble: str = "") -> None:
        if "result" not in self.told:
            result = messages.Result(self._simulation, code, reason, trouble)
            self.told["result"] = result
            self._say(result)
