# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the nodes of a cluster offer, and which of them are lost.

Inputs: nodes as the API has them, the pods of others, what the plan limits the run to. Outputs:
`protocol.Capacity`, and nodes lost. No I/O.

Invariant: the requests of all simulations, scaled, and of our agents fit beside what others ask
for, whenever they fit the capacity as the controller sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.core import cgroup_weights, protocol
from dovetail.executors.kubernetes import devices, manifests, placement

Object = dict[str, Any]

LOST = 20.0
"""Seconds that a node may be unready, with its agent silent, before what it ran is given up."""

LESS = range(95, 20, -5)
"""Percent of what it shall have that a simulation may begin with where nothing else runs."""


def _offer(node: Object) -> tuple[bool, object]:
    """What of a node counts for the capacity."""
    return placement.usable(node), node["status"].get("allocatable")


@dataclass(frozen=True)
class Fit:
    """Ranks, millicores, bytes and node of each rank group; or `why` there are no nodes."""

    sizes: list[int]
    cpu: list[int]
    memory: list[int]
    nodes: dict[int, str]
    why: str


class Nodes:
    """The nodes. `limits` are millicores and bytes to stay within, None for all there is.

    `names` are the devices that the plan asks for, of which the capacity tells; what others have of
    them is not taken off, since they may give it back.
    """

    def __init__(self, limits: tuple[int | None, int | None], names: Sequence[str] = ()) -> None:
        self._limits, self._names = limits, names
        self._nodes: dict[str, Object] = {}
        self._foreign: list[Object] = []
        self._silent: dict[str, float] = {}
        self._rooms: dict[str, int] = {}  # for simulations, beside our agents, millicores
        self.left_out: frozenset[str] = frozenset()  # those that take no simulations
        self.scale = 1.0
        self.shared = False  # whether pods of others take room, as far as was seen
        self.formula = ""  # by which requests become weights, once that is known
        self.capacity = protocol.Capacity((), checkpoints=True)

    def listed(self, nodes: Iterable[Object], foreign: Iterable[Object] | None = None) -> None:
        """All there are now; `foreign` are the pods of others, if they were looked at."""
        self._nodes = {node["metadata"]["name"]: node for node in nodes}
        if foreign is not None:
            self._foreign = list(foreign)
        self._count()

    def news(self, kind: str, thing: Any) -> None:  # noqa: ANN401 (a node, or a list of them)
        """What a watch said."""
        if kind == "LISTED":
            self.listed(thing)
            return
        name = thing["metadata"]["name"]
        before = self._nodes.pop(name, None)
        if kind != "DELETED":
            self._nodes[name] = thing
            if before is not None and _offer(before) == _offer(thing):  # it said that it is well
                return
        self._count()

    def take(self, more: Iterable[placement.Room], pods: Iterable[Object]) -> bool:
        """Whether pods can have so much `more` on their nodes, each of which is named once.

        Beside `pods` and our agents; a node that takes no simulations has nothing for them.
        """
        rooms = placement.rooms(self._nodes.values(), [*self._foreign, *pods])
        agent = manifests.AGENT_CPU, manifests.LEAST_MEMORY, devices.NONE
        left = {room.node: room.without(*agent) for room in rooms if room.node not in self.left_out}
        found = ((one, left.get(one.node)) for one in more)
        return all(
            room and one.cpu <= max(0, room.cpu) and one.memory <= max(0, room.memory)
            for one, room in found
        )

    def leave_out(self, choose: Callable[[Iterable[Object]], frozenset[str]]) -> None:
        """Have some nodes take no simulations, or no longer."""
        names = choose(self._nodes.values())
        if names != self.left_out:
            self.left_out = names
            self._count()

    def _count(self) -> None:
        """Simulations are offered what agents take too, so that a node of two cores counts as
        one of two cores; their requests are made smaller by as much.
        """
        nodes = [node for name, node in self._nodes.items() if name not in self.left_out]
        offered = placement.offered(nodes, self._foreign)
        self.shared = offered != placement.offered(nodes, ())
        cpu, memory = self._limits
        made, agents = [], 0
        self._rooms = {}
        for node in offered:
            offer = node.cpu if cpu is None else min(node.cpu, cpu)
            room = max(0, node.memory - manifests.LEAST_MEMORY)
            room = room if memory is None else min(room, memory)
            agents += max(0, offer + manifests.AGENT_CPU - node.cpu)
            cpu = None if cpu is None else cpu - offer
            memory = None if memory is None else memory - room
            made.append(protocol.Node(node.name, offer, room))
            self._rooms[node.name] = min(offer, node.cpu - manifests.AGENT_CPU)
        # A simulation cannot be suspended from outside its pods; the agents do that.
        usable = tuple(node for node in made if node.cpu > 0)
        self.capacity = protocol.Capacity(usable, checkpoints=True, devices=self.devices())
        total = self.capacity.cpu
        self.scale = (total - agents) / total if total > agents else 1.0

    def devices(self, names: Sequence[str] | None = None) -> tuple[tuple[str, int], ...]:
        """How many there are of devices, as plans call them; by default of those asked for."""
        offered = placement.resources(self._nodes.values())
        wanted = self._names if names is None else names
        return tuple((name, offered.get(devices.resource(name, offered), 0)) for name in wanted)

    def most(self, name: str) -> int:
        """How many of a device the node has that has most of it."""
        resource = devices.resource(name, placement.resources(self._nodes.values()))
        ready = filter(placement.usable, self._nodes.values())
        return max((placement.extended(node).get(resource, 0) for node in ready), default=0)

    def divided(self, sizes: Sequence[int], requests: Sequence[int]) -> list[int]:
        """Requests of ranks as what the pods of these groups ask for, millicores.

        Beside our agents, and such that the weights are in proportion.
        """
        made, first = [], 0
        largest = max((node.cpu for node in self.capacity.nodes), default=0)
        for size in sizes:
            cpu = max(1, int(sum(requests[first : first + size]) * self.scale))
            made.append(cgroup_weights.corrected(cpu, self.formula, largest))
            first += size
        return made

    def fit(
        self,
        spec: protocol.Spec,
        requests: Sequence[int],
        memory: int,
        free: Sequence[placement.Room],
        wanted: Mapping[str, int],
        less: bool,
    ) -> Fit:
        """How a simulation fits what is free; its ranks may begin with `less` than these requests.

        These are of the cores of all nodes together, of which none may have a rank group's part.
        Where a node is away, or others have its cores, the ranks wait for it instead.
        """
        found = []
        together = int(sum(requests) * self.scale) <= sum(room.cpu for room in free)
        for percent in (100, *(LESS if less and together else ())):
            part = [max(1, one * percent // 100) for one in requests]
            asked = [max(1, int(one * self.scale)) for one in part]
            sizes = placement.groups(spec.ranks, spec.ranks_per_pod, asked, memory, free, wanted)
            cpu = self.divided(sizes, part)
            _, each = placement.per_pod(sizes, asked, memory)
            found.append(Fit(sizes, cpu, each, *placement.placed(cpu, each, free, wanted)))
            if found[-1].nodes:
                return found[-1]
        return found[0]

    def fitted(self, node: str, wanted: Sequence[int], taken: int) -> list[int]:
        """What pods on a node shall ask for, beside simulations' pods that ask for `taken` there.

        The capacity is that of all nodes together, and so may be what they are wanted to ask for:
        where one has less, all on it get less, in the same proportion. Millicores.
        """
        room, total = self._rooms.get(node, 0) - taken, sum(wanted)
        if total <= room or room < len(wanted):
            return list(wanted)
        return [max(1, cpu * room // total) for cpu in wanted]

    def departed(self, name: str) -> str:
        """Why a pod goes whose node is not in the cluster any more; empty where it is."""
        return f"its node {name} left the cluster" if name and name not in self._nodes else ""

    def lost(self, now: float, connected: set[str], used: set[str]) -> dict[str, str]:
        """Which of the nodes in use are gone for good, and how that was seen."""
        found = {}
        for name in used:
            node = self._nodes.get(name)
            if node is not None and (placement.ready(node) or name in connected):
                self._silent.pop(name, None)
            elif name not in connected:
                since = self._silent.setdefault(name, now)
                if now - since > (LOST if node is not None else LOST / 4):
                    found[name] = "it left the cluster" if node is None else "it is not ready"
        return found
