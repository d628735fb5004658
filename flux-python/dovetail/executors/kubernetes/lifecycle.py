# SPDX-License-Identifier: LGPL-3.0-or-later
"""The way of a simulation's pods from the queue to their end: its states, and what leads on.

Inputs: launches; pods as the API shows them; which groups have connected. Outputs: a Job per
launch, `Run` to its pods once all are there, and a call when the last of them is over.

    Pending -> Creating -> Gathering -> Running -> Terminating -> Over
       ^                                               |
       `------ what failed before it ran is tried again

Pods whose simulation has ended well are had by the next, if it wants such pods and is there at
once: a pod's birth and death cost more than a second of a short one's time.

Invariants: all pods of a simulation start or none; one simulation is placed at a time, so that
what was found to fit is not promised twice; requests at birth are those wanted now; nobody is
placed, nor resized, beside pods that nobody has. What goes wrong before a simulation ran is tried
again, what goes wrong later ends it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Callable, Union

from dovetail.core import programs, protocol
from dovetail.core.protocol import Cause, Result
from dovetail.executors.kubernetes import (
    devices,
    images,
    manifests,
    placement,
    pod_status,
    spare_pods,
)
from dovetail.executors.kubernetes.api import NotFound, Refused
from dovetail.executors.kubernetes.background_calls import Calls
from dovetail.executors.kubernetes.manifests import KEY, PART, RANK_GROUP, RUN, SIMULATION, path
from dovetail.executors.kubernetes.nodes import Nodes
from dovetail.executors.kubernetes.rank_samples import RankSamples, Waits
from dovetail.executors.kubernetes.resizes import Change, Resizes
from dovetail.executors.kubernetes.session import Session, foreign, hint
from dovetail.executors.kubernetes.transfers import Transfers
from dovetail.executors.pods import messages
from dovetail.host import install_paths
from dovetail.mpi import launcher
from dovetail.plan import command_line

Object = dict[str, Any]

GATHER, EACH = 60.0, 3.0  # seconds for all pods of a simulation to be there, and more for each
AGAIN = 1.0  # seconds between two looks for room
FAILURES = 3  # starts that may fail before the simulation does
FORCE = 30.0  # seconds after which a pod that was deleted counts as on a lost node
PATIENT = 3.0  # seconds without room before the user is told
DEAF = 3.0  # seconds without what should have been seen, after which a watch is not relied on
FETCH = 5.0  # seconds between two copies of what running ranks have written, at least,
SELDOM = 20.0  # and so many times what a copy takes, so that copying is a small part of it all
STOP = 13.0  # seconds: the supervisor's grace, and what it needs besides
DOUBT = 120.0  # seconds for a node to come back or to be lost; a cluster takes one to see that
LABEL = 2.0  # seconds; of a pod that has just changed a node sees a second later that it is to end
HAND_OVER = 10.0  # seconds for pods to be there for the next simulation
_KEY = 40
_AT_ONCE = 1e-9  # a time that is over


# --- the states of a launch ---


@dataclass
class Pending:
    """It has no room yet. The next look is at `retry_at`; `told` is what the user knows of it."""

    retry_at: float
    since: float = 0.0
    told: str = ""


@dataclass
class Creating:
    """There is room, and its Job is being made."""


@dataclass
class Gathering:
    """Its Job is there, its pods are to call until `deadline`.

    What has called and was not seen by then is asked for at `ask_at`. If `pulling`, a node may be
    getting its image, which takes longer.
    """

    deadline: float
    ask_at: float
    asking: bool = False
    pulling: bool = False


class Inquiry(Enum):
    """Whether the API was asked if pods of a simulation that failed are deleted."""

    NONE = "none"
    UNDER_WAY = "under way"
    DONE = "done"


@dataclass
class Running:
    """Its ranks were told to start; it must end until `deadline`, 0 for none.

    `doubted` is a failure that the loss of a node or a pod may explain, until that is known.
    Where nodes have copies of its folders, `begun` says that the first has its case, `prepared`
    that this is ready there, `spread` that all nodes have it so, and `ended` how its ranks ended,
    whose output is not here yet; what is due next is under way or done if `spreading`, then
    `collecting`. What they have written so far is fetched at `fetch_at`. Where it has `starved`,
    which means that the kernel has killed a pod of it, its other pods end too, until then: a file
    may change meanwhile as it is fetched, and all is fetched again at `collect_at`.
    """

    deadline: float = 0.0
    doubted: Result | None = None
    inquiry: Inquiry = Inquiry.NONE
    begun: bool = False
    prepared: bool = False
    spreading: bool = False
    spread: bool = False
    ended: Result | None = None
    starved: float = 0.0
    collecting: bool = False
    collect_at: float = 0.0
    fetch_at: float = 0.0


class Deletion(Enum):
    """How far the deletion of a simulation's Job and pods is."""

    REQUESTED = "requested"
    FAILED = "failed"  # to be requested again
    DONE = "done"  # the API took it; the pods go
    CONFIRMING = "confirming"  # the API is asked whether any pod is left


@dataclass
class Terminating:
    """Its Job and pods are deleted. `result` is how it ended; None if it shall start again.

    A pod that is there at `deadline` is deleted by force. Or `spare` has them, if it is not None.
    """

    result: Result | None
    deadline: float
    deletion: Deletion = Deletion.REQUESTED
    retry_at: float = 0.0
    spare: Launched | None = None


@dataclass
class Spare:
    """Its pods are there for the next simulation, or are to be until `deadline`.

    If they were `offered`, a launch has had a turn to take them.
    """

    deadline: float
    offered: bool = False


@dataclass(frozen=True)
class Over:
    """Nothing of it runs any more."""

    result: Result | None


State = Union[Pending, Creating, Gathering, Running, Terminating, Spare, Over]
_FOLLOWS: dict[type, tuple[type, ...]] = {
    Pending: (Creating, Over),
    Creating: (Gathering, Terminating),
    Gathering: (Running, Terminating),
    Running: (Terminating,),
    Terminating: (Pending, Over),
    Spare: (Terminating, Over),
    Over: (),
}


