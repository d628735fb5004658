# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the controller knows and has decided: simulations, families, queue.

Inputs: none of its own; the controller writes into it what events say, the phases decide on it.
Outputs: the actions collected since the last `flush`.

Invariants: the queues, `active`, `suspended` and `terminating` hold each simulation by its stage,
and change with it here alone; `active` is in the order of admission; a share in
`Simulation.share` is what was last asked for and not refused; at most one Resize per flush,
before any Launch.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dovetail.controller.baseline import Alone
from dovetail.controller.choice import Schedule
from dovetail.controller.knowledge import CoScheduled, Knowledge, TrialVerdict, co_scheduled
from dovetail.controller.meter import Meter, Window
from dovetail.controller.settings import Settings
from dovetail.controller.simulation import Family, Shape, Simulation, Stage, shape_name
from dovetail.controller.work import Work
from dovetail.core import programs
from dovetail.core.cpu_requests import FLOOR
from dovetail.core.decided import Decided
from dovetail.core.protocol import (
    Action,
    Capacity,
    Cause,
    Checkpoint,
    Ended,
    EndState,
    Launch,
    Note,
    Ranks,
    Requeued,
    Resize,
    Share,
    Spec,
    Stop,
    WaitPolicy,
)
from dovetail.core.units import counted

ACK_LIMIT = 90.0
"""Seconds after which a resize without an answer is taken as done: an executor's are over, taken
back or not."""
_END_STATES: dict[Stage, EndState] = {
    Stage.DONE: "done",
    Stage.FAILED: "failed",
    Stage.CHECKPOINTED: "checkpointed",
    Stage.NOT_STARTED: "not started",
}
UNKNOWN = 3600.0
"""Seconds on one rank that a simulation counts with until anything is known of any."""
WORKS = 0.2
"""Share of its time that a rank computes outside MPI between two iterations, or waits for a core,
from which on its simulation does not hang: it writes, or minimizes. Who waits for a message in a
loop of its own has less."""
TURNS = 2
"""Times that a family comes to be measured by work; after the last it stays so."""
TELLS = 3
"""Iterations that show that a program counts some after all."""
AT_ONCE = -math.inf
"""Requests are due whatever is being measured."""


class Mode(enum.Enum):
    """What the run as a whole is about. `State.subject` says whom, or why."""

    SCHEDULING = "scheduling"
    PROFILING = "profiling"  # one simulation's profile is being taken, `subject` is its name
    INTERRUPTED = "interrupted"  # the run is to end, `subject` is the reason, by `halt_until`


class Phase(enum.Enum):
    """What the reader is told that the run is about now; the value is the word for users."""

    PROFILE = "profile"
    RUN = "run"  # one at a time
    PACK = "pack"  # what runs at once is on trial
    FAIRNESS = "fairness"  # it is known to pay, and is kept fair
    DONE = "done"


