# SPDX-License-Identifier: LGPL-3.0-or-later
"""Node lifecycle: a node that has been silent for long is removed from the cluster.

Input: the nodes' own conditions. Output: lost nodes deleted, so that their pods count as lost and
another node may take the name. Invariant: the control node's own is never removed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from usernetes_setup.control import api_client
from usernetes_setup.control.api_client import NODES

LOST_AFTER = 10.0  # seconds that the controller manager has called a node unknown
LOOK_EVERY = 2.0


def run(client: api_client.Client, own: str, wait: Callable[[float], object]) -> None:
    """Remove nodes that have been silent for long, for ever."""
    since: dict[str, float] = {}
    while True:
        now = time.monotonic()
        items = client.call("GET", NODES)["items"]
        silent = {
            node["metadata"]["name"] for node in items
            if api_client.condition(node, "Ready") == "Unknown"
        }  # fmt: skip
        since = {name: since.get(name, now) for name in silent}
        for name, first in since.items():
            if now - first > LOST_AFTER and name != own:
                print(f"node {name} is lost and removed", flush=True)
                client.call("DELETE", f"{NODES}/{name}")
        wait(LOOK_EVERY)
