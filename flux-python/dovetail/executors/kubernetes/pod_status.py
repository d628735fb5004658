# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a pod says of itself: where it is, whether it ends, and what is wrong, in words. Pure.

Input: a pod as the API has it.
"""

from __future__ import annotations

from typing import Any

from dovetail.executors.kubernetes import manifests
from dovetail.executors.kubernetes.placement import millicores, quantity
from dovetail.host.memory import out_of_memory

Object = dict[str, Any]

# Reasons for which a container that waits will wait for ever.
HOPELESS = (
    "ErrImageNeverPull", "ErrImagePull", "ImagePullBackOff", "InvalidImageName",
    "CreateContainerConfigError", "CreateContainerError", "RunContainerError",
)  # fmt: skip
_META = ("name", "namespace", "labels", "uid", "generation", "deletionTimestamp")
_SPEC = ("nodeName", "overhead", "resources", "containers", "initContainers")
_CONTAINER = ("name", "image", "resources", "restartPolicy")
_NOT_YET = "have not yet been read"  # said by a node that has just started, which tries again


def slim(pod: Object) -> Object:
    """A pod without what nobody asks about, which is most of it: they are kept by the thousand."""
    meta, spec = pod["metadata"], pod["spec"]
    return {
        "metadata": {name: meta[name] for name in _META if name in meta},
        "spec": {name: _without(spec[name]) for name in _SPEC if name in spec},
        "status": pod.get("status", {}),
    }


def _without(part: Any) -> Any:  # noqa: ANN401
    """Containers without what the machine is to them."""
    if not isinstance(part, list):
        return part
    return [{name: one[name] for name in _CONTAINER if name in one} for one in part]


def group_of(pod: Object) -> int:
    """The completion index of a pod."""
    return int(pod["metadata"]["labels"].get(manifests.INDEX, "-1"))


def job_of(pod: Object) -> str:
    """The name of the Job that has made a pod, and of the MiniCluster that has made that."""
    return str(pod["metadata"]["labels"].get(manifests.JOB, ""))


def node_of(pod: Object) -> str:
    """The node that a pod is on; empty if it has none yet."""
    return str(pod["spec"].get("nodeName", ""))


def born_with(pod: Object) -> tuple[int, int]:
    """The CPU request and limit in our container's specification, millicores; 0 for no limit."""
    has = manifests.own(pod["spec"]["containers"]).get("resources", {})
    request, limit = (has.get(name, {}).get("cpu", "0") for name in ("requests", "limits"))
    return millicores(request), millicores(limit)


def memory_of(pod: Object) -> int:
    """The memory request in our container's specification, bytes."""
    has = manifests.own(pod["spec"]["containers"]).get("resources", {})
    return int(quantity(has.get("requests", {}).get("memory", "0")))


def over(pod: Object) -> bool:
    """Whether a pod's containers have ended."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def deleted(pod: Object) -> bool:
    """Whether somebody has deleted a pod; it may still be there."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def ending(pod: Object) -> bool:
    """Whether a pod has ended or is about to."""
    return over(pod) or deleted(pod)


def hopeless(pod: Object) -> str:
    """Why a pod will never start, in words; empty if it may."""
    for one in _containers(pod):
        waits = one.get("state", {}).get("waiting") or {}
        said = waits.get("message", "")
        if waits.get("reason") in HOPELESS and _NOT_YET not in said:
            image = one.get("image") or pod["spec"]["containers"][0]["image"]
            if "Image" in waits["reason"]:
                return f"image {image} is not on node {node_of(pod)}: {waits['reason']}"
            return f"pod {pod['metadata']['name']}: {waits['reason']}: {said}"
    return ""


def _containers(pod: Object) -> list[Object]:
    """The states of its containers, without those of preparation that ended well."""
    status = pod.get("status", {})
    first = [
        one for one in status.get("initContainerStatuses", [])
        if not one.get("state", {}).get("terminated") or one["state"]["terminated"].get("exitCode")
    ]  # fmt: skip
    return [*first, *status.get("containerStatuses", [])]


def starved(pod: Object) -> str:
    """Why the kernel killed a pod that has ended, if for want of memory; else empty."""
    ends = [one.get("state", {}).get("terminated") or {} for one in _containers(pod)]
    if not any(end.get("reason") == "OOMKilled" for end in ends):
        return ""
    has = manifests.own(pod["spec"]["containers"]).get("resources", {})
    limit = has.get("limits", {}).get("memory")
    why = f"its limit is {limit}" if limit else f"it has none of its own on {node_of(pod)}"
    return out_of_memory(f"pod {pod['metadata']['name']}", why)


def unplaced(pod: Object) -> str:
    """Why a pod is on no node, in the scheduler's words; empty if it is on one."""
    for one in pod.get("status", {}).get("conditions", []):
        if one["type"] == "PodScheduled" and one["status"] == "False":
            return str(one.get("message", one.get("reason", "")))
    return "" if node_of(pod) else "not scheduled yet"


def ended_by(pod: Object) -> str:
    """What ended a pod, in words."""
    status = pod.get("status", {})
    said = status.get("message") or status.get("reason")
    for one in _containers(pod):
        end = one.get("state", {}).get("terminated") or {}
        if end:
            last = str(end.get("message", "")).strip().splitlines()
            words = f"exit code {end.get('exitCode')}, {end.get('reason', '')}"
            said = said or words + (f": {last[-1]}" if last else "")
    for one in status.get("conditions", []):
        if one["type"] == "DisruptionTarget" and one["status"] == "True":
            return f"{one.get('reason')}: {one.get('message', '')}"
    return str(said or "by somebody else")
