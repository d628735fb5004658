# SPDX-License-Identifier: LGPL-3.0-or-later
"""The Kubernetes objects of a run: names, labels and manifests. Pure but for `folders`.

Inputs: a simulation, its requests, what its pods must see of the machine. Outputs: plain JSON.
Invariants: the same input gives the same names, so whatever was made can be found again; pods
have requests, and limits of CPU alone where asked for, so their class is Burstable; no secret is
in a command or variable.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import which
from typing import Any

from dovetail.core.errors import BadInput
from dovetail.core.protocol import Spec
from dovetail.executors import pods
from dovetail.executors.kubernetes.devices import NONE
from dovetail.executors.pods import staging
from dovetail.host import borrowed_python, install_paths
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
RANK_GROUP, AGENT, IMAGES = "rank-group", "agent", "images"
INDEX = "batch.kubernetes.io/job-completion-index"
JOB = "batch.kubernetes.io/job-name"
CONTAINER = "main"
HUB = "/run/dovetail/hub"
MACHINE = "/run/dovetail/machine"
"""Where an agent has the root folder of its node, to read."""
CGROUPS = "/sys/fs/cgroup"
ORPHAN = "DOVETAIL_ORPHAN_S"
AGENT_CPU = 20
"""Millicores that an agent asks for; it wakes four times a second."""
LEAST_MEMORY = 64 << 20
LEAST_LIMIT = 100
"""Millicores; with less a pod would take minutes to start, and to end."""
_PROGRAMS = ("/usr", "/bin", "/lib", "/lib64", "/etc", "/opt")
_KERNELS = ("/dev", "/proc", "/sys")
_PARTS = ("bin", "sbin", "libexec")
"""Folders of an installation that has its libraries beside them."""
_OWN = ("/tmp", "/var/tmp", "/run", pods.HOME, *_KERNELS)
"""Folders that each pod has for itself: it sees parts of the machine's, but none as a whole."""


@dataclass(frozen=True)
class Mount:
    """A directory of the machine, or a file, and what pods call it.

    `kind` is that of a hostPath volume: no pod starts where there is no such directory. Without one
    an empty one would be made.
    """

    source: str
    target: str
    fixed: bool  # it is read alone
    kind: str = ""


@dataclass(frozen=True)
class Folders:
    """Directories of the machine that pods see under the same names, some to write to.

    `borrowed` are seen elsewhere, as pairs of their names here and there; so is `stored`, to write
    to. Of the others `cases` and `output` are the run's, which may be copied to nodes that do not
    have them, `programs` those that its plan names, which are not, and `paths` the rest of where
    programs and libraries are looked for, which a node need not have.
    """

    read: tuple[str, ...]
    written: tuple[str, ...]
    borrowed: tuple[tuple[str, str], ...] = ()
    programs: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    output: str = ""
    stored: tuple[tuple[str, str], ...] = ()

    def mounts(self) -> list[Mount]:
        """All of them."""
        plain, there = Mount, "Directory"
        programs = _outermost(self.programs, self.paths)
        return [
            *(plain(name, name, True) for name in (*self.read, *self.paths)),
            *(plain(name, name, True, there) for name in (*programs, *self.cases)),
            *(plain(name, name, False) for name in self.written),
            *(plain(name, name, False, there) for name in filter(None, [self.output])),
            *(plain(source, target, True) for source, target in self.borrowed),
            *(plain(source, target, False, f"{there}OrCreate") for source, target in self.stored),
        ]

    def ours(self) -> Folders:
        """Those that Dovetail itself needs."""
        return Folders(self.read, self.written, self.borrowed)

    def without(self, paths: Iterable[str]) -> Folders:
        """Without some of `paths`."""
        return replace(self, paths=tuple(sorted({*self.paths} - {*paths})))

    def staged(self, store: str) -> Folders:
        """With the run's output in a store of each node, where cases are too.

        In a folder that is read alone nobody could make the output's, if the node has none.
        """
        paths = tuple(name for name in self.paths if not _inside(self.output, name))
        stored = ((store, self.output),)
        return replace(self, paths=paths, cases=(), output="", stored=stored)


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
    """What pods of simulations without an image see: programs, this package, cases, the output.

    And the installation of Flux whose command is in the folder `flux`, if one is given.
    """
    wanted = {sys.prefix, str(install_paths.PACKAGES)}
    wanted |= {str(Path(library).parent) for library in install_paths.libraries().values()}
    system = tuple(name for name in _PROGRAMS if os.path.isdir(name))
    ours = (*system, *_outermost(_here(wanted), (*system, *_KERNELS)))
    programs = {os.path.dirname(flux)} if flux else set()
    paths: set[str] = set()
    home = os.path.expanduser("~")
    shy = (*_OWN, home, os.path.realpath(home))
    lines: set[tuple[tuple[str, ...], str]] = set()
    specs = [spec for spec in specs if not spec.image]
    for spec in specs:
        environment = dict(spec.environment)
        found_by = command_line.found_by(environment)
        path = found_by["PATH"]
        paths |= {name for text in found_by.values() for name in text.split(os.pathsep)}
        named = {part for text in environment.values() for part in text.split(os.pathsep)}
        paths |= {_place(name, shy) for name in named if os.path.exists(name)}
        lines |= {(line, path) for line in commands(spec)}
    for line, path in lines:
        programs |= {os.path.dirname(name) for name in (*line, *_files(line[0], path))}
        for word in line:
            files = _files(word, path)
            paths |= {_place(name, shy) for name in (word, word.partition("=")[2], *files)}
            paths |= {_installation(name) for name in files}
    output = str(Path(run_directory).resolve())
    cases = _outermost({os.path.abspath(spec.case) for spec in specs}, (*ours, *_KERNELS))
    seen = (*ours, *cases, output, *_KERNELS)
    needed = _outermost(_here(programs), seen)
    others = _outermost(_here(paths, shy), (*seen, *needed))
    return Folders(ours, ("/dev/shm",), programs=needed, paths=others, cases=cases, output=output)