@dataclass
class Launched:
    """A simulation from its launch to its Finished.

    `cpu` is what each rank group shall ask for, millicores; `sizes` how many ranks it has; `pods`
    are by group, and `connected` the nodes of those that have called. `started` says that its own
    command has begun, `stopped` why somebody wants it to end, whatever its state, and
    `stop_cause` the same as a value; `refused` is what the user knows of a start that
    failed, `heard` that its supervisor has said how it ended, and `seen` that all its pods have
    been. `store` is where its pods have copies of the run's folders, if they do; `made` the name of
    their Job or MiniCluster, once it has one; `label_at` when pods that another had are to say
    that they are its own, 0 if they do, and `labelling` that this is under way.
    """

    spec: protocol.Spec
    share: protocol.Share
    key: str
    state: State
    sizes: list[int] = field(default_factory=list)
    cpu: list[int] = field(default_factory=list)
    pods: dict[int, Object] = field(default_factory=dict)
    connected: dict[int, str] = field(default_factory=dict)
    started: bool = False
    stopped: str = ""
    stop_cause: Cause = Cause.CANCELLED
    failures: int = 0
    refused: str = ""
    heard: bool = False
    seen: bool = False
    store: str = ""
    made: str = ""
    label_at: float = 0.0
    labelling: bool = False

    def __post_init__(self) -> None:
        self.samples, self.waits = RankSamples(self.spec.ranks), Waits(self.spec.ranks)

    # --- transitions ---

    def _become(self, state: State) -> None:
        assert type(state) in _FOLLOWS[type(self.state)], (self.spec.name, self.state, state)
        self.state = state

    def create(self) -> None:
        """Room was found."""
        self._become(Creating())

    def gather(self, now: float) -> None:
        """Its Job was made."""
        self._become(Gathering(now + GATHER + EACH * len(self.sizes), now + DEAF))

    def run(self) -> None:
        """All its pods are there."""
        self.failures = 0
        self._become(Running())

    def terminate(self, result: Result | None, now: float) -> None:
        """It has ended so, or with None: it shall start again."""
        self._become(Terminating(result, now + FORCE))

    def start_over(self, now: float) -> None:
        """Nothing is left of this start; the next one is another on the nodes."""
        self.key = new_key(self.spec.name, again=True)
        self.connected.clear()
        self.heard = self.seen = False
        self._become(Pending(now + AGAIN))

    def leave(self, key: str, now: float) -> Launched:
        """Its pods are nobody's from now on, and called `key`; it has them no more."""
        assert isinstance(self.state, Terminating)
        spare = Launched(
            self.spec, self.share, key, Spare(now + HAND_OVER), self.sizes, self.cpu, self.pods,
            seen=True, made=self.made,
        )  # fmt: skip
        self.state.spare, self.pods, self.made = spare, {}, ""
        return spare

    def take(self, spare: Launched, cpu: list[int], now: float) -> None:
        """Have the pods that another has left."""
        self.key, self.made, self.pods = spare.key, spare.made, spare.pods
        self.sizes, self.cpu, self.seen = spare.sizes, cpu, True
        self.connected.update(spare.connected)
        spare.finish()
        self.create()
        self.gather(now)

    def finish(self) -> None:
        """Nothing is left of it, and it does not start again."""
        self._become(Over(self.result))

    def stop(self, why: str, cause: Cause, now: float) -> bool:
        """Somebody wants it to end; whether its ranks are to be told, which have some seconds.

        Once they have ended, what they wrote takes as long as it takes, and is not given up for a
        simulation that seems to hang meanwhile, or for memory that it does not use any more. One
        that is done by then, or stopped at a checkpoint, is not stopped any more.
        """
        ended = self.state.ended if isinstance(self.state, Running) else None
        over = ended and ended.cause in (Cause.DONE, Cause.CHECKPOINTED)
        if over or (ended and cause in (Cause.HUNG, Cause.SHORT_OF_MEMORY)):
            return False
        self.stopped, self.stop_cause = why or "stopped", cause
        if ended or not isinstance(self.state, Running):
            return False
        self.state.deadline = now + STOP
        return True

    def outlived(self) -> None:
        """The run ends, before this has if it is not known how it did."""
        if not self.stopped and not self.result:
            self.stopped, self.stop_cause = "the run ended", Cause.INTERRUPTED

    # --- what follows from the state ---

    @property
    def result(self) -> Result | None:
        """How it ended, once that is known."""
        return self.state.result if isinstance(self.state, (Terminating, Over)) else None

    @property
    def expected(self) -> bool:
        """Whether its pods should be there."""
        state = self.state
        return isinstance(state, Gathering) or (isinstance(state, Running) and not state.starved)

    @property
    def complete(self) -> bool:
        """Whether all its pods have called."""
        return len(self.connected) == len(self.sizes)

    @property
    def ended_well(self) -> bool:
        """Whether its ranks have said that all went well."""
        state = self.state
        end = state.doubted or state.ended if isinstance(state, Running) else self.result
        return end is not None and end.code == 0

    @property
    def writers(self) -> list[str]:
        """The nodes that may have written something of it, if nodes have copies of its folders.

        On the others its folder is missing, or has come in part: what is not there is not deleted.
        """
        state = self.state
        if isinstance(state, Running) and state.spread:
            return sorted({*self.connected.values()})
        return [self.connected[0]] if isinstance(state, Running) and state.begun else []

    def hosts(self) -> list[Object]:
        """The address and the size of each rank group, once all are there; until then empty.

        Pods on their nodes' network have the same address where they share a node, and there one
        MPI daemon. A pod may call before its node has told the API its address.
        """
        found = [
            {"address": self.pods[group]["status"]["podIP"], "ranks": size}
            for group, size in enumerate(self.sizes)
            if group in self.connected and self.pods.get(group, {}).get("status", {}).get("podIP")
        ]
        return found if len(found) == len(self.sizes) else []

    @property
    def limited(self) -> bool:
        """Whether its pods have limits of CPU, which none can get, nor lose, while it runs."""
        return bool(self.share.limit or self.spec.limit)

    def limits(self, share: protocol.Share) -> list[int]:
        """The CPU limit of each rank group with this share, millicores; 0 for none.

        Never below the request, which is at most the sum of what the ranks are given.
        """
        found, first, times = [], 0, share.limit or self.spec.limit
        for size in self.sizes:
            given = sum(share.requests[first : first + size])
            limit = max(manifests.LEAST_LIMIT, math.ceil(times * given))
            found.append(limit if times else 0)
            first += size
        return found


