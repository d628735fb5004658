# SPDX-License-Identifier: LGPL-3.0-or-later
"""A cluster for as long as a demo takes, and what it costs against processes (steps 3 and 8).

Inputs: how many cores. Outputs: a kubeconfig; `kubernetes.json` with both makespans. Invariant: the
cluster ends with this process, however that ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from dovetail import summary
from dovetail.bench.figures import Progress
from dovetail.usernetes import cluster

FILE = "kubernetes.json"
BOUND = 1.05
"""How many times as long as with processes a plan may take as pods."""


@contextlib.contextmanager
def started(cores: int, progress: Progress) -> Iterator[Path]:
    """A cluster of one node; gives its kubeconfig."""
    name = f"demo-{os.getpid()}"
    who = "root" if os.getuid() == 0 else "an ordinary user"
    progress(f"starting a Kubernetes cluster of its own as {who}, on {cores} cores")
    words = argparse.Namespace(
        name=name, cpus=str(cores), memory="", network="host", address="", node="",
        owner=os.getpid(), timeout=120.0,
    )  # fmt: skip
    made = cluster.up(words, progress)
    try:
        yield Path(made["kubeconfig"])
    finally:
        progress("taking the cluster down")
        cluster.down(name)


def compare(pods: Path, processes: Path, progress: Progress) -> None:
    """Write and tell how long the same plan took as pods and as processes."""
    times = [summary.load(folder)[0].totals.makespan_s.value for folder in (pods, processes)]
    as_pods, as_processes = times
    ratio = as_pods / as_processes if as_pods and as_processes else None
    found = {"pods_s": as_pods, "processes_s": as_processes, "ratio": ratio, "bound": BOUND,
             "user": "root" if os.getuid() == 0 else "ordinary"}  # fmt: skip
    (pods / FILE).write_text(json.dumps(found, indent=1) + "\n")
    if ratio is None:
        progress("no comparison with the local executor: a simulation is not done")
    else:
        verdict = "kept" if ratio <= BOUND else "missed"
        progress(
            f"as pods the plan took {as_pods:.1f} s, as processes {as_processes:.1f} s: "
            f"{ratio:.2f} times, the aim of at most {BOUND:g} is {verdict}"
        )
