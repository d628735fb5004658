# SPDX-License-Identifier: LGPL-3.0-or-later
"""MPI beside and inside user-space Kubernetes: LAMMPS and messages, bare and in pods.

Input: the number of rounds. Output: `Claim`s; the bounds are what the paper that this answers has
for the same (`PAPER`). In each round: bare; bare, with Kubernetes idle beside it; in pods, of one
rank each; and where there is the Flux Operator, in the pods of MiniClusters. The cluster comes and
goes in each round, and the order turns. Messages are by TCP everywhere, as between machines. Bare
is a plain mpirun.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from usernetes_setup.build import programs as build
from usernetes_setup.preflight import report

from dovetail.bench import flux_operator, ondemand
from dovetail.bench.harness import Claim, Progress, Row, plain_environment, ratios
from dovetail.core.errors import BadInput, WorkFailed
from dovetail.host import install_paths

CORES = 2
CELLS, STEPS = 16, 400
TCP = {"OMPI_MCA_btl": "tcp,self"}
BARE, BESIDE, PODS, MINI = "bare", "bare beside Kubernetes", "in pods", "in MiniClusters"
LAMMPS = "LAMMPS"
PAPER = {  # arXiv:2406.06995, in user-space Kubernetes / bare; of Allreduce the least of all sizes
    LAMMPS: 17.4 / 14.05,
    "ping-pong, 8 B": 1.65,
    "Allreduce, 8 B": 2.9,
    "Allreduce, 1 MB": 2.9,
}
_TIME = re.compile(r"^Loop time of ([\d.e+-]+) on", re.M)
Figures = Mapping[str, float]
_PATIENCE = 600  # seconds


def hybrid(scratch: Path, repeat: int, progress: Progress) -> list[Claim]:
    """Every figure of the paper's table, on this machine."""
    errors = report.errors()
    if errors:
        raise BadInput(f"user-space Kubernetes cannot run here: {errors[0]}; see `dovetail doctor`")
    programs = commands()
    operator = flux_operator.checkout()
    (scratch / "case").mkdir()
    found: dict[str, list[Figures]] = {BARE: [], BESIDE: [], PODS: []}
    if operator:
        found[MINI] = []

    def turn(number: int, name: str, measure: Callable[[], Figures]) -> None:
        found[name].append(measure())
        said = ", ".join(f"{what} {value:.3g}" for what, value in found[name][-1].items())
        progress(f"round {number + 1}/{repeat}  {name}: {said}")

    def bare() -> Figures:
        return figures([mpi_run(words, scratch) for words in programs])

    for number in range(repeat):
        if number % 2 == 0:
            turn(number, BARE, bare)
        with ondemand.started(CORES, progress) as kubeconfig:
            bare()  # not counted: the cluster comes to rest meanwhile
            pods = functools.partial(in_pods, programs, scratch, number, kubeconfig)
            turns: dict[str, Callable[[], Figures]] = {BESIDE: bare, PODS: pods}
            if operator:
                turns[MINI] = functools.partial(
                    in_miniclusters, operator, pods, scratch, kubeconfig
                )
            for name in reversed([*turns]) if number % 2 else turns:
                turn(number, name, turns[name])
        if number % 2:
            turn(number, BARE, bare)
    return claims(found)


def commands() -> list[list[str]]:
    """LAMMPS on the example's input, and the program that measures messages."""
    lammps = shutil.which("lmp")
    if not lammps:
        raise BadInput("there is no lmp: ./bootstrap services installs LAMMPS")
    size = [word for axis in "xyz" for word in ("-var", axis, str(CELLS))]
    made = ["-in", str(build.examples() / "in.lj"), "-log", "none", "-var", "steps", str(STEPS)]
    return [[lammps, *made, *size], [str(install_paths.bench("openmpi", "bench_pairs")), "pairs"]]


