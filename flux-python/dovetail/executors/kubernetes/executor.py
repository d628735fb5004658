# SPDX-License-Identifier: LGPL-3.0-or-later
"""The Kubernetes executor: rank groups are pods.

Inputs: launches, resizes and stops from the controller; pods and nodes as the API shows them;
what the agents on the nodes say. Outputs: events, as of `protocol.Executor`.

Invariants: no call here waits for the network: threads do, and `observe` takes in what they say,
in the controller's thread, which alone touches any state. Whatever ends, a Finished is reported
only when nothing of the simulation runs any more; what the API still shows of it, `close` awaits.
"""

from __future__ import annotations

import contextlib
import queue
import select
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable

from dovetail import applications
from dovetail.core import protocol
from dovetail.core.errors import WorkFailed
from dovetail.core.protocol import Cause, Result
from dovetail.executors import pods
from dovetail.executors.kubernetes import manifests, pod_status
from dovetail.executors.kubernetes.api import SILENCE, Watch
from dovetail.executors.kubernetes.background_calls import Calls, within
from dovetail.executors.kubernetes.lifecycle import (
    Launched,
    Lifecycle,
    Pending,
    Running,
    mpi_clues,
    new_key,
)
from dovetail.executors.kubernetes.manifests import path
from dovetail.executors.kubernetes.nodes import Nodes
from dovetail.executors.kubernetes.resizes import Change, Resizes
from dovetail.executors.kubernetes.session import LAST, Session, look
from dovetail.executors.kubernetes.share_report import Report
from dovetail.executors.kubernetes.transfers import Transfers
from dovetail.executors.pods import messages
from dovetail.host import install_paths

_WORKERS = 8
_CLOSE = 40.0  # seconds for all simulations to be gone at the end
_OTHERS = 10.0  # seconds between looks at the pods of others while they take room,
_LOST = 0.5  # and between looks whether nodes are gone


