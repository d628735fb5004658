# SPDX-License-Identifier: LGPL-3.0-or-later
"""What each rank group shall have of its node's CPU, and what the kernel gives it.

Inputs: simulations with their pods, weights on disk as agents report them. Output: `status.json`
in the run's directory, replaced as a whole, which `dovetail status` shows.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dovetail.core import cgroup_weights
from dovetail.executors.kubernetes import pod_status
from dovetail.executors.kubernetes.lifecycle import Launched
from dovetail.host.private_files import write_whole

FILE = "status.json"
TOGETHER = 0.1
"""Seconds from the first answer of a node until what all said is taken in."""
PERIOD = 5.0
"""Seconds between two looks at the weights on disk; a resize is looked at at once."""


class Report:
    """Keeps the weights, and the file up to date. `formula` is the one in use, "" if unknown."""

    def __init__(self, directory: Path, run: str) -> None:
        self._path = directory / FILE
        self._run = run
        self._values: dict[str, Mapping[str, str]] = {}
        self._due = 0.0
        self._heard_at = 0.0  # the first of answers that are not written yet
        self._written: list[dict[str, Any]] = []
        self.formula = ""
        self._write([])

    def soon(self, now: float) -> None:
        """A request has changed: the kernel will know in a moment."""
        self._due = min(self._due, now + 0.2)

    def due(self, now: float) -> bool:
        """Whether it is time to ask the agents."""
        if now < self._due:
            return False
        self._due = now + PERIOD
        return True

    def heard(self, values: Mapping[str, Mapping[str, str]]) -> None:
        """An agent's answer: the weight files of pods, by pod uid."""
        self._values.update(values)
        self._heard_at = self._heard_at or time.monotonic()

    def look(self, now: float, jobs: Iterable[Launched]) -> bool:
        """Take in what was heard, once the answers of all nodes may be there; whether it was."""
        if not self._heard_at or now < self._heard_at + TOGETHER:
            return False
        self._heard_at = 0.0
        rows = self.rows(jobs)
        known = [(row["cpu"], row["file"], row["value"]) for row in rows if row["file"]]
        self.formula = cgroup_weights.formula_of(known) or self.formula
        if rows != self._written:
            self._written = rows
            self._write(rows)
        return True

    def rows(self, jobs: Iterable[Launched]) -> list[dict[str, Any]]:
        """One row per rank group that has a pod on a node; shares are parts of one."""
        rows: list[dict[str, Any]] = []
        shares: list[int] = []  # what a pod asks for may be corrected for the formula already
        for job in jobs:
            first = 0
            for group, (size, cpu) in enumerate(zip(job.sizes, job.cpu)):
                pod = job.pods.get(group)
                if pod is not None and pod_status.node_of(pod) and not pod_status.over(pod):
                    rows.append(
                        {
                            "simulation": job.spec.name,
                            "ranks": [first, first + size - 1],
                            "node": pod_status.node_of(pod),
                            "pod": pod["metadata"]["name"],
                            "cpu": cpu,
                            **self._on_disk(pod["metadata"]["uid"]),
                        }
                    )
                    shares.append(sum(job.share.requests[first : first + size]))
                first += size
        on: dict[str, int] = {}
        values: dict[str, list[int]] = {}
        for row, share in zip(rows, shares):
            on[row["node"]] = on.get(row["node"], 0) + share
            values.setdefault(row["node"], []).append(row["value"] or 0)
        whole = {node: sum(each) if all(each) else 0 for node, each in values.items()}
        for row, share in zip(rows, shares):
            row["wanted"] = share / on[row["node"]]
            row["real"] = row["value"] / whole[row["node"]] if whole[row["node"]] else None
        return rows

    def _on_disk(self, uid: str) -> dict[str, Any]:
        for file in cgroup_weights.FILES:
            with contextlib.suppress(ValueError, KeyError):
                return {"file": file, "value": int(self._values[uid][file])}
        return {"file": "", "value": None}

    def _write(self, rows: list[dict[str, Any]]) -> None:
        content = {"schema": 1, "run": self._run, "written": time.time(), "formula": self.formula,
                   "groups": rows}  # fmt: skip
        with contextlib.suppress(OSError):  # as on a full disk: it is only there to be looked at
            write_whole(self._path, json.dumps(content, indent=1) + "\n")
