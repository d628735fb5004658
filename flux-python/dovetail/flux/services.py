# SPDX-License-Identifier: LGPL-3.0-or-later
"""Where a service of the cluster is reached from a bare-metal job.

Input: the cluster's API and what the user typed. Output: a URL. Invariant: whatever the service
looks like, the answer is a URL or one line that says why there is none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from usernetes_setup.control import api_client

from dovetail.core.errors import BadInput

Object = Mapping[str, Any]
LABEL = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""A name of a service or a namespace (RFC 1123); a path of others is answered by 500."""


def url(cluster: api_client.Client, service: str) -> str:
    """Where a ready pod of the service listens: pods are on the host's network.

    Not by its endpoints, of which there are none on loopback addresses.
    """
    space, _, name = service.rpartition("/")
    if not (LABEL.fullmatch(name) and LABEL.fullmatch(space or "default")):
        raise BadInput(f"{service!r} is not the name of a service")
    path = f"/api/v1/namespaces/{quote(space or 'default', safe='')}"
    try:
        spec = cluster.call("GET", f"{path}/services/{quote(name, safe='')}")["spec"]
    except api_client.Refused as error:
        if error.status != 404:
            raise
        raise BadInput(f"there is no service {service}") from None
    if not spec.get("selector") or not spec.get("ports"):
        raise BadInput(f"service {service} has no selector or no port, so no pod can be found")
    labels = quote(",".join(f"{key}={value}" for key, value in spec["selector"].items()))
    for pod in cluster.call("GET", f"{path}/pods?labelSelector={labels}")["items"]:
        if api_client.condition(pod, "Ready") == "True" and not pod["metadata"].get(
            "deletionTimestamp"
        ):
            return f"http://{pod['status']['podIP']}:{target_port(spec, pod)}"
    raise BadInput(f"no pod of service {service} is ready")


def target_port(service: Object, pod: Object) -> int:
    """The port of a pod that a service's first port means, by number or by name."""
    wanted = service["ports"][0].get("targetPort", service["ports"][0]["port"])
    named = {
        port.get("name"): int(port["containerPort"])
        for container in pod["spec"]["containers"]
        for port in container.get("ports", ())
    }
    if wanted not in named and not isinstance(wanted, int):
        raise BadInput(f"pod {pod['metadata']['name']} has no port called {wanted}")
    return int(named.get(wanted, wanted))
