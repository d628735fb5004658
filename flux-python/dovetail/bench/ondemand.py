# SPDX-License-Identifier: LGPL-3.0-or-later
"""Clusters for as long as a comparison takes, and what one costs against processes.

Inputs: how many cores. Outputs: a kubeconfig; `kubernetes.json` with both makespans. Invariant: the
cluster ends with this process, however that ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from usernetes_setup import cluster

from dovetail.bench.harness import Progress
from dovetail.report import summary

FILE = "kubernetes.json"
BOUND = 1.05
"""How many times as long as with processes a plan may take as pods."""


def name_of(purpose: str, network: str, nodes: int) -> str:
    """What a cluster of this process is called: at most 20 letters, of which its pid may take 7."""
    return f"{purpose}-{os.getpid()}-{network[0]}{nodes}"


@contextlib.contextmanager
def started(
    cores: int, progress: Progress, network: str = "host", nodes: int = 1, purpose: str = "demo"
) -> Iterator[Path]:
    """A cluster of nodes with so many cores each; gives its kubeconfig.

    Of several at once each has another purpose, network or number of nodes.
    """
    name = name_of(purpose, network, nodes)
    who = "root" if os.getuid() == 0 else "an ordinary user"
    progress(f"starting a Kubernetes cluster of its own as {who}, on {nodes * cores} cores")
    usual: dict[str, Any] = {"name": name, "cpus": str(cores), "memory": "", "address": "",
             "node": "", "owner": os.getpid(), "timeout": 120.0, "devices": "none"}  # fmt: skip
    try:
        made = cluster.up(argparse.Namespace(network=network, **usual), progress)
        with tempfile.TemporaryDirectory(prefix="dovetail-bench-") as folder:
            invitation = f"{folder}/join.json"
            for _ in range(nodes - 1):
                asked = argparse.Namespace(name=name, invite=invitation, node="", valid=600)
                cluster.invite(asked)
                cluster.join(argparse.Namespace(file=invitation, **usual), progress)
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