def new_key(name: str, again: bool = False) -> str:
    """What a launch is called on the nodes: the simulation, and a word if it is not the first.

    At most 40 characters, since names of sockets are short.
    """
    if not again and len(name) <= _KEY:
        return name
    return f"{name[: _KEY - 13].rstrip('-')}.{secrets.token_hex(6)}"


def case_folder(spec: protocol.Spec) -> str:
    """What nodes call a simulation's case, where that is copied; those of a family have one."""
    return f"cases.{hashlib.sha256(os.fsencode(os.path.abspath(spec.case))).hexdigest()[:16]}"


def mpi_clues(spec: protocol.Spec) -> tuple[str, ...]:
    """What tells which MPI a simulation has."""
    case = spec.case, *spec.prepare
    return spec.image, *launcher.clues(spec.command[0], case, spec.environment)


# --- what leads from state to state ---


class Lifecycle:
    """See the module. `ended(job)` is called when nothing of a simulation runs any more.

    `delayed(job, why)` is called when it must wait, or starts again, with the reason,
    and `placed(job)` when its pods are all there.
    """

    def __init__(
        self,
        session: Session,
        calls: Calls,
        nodes: Nodes,
        resizes: Resizes,
        transfers: Transfers,
        home: str,
        log_limit: int,
        ended: Callable[[Launched], None],
        delayed: Callable[[Launched, str], None],
        placed: Callable[[Launched], None],
    ) -> None:
        assert session.hub is not None
        self._session, self._api, self._hub = session, session.api, session.hub
        self._calls, self._nodes, self._resizes = calls, nodes, resizes
        self._transfers = transfers
        self._home, self._log_limit = home, log_limit
        self._ended, self._delayed, self._placed = ended, delayed, placed
        self._placing: Launched | None = None  # until all its pods are on their nodes
        self.jobs: dict[str, Launched] = {}
        self.spares: dict[str, Launched] = {}  # pods without a simulation, by key
        self.hands_over = session.launcher.kind == "Job"
        self._by_key: dict[str, Launched] = {}
        self._by_name: dict[str, Launched] = {}
        self.mpi: dict[tuple[str, ...], str] = {}  # by the clues to it
        self.peak: dict[str, int] = {}
        self._had: set[tuple[str, str]] = set()  # nodes, each with an image that it has, of the new

    def all(self) -> list[Launched]:
        """Everything that has pods, or waits for some."""
        return [*self.jobs.values(), *self.spares.values()]

    def of(self, key: str) -> Launched | None:
        """The launch that is called so on the nodes, if it is not over."""
        job = self._by_key.get(key)
        if job is None or job.key != key or not self._known(job):
            self._by_key = {one.key: one for one in self.all()}
            job = self._by_key.get(key)
        return job

    def of_pod(self, pod: Object) -> Launched | None:
        """The launch that has this pod now, whatever its labels say."""
        name = pod_status.job_of(pod)
        job = self._by_name.get(name)
        if job is None or job.made != name or not self._known(job):
            self._by_name = {one.made: one for one in self.all() if one.made}
            job = self._by_name.get(name)
        return job

    def _known(self, job: Launched) -> bool:
        return self.jobs.get(job.spec.name) is job or self.spares.get(job.key) is job

    # --- every look ---

    def advance(self, job: Launched, now: float) -> None:
        """Do what is due for a simulation."""
        state = job.state
        if isinstance(state, Pending):
            if job.stopped:
                self._end(job)
            elif found := self._fitting(job):
                self._take(job, *found)
            elif self._may_look and now >= state.retry_at:
                self._look(job)
        elif isinstance(state, Gathering):
            self._gather(job, state, now)
        elif isinstance(state, Running):
            if job.label_at and now > job.label_at and not job.labelling:
                self._label(job, [*job.pods.values()])
            self._copy(job, state)
            self._fetch(job, state, now)
            if job.state is not state:  # there was nothing to copy: it has ended
                return
            if state.starved and not self._all_heard(job):
                return self.terminate(job, state.ended)
            if state.deadline and now > state.deadline:
                # It did not stop when it was told to, or its node neither came back nor was lost.
                self.terminate(job, state.doubted or Result(Cause.FAILED, 143))
            else:
                self._believe(job, state)
        elif isinstance(state, Terminating):
            self._check_gone(job, state, now)
        elif isinstance(state, Spare):
            if state.offered or (not job.complete and now > state.deadline):
                self._dissolve(job)
            state.offered = job.complete

    @property
    def in_between(self) -> bool:
        """Whether there are pods that nobody has, which will soon be gone or somebody's."""
        long_ago = time.monotonic() + FORCE - PATIENT
        return any(
            isinstance(one.state, Spare)
            or (isinstance(one.state, Terminating) and one.state.deadline > long_ago)
            for one in self.spares.values()
        )

    @property
    def _may_look(self) -> bool:
        """Whether room that is found now is not another's."""
        return self._placing is None and not self._resizes.busy and not self.in_between

    def deadline(self, job: Launched) -> float:
        """When `advance` is needed at the latest; 0 for no such time."""
        if isinstance(job.state, Pending):
            return job.state.retry_at if self._may_look else 0.0
        if isinstance(job.state, Spare) and job.state.offered:
            return _AT_ONCE
        if isinstance(job.state, Terminating) and job.state.spare:
            return 0.0  # it has one
        return 0.0 if isinstance(job.state, (Creating, Over)) else job.state.deadline

    # --- room, and the Job ---

    def _look(self, job: Launched) -> None:
        self._placing = job
        # Of our own rank groups the watch tells all, once it has; asking for them again at each
        # launch would take as long as there are many.
        seen = all(one.seen or isinstance(one.state, Pending) for one in self.jobs.values())
        run = self._session.run
        ours = f"{RUN}={run},{PART}!={RANK_GROUP}" if seen else f"{RUN}={run}"

        def work() -> tuple[list[Object], list[Object], list[Object], bool]:
            return (
                self._api.get(path("Node"), 5.0)["items"],
                [
                    *self._api.get(path("Pod", namespace=""), 5.0, labelSelector=f"{RUN}!={run}")[
                        "items"
                    ],
                    *self._api.get(path("Pod"), 5.0, labelSelector=ours)["items"],
                ],
                self._api.get(path("ResourceQuota"), 5.0)["items"],
                seen,
            )

        self._calls.submit(work, lambda found: self._looked(job, found))

    def _looked(self, job: Launched, found: Any) -> None:  # noqa: ANN401
        state = job.state
        if not isinstance(state, Pending):  # it was stopped meanwhile
            return
        if isinstance(found, Exception):
            return self._put_off(job, state, f"the cluster does not answer: {found}")
        if job.stopped:
            return self._put_off(job, state, "")
        nodes, pods, quotas, seen = found
        others = [pod for pod in pods if foreign(pod, self._session.run)]
        if seen:
            pods += [pod for one in self.all() for pod in one.pods.values()]
        self._nodes.listed(nodes, others)
        out = self._nodes.left_out
        nodes = [node for node in nodes if node["metadata"]["name"] not in out]
        free = placement.rooms(nodes, pods)
        spec = job.spec
        memory = max(spec.memory, self.peak.get(spec.family, 0))
        wanted = devices.asked(spec, placement.resources(nodes))
        alone = self._alone(job)
        fit = self._nodes.fit(spec, job.share.requests, memory, free, wanted, alone)
        job.sizes, job.cpu = fit.sizes, fit.cpu
        why = fit.why or placement.over_quota(
            quotas, fit.cpu, fit.memory, job.limits(job.share), wanted
        )
        if why:
            return self._put_off(job, state, why)
        job.create()
        self._create(job, fit.memory, fit.nodes, wanted)

    def _alone(self, job: Launched) -> bool:
        """Whether no other simulation has pods, whose end would make room."""
        return all(one is job or isinstance(one.state, Pending) for one in self.all())

    def _put_off(self, job: Launched, state: Pending, why: str) -> None:
        """Let it wait; told to the user if that goes on, and whenever the reason changes."""
        self._placing = None
        now = time.monotonic()
        state.retry_at = now + AGAIN
        state.since = state.since or now
        if why and why != state.told and now - state.since > PATIENT:
            state.told = why
            self._delayed(job, why)

    def _create(
        self,
        job: Launched,
        memory: Sequence[int],
        where: Mapping[int, str],
        wanted: Mapping[str, int],
    ) -> None:
        name = job.made = manifests.job_name(self._session.run, job.key)
        data = {f"{name}.{index}": f"{cpu}m" for index, cpu in enumerate(job.cpu)}
        data.update({f"{name}.{index}.node": node for index, node in where.items()})
        limit = max(job.limits(job.share))
        job.store = self._session.store
        body = self._session.launcher.body(
            job.spec, job.key, job.sizes, job.cpu, memory, limit, wanted, job.store
        )

        def work() -> Object:
            self._publish(data)
            return self._api.create(path(body["kind"]), body)

        self._calls.submit(work, lambda found: self._created(job, found))

    def publish(self, job: Launched) -> None:
        """Let pods of a simulation be born with what it has now, should there be new ones."""
        data = {f"{job.made}.{index}": f"{cpu}m" for index, cpu in enumerate(job.cpu)}
        self._calls.submit(lambda: self._publish(data), lambda found: None)

    def _publish(self, data: Mapping[str, str]) -> None:
        """Set the requests and nodes that pods are born with; in a thread."""
        try:
            self._api.patch(path("ConfigMap", manifests.REQUESTS), {"data": data})
        except NotFound:
            made = {"apiVersion": "v1", "kind": "ConfigMap",
                    "metadata": {"name": manifests.REQUESTS}}  # fmt: skip
            self._api.create(path("ConfigMap"), {**made, "data": data})
            name = manifests.REQUESTS
            self._session.news.put(f"ConfigMap {name} was deleted; it was made again")

    def _created(self, job: Launched, found: Any) -> None:  # noqa: ANN401
        if not isinstance(job.state, Creating):  # its pods were quicker than the answer, and failed
            return
        if isinstance(found, Refused) and found.status in (400, 422):
            self.terminate(
                job, Result(Cause.LAUNCH_FAILED, 1, f"Kubernetes does not take its pods: {found}")
            )
        elif isinstance(found, Exception) or job.stopped:
            why = f"Kubernetes does not make its pods: {found}"
            if not job.stopped and why != job.refused:
                job.refused = why
                self._delayed(job, why)
            self.terminate(job, None)  # it may be there all the same
        else:
            job.refused = ""
            job.gather(time.monotonic())

    # --- pods that another has left ---

    def _fitting(self, job: Launched) -> tuple[Launched, list[int], int] | None:
        """Pods that nobody has and that suit it, and the CPU and memory that each shall have."""
        memory = max(job.spec.memory, self.peak.get(job.spec.family, 0))
        for spare in self.spares.values():
            there = isinstance(spare.state, Spare) and spare.complete
            alike = spare_pods.alike(spare.spec, job.spec) and spare.limited == job.limited
            if not (there and alike):
                continue
            cpu = spare.cpu
            if job.share.requests != spare.share.requests:
                cpu = self._nodes.divided(spare.sizes, job.share.requests)
            _, each = placement.per_pod(spare.sizes, job.share.requests, memory)
            more = spare_pods.more(spare.pods, cpu, each[0])
            others = (pod for one in self.all() for pod in one.pods.values())
            grow = any(one.cpu > 0 or one.memory > 0 for one in more)
            if not (grow and self._placing) and self._nodes.take(more, others):
                return spare, cpu, each[0]
        return None

    def _take(self, job: Launched, spare: Launched, cpu: list[int], memory: int) -> None:
        """Have the simulation run in these pods."""
        now = time.monotonic()
        del self.spares[spare.key]
        job.take(spare, cpu, now)
        for pod in job.pods.values():
            if more := spare_pods.more_memory(pod, memory):
                body = manifests.memory_resize(pod_status.memory_of(pod) + more)
                where = path("Pod", pod["metadata"]["name"]) + "/resize"
                self._calls.submit(
                    functools.partial(self._api.patch, where, body, "strategic"),
                    lambda found: self._kept(job, found if isinstance(found, Refused) else ""),
                )
        self._label(job, ())
        self.correct(job)
        assert isinstance(job.state, Gathering)
        self._gather(job, job.state, now)

    def _label(self, job: Launched, pods: Sequence[Object]) -> None:
        """Have its Job say whose it is, for who resumes the run, and these pods, for who looks.

        Once more with all of them, if they were not all, or that went wrong.
        """
        labels = {"metadata": {"labels": {SIMULATION: job.spec.name, KEY: job.key}}}
        names = [path("Job", job.made), *(path("Pod", pod["metadata"]["name"]) for pod in pods)]

        def work() -> None:
            for name in names:
                self._api.patch(name, labels)

        def done(found: Any) -> None:  # noqa: ANN401
            again = isinstance(found, Exception) or not pods
            job.labelling, job.label_at = False, time.monotonic() + LABEL if again else 0.0

        job.labelling = True
        self._calls.submit(work, done)

    def _hand_over(self, job: Launched, code: int) -> None:
        """Have its pods be there for the next simulation; it has ended once they are.

        First of all nobody who resumes the run may take them for this one's.
        """
        spare = job.leave(f"pods.{secrets.token_hex(6)}", time.monotonic())
        self.spares[spare.key] = spare
        labels = {"metadata": {"labels": {SIMULATION: "", KEY: spare.key}}}

        def done(found: Any) -> None:  # noqa: ANN401
            failed = isinstance(found, Exception) or not isinstance(spare.state, Spare)
            self._hub.tell(messages.End(job.key, code, "" if failed else spare.key))
            if isinstance(found, Refused) and found.status == 403 and self.hands_over:
                self.hands_over = False
                self._session.news.put(f"each simulation gets new pods: {found}; {hint()}")
            if isinstance(found, Exception):
                self._dissolve(spare)

        self._calls.submit(lambda: self._api.patch(path("Job", spare.made), labels), done)

    def _dissolve(self, spare: Launched) -> None:
        """Nobody wants these pods."""
        if isinstance(spare.state, Spare):
            self.terminate(spare, Result(Cause.DONE))

    # --- all pods there? ---

    def pod(self, job: Launched, kind: str, pod: Object) -> None:
        """News of one of its pods."""
        pod = pod_status.slim(pod)
        group, name = pod_status.group_of(pod), pod["metadata"]["name"]
        if kind == "DELETED" or pod_status.ending(pod):
            self._dissolve(job)
        if kind == "DELETED":
            self._resizes.gone(name)
            job.pods.pop(group, None)
            if job.expected:
                why = self._nodes.departed(pod_status.node_of(pod))
                self.lose(job, f"pod {name} was deleted{f': {why}' if why else ''}")
            return
        new = group not in job.pods
        job.pods[group] = pod
        job.seen = job.seen or len(job.pods) == len(job.sizes)
        if pod_status.deleted(pod) and job.expected:
            left = self._nodes.departed(pod_status.node_of(pod))
            return self.lose(job, f"pod {name} is deleted: {left or pod_status.ended_by(pod)}")
        if pod_status.over(pod):
            self._resizes.gone(name)
            why = pod_status.starved(pod) if isinstance(job.state, Running) else ""
            if why:  # it is the simulation's own fault, and would happen again
                self._starve(job, Result(Cause.FAILED, 137, why))
            elif job.expected:
                self.lose(job, f"pod {name} ended: {pod_status.ended_by(pod)}")
            return
        self._resizes.seen(pod)
        if new and group < len(job.cpu) and pod_status.born_with(pod) != self._now(job)[group]:
            self.correct(job)

    def correct(self, job: Launched) -> None:
        """Give its pods what they shall have, where they were born with something else."""
        self._resizes.add(lambda: self._at_birth(job), lambda why: self._kept(job, why))

    def _kept(self, job: Launched, why: object) -> None:
        """Its pods ask for what they did before; it runs all the same."""
        if why and isinstance(job.state, (Gathering, Running)):
            name = job.spec.name
            self._session.news.put(f"{name} runs with less than it is to ask for: {why}")

    def _at_birth(self, job: Launched) -> list[Change]:
        """Pods that the admission policy missed, or whose limit is not the greatest of all."""
        now = self._now(job)
        return [
            Change.between(pod["metadata"]["name"], pod_status.born_with(pod), now[group])
            for group, pod in job.pods.items()
            if not pod_status.over(pod) and not isinstance(job.state, Terminating)
        ]

    @staticmethod
    def _now(job: Launched) -> list[tuple[int, int]]:
        """The request and the limit that each of its pods shall have."""
        return [*zip(job.cpu, job.limits(job.share))]

    def _gather(self, job: Launched, state: Gathering, now: float) -> None:
        pods = job.pods.values()
        if self._placing is job and len([*filter(pod_status.node_of, pods)]) == len(job.sizes):
            self._placing = None
        why = next(filter(None, map(pod_status.hopeless, pods)), "")
        ended = next((pod for pod in pods if pod_status.ending(pod)), None)
        if ended is not None and not why and not job.stopped:  # before we knew of its Job
            name = ended["metadata"]["name"]
            return self.lose(job, f"pod {name} ended: {pod_status.ended_by(ended)}")
        if why and not job.stopped and job.failures < FAILURES:
            return self.lose(job, why)  # a registry, or a busy node, may do better next time
        if why or job.stopped:
            return self.terminate(job, Result(Cause.LAUNCH_FAILED, 1, why))
        hosts = job.hosts()
        if hosts:
            return self._run(job, hosts)
        if len(job.connected) == len(job.sizes) and now > state.ask_at and not state.asking:
            state.asking = True
            self._list(job, lambda found: self._met(job, state, found))
        if now > state.deadline and not state.pulling and (node := self._without_image(job)):
            state.pulling, state.deadline = True, now + images.PATIENCE
            self._delayed(job, f"node {node} is new, and may be getting image {job.spec.image}")
        elif now > state.deadline:
            unplaced = next(filter(None, map(pod_status.unplaced, pods)), "")
            missing = f"{len(job.connected)} of {len(job.sizes)} rank groups were there"
            job.failures -= bool(unplaced)  # for room it may wait for ever
            made = f"nobody makes pods of {self._session.launcher}, or they are refused"
            why = "pods did not start" if pods else made
            if len(job.connected) == len(job.sizes):
                why = "the API does not tell all their addresses"
            self.lose(job, f"{missing} in time: {unplaced or why}")

    def _without_image(self, job: Launched) -> str:
        """A node that has come since images were tried, where a pod does not run; empty for none.

        None either while any pod is on no node.
        """
        pods = job.pods.values()
        if not job.spec.image or not all(map(pod_status.node_of, pods)):
            return ""
        waiting = {
            pod_status.node_of(pod) for pod in pods if pod["status"].get("phase") == "Pending"
        }
        known = {node for node, image in self._had if image == job.spec.image}
        return min(waiting - self._session.tried - known, default="")

    def _met(self, job: Launched, state: Gathering, found: Any) -> None:  # noqa: ANN401
        """Pods that have called, and that no watch has shown."""
        state.asking, state.ask_at = False, time.monotonic() + DEAF
        for pod in found if not isinstance(found, Exception) else ():
            if job.expected and pod_status.job_of(pod) == job.made:
                self.pod(job, "MODIFIED", pod)

    def _run(self, job: Launched, hosts: Sequence[Object]) -> None:
        job.run()
        new = {*job.connected.values()} - self._session.tried if job.spec.image else ()
        self._had.update((node, job.spec.image) for node in new)
        self._placed(job)
        if not job.store:
            return self._start(job, hosts)
        state, first = job.state, job.connected[0]
        assert isinstance(state, Running)
        self.open(job)
        wanted = [(first, case_folder(job.spec), "in")]
        if job.spec.go_on and os.path.isdir(f"{self._home}/{job.spec.name}/case"):
            wanted.append((first, job.key, "in"))

        def then(trouble: str) -> None:
            if job.state is not state or state.ended:  # it was stopped meanwhile
                return
            if trouble:
                why = f"its case cannot be copied: {trouble}"
                return self.terminate(job, Result(Cause.LAUNCH_FAILED, 1, why))
            self._start(job, hosts)

        self._transfers.begin(job.key, wanted, then, "its case")

    def _start(self, job: Launched, hosts: Sequence[Object]) -> None:
        assert isinstance(job.state, Running)
        job.state.begun = True
        self._hub.tell(messages.Run(job.key, self._config(job), list(hosts)))
        self.tell_share(job, job.share)

    def open(self, job: Launched) -> None:
        """Let nodes have the case of a simulation, and write its output, where these are copied."""
        if job.store:
            self._hub.copies.open(case_folder(job.spec), job.spec.case, "in")
            self._hub.copies.open(job.key, f"{self._home}/{job.spec.name}", "out")

    def prepared(self, job: Launched) -> None:
        """Its case is prepared on the first rank group's node; the others need it too."""
        if isinstance(job.state, Running):
            job.state.prepared = True
            self._copy(job, job.state)

    def _copy(self, job: Launched, state: Running) -> None:
        """Begin the copies that are due, once all its nodes are known."""
        if len(job.connected) < len(job.sizes):  # to a controller that goes on after another
            return
        if state.ended:
            if not state.collecting and time.monotonic() >= state.collect_at:
                state.collecting = True
                self._collect(job, state)
        elif state.prepared and not state.spreading:
            state.spreading = True
            self._spread(job, state)

    def _spread(self, job: Launched, state: Running) -> None:
        """Bring the prepared case here, and from here to its other nodes."""
        first = job.connected[0]
        others = sorted({*job.connected.values()} - {first})

        def then(trouble: str) -> None:
            if job.state is not state or state.ended:
                return
            if trouble:
                why = f"its prepared case cannot be copied: {trouble}"
                return self.terminate(job, Result(Cause.LAUNCH_FAILED, 1, why))
            state.spread = True
            self._hub.tell(messages.Spread(job.key))

        prepared = "its prepared case"

        def next_step(trouble: str) -> None:
            if trouble:
                return then(trouble)
            wanted = [(node, job.key, "in") for node in others]
            self._transfers.begin(job.key, wanted, then, prepared)

        self._transfers.begin(job.key, [(first, job.key, "out")], next_step, prepared)

    def _fetch(self, job: Launched, state: Running, now: float) -> None:
        """Fetch what its ranks have written so far, now and then."""
        if not job.store or not job.spec.live or not job.started or state.ended:
            return
        if not state.fetch_at:
            state.fetch_at = now + FETCH
        if now < state.fetch_at:
            return
        state.fetch_at = math.inf

        def then(trouble: str) -> None:  # a file may change while it is copied, and comes later
            done = time.monotonic()
            state.fetch_at = done + max(FETCH, SELDOM * (done - now))

        self._transfers.begin(job.key, self._from(job), then)

    @staticmethod
    def _from(job: Launched) -> list[tuple[str, str, str]]:
        """Copies of its folder from each node that may have written to it."""
        return [(node, job.key, "out") for node in job.writers]

    def _collect(self, job: Launched, state: Running) -> None:
        """Fetch what its ranks wrote; then it has ended."""

        def then(trouble: str) -> None:
            now = time.monotonic()
            if job.state is not state or state.ended is None:
                return
            if trouble and now < state.starved:
                state.collecting, state.collect_at = False, now + AGAIN
                return
            why = f"what it wrote cannot be fetched: {trouble}" if trouble else ""
            found = replace(state.ended, trouble=state.ended.trouble or why)
            if trouble and not found.code:
                found = Result(Cause.FAILED, 1, why)
            if state.starved:  # which explains it, and no other loss does
                return self.terminate(job, found)
            self._heard(job, found)

        self._transfers.begin(job.key, self._from(job), then, "what it wrote")

    def tell_share(self, job: Launched, share: protocol.Share) -> None:
        """Say how its ranks wait, and whether they are suspended."""
        self._hub.tell(messages.Wait(job.key, share.wait.mode, share.wait.yields))
        self._hub.tell(messages.Suspend(job.key, share.suspended))

    def _config(self, job: Launched) -> dict[str, Any]:
        spec, store = job.spec, job.store
        environment = dict(spec.environment)
        found_by = {} if spec.image else command_line.found_by(environment)
        words = images.words if spec.image else command_line.program
        return {
            "name": spec.name,
            "case": f"{self._home}/{case_folder(spec)}" if store else spec.case,
            "home": f"{self._home}/{job.key if store else spec.name}",
            "apart": bool(store) and len({*job.connected.values()}) > 1,
            "ranks": spec.ranks,
            "alone": programs.is_alone(spec.application, spec.ranks),
            "command": list(spec.command),
            "prepare": [[line, words(line)] for line in spec.prepare],
            **{
                step: words(line) if line else []
                for step, line in (
                    ("go_on", spec.go_on),
                    ("halt", spec.halt),
                    ("halted", spec.halted),
                )
            },
            "environment": {**environment, **found_by},
            "mpi": self.mpi.get(mpi_clues(spec)) or None,
            "libraries": install_paths.libraries(),
            "log_limit": self._log_limit,
        }

    # --- the end ---

    def checkpoint(self, job: Launched) -> None:
        """Have it stop at a checkpoint, for which it goes on if it is suspended."""
        if isinstance(job.state, Running) and not job.stopped:
            job.share = replace(job.share, suspended=False)
            self._hub.tell(messages.Suspend(job.key, False))
            self._hub.tell(messages.Checkpoint(job.key))

    def stop(self, job: Launched, why: str, cause: Cause) -> None:
        """Have it end: SIGTERM, a grace, SIGKILL; what does not run yet never will."""
        if job.stop(why, cause, time.monotonic()):
            self._hub.tell(messages.Suspend(job.key, False))
            self._hub.tell(messages.Stop(job.key))

    def heard(self, job: Launched, result: Result) -> None:
        """Its supervisor has said how it ended; what it wrote is fetched before that counts."""
        state, job.heard = job.state, True
        if isinstance(state, Running) and state.starved:
            return
        copied = job.store and result.cause is not Cause.POD_LOST
        if copied and isinstance(state, Running):
            state.ended, state.deadline = state.ended or result, 0.0
            self._copy(job, state)
        else:
            self._heard(job, result)

    def _heard(self, job: Launched, result: Result) -> None:
        state = job.state
        if isinstance(state, Running):
            state.doubted = result
            if result.cause is Cause.POD_LOST:
                state.deadline = state.deadline or time.monotonic() + DEAF
            self._believe(job, state)
        elif isinstance(state, (Creating, Gathering)):
            if result.code and not job.stopped:
                return self.lose(job, result.reason)  # it never ran
            self.terminate(job, result)

    def _starve(self, job: Launched, result: Result) -> None:
        """The kernel has killed a pod of it; what it wrote is fetched where its nodes are there.

        Whose agent goes meanwhile may know nothing of it afterwards, and is not waited for.
        """
        state = job.state
        assert isinstance(state, Running)
        if not job.store or not self._all_heard(job):
            return self.terminate(job, result)
        if not state.starved:
            state.starved = time.monotonic() + STOP
            state.ended, state.doubted, state.deadline = result, None, 0.0
            self._hub.tell(messages.Suspend(job.key, False))
            self._hub.tell(messages.Stop(job.key))
            self._transfers.forget(job.key)  # of an end that was heard of before
            state.collecting = False
            self._copy(job, state)

    def _all_heard(self, job: Launched) -> bool:
        """Whether all its nodes are known, and their agents there."""
        return job.complete and {*job.connected.values()} <= self._hub.nodes()

    def vanished(self, job: Launched, group: int, node: str) -> None:
        """A pod has ended without a result, says its agent; the API will soon know by what."""
        why = f"rank group {group} on {node} ended without a result"
        state = job.state
        self._dissolve(job)
        if not isinstance(state, Running) or job.stopped:
            self.lose(job, why)
        elif state.doubted is None and not state.starved:
            state.doubted = Result(Cause.POD_LOST, 1, f"pod lost: {why}")
            state.deadline = time.monotonic() + DEAF

    def _believe(self, job: Launched, state: Running) -> None:
        """Take what the ranks said of their end; a lost node or pod is why they failed."""
        if state.doubted is None or (state.doubted.cause is Cause.POD_LOST and not job.stopped):
            return
        away = set(map(pod_status.node_of, job.pods.values())) - self._hub.nodes()
        failed = state.doubted.code and not job.stopped
        if failed and away:
            state.deadline = state.deadline or time.monotonic() + DOUBT
        elif failed and state.inquiry is not Inquiry.DONE:
            self._inquire(job, state)
        else:
            self.terminate(job, state.doubted)

    def _inquire(self, job: Launched, state: Running) -> None:
        """Find out whether pods are deleted, of which the watch may not have told yet."""

        def done(found: Any) -> None:  # noqa: ANN401
            state.inquiry = Inquiry.DONE
            if isinstance(found, Exception) or job.state is not state:
                return
            there = {pod_status.group_of(pod) for pod in found if not pod_status.deleted(pod)}
            for group in set(job.pods) - there:
                self.pod(job, "DELETED", job.pods[group])

        if state.inquiry is Inquiry.NONE:
            state.inquiry = Inquiry.UNDER_WAY
            self._list(job, done)

    def lose(self, job: Launched, why: str) -> None:
        """Pods are lost: try again if it did not run yet, else it has ended."""
        if not isinstance(job.state, (Creating, Gathering, Running)):
            return
        early = not isinstance(job.state, Running)  # in Creating: the API's answer is late
        if early and not job.stopped and job.failures < FAILURES:
            job.failures += 1
            self._delayed(job, why)
            self.terminate(job, None)
        else:
            self.terminate(job, Result(Cause.POD_LOST, 1, f"pod lost: {why}"))

    def terminate(self, job: Launched, result: Result | None) -> None:
        """Delete everything that a simulation has on the cluster; see `Terminating`."""
        reusable = self._reusable(job, result)
        job.terminate(result, time.monotonic())
        self._transfers.forget(job.key)
        self._hub.copies.shut(job.key)  # a node that was cut off may have another idea of it
        if self._placing is job:
            self._placing = None
        code = result.code if result else 1
        if reusable:
            return self._hand_over(job, code)
        self._hub.tell(messages.End(job.key, code))
        self._delete(job)

    def _reusable(self, job: Launched, result: Result | None) -> bool:
        """Whether another may have its pods: it has ended well, and so did nothing to them.

        Where nodes have copies of its folders these go with it.
        """
        over = result and result.code == 0 and result.cause in (Cause.DONE, Cause.CHECKPOINTED)
        ended = isinstance(job.state, Running) and job.heard and over and not job.stopped
        there = job.complete and len(job.pods) == len(job.sizes)
        return bool(
            self.hands_over and ended and there and not job.store and not job.labelling
            and not any(map(pod_status.ending, job.pods.values()))
        )  # fmt: skip

    def _delete(self, job: Launched) -> None:
        state = job.state
        assert isinstance(state, Terminating)
        state.deletion = Deletion.REQUESTED
        name = job.made
        pods = [pod["metadata"]["name"] for pod in job.pods.values()]
        born = [f"{name}.{index}" for index in range(len(job.sizes))]
        keys = dict.fromkeys([*born, *(f"{one}.node" for one in born)])

        def work() -> None:
            for kind in self._session.launcher.kinds:
                self._api.delete(path(kind, name))
            for pod in pods:
                self._api.delete(path("Pod", pod))
            with contextlib.suppress(NotFound):  # somebody has deleted them all
                self._api.patch(path("ConfigMap", manifests.REQUESTS), {"data": keys})

        def done(found: Any) -> None:  # noqa: ANN401
            failed = isinstance(found, Exception)
            state.deletion = Deletion.FAILED if failed else Deletion.DONE
            state.retry_at = time.monotonic() + (AGAIN if failed else 0.0)

        self._calls.submit(work, done)

    def _check_gone(self, job: Launched, state: Terminating, now: float) -> None:
        late = now > state.deadline
        if job.heard and state.result is not None and self._api.silent():
            return self._end(job)  # whoever said so is the last of it; its objects wait for `close`
        if state.spare:
            there = isinstance(state.spare.state, Spare) and state.spare.complete
            if there or isinstance(state.spare.state, Over):
                self._end(job)
            return
        if late:
            state.deadline = now + FORCE
            for pod in list(job.pods.values()):
                name = pod["metadata"]["name"]
                self._calls.submit(
                    functools.partial(self._api.delete, path("Pod", name), grace=0),
                    lambda found: None,
                )
        if state.deletion in (Deletion.REQUESTED, Deletion.CONFIRMING) or now < state.retry_at:
            return
        if state.deletion is Deletion.FAILED:
            self._delete(job)
        elif late or all(map(pod_status.over, job.pods.values())):  # late: a watch may hang
            state.deletion = Deletion.CONFIRMING
            self._list(job, lambda found: self._confirmed(job, state, found))

    def _list(self, job: Launched, then: Callable[[Any], None]) -> None:
        """Ask for a simulation's pods."""
        label = f"{manifests.JOB}={job.made},{manifests.RUN}={self._session.run}"
        self._calls.submit(lambda: self._api.get(path("Pod"), labelSelector=label)["items"], then)

    def _confirmed(self, job: Launched, state: Terminating, found: Any) -> None:  # noqa: ANN401
        if job.state is not state:  # it was not waited for, as the API was silent for long
            return
        if isinstance(found, Exception):
            state.deletion, state.retry_at = Deletion.DONE, time.monotonic() + AGAIN
        elif not all(map(pod_status.over, found)):  # one that we had not heard of yet
            for pod in found:
                job.pods[pod_status.group_of(pod)] = pod
            self._delete(job)
        else:
            job.pods.clear()
            if state.result is None and not job.stopped:
                job.start_over(time.monotonic())
            else:
                self._end(job)

    def _end(self, job: Launched) -> None:
        job.finish()
        if self._placing is job:
            self._placing = None
        if self.spares.get(job.key) is job:
            del self.spares[job.key]
            return
        del self.jobs[job.spec.name]
        self._ended(job)
