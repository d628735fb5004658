# SPDX-License-Identifier: LGPL-3.0-or-later
"""What was asked for: the value of --dovetail, the table in a configuration.

Input: `nodes=2,cores=all` from a command line, or the table `dovetail` of an instance's
configuration. Output: an `Asked`, checked. Invariant: a value that passes here can be met by
some allocation; whether by this one, `fits` says. Standard library only: it is read by the
submitting command and by the broker module.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dovetail.core.errors import BadInput
from dovetail.host import install_paths

KEYS = ("nodes", "cores")
MOST = 10000  # nodes or cores; more is a slip of the finger
EXECUTORS = ("kubernetes", "local")
ADDRESSES = ("auto", "loopback", "machine")
LIMITS = {"up-timeout": 120.0, "down-timeout": 30.0}
WHERE = "configuration: dovetail"
PRIVATE = ("FLUX_MODULE_URI", "FLUX_URI", "FLUX_JOB_", "FLUX_TASK_", "FLUX_KVS_NAMESPACE",
           "PMI_", "DOVETAIL_STATE")  # fmt: skip
TABLE = (*KEYS, "command", "executor", "address", *LIMITS)
FOLDERS = {  # of this package, that an instance needs on its paths
    "FLUX_MODPROBE_PATH_APPEND": "flux/plugins/modprobe",
    "FLUX_MODULE_PATH_PREPEND": "flux/plugins/modules",
}


@dataclass(frozen=True)
class Asked:
    """A user-space Kubernetes of `nodes` nodes, each a slice with `cores` cores (0: all of a node).

    `command` is the `flux dovetail` executable, `executor` where simulations run, `address` where
    Kubernetes listens (auto: on loopback if all brokers are on one machine), and the two limits
    are seconds: for the cluster to come up, and for its end to be confirmed.
    """

    nodes: int
    cores: int = 0
    command: str = "flux-dovetail"
    executor: str = "kubernetes"
    address: str = "auto"
    up_timeout: float = LIMITS["up-timeout"]
    down_timeout: float = LIMITS["down-timeout"]

    def plain(self) -> dict[str, Any]:
        """As the user wrote it: what goes into the jobspec and the configuration."""
        return {"nodes": self.nodes, "cores": self.cores or "all"}


def parse(text: str) -> Asked:
    """The value of --dovetail."""
    given: dict[str, Any] = {}
    for item in text.split(","):
        key, equals, value = item.partition("=")
        if not equals or key not in KEYS:
            raise BadInput(f"--dovetail={text}: {item!r} is not nodes=N or cores=N|all")
        if key in given:
            raise BadInput(f"--dovetail={text}: {key} is there twice")
        given[key] = int(value) if value.isascii() and value.isdigit() else value
    return from_table(given, f"--dovetail={text}")


def from_table(table: Mapping[str, Any], where: str = WHERE) -> Asked:
    """The table `dovetail` of a configuration."""
    for key in table:
        if key not in TABLE:
            near = "".join(f" ({name}?)" for name in difflib.get_close_matches(key, TABLE, 1))
            raise BadInput(f"{where}: there is no key {key}{near}; known are {', '.join(TABLE)}")
    if "nodes" not in table:
        raise BadInput(f"{where}: nodes=N is missing")
    cores = table.get("cores", "all")
    for key, words in (("executor", EXECUTORS), ("address", ADDRESSES)):
        if table.get(key, words[0]) not in words:
            raise BadInput(f"{where}: {key} is one of {', '.join(words)}, not {table[key]!r}")
    limits = [_seconds(table.get(key, default), key, where) for key, default in LIMITS.items()]
    return Asked(
        nodes=_whole(table["nodes"], "nodes", where),
        cores=0 if cores == "all" else _whole(cores, "cores", where, " or all"),
        command=str(table.get("command", Asked.command)),
        executor=table.get("executor", EXECUTORS[0]), address=table.get("address", ADDRESSES[0]),
        up_timeout=limits[0], down_timeout=limits[1],
    )  # fmt: skip


def check(table: object, where: str = WHERE) -> None:
    """Refuse a table that is wrong; one that has defaults alone, and no nodes, is right."""
    if not isinstance(table, Mapping):
        raise BadInput(f"{where} is a table with keys {', '.join(TABLE)}, not {table!r}")
    from_table({"nodes": 1, **table}, where)


def _whole(value: object, key: str, where: str, more: str = "") -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
        raise BadInput(f"{where}: {key} is a number from 1 to {MOST}{more}, not {value!r}")
    return value


def _seconds(value: object, key: str, where: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 86400:
        raise BadInput(f"{where}: {key} is a number of seconds up to 86400, not {value!r}")
    return float(value)


def fits(asked: Asked, nodes: int | None, where: str) -> None:
    """Refuse what an allocation of `nodes` nodes (None: not said) cannot hold."""
    if nodes is not None and not asked.cores and asked.nodes > nodes:
        raise BadInput(
            f"{where}: nodes={asked.nodes} with all cores of each does not fit into the "
            f"{nodes} nodes asked for; ask for more with -N, or for fewer cores with cores=N"
        )


def cut(asked: Asked, granted: object) -> Asked:
    """What a site left of a request: `attributes.user.dovetail` of its job; never more."""
    if not isinstance(granted, Mapping):
        return asked
    try:
        other = from_table({key: granted[key] for key in KEYS if key in granted})
    except BadInput:
        return asked  # a slice's, or of something else
    cores = min(filter(None, (asked.cores, other.cores)), default=0)
    return replace(asked, nodes=min(asked.nodes, other.nodes), cores=cores)


def plugins() -> list[str]:
    """The jobtap plugins of an instance with Kubernetes; of ours there is none without Lua."""
    found = ["alloc-bypass.so"]  # Flux's own: lets a simulation's job have its slice's cores
    for name in ("gate", "release"):
        with contextlib.suppress(BadInput):
            found.append(str(install_paths.jobtap(name)))
    return found


def jobspec(
    asked: Asked, number: int, cluster: str, environment: Mapping[str, str]
) -> dict[str, Any]:
    """The job of one slice; number 0 holds the control plane."""
    cores = {"type": "core", "count": asked.cores or 1}
    slot = {"type": "slot", "count": 1, "label": "slice", "with": [cores]}
    node: dict[str, Any] = {"type": "node", "count": 1, "with": [slot]}
    if not asked.cores:
        node["exclusive"] = True
    command = [asked.command, "slice", "--number", str(number), "--cluster", cluster]
    if asked.address == "machine":
        command.append("--machine-address")
    return {
        "version": 1,
        "resources": [node],
        "tasks": [{"command": command, "slot": "slice", "count": {"per_slot": 1}}],
        "attributes": {
            "system": {
                "duration": 0,
                "cwd": "/",
                "environment": dict(environment),
                "job": {"name": f"dovetail-{'node' if number else 'control'}"},
                "shell": {"options": {"cpu-affinity": "on"}},
            },
            "user": {"dovetail": {"slice": number, "cluster": cluster}},
        },
    }


def environment() -> dict[str, str]:
    """Ours, without what belongs to our own job, or to the job that the instance is."""
    return {name: value for name, value in os.environ.items() if not name.startswith(PRIVATE)}


def mirror_jobspec(command: str, launch: Mapping[str, Any]) -> dict[str, Any]:
    """The job that a simulation is for Flux, but for its cores, which a slice holds already."""
    run, name = launch["run"], launch["name"]
    slot = {"type": "slot", "count": 1, "label": "task", "with": [{"type": "core", "count": 1}]}
    words = [command, "simulation", "--launch", launch["launch"], "--name", name]
    return {
        "version": 1,
        "resources": [slot],
        "tasks": [{"command": words, "slot": "task", "count": {"per_slot": 1}}],
        "attributes": {
            "system": {
                "duration": 0,
                "cwd": "/",
                "environment": environment(),
                "job": {"name": name},
            },
            "user": {"dovetail": {"run": run, "simulation": name}},
        },
    }
