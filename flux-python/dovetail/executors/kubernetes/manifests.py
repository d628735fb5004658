# SPDX-License-Identifier: LGPL-3.0-or-later
"""The Kubernetes objects of a run: names, labels and manifests. Pure but for `folders`.

Inputs: a simulation, its requests, what its pods must see of the machine. Outputs: plain JSON.
Invariants: the same input gives the same names, so whatever was made can be found again; pods
have requests, and limits of CPU alone where asked for, so their class is Burstable; no secret is
in a command or variable.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.core.protocol import Spec
from dovetail.executors import pods
from dovetail.host import install_paths
from dovetail.plan import command_line

Object = dict[str, Any]

NAMESPACE = "dovetail"
GROUPS = "dovetail/groups"
"""The annotation of a Job's pods that says how many ranks each of them has."""
IMAGE = "localhost/dovetail/host:1"
"""An almost empty image that `dovetail kube up` loads; programs come by hostPath mounts."""
REQUESTS = "dovetail-requests"
"""The ConfigMap of what pods get at admission, see operator-manifests/requests.yaml."""
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
POLICIES = frozenset({"MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"})
"""Kinds of `ADMISSION` that servers have from Kubernetes 1.36 on."""
RUN, SIMULATION, KEY, PART = (
    f"dovetail/{word}" for word in ("run", "simulation", "launch", "part")
)
HOST = "host"
"""The network of pods that share their node's; on any other they have addresses of their own."""
RANK_GROUP, AGENT = "rank-group", "agent"
INDEX = "batch.kubernetes.io/job-completion-index"
CONTAINER = "main"
HUB = "/run/dovetail/hub"
CGROUPS = "/sys/fs/cgroup"
ORPHAN = "DOVETAIL_ORPHAN_S"
AGENT_CPU = 20
"""Millicores that an agent asks for; it wakes four times a second."""
LEAST_MEMORY = 64 << 20
_PROGRAMS = ("/usr", "/bin", "/lib", "/lib64", "/etc", "/opt")


@dataclass(frozen=True)
class Folders:
    """Directories of the machine that pods see under the same names, some to write to."""

    read: tuple[str, ...]
    written: tuple[str, ...]

    def mounts(self) -> list[tuple[str, bool]]:
        """All of them, each with whether it is read alone."""
        return [(name, True) for name in self.read] + [(name, False) for name in self.written]


def job_name(run: str, key: str) -> str:
    """The Job of one launch of a simulation; with an index at its end still 63 characters."""
    simulation, _, again = key.partition(".")
    return f"{simulation}-{run}" + (f"-{again}" if again else "")


def path(kind: str, name: str = "", namespace: str = NAMESPACE) -> str:
    """Where the API has objects of a kind, or one of them."""
    base, plural, inside = _KINDS[kind]
    where = f"/namespaces/{namespace}" if inside and namespace else ""
    return f"{base}{where}/{plural}" + (f"/{name}" if name else "")


_KINDS = {
    "Namespace": ("/api/v1", "namespaces", False),
    "Node": ("/api/v1", "nodes", False),
    "Pod": ("/api/v1", "pods", True),
    "ConfigMap": ("/api/v1", "configmaps", True),
    "Secret": ("/api/v1", "secrets", True),
    "ServiceAccount": ("/api/v1", "serviceaccounts", True),
    "ResourceQuota": ("/api/v1", "resourcequotas", True),
    "Job": ("/apis/batch/v1", "jobs", True),
    "DaemonSet": ("/apis/apps/v1", "daemonsets", True),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases", True),
    "Role": ("/apis/rbac.authorization.k8s.io/v1", "roles", True),
    "RoleBinding": ("/apis/rbac.authorization.k8s.io/v1", "rolebindings", True),
    "ClusterRole": ("/apis/rbac.authorization.k8s.io/v1", "clusterroles", False),
    "ClusterRoleBinding": ("/apis/rbac.authorization.k8s.io/v1", "clusterrolebindings", False),
    "PriorityClass": ("/apis/scheduling.k8s.io/v1", "priorityclasses", False),
    "MutatingAdmissionPolicy": (ADMISSION, "mutatingadmissionpolicies", False),
    "MutatingAdmissionPolicyBinding": (ADMISSION, "mutatingadmissionpolicybindings", False),
    "MiniCluster": ("/apis/flux-framework.org/v1alpha2", "miniclusters", True),
}  # fmt: skip


