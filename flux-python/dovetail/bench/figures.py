# SPDX-License-Identifier: LGPL-3.0-or-later
"""The comparisons themselves: each returns rows of ratios, and what it should reach.

Inputs: a scratch directory and the number of rounds. Outputs: `Claim`s. Invariants: cases are
made before anything is timed; all variants of a comparison are interleaved in one run.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from dovetail.bench.cases import SOLVER, copies, mpirun, plan_entry
from dovetail.bench.fixed import Outcome, run_fixed
from dovetail.bench.harness import Claim, Progress, Row, interleave, plain, ratios
from dovetail.core.protocol import WaitPolicy
from dovetail.core.throughput_model import Model

DOORBELL = WaitPolicy("doorbell")
YIELDING = "mpirun at once, unbound, waits that yield"


def wait(scratch: Path, repeat: int, progress: Progress) -> list[Claim]:
    """A simulation of two ranks at 1:3 alone: what blocking waits save and cost."""
    case = copies(scratch, (1, 3), 100, 1)
    outcomes: dict[str, list[Outcome]] = {"off": [], "doorbell": []}

    def alone(policy: WaitPolicy) -> float:
        outcomes[policy.mode].append(run_fixed(case, 2, SOLVER, policy, 1))
        return outcomes[policy.mode][-1].makespan

    rows = interleave(
        {
            "plain mpirun": lambda: plain(case, mpirun(2), 1),
            "off": lambda: alone(WaitPolicy("off")),
            "doorbell": lambda: alone(DOORBELL),
        },
        repeat,
        progress,
    )

    def cpu(rank: int, name: str) -> Row:
        pairs = zip(outcomes["doorbell"], outcomes["off"])
        return Row(name, tuple(1 - bell.cpu[0][rank] / off.cpu[0][rank] for bell, off in pairs))

    return [
        Claim(cpu(0, "CPU saved in the light rank"), "share", ">=", 0.40),
        Claim(cpu(1, "CPU saved in the heavy rank"), "share"),
        Claim(ratios(rows["doorbell"], rows["off"], "wall, doorbell / off"), "x", "<=", 1.05),
        Claim(ratios(rows["off"], rows["plain mpirun"], "wall, off / plain mpirun"), "x"),
    ]


def pack(scratch: Path, repeat: int, progress: Progress) -> list[Claim]:
    """Two simulations of two ranks at 1:3: packed against four other ways to run them."""
    cases = copies(scratch, (1, 3), 100, 2)
    serial = copies(scratch, (1,), 100, 2)
    yielding = ["mpirun", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1", *mpirun(2)[1:]]
    needed: list[float] = []
    cores = 2

    def alone() -> float:
        outcome = run_fixed(cases[:1], 2, SOLVER, DOORBELL, 1)
        needed.append(len(cases) * sum(map(sum, outcome.cpu)) / cores)
        return outcome.makespan

    rows = interleave(
        {
            "one after the other": lambda: plain(cases, mpirun(2), 1),
            "plain mpirun at once": lambda: plain(cases, mpirun(2), 2),
            YIELDING: lambda: plain(cases, yielding, 2),
            "one rank each, side by side": lambda: plain(serial, ["simpleFoam"], 2),
            "packed": lambda: run_fixed(cases, 2, SOLVER, DOORBELL, 2).makespan,
            "one alone, for the bound": alone,
        },
        repeat,
        progress,
    )
    packed = rows["packed"]
    bound = Row("bound", tuple(needed))
    fewer = rows["one rank each, side by side"]
    after, naive = rows["one after the other"], rows["plain mpirun at once"]
    return [
        Claim(ratios(after, packed, "over one after the other"), "x", ">=", 1.35),
        Claim(ratios(naive, packed, "over plain mpirun at once"), "x", ">=", 2.0),
        Claim(ratios(rows[YIELDING], packed, f"over {YIELDING}"), "x"),
        Claim(ratios(bound, packed, "of the bound"), "share", ">=", 0.85),
        Claim(ratios(fewer, packed, "over one rank each, side by side"), "x"),
        *(Claim(row, "s") for row in rows.values()),
    ]


def balanced(scratch: Path, repeat: int, progress: Progress) -> list[Claim]:
    """A queue of balanced simulations on full cores: what finding out that nothing pays costs."""
    return _queue(scratch, repeat, progress, (1, 1), "<=", 1.03)


def queue(scratch: Path, repeat: int, progress: Progress) -> list[Claim]:
    """A queue of imbalanced simulations, the controller finding out by itself."""
    return _queue(scratch, repeat, progress, (1, 3), "<=", 1 / 1.2)


def _queue(
    scratch: Path,
    repeat: int,
    progress: Progress,
    weights: Sequence[float],
    relation: str,
    bound: float,
) -> list[Claim]:
    cases = copies(scratch, weights, 120, 4)
    plan = scratch / "plan.yaml"
    plan.write_text(plan_entry("bench", cases[0], weights, len(cases)))
    rounds = iter(range(repeat))

    def dovetail() -> float:
        out = scratch / f"out{next(rounds)}"
        words = [sys.executable, "-m", "dovetail", "run", "--json", "-o", str(out), str(plan)]
        return plain([scratch], words, 1)

    rows = interleave(
        {
            "one after the other": lambda: plain(cases, mpirun(len(weights)), 1),
            "dovetail run": dovetail,
        },
        repeat,
        progress,
    )
    name = "makespan, dovetail run / one after the other"
    ratio = ratios(rows["dovetail run"], rows["one after the other"], name)
    return [Claim(ratio, "x", relation, bound), *(Claim(row, "s") for row in rows.values())]


def model(scratch: Path, repeat: int, progress: Progress) -> list[Claim]:
    """Simulations at 1:3 packed; N=3 predicted from N=1 and N=2, then measured."""
    cases = copies(scratch, (1, 3), 100, 3)
    needs: list[float] = []

    def packed(count: int) -> float:
        outcome = run_fixed(cases[:count], 2, SOLVER, DOORBELL, count)
        if count == 1:
            needs.append(sum(outcome.cpu[0]) / outcome.makespan)
        return outcome.makespan

    rows = interleave(
        {f"N={n}": functools.partial(packed, n) for n in (1, 2, 3)},
        repeat,
        progress,
    )
    errors = []
    for t1, t2, t3, need in zip(*(rows[f"N={n}"].values for n in (1, 2, 3)), needs):
        fitted = Model.fit(t1, 2, 2, {2: t2}, need)
        errors.append(abs(fitted.makespan(3) / t3 - 1))
    return [
        Claim(Row("error of the predicted makespan, N=3", tuple(errors)), "share", "<=", 0.08),
        *(Claim(row, "s") for row in rows.values()),
    ]