def commands(spec: Spec) -> list[tuple[str, ...]]:
    """The command lines that the plan has for a simulation, in words."""
    more = filter(None, (*spec.prepare, spec.write, spec.restart))
    return [spec.command, *map(command_line.split, more)]


def _files(word: str, path: str) -> set[str]:
    """The file of what may be a program's name, as it is found, and where links lead to from it."""
    found = which(word, path=path) or ""
    return {found, os.path.realpath(found)} if os.path.isabs(found) else set()


def _installation(program: str) -> str:
    """The folder in which a program has its libraries and data, by its own; empty if unknown."""
    top, name = os.path.split(os.path.dirname(program))
    return top if name in _PARTS else ""


def _place(name: str, own: Sequence[str]) -> str:
    """That folder, or the one which the file is in, or the file where that holds one of `own`."""
    folder = name if os.path.isdir(name) else os.path.dirname(name)
    return name if _holds(folder, own) else folder


def folders_of_image(specs: Iterable[Spec], run_directory: Path) -> Folders:
    """What pods see of the machine that run from an image: our programs, cases, the output.

    Ours have folders of their own, and Python is where no image has anything.
    """
    wanted = {str(install_paths.PACKAGES / "dovetail")}
    wanted |= {str(Path(library).parent) for library in install_paths.libraries().values()}
    wanted |= {sys.prefix} if sys.prefix != sys.base_prefix else set()
    ours = _outermost(wanted)
    cases = _outermost({os.path.abspath(spec.case) for spec in specs if spec.image}, ours)
    borrowed = tuple(borrowed_python.mounts())
    output = str(Path(run_directory).resolve())
    return Folders(ours, ("/dev/shm",), borrowed, cases=cases, output=output)


def _here(names: Iterable[str], own: Sequence[str] = _OWN) -> set[str]:
    """What there is of the names, if a volume may be called so and holds none of `own`."""
    found = {os.path.normpath(name) for name in names if os.path.isabs(name) and ":" not in name}
    return {name for name in found if os.path.exists(name) and not _holds(name, own)}


def _holds(name: str, others: Sequence[str]) -> bool:
    """Whether one of the others is this folder, or in it."""
    return name == "/" or any(_inside(other, name) for other in others)


