# SPDX-License-Identifier: LGPL-3.0-or-later
"""Simulations that run from container images: are these of use on every node, before any starts?

Inputs: the plan's simulations; the API. Outputs: BadInput with one line that names image, node and
what is wrong; the words of a simulation's steps as an image can run them. The nodes themselves find
out, by `pods.image_check` in a container of each image. Invariant: what was made for this is gone,
or has the run's label, by which the session removes it.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Callable

from dovetail.core import programs
from dovetail.core.errors import BadInput
from dovetail.core.protocol import Spec
from dovetail.executors.kubernetes import manifests, placement, pod_status
from dovetail.executors.kubernetes.api import Api, NotFound, Refused
from dovetail.executors.kubernetes.manifests import IMAGES, KEY, PART, RUN, Folders, path
from dovetail.host import borrowed_python, install_paths
from dovetail.plan import command_line

Object = dict[str, Any]

PATIENCE = 1800.0
"""Seconds in which every node must have tried all images: some are large, and come from afar."""
RETRIES = 300.0
"""Seconds in which a node may go on trying to pull from a registry that is too busy, or away."""
_PASSES = re.compile(
    r"cannot be pulled.*(: (429|50[0234]) |timeout|deadline exceeded|\bEOF|reset by peer"
    r"|temporary failure)",
    re.IGNORECASE,
)
_CURES = {
    "401 Unauthorized": "name a Secret with the registry's credentials by pull_secret, ",
    "x509: ": "tell the node of the registry's certificate, as in dovetail-kubernetes(7), ",
}
"""What would be right, by what a runtime says of a registry."""
TELL, SELDOM = 5.0, 60.0
"""Seconds after which the wait is told, and again if nothing else is to be told."""
_LOOK = 0.2
_LONGEST = 300


def words(line: str) -> list[str]:
    """The words of a step in a container: what is for our Python is for the machine's."""
    found = command_line.program(line)
    if found[0] != sys.executable:
        return found
    code = found.index("-c") + 1
    found[code] = f"import sys; sys.path += {install_paths.others()}; {found[code]}"
    return [*borrowed_python.words(sys.executable), *found[1:]]


def asked(specs: Sequence[Spec]) -> dict[str, str]:
    """What must be there in each image, as `pods.image_check` reads it."""
    found: dict[str, dict[str, Any]] = {}
    for spec in specs:
        if spec.image:
            of = found.setdefault(spec.image, {"programs": []})
            of["libraries"] = install_paths.libraries()
            for line in manifests.commands(spec):
                entry = [line[0], dict(spec.environment).get("PATH", "")]
                ours = line[0] in ("dovetail", sys.executable) or programs.has_place(line[0])
                if not ours and entry not in of["programs"]:
                    of["programs"].append(entry)
    return {image: json.dumps(one) for image, one in found.items()}


def check(
    api: Api, run: str, specs: Sequence[Spec], seen: Folders, say: Callable[[str], None]
) -> frozenset[str]:
    """See that every node has the images, and that they fit; BadInput if not. Returns these nodes.

    What takes long is told, with what it waits for.
    """
    tries = asked(specs)
    if not tries:
        return frozenset()
    for name in sorted({spec.pull_secret for spec in specs} - {""}):
        try:
            api.get(path("Secret", name))
        except NotFound:
            raise BadInput(
                f"pull_secret {name}: no such Secret on {api.server}; make it with `kubectl -n "
                f"{manifests.NAMESPACE} create secret docker-registry {name} ...`"
            ) from None
        except Refused as error:
            if error.status != 403:  # whoever may not look is told by the nodes
                raise
    word = secrets.token_hex(2)
    made = manifests.image_check(run, word, tries, [spec for spec in specs if spec.image], seen)
    api.create(path("DaemonSet"), made)
    label = f"{RUN}={run},{PART}={IMAGES},{KEY}={word}"
    begun = time.monotonic()
    told, tell_at, failing = "", begun + TELL, 0.0
    while True:
        nodes = api.get(path("Node"))["items"]
        pods = api.get(path("Pod"), labelSelector=label)["items"]
        bad, now = next(filter(None, map(trouble, pods)), ""), time.monotonic()
        failing = (failing or now) if bad else 0.0
        if bad and (not _PASSES.search(bad) or now - failing > RETRIES):
            raise BadInput(bad)
        tried = {pod_status.node_of(pod) for pod in pods if whole(pod)}
        waiting = {one["metadata"]["name"] for one in filter(placement.usable, nodes)} - tried
        if not waiting:
            break
        why = bad or _awaited(pods, min(waiting))
        if now - begun > PATIENCE:
            raise BadInput(f"{why}; that took more than {PATIENCE:.0f} s")
        if now >= tell_at and (why != told or now >= tell_at + SELDOM):
            told, tell_at = why, now
            say(f"{why}, since {now - begun:.0f} s")
        threading.Event().wait(_LOOK)
    api.delete(path("DaemonSet", made["metadata"]["name"]))
    return frozenset(tried)


