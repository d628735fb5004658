# SPDX-License-Identifier: LGPL-3.0-or-later
"""MPI beside and inside user-space Kubernetes, and a hybrid batch job (arXiv:2406.06995).

Inputs: a setting. Outputs: OSU's latency, bandwidth, Allreduce and Barrier from 1 byte to 1 MB on
two ranks, and LAMMPS on 1 and 2 ranks, in the paper's set-ups: bare, bare with Kubernetes idle
beside it, in a container, and in pods on the host's network and on a bridge; R squared of what a
model server learns from bare-metal jobs in the batch job of `examples/hybrid.sh`, whose logs are
kept. All messages go by TCP, as between machines. Clusters are started for it and taken down.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import json
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from usernetes_setup.build import programs
from usernetes_setup.preflight import report

from dovetail.bench import hybrid, jobtap, kube, ondemand
from dovetail.bench.harness import Row, dovetail_run
from dovetail.bench.papers import containers, published
from dovetail.bench.papers.findings import Figures, Finding, Measured, Setting, plain
from dovetail.bench.papers.place import NotHere
from dovetail.bench.papers.published import BESIDE, CONTAINER, INSIDE
from dovetail.core.errors import BadInput, WorkFailed
from dovetail.host import install_paths
from dovetail.report import summary

BARE, PODS, BRIDGE = published.BARE, f"{INSIDE}, host's network", f"{INSIDE}, bridge"
SETUPS = (BARE, BESIDE, CONTAINER, PODS, BRIDGE)
ROUND = "all set-ups"
CELLS, STEPS = 16, 400
_TIME = re.compile(r"^Loop time of ([\d.e+-]+) on (\d+) procs", re.M)
_USED = re.compile(r"^([\d.]+)% CPU use", re.M)
_PATIENCE, _EACH = 1200.0, 10.0  # seconds for a batch job, and for each job in it
_LOOK = 10.0  # seconds between looks at it
FOLDERS = ("learned", "unseen")  # of logs, in its output
MODEL = "R squared, "
Variants = Mapping[str, Callable[[], Figures]]


def need_kubernetes() -> None:
    """Raise NotHere where a cluster cannot be started."""
    errors = report.errors()
    if errors:
        raise NotHere(f"user-space Kubernetes cannot run: {errors[0]}")


# --- the set-ups ---


def converged_variants(setting: Setting) -> Variants:
    """One variant: a round of all set-ups, since a cluster takes long to come and go."""
    need_kubernetes()
    if setting.place.cores < 2:
        raise NotHere("one core: messages need two ranks that run")
    engine = containers.runc(setting.progress)
    commands = [[str(install_paths.bench("openmpi", "bench_pairs")), "sweep"]]
    if shutil.which("lmp"):
        commands.append(hybrid.commands()[0])
    turns = iter(range(10**6))
    return {ROUND: lambda: _round(setting, engine, commands, next(turns))}


def _round(
    setting: Setting, engine: Path, commands: Sequence[Sequence[str]], number: int
) -> Figures:
    """Bare, in a container, then both clusters one after the other."""
    scratch = setting.place.scratch / f"converged-{number}-{os.getpid()}"
    (scratch / "case").mkdir(parents=True)
    found: dict[str, float] = {}

    def runs(setup: str, run: Callable[[Sequence[str], int], str]) -> None:
        found.update(_figures(setup, [run(words, 2) for words in commands]))
        if len(commands) > 1:
            found[f"LAMMPS on 1 rank, {setup}"] = _lammps(run(commands[1], 1))[0]

    def bare(words: Sequence[str], ranks: int) -> str:
        return hybrid.mpi_run(words, scratch, ranks)

    runs(BARE, bare)
    runs(CONTAINER, functools.partial(containers.run, engine, scratch))
    for setup, network in ((PODS, "host"), (BRIDGE, "bridge")):
        began = time.monotonic()
        with ondemand.started(2, setting.progress, network, purpose="setup") as kubeconfig:
            found[f"start-up, {setup}"] = time.monotonic() - began
            if setup == PODS:
                bare(commands[0], 2)  # not counted: the cluster comes to rest
                runs(BESIDE, bare)
            waits: list[float] = []
            runs(setup, functools.partial(_in_pods, scratch, kubeconfig, network, waits))
            found[f"start of pods, {setup}"] = statistics.median(waits)
    return found


def _in_pods(
    scratch: Path,
    kubeconfig: Path,
    network: str,
    waits: list[float],
    words: Sequence[str],
    ranks: int,
) -> str:
    """What a program prints as a simulation of pods of one rank each; `waits` gets how many seconds
    after their launch it began."""
    entry = {"name": "sim", "case": str(scratch / "case"), "ranks": ranks, "ranks_per_pod": 1,
             "command": list(words), "environment": hybrid.TCP}  # fmt: skip
    plan = scratch / "plan.json"
    plan.write_text(json.dumps({"simulations": [entry]}))
    out = scratch / f"out-{time.monotonic_ns()}"
    dovetail_run(plan, out, "--kubeconfig", str(kubeconfig), "--network", network)
    last = summary.load(out)[1].tracks[0].attempts[-1]
    waits.append((last.start or last.launch) - last.launch)
    return (out / "sim" / "log").read_text()


def _figures(setup: str, texts: Sequence[str]) -> dict[str, float]:
    line = next((line for line in texts[0].splitlines() if line.startswith('{"latency')), "")
    if not line:
        raise WorkFailed(f"figures are missing: {texts[0][-1000:]}")
    found = {f"{test}, {setup}": float(value) for test, value in json.loads(line).items()}
    if len(texts) > 1:
        found[f"LAMMPS, {setup}"], found[f"LAMMPS CPU, {setup}"] = _lammps(texts[1])
    return found


def _lammps(text: str) -> tuple[float, float]:
    took, used = _TIME.search(text), _USED.search(text)
    if not took or not used:
        raise WorkFailed(f"LAMMPS did not end: {text[-1000:]}")
    return float(took[1]), float(used[1]) / 100


def converged_findings(setting: Setting, measured: Measured) -> list[Finding]:
    """Every test in every set-up over bare, beside the medians of the authors' data."""
    theirs = published.of("converged")
    rounds = measured[ROUND]
    made = []

    def over(test: str, setup: str) -> Row:
        return Row("", tuple(one[f"{test}, {setup}"] / one[f"{test}, {BARE}"] for one in rounds))

    lammps = f"LAMMPS, {BARE}" in rounds[0]
    tests = [*published.OSU, *(["LAMMPS"] if lammps else [])]
    for test in tests:
        for setup in SETUPS[1:]:
            number = theirs[f"{test}, {INSIDE if setup.startswith(INSIDE) else setup}"]
            made.append(Finding(f"{test}: {setup} / bare", "x", over(test, setup), number,
                                group=f"{test.partition(',')[0]} / bare",
                                note=_difference(setup)))  # fmt: skip
    if lammps:
        for setup in SETUPS:
            pairs = [(one[f"LAMMPS on 1 rank, {setup}"], one[f"LAMMPS, {setup}"])
                     for one in rounds]  # fmt: skip
            made.append(Finding(f"LAMMPS, speed-up from 1 to 2 ranks, {setup}", "x",
                                Row("", tuple(a / b for a, b in pairs)),
                                group="LAMMPS, speed-up"))  # fmt: skip
        made.append(Finding("share of CPU that LAMMPS reports: in pods / bare", "x",
                            over("LAMMPS CPU", PODS), theirs["LAMMPS CPU"]))  # fmt: skip
    made.append(Finding("LAMMPS, speed-up from 4 to 32 nodes", "x", None, theirs["LAMMPS scaling"],
                        "one machine"))  # fmt: skip
    for setup in (PODS, BRIDGE):
        made.append(Finding(f"start-up of Kubernetes, {setup}", "s",
                            plain(measured, ROUND, f"start-up, {setup}"),
                            theirs["start-up"]))  # fmt: skip
    for setup in (PODS, BRIDGE):
        made.append(Finding(f"from the launch of pods until they run, {setup}", "s",
                            plain(measured, ROUND, f"start of pods, {setup}"), theirs["pull"],
                            note="no image is pulled here: pods have this machine's "
                                 "programs"))  # fmt: skip
    for setup in SETUPS:
        made += [Finding(f"{test}: {setup}", _unit(test),
                         plain(measured, ROUND, f"{test}, {setup}"),
                         group=f"{test}, absolute", detail=True)
                 for test in tests]  # fmt: skip
    return made


