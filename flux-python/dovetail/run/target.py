# SPDX-License-Identifier: LGPL-3.0-or-later
"""Where a run's simulations go: this machine, or a cluster.

Inputs: the user's choice, and a plan. Outputs: an executor. Invariant: a plan that can never run
there is refused before anything is started.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dovetail import applications
from dovetail.controller.controller import Controller
from dovetail.core.errors import BadInput
from dovetail.core.protocol import Node
from dovetail.executors.kubernetes import identity
from dovetail.executors.local.executor import LocalExecutor
from dovetail.host import devices
from dovetail.host.memory import free_memory
from dovetail.plan.schema import Plan
from dovetail.run.loop import Waiting

if TYPE_CHECKING:  # the Kubernetes client takes most of a second to import
    from dovetail.executors.kubernetes.executor import KubernetesExecutor


Devices = tuple[tuple[str, int], ...]
"""As in `core.protocol.Capacity`."""


class Place(Protocol):
    """Somewhere to run simulations, once."""

    def check(self, asked: Plan) -> None:
        """Raise BadInput for a plan that can never run here."""

    def cpu(self, asked: Plan) -> int:
        """Millicores that the plan may use here."""

    def devices(self, asked: Plan) -> Devices:
        """The devices that the plan asks for, and how many of each there are here."""

    def start(self, asked: Plan, directory: Path, origin: float, *, resume: bool) -> Waiting:
        """An executor; BadInput or WorkFailed where there can be none."""

    def adopt(self, controller: Controller) -> Sequence[str]:
        """Simulations of an interrupted run that run still; the executor goes on with them."""

    def hurry(self) -> None:
        """The user wants an end at once; called by a signal's handler until the run is under way.

        KeyboardInterrupt where the start may be waiting for others.
        """

    def launcher(self) -> str:
        """What simulations become on a cluster, in words; known once it has started."""

    def troubles(self) -> Sequence[str]:
        """What the user should know after the run."""


class Here:
    """This machine."""

    def __init__(self) -> None:
        self._executor: LocalExecutor | None = None

    def check(self, asked: Plan) -> None:
        """The cores and the memory that this process may use."""
        cpus, here = asked.limits.cpus, len(os.sched_getaffinity(0))
        if cpus is not None and (cpus % 1000 or not 0 < cpus <= 1000 * here):
            raise BadInput(
                f"cpus: {cpus}m is not possible here; a whole number from 1 to {here} is"
            )
        _check_memory(asked, asked.limits.memory or free_memory(), "this machine offers")
        for spec in asked.specs:
            if spec.limit or any(phase.limit for phase in spec.phases):
                raise BadInput(
                    f"simulation {spec.name} has a limit, and only pods can have one; leave the "
                    "key out, or run the plan on a cluster (--kubeconfig)"
                )
            if spec.image:
                raise BadInput(
                    f"simulation {spec.name} has an image, and only pods can run from one; leave "
                    "the key out, or run the plan on a cluster (--kubeconfig)"
                )
        there = dict(self.devices(asked))
        for spec in asked.specs:
            for name, wanted in spec.takes(min(spec.widths, default=0)).items():
                if wanted > there[name]:
                    raise BadInput(
                        f"simulation {spec.name} asks for {wanted} of the device {name}, of which "
                        f"{there[name]} can be used here; `dovetail doctor` says what there is"
                    )

    def cpu(self, asked: Plan) -> int:
        """Whole cores."""
        return asked.limits.cpus or 1000 * len(os.sched_getaffinity(0))

    def devices(self, asked: Plan) -> Devices:
        """What programs can open here; a resource that only clusters count is not among it."""
        return tuple((name, devices.here(name)) for name in _asked_for(asked))

    def start(self, asked: Plan, directory: Path, origin: float, *, resume: bool) -> Waiting:
        """Nothing is left of an earlier run: its processes end with it.

        Where that was on a cluster, its pods do not: BadInput.
        """
        if resume:
            identity.check_over(directory)
        limits = asked.limits
        cpus = limits.cpus and limits.cpus // 1000
        self._executor = LocalExecutor(
            directory, cpus, limits.memory, origin, devices=self.devices(asked),
            launches=len(asked.specs),
        )  # fmt: skip
        return self._executor

    def adopt(self, controller: Controller) -> Sequence[str]:
        """None."""
        return ()

    def hurry(self) -> None:
        """Nothing here waits for others."""

    def launcher(self) -> str:
        """Processes, as always."""
        return ""

    def troubles(self) -> Sequence[str]:
        """Of logs that are not complete, mostly."""
        results = self._executor.results if self._executor else {}
        return [f"{name}: {one.trouble}" for name, one in results.items() if one.trouble]


class Cluster:
    """A Kubernetes cluster. Asks it at once; BadInput where it cannot be used.

    `network` is the pods', and `launcher` the kind of what makes them; see
    `executors.kubernetes.session.Session`.
    """

    def __init__(self, kubeconfig: Path, network: str, launcher: str) -> None:
        from dovetail.executors.kubernetes import nodes
        from dovetail.executors.kubernetes.session import connect, look

        self._api = connect(kubeconfig)
        found = nodes.Nodes((None, None))
        found.listed(*look(self._api))
        self._nodes, self._capacity = found, found.capacity
        self._network, self._asked, self._launcher = network, launcher, ""
        self._executor: KubernetesExecutor | None = None

    def check(self, asked: Plan) -> None:
        """What the nodes offer beside what the pods of others ask for."""
        where, offered = f"{self._api.server} offers", self._capacity.cpu
        if not self._capacity.nodes:
            raise BadInput(f"{self._api.server}: no node there is ready for simulations")
        if asked.limits.cpus is not None and asked.limits.cpus > offered:
            raise BadInput(f"cpus: {asked.limits.cpus}m are more than {where}: {offered}m")
        _check_memory(asked, asked.limits.memory or self._capacity.memory, where)
        for spec in asked.specs:
            size = spec.ranks_per_pod
            if size and not _room_for(-(-spec.memory * size // spec.ranks), self._capacity.nodes):
                raise BadInput(
                    f"simulation {spec.name} asks for {spec.memory >> 20} MiB of memory, in pods "
                    f"of {size} ranks; no node of {self._api.server} has room for one of them"
                )
        self._check_devices(asked)

    def _check_devices(self, asked: Plan) -> None:
        """What a node has for one pod, and all for those that there are at least."""
        there = dict(self.devices(asked))
        for spec in asked.specs:
            all_pods = spec.takes(min(spec.widths, default=0))
            for name, each in spec.devices:
                most = self._nodes.most(name)
                if each > most or all_pods[name] > there[name]:
                    wanted = f"{each} of the device {name} for each pod"
                    has = f"the node with most of it has {most}"
                    if each <= most:
                        wanted = f"{all_pods[name]} of the device {name} for its pods"
                        has = f"all nodes have {there[name]}"
                    raise BadInput(
                        f"simulation {spec.name} asks for {wanted}, and on {self._api.server} "
                        f"{has}; see Devices in dovetail-kubernetes(7)"
                    )

    def cpu(self, asked: Plan) -> int:
        """All nodes', unless the plan wants less."""
        return min(asked.limits.cpus or self._capacity.cpu, self._capacity.cpu)

    def devices(self, asked: Plan) -> Devices:
        """What its nodes offer, whoever has it now."""
        return self._nodes.devices(_asked_for(asked))

    def start(self, asked: Plan, directory: Path, origin: float, *, resume: bool) -> Waiting:
        """Set the run up on the cluster."""
        from dovetail.executors.kubernetes.executor import KubernetesExecutor
        from dovetail.executors.kubernetes.session import Session

        session = Session(self._api, directory, asked.specs, resume, self._network, self._asked)
        self._launcher = str(session.launcher)
        limits = asked.limits.cpus, asked.limits.memory
        try:
            self._executor = KubernetesExecutor(
                session, directory, limits, origin, devices=_asked_for(asked)
            )
        except BaseException as error:
            session.give_up(error, leave=resume)
            raise
        return self._executor

    def adopt(self, controller: Controller) -> Sequence[str]:
        """Those whose pods are all there; what else is left of the run is removed first."""
        assert self._executor is not None
        return self._executor.adopt(
            {
                name: (applications.form(controller.spec(name)), share)
                for name, share in controller.running().items()
            }
        )

    def hurry(self) -> None:
        """Interrupts whatever waits for the API."""
        raise KeyboardInterrupt

    def launcher(self) -> str:
        """Jobs, or MiniClusters of the Flux Operator where that is installed."""
        return self._launcher

    def troubles(self) -> Sequence[str]:
        """Of logs, and of what could not be removed."""
        if self._executor is None:
            return ()
        results = self._executor.results.items()
        left = [f"left on the cluster: {one}" for one in self._executor.left]
        return [f"{name}: {one.trouble}" for name, one in results if one.trouble] + left