def _awaited(pods: Sequence[Object], node: str) -> str:
    """What a node that has not tried all images waits for, as far as that is known."""
    if any(pod_status.node_of(pod) == node for pod in pods):
        return f"images are got, and tried, by node {node}"
    why = next(filter(None, map(pod_status.unplaced, pods)), "nobody makes a pod for that")
    return f"images cannot be tried on node {node} yet: {why}"


def whole(pod: Object) -> bool:
    """Whether all images of a pod were tried, and are of use."""
    ends = [one.get("state", {}).get("terminated") or {} for one in _tries(pod)]
    return bool(ends) and all(end.get("exitCode") == 0 for end in ends)


def trouble(pod: Object) -> str:
    """What is wrong with an image, in one line; empty while nothing is."""
    node = pod_status.node_of(pod)
    images = {one["name"]: one for one in pod["spec"].get("initContainers", [])}
    for one in _tries(pod):
        image = images[one["name"]]["image"]
        policy = images[one["name"]]["imagePullPolicy"]
        state = one.get("state", {})
        waits = state.get("waiting") or {}
        end = state.get("terminated") or (one.get("lastState") or {}).get("terminated") or {}
        if end.get("exitCode"):
            said = str(end.get("message", "")).strip().splitlines()
            why = said[-1] if said else f"exit code {end['exitCode']}, {end.get('reason', '')}"
            return f"image {image} is of no use on node {node}: {why}"[:_LONGEST]
        if waits.get("reason") in pod_status.HOPELESS:
            return _not_there(image, node, policy, waits)
    return ""


def _not_there(image: str, node: str, policy: str, waits: Object) -> str:
    """Why a node has no such image, or cannot make a container of it."""
    load = "load it there with `dovetail kube image load FILE`"
    said = str(waits.get("message", ""))
    if waits["reason"] == "ErrImageNeverPull":
        return f"image {image} is not on node {node}, and pull_policy is {policy}; {load}"
    if "Image" not in waits["reason"]:
        return f"image {image} is of no use on node {node}: {_last(said)}"[:_LONGEST]
    if "no match for platform" in said:
        return f"image {image} has nothing for the architecture of node {node}"
    cure = next((words for sign, words in _CURES.items() if sign in said), "")
    return f"image {image} cannot be pulled by node {node}: {_last(said)}; {cure}or {load}"


def _last(said: str) -> str:
    """The cause at the end of what a runtime says, which repeats itself on the way to it."""
    text = re.sub(r"\s+", " ", said).strip().rstrip(":")
    cause = re.split(r'failed to [a-z ]+ (?:"[^"]*"|reference "[^"]*")?: ?', text)[-1]
    return (cause or text)[-200:]


def _tries(pod: Object) -> list[Object]:
    found: list[Object] = pod.get("status", {}).get("initContainerStatuses", [])
    return found
