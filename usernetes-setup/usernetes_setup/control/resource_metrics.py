# SPDX-License-Identifier: LGPL-3.0-or-later
"""Resource metrics: what `kubectl top` asks, answered from what the kubelets measure anyway.

Serves the API group metrics.k8s.io to the API server alone, which knows by an APIService where it
is, and hands requests on once it has seen who asks and that they may. Inputs: the pods, and each
node's kubelet, asked anew for each request. Output: CPU and memory of pods, and of nodes; a node
has used what its pods have, since all else on its machine is not its own. Invariant: while nobody
asks, nothing is measured, and nothing kept.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import re
import ssl
import time
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from usernetes_setup.control import api_client
from usernetes_setup.control.api_client import NODES, Object

ASKER = "dovetail-front-proxy"  # the API server's name in the certificate that it shows here
SERVICE = "dovetail-metrics"
NAME = f"{SERVICE}.kube-system.svc"  # by which the API server knows our certificate
_GROUP, _VERSION = "metrics.k8s.io", "v1beta1"
_API = f"/apis/{_GROUP}/{_VERSION}"
_ASKED = r"(nodes(/[^/]+)?|pods|namespaces/[^/]+/pods(/[^/]+)?)?"
_SERVICES = "/api/v1/namespaces/kube-system/services"
_REGISTRATIONS = "/apis/apiregistration.k8s.io/v1/apiservices"


def registration(address: str, port: int, authority: str) -> list[tuple[str, Object]]:
    """What to create, and where, for the API server to find us."""
    # By the name of a service that is another name for our address: no proxy has to be there.
    outside = {"type": "ExternalName", "externalName": address}
    spec = {
        "group": _GROUP,
        "version": _VERSION,
        "groupPriorityMinimum": 100,
        "versionPriority": 100,
        "service": {"namespace": "kube-system", "name": SERVICE, "port": port},
        "caBundle": base64.b64encode(authority.encode()).decode(),
    }
    return [
        (_SERVICES, {"metadata": {"name": SERVICE}, "spec": outside}),
        (_REGISTRATIONS, {"metadata": {"name": f"{_VERSION}.{_GROUP}"}, "spec": spec}),
    ]


def usage(*measured: Object) -> Object:
    """CPU and memory of all of these together, as the API group has them."""
    cpu = sum(one["cpu"]["usageNanoCores"] for one in measured)
    memory = sum(one.get("memory", {}).get("workingSetBytes", 0) for one in measured)
    return {"cpu": f"{cpu}n", "memory": f"{memory >> 10}Ki"}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _known(pod: Object) -> list[Object]:
    """The containers of a pod that were measured, in its node's summary."""
    parts = pod.get("containers", [])
    return [part for part in parts if "usageNanoCores" in part.get("cpu", {})]


def _entry(kind: str, of: Object, known: list[Object], **more: Any) -> Object:  # noqa: ANN401
    kept = ("name", "namespace", "labels", "creationTimestamp")
    about = {key: of["metadata"][key] for key in kept if key in of["metadata"]}
    when = known[0]["cpu"].get("time", about.get("creationTimestamp")) if known else _now()
    return {"kind": kind, "apiVersion": f"{_GROUP}/{_VERSION}", "metadata": about,
            "timestamp": when, "window": "10s", **more}  # fmt: skip


def of_node(node: Object, summary: Object) -> Object | None:
    """A node's entry, from its kubelet's summary; None while none of its pods was measured.

    One that has no pods has used nothing; one whose kubelet said nothing is not in its summary.
    """
    known = [part for pod in summary["pods"] for part in _known(pod)]
    empty = "node" in summary and not summary["pods"]
    return _entry("NodeMetrics", node, known, usage=usage(*known)) if known or empty else None


