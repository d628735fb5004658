# SPDX-License-Identifier: LGPL-3.0-or-later
"""The demo: one plan, run by Dovetail and in three other ways.

Output: a run's directory with `cases/`, `plan.yaml`, `alternatives.json`, the event log, summary
and report. The plan is one imbalanced and one balanced case, each of which may run on one rank or
on two: how many ranks, and how many at once, is left to Dovetail.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from usernetes_setup.node import cgroups

from dovetail.bench import ondemand
from dovetail.bench.cases import mpirun, pitz_daily, plan_entry
from dovetail.bench.harness import Progress, plain
from dovetail.host.private_files import looking
from dovetail.plan import schema
from dovetail.report import alternatives
from dovetail.report.alternatives import FEWER, NAIVE, SEQUENTIAL, Alternative, Name
from dovetail.run import target
from dovetail.run.loop import Signals
from dovetail.run.run import LOG, RunOutcome, check_directory, execute, publish

MADE = (
    "cases", "plan.yaml", alternatives.FILE, LOG, "summary.json", "report.html", "status.json",
    "kubernetes", ondemand.FILE, "processes",
)  # fmt: skip
MARK = "# Made by `dovetail bench demo`, which replaces it."
CORES = 2  # what the plan uses, however many there are: the same demo everywhere


@dataclass(frozen=True)
class Family:
    """An entry of the plan: `count` simulations of ranks with these relative loads."""

    name: str
    weights: tuple[float, ...]
    count: int
    iterations: int


# As long as five minutes allow: what is measured first is the larger part of a short simulation.
FAMILIES = (Family("imbalanced", (1.0, 3.0), 4, 110), Family("balanced", (1.0, 1.0), 2, 70))


def run_demo(
    directory: Path, progress: Progress, *, quiet: bool, kubernetes: bool = False
) -> RunOutcome:
    """Make the cases, run the plan and its alternatives, and write the report.

    `quiet` leaves the live table out.

    With `kubernetes` the simulations are pods on a cluster that is started for it, and the plan
    is run a second time as processes, below the directory, to see what that costs.
    """
    clear(directory)
    path = directory / "plan.yaml"
    path.write_text(demo_plan(directory, FAMILIES))
    cases: dict[str, list[Path]] = {}
    for one in FAMILIES:
        progress(f"making the {one.name} case: pitzDaily, 48,900 cells, ranks at {one.weights}")
        made = directory / "cases" / one.name
        first = pitz_daily(made / "0", one.weights, one.iterations)
        cases[one.name] = [first, *clones(first, one.count)]
        serial = pitz_daily(made / "serial-0", (1,), one.iterations)
        cases[f"{one.name} serial"] = [serial, *clones(serial, one.count)]
    asked = schema.load(path)
    with Signals() as signals:
        if kubernetes:
            with ondemand.started(CORES, progress) as kubeconfig:
                progress(f"running the plan {path} with Dovetail, as pods")
                there = target.cluster(kubeconfig)
                there.check(asked)
                log = execute(asked, directory, signals, quiet=quiet, place=there)
        else:
            progress(f"running the plan {path} with Dovetail")
            log = execute(asked, directory, signals, quiet=quiet, scope=cgroups.scope)
    if kubernetes and not signals.caught:
        progress("for comparison, the same plan as processes")
        processes = directory / "processes"
        processes.mkdir()
        with Signals() as signals:
            execute(asked, processes, signals, quiet=quiet)
        ondemand.compare(directory, processes, progress)
    try:
        if not signals.caught:
            measured = [row for family in FAMILIES for row in others(family, cases, progress)]
            alternatives.write(directory, CORES, measured)
    finally:  # the run is done, whatever becomes of the comparison
        ended = publish(directory, log, signals)
    return ended


def others(family: Family, cases: dict[str, list[Path]], progress: Progress) -> list[Alternative]:
    """Measure the other ways to run a family's queue."""
    name, ranks = family.name, len(family.weights)
    wide, serial = cases[name], cases[f"{name} serial"]
    made = []
    ways: tuple[tuple[Name, list[Path], list[str], int, int], ...] = (
        (SEQUENTIAL, wide, mpirun(ranks), ranks, 1),
        (FEWER, serial, ["simpleFoam"], 1, CORES),
        (NAIVE, wide, mpirun(ranks), ranks, 2),
    )
    for way, queue, words, width, at_once in ways:
        progress(f"for comparison, the {family.count} {name} simulations {way}")
        seconds = plain(queue, words, at_once)
        progress(f"  {seconds:.1f} s")
        made.append(
            Alternative(
                family=name, name=way, makespan_s=[seconds], ranks=width, at_once=at_once
            )
        )  # fmt: skip
    return made


def clones(case: Path, count: int) -> list[Path]:
    """Further copies of a case, beside it."""
    made = []
    for number in range(1, count):
        copied = case.with_name(case.name.replace("0", str(number)))
        shutil.copytree(case, copied)
        made.append(copied)
    return made


def demo_plan(directory: Path, families: Sequence[Family]) -> str:
    """The plan as text: the families one after the other."""
    head = f"{MARK}\ncpus: {CORES}\nsimulations:\n"
    entries = (
        plan_entry(
            one.name,
            directory.resolve() / "cases" / one.name / "0",
            one.weights,
            one.count,
            ranks=f"1-{CORES}",
        )
        for one in families
    )
    return head + "".join(entry.partition("\n")[2] for entry in entries)


def clear(directory: Path) -> None:
    """Remove an earlier demo; anything else in the way is refused."""
    made = directory / "plan.yaml"
    if made.is_file() and made.read_text(errors="replace").startswith(MARK):
        for one in FAMILIES:
            for number in range(one.count + 1):
                shutil.rmtree(directory / f"{one.name}-{number}", ignore_errors=True)
        for left in MADE:
            path = directory / left
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    check_directory(directory, resume=False)
    with looking(directory):
        directory.mkdir(parents=True, exist_ok=True)
