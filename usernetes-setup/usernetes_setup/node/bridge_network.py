# SPDX-License-Identifier: LGPL-3.0-or-later
"""Network mode `bridge`: pods and services with addresses of their own, and with names.

The node has a network namespace, so that even an ordinary user may make the bridge; nothing
outside can see it. The API server is reached through the *entrance*: a socket that listens
outside and is accepted inside, since a socket stays in the namespace where it was made.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable

from usernetes_setup.node import components, namespaces
from usernetes_setup.node_record import Node, cluster_folder

ADDRESS = "10.243.0.1"
"""The node's own address inside its network namespace."""


def entrance(node: Node) -> socket.socket:
    """Listen where the user's kubeconfig points, outside."""
    listening = socket.create_server((node.address, node.ports["server"]))
    listening.set_inheritable(True)
    return listening


def enter(node: Node) -> None:
    """Bring the namespace's only interface up; from here on the node has the inside address.

    No way leads out, which pods that ask the machine's name servers shall hear each time, and not
    once a second: for want of an answer they wait for 5 s.
    """
    namespaces.interface_up("lo")
    namespaces.interface_up("lo:1", ADDRESS)
    node.address = ADDRESS
    for name, value in (("ip_forward", "1"), ("icmp_ratelimit", "0")):
        with open(f"/proc/sys/net/ipv4/{name}", "w") as file:
            file.write(value)


def forwarder(node: Node, entrance: socket.socket, ready: Callable[[], bool]) -> components.Command:
    """Carries connections from the entrance to the API server."""
    descriptor = entrance.fileno()
    words = [sys.executable, "-m", __name__, str(descriptor), ADDRESS, str(node.ports["server"])]
    return components.Command("entrance", words, ready, keep=(descriptor,))


def proxy(node: Node, ready: Callable[[], bool]) -> components.Command:
    """kube-proxy: makes service addresses work inside the namespace."""
    pki = cluster_folder(node.cluster) / "pki"
    content = {
        "kind": "KubeProxyConfiguration",
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": f"{pki}/proxy.conf"},
        "hostnameOverride": node.name,
        "clusterCIDR": components.PODS,
        "healthzBindAddress": f"{ADDRESS}:10256",
        "metricsBindAddress": f"{ADDRESS}:10249",
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
    bind {ADDRESS}
    errors
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {pki}/dns.conf
        pods insecure
    }}
}}
. {{
    bind {ADDRESS}
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
    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                target.write(data)
                await target.drain()
        except OSError:
            pass
        finally:
            target.close()

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_in, there_out = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, there_out), copy(there_in, writer))

    server = await asyncio.start_server(connection, sock=listening)
    await server.serve_forever()


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[1]), False)
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], int(sys.argv[3])))