def of_pod(pod: Object, summary: Object) -> Object | None:
    """A pod's entry, from its node's summary; None while it was not measured."""
    for one in summary["pods"]:
        if one["podRef"]["uid"] == pod["metadata"]["uid"] and (known := _known(one)):
            containers = [{"name": part["name"], "usage": usage(part)} for part in known]
            return _entry("PodMetrics", pod, known, containers=containers)
    return None


class Source:
    """Answers for one cluster."""

    def __init__(self, client: api_client.Client, pki: Path) -> None:
        self.client, self.pki = client, pki

    def answer(self, path: str) -> Object:
        """What a path has. Raises api_client.Refused."""
        where, _, query = path.partition("?")
        asked = where.removeprefix(_API).strip("/")
        if not where.startswith(_API) or not re.fullmatch(_ASKED, asked):
            raise api_client.Refused(404, "not found")
        if not asked:
            kinds = [("nodes", "NodeMetrics", False), ("pods", "PodMetrics", True)]
            return {"kind": "APIResourceList", "apiVersion": "v1",
                    "groupVersion": f"{_GROUP}/{_VERSION}",
                    "resources": [{"name": name, "singularName": "", "namespaced": inside,
                                   "kind": kind, "verbs": ["get", "list"]}
                                  for name, kind, inside in kinds]}  # fmt: skip
        known = self.client.call("GET", f"/api/v1/{asked}{query and '?'}{query}")
        nodes = asked.startswith("nodes")
        listed = known.get("items", [known])
        found = list(self._measured(listed, nodes))
        if "items" not in known:
            if not found:
                raise api_client.Refused(404, f"no metrics known for {asked}")
            return found[0]
        kind = "NodeMetricsList" if nodes else "PodMetricsList"
        rest = {key: value for key, value in known.get("metadata", {}).items() if key == "continue"}
        return {"kind": kind, "apiVersion": f"{_GROUP}/{_VERSION}", "metadata": rest,
                "items": found}  # fmt: skip

    def _measured(self, things: Iterable[Object], nodes: bool) -> Iterable[Object]:
        summaries: dict[str, Object] = {}
        for thing in things:
            node = thing["metadata"]["name"] if nodes else thing["spec"].get("nodeName")
            if node and node not in summaries:
                summaries[node] = self._summary(node)
            found = (of_node if nodes else of_pod)(thing, summaries[node]) if node else None
            if found:
                yield found

    def _summary(self, name: str) -> Object:
        """What a node's kubelet has measured; the API server would connect to none on loopback."""
        with contextlib.suppress(OSError, api_client.Refused, http.client.HTTPException, KeyError):
            node = self.client.call("GET", f"{NODES}/{name}")
            kubelet = api_client.kubelet(node, self.pki)
            found: Object = kubelet.call("GET", "/stats/summary?only_cpu_and_memory=true")
            return found
        return {"pods": []}  # one that is not there, or has no address yet, has nothing to tell


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    source: Source

    def do_GET(self) -> None:
        """Answer the API server."""
        link: Any = self.connection  # with TLS, as `server` makes it
        names = [value for part in link.getpeercert()["subject"] for _, value in part]
        try:
            if names != [ASKER]:
                raise api_client.Refused(403, "only the API server may ask")
            status, found = 200, self.source.answer(self.path)
        except api_client.Refused as error:
            status = error.status
            found = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status,
                     "message": str(error).partition(": ")[2]}  # fmt: skip
        content = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *words: object) -> None:
        """Say nothing of each request."""


def server(client: api_client.Client, address: str, port: int, pki: Path) -> ThreadingHTTPServer:
    """Listen; who shows no certificate of the cluster's authority gets no answer at all."""
    handler = type("Handler", (_Handler,), {"source": Source(client, pki)})
    made = ThreadingHTTPServer((address, port), handler)
    made.daemon_threads = True
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(pki / "ca.crt"))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(pki / "metrics.crt", pki / "metrics.key")
    # A connection's own thread shakes hands, lest one that says nothing keep the others waiting.
    made.socket = context.wrap_socket(made.socket, True, do_handshake_on_connect=False)
    return made
