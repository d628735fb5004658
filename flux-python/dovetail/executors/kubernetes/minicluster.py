# SPDX-License-Identifier: LGPL-3.0-or-later
"""A simulation as a MiniCluster of the Flux Operator, v1alpha2. Pure.

Inputs: as for `manifests.job`, and where Flux is on the nodes. Output: the object, of which the
operator makes a Job and Flux brokers; `operator-manifests/minicluster.yaml` adds what a MiniCluster
cannot say, and `pods.flux_broker` prepares each broker.

Invariants: no image of Flux's own is used, since pods see the machine's by hostPath mounts; pods
ask for what those of Jobs do; a pod that is lost ends the simulation instead of starting it anew.
The operator and its pods print all that they are given, so the CURVE certificate is not in here.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from dovetail.core.protocol import Spec
from dovetail.executors import pods
from dovetail.executors.kubernetes import manifests
from dovetail.executors.kubernetes.devices import NONE
from dovetail.executors.kubernetes.manifests import Folders, Object

GROUP = "/apis/flux-framework.org/v1alpha2"
KIND = "MiniCluster"
NETWORK = "dovetail/network"
"""The label that says on which network a MiniCluster's pods are."""
ADDRESS = "POD_ADDRESS"
"""A variable that the policy gives its pods."""
PROBES = f"{manifests.PART}=probe"
"""Selects those of `to_be_seen`."""
_INIT = {"cpu": "1m", "memory": "1Mi"}  # a quota wants every container to ask for something


def minicluster(
    run: str,
    spec: Spec,
    key: str,
    sizes: Sequence[int],
    requests: Sequence[int],
    memory: Sequence[int],
    seen: Folders,
    flux: str,
    network: str = manifests.HOST,
    image: str = manifests.IMAGE,
    limit: int = 0,
    devices: Mapping[str, int] = NONE,
) -> Object:
    """One launch of a simulation: a broker per rank group, and under the first `flux run` of ours.

    `flux` is the folder of the command. Each pod gets its own request at admission, as those of a
    Job, and is on the `network`, which the policy reads in the label `NETWORK`.
    """
    labels = {**manifests.rank_group(run, spec, key), NETWORK: network}
    name = manifests.job_name(run, key)
    container = {
        "image": image,
        "imagePullPolicy": manifests.pull(image),
        "commands": {
            "pre": _prepare(run, key, name, len(sizes)),
            "post": "exit $?",  # of the simulation; the operator's script would lose it
        },
        "environment": {"PATH": f"{flux}:{pods.PATH}", **manifests.orphan_limit()},
        **_container(run, requests, memory, seen, manifests.cap(limit, devices)),
    }
    return {
        "apiVersion": "flux-framework.org/v1alpha2",
        "kind": KIND,
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "size": len(sizes),
            "jobLabels": labels,
            "containers": [container],
            # Our rank groups may share a node. A service's name must begin with a letter.
            "network": {"disableAffinity": True, "headlessName": f"s-{name}"},
            "flux": {
                "container": {"disable": True, "image": image, "resources": _init(limit)},
                "curveCert": "it comes by a Secret",  # anything, or the operator makes one
                "completeWorkers": True,  # not once more after 15 s
                "scheduler": {"simple": True},
            },
            "pod": {
                "annotations": manifests.groups_annotation(sizes),
                "labels": labels,
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
            },
        },
    }


def _init(limit: int) -> Object:
    """What the container of preparation asks for: of a pod's limit no more than any pod has.

    Without a limit of its own the pod's control group would have none, and nobody would know
    for how long that stopped it.
    """
    return {"requests": _INIT, **manifests.cap(manifests.LEAST_LIMIT if limit else 0)}


def _container(
    run: str, requests: Sequence[int], memory: Sequence[int], seen: Folders, cap: Object
) -> Object:
    """What all containers of the run are: the program, what they ask for and what they see."""
    cpu = max(1, round(sum(requests) / len(requests)))
    asked = {"cpu": f"{cpu}m", "memory": str(max(manifests.LEAST_MEMORY, *memory))}
    return {
        "command": pods.START,  # a file, because quotes are lost here
        "launcher": True,
        "resources": {"requests": asked, **cap},
        "volumes": {
            "curve": {"secretName": curve_secret(run), "path": pods.CURVE, "readOnly": True},
            **{
                f"v{index}": {"hostPath": one.source, "path": one.target, "readOnly": one.fixed}
                for index, one in enumerate(seen.mounts())
            },
        },
    }


def _prepare(run: str, key: str, name: str, size: int) -> str:
    """Shell for the operator's script, before it starts the broker.

    Pods on the machine's network have the machine's host name, so the script, which asks for it
    to know the first pod, and the broker, which finds its rank by it, are told one instead.
    """
    words = [*pods.command("executors.pods.flux_broker"), "--run", run, "--simulation", key,
             "--name", name, "--size", str(size)]  # fmt: skip
    return "\n".join(
        (
            f"{shlex.join(words)} || exit 1",
            'mainHost=; [ "$JOB_COMPLETION_INDEX" = 0 ] && mainHost=$(hostname)',
            f'brokerOptions="$brokerOptions -Shostname={name}-$JOB_COMPLETION_INDEX"',
        )
    )


def curve_secret(run: str) -> str:
    """The name of the Secret by which a run's brokers trust each other."""
    return f"dovetail-curve-{run}"


def secret(run: str, certificate: str) -> Object:
    """The Secret that pods mount at `pods.CURVE`."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": curve_secret(run), "labels": {manifests.RUN: run}},
        "stringData": {"curve": certificate},
    }


def to_be_seen(run: str) -> Object:
    """A MiniCluster to be seen by the operator; what it makes of it fits on no node."""
    container = {"image": manifests.IMAGE, "launcher": True, "command": "true"}
    return {
        "apiVersion": "flux-framework.org/v1alpha2",
        "kind": KIND,
        "metadata": {"name": f"probe-{run}", "labels": {manifests.PART: "probe"}},
        "spec": {
            "size": 1,
            "containers": [container],
            "flux": {
                "container": {"disable": True, "image": manifests.IMAGE},
                "curveCert": "none",
            },
            "network": {"headlessName": f"s-probe-{run}"},
            "pod": {"nodeSelector": {"dovetail/probe": "nowhere"}},
        },
    }


def probe() -> Object:
    """A Job that is never made: whether the policy is in force shows in what would become of it."""
    template: Object = {
        "restartPolicy": "Never",
        "containers": [_empty("main")],
        "initContainers": [_empty("init")],
        "volumes": [{"name": "v0", "emptyDir": {}}],
    }
    owner = {"apiVersion": "flux-framework.org/v1alpha2", "kind": KIND, "name": "p", "uid": "p"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": "dovetail-probe",
            "labels": {manifests.PART: manifests.RANK_GROUP},
            "ownerReferences": [owner],
        },
        "spec": {"backoffLimit": 1, "template": {"spec": template}},
    }


def _empty(name: str) -> Object:
    mount = {"name": "v0", "mountPath": "/v"}
    return {
        "name": name,
        "image": manifests.IMAGE,
        "env": [{"name": "A", "value": "a"}],
        "volumeMounts": [mount],
        "resources": {"requests": _INIT},
    }


def in_force(answer: Object) -> bool:
    """Whether the policy has changed the probe, and is not that of an earlier version."""
    (container,) = answer["spec"]["template"]["spec"]["containers"]
    return any(one["name"] == ADDRESS for one in container["env"])