def folders(specs: Iterable[Spec], run_directory: Path, flux: str = "") -> Folders:
    """What the pods of these simulations must see: programs, this package, cases, the output.

    And the installation of Flux whose command is in the folder `flux`, if one is given.
    """
    wanted = {sys.prefix, str(install_paths.PACKAGES)}
    wanted |= {os.path.dirname(flux)} if flux else set()
    wanted |= {str(Path(library).parent) for library in install_paths.libraries().values()}
    for spec in specs:
        environment = dict(spec.environment)
        wanted.add(os.path.abspath(spec.case))
        wanted |= set(command_line.search_path(environment).split(os.pathsep))
        lines = [spec.command, *(command_line.split(line) for line in spec.prepare)]
        wanted |= {os.path.dirname(word) for line in lines for word in line}
    written = str(Path(run_directory).resolve())
    there = [name for name in _PROGRAMS if os.path.isdir(name)]
    found: list[str] = []
    for name in sorted(wanted):
        seen = any(_inside(name, other) for other in (*there, *found, "/dev", "/proc", "/sys"))
        if not seen and os.path.isabs(name) and os.path.isdir(name) and name != "/":
            found.append(name)
    return Folders((*there, *found), ("/dev/shm", written))


def _inside(name: str, other: str) -> bool:
    return (name + "/").startswith(other + "/")


def job(
    run: str,
    spec: Spec,
    key: str,
    sizes: Sequence[int],
    requests: Sequence[int],
    memory: Sequence[int],
    seen: Folders,
    image: str = IMAGE,
    network: str = HOST,
    limit: int = 0,
) -> Object:
    """One launch of a simulation: an Indexed Job with a pod per rank group.

    `sizes` in ranks, `requests` in millicores and `memory` in bytes, shape (groups,). The template
    has the mean request; each pod gets its own at admission, or right after. A `limit`, also in
    millicores, is that of all pods at birth, and must not be below any request. Nothing is tried
    again by the Job itself: whether a simulation runs twice is the controller's to decide.
    """
    labels = rank_group(run, spec, key)
    count = len(requests)
    words = f"--run {run} --node $(NODE_NAME) --simulation {key}"
    pod = _pod(
        "entrypoint",
        [*words.split(), *["--group", "$(RANK_GROUP)", "--uid", "$(POD_UID)"]],
        seen,
        image,
        {
            "NODE_NAME": "spec.nodeName",
            "POD_UID": "metadata.uid",
            "RANK_GROUP": f"metadata.labels['{INDEX}']",
        },
        cpu=max(1, round(sum(requests) / count)),
        memory=max(LEAST_MEMORY, *memory),
        grace=8,
        limit=limit,
    )
    pod.update(restartPolicy="Never", priorityClassName="dovetail-simulation")
    pod["hostNetwork"] = network == HOST
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job_name(run, key), "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimit": 0,
            "template": {
                "metadata": {"labels": labels, "annotations": groups_annotation(sizes)},
                "spec": pod,
            },
        },
    }


def groups_annotation(sizes: Sequence[int]) -> dict[str, str]:
    """What pods carry for a controller that comes later, see `sizes_of`."""
    return {GROUPS: json.dumps(list(sizes))}


def sizes_of(job: Object) -> list[int]:
    """The ranks of each group of a Job, ours or a MiniCluster's, that is there already."""
    return [int(n) for n in json.loads(job["spec"]["template"]["metadata"]["annotations"][GROUPS])]


def rank_group(run: str, spec: Spec, key: str) -> dict[str, str]:
    """The labels of one launch of a simulation, and of its pods."""
    return {RUN: run, SIMULATION: spec.name, KEY: key, PART: RANK_GROUP}


