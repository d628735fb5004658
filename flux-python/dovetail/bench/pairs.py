# SPDX-License-Identifier: LGPL-3.0-or-later
"""What messages between two pods cost against bare processes, by each transport.

Inputs: two clusters, on the host's network and on a bridge. Outputs: `Claim`s. Bare processes are
those of a plain mpirun, which wait spinning, as ranks in pods do that are alone.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from dovetail.bench.harness import Claim, Progress, Row, dovetail_run, plain_environment, ratios
from dovetail.core.errors import WorkFailed
from dovetail.host import install_paths
from dovetail.mpi import launcher

TRANSPORTS = {"TCP": "tcp,self", "shared memory": "vader,self"}
BOUND = 1.05
Figures = Mapping[str, float]
_PATIENCE = 120  # seconds


def messages(
    scratch: Path, kubeconfig: Path, bridge: Path, repeat: int, progress: Progress
) -> list[Claim]:
    """Ping-pong and Allreduce of 8 bytes and of 1 MB."""
    scratch.mkdir()
    (scratch / "case").mkdir()
    found: dict[tuple[str, str], list[Figures]] = {}
    words = {
        "pods": ("--kubeconfig", str(kubeconfig)),
        "bridge": ("--kubeconfig", str(bridge), "--network", "bridge"),
    }
    for number in range(repeat):
        variants = [(where, by) for by in TRANSPORTS for where in ("bare", "pods")]
        variants.append(("bridge", "TCP"))
        turn = number % len(variants)
        for where, by in variants[turn:] + variants[:turn]:
            if where == "bare":
                figures = bare(TRANSPORTS[by], scratch)
            else:
                out = scratch / f"{where}-{TRANSPORTS[by]}-{number}"
                figures = as_pods(TRANSPORTS[by], scratch, out, *words[where])
            found.setdefault((where, by), []).append(figures)
            said = ", ".join(f"{name} {value:.2f}" for name, value in figures.items())
            progress(f"round {number + 1}/{repeat}  {where}, {by}: {said} us")
    return _claims(found)


def _claims(found: Mapping[tuple[str, str], list[Figures]]) -> list[Claim]:
    def row(where: str, by: str, what: str) -> Row:
        return Row(f"{what}, {by}: {where}", tuple(one[what] for one in found[where, by]))

    claims = []
    for where, by in found:
        for what in found[where, by][0] if where != "bare" else ():
            base = row("bare", by, what)
            name = f"{what}, {by}: {'pods' if where == 'pods' else 'pods on a bridge'} / bare"
            ratio = ratios(row(where, by, what), base, name)
            claims.append(Claim(ratio, "x", "<=", BOUND) if where == "pods" else Claim(ratio, "x"))
    bare_rows = [row("bare", by, what) for by in TRANSPORTS for what in found["bare", by][0]]
    return [*claims, *(Claim(one, "us") for one in bare_rows)]


def program() -> str:
    """What measures."""
    return str(install_paths.bench("openmpi", "bench_pairs"))


def bare(transport: str, scratch: Path) -> Figures:
    """Two processes of a plain mpirun."""
    env = {**plain_environment(), "OMPI_MCA_btl": transport, "OMPI_MCA_btl_tcp_if_include": "lo",
           "TMPDIR": str(scratch)}  # fmt: skip
    return _answer([_starter(), "-np", "2", program(), "pairs"], env)


def as_pods(transport: str, scratch: Path, out: Path, *words: str) -> Figures:
    """Two rank groups of one simulation."""
    entry = {"name": "pair", "case": str(scratch / "case"), "ranks": 2, "ranks_per_pod": 1,
             "command": [program(), "pairs"],
             "environment": {"OMPI_MCA_btl": transport}}  # fmt: skip
    plan = scratch / "plan.json"
    plan.write_text(json.dumps({"simulations": [entry]}))
    dovetail_run(plan, out, *words)
    return _figures((out / "pair" / "log").read_text())


def _starter() -> str:
    path = os.environ.get("PATH", os.defpath)
    return launcher.which("mpirun.openmpi", path) or "mpirun"


def _answer(words: list[str], env: Mapping[str, str] | None = None) -> Figures:
    try:
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        raise WorkFailed(f"{' '.join(words)}: did not end within {_PATIENCE} s") from None
    if done.returncode:
        raise WorkFailed(f"{' '.join(words)}: {(done.stderr + done.stdout).strip()[-1000:]}")
    return _figures(done.stdout)


def _figures(text: str) -> Figures:
    line = next((line for line in text.splitlines() if line.startswith('{"ping-pong')), "")
    if not line:
        raise WorkFailed(f"the program did not print its figures: {text[-1000:]}")
    found: Figures = json.loads(line)
    return found
