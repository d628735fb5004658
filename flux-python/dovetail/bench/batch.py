# SPDX-License-Identifier: LGPL-3.0-or-later
"""How long a batch job waits for its Kubernetes, when it begins, changes and ends.

Inputs: Flux, the number of rounds. Output: `Claim`s. Each round is a batch job on four brokers of
this machine, with two slices of a core; what it did until it was up is drawn. Invariant: nothing
is polled; the job's script says by a named pipe that Kubernetes is up, and waits at another until
it shall end. The broker module is pinged while a plan runs and its status is streamed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dovetail.bench import batch_timeline
from dovetail.bench.batch_timeline import Span
from dovetail.bench.harness import Claim, Progress, Row
from dovetail.bench.jobtap import Flux, Instance, instance
from dovetail.core.errors import WorkFailed
from dovetail.host import install_paths

BROKERS = 4
UP, MORE, LESS, PING, MEMORY, END = (
    f"job start to up, {BROKERS} brokers", "a slice more", "a slice less",
    "a ping of the busy broker module, 99 of 100", "memory of the broker module",
    "end of the script to end of the job",
)  # fmt: skip
BOUNDS = {UP: ("s", 6.0), MORE: ("s", 6.0), LESS: ("s", 6.0), PING: ("ms", 10.0),
          MEMORY: ("MB", 80.0), END: ("s", 3.0)}  # fmt: skip
SCRIPT = """#!/bin/sh
#flux: -N{brokers} --dovetail=nodes={slices},cores=1,network={network} --output={folder}/log
exec 3<{folder}/told
flux dovetail up >&2 && echo "$FLUX_URI" >{folder}/said || echo >{folder}/said
read -r _ <&3
"""
PINGS = 300
_PATIENCE = 200.0  # seconds


def batch(scratch: Path, repeat: int, progress: Progress) -> list[Claim]:
    """Job after job."""
    os.environ.update(install_paths.for_flux())
    prepare(scratch, BROKERS, 2)
    found: dict[str, list[float]] = {name: [] for name in BOUNDS}
    with instance(BROKERS) as flux:
        for number in range(repeat):
            spans = life(flux, scratch, found)
            said = ", ".join(f"{name} {found[name][-1]:.3g} {BOUNDS[name][0]}" for name in BOUNDS)
            for line in batch_timeline.drawn(spans):
                progress(line)
            progress(f"round {number + 1}/{repeat}  {said}")
    return [Claim(Row(name, tuple(found[name])), unit, "<=", bound)
            for name, (unit, bound) in BOUNDS.items()]  # fmt: skip


def prepare(scratch: Path, brokers: int, slices: int, network: str = "host") -> None:
    """Write the job's script, and make its pipes."""
    script = SCRIPT.format(brokers=brokers, slices=slices, network=network, folder=scratch)
    (scratch / "script").write_text(script)
    for name in ("said", "told"):
        os.mkfifo(scratch / name, 0o600)
    # Open until we have ended, however that happens, which ends the script too.
    os.open(scratch / "told", os.O_RDWR)


def begin(flux: Flux, scratch: Path) -> tuple[str, str, float]:
    """Submit the job; it, its instance, and seconds from its start to Kubernetes being up."""
    job = flux.run("batch", str(scratch / "script"))
    try:
        uri = heard(scratch / "said")
        if not uri:
            raise WorkFailed(f"Kubernetes is not up: {(scratch / 'log').read_text().strip()}")
        return job, uri, time.time() - float(flux.run("jobs", "-no", "{t_run}", job))
    except BaseException:
        flux.run("cancel", job)
        raise


def end(flux: Flux, scratch: Path, job: str) -> float:
    """Let the job's script end; seconds from there to the end of the job."""
    (scratch / "told").write_text("\n")
    began = time.monotonic()
    flux.run("job", "wait-event", "-t", str(_PATIENCE), job, "clean")
    return time.monotonic() - began


@contextlib.contextmanager
def during(flux: Flux, scratch: Path, found: dict[str, float]) -> Iterator[str]:
    """The instance of such a job; `found` gets seconds until `up`, and `down` from its end."""
    job, uri, found["up"] = begin(flux, scratch)
    try:
        yield uri
    except BaseException:
        flux.run("cancel", job)
        raise
    found["down"] = end(flux, scratch, job)


def life(flux: Instance, scratch: Path, found: dict[str, list[float]]) -> list[Span]:
    """One job from its start to its end; returns what it did until Kubernetes was up."""

    def inside(*words: str) -> str:
        return flux.run(*words, uri=uri)

    def timed(name: str, what: Callable[[], object]) -> None:
        began = time.monotonic()
        what()
        found[name].append(time.monotonic() - began)

    job, uri, up = begin(flux, scratch)
    found[UP].append(up)
    spans = batch_timeline.spans(flux, job, uri, up)
    timed(MORE, lambda: inside("dovetail", "resize", "3"))
    timed(LESS, lambda: inside("dovetail", "resize", "2"))
    found[PING].append(pinged(flux, scratch, uri))
    usage = json.loads(inside("module", "stats", "--rusage=self", "dovetail"))
    found[MEMORY].append(usage["maxrss"] * 1024 / 1e6)
    found[END].append(end(flux, scratch, job))
    return spans


def pinged(flux: Instance, scratch: Path, uri: str) -> float:
    """Milliseconds in which 99 of 100 pings are answered, while simulations come and go."""
    case, plan = scratch / "case", scratch / "plan.yaml"
    case.mkdir(exist_ok=True)
    entry = {"name": "sim", "case": str(case), "ranks": 1, "count": 4, "command": ["sleep", "0.5"]}
    plan.write_text(json.dumps({"simulations": [entry]}))
    top = subprocess.Popen(
        [flux.command, "dovetail", "top"], env={**flux.environment, "FLUX_URI": uri},
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        output = tempfile.mkdtemp(prefix="out-", dir=scratch)
        flux.run("dovetail", "submit", "-o", output, str(plan), uri=uri)
        said = flux.run("ping", f"--count={PINGS}", "--interval=0.01", "dovetail", uri=uri)
        flux.run("dovetail", "wait", "--all", uri=uri)
    finally:
        top.terminate()
        top.wait()
    times = [float(time) for time in re.findall(r" time=([\d.]+) ms", said)]
    return statistics.quantiles(times, n=100)[-1]


def heard(pipe: Path) -> str:
    """The line that comes through a named pipe."""
    descriptor = os.open(pipe, os.O_RDWR)  # both, so that nothing waits for the other side
    try:
        if not select.select([descriptor], [], [], _PATIENCE)[0]:
            raise WorkFailed(f"the batch job said nothing for {_PATIENCE:g} s")
        return os.read(descriptor, 4096).decode().strip()
    finally:
        os.close(descriptor)
