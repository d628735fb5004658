# SPDX-License-Identifier: LGPL-3.0-or-later
"""The way of a simulation's pods from the queue to their end.

Inputs: launches; pods as the API shows them; which groups have connected. Outputs: a Job per
launch, `Run` to its pods once all are there, and a call when the last of them is over.

Invariants: all pods of a simulation start or none; one simulation is placed at a time, so that
what was found to fit is not promised twice; requests at birth are those wanted now. What goes
wrong before a simulation ran is tried again, what goes wrong later ends it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable

from dovetail.controller import settings
from dovetail.core import protocol
from dovetail.executors.kubernetes import launch, manifests, placement
from dovetail.executors.kubernetes import session as cluster
from dovetail.executors.kubernetes.api import NotFound, Refused
from dovetail.executors.kubernetes.background_calls import Calls
from dovetail.executors.kubernetes.launch import Launched, Object
from dovetail.executors.kubernetes.manifests import path
from dovetail.executors.kubernetes.nodes import Nodes
from dovetail.executors.kubernetes.resize_queue import Resizes
from dovetail.executors.kubernetes.resize_transaction import Change
from dovetail.executors.local.job import Result
from dovetail.executors.pods import messages
from dovetail.host import install_paths
from dovetail.plan import command_line

GATHER, EACH = 60.0, 3.0  # seconds for all pods of a simulation to be there, and more for each
AGAIN = 1.0  # seconds between two looks for room
FAILURES = 3  # starts that may fail before the simulation does
FORCE = 30.0  # seconds after which a pod that was deleted counts as on a lost node
PATIENT = 3.0  # seconds without room before the user is told
DEAF = 3.0  # seconds without what should have been seen, after which a watch is not relied on


class Lifecycle:
    """See the module. `ended(job)` is called when nothing of a simulation runs any more."""

    def __init__(
        self,
        session: cluster.Session,
        calls: Calls,
        nodes: Nodes,
        resizes: Resizes,
        home: str,
        log_limit: int,
        ended: Callable[[Launched], None],
        waits: Callable[[Launched], None],
    ) -> None:
        assert session.hub is not None
        self._session, self._api, self._hub = session, session.api, session.hub
        self._calls, self._nodes, self._resizes = calls, nodes, resizes
        self._home, self._log_limit = home, log_limit
        self._ended, self._waits = ended, waits
        self._placing: Launched | None = None
        self.jobs: dict[str, Launched] = {}
        self.mpi: dict[str, str] = {}
        self.peak: dict[str, int] = {}

    # --- every look ---

    def advance(self, job: Launched, now: float) -> None:
        """Do what is due for a simulation."""
        if job.phase == "waiting":
            if job.result or job.stopped:
                self._end(job)
            elif self._placing is None and not self._resizes.busy and now >= job.retry_at:
                self._look(job)
        elif job.phase == "gathering":
            self._gather(job, now)
        elif job.phase == "running" and job.deadline and now > job.deadline:
            # It did not stop when it was told to, or its node neither came back nor was lost.
            job.result = job.result or job.doubted or Result(143)
            self.leave(job)
        elif job.phase == "leaving":
            self._check_gone(job, now)

    def deadline(self, job: Launched) -> float:
        """When `advance` is needed at the latest; 0 for no such time."""
        if job.phase == "waiting":
            free = self._placing is None and not self._resizes.busy
            return job.retry_at if free else 0.0
        return job.deadline

    # --- room, and the Job ---

    def _look(self, job: Launched) -> None:
        self._placing = job

        def work() -> tuple[list[Object], list[Object], list[Object]]:
            return (
                self._api.get(path("Node"), 5.0)["items"],
                self._api.get(path("Pod", namespace=""), 5.0)["items"],
                self._api.get(path("ResourceQuota"), 5.0)["items"],
            )

        self._calls.submit(work, lambda found: self._looked(job, found))

    def _looked(self, job: Launched, found: Any) -> None:  # noqa: ANN401
        if isinstance(found, Exception):
            return self._put_off(job, f"the cluster does not answer: {found}")
        if job.stopped:
            return self._put_off(job, "")
        nodes, pods, quotas = found
        others = [pod for pod in pods if cluster.foreign(pod, self._session.run)]
        self._nodes.listed(nodes, others)
        free = placement.rooms(nodes, pods)
        spec = job.spec
        requests = [max(1, int(one * self._nodes.scale)) for one in job.share.requests]
        memory = max(spec.memory, self.peak.get(spec.family, 0))
        job.sizes = placement.groups(spec.ranks, spec.ranks_per_pod, requests, memory, free)
        job.cpu = self._nodes.divided(job.sizes, job.share.requests)
        _, each = placement.per_pod(job.sizes, requests, memory)
        where, why = placement.placed(job.cpu, each, free)
        why = why or placement.over_quota(quotas, job.cpu, each, job.limits(job.share))
        if why:
            return self._put_off(job, why)
        job.phase, job.why = "creating", ""
        self._create(job, each, where)

    def _put_off(self, job: Launched, why: str) -> None:
        """Let it wait; told to the user if that goes on, and whenever the reason changes."""
        self._placing = None
        job.phase = "waiting"
        now = time.monotonic()
        job.retry_at = now + AGAIN
        job.waiting_since = job.waiting_since or now
        if why and why != job.why and now - job.waiting_since > PATIENT:
            job.why = why
            self._waits(job)

    def _create(self, job: Launched, memory: Sequence[int], where: Mapping[int, str]) -> None:
        name = manifests.job_name(self._session.run, job.key)
        data = {f"{name}.{index}": f"{cpu}m" for index, cpu in enumerate(job.cpu)}
        data.update({f"{name}.{index}.node": node for index, node in where.items()})
        limit = max(job.limits(job.share))
        body = self._session.launcher.body(job.spec, job.key, job.sizes, job.cpu, memory, limit)

        def work() -> Object:
            self._publish(data)
            return self._api.create(path(body["kind"]), body)

        self._calls.submit(work, lambda found: self._created(job, found))

    def publish(self, job: Launched) -> None:
        """Let pods of a simulation be born with what it has now, should there be new ones."""
        name = manifests.job_name(self._session.run, job.key)
        data = {f"{name}.{index}": f"{cpu}m" for index, cpu in enumerate(job.cpu)}
        self._calls.submit(lambda: self._publish(data), lambda found: None)

    def _publish(self, data: Mapping[str, str | None]) -> None:
        """Set the requests and nodes that pods are born with; in a thread."""
        try:
            self._api.patch(path("ConfigMap", manifests.REQUESTS), {"data": data})
        except NotFound:
            made = {"apiVersion": "v1", "kind": "ConfigMap",
                    "metadata": {"name": manifests.REQUESTS}}  # fmt: skip
            self._api.create(path("ConfigMap"), {**made, "data": data})

    def _created(self, job: Launched, found: Any) -> None:  # noqa: ANN401
        if isinstance(found, Refused) and found.status in (400, 422):
            job.result = Result(1, f"Kubernetes does not take its pods: {found}")
        elif isinstance(found, Exception):
            job.again = True  # it may be there all the same
            job.why = ""
        job.phase, job.waiting_since = "gathering", 0.0
        job.retry_at = time.monotonic() + DEAF
        job.deadline = time.monotonic() + GATHER + EACH * len(job.sizes)
        if isinstance(found, Exception) or job.stopped:
            self.leave(job)

    # --- all pods there? ---

    def pod(self, job: Launched, kind: str, pod: Object) -> None:
        """News of one of its pods."""
        group, name = launch.group_of(pod), pod["metadata"]["name"]
        if kind == "DELETED":
            self._resizes.gone(name)
            job.pods.pop(group, None)
            if self._expected(job):
                self.lose(job, f"pod {name} was deleted")
            return
        new = group not in job.pods
        job.pods[group] = pod
        if launch.deleted(pod) and self._expected(job):
            return self.lose(job, f"pod {name} is deleted: {launch.ended_by(pod)}")
        if launch.over(pod):
            self._resizes.gone(name)
            if self._expected(job):
                self.lose(job, f"pod {name} ended: {launch.ended_by(pod)}")
            return
        self._resizes.seen(pod)
        if new and group < len(job.cpu) and launch.born_with(pod) != self._now(job)[group]:
            self.correct(job)

    def correct(self, job: Launched) -> None:
        """Give its pods what they shall have, where they were born with something else."""
        self._resizes.add(lambda: self._at_birth(job), lambda why: None)

    def _expected(self, job: Launched) -> bool:
        """Whether its pods should be there."""
        return job.phase in ("gathering", "running") and not job.result

    def _at_birth(self, job: Launched) -> list[Change]:
        """Pods that the admission policy missed, or whose limit is not the greatest of all."""
        now = self._now(job)
        return [
            Change.between(pod["metadata"]["name"], launch.born_with(pod), now[group])
            for group, pod in job.pods.items()
            if not launch.over(pod) and job.phase != "leaving"
        ]

    @staticmethod
    def _now(job: Launched) -> list[tuple[int, int]]:
        """The request and the limit that each of its pods shall have."""
        return [*zip(job.cpu, job.limits(job.share))]

    def _gather(self, job: Launched, now: float) -> None:
        pods = job.pods.values()
        if self._placing is job and len([*filter(launch.node_of, pods)]) == len(job.sizes):
            self._placing = None
        why = next(filter(None, map(launch.hopeless, pods)), "")
        ended = next((pod for pod in pods if launch.ending(pod)), None)
        if ended is not None and not why and not job.stopped:  # before we knew of its Job
            name = ended["metadata"]["name"]
            return self.lose(job, f"pod {name} ended: {launch.ended_by(ended)}")
        if why or job.stopped:
            job.result = job.result or Result(1, why)
            return self.leave(job)
        hosts = job.hosts()
        if hosts:
            return self._run(job, hosts)
        if len(job.connected) == len(job.sizes) and now > job.retry_at and not job.asking:
            self._list(job, lambda found: self._met(job, found))
        if now > job.deadline:
            unplaced = next(filter(None, map(launch.unplaced, pods)), "")
            missing = f"{len(job.connected)} of {len(job.sizes)} rank groups were there"
            job.failures -= bool(unplaced)  # for room it may wait for ever
            made = f"nobody makes pods of {self._session.launcher}"
            why = "pods did not start" if pods else made
            self.lose(job, f"{missing} in time: {unplaced or why}")

    def _met(self, job: Launched, found: Any) -> None:  # noqa: ANN401
        """Pods that have called, and that no watch has shown."""
        if job.phase == "leaving":
            return
        job.asking, job.retry_at = False, time.monotonic() + DEAF
        for pod in found if not isinstance(found, Exception) else ():
            if pod["metadata"]["labels"][manifests.KEY] == job.key:
                self.pod(job, "MODIFIED", pod)

    def _run(self, job: Launched, hosts: Sequence[Object]) -> None:
        job.phase, job.deadline, job.failures = "running", 0.0, 0
        self._hub.tell(messages.Run(job.key, self._config(job.spec), list(hosts)))
        self.tell_share(job, job.share)

    def tell_share(self, job: Launched, share: protocol.Share) -> None:
        """Say how its ranks wait, and whether they are suspended."""
        self._hub.tell(messages.Wait(job.key, share.wait.mode, share.wait.yields))
        self._hub.tell(messages.Suspend(job.key, share.suspended))

    def _config(self, spec: protocol.Spec) -> dict[str, Any]:
        environment = dict(spec.environment)
        return {
            "name": spec.name,
            "case": spec.case,
            "home": f"{self._home}/{spec.name}",
            "ranks": spec.ranks,
            "command": list(spec.command),
            "prepare": [[line, list(command_line.split(line))] for line in spec.prepare],
            "environment": {**environment, "PATH": command_line.search_path(environment)},
            "mpi": self.mpi.get(spec.command[0], ""),
            "libraries": install_paths.libraries(),
            "log_limit": self._log_limit,
        }

    # --- the end ---

    def lose(self, job: Launched, why: str) -> None:
        """Pods are lost: try again if it did not run yet, else it has ended."""
        if job.phase == "gathering" and not job.stopped and job.failures < FAILURES:
            job.failures += 1
            job.again, job.why = True, why
            self._waits(job)
        else:
            job.result = job.result or Result(1, f"{settings.POD_LOST}: {why}")
        self.leave(job)

    def leave(self, job: Launched) -> None:
        """Delete everything that a simulation has on the cluster."""
        if job.phase == "leaving":
            return
        job.phase, job.deadline = "leaving", time.monotonic() + FORCE
        if self._placing is job:
            self._placing = None
        code = job.result.code if job.result else 1
        self._hub.tell(messages.End(job.key, code))
        self._delete(job)

    def _delete(self, job: Launched) -> None:
        job.asking = True
        name = manifests.job_name(self._session.run, job.key)
        pods = [pod["metadata"]["name"] for pod in job.pods.values()]
        born = [f"{name}.{index}" for index in range(len(job.sizes))]
        keys = dict.fromkeys([*born, *(f"{one}.node" for one in born)])

        def work() -> None:
            for kind in self._session.launcher.kinds:
                self._api.delete(path(kind, name))
            for pod in pods:
                self._api.delete(path("Pod", pod))
            self._publish(keys)

        def done(found: Any) -> None:  # noqa: ANN401
            job.asking = False
            job.deleted = not isinstance(found, Exception)
            job.retry_at = time.monotonic() + (0.0 if job.deleted else AGAIN)

        self._calls.submit(work, done)

    def _check_gone(self, job: Launched, now: float) -> None:
        late = now > job.deadline
        if late:
            job.deadline = now + FORCE
            for pod in list(job.pods.values()):
                name = pod["metadata"]["name"]
                self._calls.submit(
                    functools.partial(self._api.delete, path("Pod", name), grace=0),
                    lambda found: None,
                )
        if job.asking or now < job.retry_at:
            return
        if not job.deleted:
            self._delete(job)
        elif late or all(map(launch.over, job.pods.values())):  # late: a watch may hang
            self._list(job, lambda found: self._confirmed(job, found))

    def _list(self, job: Launched, then: Callable[[Any], None]) -> None:
        """Ask for a simulation's pods."""
        job.asking = True
        label = f"{manifests.KEY}={job.key},{manifests.RUN}={self._session.run}"
        self._calls.submit(lambda: self._api.get(path("Pod"), labelSelector=label)["items"], then)

    def check(self, job: Launched) -> None:
        """Find out whether pods are deleted, of which the watch may not have told yet."""

        def done(found: Any) -> None:  # noqa: ANN401
            if job.phase == "leaving":
                return
            job.asking, job.checked = False, True
            if isinstance(found, Exception):
                return
            there = {launch.group_of(pod) for pod in found if not launch.deleted(pod)}
            for group in set(job.pods) - there:
                self.pod(job, "DELETED", job.pods[group])

        if not job.asking:
            self._list(job, done)

    def _confirmed(self, job: Launched, found: Any) -> None:  # noqa: ANN401
        job.asking = False
        if isinstance(found, Exception):
            job.retry_at = time.monotonic() + AGAIN
            return
        if not all(map(launch.over, found)):  # one that we had not heard of yet
            for pod in found:
                job.pods[launch.group_of(pod)] = pod
            job.deleted = False
            return self._delete(job)
        job.pods.clear()
        if job.again and not job.stopped and not job.result:
            self._start_over(job)
        else:
            self._end(job)

    def _start_over(self, job: Launched) -> None:
        job.key = launch.new_key(job.spec.name, again=True)
        job.phase, job.again, job.deleted = "waiting", False, False
        job.connected.clear()
        job.retry_at = time.monotonic() + AGAIN

    def _end(self, job: Launched) -> None:
        if self.jobs.get(job.spec.name) is not job:
            return
        if self._placing is job:
            self._placing = None
        self.jobs.pop(job.spec.name, None)
        self._ended(job)
