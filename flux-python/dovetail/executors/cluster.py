# SPDX-License-Identifier: LGPL-3.0-or-later
"""A run's place on a cluster: access, what must be installed, one controller, its agents (step 4).

Inputs: a kubeconfig, a run's directory. Outputs: a `Session` for the executor. Everything here
waits for the API, so it is for the time before a run and after it.

Invariants: nothing is created before the cluster, the access and the lease were found good; what
`close` cannot remove the next run removes; a second controller is refused for as long as the
first renews its lease, whatever the clocks of both machines say.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from dovetail import manifests
from dovetail.core import Spec
from dovetail.errors import BadInput, WorkFailed
from dovetail.kubeapi import Api, NotFound, Object, Refused, Unreachable
from dovetail.manifests import KEY, NAMESPACE, PART, RANK_GROUP, RUN, SIMULATION, path
from dovetail.pods.hub import Hub
from dovetail.usernetes.state import write_private

FOLDER = "kubernetes"
"""Below the run's directory, private: the run's id and what agents trust it by."""
LEASE_S, RENEW_S = 15, 4.0
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


def look(api: Api) -> tuple[list[Object], list[Object]]:
    """All nodes, and the pods of others, which take room from simulations."""
    try:
        nodes = api.get(path("Node"))["items"]
        pods = api.get(path("Pod", namespace=""))["items"]
    except (Refused, Unreachable) as error:
        raise BadInput(f"{api.path}: cannot list nodes and pods: {error}; {_hint()}") from None
    return nodes, list(filter(foreign, pods))


def foreign(pod: Object) -> bool:
    """Whether a pod is neither a rank group nor an agent of ours."""
    meta = pod["metadata"]
    return meta["namespace"] != NAMESPACE or RUN not in meta.get("labels", {})


def folder() -> Path:
    """`operator-manifests`, in the checkout or where it was installed."""
    here = Path(__file__).resolve()
    choices = [
        here.parents[3] / "operator-manifests",
        # PREFIX/lib/python3.x/site-packages/dovetail beside PREFIX/share
        *(up / "share/dovetail/operator-manifests" for up in here.parents),
    ]
    for choice in choices:
        if (choice / "kustomization.yaml").exists():
            return choice
    raise BadInput("operator-manifests/ was not found beside the installation of dovetail")


def _hint() -> str:
    return f"an administrator gives access with: kubectl apply -k {folder()}"


def install(api: Api) -> list[str]:
    """Create what is missing of operator-manifests; BadInput where that is for somebody else.

    Returns what was made. What is there stays as it is: a site may have changed it.
    """
    made = []
    try:
        for thing in installed():
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
        raise BadInput(
            f"{api.path}: cannot be set up for simulations: {error}; {_hint()}"
        ) from None
    for verb, group, resource, part in _NEEDS:
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
        if not found["status"].get("allowed"):
            what = "/".join(filter(None, (resource, part)))
            raise BadInput(
                f"{api.path}: its user may not {verb} {what} in namespace {NAMESPACE}; {_hint()}"
            )
    return made


def installed() -> Iterable[Object]:
    """The objects of operator-manifests, in their order."""
    top = folder()
    names = yaml.safe_load((top / "kustomization.yaml").read_text())["resources"]
    for name in names:
        yield from yaml.safe_load_all((top / name).read_text())


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Lease:
    """The right to control simulations in the namespace, renewed by a thread until `release`.

    `lost` says why we have it no more, if so.
    """

    def __init__(self, api: Api, run: str) -> None:
        """Take it; BadInput if another controller has it."""
        self._api = api
        self._holder = f"{run} {socket.gethostname()} {os.getpid()}"
        self._path = path("Lease", "dovetail-controller")
        self._end = threading.Event()
        self.lost = ""
        self.previous = ""  # who had it and has not let go of it
        self._held = self._take(run)
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def _take(self, run: str) -> Object:
        body = manifests.lease(self._holder, _now(), LEASE_S)
        try:
            try:
                found = self._api.get(self._path)
            except NotFound:
                return self._api.create(path("Lease"), body)
            holder = found["spec"].get("holderIdentity", "")
            self.previous = holder
            if holder.split(" ")[0] != run:  # our own run is known dead: its directory is locked
                self._await_silence(found, holder)
            body["metadata"]["resourceVersion"] = found["metadata"]["resourceVersion"]
            return self._api.call("PUT", self._path, body, patience=0.0)
        except (Refused, Unreachable) as error:
            raise BadInput(
                f"{self._api.path}: another controller is starting there, or: {error}"
            ) from None

    def _await_silence(self, found: Object, holder: str) -> None:
        """Wait until the lease has not been renewed for its duration, by our own clock."""
        until = time.monotonic() + LEASE_S
        while time.monotonic() < until:
            self._end.wait(0.5)
            with contextlib.suppress(NotFound):
                now = self._api.get(self._path)["spec"].get("renewTime")
                if now != found["spec"].get("renewTime"):
                    run, host, pid = [*holder.split(" "), "?", "?"][:3]
                    raise BadInput(
                        f"{self._api.path}: this cluster is used by run {run} on {host} (process "
                        f"{pid}); let it end first"
                    )

    def _keep(self) -> None:
        while not self._end.wait(RENEW_S):
            self._held["spec"]["renewTime"] = _now()
            try:
                self._held = self._api.call("PUT", self._path, self._held, patience=0.0)
            except (Refused, Unreachable):
                self._look()

    def _look(self) -> None:
        """A renewal failed: because nobody answers, or because it is another's now?"""
        with contextlib.suppress(Refused, Unreachable):
            found = self._api.get(self._path, patience=0.0)
            holder = found["spec"].get("holderIdentity", "")
            if holder == self._holder:
                self._held = found
            else:
                self.lost = f"another controller has taken the cluster over: {holder}"
                self._end.set()

    def release(self) -> None:
        """Let the next one have it at once."""
        self._end.set()
        self._thread.join()
        if not self.lost:
            with contextlib.suppress(Refused, Unreachable):
                self._api.delete(self._path, patience=3.0)