def here() -> Place:
    """This machine."""
    return Here()


NETWORKS = ("host", "bridge")
KINDS = {"job": "Job", "minicluster": "MiniCluster"}


def cluster(kubeconfig: Path, network: str = "", launcher: str = "") -> Place:
    """The cluster of a kubeconfig; `launcher` is `job`, `minicluster` or empty."""
    for what, given, right in (("network", network, NETWORKS), ("launcher", launcher, KINDS)):
        if given and given not in right:
            raise BadInput(f"{what}: {given!r} is not one of {', '.join(right)}")
    return Cluster(kubeconfig, network, KINDS.get(launcher, ""))


def chosen(kubeconfig: Path | None, network: str = "", launcher: str = "") -> Place:
    """The cluster of a kubeconfig, or this machine if there is none; BadInput for half of one."""
    if kubeconfig is not None:
        return cluster(kubeconfig, network, launcher)
    if network or launcher:
        option = "--network" if network else "--launcher"
        raise BadInput(f"{option} is for pods; name their cluster with --kubeconfig")
    return here()


def _asked_for(asked: Plan) -> tuple[str, ...]:
    """All devices of a plan."""
    return tuple(dict.fromkeys(name for spec in asked.specs for name, _ in spec.devices))


def _check_memory(asked: Plan, offered: int, where: str) -> None:
    for spec in asked.specs:
        if spec.memory > offered:
            raise BadInput(
                f"simulation {spec.name} asks for {spec.memory >> 20} MiB of memory; "
                f"{where} {offered >> 20} MiB"
            )


def _room_for(memory: int, nodes: Sequence[Node]) -> bool:
    return any(node.memory >= memory for node in nodes)
