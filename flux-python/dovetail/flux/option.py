# SPDX-License-Identifier: LGPL-3.0-or-later
"""What --dovetail means, and the table `dovetail` of a configuration.

Input: `nodes=2,cores=all` from a command line, or the table of an instance's configuration.
Output: a `Request`, checked. Invariant: a value that passes here can be met by some allocation;
whether by this one, `check_fits` says. Pure: it is read by the submitting command and by the
broker module.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dovetail.core import units
from dovetail.core.errors import BadInput
from dovetail.flux.instance.slices import MOST

SIZE = ("nodes", "cores")
THEIRS = ("provider", "usernetes", "node-image")
KEYS = (*SIZE, "network", *THEIRS)
NETWORKS = ("host", "bridge")
PROVIDERS = ("dovetail", "usernetes")
EXECUTORS = ("kubernetes", "local")
ADDRESSES = ("auto", "loopback", "machine")
LIMITS = {"up-timeout": 120.0, "down-timeout": 30.0, "stop-before": 20.0}
WHERE = "configuration: dovetail"
LONG = 600.0  # seconds for a node of upstream Usernetes, which kubeadm sets up
NODES_OF_USERNETES = {"cores": ("all",), "executor": ("local",), "address": ("machine", "auto"),
                      "devices": ("auto",), "network": ("host",)}  # fmt: skip
TABLE = (*KEYS, "command", "cache", "executor", "address", "devices", *LIMITS)


@dataclass(frozen=True)
class Request:
    """A user-space Kubernetes of `nodes` nodes, each a slice with `cores` cores (0: all of a node).

    `command` is the `flux dovetail` executable, `cache` where Kubernetes was built (empty: where
    the instance's environment says), `executor` where simulations run, `address` where
    Kubernetes listens (auto: on loopback if all brokers are on one machine), `devices` what its
    nodes offer, in the words of `dovetail kube up --devices`, and the limits are
    seconds: for the cluster to come up, for its end to be confirmed, and before the end of the
    job's time for a run to end. `network` is what its pods may have, their nodes' alone (host), or
    addresses of their own (bridge). `provider` makes the nodes (empty: Dovetail does); `usernetes`
    is an upstream checkout for the other one, and `node_image` the image of its nodes.
    """

    nodes: int
    cores: int = 0
    command: str = "flux-dovetail"
    cache: str = ""
    executor: str = "kubernetes"
    address: str = "auto"
    devices: str = "auto"
    up_timeout: float = LIMITS["up-timeout"]
    down_timeout: float = LIMITS["down-timeout"]
    stop_before: float = LIMITS["stop-before"]
    network: str = "host"
    provider: str = ""
    usernetes: str = ""
    node_image: str = ""

    @property
    def upstream(self) -> bool:
        """Whether nodes are upstream Usernetes's."""
        return self.provider == "usernetes"

    def plain(self) -> dict[str, Any]:
        """As the user wrote it: what goes into the jobspec and the configuration."""
        theirs = (self.provider, self.usernetes, self.node_image)
        said = {key: value for key, value in zip(THEIRS, theirs) if value}
        if self.network != Request.network:
            said["network"] = self.network
        return {"nodes": self.nodes, "cores": self.cores or "all", **said}


def parse(text: str, known: Mapping[str, Any] | None = None) -> Request:
    """The value of --dovetail; `known` is a table with defaults, which are right by themselves."""
    given: dict[str, Any] = {}
    for item in text.split(","):
        key, equals, value = item.partition("=")
        if not equals or key not in KEYS:
            raise BadInput(
                f"--dovetail={text}: {item!r} is not nodes=N, cores=N|all, network=bridge, "
                "provider=usernetes, usernetes=DIR or node-image=IMAGE"
            )
        if key in given:
            raise BadInput(f"--dovetail={text}: {key} is there twice")
        given[key] = int(value) if key in SIZE and value.isascii() and value.isdigit() else value
    usual = {key: value for key, value in (known or {}).items() if key in ("network", *THEIRS)}
    whole = {**usual, **given}
    for key in THEIRS[1:]:
        if key in given and whole.get("provider") != "usernetes":
            raise BadInput(f"--dovetail={text}: {key} is for provider=usernetes alone")
    return from_table(whole, f"--dovetail={text}")


def from_table(table: Mapping[str, Any], where: str = WHERE) -> Request:
    """The table `dovetail` of a configuration."""
    for key in table:
        if key not in TABLE:
            near = "".join(f" ({name}?)" for name in difflib.get_close_matches(key, TABLE, 1))
            raise BadInput(f"{where}: there is no key {key}{near}; known are {', '.join(TABLE)}")
    if "nodes" not in table:
        raise BadInput(f"{where}: nodes=N is missing")
    cores = table.get("cores", "all")
    known = {"executor": EXECUTORS, "address": ADDRESSES, "network": NETWORKS,
             "provider": PROVIDERS}  # fmt: skip
    for key, words in known.items():
        if table.get(key, words[0]) not in words:
            raise BadInput(f"{where}: {key} is one of {', '.join(words)}, not {table[key]!r}")
    for key in (*THEIRS[1:], "command", "cache"):
        if not isinstance(table.get(key, ""), str):
            raise BadInput(f"{where}: {key} is a text, not {table[key]!r}")
    upstream = table.get("provider") == "usernetes"
    usual = {**LIMITS, "up-timeout": LONG} if upstream else LIMITS
    if not isinstance(table.get("devices", ""), str):
        raise BadInput(f'{where}: devices is a text such as "gpu,/dev/fuse=8", not a list')
    limits = [_seconds(table.get(key, default), key, where) for key, default in usual.items()]
    return Request(
        nodes=_whole(table["nodes"], "nodes", where),
        cores=0 if cores == "all" else _whole(cores, "cores", where, " or all"),
        command=table.get("command", Request.command), cache=table.get("cache", ""),
        executor=table.get("executor", EXECUTORS[upstream]),
        address=table.get("address", ADDRESSES[0]),
        devices=table.get("devices", Request.devices),
        up_timeout=limits[0], down_timeout=limits[1], stop_before=limits[2],
        network=table.get("network", Request.network),
        provider=table.get("provider", ""), usernetes=table.get("usernetes", ""),
        node_image=table.get("node-image", ""),
    )  # fmt: skip


def check(table: object, where: str = WHERE) -> None:
    """Refuse a table that is wrong; one that has defaults alone, and no nodes, is right."""
    if not isinstance(table, Mapping):
        raise BadInput(f"{where} is a table with keys {', '.join(TABLE)}, not {table!r}")
    from_table({"nodes": 1, **table}, where)


def check_instance(table: object) -> None:
    """Refuse the table of an instance, which starts what it asks for, if it asks for nodes."""
    check(table)
    if isinstance(table, Mapping) and "nodes" in table:
        check_provider(table)


def _whole(value: object, key: str, where: str, more: str = "") -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
        raise BadInput(f"{where}: {key} is a number from 1 to {MOST}{more}, not {value!r}")
    return value


def _seconds(value: object, key: str, where: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 86400:
        raise BadInput(f"{where}: {key} is a number of seconds up to 86400, not {value!r}")
    return float(value)


def check_provider(table: Mapping[str, Any], where: str = WHERE) -> None:
    """Refuse what the provider of a whole table, a request with its defaults, cannot do."""
    request = from_table(table, where)
    if not request.upstream:
        return
    if not request.usernetes:
        raise BadInput(
            f"{where}: provider=usernetes needs usernetes=DIR, an upstream checkout on all nodes"
        )
    for key, possible in NODES_OF_USERNETES.items():
        if table.get(key, possible[0]) not in possible:
            raise BadInput(
                f"{where}: {key}={table[key]} is not for provider=usernetes, whose nodes are "
                f"containers on whole machines; {key}={possible[0]} would be right"
            )


def check_fits(request: Request, nodes: int | None, where: str) -> None:
    """Refuse what an allocation of `nodes` nodes (None: not said) cannot hold."""
    if nodes is not None and not request.cores and request.nodes > nodes:
        raise BadInput(
            f"{where}: nodes={request.nodes} with all cores of each does not fit into the "
            f"{units.counted(nodes, 'node')} asked for; ask for more with -N, or for fewer cores "
            "with cores=N"
        )


def check_cores(request: Request, largest: int, where: str) -> None:
    """Refuse more cores than the `largest` node has; slices with that many would wait for ever."""
    if request.cores > largest:
        raise BadInput(f"{where}: cores={request.cores}, and no node here has more than {largest}")


def room_on(request: Request, nodes: Collection[int]) -> int:
    """How many slices fit on nodes of so many cores."""
    return sum(cores // request.cores if request.cores else 1 for cores in nodes)


def check_room(request: Request, nodes: Collection[int], where: str = WHERE) -> None:
    """Refuse more slices than there is room for on the `nodes` of an instance, of so many cores."""
    room = room_on(request, nodes)
    if nodes and not room:
        check_cores(request, max(nodes), where)
    if nodes and request.nodes > room:
        raise BadInput(
            f"{where}: nodes={request.nodes} with cores={request.cores or 'all'} does not fit into "
            f"this instance; nodes={room} would"
        )


def granted(request: Request, asked: object, grant: object) -> Request:
    """What a site left of a request: at most its `grant`, if that is not what was `asked` for.

    Both are `attributes.user.dovetail` of the job; the request may be a later one, made by hand.
    Raises BadInput.
    """
    if not isinstance(grant, Mapping) or grant == asked:
        return request
    try:
        other = from_table({key: grant[key] for key in SIZE if key in grant})
    except BadInput:
        return request  # a slice's, or of something else
    cores = min(filter(None, (request.cores, other.cores)), default=0)
    if cores and request.upstream:
        raise BadInput(f"the site grants {cores} cores of a node; provider=usernetes needs all")
    return replace(request, nodes=min(request.nodes, other.nodes), cores=cores)
