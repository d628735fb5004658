# SPDX-License-Identifier: LGPL-3.0-or-later
"""A run's place on a cluster: access, what must be installed, one controller, its agents.

Inputs: a kubeconfig, a run's directory. Outputs: a `Session` for the executor. Everything here
waits for the API, so it is for the time before a run and after it.

Invariants: nothing is created before the cluster, the access and the lease were found good; what
`close` cannot remove the next run removes; a second controller is refused for as long as the
first renews its lease, whatever the clocks of both machines say.
"""

from __future__ import annotations

import contextlib
import queue
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from dovetail.core.errors import BadInput, WorkFailed
from dovetail.core.protocol import Spec
from dovetail.executors.kubernetes import (
    identity,
    images,
    manifests,
    placement,
    pod_status,
    transfers,
)
from dovetail.executors.kubernetes.agent_hub import Hub
from dovetail.executors.kubernetes.api import Api, NotFound, Object, Refused, Unreachable
from dovetail.executors.kubernetes.background_calls import within
from dovetail.executors.kubernetes.lease import Lease
from dovetail.executors.kubernetes.manifests import (
    JOB,
    NAMESPACE,
    PART,
    RANK_GROUP,
    RUN,
    SIMULATION,
    path,
)
from dovetail.executors.kubernetes.upkeep import Upkeep
from dovetail.executors.kubernetes.workload_kinds import Launcher
from dovetail.executors.pods import staging
from dovetail.host import install_paths

LAST = 3.0
"""Seconds that an end takes at most once the user has asked for it twice."""
ANSWERS = 30.0
"""Seconds in which each node on another machine must have said which folders it sees."""
SOON = 10.0
"""Seconds in which a cluster makes what belongs to a new namespace."""
_DENIED = re.compile("denied|violates PodSecurity|must specify")
"""By a policy, by a site's own admission, by a quota of what no pod of ours names."""
_NOT_YET = re.compile("service account|PriorityClass")
_NEEDS = (
    ("create", "batch", "jobs", ""),
    ("create", "apps", "daemonsets", ""),
    ("create", "", "secrets", ""),
    ("patch", "", "pods", "resize"),
    ("update", "coordination.k8s.io", "leases", ""),
)


def connect(kubeconfig: Path) -> Api:
    """The cluster, found to be there, new enough and open to us; else BadInput."""
    api = Api(kubeconfig)
    api.check()
    return api


def look(api: Api, run: str = "") -> tuple[list[Object], list[Object]]:
    """All nodes, and the pods of others, which take room from simulations; see `foreign`."""
    try:
        nodes = api.get(path("Node"))["items"]
        pods = api.get(path("Pod", namespace=""), labelSelector=f"{RUN}!={run}")["items"]
    except (Refused, Unreachable) as error:
        raise BadInput(f"{api.path}: cannot list nodes and pods: {error}; {hint()}") from None
    return nodes, [pod for pod in pods if foreign(pod, run)]


def foreign(pod: Object, run: str) -> bool:
    """Whether a pod is not of this run, or with no run given, of none at all."""
    of = pod["metadata"].get("labels", {}).get(RUN, "")
    return pod["metadata"]["namespace"] != NAMESPACE or not of or bool(run and of != run)


def hint() -> str:
    """Who gives access, and how, in words."""
    folder = install_paths.shared("operator-manifests")
    return f"an administrator gives access with: kubectl apply -k {folder}"


def install(api: Api, more: Iterable[tuple[str, str, str, str]] = ()) -> list[str]:
    """Create what is missing of operator-manifests; BadInput where that is for somebody else.

    Returns what was made. What is there stays as it is: a site may have changed it. A server that
    is too old for admission policies goes without. `more` are verb, group, resource and its part
    that our user must be allowed besides.
    """
    made = []
    try:
        for thing in wanted(api):
            kind, meta = thing["kind"], thing["metadata"]
            inside = meta.get("namespace", NAMESPACE)
            try:
                api.get(path(kind, meta["name"], inside))
                continue
            except NotFound:
                pass
            except Refused as error:
                if error.status == 403:  # whoever may not look relies on an administrator
                    continue
                raise
            api.create(path(kind, namespace=inside), thing)
            made.append(f"{kind} {meta['name']}")
    except (Refused, Unreachable) as error:
        raise BadInput(f"{api.path}: cannot be set up for simulations: {error}; {hint()}") from None
    for verb, group, resource, part in (*_NEEDS, *more):
        if not _allowed(api, verb, group, resource, part):
            what = "/".join(filter(None, (resource, part)))
            raise BadInput(
                f"{api.path}: its user may not {verb} {what} in namespace {NAMESPACE}; {hint()}"
            )
    return made