class Session:
    """One run on one cluster: its lease, hub, agents and names.

    `jobs` and `pods` are what an earlier controller of the same run left there.
    """

    def __init__(self, api: Api, directory: Path, specs: Iterable[Spec], resume: bool) -> None:
        """Set everything up, or raise BadInput and leave nothing."""
        self.api = api
        own = directory / FOLDER
        self.run = _identity(own, resume)
        self.seen = manifests.folders(specs, directory)
        self.resumed = resume
        self.made = install(api)
        self.lease = Lease(api, self.run)
        self.hub: Hub | None = None
        try:
            self._sweep()
            self.hub = Hub(_own_address(api.server), own)
            self._start_agents(self.hub)
            label = f"{RUN}={self.run}"
            self.jobs: list[Object] = api.get(path("Job"), labelSelector=label)["items"]
            self.pods: list[Object] = api.get(path("Pod"), labelSelector=label)["items"]
        except (Refused, Unreachable) as error:
            self.close(leave=resume)
            raise WorkFailed(f"{api.path}: the run cannot be set up: {error}") from None
        except BaseException:
            self.close(leave=resume)
            raise

    def _sweep(self) -> None:
        """Remove what runs left that nobody can resume any more: all, once nobody has the lease."""
        others = f"{RUN},{RUN}!={self.run}"
        if self.lease.previous and self.lease.previous.split(" ")[0] != self.run:
            return  # it died lately: its simulations go on, and it may be resumed after us
        for kind in ("Job", "DaemonSet", "Secret"):
            for thing in self.api.get(path(kind), labelSelector=others)["items"]:
                self.api.delete(path(kind, thing["metadata"]["name"]))

    def _start_agents(self, hub: Hub) -> None:
        secret = manifests.secret(self.run, hub.credentials())
        requests = {"apiVersion": "v1", "kind": "ConfigMap",
                    "metadata": {"name": manifests.REQUESTS}}  # fmt: skip
        for thing in (requests, secret, manifests.agents(self.run, self.seen)):
            try:
                self.api.create(path(thing["kind"]), thing)
            except Refused as error:
                if error.reason != "AlreadyExists":
                    raise
        self.api.patch(
            path("Secret", secret["metadata"]["name"]), {"stringData": secret["stringData"]}
        )

    def alive(self) -> dict[str, Object]:
        """The Jobs of this run, by simulation, all of whose pods are there and run."""
        found = {}
        for job in self.jobs:
            meta = job["metadata"]
            key = meta["labels"][KEY]
            pods = [pod for pod in self.pods if pod["metadata"]["labels"].get(KEY) == key]
            running = [
                pod for pod in pods
                if pod["status"].get("phase") == "Running"
                and not pod["metadata"].get("deletionTimestamp")
            ]  # fmt: skip
            if not meta.get("deletionTimestamp") and len(running) == job["spec"]["completions"]:
                found[meta["labels"][SIMULATION]] = job
        return found

    def discard(self, keep: set[str]) -> None:
        """Remove the run's other Jobs and pods, and wait until they are gone."""
        for job in self.jobs:
            if job["metadata"]["labels"][KEY] not in keep:
                self.api.delete(path("Job", job["metadata"]["name"]))
        names = ",".join(sorted(keep))
        label = f"{RUN}={self.run},{PART}={RANK_GROUP}"
        left = self._await_gone(label + (f",{KEY} notin ({names})" if names else ""))
        if left:
            raise WorkFailed(
                f"{self.api.path}: cannot be removed, so nothing is started: {left[0]}"
            )

    def close(self, leave: bool = False) -> list[str]:
        """Remove everything of the run, or with `leave` only let go; returns what could not be."""
        left = []
        if not leave:
            label = f"{RUN}={self.run}"
            for kind in ("Job", "DaemonSet", "Secret"):
                try:
                    for thing in self.api.get(path(kind), labelSelector=label)["items"]:
                        self.api.delete(path(kind, thing["metadata"]["name"]))
                except (Refused, Unreachable) as error:
                    left.append(f"{kind}s: {error}")
            left += self._await_gone(label)
        if self.hub is not None:
            self.hub.close(forget=not leave)
        self.lease.release()
        self.api.close()
        return left

    def _await_gone(self, label: str) -> list[str]:
        """Wait for the run's pods to go; after a while as if their nodes were lost."""
        begun = time.monotonic()
        forced = False
        while True:
            try:
                pods = self.api.get(path("Pod"), labelSelector=label)["items"]
            except (Refused, Unreachable) as error:
                return [f"pods: {error}"]
            waited = time.monotonic() - begun
            if not pods or waited > 60.0:
                return [f"pod {one['metadata']['name']}" for one in pods]
            if waited > 20.0 and not forced:
                forced = True
                for one in pods:
                    with contextlib.suppress(Refused, Unreachable):
                        self.api.delete(path("Pod", one["metadata"]["name"]), grace=0)
            threading.Event().wait(0.1)


def _identity(own: Path, resume: bool) -> str:
    """The run's id: kept in its directory for whoever takes it up again."""
    file = own / "run.json"
    if resume and file.exists():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return str(json.loads(file.read_text())["run"])
        raise BadInput(f"{file}: is damaged; the run cannot be taken up again on a cluster")
    run = secrets.token_hex(3)
    own.mkdir(mode=0o700, exist_ok=True)
    write_private(file, json.dumps({"run": run}) + "\n")
    return run


def _own_address(server: str) -> str:
    """This machine's address on the way to the API server, which nodes reach too."""
    where = urlsplit(server)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((where.hostname or "127.0.0.1", where.port or 443))
            return str(probe.getsockname()[0])
        except OSError as error:
            raise BadInput(f"{server}: cannot be reached: {error.strerror}") from None
