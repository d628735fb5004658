# SPDX-License-Identifier: LGPL-3.0-or-later
"""`dovetail bench papers`: every experiment in turn, what it found, and the page of it all.

Inputs: the output directory, which experiments, scale, executor, price. Outputs: `Outcome`s;
`measured.jsonl`, `papers.json` and `papers.html` in the directory, renewed after each experiment,
with all that was measured there.
Invariants: variants of an experiment take turns, round by round, each round in another order; what
was measured before an interruption is not measured again; an experiment that cannot run here, or
fails, says why, and the others run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from usernetes_setup.preflight import report as preflight

from dovetail.bench import hosts, ondemand
from dovetail.bench.harness import Progress, order
from dovetail.bench.papers import (
    allocation,
    converged,
    neighbours,
    packing,
    published,
    setups,
)
from dovetail.bench.papers.findings import Experiment, Figures, Finding, Setting
from dovetail.bench.papers.kept import FILE, Kept
from dovetail.bench.papers.page import Outcome, page
from dovetail.bench.papers.place import KUBERNETES, LOCAL, NotHere, Place
from dovetail.bench.papers.scales import SCALES, Scale
from dovetail.core.errors import BadInput, WorkFailed
from dovetail.host import install_paths
from dovetail.mpi import launcher
from dovetail.report.html import replace_file

EXECUTORS = (LOCAL, KUBERNETES)
EXPERIMENTS = {
    one.name: one
    for one in (
        Experiment("allocation", "Rank-aware allocation: cuts, requests and limits",
                   allocation.allocation_findings, allocation.allocation_variants),
        Experiment("limits", "The limit over the request",
                   allocation.limits_findings, allocation.limits_variants),
        Experiment("phases", "Requests that change while a simulation runs",
                   allocation.phases_findings, allocation.phases_variants),
        Experiment("packing", "One to five simulations at once, and the model",
                   packing.packing_findings, packing.packing_variants),
        Experiment("cost", "The cost of a simulation", packing.cost_findings, rests_on="packing"),
        Experiment("duty", "Duty cycles of ranks and zones",
                   setups.duty_findings, setups.duty_variants),
        Experiment("setups", "Set-ups of OpenFOAM: speed-up and efficiency",
                   setups.setups_findings, setups.setups_variants),
        Experiment("orchestrators", "A noisy neighbour, and what keeps it off",
                   neighbours.neighbours_findings, neighbours.neighbours_variants),
        Experiment("converged", "MPI beside and inside user-space Kubernetes",
                   converged.converged_findings, converged.converged_variants, most=5,
                   own_clusters=True),
        Experiment("hybrid", "A batch job whose model server learns from bare-metal jobs",
                   converged.hybrid_findings, converged.hybrid_variants, most=1,
                   own_clusters=True),
    )
}  # fmt: skip
QUIET = 0.25  # of the cores: where others use more, a round says nothing about a paper


@dataclass(frozen=True)
class Asked:
    """What the user wants; `price` is that of a vCPU-hour, 0 for none."""

    output: Path
    names: tuple[str, ...]
    executor: str
    scale: Scale
    price: float


def check(output: Path, names: Sequence[str], executor: str, scale: str, price: float) -> Asked:
    """The user's words; raises BadInput."""
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown:
        raise BadInput(f"{unknown[0]}: no experiment; there are {', '.join(EXPERIMENTS)}")
    if output.exists() and not output.is_dir():
        raise BadInput(f"-o {output}: not a directory")
    if executor == KUBERNETES:
        errors = preflight.errors()
        if errors:
            raise BadInput(
                f"user-space Kubernetes cannot run here: {errors[0]}; see `dovetail doctor`"
            )
    chosen = tuple(name for name in EXPERIMENTS if not names or name in names)
    return Asked(output, chosen, executor, SCALES[scale], price)


def run(asked: Asked, progress: Progress) -> tuple[list[Outcome], bool]:
    """Measure what is missing; what all of it says, and whether nothing failed.

    The page has what was measured before, too, from the first experiment on.
    """
    several = hosts.several()
    about = {"papers": 1, "scale": asked.scale.name, "executor": asked.executor,
             "machine": platform.node(), "cores": len(os.sched_getaffinity(0)),
             "hosts": several[1] if several else 1, "program": program(),
             "mpi": launcher.version(os.environ.get("PATH", os.defpath))}  # fmt: skip
    kept = Kept(asked.output, about)
    outcomes: dict[str, Outcome] = {}
    well = True

    def there(name: str) -> bool:
        return kept.finished(EXPERIMENTS[name].rests_on or name)

    names = [name for name in EXPERIMENTS if name in asked.names or there(name)]
    with contextlib.ExitStack() as stack:
        stack.callback(kept.close)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dovetail-bench-")))
        clusters = stack.enter_context(contextlib.ExitStack())
        kubeconfig = None
        for name in sorted(names, key=lambda name: not there(name)):
            experiment = EXPERIMENTS[name]
            began = time.monotonic()
            base = experiment.rests_on or name
            try:
                if experiment.own_clusters:  # beside another, bare would not be bare
                    clusters.close()
                    kubeconfig = None
                elif (asked.executor, kubeconfig) == (KUBERNETES, None) and not kept.finished(base):
                    cores = len(os.sched_getaffinity(0))
                    kubeconfig = clusters.enter_context(ondemand.started(cores, progress))
                with contextlib.closing(Place(scratch / name, kubeconfig)) as place:
                    setting = Setting(
                        place, asked.scale, asked.price, progress, asked.output / name
                    )
                    measured = _measured(EXPERIMENTS[base], setting, kept, progress)
                    found = experiment.findings(setting, measured)
            except NotHere as reason:
                found = _nothing(experiment, str(reason))
                progress(f"{name}: not measured here: {reason}")
            except (WorkFailed, BadInput, OSError) as error:
                well = False
                found = _nothing(experiment, f"failed: {error}")
                progress(f"{name}: failed: {error}")
            others = kept.others(base)
            busy_rounds = disturbed(others, len(os.sched_getaffinity(0)))
            if busy_rounds and 2 * len(busy_rounds) >= len(others):
                found = [replace(finding, disturbed=True) for finding in found]
            most = max(others.values(), default=0.0)
            outcomes[name] = Outcome(
                name, experiment.title, tuple(found), command(asked, name), most, busy_rounds
            )
            publish(asked.output, [outcomes[one] for one in names if one in outcomes], about)
            if name in asked.names:
                progress(f"{name}: {time.monotonic() - began:.0f} s")
    return [outcomes[name] for name in asked.names], well