class State:
    """See the module. `t` is the run's clock, `now` the controller's own seconds.

    Times at which something may be done again: `admit_after` (an admission), `resize_after` (a
    resize), `requests_due` (requests follow the load), `choose_after` (ranks are chosen).
    `decided` is the last choice of ranks, and when it was made.
    `choices` is what was said of the choices so far.
    `usual_seconds` is what a simulation of which nothing is known counts with, on one rank.
    `explored` is by what part the queue was predicted to end later for trying fewer ranks.
    What is to stop at a checkpoint because the run ends has until `halt_until` for it.
    `capacity_at` is when the capacity last changed.
    `window_began` is when the measurement windows of now began, `regime_at` when what runs at once
    last changed. `tolerated` is a co-scheduled set
    that does not pay and that nobody can leave without losing work; `lost` the seconds spent on
    trials that did not pay. `ranks` are all that are active, where one of more threads than it has
    ranks counts as so many.
    """

    def __init__(self, specs: Sequence[Spec], capacity: Capacity, settings: Settings) -> None:
        self.settings = settings
        self.now = 0.0
        self.set_capacity(capacity)
        self.knowledge = Knowledge(settings)
        self.sims: dict[str, Simulation] = {}
        self.families: dict[str, Family] = {}
        self.shapes: dict[str, Shape] = {}
        self.active: dict[str, Simulation] = {}
        self.suspended: dict[str, Simulation] = {}
        self.terminating: dict[str, Simulation] = {}
        self.counts: dict[str, int] = {}
        self.ranks = 0
        self.memory_used = 0
        self.devices_used: dict[str, int] = {}
        self.queued = 0
        self.t = 0.0
        self.mode, self.subject = Mode.SCHEDULING, ""
        self.halt_until = 0.0
        self.window_began = 0.0
        self.regime_at = 0.0
        self.admit_after = 0.0
        self.resize_after = 0.0
        self.requests_due = 0.0
        self.choose_after = 0.0
        self.decided: tuple[Schedule, float] | None = None
        self.choices = Decided()
        self.usual_seconds = UNKNOWN
        self.explored = 0.0
        self.guard_at = 0.0
        self.tolerated: CoScheduled | None = None
        self.overtakes = 0
        self.lost = 0.0
        self.empty_since: float | None = None
        self.noted: set[object] = set()
        self.resizing: dict[str, list[tuple[Share, float]]] = {}
        self._out: list[Action] = []
        self._launches: list[str] = []
        self._changes: dict[str, Share] = {}
        self._why: list[str] = []
        for index, spec in enumerate(specs):
            self._enter(index, spec)

    def _enter(self, index: int, spec: Spec) -> None:
        if spec.name in self.sims:
            raise ValueError(f"two simulations are called {spec.name!r}")
        warmup = self.settings.warmup
        self.sims[spec.name] = Simulation(spec, index, Meter(warmup), Work(warmup))
        guessed = spec.application in programs.IN_PERIODS
        family = self.families.setdefault(
            spec.family, Family(spec, spec.iterations, spec.iterations > 0 and guessed)
        )
        family.total += 1
        for ranks in spec.widths or (spec.ranks,):
            there = spec.on(ranks)
            family.shapes.setdefault(ranks, Shape(shape_name(there), there))
            self.shapes[shape_name(there)] = family.shapes[ranks]
        self.queue(self.sims[spec.name])

    def set_capacity(self, capacity: Capacity) -> None:
        """What may be used from now on; `cores` is all cores, as a number."""
        self.capacity = capacity
        self.cores = capacity.cpu / 1000.0
        self.capacity_at = self.now

    # --- facts ---

    @property
    def own_cores(self) -> bool:
        """True if every active rank has a core to itself."""
        return self.ranks <= self.cores

    @property
    def running(self) -> CoScheduled:
        """The co-scheduled set of now: all that is active."""
        return co_scheduled(self.counts)

    @property
    def profiling(self) -> bool:
        """True while the profile of one simulation is being taken."""
        return self.mode is Mode.PROFILING

    @property
    def phase(self) -> Phase:
        """What the run is about now, for the reader."""
        if self.finished:
            return Phase.DONE
        if self.profiling or any(self.shape(s).profile is None for s in self.active.values()):
            return Phase.PROFILE
        if len(self.active) < 2:
            return Phase.RUN
        known = self.own_cores or self.knowledge.verdict(self.running) is not TrialVerdict.OPEN
        return Phase.FAIRNESS if known else Phase.PACK

    @property
    def finished(self) -> bool:
        """True once every simulation is done, failed or not started."""
        return not (self.queued or self.active or self.suspended or self.terminating)

    def family(self, sim: Simulation) -> Family:
        """The family of a simulation."""
        return self.families[sim.spec.family]

    def shape(self, sim: Simulation) -> Shape:
        """The shape of a simulation: its family on its present ranks."""
        return self.shapes[sim.shape]

    @property
    def moldable(self) -> bool:
        """True if the ranks of some simulation are to be chosen."""
        return any(len(family.spec.widths) > 1 for family in self.families.values())

    def baseline(self, sim: Simulation) -> float:
        """Iterations per second alone by now: its own, else its family's; 0 if unknown."""
        if sim.alone.rate > 0.0:
            return sim.alone.rate
        profile = self.shape(sim).profile
        return profile.rate if profile else 0.0

    def iterations_left(self, sim: Simulation) -> int | None:
        """Iterations that a simulation still needs; None if unknown, as beyond what is expected."""
        total = self.family(sim).length
        left = total - sim.over - sim.iterations
        return left if total > 0 and left >= 0 else None

    def remaining(self, sim: Simulation) -> float | None:
        """Seconds alone that a simulation still needs; None if unknown."""
        left, rate = self.iterations_left(sim), self.baseline(sim)
        return None if left is None or rate <= 0.0 else left / rate

    def budget(self, sim: Simulation) -> float:
        """How many times slower than alone it may run, its deadline considered; at least 1."""
        budget = max(1.0, sim.spec.slowdown)
        remaining = self.remaining(sim)
        if sim.spec.deadline is None or not remaining:
            return budget
        slack = (sim.spec.deadline - self.t) / remaining
        return budget if slack < 1.0 else min(budget, slack)

    def memory_of(self, sim: Simulation, ranks: int = 0) -> int:
        """Bytes that a simulation takes, on other `ranks` if any are given.

        What was asked for, or more if more was seen.
        """
        seen = self.memory_on(sim.spec, ranks or sim.spec.ranks)
        return max(sim.spec.memory, sim.memory, seen)

    def memory_on(self, spec: Spec, ranks: int) -> int:
        """Bytes that one of a family was seen to take on so many ranks; 0 if none has."""
        return self.families[spec.family].shapes[ranks].memory

    def fits(self, sim: Simulation, ranks: int = 0) -> bool:
        """True if the simulation's memory and devices fit beside all else that is started."""
        room, others = self.capacity.memory, self.memory_used - sim.counted_memory
        enough = room <= 0 or others + self.memory_of(sim, ranks) <= room
        return enough and not self.lacks(sim, ranks)

    def fits_alone(self, sim: Simulation, ranks: int) -> bool:
        """True if what the plan asks for fits where nothing is started, whatever was seen."""
        room = self.capacity.memory
        return (room <= 0 or sim.spec.memory <= room) and not self.lacks(sim, ranks)

    def lacks(self, sim: Simulation, ranks: int = 0) -> str:
        """Of which device too few are free for a simulation on so many ranks, in words."""
        offered = dict(self.capacity.devices)
        for name, wanted in sim.spec.takes(ranks).items():
            there = offered.get(name, 0)
            others = self.devices_used.get(name, 0) - sim.counted_devices.get(name, 0)
            free = max(0, there - others)
            if wanted > free:
                return f"{wanted} of {name}, of which {free} of {there} are free"
        return ""

    def tell_lack(self, sim: Simulation, ranks: int = 0) -> None:
        """Say for which device a simulation waits, if for any, once."""
        if lacks := self.lacks(sim, ranks):
            name = sim.spec.name
            self.note_once(("device", name), "hold", f"{name} waits for {lacks}", name=name)

    def count_devices(self, sim: Simulation, wanted: Mapping[str, int]) -> None:
        """Count the devices of a simulation that is started; none to count them no more."""
        for sign, taken in ((-1, sim.counted_devices), (1, wanted)):
            for name, number in taken.items():
                self.devices_used[name] = self.devices_used.get(name, 0) + sign * number
        sim.counted_devices = wanted

    def count_memory(self, sim: Simulation, memory: int | None = None) -> None:
        """Count the memory of a simulation that is started; 0 to count it no more."""
        new = self.memory_of(sim) if memory is None else memory
        self.memory_used += new - sim.counted_memory
        sim.counted_memory = new

    def sequential(self) -> float:
        """Seconds that the whole plan takes one after the other, as far as is known."""
        known = 0.0
        for family in self.families.values():
            profile = self.shapes[shape_name(family.spec)].profile
            if profile and family.length:
                known += family.total * family.length / profile.rate
        return max(known, self.now)

    def affordable(self, loss: float) -> bool:
        """True if a trial that loses so many seconds of one simulation is still within bounds."""
        return self.lost + loss <= self.settings.harm * self.sequential()

    def complete(self, window: Window | None) -> bool:
        """True if a window has settled, or is as long as a window may become."""
        s = self.settings
        if window is None:
            return False
        if window.seconds >= s.window and window.iterations >= s.window_iterations:
            if window.error <= s.steady:
                return True
        elif window.iterations < 3:
            return False
        return self.now - self.window_began >= s.window * s.window_limit

    # --- the run as a whole ---

    def begin_profile(self, sim: Simulation) -> None:
        """From now on the run is about the profile of one simulation."""
        self.mode, self.subject = Mode.PROFILING, sim.spec.name
        self.window_began = self.now

    def schedule(self) -> None:
        """A profile is over, or a run that was interrupted is resumed: the run goes on."""
        self.mode, self.subject = Mode.SCHEDULING, ""

    def interrupt(self, why: str, within: float = 0.0) -> None:
        """The run is to end: all that is started is stopped, and nothing more is started.

        It is stopped at a checkpoint where that is possible, and `within` so many seconds.
        """
        self.mode, self.subject = Mode.INTERRUPTED, why
        self.halt_until = self.now + within
        self.note("hold", f"the run is ended: {why}")
        for sim in [*self.active.values(), *self.suspended.values()]:
            if within <= 0.0 or not self.can_halt(sim):
                self.stop(sim, Cause.INTERRUPTED, why)
            elif sim.stage is not Stage.HALTING:  # it may be about to, to go on otherwise
                sim.next_ranks = sim.spec.ranks  # should it stop only after the run is resumed
                self.halt(sim, why)
        self.give_up(Cause.INTERRUPTED, why)

    def end_what_does_not_halt(self) -> None:
        """The run is to end, and its time for that is over."""
        if self.now < self.halt_until:
            return
        why = f"{self.subject}; it did not stop at a checkpoint in time"
        for sim in list(self.active.values()):
            self.stop(sim, Cause.INTERRUPTED, why)

    def give_up(self, cause: Cause, why: str) -> None:
        """What is still queued will not start, or not go on where a checkpoint stopped it."""
        for family in self.families.values():
            for _, name in sorted(family.queue):
                sim = self.sims[name]
                if sim.stops and cause is Cause.INTERRUPTED:
                    self.end_at_checkpoint(sim, sim.most, why)
                else:
                    self.end(sim, Stage.NOT_STARTED, cause, why)
            family.queue.clear()
        self.queued = 0

    def withdraw(self, name: str, cause: Cause, why: str) -> None:
        """One that is queued will not start, or not go on."""
        sim = self.sims.get(name)
        if sim is not None and sim.stage is Stage.QUEUED:
            waiting = self.families[sim.spec.family].queue
            waiting.remove((sim.index, name))
            heapq.heapify(waiting)
            self.queued -= 1
            self.end(sim, Stage.FAILED, cause, why)

    # --- stages of a simulation ---

    def queue(self, sim: Simulation) -> None:
        """Put a simulation into the queue at its place in the plan, new or to be run again."""
        if sim.stage is not Stage.QUEUED:
            sim.enter(Stage.QUEUED)
        sim.share, sim.stop, sim.late_told = None, None, False
        sim.cause, sim.reason, sim.started, sim.ended = None, "", None, None
        sim.most = max(sim.most, sim.over + sim.iterations)
        sim.useful, sim.over, sim.half, sim.unbindable = None, 0, None, None
        sim.counted, sim.work = Meter(self.settings.warmup), Work(self.settings.warmup)
        sim.spec, sim.by_work, sim.undisturbed, sim.shared = sim.planned, False, 0, False
        sim.alone, sim.boost, sim.memory = Alone(), 1.0, 0
        sim.plan_phase, sim.residual, sim.halted_at = 0, None, None
        heapq.heappush(self.families[sim.spec.family].queue, (sim.index, sim.spec.name))
        self.queued += 1

    def requeue(self, sim: Simulation, cause: Cause, why: str) -> None:
        """Put a simulation into the queue again, and say so."""
        self.queue(sim)
        self._out.append(Requeued(sim.spec.name, cause, why))

    def end(self, sim: Simulation, stage: Stage, cause: Cause, reason: str = "") -> None:
        """A simulation runs no more, or never will; say so."""
        sim.enter(stage)
        sim.cause, sim.reason = cause, reason
        self._out.append(Ended(sim.spec.name, _END_STATES[stage], cause, reason))

    def end_at_checkpoint(self, sim: Simulation, over: int, why: str) -> None:
        """The run ends, and a simulation can go on after so many iterations if it is resumed."""
        after = "" if self.family(sim).by_work else f" after {counted(over, 'iteration')}"
        told = f"stopped at a checkpoint{after}: {why}"
        self.end(sim, Stage.CHECKPOINTED, Cause.CHECKPOINTED, told)

    def heads(self, count: int) -> list[Simulation]:
        """The first queued simulation of each of the first `count` families in queue order."""
        queues = (f.queue[0] for f in self.families.values() if f.queue)
        return [self.sims[name] for _, name in heapq.nsmallest(count, queues)]

    def take(self, sim: Simulation) -> None:
        """Take the head of its family out of the queue."""
        heapq.heappop(self.families[sim.spec.family].queue)
        self.queued -= 1

    def launch(self, sim: Simulation, ranks: int) -> None:
        """Start a queued simulation on so many ranks; its share is settled at the flush."""
        self.take(sim)
        family = self.family(sim)
        family.least = min(ranks, family.least or ranks)
        sim.spec = self.cut(sim.planned.on(ranks))
        self.count_memory(sim)
        self.count_devices(sim, sim.spec.takes())
        sim.enter(Stage.PREPARING)
        sim.launched_at = sim.progress_at = sim.resumed_at = self.now
        sim.started = sim.ended = None
        sim.startup = 0.0
        self._join(sim)
        self._launches.append(sim.spec.name)

    def cut(self, spec: Spec) -> Spec:
        """A simulation as it is cut now: by measured weights, if its family has some."""
        weights = self.families[spec.family].cuts.get(spec.ranks)
        return replace(spec, weights=weights, recut=True) if weights else spec

    def started(self, sim: Simulation, t: float, iterations: int, total: int) -> None:
        """Its own command runs now, and goes on after so many iterations, `total` in its case."""
        family = self.family(sim)
        if total and not family.iterations and not family.by_work:
            family.iterations = total
            family.guessed = sim.spec.application in programs.IN_PERIODS
        counted = sim.spec.application in programs.OWN_COUNT and sim.measure != "periods"
        sim.started, sim.over = t, iterations if counted else min(iterations, sim.most)
        if family.by_work and iterations:
            sim.over = sim.most  # of work, of which its checkpoint tells nothing
        sim.progress_at = sim.began_at = sim.told_at = self.now
        sim.begun = True
        if sim.stage is Stage.PREPARING:
            sim.enter(Stage.STARTING)

    def sampled(self, sim: Simulation, ranks: Ranks) -> None:
        """Take a look at a simulation's ranks into account."""
        memory, shape = sum(ranks.memory), self.shape(sim)
        shape.memory = max(shape.memory, memory)
        if memory > sim.memory:
            sim.memory = memory
            self.count_memory(sim)
        sim.residual = ranks.residual
        useful = sum(ranks.useful)
        if (sim.by_work or not sim.iterations) and useful > (sim.useful or 0.0):
            sim.progress_at = self.now  # it works towards its first iteration, if it has any
        sim.useful = useful
        before = sim.iterations
        if sim.by_work:
            sim.measure = "work"
        elif any(ranks.iterations) or not before + sim.over:
            sim.measure = ranks.measure
            if any(ranks.iterations) and ranks.measure == "iterations":
                self.family(sim).guessed = False  # the program tells those that its case tells of
        iterates = self._count(sim, ranks)
        if not sim.by_work and (iterates or self._works(sim, ranks)):
            sim.progress_at, sim.worked = self.now, ranks.useful
        if iterates:
            paused = sim.stage is Stage.PAUSED and not before
            if paused or sim.stage in (Stage.PREPARING, Stage.STARTING):
                self._first_iteration(sim)

    def _count(self, sim: Simulation, ranks: Ranks) -> bool:
        """Count iterations, or work where there are none; whether there was any."""
        family = self.family(sim)
        counts, works = sim.counted.add(self.now, ranks), False
        if counts:
            sim.told_at = self.now
        if ranks.measure != "iterations" or family.by_work:
            works = self._count_work(sim, ranks)
        if family.by_work and counts and sim.counted.iterations >= TELLS and family.turns < TURNS:
            self._measure_by(family, by_work=False)
            self.note(
                "hold",
                f"{sim.spec.name} tells its progress after all: those of {sim.spec.family} are "
                f"measured by its {ranks.measure} from now on",
                family=sim.spec.family,
                measure=ranks.measure,
            )
        elif not sim.by_work and self._tells_nothing(sim, ranks):
            self.measure_by_work(sim)
        return works if sim.by_work else counts

    def _count_work(self, sim: Simulation, ranks: Ranks) -> bool:
        """Count its work, also while it may tell something else yet; whether there was any."""
        if sim.share is not None and sim.share.suspended:
            sim.work.stand_still(ranks)
            return False
        spins = sim.share is None or sim.share.wait.mode != "doorbell"
        before = sim.work.meter.iterations
        works = sim.work.add(self.now, ranks, spins)
        sim.undisturbed += (sim.work.meter.iterations - before) * self.own_cores
        self._count_threads(sim)
        return works

    def _tells_nothing(self, sim: Simulation, ranks: Ranks) -> bool:
        """Whether a program runs, and is known or was waited for long enough to count nothing."""
        if sim.started is None or sim.stage not in (Stage.PREPARING, Stage.STARTING, Stage.RUNNING):
            return False
        family, since = self.family(sim), max(sim.told_at, sim.resumed_at)
        if family.by_work or ranks.measure != "work":
            return family.by_work and (ranks.measure == "work" or family.turns >= TURNS)
        expected = sim.spec.application in programs.OWN_COUNT  # however long that takes
        return not expected and self.now - since >= self.settings.rhythm

    def measure_by_work(self, sim: Simulation) -> None:
        """It counts nothing: from now on the work of its family's simulations is measured."""
        family = self.family(sim)
        sim.by_work, sim.measure = True, "work"
        if family.by_work:
            return
        self._measure_by(family, by_work=True)
        family.turns += 1
        self.note(
            "hold",
            f"{sim.spec.name} tells no iterations and no rhythm was found: those of "
            f"{sim.spec.family} are measured by work, CPU time outside MPI, which errs by up to "
            f"{self.settings.work_error:.0%}",
            family=sim.spec.family,
            measure="work",
            error=self.settings.work_error,
        )

    def _measure_by(self, family: Family, by_work: bool) -> None:
        """What was measured of a family before is of another unit."""
        family.by_work, family.silent = by_work, False
        family.iterations = 0 if by_work else family.spec.iterations
        family.guessed = family.iterations > 0 and family.spec.application in programs.IN_PERIODS
        for shape in family.shapes.values():
            if shape.profile is not None:
                self.knowledge.forget(shape.name)
            shape.profile, shape.blocking_need = None, None
            shape.trials.clear()
            shape.rates.clear()
            shape.ends.clear()
        for sim in self.sims.values():
            if sim.spec.family == family.spec.family:
                sim.alone, sim.most = Alone(), 0
                sim.by_work = sim.by_work and by_work

    def _count_threads(self, sim: Simulation) -> None:
        """Count a simulation as so many ranks as its threads keep cores busy."""
        shape, threads = self.shape(sim), min(sim.work.threads, math.ceil(self.cores))
        if threads <= shape.threads:
            return
        shape.threads = threads
        more = 0
        for one in self.active.values():
            if one.shape == shape.name:
                more += shape.cores - one.cores
                one.cores = shape.cores
        if more:
            self.ranks += more
            self.regime()

    def error(self, sim: Simulation) -> float:
        """Relative error of what tells its progress, beyond the scatter of its rate."""
        s = self.settings
        return {"iterations": 0.0, "periods": s.period_error, "work": s.work_error}[sim.measure]

    def _works(self, sim: Simulation, ranks: Ranks) -> bool:
        """Whether some rank computes between two iterations; see WORKS."""
        if not sim.iterations or len(sim.worked) != len(ranks.useful):
            return False
        most = max(now - then for then, now in zip(sim.worked, ranks.useful))
        return most > WORKS * max(0.0, self.now - sim.progress_at)

    def _first_iteration(self, sim: Simulation) -> None:
        if sim.stage is not Stage.PAUSED:
            sim.enter(Stage.RUNNING)
        shape, family = self.shape(sim), self.family(sim)
        shape.broken = False
        begun = sim.began_at if sim.by_work else self.now
        took = sim.startup = begun - sim.launched_at
        shape.soonest = took if shape.startup is None else min(took, shape.soonest)
        shape.startup = max(took, shape.startup or 0.0)
        if sim.halted_at is not None:
            family.restart, sim.halted_at = self.now - sim.halted_at, None
        self.regime_at = self.now
        if not self.own_cores:  # until now it has not disturbed the others
            self.restart_windows(s for s in self.active.values() if s is not sim)

    def pause(self, sim: Simulation, why: str) -> None:
        """Suspend an active simulation for a while; it keeps its place."""
        sim.enter(Stage.PAUSED)
        self.share(sim, why, suspended=True)

    def unpause(self, sim: Simulation, why: str) -> None:
        """Resume a paused simulation."""
        sim.go_on()
        sim.progress_at = sim.resumed_at = self.now
        self.share(sim, why, suspended=False)

    def suspend(self, sim: Simulation, why: str) -> None:
        """Take an active simulation back: it makes room, and none of its work is lost."""
        self._set_aside(sim)
        self.share(sim, why, requests=(FLOOR,) * sim.spec.ranks, suspended=True)

    def _set_aside(self, sim: Simulation) -> None:
        self._leave(sim)
        self.suspended[sim.spec.name] = sim
        sim.enter(Stage.SUSPENDED)

    def resume(self, sim: Simulation, why: str) -> None:
        """Resume a suspended simulation, as the newest of the active ones."""
        self._take_up(sim)
        self.share(sim, why, suspended=False)

    def _take_up(self, sim: Simulation) -> None:
        del self.suspended[sim.spec.name]
        sim.go_on()
        sim.progress_at = sim.resumed_at = self.now
        self._join(sim)

    def can_halt(self, sim: Simulation) -> bool:
        """Whether a simulation that is started can be asked to stop at a checkpoint."""
        return self.capacity.checkpoints and sim.spec.checkpoint and sim.started is not None

    def halt(self, sim: Simulation, why: str) -> None:
        """Ask a simulation to stop at a checkpoint; it is active until its Finished comes."""
        name = sim.spec.name
        if name in self.suspended:
            del self.suspended[name]
            self._join(sim)
        sim.enter(Stage.HALTING)
        sim.progress_at = sim.resumed_at = self.now
        self._changes.pop(name, None)
        self.resizing.pop(name, None)
        if sim.share is not None:
            sim.share = replace(sim.share, suspended=False)  # the executor sees to that
        self.ask_to_halt(sim, why)

    def ask_to_halt(self, sim: Simulation, why: str) -> None:
        """Tell the executor; once more where it may not have heard it."""
        self._out.append(Checkpoint(sim.spec.name, why))

    def stop(self, sim: Simulation, cause: Cause, why: str, requeue: bool = False) -> None:
        """End a simulation, perhaps for good now; it is terminating until its Finished comes."""
        if sim.spec.name in self.active:
            self._leave(sim)
        self.suspended.pop(sim.spec.name, None)
        self.terminating[sim.spec.name] = sim
        if sim.stage is not Stage.TERMINATING:
            sim.enter(Stage.TERMINATING)
        sim.stop = Stop(sim.spec.name, cause, why, requeue)
        self._changes.pop(sim.spec.name, None)
        if sim.spec.name in self._launches:
            self._launches.remove(sim.spec.name)
        self._out.append(sim.stop)

    def ended(self, sim: Simulation) -> bool:
        """Take a simulation out of all that is started; False if it was not."""
        name = sim.spec.name
        known = name in self.active or name in self.suspended or name in self.terminating
        if name in self.active:
            self._leave(sim)
        self.suspended.pop(name, None)
        if self.terminating.pop(name, None):
            self.choose_after = AT_ONCE  # for its cores
            self.restart_windows(self.active.values())
        self.resizing.pop(name, None)
        self.count_memory(sim, 0)
        self.count_devices(sim, {})
        self.tolerated = None
        return known

    # --- what runs at once, and with which shares ---

    def _join(self, sim: Simulation) -> None:
        """Count a simulation among those that use CPU."""
        self.active[sim.spec.name] = sim
        self.counts[sim.shape] = self.counts.get(sim.shape, 0) + 1
        sim.cores = self.shape(sim).cores
        self.ranks += sim.cores
        self.regime()

    def _leave(self, sim: Simulation) -> None:
        """The opposite of `_join`."""
        del self.active[sim.spec.name]
        self.counts[sim.shape] -= 1
        self.ranks -= sim.cores
        self.regime()

    def regime(self) -> None:
        """What runs at once has changed: measurements begin anew, requests are looked at."""
        self.requests_due = self.choose_after = AT_ONCE
        self.regime_at = self.now
        if not self.own_cores:
            for sim in self.active.values():
                sim.shared = True
        if not self.own_cores or len(self.active) <= 1:
            self.restart_windows(self.active.values())

    def restart_windows(self, sims: Iterable[Simulation]) -> None:
        """Begin new windows for some simulations."""
        self.window_began = self.now
        for sim in sims:
            sim.alone.settle()
            sim.work.restart()
            if sim.iterates and not sim.by_work:
                sim.meter.reset()

    def share(
        self,
        sim: Simulation,
        why: str,
        requests: tuple[int, ...] | None = None,
        wait: WaitPolicy | None = None,
        suspended: bool | None = None,
        bound: bool | None = None,
        limit: float | None = None,
    ) -> None:
        """Change parts of a simulation's share; sent with the flush unless it is not yet up."""
        old = sim.share or Share(requests=(FLOOR,) * sim.spec.ranks)
        new = Share(
            old.requests if requests is None else requests,
            old.wait if wait is None else wait,
            old.suspended if suspended is None else suspended,
            old.bound if bound is None else bound,
            old.limit if limit is None else limit,
        )
        if new == sim.share:
            return
        name = sim.spec.name
        if name not in self._launches:
            if name not in self._changes:
                self.resizing.setdefault(name, []).append((old, self.now))
            self._changes[name] = new
            if why not in self._why:
                self._why.append(why)
        sim.share = new

    def note(self, what: str, why: str, **data: object) -> None:
        """Record a decision."""
        self._out.append(Note(what, why, _rounded(data)))

    def note_once(self, key: object, what: str, why: str, **data: object) -> None:
        """Record a decision, unless it was recorded under this key before."""
        if key not in self.noted:
            self.noted.add(key)
            self.note(what, why, **data)

    @property
    def full(self) -> bool:
        """Whether as many run as may; one that is told to end does until it has ended.

        Where nothing is active a suspended one must be able to go on.
        """
        running, most = len(self.active) + len(self.terminating), self.capacity.simulations
        started = running + len(self.suspended) if self.active else running
        return 0 < self.settings.max_packed <= running or 0 < most <= started

    def settled(self) -> bool:
        """True if no resize is on its way, and none that was told to end uses CPU yet."""
        late = [n for n, asked in self.resizing.items() if self.now - asked[0][1] > ACK_LIMIT]
        for name in late:
            del self.resizing[name]
        return not self.resizing and not self.terminating

    def resized(self, names: Sequence[str], refused: str) -> None:
        """A resize took effect, or none of it did and the old shares hold."""
        old = self._answered(names, refused)
        sims = [self.sims[name] for name in old]
        if refused and old and self._only_bound(sims, old, refused):
            return
        if refused and old:
            self.resize_after = self.now + self.settings.cooldown
            self.requests_due = AT_ONCE
            for sim in sims:
                self._revert(sim, old[sim.spec.name])
            self.note("hold", f"a resize was refused, the old shares hold: {refused}")
            return
        here = [sim for sim in sims if sim.spec.name in self.active]
        if not self.own_cores:
            self.restart_windows(here)
        for sim in here:
            if sim.bound != old[sim.spec.name].bound:
                sim.meter.reset()

    def _answered(self, names: Sequence[str], refused: str) -> dict[str, Share]:
        """What each had before the resize that this is the answer to, the oldest on its way.

        Without those of which a refusal tells nothing yet, as another resize of theirs is under
        way: what they have is what that one gives them, or else what they had before this one.
        """
        before: dict[str, Share] = {}
        for name in names:
            if not (asked := self.resizing.get(name)):
                continue
            old, _ = asked.pop(0)
            if not (refused and asked):
                before[name] = old
            if asked:
                asked[0] = (old if refused else asked[0][0], asked[0][1])
            else:
                del self.resizing[name]
        return before

    def _only_bound(self, sims: Sequence[Simulation], old: Mapping[str, Share], why: str) -> bool:
        """Whether nothing was refused but to be bound to cores, which is not asked for again."""
        shares = [(sim.share, old[sim.spec.name]) for sim in sims]
        if not all(new and old == replace(new, bound=old.bound) for new, old in shares):
            return False
        blamed = [sim for sim in sims if why.startswith(f"{sim.spec.name}: ")] or sims
        for sim in blamed:
            if sim.bound and not self.shape(sim).binding.closed:
                sim.unbindable = why, self.now
        for sim in sims:
            self._revert(sim, old[sim.spec.name])
        return True

    def tell_binding(self, sim: Simulation) -> None:
        """Say what was decided of binding its shape to cores."""
        binding = self.shape(sim).binding
        self.note(
            "bind",
            f"{sim.shape}: {binding.why}",
            family=sim.spec.family,
            name=sim.spec.name,
            ranks=sim.spec.ranks,
            bound=binding.bound,
            gain=binding.gain,
            error=binding.error,
            pairs=len(binding.gains),
        )

    def _revert(self, sim: Simulation, share: Share) -> None:
        """Its resize was refused: it has `share` still, and is suspended or not as before."""
        name = sim.spec.name
        if sim.share is None or not (name in self.active or name in self.suspended):
            return
        asked, sim.share = sim.share, share
        if asked.suspended == share.suspended:
            return
        if sim.stage is Stage.SUSPENDED:
            self._take_up(sim)
        elif sim.stage is Stage.PAUSED:
            sim.go_on()
        elif share.suspended:
            self._set_aside(sim)

    def flush(self) -> list[Action]:
        """The actions since the last flush: notes and stops, one Resize, then launches."""
        actions, self._out = self._out, []
        if self._changes:
            actions.append(Resize(dict(self._changes), "; ".join(self._why)))
        for name in self._launches:
            sim = self.sims[name]
            share = sim.share or Share((FLOOR,) * sim.spec.ranks)
            sim.share = replace(share, suspended=False)
            actions.append(Launch(name, sim.share, sim.continued))
        self._changes, self._why, self._launches = {}, [], []
        return actions


def _rounded(data: Mapping[str, object]) -> dict[str, object]:
    """Figures for people: four significant digits; lists for tuples, so that JSON is exact."""

    def short(value: object) -> object:
        if isinstance(value, float):
            return float(f"{value:.4g}") if math.isfinite(value) else None
        if isinstance(value, (list, tuple)):
            return [short(item) for item in value]
        if isinstance(value, Mapping):
            return {key: short(item) for key, item in value.items()}
        return value

    return {key: short(value) for key, value in data.items()}