def _outermost(names: Iterable[str], others: Sequence[str] = ()) -> tuple[str, ...]:
    """Those of the folders that are in none of the others, nor in one another."""
    found: list[str] = []
    for name in sorted(names):
        if not any(_inside(name, other) for other in (*others, *found)):
            found.append(name)
    return tuple(found)


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
    network: str = HOST,
    limit: int = 0,
    devices: Mapping[str, int] = NONE,
) -> Object:
    """One launch of a simulation: an Indexed Job with a pod per rank group.

    `seen` is of the simulation's image, if it has one.

    `sizes` in ranks, `requests` in millicores and `memory` in bytes, shape (groups,). The template
    has the mean request; each pod gets its own at admission, or right after. A `limit`, also in
    millicores, is that of all pods at birth, and must not be below any request. Each pod gets
    `devices`, extended resources. Nothing is tried
    again by the Job itself: whether a simulation runs twice is the controller's to decide.
    """
    labels = rank_group(run, spec, key)
    count = len(requests)
    words = f"--run {run} --node $(NODE_NAME) --simulation {key}"
    pod = _pod(
        "entrypoint",
        [*words.split(), *["--group", "$(RANK_GROUP)", "--uid", "$(POD_UID)"]],
        seen,
        {
            "NODE_NAME": "spec.nodeName",
            "POD_UID": "metadata.uid",
            "RANK_GROUP": f"metadata.labels['{INDEX}']",
        },
        cpu=max(1, round(sum(requests) / count)),
        memory=max(LEAST_MEMORY, *memory),
        grace=8,
        limit=limit,
        devices=devices,
        spec=spec,
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


def store_of(job: Object) -> str:
    """Where the pods of a Job that is there have copies of the run's folders; empty if nowhere."""
    volumes = job["spec"]["template"]["spec"].get("volumes", [])
    paths = [one.get("hostPath", {}).get("path", "") for one in volumes]
    return next((path for path in paths if path.startswith(staging.STORES)), "")


def rank_group(run: str, spec: Spec, key: str) -> dict[str, str]:
    """The labels of one launch of a simulation, and of its pods."""
    return {RUN: run, SIMULATION: spec.name, KEY: key, PART: RANK_GROUP}


def agents(run: str, seen: Folders) -> Object:
    """The run's agent on each node: it looks at folders there, and writes to where stores are."""
    labels, stores = {RUN: run, PART: AGENT}, os.path.dirname(staging.STORES)
    pod = _pod(
        "agent",
        [
            "--run",
            run,
            "--node",
            "$(NODE_NAME)",
            "--credentials",
            HUB,
            "--cgroups",
            CGROUPS,
            "--machine",
            MACHINE,
        ],
        replace(
            seen.ours(),
            read=(*seen.read, CGROUPS),
            borrowed=(*seen.borrowed, ("/", MACHINE)),
            stored=((stores, MACHINE + stores),),
        ),
        {"NODE_NAME": "spec.nodeName"},
        cpu=AGENT_CPU,
        memory=LEAST_MEMORY,
        grace=5,
    )
    pod["priorityClassName"] = "dovetail-service"
    pod["shareProcessNamespace"] = True  # process 1 would not end by a signal before it is ready
    pod["volumes"].append({"name": "hub", "secret": {"secretName": hub_secret(run)}})
    pod["containers"][0]["volumeMounts"].append({"name": "hub", "mountPath": HUB, "readOnly": True})
    return _on_each_node(f"dovetail-agent-{run}", labels, pod)


def image_check(
    run: str, word: str, asked: Mapping[str, str], specs: Sequence[Spec], seen: Folders
) -> Object:
    """A pod on each node that tries the images of these simulations, one after the other.

    `asked` is what to try of each image; its container ends well, or with what is wrong. Then the
    pod rests. `word` is a new one each time.
    """
    labels = {RUN: run, PART: IMAGES, KEY: word}
    of = {spec.image: spec for spec in specs}
    pod: Object = {}
    tries = []
    for number, (image, words) in enumerate(asked.items()):
        pod = _pod(
            "image_check",
            [words],
            seen.ours(),
            {},
            cpu=1,
            memory=LEAST_MEMORY,
            grace=1,
            spec=of[image],
        )
        tries.append({**pod["containers"][0], "name": f"image-{number}"})
    rest = {name: tries[0][name] for name in ("resources", "resizePolicy")}
    rest.update(name=CONTAINER, image=IMAGE, imagePullPolicy=pull(IMAGE))
    pod.update(initContainers=tries, containers=[rest], priorityClassName="dovetail-service")
    secrets = sorted({spec.pull_secret for spec in specs} - {""})
    pod["imagePullSecrets"] = [{"name": name} for name in secrets]
    return _on_each_node(f"dovetail-images-{run}-{word}", labels, pod)


def _on_each_node(name: str, labels: Mapping[str, str], pod: Object) -> Object:
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name, "labels": labels},
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