def agents(run: str, seen: Folders, image: str = IMAGE) -> Object:
    """The run's agent on each node."""
    labels = {RUN: run, PART: AGENT}
    pod = _pod(
        "agent",
        ["--run", run, "--node", "$(NODE_NAME)", "--credentials", HUB, "--cgroups", CGROUPS],
        Folders((*seen.read, CGROUPS), seen.written),
        image,
        {"NODE_NAME": "spec.nodeName"},
        cpu=AGENT_CPU,
        memory=LEAST_MEMORY,
        grace=5,
    )
    pod["priorityClassName"] = "dovetail-service"
    pod["shareProcessNamespace"] = True  # process 1 would not end by a signal before it is ready
    pod["volumes"].append({"name": "hub", "secret": {"secretName": hub_secret(run)}})
    pod["containers"][0]["volumeMounts"].append({"name": "hub", "mountPath": HUB, "readOnly": True})
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": f"dovetail-agent-{run}", "labels": labels},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def hub_secret(run: str) -> str:
    """The name of the Secret by which agents find and trust the controller."""
    return f"dovetail-hub-{run}"


def secret(run: str, files: Mapping[str, str]) -> Object:
    """The files that agents mount at `HUB`."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": hub_secret(run), "labels": {RUN: run}},
        "stringData": dict(files),
    }


def lease(holder: str, now: str, seconds: int) -> Object:
    """Says who controls this namespace; `now` as the API writes times."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "dovetail-controller"},
        "spec": {
            "holderIdentity": holder,
            "leaseDurationSeconds": seconds,
            "acquireTime": now,
            "renewTime": now,
        },
    }


def resize(millicores: int, limit: int = 0) -> Object:
    """The body of a patch of pods/resize: the CPU request, and the limit of pods that have one."""
    part = {"name": CONTAINER, "resources": {"requests": {"cpu": f"{millicores}m"}, **cap(limit)}}
    return {"spec": {"containers": [part]}}


def cap(limit: int) -> Object:
    """A CPU limit in millicores, as a part of a container's resources; nothing for 0."""
    return {"limits": {"cpu": f"{limit}m"}} if limit else {}


def orphan_limit() -> dict[str, str]:
    """The user's wish for how long pods wait for a controller, as an environment."""
    return {ORPHAN: os.environ[ORPHAN]} if os.environ.get(ORPHAN) else {}


def pull(image: str) -> str:
    """Ours is on the nodes or nowhere."""
    return "Never" if image == IMAGE else "IfNotPresent"


def _pod(
    module: str,
    words: Sequence[str],
    seen: Folders,
    image: str,
    fields: Mapping[str, str],
    *,
    cpu: int,
    memory: int,
    grace: int,
    limit: int = 0,
) -> Object:
    """A pod that runs one module of `pods` with the machine's own Python."""
    mounts = seen.mounts()
    variables: list[Object] = [
        {"name": k, "valueFrom": {"fieldRef": {"fieldPath": v}}} for k, v in fields.items()
    ]
    own = {"PATH": pods.PATH, **orphan_limit()}
    variables += [{"name": name, "value": value} for name, value in own.items()]
    container = {
        "name": CONTAINER,
        "image": image,
        "imagePullPolicy": pull(image),
        "command": [*pods.command(f"executors.pods.{module}"), *words],
        "env": variables,
        "resources": {"requests": {"cpu": f"{cpu}m", "memory": str(memory)}, **cap(limit)},
        # So that a resize never restarts anything; also what the API assumes if nothing is said.
        "resizePolicy": [
            {"resourceName": "cpu", "restartPolicy": "NotRequired"},
            {"resourceName": "memory", "restartPolicy": "NotRequired"},
        ],
        "volumeMounts": [
            {"name": f"v{i}", "mountPath": name, **({"readOnly": True} if fixed else {})}
            for i, (name, fixed) in enumerate(mounts)
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return {
        # Nothing between MPI and the network; and names resolve as they do on the machine.
        "hostNetwork": True,
        "dnsPolicy": "Default",
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": grace,
        "containers": [container],
        "volumes": [
            {"name": f"v{i}", "hostPath": {"path": name}} for i, (name, _) in enumerate(mounts)
        ],
    }