def _allowed(api: Api, verb: str, group: str, resource: str, part: str) -> bool:
    asked = {"namespace": NAMESPACE, "verb": verb, "group": group, "resource": resource,
             "subresource": part}  # fmt: skip
    review = {
        "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
        "metadata": {}, "spec": {"resourceAttributes": asked},
    }  # fmt: skip
    try:
        found = api.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
    except (Refused, Unreachable) as error:
        raise BadInput(f"{api.path}: access cannot be checked: {error}") from None
    return bool(found["status"].get("allowed"))


def takes(api: Api, job: Object) -> None:
    """BadInput where the cluster would refuse the pods of this Job; nothing is made.

    That is asked in our own name, so it stays unknown where only Jobs may be created.
    """
    if not _allowed(api, "create", "", "pods", ""):
        return
    template = job["spec"]["template"]
    name = {"generateName": "dovetail-", "namespace": NAMESPACE}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        **template,
        "metadata": {**template["metadata"], **name},
    }
    until = time.monotonic() + SOON
    while time.monotonic() < until:
        try:
            api.create(path("Pod"), pod, dryRun="All")
            return
        except Refused as error:
            if _DENIED.search(str(error)):
                raise BadInput(f"{api.path}: takes no pods of simulations: {error}") from None
            if not _NOT_YET.search(str(error)):
                return  # it may wait for room, and is told what else there is when it runs
        threading.Event().wait(0.2)


def wanted(api: Api) -> list[Object]:
    """The objects of operator-manifests that the server knows the kinds of."""
    without = manifests.POLICIES - api.kinds(manifests.ADMISSION)
    return [thing for thing in installed() if thing["kind"] not in without]


def installed() -> Iterable[Object]:
    """The objects of operator-manifests, in their order."""
    top = install_paths.shared("operator-manifests")
    names = yaml.safe_load((top / "kustomization.yaml").read_text())["resources"]
    for name in names:
        yield from yaml.safe_load_all((top / name).read_text())


