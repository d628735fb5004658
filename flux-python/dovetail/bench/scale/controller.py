# SPDX-License-Identifier: LGPL-3.0-or-later
"""The executor for Kubernetes with many pods, in a process of its own whose cost is its alone.

`python -m dovetail.bench.scale.controller KUBECONFIG FOLDER SIMULATIONS PODS ROUNDS SECONDS`,
started by `pods.py`. Each simulation has so many PODS, of a rank each; they are resized for so many
ROUNDS, after they were watched for so many SECONDS. Output: a line of JSON for each step, with what
it took in seconds, CPU time and requests to the API. It is what `dovetail run` has but
for the controller's decisions, which `ranks` measures.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dovetail.core import protocol
from dovetail.core.errors import WorkFailed
from dovetail.executors.kubernetes import resizes
from dovetail.executors.kubernetes.api import Api
from dovetail.executors.kubernetes.executor import KubernetesExecutor
from dovetail.executors.kubernetes.session import Session
from dovetail.run.loop import LOOK, REST

CPU = (10, 20)  # millicores that ranks ask for in turn
SETTLE = 5.0  # seconds after the start that do not count
LIMIT = 3600.0  # seconds that a step may take


class CountedApi(Api):
    """Counts requests."""

    def __init__(self, kubeconfig: Path) -> None:
        super().__init__(kubeconfig)
        self.requests = 0

    def _open(self, *of: Any) -> Any:  # noqa: ANN401
        self.requests += 1
        return super()._open(*of)


class Run:
    """One run of equal simulations."""

    def __init__(self, kubeconfig: Path, folder: Path, count: int, size: int) -> None:
        case = folder / "case"
        case.mkdir()
        self.size = size
        self.specs = [
            protocol.Spec(f"s{number}", "many", str(case), size, (1.0,) * size, ("sleep", "1"),
                          ranks_per_pod=1)
            for number in range(count)
        ]  # fmt: skip
        resizes.SLOW = LIMIT  # or what takes longer than a minute would be taken back
        self.api = CountedApi(kubeconfig)
        self.api.check()
        self.session = Session(self.api, folder, self.specs, False, launcher="Job")
        self.executor = KubernetesExecutor(self.session, folder)

    def until(self, enough: Callable[[protocol.Event], bool]) -> None:
        """Observe until an event is the last that is waited for."""
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            self.executor.wait(LOOK)
            for event in self.executor.observe(time.monotonic()):
                if isinstance(event, protocol.Finished):
                    raise WorkFailed(f"pods ended: {event.reason}")
                if isinstance(event, protocol.Delayed):
                    print(f"{event.name}: {event.why}", file=sys.stderr, flush=True)
                if enough(event):
                    return
        raise WorkFailed(f"a step took more than {LIMIT:.0f} s")

    def requests(self, turn: int) -> protocol.Share:
        """What the ranks of a simulation ask for."""
        return protocol.Share(tuple(CPU[(rank + turn) % 2] for rank in range(self.size)))

    def up(self) -> None:
        """Launch all, until each has told of all its ranks."""
        for spec in self.specs:
            self.executor.launch(spec, self.requests(0))
        missing = {spec.name for spec in self.specs}

        def last(event: protocol.Event) -> bool:
            if isinstance(event, protocol.Sampled):
                missing.discard(event.name)
            return not missing

        self.until(last)

    def watched(self, seconds: float) -> None:
        """Follow them for some time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.executor.wait(max(0.0, min(REST, end - time.monotonic())))
            self.executor.observe(time.monotonic())

    def resized(self, turn: int) -> None:
        """Half of all pods grow, and half shrink, as one, however long that takes."""
        self.executor.resize({spec.name: self.requests(turn) for spec in self.specs})
        answers: list[str] = []

        def over(event: protocol.Event) -> bool:
            if isinstance(event, protocol.Resized):
                answers.append(event.refused)
            return bool(answers)

        self.until(over)
        if answers[0]:
            raise WorkFailed(f"a resize was refused: {answers[0]}")

    def step(self, name: str, work: Callable[[], None]) -> None:
        """Do it, and tell what it took."""
        begun, used, asked = time.monotonic(), time.process_time(), self.api.requests
        work()
        print(
            json.dumps({
                "step": name, "seconds": time.monotonic() - begun,
                "cpu": time.process_time() - used, "requests": self.api.requests - asked,
                "memory": memory(os.getpid()),
            }),
            flush=True,
        )  # fmt: skip


def memory(pid: int) -> int:
    """Bytes of memory that a process has now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return int(found["VmRSS"].split()[0]) * 1024


def main(kubeconfig: str, folder: str, count: int, size: int, rounds: int, look: int) -> None:
    """From nothing to nothing."""
    run = Run(Path(kubeconfig), Path(folder), count, size)
    try:
        run.step("begun", lambda: None)
        run.step("up", run.up)
        run.watched(min(SETTLE, look))
        run.step("watched", lambda: run.watched(look))
        for turn in range(rounds):
            run.step("resized", lambda turn=turn: run.resized(turn + 1))  # type: ignore[misc]
    finally:
        run.step("down", run.executor.close)
    if run.executor.left:
        raise WorkFailed(f"not removed: {run.executor.left[0]}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7]))
