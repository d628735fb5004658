# SPDX-License-Identifier: LGPL-3.0-or-later
"""Ten unlike queues under `dovetail run`, against the ways in which a user could run them.

Inputs: OpenFOAM's pitzDaily, LAMMPS's Lennard-Jones melt. Outputs: `Claim`s, two for each queue:
with open ranks the makespan over the best other way of that round, and with the ranks that are
widest over one after the other on as many.

Invariants: every way runs the whole queue, and in every round; a queue's folders go before the next
one's are made.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.bench.cases import OPENFOAM_ETC, SOLVER, mpirun, pitz_daily
from dovetail.bench.harness import Claim, Progress, Row, interleave, plain_queue, ratios
from dovetail.bench.moldable import CORES, dovetail, melt
from dovetail.core.errors import BadInput

Started = tuple[Path, Sequence[str]]
"""A case, and the command that runs there."""

WIDE, NARROW = "one after the other", "one rank each side by side"
FITTING = "one after the other, on as many ranks as cores"
OPEN, FIXED = "dovetail run, open ranks", "dovetail run, all ranks"
MOST = 1.03


@dataclass(frozen=True)
class Kind:
    """`count` equal simulations; `weights` has one entry per rank of the widest form."""

    weights: tuple[int, ...]
    iterations: int
    count: int
    refine: int = 2
    lammps: bool = False


QUEUES: dict[str, tuple[Kind, ...]] = {
    "imbalanced": (Kind((1, 3), 120, 4),),
    "balanced": (Kind((1, 1), 120, 4),),
    "mixed": (Kind((1, 3), 120, 2), Kind((1, 1), 120, 2)),
    "short": (Kind((1, 1), 15, 8),),
    "long": (Kind((1, 3), 400, 2),),
    "one only": (Kind((1, 1), 200, 1),),
    "LAMMPS": (Kind((1, 3), 300, 4, lammps=True),),
    "LAMMPS beside OpenFOAM": (Kind((1, 3), 300, 2, lammps=True), Kind((1, 3), 120, 2)),
    "memory-bound": (Kind((1, 1), 15, 4, refine=6),),
    "more ranks than cores": (Kind((1, 1, 1, 1), 80, 3),),
}


def check(names: Sequence[str]) -> None:
    """Raise BadInput where one of the names is none of a queue."""
    for name in names:
        if name not in QUEUES:
            raise BadInput(f"queues: there is no queue {name!r}; there are {', '.join(QUEUES)}")


def ten(scratch: Path, repeat: int, progress: Progress, names: Sequence[str] = ()) -> list[Claim]:
    """All of `QUEUES`, or those of these names."""
    claims: list[Claim] = []
    for number, name in enumerate(names or QUEUES):
        progress(f"queue of {name}")
        place = scratch / str(number)
        place.mkdir()
        rows = interleave(_ways(place, QUEUES[name]), repeat, progress)
        shutil.rmtree(place)
        others = [row.values for way, row in rows.items() if way in (WIDE, FITTING, NARROW)]
        best = Row("", tuple(map(min, zip(*others))))
        claims.append(
            Claim(ratios(rows[OPEN], best, f"{name}: open ranks / the best way"), "x", "<=", MOST)
        )
        claims.append(
            Claim(ratios(rows[FIXED], rows[WIDE], f"{name}: {FIXED} / {WIDE}"), "x", "<=", MOST)
        )
        claims += [Claim(Row(f"{name}: {row.name}", row.values), "s") for row in rows.values()]
    return claims


def _ways(place: Path, kinds: Sequence[Kind]) -> dict[str, Callable[[], float]]:
    wide: list[Started] = []
    fitting: list[Started] = []
    narrow: list[Started] = []
    entries: dict[str, list[dict[str, object]]] = {OPEN: [], FIXED: []}
    for number, kind in enumerate(kinds):
        ranks = len(kind.weights)
        for copy in range(kind.count):
            folder = place / f"{number}.{copy}"
            cut, whole = _cases(folder, kind)
            # More ranks than these cores yield, on a machine that has more of them, too.
            here = ["--host", f"localhost:{CORES}", "--oversubscribe"]
            wide.append((cut[0], ["mpirun", *here, "-np", str(ranks), *cut[1]]))
            narrow.append(whole)
            if ranks > CORES:
                case = pitz_daily(
                    folder / "fitting", (1,) * CORES, kind.iterations, refine=kind.refine
                )
                fitting.append((case, mpirun(CORES)))
        entry = {"name": f"s{number}", "case": str(cut[0]), "count": kind.count,
                 "environment": {"WM_PROJECT_DIR": OPENFOAM_ETC}}  # fmt: skip
        weights = {} if kind.lammps else {"weights": kind.weights}
        # LAMMPS's script for one rank leaves the cut of its box to LAMMPS.
        entries[OPEN].append(
            {**entry, **weights, "ranks": f"1-{ranks}",
             "command": list(whole[1] if kind.lammps else cut[1])}
        )  # fmt: skip
        entries[FIXED].append({**entry, **weights, "ranks": ranks, "command": list(cut[1])})
    ways: dict[str, Callable[[], float]] = {
        WIDE: functools.partial(plain_queue, wide, 1),
        NARROW: functools.partial(plain_queue, narrow, CORES),
    }
    if fitting:
        ways[FITTING] = functools.partial(plain_queue, fitting, 1)
    for way, simulations in entries.items():
        folder = place / way.replace(" ", "-").replace(",", "")
        folder.mkdir()
        plan = folder / "plan.yaml"
        plan.write_text(json.dumps({"simulations": simulations}))
        ways[way] = dovetail(folder, plan)
    return ways


def _cases(folder: Path, kind: Kind) -> tuple[Started, Started]:
    """One simulation's case and command, cut for all its ranks, and whole for one."""
    folder.mkdir()
    if kind.lammps:
        first = kind.weights[0] / sum(kind.weights)
        cut, whole = melt(folder, first, kind.iterations)
        return (folder, cut), (folder, whole)
    wide = pitz_daily(folder / "wide", kind.weights, kind.iterations, refine=kind.refine)
    one = pitz_daily(folder / "narrow", (1,), kind.iterations, refine=kind.refine)
    return (wide, SOLVER), (one, SOLVER[:1])
