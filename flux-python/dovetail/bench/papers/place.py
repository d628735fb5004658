# SPDX-License-Identifier: LGPL-3.0-or-later
"""Where simulations are measured: as processes or as pods, with fixed shares and no controller.

Inputs: `Run`s. Outputs: `Seen` of each, over the same iterations of its solver, while all of them
run. Invariants: nothing is timed before every simulation has done its first iterations, since
starting up is not what the papers compare; cases are endless, so that no simulation ends while
others are measured; every simulation is gone when `measure` returns.

What is said of throttling comes from the control groups of the ranks, and what is said of context
switches and of waiting for a core from the kernel's figures of their processes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.bench.cases import SOLVER, environment
from dovetail.core.errors import WorkFailed
from dovetail.core.protocol import Finished, Ranks, Resized, Sampled, Share, Spec, WaitPolicy
from dovetail.executors.local.executor import LocalExecutor
from dovetail.host import cgroups

if TYPE_CHECKING:  # the Kubernetes client takes most of a second to import
    from dovetail.executors.kubernetes.executor import KubernetesExecutor
    from dovetail.executors.kubernetes.session import Session

LOCAL, KUBERNETES = "local", "kubernetes"
WARM = 3  # iterations that do not count
_LOOK = 0.05  # seconds between looks
_START = 120.0  # seconds in which every simulation must have begun to iterate
_LIFT = 15.0  # seconds after which those that are throttled get no limits until they do
_PATIENCE = 90.0  # seconds in which a slow one must have done an iteration that counts
_DEPTH = 9  # of groups below the mount


class NotHere(Exception):
    """This machine cannot measure it; the words say why."""


@dataclass(frozen=True)
class Run:
    """One simulation. `requests` are millicores by rank; `limit` is how many times its request a
    rank group may use at most in each `period` (microseconds), 0 for no limit. With `apart` each
    rank is a group, or a pod, of its own. `cpus` are those that its processes may use, if not all.
    What is not `counted` only has to be there. Its first `warm` iterations do not count.
    """

    case: Path
    requests: tuple[int, ...]
    command: tuple[str, ...] = SOLVER
    wait: str = "off"
    limit: float = 0.0
    period: int = cgroups.PERIOD
    apart: bool = False
    cpus: tuple[int, ...] = ()
    counted: bool = True
    warm: int = WARM


@dataclass(frozen=True)
class Seen:
    """`seconds` per iteration; `cores` in use; seconds outside and inside MPI by rank.

    `throttled` is the share of periods in which a rank group was, `throttled_s` and `waited_s` are
    seconds per second (throttled; ready, without a core), `switches` are per second. `lifted` says
    that it began without its limits, since it did not begin with them. `restarts` is how often
    ranks counted their iterations from the beginning again.
    """

    seconds: float
    cores: float
    useful: tuple[float, ...]
    mpi: tuple[float, ...]
    throttled: float
    throttled_s: float
    switches: float
    waited_s: float
    lifted: bool = False
    restarts: int = 0

    def figures(self) -> dict[str, float]:
        """What is kept of it."""
        return {
            "seconds": self.seconds,
            "cores": self.cores,
            "throttled": self.throttled,
            "throttled_s": self.throttled_s,
            "switches": self.switches,
            "waited_s": self.waited_s,
            "lifted": float(self.lifted),
            "restarts": float(self.restarts),
        }


@dataclass(frozen=True)
class Counters:
    """What the kernel counted up to a moment, by rank group and by process."""

    groups: tuple[tuple[int, int, float], ...]
    processes: Mapping[int, tuple[int, float]]


class Place:
    """Runs simulations here or, with a `kubeconfig`, as pods of that cluster."""

    def __init__(self, scratch: Path, kubeconfig: Path | None = None) -> None:
        self.scratch = scratch
        self.kubeconfig = kubeconfig
        self.cores = len(os.sched_getaffinity(0))
        self._executor: LocalExecutor | KubernetesExecutor | None = None
        self._session: Session | None = None
        self._token = secrets.token_hex(4)
        self._launched = 0
        self._origin = time.monotonic()

    @property
    def kind(self) -> str:
        """`local` or `kubernetes`."""
        return KUBERNETES if self.kubeconfig else LOCAL

    def close(self) -> None:
        """End all that runs."""
        if self._executor is not None:
            self._executor.close()
            self._executor = None

    def measure(
        self,
        runs: Sequence[Run],
        iterations: int,
        seconds: float,
        during: Callable[[int, Callable[[Sequence[int]], None]], None] | None = None,
    ) -> list[Seen]:
        """Run all at once; what was seen of those that count, over so many iterations each.

        A slow one has `seconds`, and is then measured over what it has done. `during` is called
        with the iterations that the first one has done since, and with what gives it new requests.
        """
        specs = [self._spec(run) for run in runs]
        executor = self._start(specs)
        try:
            for spec, run in zip(specs, runs):
                executor.launch(spec, Share(run.requests, WaitPolicy(run.wait)))
            return self._watch(executor, specs, runs, iterations, seconds, during)
        finally:
            self._end(executor, [spec.name for spec in specs])

    # --- its parts ---

    def _spec(self, run: Run) -> Spec:
        self._launched += 1
        added = tuple((k, v) for k, v in environment().items() if os.environ.get(k) != v)
        added += (("OMPI_MCA_odls_base_sigkill_timeout", "0"),)  # an endless one ends at once
        ranks = len(run.requests)
        limit = 0.0
        if self.kind == KUBERNETES:
            limit = run.limit
            added += (("OMPI_MCA_btl", "tcp,self"),)  # as between the papers' pods
        return Spec(
            f"s{self._launched}", "papers", str(run.case), ranks, (1.0,) * ranks, run.command,
            environment=added, ranks_per_pod=1 if run.apart else 0, limit=limit,
        )  # fmt: skip

    def _start(self, specs: Sequence[Spec]) -> LocalExecutor | KubernetesExecutor:
        if self._executor is None:
            self.scratch.mkdir(parents=True, exist_ok=True)
            if self.kubeconfig is None:
                self._executor = LocalExecutor(
                    self.scratch, origin=self._origin, run_id=self._token
                )
            else:
                from dovetail.executors.kubernetes.executor import KubernetesExecutor
                from dovetail.executors.kubernetes.session import Session, connect

                self._session = Session(connect(self.kubeconfig), self.scratch, specs, False)
                self._executor = KubernetesExecutor(
                    self._session, self.scratch, origin=self._origin
                )
        return self._executor

    def _watch(
        self,
        executor: LocalExecutor | KubernetesExecutor,
        specs: Sequence[Spec],
        runs: Sequence[Run],
        iterations: int,
        seconds: float,
        during: Callable[[int, Callable[[Sequence[int]], None]], None] | None,
    ) -> list[Seen]:
        counted = [spec.name for spec, run in zip(specs, runs) if run.counted]
        first: dict[str, Ranks] = {}
        last: dict[str, Ranks] = {}
        before: dict[str, Counters] = {}
        after: dict[str, tuple[Ranks, Counters, float]] = {}
        arranged: set[str] = set()
        restarts = dict.fromkeys(counted, 0)
        lifted = False
        began, started = time.monotonic(), 0.0
        by_name = dict(zip([spec.name for spec in specs], runs))

        def resize(requests: Sequence[int]) -> None:
            run = runs[0]
            executor.resize({specs[0].name: Share(tuple(requests), WaitPolicy(run.wait))})

        while len(after) < len(counted):
            executor.wait(_LOOK)
            now = time.monotonic()
            for event in executor.observe(now - self._origin):
                if isinstance(event, Finished):
                    raise WorkFailed(f"a simulation ended while it was measured: {event.reason}")
                if isinstance(event, Resized) and event.refused:
                    raise WorkFailed(f"new requests were refused: {event.refused}")
                if isinstance(event, Sampled):
                    if event.name in first and began_anew(last[event.name], event.ranks):
                        restarts[event.name] += 1
                    last[event.name] = event.ranks
            if not started:
                warm = all(n in last for n in by_name)
                warm = warm and all(min(last[n].iterations) >= by_name[n].warm for n in counted)
                ready = (warm or not lifted) and all(  # lifted limits begin again only then
                    n in last and self._arrange(n, by_name[n], arranged) for n in by_name
                )
                if ready and warm:
                    started = now
                    for name in counted:
                        first[name], before[name] = last[name], self._counters(name, by_name[name])
                elif not lifted and now - began > _LIFT:
                    lifted = True  # throttled ranks that spin may need minutes to begin
                    arranged.clear()
                    for name, run in by_name.items():
                        self._lift(name, run)
                elif now - began > _START:
                    raise WorkFailed(f"not every simulation began in {_START:.0f} s")
                continue
            if during is not None:
                during(_done(first[counted[0]], last[counted[0]]), resize)
            for name in counted:
                done = _done(first[name], last[name])
                late = now - started > seconds and done > 0
                if name not in after and (done >= iterations or late):
                    counters = self._counters(name, by_name[name])
                    after[name] = last[name], counters, now - started
            if now - started > max(seconds, _PATIENCE) and len(after) < len(counted):
                raise WorkFailed(f"no iteration in {now - started:.0f} s")
        lifted = lifted and self.kubeconfig is None
        return [
            replace(
                _seen(first[name], before[name], *after[name]),
                lifted=lifted and by_name[name].limit > 0,
                restarts=restarts[name],
            )
            for name in counted
        ]

    def _end(self, executor: LocalExecutor | KubernetesExecutor, names: Sequence[str]) -> None:
        for name in names:
            executor.stop(name, "measured")
        left = set(names) - set(executor.results)
        end = time.monotonic() + _PATIENCE
        while left and time.monotonic() < end:
            executor.wait(0.2)
            for event in executor.observe(time.monotonic() - self._origin):
                if isinstance(event, Finished):
                    left.discard(event.name)
        if left:
            raise WorkFailed(f"{', '.join(sorted(left))} did not end")
        for name in names:  # copies of the case, of which there would be hundreds
            shutil.rmtree(self.scratch / name, ignore_errors=True)

    # --- control groups ---

    def _groups(self, name: str, run: Run) -> list[cgroups.Group]:
        """The groups of its rank groups: here as the executor makes them, or its pods'."""
        if self.kubeconfig is not None:
            return self._pods(name)
        place = cgroups.find().child(f"dovetail-{os.getuid()}-{self._token}").child(name)
        if not run.apart:
            return [place]
        return [place.child(f"r{rank}", freezable=False) for rank in range(len(run.requests))]

    def _pods(self, name: str) -> list[cgroups.Group]:
        from dovetail.executors.kubernetes import manifests
        from dovetail.executors.kubernetes.api import Refused, Unreachable

        assert self._session is not None
        label = (
            f"{manifests.RUN}={self._session.run},{manifests.SIMULATION}={name},"
            f"{manifests.PART}={manifests.RANK_GROUP}"
        )
        try:
            pods = self._session.api.get(manifests.path("Pod"), labelSelector=label)["items"]
        except (Refused, Unreachable) as error:
            raise WorkFailed(f"the cluster does not answer: {error}") from None
        wanted = {f"pod{pod['metadata']['uid']}" for pod in pods}
        found: list[cgroups.Group] = []
        top = cgroups.find().weight
        for folder, names, _ in os.walk(top):
            if folder.count("/") - top.count("/") > _DEPTH:
                names.clear()
            for one in [one for one in names if one in wanted]:
                names.remove(one)
                pod = cgroups.Group(os.path.join(folder, one), "")
                inside = [entry.path for entry in os.scandir(pod.weight) if entry.is_dir()]
                found += [cgroups.Group(path, "") for path in inside] or [pod]
        return found

    def _arrange(self, name: str, run: Run, done: set[str]) -> bool:
        """Give local ones their limits and CPUs, once they are in their groups; True if so.

        CPUs are given at every look, since who was just forked may not have them.
        """
        if not (run.limit or run.cpus) or self.kubeconfig is not None:
            return True
        if name in done and not run.cpus:
            return True
        groups = self._groups(name, run)
        if not all(group.members() for group in groups):  # a sample may come before a process
            return False
        for pid in [pid for group in groups for pid in group.members()] if run.cpus else ():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(pid, run.cpus)
        size = 1 if run.apart else len(run.requests)
        try:
            for number, group in enumerate(groups if run.limit and name not in done else ()):
                request = sum(run.requests[number * size : (number + 1) * size])
                group.set_limit(round(run.limit * request), run.period)
        except OSError as error:
            raise NotHere(f"no CPU limits for processes: {error}") from None
        done.add(name)
        return True

    def _lift(self, name: str, run: Run) -> None:
        """Let a local one use all cores, as far as its groups are there."""
        if run.limit and self.kubeconfig is None:
            for group in self._groups(name, run):
                with contextlib.suppress(OSError):
                    group.set_limit(1000 * self.cores, run.period)

    def _counters(self, name: str, run: Run) -> Counters:
        groups = self._groups(name, run)
        processes = {}
        for pid in {pid for group in groups for pid in group.members()}:
            with contextlib.suppress(OSError, ValueError):
                processes[pid] = _scheduled(pid)
        return Counters(tuple(group.throttled() for group in groups), processes)


