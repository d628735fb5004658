# SPDX-License-Identifier: LGPL-3.0-or-later
"""What `flux dovetail` prints, from the module's answers. Pure."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from typing import Any

from dovetail.core.units import counted

JOB = ("FLUX_", "PMI_", "DOVETAIL_STATE", "OMPI_MCA_btl_vader_backing_directory")
"""What Flux, and we, give a job, or a rank of it: some is a file that ends with the job."""


def user_environment(whole: Mapping[str, str]) -> dict[str, str]:
    """What of a script's environment its simulations shall have: not what belongs to its job."""
    return {name: value for name, value in whole.items() if not name.startswith(JOB)}


def is_text(text: str) -> bool:
    """Whether it can be sent; what the system names need not be UTF-8."""
    return text == text.encode(errors="replace").decode()


def up(found: Mapping[str, Any]) -> str:
    """What there is of Kubernetes, to whoever waited for it."""
    if "wanted" in found:
        return f"Kubernetes is degraded: {found['nodes']} of {counted(found['wanted'], 'node')}"
    return f"Kubernetes is up: {counted(found['nodes'], 'node')}"


def status(found: Mapping[str, Any]) -> str:
    """Phase, slices and runs."""
    reason = f": {found['reason']}" if found["reason"] else ""
    if found["phase"] == "degraded":
        reason = f": {found['ready']} of {counted(found['wanted'], 'node')}"
    lines = [f"Kubernetes is {found['phase']}{reason}"]
    lines += [f"lost: {line}" for line in found["lost"]]
    if found["slices"]:
        lines.append(
            f"{'SLICE':<6} {'ROLE':<8} {'STATE':<10} {'NODE':<16} {'CORES':<8} {'RANK':<5} HOST"
        )
    for one in found["slices"]:
        why = f"  {one['reason']}" if one["reason"] else ""
        rank = one["rank"] if one["rank"] >= 0 else "-"  # no agent came from there yet
        lines.append(f"{one['number']:<6} {one['role']:<8} {one['state']:<10} {one['node']:<16} "
                     f"{one['cpus']:<8} {rank:<5} {one['host']}{why}")  # fmt: skip
    if found["runs"]:
        lines.append(runs(found["runs"]))
    return "\n".join(lines)


def runs(found: Iterable[Mapping[str, Any]]) -> str:
    """A line for each run."""
    lines = [f"{'RUN':<6} {'STATE':<10} {'CODE':>4}  PLAN, OUTPUT"]
    for run in found:
        code = "-" if run["code"] < 0 else str(run["code"])
        why = f"  ({run['reason']})" if run["reason"] else ""
        line = f"{run['number']:<6} {run['state']:<10} {code:>4}  {run['plan']}, {run['output']}"
        lines.append(line + why)
    return "\n".join(lines)


def output(eventlog: str) -> str:
    """What a job printed, from its output's event log: a JSON object a line."""
    found = []
    for line in eventlog.splitlines():
        context = json.loads(line).get("context", {})
        if "data" in context:
            data = context["data"]
            base64_ = context.get("encoding") == "base64"
            found.append(base64.b64decode(data).decode(errors="replace") if base64_ else data)
    return "".join(found).rstrip("\n")


def reports(found: Iterable[Mapping[str, Any]]) -> str:
    """What each run gained, as its summary has it."""
    lines = []
    for run in found:
        summary = run["summary"]
        done = sum(one["state"] == "done" for one in summary["simulations"])
        whole = f"{done} of {len(summary['simulations'])} simulations done"
        why = f", {summary['interrupted']}" if summary["interrupted"] else ""
        lines.append(f"run {run['number']}: {whole}{why}; {run['output']}/report.html")
    return "\n".join(lines)
