# SPDX-License-Identifier: LGPL-3.0-or-later
"""One simulation of many pods on two nodes: its resize as one transaction, and what it takes to
watch it.

Inputs: a cluster, how many pods. Outputs: `Claim`s. Ranks sleep, and publish an iteration twice a
second, so that pods cost the machine little. Invariant: a figure of a resize that restarted a
container, or was refused, is none: WorkFailed.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from dovetail.bench.harness import Claim, Progress, Row, plain_environment
from dovetail.core import protocol
from dovetail.core.errors import WorkFailed
from dovetail.executors.kubernetes import manifests
from dovetail.executors.kubernetes.executor import KubernetesExecutor
from dovetail.executors.kubernetes.manifests import path
from dovetail.executors.kubernetes.session import Session, connect
from dovetail.host import install_paths, processes

START = 600.0  # seconds for all pods to run, on a machine that is busy with other things
ITERATION = 500  # milliseconds
SETTLE, WINDOW = 20.0, 20.0  # seconds after the start that do not count, and of a look
CPU = (10, 20)  # millicores that ranks ask for in turn


def command() -> list[str]:
    """A rank that sleeps, iteration by iteration."""
    return [str(install_paths.bench("openmpi", "bench_pairs")), "hold", str(ITERATION)]


def resized(
    scratch: Path, kubeconfig: Path, count: int, repeat: int, progress: Progress
) -> list[Claim]:
    """Seconds from the wish to its fulfilment, when half of the pods grow and half shrink."""
    (scratch / "case").mkdir(parents=True)
    spec = protocol.Spec("many", "many", str(scratch / "case"), count, (1.0,) * count,
                     tuple(command()), ranks_per_pod=1)  # fmt: skip
    session = Session(connect(kubeconfig), scratch, [spec], False)
    executor = KubernetesExecutor(session, scratch)
    seen: list[protocol.Event] = []

    def until(kind: type[protocol.Event], limit: float) -> protocol.Event:
        """Observe until there is such an event."""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            executor.wait(1.0)
            new = executor.observe(time.monotonic())
            seen.extend(new)
            ended = next((event for event in new if isinstance(event, protocol.Finished)), None)
            if ended is not None:
                raise WorkFailed(f"the pods ended: {ended.reason}")
            found = next((event for event in new if isinstance(event, kind)), None)
            if found is not None:
                return found
        raise WorkFailed(f"no {kind.__name__} of {count} pods in {limit:.0f} s: {seen[-3:]}")

    def requests(turn: int) -> protocol.Share:
        return protocol.Share(tuple(CPU[(rank + turn) % 2] for rank in range(count)))

    try:
        progress(f"starting {count} pods on two nodes")
        executor.launch(spec, requests(0))
        until(protocol.Sampled, START)
        settled = time.monotonic() + SETTLE
        while time.monotonic() < settled:  # other ranks start still, on the cores of the servers
            executor.wait(1.0)
            executor.observe(time.monotonic())
        before, values = containers(session), []
        for turn in range(repeat):
            started = time.monotonic()
            executor.resize({spec.name: requests(turn + 1)})
            answer = until(protocol.Resized, 120.0)
            values.append(time.monotonic() - started)
            progress(f"round {turn + 1}/{repeat}  {count} pods resized: {values[-1]:.3g} s")
            if getattr(answer, "refused", ""):
                raise WorkFailed(f"a resize was refused: {answer}")
        if containers(session) != before:
            raise WorkFailed("a container was restarted by a resize")
    finally:
        executor.close()
    return [Claim(Row(f"{count} pods resized as one, two nodes", tuple(values)), "s", "<=", 2.0)]


def containers(session: Session) -> list[tuple[str, int]]:
    """The identity of every container of the run, and how often it was restarted."""
    label = f"{manifests.RUN}={session.run},{manifests.PART}={manifests.RANK_GROUP}"
    pods = session.api.get(path("Pod"), labelSelector=label)["items"]
    found = [one for pod in pods for one in pod["status"]["containerStatuses"]]
    return sorted((one["containerID"], one["restartCount"]) for one in found)


def watched(
    scratch: Path, kubeconfig: Path, count: int, repeat: int, progress: Progress
) -> list[Claim]:
    """The share of a core that `dovetail run` takes while all of a plan's pods run."""
    (scratch / "case").mkdir(parents=True)
    entry = {"name": "many", "case": str(scratch / "case"), "ranks": count, "ranks_per_pod": 1,
             "command": command()}  # fmt: skip
    plan, out = scratch / "plan.json", scratch / "out"
    plan.write_text(json.dumps({"simulations": [entry]}))
    words = [sys.executable, "-m", "dovetail", "run", "--kubeconfig", str(kubeconfig), "--json",
             "-o", str(out), str(plan)]  # fmt: skip
    with open(scratch / "errors", "wb") as errors:
        run = subprocess.Popen(words, env=plain_environment(), stdout=errors, stderr=errors)
    try:
        progress(f"starting {count} pods on two nodes, under the controller")
        log = out / "events.jsonl"
        _await(lambda: log.exists() and b'"Sampled"' in log.read_bytes(), run, scratch)
        values = []
        pause(run, SETTLE, scratch)
        for number in range(repeat):
            before, began = processes.cpu_seconds([run.pid]), time.monotonic()
            pause(run, WINDOW, scratch)
            share = (processes.cpu_seconds([run.pid]) - before) / (time.monotonic() - began)
            progress(f"round {number + 1}/{repeat}  watching {count} pods: {share:.3%} of a core")
            values.append(share)
    finally:
        run.send_signal(signal.SIGINT)
        run.wait()
    name = f"CPU of the controller, watching {count} pods"
    return [Claim(Row(name, tuple(values)), "of a core", "<=", 0.01)]


def _await(question: Callable[[], bool], run: subprocess.Popen[bytes], scratch: Path) -> None:
    end = time.monotonic() + START
    while not question():
        pause(run, 0.5, scratch)
        if time.monotonic() > end:
            raise WorkFailed(f"the pods did not run in {START:.0f} s")


def pause(run: subprocess.Popen[bytes], seconds: float, scratch: Path) -> None:
    """Let time pass; WorkFailed if the run ends meanwhile."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        run.wait(seconds)
        said = (scratch / "errors").read_text(errors="replace")[-2000:]
        raise WorkFailed(f"the run ended while it was watched: {said}")