def need_groups(place: Place) -> None:
    """Raise NotHere where this user has no control groups to give weights or limits by."""
    if place.kind == LOCAL and not cgroups.find().weight:
        raise NotHere("this user has no control groups for CPU; see dovetail-admin(7)")


def _scheduled(pid: int) -> tuple[int, float]:
    """Context switches of a process's main thread, and seconds that it was ready and waited."""
    switches = 0
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if "ctxt_switches:" in line:
            switches += int(line.split()[1])
    return switches, int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) * 1e-9


def _done(first: Ranks, last: Ranks) -> int:
    return min(last.iterations) - min(first.iterations)


def began_anew(before: Ranks, now: Ranks) -> bool:
    """Whether a rank counts its iterations from the beginning again."""
    return any(new < old for old, new in zip(before.iterations, now.iterations))


def _seen(first: Ranks, before: Counters, last: Ranks, after: Counters, wall: float) -> Seen:
    slowest = max(range(len(last.stamp)), key=lambda rank: last.stamp[rank])
    took = last.stamp[slowest] - first.stamp[slowest]
    done = last.iterations[slowest] - first.iterations[slowest]
    if took <= 0 or done <= 0:
        raise WorkFailed("a simulation did not count its iterations")

    def change(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
        return tuple(y - x for x, y in zip(a, b))

    pairs = list(zip(before.groups, after.groups))
    periods, times, lost = (sum(b[index] - a[index] for a, b in pairs) for index in range(3))
    both = before.processes.keys() & after.processes.keys()
    switches, waited = (
        sum(after.processes[pid][index] - before.processes[pid][index] for pid in both)
        for index in range(2)
    )
    return Seen(
        took / done,
        sum(change(first.cpu, last.cpu)) / took,
        change(first.useful, last.useful),
        change(first.mpi, last.mpi),
        times / periods if periods else 0.0,
        lost / wall,
        switches / wall,
        waited / wall,
    )
