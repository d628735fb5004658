# SPDX-License-Identifier: LGPL-3.0-or-later
"""What Kubernetes on several hosts costs: messages, LAMMPS, copies of cases, its start and its end.

Inputs: the Flux instance that this runs in, of two brokers or more, and the number of rounds.
Outputs: `Claim`s. In each round: processes on bare metal, started by Flux, on the first two hosts,
with nothing beside them; then a batch job on all hosts whose Kubernetes has a slice of a core on
each, where the same programs run as simulations of two pods, on two hosts; every other round the
other way round. Messages are by TCP
everywhere. Where hosts do not see the output directory, a case of `SIZE` bytes is copied to each
other host, of which the slowest counts, against one stream of TCP to one of them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import os
import select
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dovetail.bench import batch, hybrid, jobtap
from dovetail.bench.harness import Claim, Progress, Row, in_turn, ratios
from dovetail.bench.jobtap import Flux
from dovetail.core import eventlog, protocol
from dovetail.core.errors import BadInput, WorkFailed
from dovetail.host import install_paths

SIZE = 1 << 30
BARE, PODS = "bare", "in pods"
RATIO, COPY, UP, DOWN = 1.02, 0.8, 10.0, 5.0
"""Aims: times in pods / bare; a copy's speed / that of a stream; seconds up and down."""
SENDER = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as out:
    left, block = int(sys.argv[3]), bytes(1 << 20)
    while left > 0:
        out.sendall(block)
        left -= len(block)
    out.shutdown(socket.SHUT_WR)
    out.recv(1)
