# SPDX-License-Identifier: LGPL-3.0-or-later
"""MPI beside and inside user-space Kubernetes, and a hybrid batch job (arXiv:2406.06995).

Inputs: a setting. Outputs: OSU's latency, bandwidth, Allreduce and Barrier from 1 byte to 1 MB on
two ranks, and LAMMPS on 1 and 2 ranks, in the paper's set-ups: bare, bare with Kubernetes idle
beside it, in a container, and in pods on the host's network and on a bridge; R squared of what a
model server learns from bare-metal jobs in the batch job of `examples/hybrid.sh`, whose logs are
kept. All messages go by TCP, as between machines. Clusters are started for it and taken down, and
a node of one pulls an image. In a Flux instance of two hosts or more the set-ups are measured
between two of them too, as far as they can be there.
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
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from usernetes_setup.build import programs
from usernetes_setup.node import carrier, namespaces
from usernetes_setup.preflight import report

from dovetail.bench import batch, hosts, hybrid, jobtap, kube, ondemand
from dovetail.bench.harness import Row, dovetail_run, in_turn
from dovetail.bench.papers import containers, published, pull
from dovetail.bench.papers.findings import Figures, Finding, Measured, Setting, plain
from dovetail.bench.papers.place import NotHere
from dovetail.bench.papers.published import BESIDE, CONTAINER, INSIDE
from dovetail.core.errors import BadInput, WorkFailed
from dovetail.host import install_paths
from dovetail.host.private_files import write_private
from dovetail.report import summary

BARE, PODS, BRIDGE = published.BARE, f"{INSIDE}, host's network", f"{INSIDE}, bridge"
SETUPS = (BARE, BESIDE, CONTAINER, PODS, BRIDGE)
ROUND, BETWEEN = "all set-ups", "between hosts"
ONE_CORE = "one core: messages need two ranks that run"
LACKING = {BESIDE: "Kubernetes has all cores", BRIDGE: f"no {namespaces.TUNNELS}"}
"""Why a set-up may not be there between hosts."""
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
    """A round of all set-ups on one machine, since a cluster takes long to come and go; and one
    between hosts, where a Flux instance has several."""
    need_kubernetes()
    engine = containers.runc(setting.progress)
    commands = [[str(install_paths.bench("openmpi", "bench_pairs")), "sweep"]]
    if shutil.which("lmp"):
        commands.append(hybrid.commands()[0])
    turns = iter(range(10**6))
    made: dict[str, Callable[[], Figures]] = {}
    if setting.place.cores > 1:
        image = pull.lammps(setting.place.scratch / "image") if len(commands) > 1 else None
        made[ROUND] = lambda: _round(setting, engine, commands, image, next(turns))
    if found := hosts.several():
        made[BETWEEN] = lambda: _between(setting, *found, commands, next(turns))
    if not made:
        raise NotHere(ONE_CORE)
    return made


def _round(
    setting: Setting,
    engine: Path,
    commands: Sequence[Sequence[str]],
    image: pull.Image | None,
    number: int,
) -> Figures:
    """Bare, in a container, both clusters one after the other, or from there to bare."""
    scratch = _scratch(setting, number)
    found: dict[str, float] = {}
    runs = _recorder(commands, found)

    def bare(words: Sequence[str], ranks: int) -> str:
        return hybrid.mpi_run(words, scratch, ranks)

    def cluster(setup: str, network: str) -> None:
        began = time.monotonic()
        with ondemand.started(2, setting.progress, network, purpose="setup") as kubeconfig:
            found[f"start-up, {setup}"] = time.monotonic() - began
            if setup == PODS:
                bare(commands[0], 2)  # not counted: the cluster comes to rest
                runs(BESIDE, bare)
            waits: list[float] = []
            runs(setup, functools.partial(_in_pods, scratch, kubeconfig, network, waits))
            found[f"start of pods, {setup}"] = statistics.median(waits)
            if setup == PODS and image:
                found.update(pull.measure(kubeconfig, image, commands[1]))

    in_turn(number, [
        lambda: runs(BARE, bare),
        lambda: runs(CONTAINER, functools.partial(containers.run, engine, scratch)),
        lambda: cluster(PODS, "host"),
        lambda: cluster(BRIDGE, "bridge"),
    ])  # fmt: skip
    return found


def _between(
    setting: Setting, flux: jobtap.Flux, count: int, commands: Sequence[Sequence[str]], number: int
) -> Figures:
    """With a rank on each of two hosts: bare, in containers, and in batch jobs whose Kubernetes
    has a core of each host, on either network, or from there to bare."""
    scratch = _scratch(setting, number)
    found: dict[str, float] = {"hosts": float(count)}
    runs = _recorder(commands, found)
    rank = ["env", f"PYTHONPATH={install_paths.package_environment()['PYTHONPATH']}",
            sys.executable, "-m", containers.__name__]  # fmt: skip

    def batch_job(setup: str, network: str) -> None:
        folder = scratch / network
        folder.mkdir()
        batch.prepare(folder, count, count, network)
        life: dict[str, float] = {}
        waits: list[float] = []
        with batch.during(flux, folder, life) as uri:
            free = flux.run("resource", "list", "-s", "free", "-no", "{nnodes}", uri=uri)
            if setup == PODS and int(free) > 1:
                hosts.bare(flux, commands[0], uri=uri)  # not counted: the cluster comes to rest
                runs(BESIDE, functools.partial(hosts.bare, flux, uri=uri))

            def in_pods(words: Sequence[str], ranks: int) -> str:
                if setup == PODS:
                    entry = hosts.in_pods(scratch, words, ranks)
                    return _said(hosts.planned(flux, scratch, uri, entry), waits)
                kubeconfig = folder / "kubeconfig"
                raw = flux.run("dovetail", "kubectl", "config", "view", "--raw", uri=uri)
                write_private(kubeconfig, raw)
                return _in_pods(scratch, kubeconfig, network, waits, words, ranks)

            runs(setup, in_pods)
        found[f"start-up, {setup}"] = life["up"]
        found[f"start of pods, {setup}"] = statistics.median(waits)

    in_turn(number, [
        lambda: runs(BARE, functools.partial(hosts.bare, flux)),
        lambda: runs(CONTAINER, lambda words, ranks: hosts.bare(flux, [*rank, *words], ranks)),
        lambda: batch_job(PODS, "host"),
        *([lambda: batch_job(BRIDGE, "bridge")] if carrier.possible() else []),
    ])  # fmt: skip
    return found


def _scratch(setting: Setting, number: int) -> Path:
    """A folder for a round, with an empty case."""
    scratch = setting.place.scratch / f"converged-{number}-{os.getpid()}"
    (scratch / "case").mkdir(parents=True)
    return scratch


def _recorder(
    commands: Sequence[Sequence[str]], found: dict[str, float]
) -> Callable[[str, Callable[[Sequence[str], int], str]], None]:
    """What runs the commands in a set-up, given how one is run there on so many ranks."""

    def runs(setup: str, run: Callable[[Sequence[str], int], str]) -> None:
        found.update(_figures(setup, [run(words, 2) for words in commands]))
        if len(commands) > 1:
            found[f"LAMMPS on 1 rank, {setup}"] = _lammps(run(commands[1], 1))[0]

    return runs


def _in_pods(
    scratch: Path,
    kubeconfig: Path,
    network: str,
    waits: list[float],
    words: Sequence[str],
    ranks: int,
) -> str:
    """What a program prints as a simulation of pods of one rank each."""
    entry = {"name": "sim", **hosts.in_pods(scratch, words, ranks)}
    plan = scratch / "plan.json"
    plan.write_text(json.dumps({"simulations": [entry]}))
    out = scratch / f"out-{time.monotonic_ns()}"
    dovetail_run(plan, out, "--kubeconfig", str(kubeconfig), "--network", network)
    return _said(out, waits)


def _said(out: Path, waits: list[float]) -> str:
    """What a plan's simulation printed; `waits` gets the seconds from its launch until it began."""
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
    """Every test in every set-up over bare, beside the medians of the authors' data: on one
    machine, and between hosts."""
    made = []
    if ROUND in measured:
        made += [*_compared(measured, ROUND), *_pulls(measured)]
    else:
        made.append(Finding("on one machine", "", why=ONE_CORE))
    if BETWEEN in measured:
        return [*made, *_compared(measured, BETWEEN)]
    return [*made, Finding("between hosts: every set-up", "", why="one machine")]


