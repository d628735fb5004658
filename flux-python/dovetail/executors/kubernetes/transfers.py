# SPDX-License-Identifier: LGPL-3.0-or-later
"""Folders of a run on nodes that do not see them: which nodes those are, and copies there and back.

Inputs: what nodes say of their folders, and of copies. Outputs: questions and orders to them,
a call when all that was ordered is done, and how far it is for who waits for it. The agents copy,
see `pods.staging`; nothing here waits.

Invariants: an order is repeated to an agent that comes back, until it is answered or not wanted any
more; of several answers one counts.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

from dovetail.executors.kubernetes.agent_hub import Hub
from dovetail.executors.kubernetes.manifests import Folders
from dovetail.executors.pods import messages, staging

Object = dict[str, Any]

TELL = 5.0  # seconds between two words on how far a copy is
PROBE = "probe"
"""A folder in the run's private one, by which the output directory is known."""


def marks(seen: Sequence[Folders], own: Path) -> dict[str, str]:
    """What nodes must see, and how they know that it is the same; see `messages.Look`.

    What is on the output directory's file system is the same where that is. `own` is the run's
    private folder there.
    """
    probe = own / PROBE
    probe.mkdir(mode=0o700, exist_ok=True)
    if not os.listdir(probe):
        (probe / secrets.token_hex(8)).touch()
    found = {str(probe.resolve()): staging.mark(str(probe))}
    for one in seen:
        found.update(dict.fromkeys((*one.programs, *one.paths), ""))
        for case in one.cases:
            near = os.stat(case).st_dev == os.stat(probe).st_dev
            found[case] = "" if near else staging.mark(case)
    return found


def is_here(node: Object) -> bool:
    """Whether a node is this machine: it is the same kernel, and has an address of ours."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    if node["status"].get("nodeInfo", {}).get("bootID") != boot:
        return False
    known = [one["address"] for one in node["status"].get("addresses", [])]
    for address in (node["metadata"]["name"], *known):
        with contextlib.suppress(OSError, ValueError), socket.socket(type=socket.SOCK_DGRAM) as one:
            one.bind((str(ipaddress.IPv4Address(address)), 0))
            return True
    return False


@dataclass
class _Orders:
    """Copies of a simulation that are under way, by number; `then` is told what went wrong.

    `what` is copied, in words, empty if nobody waits for it; `tell_at` is when that is told next.
    """

    simulation: str
    then: Callable[[str], None]
    what: str
    began: float
    tell_at: float
    open: dict[int, tuple[str, messages.Stage]] = field(default_factory=dict)
    trouble: list[str] = field(default_factory=list)


class Transfers:
    """The copies of a run."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._numbers = itertools.count(secrets.randbits(32))  # agents may know another controller
        self._orders: list[_Orders] = []

    def begin(
        self,
        simulation: str,
        asked: Sequence[tuple[str, str, str]],
        then: Callable[[str], None],
        what: str = "",
    ) -> None:
        """Have folders copied: node, folder and way each; then call, with "" if all went well."""
        now = time.monotonic()
        orders = _Orders(simulation, then, what, now, now + TELL)
        for node, folder, way in asked:
            number = next(self._numbers)
            order = messages.Stage(simulation, number, folder, way, self._hub.copies.port)
            orders.open[number] = node, order
        self._orders.append(orders)
        for node, order in orders.open.values():
            self._hub.send(node, order)
        self._finish(orders)

    def heard(self, node: str, answer: messages.Staged) -> None:
        """A copy is done, or cannot be."""
        for orders in list(self._orders):
            if orders.open.pop(answer.number, None):
                if answer.trouble:
                    orders.trouble.append(f"node {node}: {answer.trouble}")
                self._finish(orders)

    def _finish(self, orders: _Orders) -> None:
        if not orders.open:
            self._orders.remove(orders)
            orders.then("; ".join(orders.trouble))

    def progress(self, now: float) -> Iterator[tuple[str, str]]:
        """How far copies are that somebody waits for, each some seconds: simulation and words."""
        for orders in self._orders:
            if orders.what and now >= orders.tell_at:
                orders.tell_at = now + TELL
                yield orders.simulation, self._far(orders, now)

    def _far(self, orders: _Orders, now: float) -> str:
        asked = [*orders.open.values()]
        counts = [self._hub.copies.copied(node, order.folder) for node, order in asked]
        done, total = (sum(one[at] for one in counts) / 1e6 for at in (0, 1))
        nodes, took = ", ".join(sorted({node for node, _ in asked})), now - orders.began
        place = f"from node {nodes}" if asked[0][1].way == "out" else f"to node {nodes}"
        if not done:
            return f"{orders.what} is to be copied {place}, since {took:.0f} s"
        left = took * (total - done) / done
        far = f"{done:,.0f} of {total:,.0f} MB, about {left:.0f} s more"
        return f"{orders.what} is copied {place}: {far}"

    def again(self, node: str) -> None:
        """The node's agent is back, perhaps as another that knows nothing."""
        for orders in self._orders:
            for where, order in orders.open.values():
                if where == node:
                    self._hub.send(node, order)

    def forget(self, simulation: str) -> None:
        """No copy of it is wanted any more."""
        self._orders = [one for one in self._orders if one.simulation != simulation]
