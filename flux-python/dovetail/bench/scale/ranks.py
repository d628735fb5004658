# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a decision costs against the number of ranks.

Inputs: sizes in ranks, the number of rounds. Outputs: `Claim`s, and seconds per decision, per
sample and for the costliest answer, with the whole queue running at once on a machine that is large
enough, and as long a queue behind it.

Invariants: no processes; the only clock is the one that measures.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dovetail.bench.harness import Claim, Progress, Row, ratios
from dovetail.controller.controller import Controller
from dovetail.core import protocol

RANKS = 10
"""Ranks per simulation."""
ROUNDS = 20
"""Looks at all ranks after which the run has settled."""


def ranks(_: Path, repeat: int, progress: Progress) -> list[Claim]:
    """A decision over many simulations of ten ranks each, with the simulated executor."""
    sizes = (100, 1_000, 10_000)
    values: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(repeat):
        for row in bench_scale(sizes):
            values[row["ranks"]].append(row["worst_s"])
        progress(f"round {number + 1}/{repeat}")
    claims = [
        Claim(Row(f"costliest decision, {size:,} ranks", tuple(values[size])), "s", "<=", 1.0)
        for size in sizes
    ]
    growth = ratios(
        Row("", tuple(v / sizes[-1] for v in values[sizes[-1]])),
        Row("", tuple(v / sizes[-2] for v in values[sizes[-2]])),
        "cost per rank, 10,000 / 1,000 ranks",
    )
    return [*claims, Claim(growth, "x")]


def bench_scale(sizes: Sequence[int] = (100, 1_000, 10_000)) -> list[dict[str, Any]]:
    """One row per size: `ranks`, `simulations`, `decision_s` (median of a decision), `worst_s`
    (the costliest single answer of the run, the launch of all but one included), `sample_s`
    (median of taking in one simulation's sample), `replan_s` (half of the nodes went, so that
    all ranks share what is left), `crowded_s` (the costliest decision after that)."""
    return [_row(size) for size in sizes]


def _row(size: int) -> dict[str, Any]:
    count = max(1, size // RANKS)
    run = _Run(count)
    run.begin()
    for _ in range(ROUNDS):
        run.round()
    run.finish(min(count // 2, 50))
    decision = statistics.median(run.decisions)
    replan = run.timed(protocol.CapacityChanged(run.t, _capacity(max(1, count // 2))))
    crowded = run.crowded()
    return {
        "ranks": count * RANKS,
        "simulations": count,
        "running": run.controller.status().n,
        "decision_s": decision,
        "worst_s": run.worst,
        "sample_s": statistics.median(run.samples),
        "replan_s": replan,
        "crowded_s": crowded,
    }


def _capacity(count: int) -> protocol.Capacity:
    """Nodes of 64 cores, enough for all ranks to have a core each."""
    nodes = -(-count * RANKS // 64)
    return protocol.Capacity(tuple(protocol.Node(f"n{i}", 64_000, 1 << 38) for i in range(nodes)))


class _Run:
    """A controller fed by hand, with every answer timed."""

    def __init__(self, count: int) -> None:
        weights = tuple(float(1 + rank % 3) for rank in range(RANKS))
        self.specs = [
            protocol.Spec(f"s{i}", f"f{i % 5}", "case", RANKS, weights, ("run",))
            for i in range(2 * count)
        ]
        self.controller = Controller(self.specs, _capacity(count))
        self.t = 0.0
        self.worst = 0.0
        self.decisions: list[float] = []
        self.samples: list[float] = []
        self.iterations: dict[str, int] = {}

    def timed(self, event: protocol.Event) -> float:
        """Hand in an event, note what was launched; seconds of the answer."""
        begin = time.perf_counter()
        actions = self.controller.handle(event)
        seconds = time.perf_counter() - begin
        for action in actions:
            if isinstance(action, protocol.Launch):
                self.iterations[action.name] = 0
                self.worst = max(self.worst, self.timed(protocol.Started(self.t, action.name)))
        self.worst = max(self.worst, seconds)
        return seconds

    def begin(self) -> None:
        """Until the profiles are there and the machine is full."""
        self.timed(protocol.Tick(self.t))
        for _ in range(4 * ROUNDS):
            self.round()

    def round(self) -> None:
        """One look at all ranks, then a decision."""
        self.t += 0.25
        for name in list(self.iterations):
            self.iterations[name] += 5
            self.samples.append(self.timed(_sample(self.t, name, self.iterations[name])))
        self.decisions.append(self.timed(protocol.Tick(self.t)))

    def crowded(self) -> float:
        """Looks at all ranks while they share cores; the costliest decision."""
        self.decisions.clear()
        for _ in range(ROUNDS):
            self.round()
        return max(self.decisions)

    def finish(self, count: int) -> None:
        """Some end, and the next in the queue take their places."""
        for name in list(self.iterations)[:count]:
            del self.iterations[name]
            self.decisions.append(self.timed(protocol.Finished(self.t, name, protocol.Cause.DONE)))


def _sample(t: float, name: str, iterations: int) -> protocol.Sampled:
    work = tuple(iterations * 0.015 * (1 + rank % 3) for rank in range(RANKS))
    idle = (0.0,) * RANKS
    ranks = protocol.Ranks(
        (iterations,) * RANKS, (t,) * RANKS, work, work, idle, (1 << 20,) * RANKS
    )
    return protocol.Sampled(t, name, ranks)
