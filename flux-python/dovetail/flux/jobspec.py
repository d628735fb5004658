# SPDX-License-Identifier: LGPL-3.0-or-later
"""The jobs that Dovetail submits to its instance: slices, and proxy jobs of simulations.

Inputs: what was requested, and what the job is for. Outputs: jobspecs, version 1, as JSON values.
Invariants: no job of ours inherits what belongs to the job, or the module, that submits it; names
differ in their first letters, since `flux jobs` shows ten. They have the time of their instance;
where its configuration has a default for jobs that ask for none, an update takes that off again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from dovetail.flux.option import Request
from dovetail.host import install_paths

PRIVATE = ("FLUX_MODULE_URI", "FLUX_URI", "FLUX_JOB_", "FLUX_TASK_", "FLUX_KVS_NAMESPACE",
           "PMI_", "DOVETAIL_STATE")  # fmt: skip
PROXY_JOB = install_paths.PACKAGES / "dovetail" / "flux" / "proxy_job.py"
SLICE_NAME = re.compile(r"kube-[0-9]+")


def slice_job(
    request: Request,
    number: int,
    cluster: str,
    environment: Mapping[str, str],
    *,
    near: bool = False,
) -> dict[str, Any]:
    """The job of one slice; number 0 holds the control plane, and runs plans.

    With `near` it is for the broker of rank 0 alone: there the user's script is, and what it names.
    """
    cores = {"type": "core", "count": request.cores or 1}
    slot = {"type": "slot", "count": 1, "label": "slice", "with": [cores]}
    node: dict[str, Any] = {"type": "node", "count": 1, "with": [slot]}
    if not request.cores:
        node["exclusive"] = True
    command = [request.command, "slice", "--number", str(number), "--cluster", cluster]
    command += ["--timeout", f"{request.up_timeout:g}"]
    if number == 0:
        command += ["--stop-before", f"{request.stop_before:g}"]
    if request.address == "machine":
        command.append("--machine-address")
    if request.devices != Request.devices:
        command += ["--devices", request.devices]
    if request.network != Request.network:
        command += ["--network", request.network]
    if request.upstream:
        command += ["--usernetes", request.usernetes]
        command += ["--node-image", request.node_image] if request.node_image else []
    return {
        "version": 1,
        "resources": [node],
        "tasks": [{"command": command, "slot": "slice", "count": {"per_slot": 1}}],
        "attributes": {
            "system": {
                "duration": 0,
                "cwd": "/",
                "environment": dict(environment),
                "job": {"name": f"kube-{number}"},
                "shell": {"options": {"cpu-affinity": "on"}},
                **({"constraints": {"ranks": ["0"]}} if near else {}),
            },
            "user": {"dovetail": {"slice": number, "cluster": cluster}},
        },
    }


def has_default_duration(configuration: Mapping[str, Any]) -> bool:
    """Whether Flux limits the time of jobs which ask for none, in a queue or in all."""
    for place in (configuration, *configuration.get("queues", {}).values()):
        found: Any = place
        for key in ("policy", "jobspec", "defaults", "system", "duration"):
            found = found.get(key) if isinstance(found, Mapping) else None
        if found:
            return True
    return False


def without_limit(job: int) -> dict[str, Any]:
    """The update of a job that takes a limit off its time: it has then as long as its instance."""
    return {"id": job, "updates": {"attributes.system.duration": 0.0}}


def slice_number(spec: Mapping[str, Any], cluster: str) -> int | None:
    """Which slice of a cluster a job is; None if it is none, such as a job of the user's."""
    ours = spec["attributes"].get("user", {}).get("dovetail")
    if not isinstance(ours, Mapping) or ours.get("cluster") != cluster:
        return None
    return int(ours["slice"])


def environment() -> dict[str, str]:
    """Our environment, without what belongs to our own job, or to the job that the instance is."""
    return {name: value for name, value in os.environ.items() if not name.startswith(PRIVATE)}


def proxy_name(run: int, simulation: str) -> str:
    """What tells a simulation's job apart comes first: `2.11:sim` is `sim-11` of run 2."""
    entry, dash, index = simulation.rpartition("-")
    if dash and re.fullmatch("[1-9][0-9]*", index):
        return f"{run}.{index}:{entry}"
    return f"{run}:{simulation}"


def proxy_job(launch: Mapping[str, Any]) -> dict[str, Any]:
    """The job that a simulation is for Flux, but for its cores, which slices hold already.

    It has a task on each broker of theirs, since Flux's shell wants one there.
    """
    run, name = launch["run"], launch["name"]
    slot = {"type": "slot", "count": 1, "label": "task", "with": [{"type": "core", "count": 1}]}
    node = {"type": "node", "count": 1, "with": [slot]}
    words = ["flux", "python", str(PROXY_JOB), launch["launch"], name]
    return {
        "version": 1,
        "resources": [node],
        "tasks": [{"command": words, "slot": "task", "count": {"per_slot": 1}}],
        "attributes": {
            "system": {
                "duration": 0,
                "cwd": "/",
                "environment": environment(),
                "job": {"name": proxy_name(run, name)},
            },
            "user": {"dovetail": {"run": run, "simulation": name}},
        },
    }