def _compared(measured: Measured, where: str) -> list[Finding]:
    """Of one variant, named in the findings if it is that between hosts."""
    theirs = published.of("converged")
    rounds = measured[where]
    apart = where == BETWEEN
    before = f"{BETWEEN}: " if apart else ""
    made = []

    def over(test: str, setup: str) -> Row:
        return Row("", tuple(one[f"{test}, {setup}"] / one[f"{test}, {BARE}"] for one in rounds))

    lammps = all(f"LAMMPS, {BARE}" in one for one in rounds)
    tests = [*published.OSU, *(["LAMMPS"] if lammps else [])]
    setups = [one for one in SETUPS if all(f"{tests[0]}, {one}" in found for found in rounds)]
    for test in tests:
        for setup in setups[1:]:
            number = theirs[f"{test}, {INSIDE if setup.startswith(INSIDE) else setup}"]
            made.append(Finding(f"{before}{test}: {setup} / bare", "x", over(test, setup), number,
                                group=f"{before}{test.partition(',')[0]} / bare",
                                note=_difference(setup)))  # fmt: skip
    made += [Finding(f"{before}{setup}", "", why=LACKING[setup])
             for setup in SETUPS if setup not in setups]  # fmt: skip
    if lammps:
        for setup in setups:
            pairs = [(one[f"LAMMPS on 1 rank, {setup}"], one[f"LAMMPS, {setup}"])
                     for one in rounds]  # fmt: skip
            units = "hosts" if apart else "ranks"
            made.append(Finding(f"{before}LAMMPS, speed-up from 1 to 2 {units}, {setup}", "x",
                                Row("", tuple(a / b for a, b in pairs)),
                                group=f"{before}LAMMPS, speed-up"))  # fmt: skip
        made.append(Finding(f"{before}share of CPU that LAMMPS reports: in pods / bare", "x",
                            over("LAMMPS CPU", PODS), theirs["LAMMPS CPU"]))  # fmt: skip
    few = f"{rounds[0]['hosts']:.0f} hosts" if apart else "one machine"
    made.append(Finding(f"{before}LAMMPS, speed-up from 4 to 32 nodes", "x", None,
                        theirs["LAMMPS scaling"], few))  # fmt: skip
    inside = [one for one in setups if one.startswith(INSIDE)]
    for setup in inside:
        made.append(Finding(f"{before}start-up of Kubernetes, {setup}", "s",
                            plain(measured, where, f"start-up, {setup}"),
                            theirs["start-up"]))  # fmt: skip
    for setup in inside:
        made.append(Finding(f"{before}from the launch of pods until they run, {setup}", "s",
                            plain(measured, where, f"start of pods, {setup}"), theirs["pull"],
                            note="no image is pulled here: pods have this machine's "
                                 "programs"))  # fmt: skip
    for setup in setups:
        made += [Finding(f"{before}{test}: {setup}", _unit(test),
                         plain(measured, where, f"{test}, {setup}"),
                         group=f"{before}{test}, absolute", detail=True)
                 for test in tests]  # fmt: skip
    return made


def _pulls(measured: Measured) -> list[Finding]:
    """Of an image, beside the paper's only number with a pull in it."""
    theirs = published.of("converged")["pull"]
    rounds = measured[ROUND]
    if not all("pull" in one for one in rounds):
        return [Finding("pull of an image", "s", None, theirs, "there is no lmp to pack in one")]
    note = f"LAMMPS and its MPI, {rounds[0]['pull, MB']:.0f} MB packed, over plain HTTP from a " \
           "registry at this machine's loopback address"  # fmt: skip
    return [
        Finding("pull of an image", "s", plain(measured, ROUND, "pull"), theirs, note=note),
        Finding("from the launch of a pod until it runs, its image pulled", "s",
                plain(measured, ROUND, "start of a pod, pulled"), theirs, note=note),
        Finding("from the launch of a pod until it runs, its image there", "s",
                plain(measured, ROUND, "start of a pod, image there")),
    ]  # fmt: skip


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
