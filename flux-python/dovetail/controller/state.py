# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the controller knows and has decided: simulations, families, queue.

Inputs: none of its own; the controller writes into it what events say, the phases decide on it.
Outputs: the actions collected since the last `flush`.

Invariants: every simulation is in exactly one of: queue, active, frozen, leaving, terminal;
`active` is in the order of admission; a share in `Simulation.share` is what was last asked
for and not refused; at most one Resize per flush, before any Launch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dovetail.controller import settings as policy
from dovetail.controller.baseline import Alone
from dovetail.controller.knowledge import Knowledge
from dovetail.controller.meter import Meter
from dovetail.controller.settings import Mix, Settings
from dovetail.controller.simulation import Family, Simulation
from dovetail.core.protocol import Action, Capacity, Launch, Note, Ranks, Resize, Share, Spec, Stop
from dovetail.core.protocol import WaitPolicy as Wait

ACK_LIMIT = 90.0
"""Seconds after which a resize without an answer is taken as done: an executor's are over, taken
back or not."""


class State:
    """See the module. `t` is the run's clock, `now` the controller's own seconds."""

    def __init__(self, specs: Sequence[Spec], capacity: Capacity, settings: Settings) -> None:
        self.settings = settings
        self.set_capacity(capacity)
        self.knowledge = Knowledge(settings)
        self.sims: dict[str, Simulation] = {}
        self.families: dict[str, Family] = {}
        self.active: dict[str, Simulation] = {}
        self.frozen: dict[str, Simulation] = {}
        self.leaving: dict[str, Simulation] = {}
        self.counts: dict[str, int] = {}
        self.ranks = 0
        self.memory_used = 0
        self.queued = 0
        self.t = 0.0
        self.now = 0.0
        self.since = 0.0
        self.profiling: str | None = None
        self.interrupted = ""
        self.hold_until = 0.0
        self.resize_after = 0.0
        self.replan_at = 0.0
        self.guard_at = 0.0
        self.replan = False
        self.tolerated: Mix | None = None
        self.overtakes = 0
        self.lost = 0.0
        self.empty_since: float | None = None
        self.noted: set[object] = set()
        self.inflight: dict[str, tuple[Share, float]] = {}
        self.totals = {"admissions": 0, "rollbacks": 0, "resizes": 0, "n_max": 0}
        self._out: list[Action] = []
        self._launches: list[str] = []
        self._changes: dict[str, Share] = {}
        self._why: list[str] = []
        for index, spec in enumerate(specs):
            self._enter(index, spec)

    def _enter(self, index: int, spec: Spec) -> None:
        if spec.name in self.sims:
            raise ValueError(f"two simulations are called {spec.name!r}")
        self.sims[spec.name] = Simulation(spec, index, Meter(self.settings.warmup))
        family = self.families.setdefault(spec.family, Family(spec, iterations=spec.iterations))
        family.total += 1
        self.queue(self.sims[spec.name])

    def set_capacity(self, capacity: Capacity) -> None:
        """What may be used from now on; `cores` is all cores, as a number."""
        self.capacity = capacity
        self.cores = capacity.cpu / 1000.0

    # --- facts ---

    @property
    def own_cores(self) -> bool:
        """True if every active rank has a core to itself."""
        return self.ranks <= self.cores

    @property
    def mix(self) -> Mix:
        """What is active now."""
        return policy.mix_of(self.counts)

    @property
    def finished(self) -> bool:
        """True once every simulation is done, failed or not started."""
        return not (self.queued or self.active or self.frozen or self.leaving)

    def family(self, sim: Simulation) -> Family:
        """The family of a simulation."""
        return self.families[sim.spec.family]

    def baseline(self, sim: Simulation) -> float:
        """Iterations per second alone by now: its own, else its family's; 0 if unknown."""
        if sim.alone.rate > 0.0:
            return sim.alone.rate
        profile = self.family(sim).profile
        return profile.rate if profile else 0.0

    def remaining(self, sim: Simulation) -> float | None:
        """Seconds alone that a simulation still needs; None if unknown."""
        total = self.family(sim).iterations
        rate = self.baseline(sim)
        if total <= 0 or rate <= 0.0:
            return None
        return max(0, total - sim.iterations) / rate

    def budget(self, sim: Simulation) -> float:
        """How many times slower than alone it may run, its deadline considered; at least 1."""
        budget = max(1.0, sim.spec.slowdown)
        remaining = self.remaining(sim)
        if sim.spec.deadline is None or not remaining:
            return budget
        slack = (sim.spec.deadline - self.t) / remaining
        return budget if slack < 1.0 else min(budget, slack)

    def memory_of(self, sim: Simulation) -> int:
        """Bytes that a simulation takes: what was asked for, or more if more was seen."""
        profile = self.family(sim).profile
        return max(sim.spec.memory, sim.memory, profile.memory if profile else 0)

    def hold(self, sim: Simulation, memory: int | None = None) -> None:
        """Count the memory of a simulation that is started; 0 to count it no more."""
        new = self.memory_of(sim) if memory is None else memory
        self.memory_used += new - sim.held
        sim.held = new

    def sequential(self) -> float:
        """Seconds that the whole plan takes one after the other, as far as is known."""
        known = sum(
            f.total * f.iterations / f.profile.rate
            for f in self.families.values()
            if f.profile and f.iterations
        )
        return max(known, self.now)

    # --- changes ---

    def queue(self, sim: Simulation) -> None:
        """Put a simulation into the queue at its place in the plan."""
        sim.state, sim.share, sim.stop, sim.paused = "queued", None, None, False
        sim.reason, sim.started, sim.ended, sim.warned = "", None, None, False
        sim.meter = Meter(self.settings.warmup)
        sim.useful = None
        sim.alone, sim.boost, sim.memory = Alone(), 1.0, 0
        heapq.heappush(self.families[sim.spec.family].queue, (sim.index, sim.spec.name))
        self.queued += 1

    def heads(self, count: int) -> list[Simulation]:
        """The first queued simulation of each of the first `count` families in queue order."""
        queues = (f.queue[0] for f in self.families.values() if f.queue)
        return [self.sims[name] for _, name in heapq.nsmallest(count, queues)]

    def take(self, sim: Simulation) -> None:
        """Take the head of its family out of the queue."""
        heapq.heappop(self.families[sim.spec.family].queue)
        self.queued -= 1

    def join(self, sim: Simulation) -> None:
        """Count a simulation among those that use CPU."""
        self.active[sim.spec.name] = sim
        self.counts[sim.spec.family] = self.counts.get(sim.spec.family, 0) + 1
        self.ranks += sim.spec.ranks
        self.totals["n_max"] = max(self.totals["n_max"], len(self.active))
        self.regime()

    def leave(self, sim: Simulation) -> None:
        """The opposite of `join`."""
        del self.active[sim.spec.name]
        self.counts[sim.spec.family] -= 1
        self.ranks -= sim.spec.ranks
        self.regime()

    def regime(self) -> None:
        """What runs at once has changed: measurements begin anew, requests are looked at."""
        self.replan = True
        if not self.own_cores or len(self.active) <= 1:
            self.restart_windows(self.active.values())

    def restart_windows(self, sims: Iterable[Simulation]) -> None:
        """Begin new windows for some simulations."""
        self.since = self.now
        for sim in sims:
            sim.alone.settle()
            if sim.state == "running":
                sim.meter.reset()

    def launch(self, sim: Simulation) -> None:
        """Start a queued simulation; its share is settled at the flush."""
        self.take(sim)
        self.hold(sim)
        sim.state = "preparing"
        sim.launched_at = sim.progress_at = sim.thawed_at = self.now
        sim.started = sim.ended = None
        self.join(sim)
        self._launches.append(sim.spec.name)

    def share(
        self,
        sim: Simulation,
        why: str,
        requests: tuple[int, ...] | None = None,
        wait: Wait | None = None,
        suspended: bool | None = None,
    ) -> None:
        """Change parts of a simulation's share; sent with the flush unless it is not yet up."""
        old = sim.share or Share(requests=(policy.FLOOR,) * sim.spec.ranks)
        new = Share(
            old.requests if requests is None else requests,
            old.wait if wait is None else wait,
            old.suspended if suspended is None else suspended,
        )
        if new == sim.share:
            return
        name = sim.spec.name
        if name not in self._launches:
            self.inflight.setdefault(name, (old, self.now))
            self._changes[name] = new
            if why not in self._why:
                self._why.append(why)
        sim.share = new

    def freeze(self, sim: Simulation, why: str) -> None:
        """Let an active simulation stand still and make room."""
        self.leave(sim)
        self.frozen[sim.spec.name] = sim
        sim.state = "suspended"
        self.share(sim, why, requests=(policy.FLOOR,) * sim.spec.ranks, suspended=True)

    def thaw(self, sim: Simulation, why: str) -> None:
        """Let a frozen simulation go on, as the newest."""
        del self.frozen[sim.spec.name]
        sim.state = "running" if sim.iterations else "starting"
        sim.progress_at = sim.thawed_at = self.now
        self.join(sim)
        self.share(sim, why, suspended=False)

    def stop(self, sim: Simulation, why: str, requeue: bool = False) -> None:
        """End a simulation; it is leaving until its Finished comes."""
        if sim.spec.name in self.active:
            self.leave(sim)
        self.frozen.pop(sim.spec.name, None)
        self.leaving[sim.spec.name] = sim
        sim.stop = Stop(sim.spec.name, why, requeue)
        self._changes.pop(sim.spec.name, None)
        if sim.spec.name in self._launches:
            self._launches.remove(sim.spec.name)
        self._out.append(sim.stop)

    def note(self, what: str, why: str, **data: object) -> None:
        """Record a decision."""
        self._out.append(Note(what, why, _rounded(data)))

    def note_once(self, key: object, what: str, why: str, **data: object) -> None:
        """Record a decision, unless it was recorded under this key before."""
        if key not in self.noted:
            self.noted.add(key)
            self.note(what, why, **data)

    def sampled(self, sim: Simulation, ranks: Ranks) -> None:
        """Take a look at a simulation's ranks into account."""
        memory = sum(ranks.memory)
        if memory > sim.memory:
            sim.memory = memory
            self.hold(sim)
        useful = sum(ranks.useful)
        if not sim.iterations and useful > (sim.useful or 0.0):
            sim.progress_at = self.now  # it works towards its first iteration, if it has any
        sim.useful = useful
        if sim.meter.add(self.now, ranks):
            sim.progress_at = self.now
            if sim.state in ("preparing", "starting"):
                sim.state = "running"
                family = self.family(sim)
                family.startup = max(family.startup or 0.0, self.now - sim.launched_at)
                if not self.own_cores:  # until now it has not disturbed the others
                    self.restart_windows(s for s in self.active.values() if s is not sim)

    def settled(self) -> bool:
        """True if no resize is on its way."""
        late = [n for n, (_, at) in self.inflight.items() if self.now - at > ACK_LIMIT]
        for name in late:
            del self.inflight[name]
        return not self.inflight

    def resized(self, names: Sequence[str], refused: str) -> None:
        """A resize took effect, or none of it did and the old shares hold."""
        old = {name: self.inflight.pop(name) for name in names if name in self.inflight}
        sims = [self.sims[name] for name in old]
        if refused and old:
            self.resize_after = self.now + self.settings.cooldown
            self.replan = True
            for sim in sims:
                self._revert(sim, old[sim.spec.name][0])
            self.note("hold", f"a resize was refused, the old shares hold: {refused}")
        elif not self.own_cores:
            self.restart_windows([sim for sim in sims if sim.spec.name in self.active])

    def _revert(self, sim: Simulation, share: Share) -> None:
        if sim.share is None or sim.state not in ("preparing", "starting", "running", "suspended"):
            return
        asked, sim.share = sim.share, share
        name = sim.spec.name
        if asked.suspended == share.suspended:
            return
        if name in self.frozen:
            del self.frozen[name]
            sim.state = "running" if sim.iterations else "starting"
            sim.progress_at = sim.thawed_at = self.now
            self.join(sim)
        elif sim.paused:
            sim.paused = False
        elif name in self.active and share.suspended:
            self.leave(sim)
            self.frozen[name] = sim
            sim.state = "suspended"

    def flush(self) -> list[Action]:
        """The actions since the last flush: notes and stops, one Resize, then launches."""
        actions, self._out = self._out, []
        if self._changes:
            actions.append(Resize(dict(self._changes), "; ".join(self._why)))
            self.totals["resizes"] += 1
        for name in self._launches:
            share = self.sims[name].share or Share((policy.FLOOR,) * self.sims[name].spec.ranks)
            self.sims[name].share = replace(share, suspended=False)
            actions.append(Launch(name, replace(share, suspended=False)))
        self._changes, self._why, self._launches = {}, [], []
        return actions


def _rounded(data: Mapping[str, object]) -> dict[str, object]:
    """Figures for people: four significant digits; lists for tuples, so that JSON is exact."""

    def short(value: object) -> object:
        if isinstance(value, float):
            return float(f"{value:.4g}") if math.isfinite(value) else None
        if isinstance(value, (list, tuple)):
            return [short(item) for item in value]
        return value

    return {key: short(value) for key, value in data.items()}