"""
_PATIENCE, _LOOK = 600.0, 0.2  # seconds for a stream to begin, and between looks at who sends
Figures = dict[str, float]


def instance() -> tuple[Flux, int]:
    """The Flux instance that this runs in, and its hosts. Raises BadInput where there are none."""
    found, uri = jobtap.command(), os.environ.get("FLUX_URI", "")
    if not found or not uri:
        raise BadInput(
            "hosts: measures the hosts of a Flux instance that it runs in; "
            "`flux alloc -N2 dovetail bench hosts` would be right"
        )
    flux = Flux(found, uri, {**install_paths.for_flux(), **hybrid.TCP})
    count = int(flux.run("resource", "list", "-s", "up", "-no", "{nnodes}"))
    if count < 2:
        raise BadInput("hosts: this Flux instance has one host, and two or more are needed")
    return flux, count


def several() -> tuple[Flux, int] | None:
    """That instance and its hosts; None where there are no two."""
    with contextlib.suppress(BadInput, WorkFailed):
        return instance()
    return None


def hosts(scratch: Path, repeat: int, progress: Progress) -> list[Claim]:
    """Round after round."""
    flux, count = instance()
    commands = hybrid.commands()
    names = flux.run("resource", "list", "-s", "up", "-no", "{nodelist}")
    progress(f"{count} hosts: {names}")
    batch.prepare(scratch, count, count)
    (scratch / "case").mkdir()
    rounds = []
    for number in range(repeat):
        found: Figures = {}
        steps = (_bare, functools.partial(_life, scratch=scratch, count=count))
        in_turn(number, [functools.partial(step, flux, commands, found) for step in steps])
        rounds.append(found)
        said = ", ".join(f"{name} {value:.3g}" for name, value in found.items())
        progress(f"round {number + 1}/{repeat}  {said}")
    return _claims(rounds)


def bare(flux: Flux, words: Sequence[str], ranks: int = 2, uri: str = "") -> str:
    """What a program prints that Flux starts, with a rank on each of so many hosts."""
    asked = (f"-N{ranks}", f"-n{ranks}", "-o", "cpu-affinity=off")
    return flux.run("run", *asked, *words, uri=uri)


def _bare(flux: Flux, commands: Sequence[Sequence[str]], found: Figures) -> None:
    """All programs on bare metal."""
    found.update(_named(hybrid.figures([bare(flux, words) for words in commands]), BARE))


def _named(figures: Mapping[str, float], where: str) -> Figures:
    return {f"{what}, {where}": value for what, value in figures.items()}


def _life(
    flux: Flux, commands: Sequence[Sequence[str]], found: Figures, scratch: Path, count: int
) -> None:
    """A batch job from its start to its end, and what is measured in it."""
    with batch.during(flux, scratch, found) as uri:
        texts = []
        for words in commands:
            out = planned(flux, scratch, uri, in_pods(scratch, words))
            texts.append((out / "sim" / "log").read_text())
        found.update(_named(hybrid.figures(texts), PODS))
        _staged(flux, scratch, uri, count, found)


def in_pods(scratch: Path, words: Sequence[str], ranks: int = 2) -> dict[str, object]:
    """The entry of a plan that runs a program in pods of one rank each."""
    return {"case": str(scratch / "case"), "ranks": ranks, "ranks_per_pod": 1,
            "command": [*words], "environment": hybrid.TCP}  # fmt: skip


def planned(flux: Flux, scratch: Path, uri: str, entry: Mapping[str, object]) -> Path:
    """Run one simulation, or some of a family; its output directory."""
    folder = scratch / f"out-{time.monotonic_ns()}"
    plan = folder.with_suffix(".json")
    plan.write_text(json.dumps({"simulations": [{"name": "sim", **entry}]}))
    flux.run("dovetail", "submit", "-o", str(folder), str(plan), uri=uri)
    flux.run("dovetail", "wait", "--all", uri=uri)
    return folder


def _staged(flux: Flux, scratch: Path, uri: str, count: int, found: Figures) -> None:
    """Copy a case to each other host, if they do not see it, and as many bytes by one stream."""
    here = socket.gethostname()
    probe = scratch / "probe"
    probe.touch()
    seen = flux.run("exec", "-r", "1", "sh", "-c", f"test -e {probe} && echo yes || echo no")
    if seen == "yes":  # nothing is copied
        return
    case = scratch / "large"
    if not case.exists():
        case.mkdir()
        with open(case / "field", "wb") as file:
            for _ in range(SIZE >> 20):
                file.write(os.urandom(1 << 20))
    # One on each host, so that all but one are on others than this.
    entry = {"case": str(case), "command": ["sleep", "1"], "ranks": 1, "count": count,
             "stage": "end"}  # fmt: skip
    found["streamed"] = _stream(flux)
    out = planned(flux, scratch, uri, entry)
    placed: dict[str, float] = {}
    times = []
    for event in eventlog.read(out / "events.jsonl")[1]:
        if isinstance(event, protocol.Placed) and here not in event.nodes:
            placed[event.name] = event.t
        elif isinstance(event, protocol.Started) and event.name in placed:
            times.append(event.t - placed.pop(event.name))
    if not times:
        raise WorkFailed("no simulation was placed on another host")
    found["copied"] = max(times)


def _stream(flux: Flux) -> float:
    """Seconds in which `SIZE` bytes come from another host."""
    threads = concurrent.futures.ThreadPoolExecutor(1)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        words = (sys.executable, "-c", SENDER, socket.gethostname(), str(port), str(SIZE))
        sent = threads.submit(flux.run, "exec", "-r", "1", *words)
        end = time.monotonic() + _PATIENCE
        while not select.select([server], [], [], _LOOK)[0]:
            if sent.done():
                raise WorkFailed(f"a stream between hosts: {sent.exception() or 'nobody came'}")
            if time.monotonic() > end:
                raise WorkFailed(f"a stream between hosts: nobody came in {_PATIENCE:.0f} s")
        link, _ = server.accept()
        began = time.monotonic()
        with link:
            buffer = bytearray(1 << 20)
            while link.recv_into(buffer):
                pass
            took = time.monotonic() - began
        sent.result()
    return took


def _claims(rounds: Sequence[Mapping[str, float]]) -> list[Claim]:
    """Ratios round by round, then what they are of."""

    def row(key: str, name: str = "") -> Row:
        return Row(name or key, tuple(one[key] for one in rounds))

    made = []
    for what in hybrid.PAPER:
        over = ratios(row(f"{what}, {PODS}"), row(f"{what}, {BARE}"), f"{what}, {PODS} / {BARE}")
        made.append(Claim(over, "x", "<=", RATIO))
    if "copied" in rounds[0]:
        speed = ratios(row("streamed"), row("copied"), "a case copied / one stream of TCP, speed")
        made.append(Claim(speed, "x", ">=", COPY))
    made.append(Claim(row("up", "job start to up"), "s", "<=", UP))
    made.append(Claim(row("down", "end of the script to end of the job"), "s", "<=", DOWN))
    for where in (BARE, PODS):
        made += [Claim(row(f"{what}, {where}"), "s" if what == hybrid.LAMMPS else "us")
                 for what in hybrid.PAPER]  # fmt: skip
    if "copied" in rounds[0]:
        made += [Claim(row("copied", "1 GiB copied to other hosts, the slowest"), "s"),
                 Claim(row("streamed", "1 GiB by one stream of TCP"), "s")]  # fmt: skip
    return made
