# SPDX-License-Identifier: LGPL-3.0-or-later
"""Runs simulations through the local executor with a fixed wait policy and no controller.

Inputs: cases and a policy. Output: makespan and CPU time per rank. It shows what the mechanism
can do, apart from what finding it out costs.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.bench.cases import environment
from dovetail.core.errors import WorkFailed
from dovetail.core.protocol import Finished, Ranks, Sampled, Share, Spec, WaitPolicy
from dovetail.executors.local.executor import LocalExecutor


@dataclass(frozen=True)
class Outcome:
    """`makespan` in seconds; `cpu` in seconds per simulation and rank, at the last iteration."""

    makespan: float
    cpu: tuple[tuple[float, ...], ...]


def run_fixed(
    cases: Sequence[Path], ranks: int, command: Sequence[str], wait: WaitPolicy, at_once: int
) -> Outcome:
    """Run each case once, `at_once` at a time, all waiting by `wait`. Raises WorkFailed."""
    added = tuple((k, v) for k, v in environment().items() if os.environ.get(k) != v)
    specs = [
        Spec(
            f"s{number}", "bench", str(case), ranks, (1.0,) * ranks, tuple(command),
            environment=added,
        )
        for number, case in enumerate(cases)
    ]  # fmt: skip
    share = Share((1000,) * ranks, wait)
    last: dict[str, Ranks] = {}
    with tempfile.TemporaryDirectory(prefix="dovetail-bench-") as scratch:
        started = time.monotonic()  # what a plain mpirun takes to start is in its time, too
        executor = LocalExecutor(Path(scratch), origin=started)
        try:
            waiting, running = list(specs), 0
            while waiting or running:
                while waiting and running < at_once:
                    executor.launch(waiting.pop(0), share)
                    running += 1
                executor.wait(1.0)
                for event in executor.observe(time.monotonic() - started):
                    if isinstance(event, Sampled):
                        last[event.name] = event.ranks
                    elif isinstance(event, Finished):
                        running -= 1
                        if event.code:
                            raise WorkFailed(f"{event.name}: {event.reason}")
            return Outcome(time.monotonic() - started, tuple(last[s.name].cpu for s in specs))
        finally:
            executor.close()
