# SPDX-License-Identifier: LGPL-3.0-or-later
"""What an instance of many brokers costs with a slice on each.

Inputs: Flux, the number of rounds. Outputs: `Claim`s; of each size seconds for all slices to be up,
for half of them to end and to come back, and for all to end; the messages that the broker module
got and sent, its CPU time and memory.

Invariants: all brokers are on this machine, in an instance that is started for it and ended; slices
are jobs with the real agent and the real relay, without Kubernetes (`stub_slice`). They share the
cores that there are, where each would have its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dovetail.bench.harness import Claim, Progress, Row, ratios
from dovetail.bench.jobtap import Flux, Instance, command, instance
from dovetail.core.errors import BadInput
from dovetail.flux.client import Client
from dovetail.host import install_paths

SIZES = (16, 32, 64)
GROWTH = 1.5
"""What each slice of the most may cost, in proportion to each of a quarter of them."""
PATIENCE = 900  # seconds to come up, or to end, on a machine where all share a few cores
STEPS = ("up", "half of them end", "and come back", "down")
Steps = dict[str, dict[str, float]]


def brokers(scratch: Path, repeat: int, progress: Progress) -> list[Claim]:
    """Every size in each round."""
    if not command():
        raise BadInput("no flux: put it on PATH, or set FLUX to its command")
    stub = agent(scratch)
    found: dict[int, list[Steps]] = {size: [] for size in SIZES}
    for number in range(repeat):
        for size in SIZES:
            steps = life(stub, size)
            found[size].append(steps)
            said = ", ".join(f"{name} {one['seconds']:.3g} s" for name, one in steps.items())
            progress(f"round {number + 1}/{repeat}  {size} brokers: {said}")
    return claims(found)


def agent(folder: Path) -> Path:
    """Write a program that is the agent of a slice, and return its path."""
    made = folder / "agent"
    path, python = map(
        shlex.quote, (install_paths.package_environment()["PYTHONPATH"], sys.executable)
    )
    words = f'PYTHONPATH={path} exec {python} -m dovetail.bench.scale.stub_slice "$@"'
    made.write_text(f"#!/bin/sh\n{words}\n")
    made.chmod(0o755)
    return made


def claims(found: Mapping[int, list[Steps]]) -> list[Claim]:
    """The figures of each size, then what a slice costs with the most of them."""
    made: list[Claim] = []
    most, fewer = max(found), min(found)

    def row(size: int, what: str, step: str = "", name: str = "") -> Row:
        """Of a step, or of all."""
        steps = (step,) if step else STEPS
        return Row(name, tuple(sum(one[s][what] for s in steps) for one in found[size]))

    for size in found:
        made += [Claim(row(size, "seconds", step, f"{size} slices, {step}"), "s") for step in STEPS]
        last = tuple(one["down"]["memory"] for one in found[size])
        made += [
            Claim(row(size, "messages", name=f"{size} slices, messages of the module"), ""),
            Claim(row(size, "cpu", name=f"{size} slices, CPU of the module"), "s"),
            Claim(Row(f"{size} slices, memory of the module", last), "B"),
        ]
    for what, name in (("seconds", "time"), ("messages", "messages"), ("cpu", "CPU of the module")):
        each = {size: Row("", tuple(v / size for v in row(size, what).values))
                for size in (most, fewer)}  # fmt: skip
        growth = ratios(each[most], each[fewer], f"{name} per slice, {most} / {fewer} slices")
        made.append(Claim(growth, "x", "<=", GROWTH))
    return made


def life(agent: Path, size: int) -> Steps:
    """One instance with so many brokers, and slices on all of them from up to down."""
    found: Steps = {}
    with instance(size) as flux, _client(flux) as client:
        counted: dict[str, float] = {}

        def step(name: str, topic: str, payload: Mapping[str, Any]) -> None:
            began = time.monotonic()
            next(client.answers(f"dovetail.{topic}", payload))
            seconds = time.monotonic() - began
            now = counters(flux)
            changed = {key: now[key] - counted.get(key, 0) for key in ("messages", "cpu")}
            found[name] = {"seconds": seconds, "memory": now["memory"], **changed}
            counted.update(now)

        flux.run(
            "module", "load", str(install_paths.flux_plugin("modules/dovetail.py")),
            f"nodes={size}", f"command={agent}", f"up-timeout={PATIENCE}",
            f"down-timeout={PATIENCE}",
        )  # fmt: skip
        try:
            for name, topic, payload in zip(
                STEPS, ("wait-up", "resize", "resize", "down"),
                ({}, {"nodes": size // 2}, {"nodes": size}, {}),
            ):  # fmt: skip
                step(name, topic, payload)
        finally:
            flux.run("module", "remove", "dovetail")
    return found


@contextlib.contextmanager
def _client(flux: Instance) -> Iterator[Client]:
    """A connection to the module, without the start of a program for each request."""
    before = {name: os.environ.get(name) for name in ("FLUX_URI", "PATH")}
    os.environ["FLUX_URI"] = flux.environment["FLUX_URI"]
    os.environ["PATH"] = f"{Path(flux.command).parent}:{os.environ['PATH']}"
    try:
        client = Client()
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    try:
        yield client
    finally:
        client.close()


def counters(flux: Flux) -> dict[str, float]:
    """Messages that the module got and sent, its CPU time in seconds, and its memory in bytes."""
    stats = json.loads(flux.run("module", "stats", "dovetail"))
    usage = json.loads(flux.run("module", "stats", "--rusage=self", "dovetail"))
    messages = sum(sum(stats[way].values()) for way in ("tx", "rx"))
    return {
        "messages": messages,
        "cpu": usage["utime"] + usage["stime"],
        "memory": usage["maxrss"] * 1024.0,
    }
