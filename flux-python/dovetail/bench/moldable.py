# SPDX-License-Identifier: LGPL-3.0-or-later
"""Queues whose ranks are left to Dovetail, against other ways in which a user could run them.

Inputs: OpenFOAM's pitzDaily, LAMMPS's Lennard-Jones melt. Outputs: `Claim`s: the makespan of
`dovetail run` over the best of the other ways, and over one after the other; and where the ranks
are fixed and unevenly loaded, but simulations may stop at checkpoints to be cut anew.

Invariants: every way runs the whole queue, and in every round; the best of the others is the best
of that round, which is harder to meet than the best median. Spinning ranks that share cores are
left out: `bench pack` has them, at several times one after the other.
"""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from usernetes_setup.build import programs as build

from dovetail.bench.cases import SOLVER, copies, mpirun, pitz_daily, plan_entry
from dovetail.bench.harness import Claim, Progress, Row, interleave, plain, ratios
from dovetail.core import eventlog, protocol
from dovetail.core.errors import BadInput

COUNT = 4
CORES = 2
WIDE, FEWER, OWN = "one after the other, two ranks", "one rank each side by side", "dovetail run"
NARROW = "dovetail run, one rank each"
ODD = 21
"""A queue of about twenty, whose last wave leaves a core free."""
SHORT = 60
"""A queue of so many simulations of about a second each, for what each costs besides."""
RECUT = "dovetail run, two ranks, may be cut anew"


def openfoam(scratch: Path, repeat: int, progress: Progress) -> list[Claim]:
    """Four imbalanced and four balanced simulations, `ranks: 1-2`, each queue by itself."""
    claims: list[Claim] = []
    for name, weights, gain in (("imbalanced", (1, 3), 1.5), ("balanced", (1, 1), 0.0)):
        place = scratch / name
        wide = copies(place, weights, 120, COUNT)
        serial = [pitz_daily(place / f"serial.{i}", (1,), 120) for i in range(COUNT)]
        plan = place / "plan.yaml"
        plan.write_text(plan_entry(name, wide[0], weights, COUNT, ranks=f"1-{CORES}"))
        ways: dict[str, Callable[[], float]] = {
            WIDE: functools.partial(plain, wide, mpirun(CORES), 1),
            FEWER: functools.partial(plain, serial, ["simpleFoam"], CORES),
            OWN: dovetail(place, plan),
        }
        if gain:
            fixed = place / "fixed.yaml"
            entry = plan_entry(name, wide[0], weights, COUNT)
            fixed.write_text(f"{entry}    checkpoint: allowed\n")
            ways[RECUT] = dovetail(place / "fixed", fixed)
        claims += _claims(name, ways, repeat, progress, 1.03, gain)
    return [*claims, _restart(scratch / "restart", repeat, progress)]


def _restart(scratch: Path, repeat: int, progress: Progress) -> Claim:
    """One alone, beside which nothing could be packed, and long enough for a new cut to pay."""
    weights = (1, 3)
    (case,) = copies(scratch, weights, 400, 1)
    plan = scratch / "plan.yaml"
    plan.write_text(f"{plan_entry('alone', case, weights, 1)}    checkpoint: allowed\n")
    interleave({RECUT: dovetail(scratch, plan)}, repeat, progress)
    return restarted(sorted(scratch.glob("out*/events.jsonl")))


def restarted(logs: Sequence[Path]) -> Claim:
    """What a restart takes; not kept where there was none, or one did not come to its end."""
    took: list[float] = []
    lost: list[str] = []
    for log in logs:
        seconds, names = restarts(log)
        took += seconds
        lost += names
    why = "" if took else "no simulation was stopped to be cut anew"
    if lost:
        count = len(took) + len(lost)
        why = f"{len(lost)} of {count} had no new iterations ({', '.join(sorted(set(lost)))})"
    row = Row("a restart for a new cut, from the decision to new iterations", tuple(took))
    return Claim(row, "s", "<=", 2.0, why)


def restarts(log: Path) -> tuple[list[float], list[str]]:
    """Seconds from each checkpoint that was asked for to the simulation's first new iterations.

    And who had none. One that ended by itself before its checkpoint is neither.
    """
    found: list[float] = []
    asked: dict[str, float] = {}
    again: set[str] = set()
    now = 0.0
    for one in eventlog.read(log)[1]:
        if isinstance(one, protocol.Checkpoint):
            asked[one.name] = now
        elif isinstance(one, protocol.Launch) and one.name in asked:
            again.add(one.name)
        elif isinstance(one, protocol.Finished) and one.cause is protocol.Cause.DONE:
            if one.name not in again:
                asked.pop(one.name, None)
        elif isinstance(one, protocol.Sampled) and again & {one.name} and any(one.ranks.iterations):
            again.remove(one.name)
            found.append(one.t - asked.pop(one.name))
        if not isinstance(one, protocol.ACTIONS):
            now = one.t
    return found, list(asked)


def lammps(scratch: Path, repeat: int, progress: Progress) -> list[Claim]:
    """Four melts in a box that is cut into one quarter and three quarters, `ranks: 1-2`."""
    cases, plan, cut, whole = _melts(scratch, COUNT, 900, f"1-{CORES}")
    ways: dict[str, Callable[[], float]] = {
        WIDE: functools.partial(plain, cases, ["mpirun", "-np", str(CORES), *cut], 1),
        FEWER: functools.partial(plain, cases, whole, CORES),
        OWN: dovetail(scratch, plan),
    }
    return _claims("LAMMPS", ways, repeat, progress, 1.05, 1.45)


