# SPDX-License-Identifier: LGPL-3.0-or-later
"""Joins the networks of a cluster's nodes on a bridge, on one machine or on several.

Each node has a network namespace that sees nothing of its machine's. Between them `carry-packets`
carries what pods send, by WireGuard in user space: it needs no privilege, but a device for tunnels
inside, and one UDP socket outside, made before and on the node's address alone. A node's *place*
says which addresses it and its pods have.

Inputs: join files, which name a place and have the key for it. Outputs: `carrier.json` of a node,
and on the control node `pki/peers.json`, who was invited. Invariant: a key that opens the network
is in files of mode 0600 and on the standard input of openssl alone.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import socket
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dovetail.core.errors import BadInput, WorkFailed
from dovetail.host.private_files import write_private
from dovetail.host.self_signed import openssl

from usernetes_setup.node import components, namespaces
from usernetes_setup.node_record import Node, cluster_folder

DEVICE = "nodes"
"""The interface that leads to the other nodes."""

MOST = 250
"""Nodes that a cluster on a bridge may have beside its first."""

_HEADERS = 80  # bytes that WireGuard adds to a packet, over IPv6 even
_LONGEST = 65000  # bytes of a packet with them
_BUFFER = 4 << 20  # bytes that may wait in a socket, if the machine allows so many


def possible() -> bool:
    """Whether this user may make a tunnel in a network namespace of their own."""
    try:
        os.close(os.open(namespaces.TUNNELS, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def outside(node: Node) -> socket.socket | None:
    """The socket by which other nodes reach this one; None where there can be no tunnel.

    A node that joins has to have it. Raises OSError.
    """
    if not possible():
        if node.joined:
            raise OSError(f"{namespaces.TUNNELS}: cannot be opened; see `dovetail doctor`")
        return None
    found = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        found.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    found.bind((node.address, 0))
    found.set_inheritable(True)
    node.ports["carrier"] = found.getsockname()[1]
    return found


def enter(node: Node) -> int:
    """Make the tunnel inside, and lead there what is for other nodes; returns its descriptor."""
    tunnel = namespaces.tunnel(DEVICE)
    namespaces.interface_up(DEVICE, components.address(node.place), "255.255.0.0")
    namespaces.route(components.PODS, DEVICE)
    namespaces.route(components.pods(node.place), "lo")  # each pod has a route of its own besides
    return tunnel


def command(node: Node, tunnel: int, udp: socket.socket) -> components.Command:
    """What carries packets between the two descriptors."""
    words = ["carry-packets", f"{node.folder}/carrier.json", str(tunnel), str(udp.fileno())]
    return components.Command("carrier", words, lambda: True, {"GOGC": "50"},
                              keep=(tunnel, udp.fileno()))  # fmt: skip


def _keys(folder: Path) -> tuple[str, str]:
    """A private key and its public one, hexadecimal."""
    private = openssl("genpkey", "-algorithm", "X25519", folder=folder)
    public = openssl("pkey", "-pubout", folder=folder, data=private)

    def raw(pem: str) -> str:
        """The key itself, which is the last 32 bytes of what it is wrapped in (RFC 8410)."""
        lines = [line for line in pem.splitlines() if not line.startswith("-----")]
        return base64.b64decode("".join(lines))[-32:].hex()

    return raw(private), raw(public)


def _peers(node: Node) -> Path:
    return cluster_folder(node.cluster) / "pki/peers.json"


def _networks(place: int) -> list[str]:
    """What goes to the node at a place: for itself, and for its pods."""
    return [f"{components.address(place)}/32", components.pods(place)]


def _largest(node: Node) -> int:
    """Bytes of the largest packet for this node's tunnel."""
    return min(namespaces.packet_size(node.address), _LONGEST) - _HEADERS


def found(node: Node) -> None:
    """Write what the control node's carrier needs."""
    key, public = _keys(node.folder)
    ask = f"{components.CONTROL}:{node.ports['carrier']}"
    content = {"key": key, "public": public, "mtu": _largest(node), "ask": ask,
               "peers": str(_peers(node))}  # fmt: skip
    write_private(node.folder / "carrier.json", json.dumps(content, indent=1))


def invite(control: Node, name: str, seconds: float, there: Collection[str]) -> dict[str, Any]:
    """A place for a node of that name, and what its carrier needs: a part of its join file.

    `there` are the cluster's nodes: what else was invited, and is no longer valid, gives its place
    back. Raises BadInput where the cluster cannot have more nodes.
    """
    try:
        own = json.loads((control.folder / "carrier.json").read_text())
    except FileNotFoundError:
        raise BadInput(
            f"join: on a bridge more nodes need {namespaces.TUNNELS}, which was not there when "
            f"cluster {control.cluster} was started; see `dovetail doctor`"
        ) from None
    path = _peers(control)
    with (path.parent / "peers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        now = time.time()
        known = json.loads(path.read_text()) if path.exists() else []
        kept = [one for one in known if one["node"] in there or one["until"] > now]
        places = {one["place"] for one in kept if one["node"] != name}
        before = [one["place"] for one in kept if one["node"] == name]
        free = [place for place in (*before, *range(1, MOST + 1)) if place not in places]
        if not free:
            raise WorkFailed(f"cluster {control.cluster}: has {MOST} nodes beside its first, "
                             "which is the most on a bridge; take a node away")  # fmt: skip
        key, public = _keys(control.folder)
        peer = {"node": name, "place": free[0], "until": now + seconds, "public": public,
                "networks": _networks(free[0])}  # fmt: skip
        kept = [one for one in kept if one["node"] != name]
        write_private(path, json.dumps([*kept, peer], indent=1))
    return {
        "key": key, "public": public, "place": free[0], "mtu": own["mtu"], "ask": own["ask"],
        "control": {
            "public": own["public"], "networks": _networks(0),
            "endpoint": f"{control.address}:{control.ports['carrier']}",
        },
    }  # fmt: skip


def join(node: Node, invited: dict[str, Any]) -> None:
    """Write what the carrier of a node that joins needs."""
    content = {**invited, "mtu": min(invited["mtu"], _largest(node))}
    write_private(node.folder / "carrier.json", json.dumps(content, indent=1))


def place(content: dict[str, Any]) -> int:
    """The place that a join file names, 0 if its cluster is on no bridge. Raises TypeError."""
    invited = content.get("carrier")
    if invited is None:
        return 0
    texts = (invited["key"], invited["public"], invited["ask"], invited["control"]["endpoint"])
    numbers = (invited["place"], invited["mtu"])
    if not all(isinstance(one, str) for one in texts) or not all(
        type(one) is int for one in numbers
    ):
        raise TypeError
    return int(invited["place"])
