# SPDX-License-Identifier: LGPL-3.0-or-later
"""Network mode `bridge`: pods and services with addresses of their own, and with names.

The node has a network namespace, so that even an ordinary user may make the bridge; nothing
outside can see it. The API server is reached through the *entrance*: a socket that listens
outside and is accepted inside, since a socket stays in the namespace where it was made. Other
nodes are reached through the carrier, and what is outside by simulations' agents alone, through
the way out.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

from dovetail.host import way_out

from usernetes_setup.node import carrier, components, joining, namespaces
from usernetes_setup.node_record import Node, cluster_folder


@dataclass(frozen=True)
class Outside:
    """Sockets of the machine's network, but for `way`, which is for whoever wants out.

    `entrance` is for the API, on the control node; `udp` for other nodes, where there can be any.
    """

    way: socket.socket
    entrance: socket.socket | None
    udp: socket.socket | None


def outside(node: Node) -> Outside:
    """Listen where the user's kubeconfig points, and where other nodes send what is for here."""
    entrance = None
    if node.control:
        entrance = socket.create_server((node.address, node.ports["server"]))
        entrance.set_inheritable(True)
    way = socket.socket(socket.AF_UNIX)
    way.bind(str(node.folder / way_out.SOCKET))
    way.listen()
    return Outside(way, entrance, carrier.outside(node))


def enter(node: Node, sockets: Outside) -> int:
    """Bring the namespace's interfaces up; from here on the node has the inside address.

    Returns the descriptor of the tunnel to other nodes, -1 where there is none. No way leads out:
    all that is for nobody here is for the node itself, which refuses it. So pods that ask the
    machine's name servers hear that each time, and not once a second, as of a network that cannot
    be reached: for want of an answer they wait for 5 s.
    """
    sockets.way.close()  # it is served outside
    namespaces.interface_up("lo")
    tunnel = -1
    if sockets.udp:
        tunnel = carrier.enter(node)
    else:
        namespaces.interface_up("lo:1", components.address(node.place))
    namespaces.route("0.0.0.0/0", "lo")
    node.address = components.address(node.place)
    for name, value in (("ip_forward", "1"), ("icmp_ratelimit", "0")):
        with open(f"/proc/sys/net/ipv4/{name}", "w") as file:
            file.write(value)
    return tunnel


def let_out(sockets: Outside) -> None:
    """Serve the way out, in a thread of the monitor, which stays outside."""
    threading.Thread(target=way_out.serve, args=(sockets.way,), daemon=True).start()


def commands(
    node: Node, sockets: Outside, tunnel: int, ready: Callable[[], bool]
) -> list[components.Command]:
    """What a node on a bridge has besides; `ready` says whether the API server is up."""
    found = [proxy(node, ready)]
    if sockets.udp:
        found.append(carrier.command(node, tunnel, sockets.udp))
    if sockets.entrance:
        found += [dns(node, ready), forwarder(node, sockets.entrance, ready)]
    return found


def forwarder(node: Node, entrance: socket.socket, ready: Callable[[], bool]) -> components.Command:
    """Carries connections from the entrance to the API server."""
    descriptor, server = entrance.fileno(), str(node.ports["server"])
    words = [sys.executable, "-m", __name__, str(descriptor), components.CONTROL, server]
    return components.Command("entrance", words, ready, keep=(descriptor,))


def proxy(node: Node, ready: Callable[[], bool]) -> components.Command:
    """kube-proxy: makes service addresses work inside the namespace."""
    own = cluster_folder(node.cluster) / "pki/proxy.conf"
    if not node.control:
        own = node.folder / joining.KUBECONFIG
    content = {
        "kind": "KubeProxyConfiguration",
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": str(own)},
        "hostnameOverride": node.name,
        "clusterCIDR": components.PODS,
        "healthzBindAddress": f"{node.address}:10256",
        "metricsBindAddress": f"{node.address}:10249",
        "conntrack": {"maxPerCore": 0, "min": 0},
    }
    (node.folder / "proxy.json").write_text(json.dumps(content, indent=1))
    words = ["kube-proxy", f"--config={node.folder}/proxy.json"]
    return components.Command("proxy", words, ready)


def dns(node: Node, ready: Callable[[], bool]) -> components.Command:
    """CoreDNS: names of services and of their pods; that there is no other is said at once.

    It is on the node's own address rather than a service's, so that nothing stands between.
    """
    pki = cluster_folder(node.cluster) / "pki"
    text = f"""cluster.local in-addr.arpa {{
    bind {node.address}
    errors
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig "{pki}/dns.conf"
        pods insecure
    }}
}}
. {{
    bind {node.address}
    errors
    template ANY ANY {{
        rcode NXDOMAIN
    }}
}}
"""
    (node.folder / "Corefile").write_text(text)
    words = ["coredns", "-conf", f"{node.folder}/Corefile", "-quiet"]
    return components.Command("dns", words, ready, {"GOGC": "50"})


async def _serve(listening: socket.socket, host: str, port: int) -> None:
    server = await asyncio.start_server(
        lambda reader, writer: way_out.carry(reader, writer, host, port), sock=listening
    )
    await server.serve_forever()


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[1]), False)
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], int(sys.argv[3])))