def mpi_command(words: Sequence[str], folder: Path, ranks: int) -> tuple[list[str], dict[str, str]]:
    """A plain mpirun of a program, and its environment."""
    env = {**plain_environment(), **TCP, "OMPI_MCA_btl_tcp_if_include": "lo",
           "TMPDIR": str(folder)}  # fmt: skip
    starter = shutil.which("mpirun.openmpi") or "mpirun"
    return [starter, "-np", str(ranks), *words], env


def mpi_run(words: Sequence[str], folder: Path, ranks: int = 2) -> str:
    """What a program prints, on the ranks of a plain mpirun."""
    line, env = mpi_command(words, folder, ranks)
    try:
        done = subprocess.run(
            line, env=env, cwd=folder, capture_output=True, text=True, timeout=_PATIENCE
        )
    except subprocess.TimeoutExpired:
        raise WorkFailed(f"{' '.join(line)}: did not end within {_PATIENCE} s") from None
    if done.returncode:
        raise WorkFailed(f"{' '.join(line)}: {(done.stderr + done.stdout).strip()[-1000:]}")
    return done.stdout


def in_miniclusters(
    operator: flux_operator.Checkout, pods: Callable[..., Figures], scratch: Path, kubeconfig: Path
) -> Figures:
    """As `pods`, made by the operator, which is there for as long as it takes."""
    with operator.started(kubeconfig, scratch / "manager.log"):
        return pods("minicluster", PATH=f"{os.environ['PATH']}:{operator.flux}")


def in_pods(
    programs: Sequence[Sequence[str]], scratch: Path, lap: int, kubeconfig: Path,
    launcher: str = "job", **environment: str,
) -> Figures:  # fmt: skip
    """The same programs as simulations of two pods, one after the other."""
    texts = []
    for number, words in enumerate(programs):
        entry = {"name": "sim", "case": str(scratch / "case"), "ranks": 2, "ranks_per_pod": 1,
                 "command": list(words), "environment": TCP}  # fmt: skip
        plan = scratch / "plan.json"
        plan.write_text(json.dumps({"simulations": [entry]}))
        folder = scratch / f"{launcher}-{lap}-{number}"
        line = [sys.executable, "-m", "dovetail", "run", "--json", "-o", str(folder), "--launcher",
                launcher, "--kubeconfig", str(kubeconfig), str(plan)]  # fmt: skip
        env = {**plain_environment(), **environment}
        done = subprocess.run(line, env=env, capture_output=True, text=True)
        if done.returncode:
            raise WorkFailed(f"dovetail run, in pods: {done.stderr.strip()[-2000:]}")
        texts.append((folder / "sim" / "log").read_text())
    return figures(texts)


def figures(texts: Sequence[str]) -> Figures:
    """Seconds of LAMMPS, microseconds of messages, from what the programs printed."""
    lammps, pairs = texts
    time = _TIME.search(lammps)
    line = next((line for line in pairs.splitlines() if line.startswith('{"ping-pong')), "")
    if not time or not line:
        raise WorkFailed(f"figures are missing: {(lammps if not time else pairs)[-1000:]}")
    found: dict[str, float] = {LAMMPS: float(time[1]), **json.loads(line)}
    return {what: found[what] for what in PAPER}


def claims(found: Mapping[str, Sequence[Figures]]) -> list[Claim]:
    """Ratios to bare, round by round, then what they are of."""

    def row(where: str, what: str) -> Row:
        return Row(f"{what}, {where}", tuple(one[what] for one in found[where]))

    made = []
    for what, theirs in PAPER.items():
        beside = ratios(row(BESIDE, what), row(BARE, what), f"{what}, {BESIDE} / bare")
        made.append(Claim(beside, "x"))
        for where in [one for one in (PODS, MINI) if one in found]:
            name = f"{what}, {where} / bare; bound: the paper"
            made.append(Claim(ratios(row(where, what), row(BARE, what), name), "x", "<=", theirs))
    unit = {LAMMPS: "s"}
    made += [Claim(row(where, what), unit.get(what, "us")) for what in PAPER for where in found]
    return made
