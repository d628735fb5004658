# SPDX-License-Identifier: LGPL-3.0-or-later
"""The simulated executor: bulk-synchronous ranks as numbers, under a virtual clock.

Inputs: specs with the work that each means (`Work`), nodes, a seed, faults to inject. Outputs:
events like those of a real executor; `simulate.run_simulated` drives a controller with it.

The model: each iteration each rank of a simulation needs its CPU seconds (with noise), then
waits for the slowest. A node shares its cores among simulations by the sum of their requests
(no rank uses more than a core, nothing is left idle while it is wanted), and within a
simulation equally among ranks. How a rank waits decides whether it wants CPU meanwhile, and
the costs below are what OpenFOAM with Open MPI showed on two cores.

Invariants: the same seed gives the same run; only `advance` moves the clock; CPU handed out
on a node never exceeds its cores.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dovetail.core import protocol
from dovetail.core.protocol import Capacity, Cause, Event, Node, Share, Spec
from dovetail.executors.simulated.work import Fault as Fault
from dovetail.executors.simulated.work import Rank, Sim
from dovetail.executors.simulated.work import Work as Work
from dovetail.executors.simulated.work import fill as fill

SPIN = 0.55
"""Speed of work while spinning ranks crowd the cores: their turns delay every message."""
YIELD = 0.95
"""The same where they give way."""
CROWD = 0.08
"""What work loses to taking turns where twice as many ranks as cores work, waits blocking."""
DOORBELL = 0.95
"""Speed of a simulation whose waits block: going to sleep and waking up is work too."""
BOUND = 0.5
"""Speed of ranks that are bound to cores on which others run as well."""
ASLEEP = 0.03
"""Share of a core that a rank in a blocking wait still takes."""


class Simulated:
    """Implements core.Executor; `advance(dt)` moves its clock. It `binds` if told so."""

    def __init__(
        self,
        nodes: Sequence[Node],
        works: Mapping[str, Work],
        seed: int = 0,
        faults: Sequence[Fault] = (),
        weights: bool = True,
        suspend: bool = True,
        binds: bool = False,
    ) -> None:
        self.works = dict(works)
        self.clock = 0.0
        self.offset = 0.0
        self.random = random.Random(seed)
        self._faults = sorted(faults, key=lambda fault: fault.t)
        self._nodes = list(nodes)
        self._lost: set[int] = set()
        self._flags = (weights, suspend)
        self._binds = binds
        self._sims: dict[str, Sim] = {}
        self._kept: dict[str, int] = {}
        self._on: list[dict[str, Sim]] = [{} for _ in nodes]
        self._count = 0
        self._events: list[Event] = []
        self._last = [0.0] * len(nodes)
        self._due: list[tuple[float, int, int]] = []
        self._version = [0] * len(nodes)
        self._starts: list[tuple[float, int, str]] = []
        self._resizes: list[tuple[float, int, Mapping[str, Share]]] = []
        self._refuse_until = -1.0
        self._delay_until = (-1.0, 0.0)

    # --- core.Executor ---

    def capacity(self) -> Capacity:
        """What may be used now."""
        left = tuple(node for i, node in enumerate(self._nodes) if i not in self._lost)
        return Capacity(left, *self._flags, checkpoints=True, binds=self._binds)

    def launch(self, spec: Spec, share: Share) -> None:
        """Start; the first iteration begins after the work's startup."""
        work = self.works[spec.family]
        work = replace(work, seconds=work.on(spec))
        self._count += 1
        sim = Sim(spec, work, share, self._count, self.clock + work.startup)
        sim.over = self._kept.get(spec.name, 0) if spec.checkpoint else 0
        sim.place(self._place(spec.ranks))
        self._sims[spec.name] = sim
        if not sim.ranks:
            self._end(sim, Cause.NODE_LOST, 1, "node lost: there is none left")
            return
        heapq.heappush(self._starts, (sim.begins, sim.order, spec.name))

    def observe(self, t: float) -> Sequence[Event]:
        """What happened since the last call."""
        for sim in self._sims.values():
            if sim.started and not sim.work.tells:
                self._publish(sim)
            if sim.fresh and sim.ranks_at is not None:
                self._events.append(protocol.Sampled(self.now, sim.spec.name, sim.ranks_at))
                sim.fresh = False
        events, self._events = self._events, []
        return events

    def resize(self, shares: Mapping[str, Share]) -> None:
        """Change shares now, or after an injected delay."""
        until, seconds = self._delay_until
        delay = seconds if self.clock < until else 0.0
        self._count += 1
        heapq.heappush(self._resizes, (self.clock + delay, self._count, dict(shares)))
        if not delay:
            self._apply_resizes()

    def stop(self, name: str, why: str, cause: Cause = Cause.CANCELLED) -> None:
        """End one simulation."""
        if name in self._sims:
            self._end(self._sims[name], cause, 143, f"stopped: {why}")

    def checkpoint(self, name: str) -> None:
        """One ends after its iteration, and goes on there when it is launched again."""
        sim = self._sims.get(name)
        if sim is not None and sim.spec.checkpoint:
            sim.halting = True
            sim.share = replace(sim.share, suspended=False)
            self._replan(sim.nodes)

    def close(self) -> None:
        """End all."""
        self._sims.clear()
        self._on = [{} for _ in self._nodes]

    # --- the clock ---

    @property
    def now(self) -> float:
        """The run's clock: the virtual one, plus the jumps that were injected."""
        return self.clock + self.offset

    def advance(self, dt: float) -> None:
        """Let `dt` virtual seconds pass."""
        end = self.clock + dt
        while True:
            t = min(end, self._next())
            self.clock = max(self.clock, t)
            if t >= end:
                break
            self._happen()
        self._happen()
        for node in range(len(self._nodes)):
            self._run_until_now(node)

    def _next(self) -> float:
        while self._due and self._due[0][1] != self._version[self._due[0][2]]:
            heapq.heappop(self._due)
        heads = [queue[0][0] for queue in (self._due, self._starts, self._resizes) if queue]
        if self._faults:
            heads.append(self._faults[0].t)
        return min(heads, default=float("inf"))

    def _happen(self) -> None:
        while self._faults and self._faults[0].t <= self.clock:
            self._fault(self._faults.pop(0))
        while self._starts and self._starts[0][0] <= self.clock:
            self._start(*heapq.heappop(self._starts)[1:])
        self._apply_resizes()
        while self._due and self._due[0][0] <= self.clock:
            _, version, node = heapq.heappop(self._due)
            if version == self._version[node]:
                self._advance_node(node)

    # --- simulations ---

    def _place(self, ranks: int) -> list[int]:
        """Nodes for ranks: one after the other on the node with the fewest per core."""
        load = {i: 0 for i in range(len(self._nodes)) if i not in self._lost}
        for sim in self._sims.values():
            for rank in sim.ranks:
                load[rank.node] = load.get(rank.node, 0) + 1
        if not load:
            return []
        heap = [(count / max(1, self._nodes[i].cpu), i) for i, count in load.items()]
        heapq.heapify(heap)
        places: list[int] = []
        while len(places) < ranks:
            used, node = heap[0]
            # Fill a node before the next: ranks of one simulation talk to each other.
            room = max(1, self._nodes[node].cpu // 1000)
            take = min(ranks - len(places), room)
            places += [node] * take
            heapq.heapreplace(heap, (used + take / max(1, self._nodes[node].cpu), node))
        return places

    def _start(self, order: int, name: str) -> None:
        sim = self._sims.get(name)
        if sim is None or sim.order != order:
            return
        sim.started = True
        sim.stamp = self.clock
        for node in sim.nodes:
            self._run_until_now(node)
            self._on[node][name] = sim
        self._events.append(protocol.Started(self.now, name, sim.over))
        self._publish(sim)  # as a page is there from MPI_Init on
        self._iterate(sim)
        self._replan(sim.nodes)

    def _iterate(self, sim: Sim) -> None:
        done = sim.over + sim.iterations
        by_now = 1.0 + (sim.work.drift - 1.0) * done / sim.work.iterations
        for rank, seconds in zip(sim.ranks, sim.work.seconds):
            noise = self.random.gauss(1.0, sim.work.noise) if sim.work.noise else 1.0
            rank.left = seconds * by_now * max(0.2, noise)
            rank.working = True
        sim.pending = len(sim.ranks)

    def _end(self, sim: Sim, cause: Cause, code: int = 0, reason: str = "") -> None:
        for node in sim.nodes:
            self._run_until_now(node)
            self._on[node].pop(sim.spec.name, None)
        del self._sims[sim.spec.name]
        if sim.fresh and sim.ranks_at is not None:
            self._events.append(protocol.Sampled(self.now, sim.spec.name, sim.ranks_at))
        self._events.append(protocol.Finished(self.now, sim.spec.name, cause, code, reason))
        self._replan(sim.nodes)

    def _boundary(self, sim: Sim) -> None:
        """All ranks have met: an iteration is complete. Its nodes are to be planned anew."""
        for node in sim.nodes:
            self._run_until_now(node)
        sim.iterations += 1
        self._publish(sim)
        if sim.over + sim.iterations >= sim.work.iterations:
            self._end(sim, Cause.DONE)
        elif sim.halting:
            self._kept[sim.spec.name] = sim.over + sim.iterations
            self._end(sim, Cause.CHECKPOINTED)
        else:
            self._iterate(sim)

    def _publish(self, sim: Sim) -> None:
        n = len(sim.ranks)
        if sim.work.publishes:
            sim.ranks_at = protocol.Ranks(
                (sim.iterations if sim.work.tells else 0,) * n,
                (self.now,) * n,
                tuple(rank.cpu for rank in sim.ranks),
                tuple(rank.useful for rank in sim.ranks),
                tuple(rank.mpi for rank in sim.ranks),
                (sim.spec.memory // n,) * n,
                "iterations" if sim.work.tells else "work",
            )
            sim.fresh = True

    def _apply_resizes(self) -> None:
        while self._resizes and self._resizes[0][0] <= self.clock:
            _, _, shares = heapq.heappop(self._resizes)
            names = tuple(shares)
            if self.clock < self._refuse_until:
                self._events.append(protocol.Resized(self.now, names, "no room on the node"))
                continue
            touched: set[int] = set()
            for name, share in shares.items():
                sim = self._sims.get(name)
                if sim is not None:
                    touched.update(sim.nodes)
                    for node in sim.nodes:
                        self._run_until_now(node)
                    sim.share = share
            self._events.append(protocol.Resized(self.now, names))
            self._replan(tuple(touched))

    def _fault(self, fault: Fault) -> None:
        sim = self._sims.get(fault.name)
        if fault.kind == "refuse":
            self._refuse_until = self.clock + fault.seconds
        elif fault.kind == "delay":
            self._delay_until = (float("inf"), fault.seconds)
        elif fault.kind == "clock":
            self.offset += fault.seconds
        elif fault.kind == "away":
            offers = self.capacity() if fault.name == "over" else Capacity(())
            self._events.append(protocol.CapacityChanged(self.now, offers))
            if not fault.name:
                end = Fault(fault.t + fault.seconds, "away", "over")
                self._faults = sorted([*self._faults, end], key=lambda fault: fault.t)
        elif fault.kind == "node":
            self._lose([node.name for node in self._nodes].index(fault.name))
        elif sim is not None and fault.kind == "death":
            self._end(sim, Cause.FAILED, 137, "rank 0 was killed by signal 9")
        elif sim is not None and fault.kind == "fail":
            self._end(sim, Cause.FAILED, 1, "exit code 1")
        elif sim is not None and fault.kind == "busy":
            sim.granted = 1 / 3 if fault.seconds else 1.0
            self._replan(sim.nodes)
            if fault.seconds:
                end = replace(fault, t=fault.t + fault.seconds, seconds=0.0)
                self._faults = sorted([*self._faults, end], key=lambda fault: fault.t)
        elif sim is not None and fault.kind == "stall":
            for node in sim.nodes:
                self._run_until_now(node)
            sim.stalled = True
            self._replan(sim.nodes)

    def _lose(self, node: int) -> None:
        if node in self._lost:
            return
        self._lost.add(node)
        # First what is left, so that nobody is sent back to a node that is gone.
        self._events.append(protocol.CapacityChanged(self.now, self.capacity()))
        for sim in [sim for sim in self._sims.values() if node in sim.nodes]:
            self._end(sim, Cause.NODE_LOST, 1, f"node lost: {self._nodes[node].name}")

    # --- CPU ---

    def _run_until_now(self, node: int) -> None:
        """Account for the time since the node was last looked at."""
        dt = self.clock - self._last[node]
        self._last[node] = self.clock
        if dt <= 0.0:
            return
        for sim in self._on[node].values():
            if not sim.running:
                continue
            for rank in sim.on[node]:
                rank.cpu += rank.share * dt
                if rank.working:
                    rank.left -= rank.speed * dt
                    rank.useful += dt
                else:
                    rank.mpi += dt

    def _advance_node(self, node: int) -> None:
        """A rank on the node has finished its work of this iteration."""
        self._run_until_now(node)
        met = []
        for sim in list(self._on[node].values()):
            if not sim.running:
                continue
            for rank in sim.on[node]:
                if rank.working and rank.left <= 1e-9:
                    rank.working = False
                    sim.pending -= 1
            if sim.pending == 0:
                met.append(sim)
        nodes = {node}
        for sim in met:
            nodes.update(sim.nodes)
            self._boundary(sim)
        self._replan(sorted(nodes))

    def _replan(self, nodes: Sequence[int]) -> None:
        for node in nodes:
            self._run_until_now(node)
            self._share_out(node)
            self._version[node] += 1
            soonest = min(
                (
                    max(0.0, rank.left) / rank.speed
                    for sim in self._on[node].values()
                    if sim.running
                    for rank in sim.on[node]
                    if rank.working and rank.speed > 0.0
                ),
                default=None,
            )
            if soonest is not None:
                heapq.heappush(self._due, (self.clock + soonest, self._version[node], node))

    def _share_out(self, node: int) -> None:
        """Weighted fair sharing: who wants CPU, how much each gets, how well it works."""
        groups: list[tuple[Sim, list[Rank], float]] = []
        wanting = 0
        modes = set()
        for sim in self._on[node].values():
            if not sim.running:
                continue
            mode = sim.share.wait.mode
            eager = [rank for rank in sim.on[node] if rank.working or mode != "doorbell"]
            for rank in sim.on[node]:
                rank.speed, rank.share = 0.0, ASLEEP
            modes.add(mode)
            wanting += len(eager)
            weight = sim.weight(node) if self._flags[0] else float(len(sim.on[node]))
            groups.append((sim, eager, weight))
        cores = self._nodes[node].cpu / 1000.0
        given = fill([(len(eager), weight) for _, eager, weight in groups], cores)
        crowded = wanting > cores
        for (sim, eager, _), amount in zip(groups, given):
            quality = DOORBELL if sim.share.wait.mode == "doorbell" else 1.0
            if crowded:
                excess = min(1.0, wanting / cores - 1.0) if cores > 0.0 else 1.0
                turns = 1.0 - CROWD * excess
                quality *= SPIN if "off" in modes else YIELD if "yield" in modes else turns
            quality *= max(0.05, 1.0 - sim.work.interference * (len(groups) - 1))
            if sim.share.bound:  # where ranks share cores, those that must stay on one wait most
                quality *= BOUND if crowded else sim.work.bound
            for rank in eager:
                rank.share = amount / len(eager) * (sim.granted if rank is sim.ranks[0] else 1.0)
                rank.speed = rank.share * quality if rank.working else 0.0