def _unit(test: str) -> str:
    return "s" if test == "LAMMPS" else "MB/s" if test.startswith("bandwidth") else "us"


def _difference(setup: str) -> str:
    return "the paper's pods are on a bridge between machines" if setup == PODS else ""


# --- the hybrid job ---


def hybrid_variants(setting: Setting) -> Variants:
    """A batch job of examples/hybrid.sh."""
    need_kubernetes()
    if not jobtap.command():
        raise NotHere("no flux: put it on PATH, or set FLUX to its command")
    if not shutil.which("lmp"):
        raise NotHere("there is no lmp: ./bootstrap services installs LAMMPS")
    try:
        install_paths.commands()
        script = programs.examples() / "hybrid.sh"
    except BadInput as error:
        raise NotHere(str(error)) from None
    return {"batch job": functools.partial(_job, setting, script)}


def _job(setting: Setting, script: Path) -> Figures:
    """One job on four brokers, of an ordinary user where this one is, or can play one.

    Logs are kept in the output directory as they come, so that one that was interrupted goes on.
    """
    with contextlib.ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix="dovetail-bench-")
        scratch = Path(stack.enter_context(made))
        user = stack.enter_context(kube.another(scratch, setting.progress))
        work = (user.folder if user else scratch) / "work"
        out = work / "hybrid-out"
        work.mkdir()
        kept = _keep(out, setting.output)
        for name in FOLDERS:
            shutil.copytree(setting.output / name, out / name)
        (work / "examples").symlink_to(script.parent)
        more = {**install_paths.for_flux(), "HYBRID_RESUME": "1",
                "HYBRID_JOBS": "{},{}".format(*setting.scale.jobs)}  # fmt: skip
        if user and user.become():
            more |= {"HOME": str(user.folder), "DOVETAIL_CACHE": str(user.programs)}
            for path in (work, *work.rglob("*")):
                os.chown(path, user.uid, user.uid, follow_symlinks=False)
        with jobtap.instance(4, more, user.become() if user else ()) as flux:
            job = flux.run("batch", f"--cwd={work}", f"--output={work}/job.log", str(script))
            try:
                _wait(setting, flux, job, lambda: _keep(out, setting.output))
            finally:
                _keep(out, setting.output)
            times = flux.run("jobs", "-no", "{t_submit} {t_inactive}", job).split()
        table = out / "predicted.csv"
        if not table.exists():
            said = (work / "job.log").read_text(errors="replace").strip()[-1000:]
            raise WorkFailed(f"the batch job failed: {said}")
        for path in (table, table.with_suffix(".svg")):
            shutil.copy(path, setting.output)
    rows = list(csv.DictReader((setting.output / "predicted.csv").read_text().splitlines()))
    actual = [float(row["actual"]) for row in rows]
    found = {"seconds": float(times[1]) - float(times[0]), "kept": float(kept),
             "learned": float(setting.scale.jobs[0]), "unseen": float(len(rows)),
             "cpu": statistics.median(actual),
             "ordinary": float(user is not None)}  # fmt: skip
    for name in rows[0]:
        if name not in ("log", "actual"):
            found[MODEL + name] = r_squared(actual, [float(row[name]) for row in rows])
    return found