def own(parts: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Of a pod's containers, or what it says of each, ours: a site may have added others.

    An empty one where it is not told yet.
    """
    return next((one for one in parts if one.get("name") == CONTAINER), {})


def resize(millicores: int, limit: int = 0) -> Object:
    """The body of a patch of pods/resize: the CPU request, and the limit of pods that have one."""
    part = {"name": CONTAINER, "resources": {"requests": {"cpu": f"{millicores}m"}, **cap(limit)}}
    return {"spec": {"containers": [part]}}


def memory_resize(memory: int) -> Object:
    """The body of a patch of pods/resize: the memory request, bytes."""
    part = {"name": CONTAINER, "resources": {"requests": {"memory": str(memory)}}}
    return {"spec": {"containers": [part]}}


def cap(limit: int, devices: Mapping[str, int] = NONE) -> Object:
    """A CPU limit in millicores, if any, and devices, as a part of a container's resources.

    Of a device the limit is the request as well.
    """
    limits = {**({"cpu": f"{limit}m"} if limit else {}), **{k: str(n) for k, n in devices.items()}}
    return {"limits": limits} if limits else {}


def orphan_limit() -> dict[str, str]:
    """The user's wish for how long pods wait for a controller, as an environment."""
    wish = os.environ.get(ORPHAN)
    if not wish:
        return {}
    with contextlib.suppress(ValueError):
        if float(wish) > 0.0:
            return {ORPHAN: wish}
    raise BadInput(f"{ORPHAN}: {wish!r} is not a number of seconds; 3600 would be an hour")


def pull(image: str) -> str:
    """Ours is on the nodes or nowhere."""
    return "Never" if image == IMAGE else "IfNotPresent"


def _pod(
    module: str,
    words: Sequence[str],
    seen: Folders,
    fields: Mapping[str, str],
    *,
    cpu: int,
    memory: int,
    grace: int,
    limit: int = 0,
    devices: Mapping[str, int] = NONE,
    spec: Spec | None = None,
) -> Object:
    """A pod that runs one module of `pods` with the machine's own Python.

    With the image of `spec`, if that has one: PATH is then the image's own, and the user is the
    machine's, whose files are read and written, whatever the image says.
    """
    image = spec.image if spec else ""
    mounts = seen.mounts()
    variables: list[Object] = [
        {"name": k, "valueFrom": {"fieldRef": {"fieldPath": v}}} for k, v in fields.items()
    ]
    own = {**({} if image else {"PATH": pods.PATH}), **orphan_limit()}
    variables += [{"name": name, "value": value} for name, value in own.items()]
    python = borrowed_python.words() if image else (borrowed_python.PYTHON,)
    container = {
        "name": CONTAINER,
        "image": image or IMAGE,
        "imagePullPolicy": spec.pull_policy if spec and image else pull(IMAGE),
        "command": [*pods.command(f"executors.pods.{module}", python), *words],
        "env": variables,
        "resources": {"requests": {"cpu": f"{cpu}m", "memory": str(memory)}, **cap(limit, devices)},
        # So that a resize never restarts anything; also what the API assumes if nothing is said.
        "resizePolicy": [
            {"resourceName": "cpu", "restartPolicy": "NotRequired"},
            {"resourceName": "memory", "restartPolicy": "NotRequired"},
        ],
        "volumeMounts": [
            {"name": f"v{i}", "mountPath": one.target, **({"readOnly": True} if one.fixed else {})}
            for i, one in enumerate(mounts)
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    pod = {
        # Nothing between MPI and the network; and names resolve as they do on the machine.
        "hostNetwork": True,
        "dnsPolicy": "Default",
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": grace,
        "containers": [container],
        "volumes": [
            {
                "name": f"v{i}",
                "hostPath": {"path": one.source, **({"type": one.kind} if one.kind else {})},
            }
            for i, one in enumerate(mounts)
        ],
    }
    if image:
        container["securityContext"] = {"runAsUser": 0, "runAsGroup": 0}
    if spec and spec.pull_secret:
        pod["imagePullSecrets"] = [{"name": spec.pull_secret}]
    return pod