class KubernetesExecutor:
    """Runs simulations on a cluster; implements `protocol.Executor`.

    `run_dir` takes the simulations' directories; nodes see it, or else have copies.
    `limits` are millicores and bytes to stay within, None for all there is. `origin` is the
    CLOCK_MONOTONIC time of the run clock's 0; `log_limit` bounds each log, bytes; `devices` are
    those of which the capacity tells.
    """

    def __init__(
        self,
        session: Session,
        run_dir: Path,
        limits: tuple[int | None, int | None] = (None, None),
        origin: float | None = None,
        log_limit: int = 64 << 20,
        devices: Sequence[str] = (),
    ) -> None:
        if session.hub is None:
            raise WorkFailed("the session is closed")
        self._session, self._api, self._hub = session, session.api, session.hub
        self._run_dir = Path(run_dir)
        self._origin = time.monotonic() if origin is None else origin
        self.results: dict[str, Result] = {}
        self.left: list[str] = []
        self._events: list[protocol.Event] = []
        self._launches = 0
        self._t = 0.0
        self._closed = False
        self._adopts = session.resumed  # until then what runs is not ours to end
        self._lost_since = 0.0  # when the user was told that the run cannot go on
        self._alone_since = 0.0  # when nobody answered any more, neither API nor agents
        self._patience = pods.orphan_limit()
        self._complaint = ""  # what the user knows of an API that does not answer
        self._hurried = 0.0  # when the user asked for an end at once
        self._others_at = 0.0  # when the pods of others are looked at next,
        self._lost_at = 0.0  # and whether nodes are gone
        self._sampled_now: set[str] = set()  # of whom ranks have something new
        self._unmeasured: set[str] = set()  # why programs are not measured, as the user knows
        self._wanted: dict[str, list[int]] = {}  # by the resize that is under way,
        self._known: dict[str, set[str]] = {}  # and the pods that there were when it began
        self._calls = Calls(_WORKERS)
        self._resizes = Resizes(self._api, self._calls)
        self._report = Report(self._run_dir, session.run)
        self._nodes = Nodes(limits, devices)
        self._nodes.listed(*look(self._api, session.run))
        self._nodes.leave_out(session.left_out)
        self._capacity = self._nodes.capacity
        self._transfers = Transfers(self._hub)
        self._life = Lifecycle(
            session, self._calls, self._nodes, self._resizes, self._transfers,
            str(self._run_dir.resolve()), log_limit, self._ended, self._delayed, self._placed,
        )  # fmt: skip
        label = f"{manifests.RUN}={session.run},{manifests.PART}={manifests.RANK_GROUP}"
        self._watches = [
            Watch(self._api, path("Pod"), self._news(self._pods_news), labelSelector=label),
            Watch(self._api, path("Node"), self._news(self._nodes.news)),
        ]
        self._poll = select.poll()
        for source in (self._calls.fileno(), self._hub.fileno()):
            self._poll.register(source, select.POLLIN)

    def _news(self, take: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
        """What a watch's thread calls; `take` is then called in ours."""
        return lambda kind, thing: self._calls.put(lambda: take(kind, thing))

    def capacity(self) -> protocol.Capacity:
        """All nodes that are ready, without what the pods of others ask for."""
        return self._capacity

    # --- what the controller asks for ---

    def launch(self, spec: protocol.Spec, share: protocol.Share) -> None:
        """Start a simulation as soon as it fits. ValueError if it is started already."""
        if spec.name in self._life.jobs:
            raise ValueError(f"simulation {spec.name} is running")
        again = self._session.resumed or spec.name in self.results
        key = new_key(spec.name, again)
        self._life.jobs[spec.name] = Launched(spec, share, key, Pending(time.monotonic()))

    def adopt(self, wanted: Mapping[str, tuple[protocol.Spec, protocol.Share]]) -> Sequence[str]:
        """Go on with what an earlier controller of this run started; returns their names.

        What else it left is removed, and that is waited for: nothing may run twice. Until that is
        done `close` ends nothing.
        """
        there = self._session.alive()
        for name in there.keys() & wanted.keys():
            spec, share = wanted[name]
            meta = there[name]["metadata"]
            key = meta["labels"][manifests.KEY]
            sizes = manifests.sizes_of(there[name])
            state = Running(begun=True, spread=True)  # as far as we know
            job = Launched(spec, share, key, state, sizes, started=True, made=meta["name"])
            job.cpu = self._nodes.divided(job.sizes, share.requests)
            job.store = manifests.store_of(there[name])
            self._life.jobs[name] = job
            self._life.open(job)
            for pod in self._session.pods:  # the watch tells what has become of those we know
                ours = pod_status.job_of(pod) == job.made
                if ours and not pod_status.ending(pod):
                    self._life.pod(job, "ADDED", pod)
            self._life.tell_share(job, share)
        self._session.discard(keep={job.made for job in self._life.jobs.values()})
        self._adopts = False
        return tuple(self._life.jobs)

    def resize(self, shares: Mapping[str, protocol.Share]) -> None:
        """Give new shares, all or none; a Resized follows."""
        wanted = dict(shares)
        self._resizes.add(
            lambda: self._changes(wanted), lambda refused: self._resized(wanted, refused)
        )

    def checkpoint(self, name: str) -> None:
        """Ask a simulation to stop at a checkpoint; a Finished follows once it has."""
        job = self._life.jobs.get(name)
        if job is not None:
            self._life.checkpoint(job)

    def stop(self, name: str, why: str, cause: Cause = Cause.CANCELLED) -> None:
        """End a simulation: SIGTERM, a grace, SIGKILL; a Finished follows."""
        job = self._life.jobs.get(name)
        if job is not None and not job.stopped and not job.result:
            self._life.stop(job, why, cause)

    def close(self) -> None:
        """End everything and remove every trace; may be called twice.

        What runs there and could not be adopted goes on, for who resumes the run once more.
        Afterwards `observe` once more says how they ended.
        """
        if self._closed:
            return
        self._closed = True
        self._api.end()
        if not within(self._end, lambda: 0.0 < self._hurried < time.monotonic() - LAST):
            alive = sorted(self._life.jobs)
            self.left = [f"{name}: its end was not waited for" for name in alive] or [
                f"the removal of {manifests.RUN}={self._session.run} was not waited for"
            ]

    def hurry(self) -> None:
        """Have `close` take no more than a few seconds; from a signal's handler too."""
        self._hurried = self._hurried or time.monotonic()

    def news(self) -> Sequence[str]:
        """What went wrong with the cluster and what was done about it, since the last call.

        And which programs cannot be measured.
        """
        lines = []
        complaint = self._api.complaint()
        if bool(complaint) != bool(self._complaint):
            self._complaint = complaint
            said = f"does not answer: {complaint}" if complaint else "answers again"
            lines.append(f"{self._api.server} {said}")
        with contextlib.suppress(queue.Empty):
            while True:
                lines.append(self._session.news.get_nowait())
        return lines

    def _end(self) -> None:
        until = time.monotonic() + _CLOSE
        self._life.hands_over = False
        jobs = [] if self._adopts else list(self._life.jobs.values())
        for job in jobs:
            job.outlived()
            if isinstance(job.state, Running):
                self._life.terminate(job, None)
        while jobs and self._life.jobs and time.monotonic() < until and not self.silent():
            self._sleep(1.0)
            self._t = self._now()
            self._take_in()
        for watch in self._watches:
            watch.stop()
        self.left = self._session.close(leave=self._adopts)
        self._calls.close()

    # --- what happens ---

    def wait(self, timeout: float) -> bool:
        """Sleep until something happens or `timeout` seconds are over; True if it happened."""
        return bool(self._events) or self._sleep(timeout)

    def _sleep(self, timeout: float) -> bool:
        times = [self._life.deadline(job) for job in self._life.all()]
        times = [moment for moment in (*times, self._resizes.deadline) if moment]
        limit = min([timeout, *(moment - time.monotonic() for moment in times)])
        return bool(self._poll.poll(max(0.0, limit * 1000)))

    def silent(self) -> bool:
        """Whether an end need not wait for the cluster: it has long not answered, or refuses us."""
        return self._api.silent() or 0.0 < self._lost_since < time.monotonic() - SILENCE

    def observe(self, t: float) -> Sequence[protocol.Event]:
        """What happened since the last call, oldest first; `t` is now on the run's clock."""
        self._t = t
        if not self._closed:
            self._take_in()
        events, self._events = self._events, []
        return events

    def _take_in(self) -> None:
        self._calls.take()
        for node, message in self._hub.take():
            self._hear(node, message)
        for name in self._sampled_now:  # once, however many nodes it is on
            if name in self._life.jobs:
                self._tell_sample(self._life.jobs[name])
        self._sampled_now.clear()
        now = time.monotonic()
        self._nodes.leave_out(self._session.left_out)
        if now >= self._lost_at:
            self._lost_at = now + _LOST
            self._find_lost(now)
        for job in self._life.all():
            self._life.advance(job, now)
        self._resizes.held = self._life.in_between
        for key, words in self._transfers.progress(now):
            delayed = self._life.of(key)
            if delayed is not None:
                self._delayed(delayed, words)
        if self._report.look(now, self._life.jobs.values()):
            self._nodes.formula = self._report.formula
        self._resizes.poll(now)
        self._look_at_others(now)
        self._compare_capacity()
        self._ask_weights(now)

    def _hear(self, node: str, message: messages.Message) -> None:
        if isinstance(message, messages.Sample):
            return self._sampled(node, message)
        if isinstance(message, messages.Used):
            return self._used(node, message)
        if isinstance(message, messages.Weights):
            return self._report.heard(message.values)
        if isinstance(message, messages.Joined):
            return self._transfers.again(node)
        if isinstance(message, messages.Staged):
            return self._transfers.heard(node, message)
        if isinstance(message, messages.Ping):
            return None if self._closed else self._hub.answer(node)
        key = getattr(message, "simulation", "")
        job = self._life.of(key)
        if job is None:
            known = isinstance(message, (messages.Pod, messages.Result, messages.Lost))
            if known and not self._closed:
                self._hub.tell(messages.End(key, 1))  # of a launch that is over
            return
        if isinstance(message, messages.Pod):
            job.connected[message.group] = node
        elif isinstance(message, messages.Prepared):
            self._life.prepared(job)
        elif isinstance(message, messages.Started):
            self._life.mpi[mpi_clues(job.spec)] = message.mpi
            why = install_paths.why_unmeasured(message.mpi)
            if why and why not in self._unmeasured:
                self._unmeasured.add(why)
                self._session.news.put(why)
            if not job.started:
                job.started = True
                case = str(self._run_dir / job.spec.name / "case")
                total = applications.prepared_iterations(job.spec, case)
                self._events.append(
                    protocol.Started(self._t, job.spec.name, message.iterations, total)
                )
        elif isinstance(message, messages.Result):
            self._life.heard(
                job, Result(message.cause, message.code, message.reason, message.trouble)
            )
            self._tell_sample(job)  # which its end completes
        elif isinstance(message, messages.Counts):
            seen = job.waits.take(message, job.sizes)
            if job.started and seen != protocol.Contention():
                self._events.append(protocol.Counted(self._t, job.spec.name, seen))
        elif isinstance(message, messages.Lost):
            self._life.vanished(job, message.group, node)

    def _sampled(self, node: str, message: messages.Sample) -> None:
        offset = self._hub.clocks.offset(node) - self._origin
        for key in dict.fromkeys((*message.ranks, *message.lines)):
            job = self._life.of(key)
            if job is not None:
                job.samples.take(message.ranks.get(key, {}), message.lines.get(key), offset)
                self._sampled_now.add(job.spec.name)

    def _used(self, node: str, message: messages.Used) -> None:
        now = message.now + self._hub.clocks.offset(node) - self._origin
        for key, groups in message.groups.items():
            job = self._life.of(key)
            if job is not None:
                job.samples.take_used(groups, job.sizes, now)
                self._sampled_now.add(job.spec.name)

    def _tell_sample(self, job: Launched) -> None:
        ranks = job.samples.new(job.ended_well) if job.started else None
        if ranks is not None:
            family = job.spec.family
            self._life.peak[family] = max(self._life.peak.get(family, 0), sum(ranks.memory))
            self._events.append(protocol.Sampled(self._t, job.spec.name, ranks))

    def _pods_news(self, kind: str, thing: Any) -> None:  # noqa: ANN401
        if kind != "LISTED":
            job = self._life.of_pod(thing)
            if job is not None:
                self._life.pod(job, kind, thing)
            return
        there = {pod["metadata"]["name"] for pod in thing}
        for job in self._life.all():
            for pod in list(job.pods.values()):
                if pod["metadata"]["name"] not in there:
                    self._life.pod(job, "DELETED", pod)
        for pod in thing:
            self._pods_news("MODIFIED", pod)

    def _find_lost(self, now: float) -> None:
        """Give up what ran on nodes that are gone, and the run where all are."""
        live = [job for job in self._life.jobs.values() if job.expected]
        used = {pod_status.node_of(pod) for job in live for pod in job.pods.values()} - {""}
        for name, why in self._nodes.lost(now, self._hub.nodes(), used).items():
            for job in live:
                if job.expected and name in map(pod_status.node_of, job.pods.values()):
                    self._life.terminate(
                        job, Result(Cause.NODE_LOST, 1, f"node lost: {name}: {why}")
                    )
        why = self._session.lost or self._abandoned(now)
        if why and not self._lost_since:
            self._lost_since = now
            self._events.append(protocol.Interrupted(self._t, why))

    def _abandoned(self, now: float) -> str:
        """Why nothing is waited for any more, if the cluster is gone: all there has ended by then.

        As long as an agent is there, what runs beside it goes on without the API.
        """
        silent = self._api.silent()
        there = self._hub.nodes() if silent else set()
        if not silent or any(there & {*one.connected.values()} for one in self._life.all()):
            self._alone_since = 0.0
            return ""
        self._alone_since = self._alone_since or now
        if now - self._alone_since < self._patience:
            return ""
        told = f"has not answered for {self._patience:g} s, and nothing runs there"
        return f"{self._api.server} {told}"

    def _ask_weights(self, now: float) -> None:
        if not self._report.due(now):
            return
        uids: dict[str, list[str]] = {}
        for job in self._life.jobs.values():
            for pod in job.pods.values():
                uids.setdefault(pod_status.node_of(pod), []).append(pod["metadata"]["uid"])
        for node, ones in uids.items():
            self._hub.send(node, messages.Check(ones))

    def _look_at_others(self, now: float) -> None:
        """See whether pods of others have ended; those that come are seen at each launch."""
        if not self._nodes.shared or now < self._others_at:
            return
        self._others_at = now + _OTHERS
        self._calls.submit(
            lambda: look(self._api, self._session.run),
            lambda found: None if isinstance(found, Exception) else self._nodes.listed(*found),
        )

    def _compare_capacity(self) -> None:
        if self._nodes.capacity != self._capacity:
            self._capacity = self._nodes.capacity
            self._events.append(protocol.CapacityChanged(self._t, self._capacity))

    # --- resizes ---

    def _changes(self, shares: Mapping[str, protocol.Share]) -> list[Change] | str:
        """The pods whose requests change with these shares; or why that cannot be."""
        for name in shares:
            job = self._life.jobs.get(name)
            if job is None or job.result or job.stopped:
                return f"{name}: runs no more"
        self._wanted, self._known = self._fitted(shares), {}
        changes = []
        for name, wanted in self._wanted.items():
            job = self._life.jobs[name]
            self._known[name] = names(job)
            limits = [*zip(job.limits(job.share), job.limits(shares[name]))]
            for group in range(len(wanted)):
                if group in job.pods:  # of which one may not have got what it was to have
                    pod, (old, new) = job.pods[group], limits[group]
                    has = pod_status.born_with(pod)[0], old
                    change = Change.between(pod["metadata"]["name"], has, (wanted[group], new))
                    changes.append(change)
        return changes

    def _fitted(self, shares: Mapping[str, protocol.Share]) -> dict[str, list[int]]:
        """What the rank groups with new shares shall ask for, as far as their nodes have it."""
        wanted: dict[str, list[int]] = {}
        on: dict[str, list[tuple[str, int]]] = {}
        taken: dict[str, int] = {}
        for name, job in self._life.jobs.items():
            new = name in shares
            if new:
                wanted[name] = self._nodes.divided(job.sizes, shares[name].requests)
            for group, pod in job.pods.items():
                node = pod_status.node_of(pod)
                if new:
                    on.setdefault(node, []).append((name, group))
                elif not pod_status.over(pod):
                    taken[node] = taken.get(node, 0) + job.cpu[group]
        for node, places in on.items():
            cpus = [wanted[name][group] for name, group in places]
            fitted = self._nodes.fitted(node, cpus, taken.get(node, 0))
            for (name, group), cpu in zip(places, fitted):
                wanted[name][group] = cpu
        return wanted

    def _resized(self, shares: Mapping[str, protocol.Share], refused: str) -> None:
        """A transaction is over: the rest of the shares takes effect with it, or nothing does."""
        for name, share in shares.items() if not refused else ():
            job = self._life.jobs.get(name)
            if job is None:
                continue
            old, job.share = job.share, share
            job.cpu = self._wanted[name]
            if len(job.cpu) != len(job.sizes):  # its place was found meanwhile
                job.cpu = self._nodes.divided(job.sizes, share.requests)
            if names(job) - self._known[name]:
                self._life.correct(job)
            if isinstance(job.state, Running) and (old.wait, old.suspended) != (
                share.wait,
                share.suspended,
            ):
                self._life.tell_share(job, share)
            if job.sizes and old.requests != share.requests:
                self._life.publish(job)
        self._report.soon(time.monotonic())
        self._events.append(protocol.Resized(self._t, tuple(shares), refused))

    # --- ends ---

    def _delayed(self, job: Launched, why: str) -> None:
        self._events.append(protocol.Delayed(self._t, job.spec.name, why))

    def _placed(self, job: Launched) -> None:
        nodes = tuple(job.connected[group] for group in range(len(job.sizes)))
        self._events.append(protocol.Placed(self._t, job.spec.name, nodes))

    def _ended(self, job: Launched) -> None:
        result = job.result or Result(Cause.FAILED, 143)
        if job.stopped:
            result = result.once_stopped(job.stop_cause, job.stopped)
        self.results[job.spec.name] = result
        self._events.append(
            protocol.Finished(self._t, job.spec.name, result.cause, result.code, result.reason)
        )

    def _now(self) -> float:
        return time.monotonic() - self._origin


def names(job: Launched) -> set[str]:
    """Its pods."""
    return {pod["metadata"]["name"] for pod in job.pods.values()}
