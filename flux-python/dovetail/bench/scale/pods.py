# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the executor for Kubernetes costs against the number of pods.

Inputs: the build of Kubernetes, the number of rounds. Outputs: `Claim`s; of each size seconds from
the launch to samples of all ranks, CPU time and memory of the executor while it follows them,
seconds of a resize of all pods as one, and of their end.

Each round of a size has an API server and a store of its own (`api_server`), pods that are nowhere
(`no_nodes`), and the executor in a process of its own (`controller`), all of which end with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.bench.harness import Claim, Progress, Row, ratios
from dovetail.bench.scale import api_server
from dovetail.bench.scale.controller import memory
from dovetail.bench.scale.no_nodes import PODS, NoNodes
from dovetail.core.errors import WorkFailed
from dovetail.host import processes
from dovetail.host.install_paths import package_environment

SIZES = ((1, 64), (10, 100), (100, 100))
"""Simulations, and pods of each."""
FEW, GROWTH = 64, 1.5
"""What each pod of the most may cost, in proportion to each of a tenth of them."""
ROUNDS, LOOK = 1, 10
"""Resizes in each round, and seconds for which pods are watched."""
WATCHED = 0.01
"""The aim for what watching 64 pods takes of a core."""
Steps = dict[str, dict[str, Any]]


def pods(scratch: Path, repeat: int, progress: Progress) -> list[Claim]:
    """Every size in each round."""
    found: dict[int, list[Steps]] = {count * size: [] for count, size in SIZES}
    for number in range(repeat):
        for count, size in SIZES:
            folder = scratch / f"{number}.{count * size}"
            folder.mkdir()
            steps = life(folder, count, size, progress)
            found[count * size].append(steps)
            said = ", ".join(f"{name} {one['seconds']:.3g} s" for name, one in steps.items())
            progress(f"round {number + 1}/{repeat}  {count * size:,} pods: {said}")
    return claims(found)


def claims(found: Mapping[int, Sequence[Steps]]) -> list[Claim]:
    """The figures of each size, then what a pod costs with the most of them."""
    made: list[Claim] = []
    most, fewer = sorted(found)[-1], sorted(found)[-2]

    def row(size: int, step: str, what: str, name: str = "") -> Row:
        return Row(name, tuple(float(one[step][what]) for one in found[size]))

    for size in found:
        made += [
            Claim(row(size, "up", "seconds", f"{size:,} pods, launch to all samples"), "s"),
            Claim(
                row(size, "watched", "share", f"{size:,} pods, CPU while watched"),
                "of a core",
                *(("<=", WATCHED) if size == FEW else ()),
            ),
            Claim(row(size, "resized", "seconds", f"{size:,} pods resized as one"), "s"),
            Claim(row(size, "resized", "cpu", f"{size:,} pods resized as one, CPU"), "s"),
            Claim(row(size, "down", "seconds", f"{size:,} pods, to their end"), "s"),
            Claim(row(size, "watched", "memory", f"{size:,} pods, memory of the executor"), "B"),
            Claim(row(size, "watched", "server", f"{size:,} pods, memory of the API server"), "B"),
            Claim(row(size, "up", "requests", f"{size:,} pods, requests of a launch"), ""),
        ]
    for step, what, name in (
        ("up", "cpu", "CPU of a launch"), ("up", "requests", "requests of a launch"),
        ("watched", "share", "CPU while watched"), ("resized", "cpu", "CPU of a resize"),
        ("resized", "requests", "requests of a resize"), ("down", "cpu", "CPU of an end"),
    ):  # fmt: skip
        each = {size: Row("", tuple(v / size for v in row(size, step, what).values))
                for size in (most, fewer)}  # fmt: skip
        growth = ratios(each[most], each[fewer], f"{name} per pod, {most:,} / {fewer:,} pods")
        made.append(Claim(growth, "x", "<=", GROWTH))
    return made


def life(folder: Path, count: int, size: int, progress: Progress, look: int = LOOK) -> Steps:
    """One run with so many simulations of so many pods, from its API server's start to its end."""
    with contextlib.ExitStack() as undo:
        server = undo.enter_context(api_server.alone(folder / "s", progress))
        nodes = NoNodes(server, -(-count * size // PODS) + 1)
        undo.callback(nodes.close)
        (folder / "run").mkdir()
        told, telling = os.pipe()
        lines = undo.enter_context(os.fdopen(told))
        words = [sys.executable, "-m", "dovetail.bench.scale.controller", str(server.kubeconfig),
                 str(folder / "run"), *map(str, (count, size, ROUNDS, look))]  # fmt: skip
        with open(folder / "errors", "wb") as errors:
            pid = processes.start_child(
                words, "/", package_environment(), {1: telling, 2: errors.fileno()}
            )
        os.close(telling)
        undo.callback(_end, pid)
        found: dict[str, list[dict[str, Any]]] = {}
        for line in lines:
            step = json.loads(line)
            step["server"] = memory(server.pids[1])
            found.setdefault(step.pop("step"), []).append(step)
            progress(f"  {count * size:,} pods: {line.strip()}")
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) or nodes.failed:
            said = (folder / "errors").read_text(errors="replace").strip()[-2000:]
            raise WorkFailed(f"{count * size} pods: {nodes.failed} {said}".strip())
    steps = {name: {key: sum(one[key] for one in several) / len(several) for key in several[0]}
             for name, several in found.items()}  # fmt: skip
    steps["watched"]["share"] = steps["watched"]["cpu"] / steps["watched"]["seconds"]
    return steps


def _end(pid: int) -> None:
    """End the executor if it is still there."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
