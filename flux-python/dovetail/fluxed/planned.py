# SPDX-License-Identifier: LGPL-3.0-or-later
"""The runs in the control slice (steps 4 to 8): each plan is one `dovetail run`, a child process.

Inputs: orders of the broker module. Outputs: the run's directory, and news of its end.
Invariant: no run outlives the slice's agent, however that dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dovetail.usernetes import linux

LOG = "dovetail.log"  # in a run's directory: what `dovetail run` says
GRACE = 10  # seconds for a run to end, once told


class Planned:
    """Runs of this slice, past and present; `tell` and `watch` are its agent's."""

    def __init__(
        self,
        tell: Callable[..., None],
        watch: Callable[[subprocess.Popen[Any], Callable[[], None]], None],
    ) -> None:
        self.tell, self.watch = tell, watch
        self.all: dict[int, dict[str, Any]] = {}
        self.running: subprocess.Popen[bytes] | None = None

    def start(self, order: Mapping[str, Any], kubeconfig: str) -> None:
        """Start a plan, on the cluster or on this slice's cores."""
        number, output = order["number"], Path(order["output"])
        known = {name: order[name] for name in ("number", "plan", "output", "cwd")}
        self.all[number] = {**known, "state": "running"}
        command = [sys.executable, "-m", "dovetail", "run", order["plan"], "-o", str(output)]
        if order["executor"] == "kubernetes":
            command += ["--kubeconfig", kubeconfig]
        environment = package_environment(order.get("environment"))
        try:
            output.mkdir(parents=True, exist_ok=True)
            with open(output / LOG, "ab") as log:
                self.running = subprocess.Popen(
                    command, cwd=order["cwd"], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    env=environment, preexec_fn=apart,
                )  # fmt: skip
        except OSError as error:
            self.ended(number, 2, str(error))
            return
        self.watch(self.running, lambda: self.over(number))

    def over(self, number: int) -> None:
        """A plan's process has ended."""
        assert self.running is not None
        code, self.running = self.running.returncode, None
        why = ""
        if code:
            log = Path(self.all[number]["output"]) / LOG
            with contextlib.suppress(OSError):
                why = (log.read_text(errors="replace").strip().splitlines() or [""])[-1][:500]
        self.ended(number, code, why)

    def ended(self, number: int, code: int, why: str) -> None:
        """Remember and tell."""
        state = "done" if code == 0 else "failed"
        self.all[number].update(state=state, code=code, reason=why)
        self.tell(run=number, code=code, why=why)

    def cancel(self) -> None:
        """Let the present run end."""
        if self.running is not None:
            self.running.send_signal(signal.SIGINT)


def end(child: subprocess.Popen[Any] | None) -> None:
    """End a child, with grace if it takes it."""
    if child is None or child.poll() is not None:
        return
    child.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(GRACE)
    if child.poll() is None:
        child.kill()
        child.wait()


def apart() -> None:
    """In a child: not reached by signals to our group, but never outliving us."""
    os.setsid()
    linux.set_process(linux.PR_SET_PDEATHSIG, signal.SIGTERM)


def package_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment in which this package is found."""
    environment = dict(os.environ if base is None else base)
    top = str(Path(__file__).resolve().parents[2])
    paths = [top, environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
