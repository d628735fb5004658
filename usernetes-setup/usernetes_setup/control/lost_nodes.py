# SPDX-License-Identifier: LGPL-3.0-or-later
"""Node lifecycle: a node that has been silent for long is removed, and is back once it answers.

Input: the nodes' own conditions, and kubelets that answer. Output: lost nodes deleted, so that
their pods count as lost and another node may take the name; those that were only cut off, or
stopped, made again: a kubelet that runs goes on with its node then, and never makes one anew.
Invariants: the control node's own is never removed; what was removed is known to the next process
of this one's kind too, which a failure of the API server may make necessary.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dovetail.host.private_files import write_private

from usernetes_setup.control import api_client
from usernetes_setup.control.api_client import NODES, Object

LOST_AFTER = 10.0  # seconds that the controller manager has called a node unknown
LOOK_EVERY = 2.0
ANSWER = 2.0  # seconds for a kubelet to answer
AT_ONCE = 32
"""Kubelets that are asked at a time: one that is switched off takes all of these seconds."""


def run(
    client: api_client.Client, own: str, pki: Path, kept: Path, wait: Callable[[float], object]
) -> None:
    """Remove nodes that have been silent for long, and make them again, for ever.

    Those that are to be made again are kept in a file.
    """
    since: dict[str, float] = {}
    removed: dict[str, Object] = {}
    with contextlib.suppress(OSError, ValueError):
        removed = json.loads(kept.read_text())
    while True:
        try:
            since = look(client, own, pki, since, removed, kept)
        except (OSError, http.client.HTTPException, api_client.Refused) as error:
            print(f"node lifecycle: {error}", flush=True)  # what was removed must not be forgotten
        wait(LOOK_EVERY)


def look(
    client: api_client.Client,
    own: str,
    pki: Path,
    before: Mapping[str, float],
    removed: dict[str, Object],
    kept: Path,
) -> dict[str, float]:
    """Look at all nodes once; returns since when those that are silent have been so.

    `before` is what the last look returned; `removed` has the nodes to be made again, by name, and
    so has the file `kept`.
    Raises as `client` does, after which it may be called again.
    """
    now = time.monotonic()
    nodes = {node["metadata"]["name"]: node for node in client.call("GET", NODES)["items"]}
    silent = {
        name for name, node in nodes.items() if api_client.condition(node, "Ready") == "Unknown"
    }
    since = {name: before.get(name, now) for name in silent}
    if there := removed.keys() & nodes.keys():
        for name in there:
            del removed[name]  # another node has it
        _keep(kept, removed)
    for name in answering(removed, pki):
        print(f"node {name} is back", flush=True)
        with contextlib.suppress(api_client.Refused):  # it is there already, or will be asked
            client.call("POST", NODES, anew(removed[name]))  # again
    for name, first in since.items():
        if now - first > LOST_AFTER and name != own:
            print(f"node {name} is lost and removed", flush=True)
            removed[name] = nodes[name]  # first: it may be so though no answer comes
            _keep(kept, removed)
            client.call("DELETE", f"{NODES}/{name}")
    return since


def _keep(kept: Path, removed: Mapping[str, Object]) -> None:
    with contextlib.suppress(OSError):  # on a full disk this process alone knows
        write_private(kept, json.dumps(removed))


def answering(nodes: Mapping[str, Object], pki: Path) -> list[str]:
    """Names of the nodes whose kubelet answers."""
    if not nodes:
        return []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answered = pool.map(lambda node: answers(node, pki), nodes.values())
        return [name for name, well in zip(nodes, answered) if well]


def answers(node: Object, pki: Path) -> bool:
    """Whether a node's kubelet does, which has a certificate for its address."""
    with contextlib.suppress(OSError, http.client.HTTPException, api_client.Refused, KeyError):
        return bool(api_client.kubelet(node, pki).call("GET", "/healthz", timeout=ANSWER))
    return False


def anew(node: Object) -> Object:
    """A node as it was, without what its kubelet and the API say of it."""
    kept = ("name", "labels", "annotations")
    return {"metadata": {key: node["metadata"].get(key) for key in kept}, "spec": {}}
