# SPDX-License-Identifier: LGPL-3.0-or-later
"""A simulation as a MiniCluster of the Flux Operator, v1alpha2 (step 4). Pure.

Inputs: as for `manifests.job`, and the CURVE certificate of the Flux instance in the pods.
Output: the object. It is built and checked against the operator's schema; nothing starts one yet.

Invariants: no image of Flux's own is used, since pods see the machine's by hostPath mounts; pods
have requests and never limits; a pod that is lost ends the simulation instead of starting it anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from dovetail import manifests
from dovetail.core import Spec
from dovetail.manifests import Folders, Object

FLUX = "/opt/flux"
"""Where Flux is on the machine. Not all of /opt: the operator puts a volume at /opt/software."""


def minicluster(
    run: str,
    spec: Spec,
    key: str,
    sizes: Sequence[int],
    requests: Sequence[int],
    memory: Sequence[int],
    seen: Folders,
    script: str,
    curve: str,
    image: str = manifests.IMAGE,
) -> Object:
    """One launch of a simulation: a broker per rank group, and `script` run under the first.

    `script` is the path of an executable file, because the operator loses quotes in commands.
    Each pod gets its own request at admission, as those of a Job: the operator makes one.
    """
    labels = {manifests.RUN: run, manifests.SIMULATION: spec.name, manifests.KEY: key,
              manifests.PART: manifests.RANK_GROUP}  # fmt: skip
    read = [name for name in seen.read if name != "/opt"] + [FLUX]
    mounts = [(name, True) for name in read] + [(name, False) for name in seen.written]
    cpu = max(1, round(sum(requests) / len(requests)))
    asked = {"cpu": f"{cpu}m", "memory": str(max(manifests.LEAST_MEMORY, *memory))}
    container = {
        "image": image,
        "command": script,
        "launcher": True,
        "commands": {"post": "exit $?"},
        "environment": {**dict(spec.environment), "PATH": f"{FLUX}/bin:/usr/bin:/bin"},
        "resources": {"requests": asked},
        "volumes": {
            f"v{index}": {"hostPath": name, "path": name, "readOnly": fixed}
            for index, (name, fixed) in enumerate(mounts)
        },
    }
    return {
        "apiVersion": "flux-framework.org/v1alpha2",
        "kind": "MiniCluster",
        "metadata": {
            "name": manifests.job_name(run, key),
            "namespace": manifests.NAMESPACE,
            "labels": labels,
        },
        "spec": {
            "size": len(sizes),
            "tasks": spec.ranks,
            "interactive": False,
            "jobLabels": labels,
            "containers": [container],
            "flux": {
                "container": {"disable": True},
                "curveCert": curve,  # the operator's own build would make an empty one
                "scheduler": {"simple": True},
                # A broker takes the whole machine for its own, and would pin every task to core 0.
                "optionFlags": "-ocpu-affinity=off",
            },
            "pod": {
                "labels": labels,
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
            },
        },
    }