def _measured(
    experiment: Experiment, setting: Setting, kept: Kept, progress: Progress
) -> Mapping[str, Sequence[Figures]]:
    """All rounds; only those that are missing are measured."""
    name = experiment.name
    rounds = min(setting.scale.rounds, experiment.most or setting.scale.rounds)
    if not kept.finished(name):
        assert experiment.variants is not None
        variants = experiment.variants(setting)
        names = list(variants)
        for turn in range(rounds):
            for variant in order(names, turn * max(1, len(names) // rounds)):
                if kept.has(name, variant, turn):
                    continue
                others = busy()
                figures = variants[variant]()
                kept.add(name, variant, turn, figures, others)
                said = ", ".join(f"{k} {v:.3g}" for k, v in list(figures.items())[:3])
                progress(f"{name}, round {turn + 1}/{rounds}  {variant}: {said}")
        kept.finish(name, names)
    return kept.rounds(name, rounds)


def _nothing(experiment: Experiment, why: str) -> list[Finding]:
    """Every published number of it, not measured."""
    numbers: Iterable[published.Published] = published.TABLES[experiment.name]
    made = [Finding(one.what, one.unit, None, one, why) for one in numbers]
    return made or [Finding(experiment.title, "", None, None, why)]


def program(package: Path = install_paths.PACKAGES / "dovetail") -> str:
    """A name for all that measures and runs simulations: the package and the profiling libraries.

    A version would not do: it stays the same between two releases.
    """
    digest = hashlib.sha256()
    for file in [*sorted(package.rglob("*.py")), *map(Path, install_paths.libraries().values())]:
        name = file.relative_to(package) if file.suffix == ".py" else file.name
        digest.update(f"{name} {file.stat().st_size}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def command(asked: Asked, name: str) -> str:
    """What measures one experiment again."""
    price = f" --price {asked.price:g}" if asked.price and name == "cost" else ""
    executor = f" --executor {asked.executor}" if asked.executor != LOCAL else ""
    return f"dovetail bench papers --scale {asked.scale.name}{executor}{price} {name}"


def busy(seconds: float = 0.2) -> float:
    """Of our cores, those in use while nothing of ours runs: what others take from us."""

    def ticks() -> int:
        return used(Path("/proc/stat").read_text(), os.sched_getaffinity(0))

    before, began = ticks(), time.monotonic()
    time.sleep(seconds)
    rate = float(os.sysconf("SC_CLK_TCK"))
    return (ticks() - before) / rate / (time.monotonic() - began)


def disturbed(others: Mapping[int, float], cores: int) -> tuple[int, ...]:
    """The rounds, from 1, before whose measurements others used too much; a median hides them."""
    return tuple(turn + 1 for turn, taken in others.items() if taken >= QUIET * cores)


def used(stat: str, cpus: Iterable[int]) -> int:
    """Clock ticks in which some CPUs did something, of what proc(5) calls stat.

    Others of a node that many share are no concern of who has some of its cores.
    """
    wanted = {f"cpu{cpu}" for cpu in cpus}
    rows = [line.split() for line in stat.splitlines()]
    ticks = [list(map(int, row[1:9])) for row in rows if row and row[0] in wanted]
    return sum(sum(one) - one[3] - one[4] for one in ticks)  # idle, and waiting for a disk


def machine(output: Path) -> str:
    """What it was measured on, and when that ended."""
    model = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip() + ", "
                break
    cores = len(os.sched_getaffinity(0))
    day = time.strftime("%d %B %Y", time.localtime((output / FILE).stat().st_mtime))
    return f"{model}{cores} cores, Linux {platform.release()}, {day}"


def to_json(outcomes: Sequence[Outcome], about: Mapping[str, Any], machine: str) -> dict[str, Any]:
    """Everything, as `--json` prints it."""
    return {
        **about,
        "measured_on": machine,
        "experiments": [
            {"name": one.name, "title": one.title, "command": one.command,
             "others": one.others, "disturbed": list(one.disturbed),
             "findings": [finding.to_json() for finding in one.findings]}
            for one in outcomes
        ],
    }  # fmt: skip


def publish(output: Path, outcomes: Sequence[Outcome], about: Mapping[str, Any]) -> None:
    """Write `papers.json` and `papers.html`."""
    there = machine(output)
    text = json.dumps(to_json(outcomes, about, there), indent=1, allow_nan=False)
    replace_file(output / "papers.json", text + "\n")
    replace_file(output / "papers.html", page(outcomes, there))