class Session:
    """One run on one cluster: its lease, hub, agents and names.

    `jobs` and `pods` are what an earlier controller of the same run left there. `store` is where
    nodes have copies of the run's folders, once one was seen that does not see these. The nodes
    that were `tried` have the plan's images.
    """

    def __init__(
        self, api: Api, directory: Path, specs: Sequence[Spec], resume: bool, network: str = "",
        launcher: str = "",
    ) -> None:  # fmt: skip
        """Set everything up, or raise BadInput and leave nothing.

        Pods that are made are on `network`; if empty, on that of the run so far, or their nodes'.
        They come by objects of the kind `launcher`; if empty, as `workload_kinds` finds best.
        """
        self.api = api
        own = directory / identity.FOLDER
        kubeconfig = str(api.path.absolute())
        kept = identity.begin(own, resume, network, kubeconfig)
        self.run, network = kept.run, kept.network
        self._own, self.resumed = own, resume
        with contextlib.ExitStack() as undone:
            undone.callback(self._forget, resume)
            before = kept.launcher
            if before and launcher and launcher != before:
                raise BadInput(f"{own}: the run's simulations are {before}s, and stay so")
            kind = before or launcher
            self.launcher = Launcher(api, self.run, specs, directory, network, kind)
            self.made = install(api, self.launcher.needs)
            self.news: queue.SimpleQueue[str] = queue.SimpleQueue()
            self.lease = Lease(api, self.run, self.news.put)
            undone.pop_all()
        self.hub: Hub | None = None
        self.upkeep: Upkeep | None = None
        self.store = ""
        self._told: dict[str, list[str]] = {}  # what a node that is left out does not see
        self._programs: dict[str, str] = {}  # folders of the plan's
        self._paths: dict[str, str] = {}  # and what nodes need not have
        try:
            self._sweep()
            if not before:
                self.launcher.settle()
            if self.launcher.kind == "Job":
                takes(api, self.launcher.body(specs[0], "dry", [1], [1], [0], 0, {}))
            self.tried = images.check(api, self.run, specs, self.launcher.seen_in_images, _say)
            identity.Identity(self.run, network, self.launcher.kind, kubeconfig).keep(own)
            self.hub = Hub(_own_address(api.server), own)
            things = [*wanted(api), *self._start_agents(self.hub), *self.launcher.prepare()]
            self._look_at_folders(self.hub, own, specs)
            self.upkeep = Upkeep(api, things, self.news.put)
            label = f"{RUN}={self.run}"
            self.jobs: list[Object] = api.get(path("Job"), labelSelector=label)["items"]
            self.pods: list[Object] = api.get(path("Pod"), labelSelector=label)["items"]
        except (Refused, Unreachable) as error:
            self.close(leave=resume)
            raise WorkFailed(f"{api.path}: the run cannot be set up: {error}") from None
        except BaseException as error:
            self.give_up(error, leave=resume)
            raise

    def _forget(self, leave: bool) -> None:
        """Remove what is known of the run here, unless it is to be resumed."""
        if not leave:
            shutil.rmtree(self._own, ignore_errors=True)

    def give_up(self, error: BaseException, leave: bool) -> None:
        """Close it because of an error: of an impatient user's interrupt, within seconds."""
        until = time.monotonic() + LAST
        hurried = isinstance(error, KeyboardInterrupt)
        within(lambda: self.close(leave), lambda: hurried and time.monotonic() > until)

    @property
    def lost(self) -> str:
        """Why the run cannot go on here; empty while it can."""
        return self.lease.lost or (self.upkeep.lost if self.upkeep else "")

    def _sweep(self) -> None:
        """Remove what runs left that nobody can resume any more: all, once nobody has the lease."""
        others = f"{RUN},{RUN}!={self.run}"
        if self.lease.left:
            label = f"{others},{manifests.PART}={manifests.RANK_GROUP}"
            pods = self.api.get(path("Pod"), labelSelector=label)["items"]
            if any(pod.get("status", {}).get("phase") == "Running" for pod in pods):
                return  # of a run that died: they go on for a time, and it may be resumed after us
        for kind in (*self.launcher.kinds, "DaemonSet", "Secret"):
            for thing in self.api.get(path(kind), labelSelector=others)["items"]:
                self.api.delete(path(kind, thing["metadata"]["name"]))

    def _start_agents(self, hub: Hub) -> list[Object]:
        """Make what agents need, and them; returns it."""
        known = {**hub.credentials(), "server": self.api.server}
        secret = manifests.secret(self.run, known)
        requests: Object = {"apiVersion": "v1", "kind": "ConfigMap",
                            "metadata": {"name": manifests.REQUESTS}}  # fmt: skip
        things = [requests, secret, manifests.agents(self.run, self.launcher.seen)]
        for thing in things:
            try:
                self.api.create(path(thing["kind"]), thing)
            except Refused as error:
                if error.reason != "AlreadyExists":
                    raise
        self.api.patch(
            path("Secret", secret["metadata"]["name"]), {"stringData": secret["stringData"]}
        )
        return things

    def _look_at_folders(self, hub: Hub, own: Path, specs: Sequence[Spec]) -> None:
        """Find out whether all nodes see the run's folders, and have copies made if not."""
        seen = [self.launcher.seen]
        seen += [self.launcher.seen_in_images] if any(spec.image for spec in specs) else []
        self._programs = {name: "" for one in seen for name in one.programs}
        self._programs.update({self.launcher.flux: ""} if self.launcher.flux else {})
        self._paths = {name: "" for one in seen for name in one.paths}
        hub.look({**transfers.marks(seen, own), **self._programs})
        unseen = self._answers(hub)
        for names in unseen.values():
            self.launcher.seen = self.launcher.seen.without(names)
        unseen = {node: left for node, names in unseen.items() if (left := self._needed(names))}
        flux = self.launcher.flux
        for node, names in unseen.items():
            for name in names:
                if name in (flux, str(Path(flux).parent)):
                    raise BadInput(
                        f"node {node} does not see the folder {name}, where the Flux is that "
                        "MiniClusters need; have it there too, or choose --launcher job"
                    )
                if name in self._programs:
                    raise BadInput(
                        f"node {node} does not see the folder {name}, where programs of the plan "
                        "are; have them there too, or in the case, which is copied"
                    )
        for node, names in list(unseen.items())[:1]:
            self._copy_from_now_on(hub, node, names[0])
            self._answers(hub)

    def _needed(self, names: Iterable[str]) -> list[str]:
        """The folders that a node cannot do without."""
        return [name for name in names if name not in self._paths]

    def _copy_from_now_on(self, hub: Hub, node: str, name: str) -> None:
        """Have copies of the run's folders on nodes, since one does not see them."""
        self.store = staging.STORES + self.run
        hub.look({**self._programs, **self._paths}, self.store)
        self.news.put(
            f"node {node} does not see {_shown(name)}: cases are copied to the nodes, and results "
            "back, meanwhile and at the end"
        )

    def _answers(self, hub: Hub) -> dict[str, list[str]]:
        """The folders that nodes on other machines do not see, of those that do not see all.

        Nodes that are this machine see them, so nobody waits for them.
        """
        until = time.monotonic() + ANSWERS
        while True:
            nodes = self.api.get(path("Node"))["items"]
            far = {one["metadata"]["name"] for one in nodes
                   if placement.usable(one) and not transfers.is_here(one)}  # fmt: skip
            unseen = hub.unseen()
            late = sorted(far - unseen.keys())
            if not late or time.monotonic() > until:
                for name in late:
                    self.news.put(f"node {name} takes no simulations until its agent answers")
                return {name: unseen[name] for name in sorted(far) if unseen.get(name)}
            threading.Event().wait(0.1)

    def left_out(self, nodes: Iterable[Object]) -> frozenset[str]:
        """The nodes on other machines that cannot take simulations; the user is told why."""
        assert self.hub is not None
        unseen, found = self.hub.unseen(), set()
        for node in nodes:
            name = node["metadata"]["name"]
            missing = self._needed(unseen[name]) if name in unseen else None
            self.launcher.seen = self.launcher.seen.without(unseen.get(name, ()))
            if missing == [] or transfers.is_here(node):
                continue
            found.add(name)
            if missing is None or self._told.get(name) == missing:
                continue  # its agent has not answered yet
            self._told[name] = missing
            if not self.store and not self._programs.keys() & {*missing}:
                self._copy_from_now_on(self.hub, name, missing[0])
            else:
                why = _shown(missing[0])
                self.news.put(f"node {name} takes no simulations: it does not see {why}")
        return frozenset(found)

    def alive(self) -> dict[str, Object]:
        """The Jobs of this run, by simulation, all of whose pods are there and run."""
        found = {}
        for job in self.jobs:
            meta = job["metadata"]
            pods = [pod for pod in self.pods if pod_status.job_of(pod) == meta["name"]]
            running = [
                pod for pod in pods
                if pod["status"].get("phase") == "Running"
                and not pod["metadata"].get("deletionTimestamp")
            ]  # fmt: skip
            if not meta.get("deletionTimestamp") and len(running) == job["spec"]["completions"]:
                found[meta["labels"][SIMULATION]] = job
        return found

    def discard(self, keep: set[str]) -> None:
        """Remove the run's other Jobs and pods, and wait until they are gone; or WorkFailed."""
        try:
            for kind in self.launcher.kinds:
                for one in self.api.get(path(kind), labelSelector=f"{RUN}={self.run}")["items"]:
                    if one["metadata"]["name"] not in keep:
                        self.api.delete(path(kind, one["metadata"]["name"]))
        except (Refused, Unreachable) as error:
            raise WorkFailed(f"{self.api.path}: the run cannot be resumed: {error}") from None
        names = ",".join(sorted(keep))
        label = f"{RUN}={self.run},{PART}={RANK_GROUP}"
        left = self._await_gone(label + (f",{JOB} notin ({names})" if names else ""))
        if left:
            raise WorkFailed(
                f"{self.api.path}: cannot be removed, so nothing is started: {left[0]}"
            )

    def close(self, leave: bool = False) -> list[str]:
        """Remove everything of the run, or with `leave` only let go; returns what could not be."""
        self.api.end()  # which has long been silent where a run cannot be set up
        if self.upkeep is not None:
            self.upkeep.stop()
        left = []
        if not leave:
            label = f"{RUN}={self.run}"
            for kind in (*self.launcher.kinds, "DaemonSet", "Secret"):
                try:
                    for thing in self.api.get(path(kind), labelSelector=label)["items"]:
                        self.api.delete(path(kind, thing["metadata"]["name"]))
                except (Refused, Unreachable) as error:
                    left.append(f"{kind}s: {error}")
            left += self._await_gone(label)
            with contextlib.suppress(Refused, Unreachable):
                self.api.patch(path("ConfigMap", manifests.REQUESTS), {"data": None})
        if self.hub is not None:
            self.hub.close(forget=not leave and not left)
        else:
            self._forget(leave or bool(left))
        self.lease.release()
        self.api.close()
        return left

    def _await_gone(self, label: str) -> list[str]:
        """Wait for the run's pods to go; after a while as if their nodes were lost."""
        begun = time.monotonic()
        forced = False
        while True:
            waited = time.monotonic() - begun
            try:
                late = waited > (60.0 if forced else 20.0)
                limit = "0" if late else "1"  # all of them, or whether there is any
                pods = self.api.get(path("Pod"), labelSelector=label, limit=limit)["items"]
            except (Refused, Unreachable) as error:
                return [f"pods: {error}"]
            if not pods or waited > 60.0:
                return [f"pod {one['metadata']['name']}" for one in pods]
            if waited > 20.0 and not forced:
                forced = True
                for one in pods:
                    with contextlib.suppress(Refused, Unreachable):
                        self.api.delete(path("Pod", one["metadata"]["name"]), grace=0)
            threading.Event().wait(0.1)


def _say(line: str) -> None:
    """Before the run itself can tell anything."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _shown(folder: str) -> str:
    """A folder that a node does not see, as the user knows it."""
    return str(Path(folder).parents[1]) if Path(folder).name == transfers.PROBE else folder


def _own_address(server: str) -> str:
    """This machine's address on the way to the API server, which nodes reach too."""
    where = urlsplit(server)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((where.hostname or "127.0.0.1", where.port or 443))
            return str(probe.getsockname()[0])
        except OSError as error:
            raise BadInput(f"{server}: cannot be reached: {error.strerror}") from None