def _wait(setting: Setting, flux: jobtap.Flux, job: str, keep: Callable[[], int]) -> None:
    """Until the batch job has ended; tells of each tenth of its jobs."""
    total = sum(setting.scale.jobs)
    end = time.monotonic() + _PATIENCE + _EACH * total
    told = 0
    while flux.run("jobs", "-no", "{state}", job) != "INACTIVE":
        if time.monotonic() > end:
            raise WorkFailed(f"the batch job did not end; {keep()} of its {total} jobs did")
        time.sleep(_LOOK)
        done = keep()
        if 10 * done // total > told:
            told = 10 * done // total
            setting.progress(f"{done} of the batch job's {total} jobs are done")


def _keep(out: Path, kept: Path) -> int:
    """Keep the logs of jobs that have ended; how many there are now."""
    for name in FOLDERS:
        (kept / name).mkdir(parents=True, exist_ok=True)
        for log in (out / name).glob("*.log"):
            if not (kept / name / log.name).exists():
                part = kept / name / "part"
                shutil.copyfile(log, part)
                part.replace(kept / name / log.name)
    return len(list(kept.glob("*/*.log")))


def r_squared(actual: Sequence[float], predicted: Sequence[float]) -> float:
    """The share of the variance that is predicted; below zero, the mean would do better."""
    mean = sum(actual) / len(actual)
    missed = sum((a - p) ** 2 for a, p in zip(actual, predicted))
    return 1 - missed / sum((a - mean) ** 2 for a in actual)


def hybrid_findings(setting: Setting, measured: Measured) -> list[Finding]:
    """R squared by model, beside that of the authors' predictions."""
    theirs = published.of("hybrid")
    rounds = measured["batch job"]
    one = rounds[0]
    note = f"{one['learned']:.0f} jobs learned, {one['unseen']:.0f} unseen, " \
           f"{'of an ordinary user' if one['ordinary'] else 'as root'}; " \
           "of a Lennard-Jones melt, where the paper has ReaxFF"  # fmt: skip
    made = []
    for model in [name.removeprefix(MODEL) for name in one if name.startswith(MODEL)]:
        made.append(Finding(f"R squared, {model}", "R squared",
                            plain(measured, "batch job", MODEL + model), theirs.get(model),
                            note=note, group="R squared"))  # fmt: skip
    made.append(Finding("CPU time of a rank of an unseen job, median", "s",
                        plain(measured, "batch job", "cpu")))  # fmt: skip
    whole = plain(measured, "batch job", "seconds")
    again = f"it was interrupted, and went on after {one['kept']:.0f} of its jobs"
    made.append(Finding("the whole batch job", "s", None if one["kept"] else whole,
                        why=again if one["kept"] else ""))  # fmt: skip
    return made