def last_wave(scratch: Path, repeat: int, progress: Progress) -> list[Claim]:
    """A queue whose last simulation has the cores to itself: on one rank, and on as many as pay."""
    place = scratch / "last-wave"
    (case,) = copies(place, (1, 1), 60, 1)
    serial = [pitz_daily(place / f"serial.{i}", (1,), 60) for i in range(ODD)]
    ways: dict[str, Callable[[], float]] = {
        FEWER: functools.partial(plain, serial, ["simpleFoam"], CORES)
    }
    for way, text in (
        (NARROW, plan_entry("last", serial[0], (1,), ODD, command=SOLVER[:1])),
        (OWN, plan_entry("last", case, (1, 1), ODD, ranks=f"1-{CORES}")),
    ):
        plan = place / f"plan{len(ways)}.yaml"
        plan.write_text(text)
        ways[way] = dovetail(place / plan.stem, plan)
    rows = interleave(ways, repeat, progress)
    return [
        Claim(ratios(rows[OWN], rows[NARROW], f"the last one of {ODD} widened / not"), "x"),
        Claim(ratios(rows[OWN], rows[FEWER], f"{ODD}: {OWN} / {FEWER}"), "x", "<=", 1.03),
        *(Claim(Row(f"{ODD}: {row.name}", row.values), "s") for row in rows.values()),
    ]


def short(
    scratch: Path, repeat: int, progress: Progress, kubeconfig: Path | None = None
) -> list[Claim]:
    """Simulations of a second on a rank each: what Dovetail adds to each, in seconds.

    With a cluster as pods too.
    """
    cases, plan, _, whole = _melts(scratch, SHORT, 110, "1")
    ways: dict[str, Callable[[], float]] = {
        FEWER: functools.partial(plain, cases, whole, CORES),
        OWN: dovetail(scratch, plan),
    }
    most = {OWN: 0.1}
    if kubeconfig is not None:
        pods = f"{OWN}, as pods"
        ways[pods] = dovetail(scratch / "pods", plan, "--kubeconfig", str(kubeconfig))
        most[pods] = 0.3
    rows = interleave(ways, repeat, progress)
    claims = []
    for way, bound in most.items():
        pairs = zip(rows[way].values, rows[FEWER].values)
        more = tuple((own - other) * CORES / SHORT for own, other in pairs)
        name = f"{way}: added to each of {SHORT} short simulations"
        claims.append(Claim(Row(name, more), "s", "<=", bound))
    named = (Row(f"{SHORT} short: {row.name}", row.values) for row in rows.values())
    return [*claims, *(Claim(row, "s") for row in named)]


def _melts(
    scratch: Path, count: int, steps: int, ranks: str
) -> tuple[list[Path], Path, list[str], list[str]]:
    """So many melts, in a box cut 1 to 3 or whole: cases, a plan for `ranks`, and both commands.

    The plan has as many cores as those have that are started by hand, however many there are.
    """
    scratch.mkdir(exist_ok=True)
    cases = [scratch / f"melt.{number}" for number in range(count)]
    for case in cases:
        case.mkdir()
        cut, whole = melt(case, 0.25, steps)
    plan = scratch / "plan.yaml"
    plan.write_text(
        f"cpus: {CORES}\nsimulations:\n  - name: melt\n    case: {cases[0]}\n    ranks: {ranks}\n"
        f"    command: {' '.join(whole)}\n    count: {count}\n"
    )
    return cases, plan, cut, whole


def melt(case: Path, first: float, steps: int) -> tuple[list[str], list[str]]:
    """Write a melt's scripts; LAMMPS's command for two ranks of which the first has this share of
    the atoms, and that for any number of ranks. Raises BadInput where there is no LAMMPS."""
    program = shutil.which("lmp")
    if program is None:
        raise BadInput("there is no lmp: ./bootstrap services installs LAMMPS")
    text = (build.examples() / "in.lj").read_text()
    (case / "in.lj").write_text(text)
    # The box is longest along x, where it is cut.
    cut = f"balance 1.0 x {first:g}\n"
    (case / "in.cut").write_text(text.replace("mass 1 1.0\n", f"mass 1 1.0\n{cut}"))
    more = ["-log", "none", "-var", "x", "40", "-var", "steps", str(steps)]
    return [program, "-in", "in.cut", *more], [program, "-in", "in.lj", *more]


def dovetail(scratch: Path, plan: Path, *more: str) -> Callable[[], float]:
    """Runs the plan, each time into another directory."""
    made: list[Path] = []

    def once() -> float:
        scratch.mkdir(exist_ok=True)
        made.append(scratch / f"out{len(made)}")
        words = [sys.executable, "-m", "dovetail", "run", "--json", "-o", str(made[-1]), str(plan)]
        return plain([scratch], [*words, *more], 1)

    return once


def _claims(
    name: str,
    ways: dict[str, Callable[[], float]],
    repeat: int,
    progress: Progress,
    most: float,
    gain: float,
) -> list[Claim]:
    rows = interleave(ways, repeat, progress)
    others: Sequence[Row] = [row for way, row in rows.items() if way in (WIDE, FEWER)]
    best = Row("", tuple(min(values) for values in zip(*(row.values for row in others))))
    ratio = ratios(rows[OWN], best, f"{name}: dovetail run / the best other way")
    claims = [Claim(ratio, "x", "<=", most)]
    faster = ratios(rows[WIDE], rows[OWN], f"{name}: throughput / one after the other")
    claims.append(Claim(faster, "x", ">=" if gain else "", gain))
    if RECUT in rows:
        anew = ratios(rows[WIDE], rows[RECUT], f"{name}: {RECUT}: throughput / one after the other")
        claims.append(Claim(anew, "x", ">=", 1.35))
    return [*claims, *(Claim(Row(f"{name}: {row.name}", row.values), "s") for row in rows.values())]
