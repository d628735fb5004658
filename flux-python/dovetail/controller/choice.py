# SPDX-License-Identifier: LGPL-3.0-or-later
"""Which simulations start now, and on how many ranks each, so that the whole queue ends early.

Inputs: what waits (`Task`: equal simulations, with the seconds that one takes on each width), the
cores, and when those in use fall free (`Busy`). Output: a `Schedule`: what to start at this moment,
what is planned for the rest, and every alternative with the end that it would have.

Whatever a user could do with the queue is tried: one after the other, all narrowest, all widest,
each at the knee of its curve, k at once for every k that makes a difference, with the last wave
widened. Beside them stands the dual approximation for moldable tasks of Mounié, Rapine and
Trystram ("A 3/2-Approximation Algorithm for Scheduling Independent Monotonic Malleable Tasks",
SIAM J. Comput. 37(2), 2007): guess when all is done, give each simulation the least work that
meets the guess, and bisect the guess. Each of these is scheduled as a list on the cores' real
release times, the best is improved by moving simulations to other widths, and the best of all
is taken. A list that area, memory or widths make too long is calculated only for who asks for all
`alternatives`. Where simulations take more or less than predicted (`scatter`), ends are compared as
they are to be expected: the last of many ends later than each.

Invariants: pure; the same inputs give the same answer. Where nothing is busy, something starts.
Starting nothing is chosen only if the queue then ends earlier by more than `WAITING_PAYS`, or a
deadline is kept that would be missed.

    choose([Task("channel", 5, {1: 10.0, 2: 6.0})], cores=2).starts_now
    # (("channel", 1), ("channel", 1)): two waves on one rank each, and the last one on both
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

WAITING_PAYS = 0.03
"""Predicted times are noisy: an end that is earlier by less than this is no reason to wait."""
LATER_FOR_TURNAROUND = 0.10
"""How much later a queue may end so that its simulations with that objective end earlier."""
CHANGED = 0.01
"""Part of the seconds that are left, and of what a simulation takes on a width: while less than
that differs from what was predicted, what was decided is gone on with."""
EFFORT = 120_000
"""Queue heads and ends that may be looked at for one decision: bounds its time, whatever the queue.
`dovetail bench choice` times it on a queue that needs all of it."""
IMPROVING = 6_000
"""The same for improving on the best alternative, of which there is no end."""
ENDING_EARLY = 0.03
"""What the mean end counts beside the last one. Where one simulation holds up the end, cores that
are left over make the others safe from being slower than predicted."""

Objective = Literal["throughput", "turnaround"]
Order = Literal["longest", "area", "widest"]
"""What starts first: the longest; what takes most core-seconds; or what takes most cores: cores are
then kept free for it, and only what ends before it can start overtakes it."""

SEQUENTIAL = "one after the other"
NARROWEST = "all narrowest"
WIDEST = "all widest"
KNEE = "knee"
AT_ONCE = "at most {} {} each"
DUAL = "dual approximation"
MIXED = "improved"


@dataclass(frozen=True)
class Task:
    """`count` equal simulations of a plan entry that wait."""

    kind: str
    """Plan entry."""
    count: int
    seconds: Mapping[int, float]
    """What one takes on each width that it may have, on a node that is full."""
    memory: int = 0
    """Bytes of each simulation."""
    objective: Objective = "throughput"
    deadline: float | None = None
    """Seconds from now."""
    order: int = 0
    """Place in the plan; decides between equals."""


@dataclass(frozen=True)
class Busy:
    """One simulation that runs: its cores, the seconds until they fall free, and its memory."""

    cores: int
    seconds: float
    memory: int = 0


@dataclass(frozen=True)
class Alternative:
    """One way through the queue: its name, when all would be done, and what it means."""

    name: str
    makespan: float
    description: str


@dataclass(frozen=True)
class Schedule:
    """What to do now, and why; times are predictions, in seconds from now."""

    makespan: float
    starts_now: tuple[tuple[str, int], ...]
    """Kind and width of each simulation to start at this moment, in this order."""
    widths_planned: Mapping[str, Mapping[int, int]]
    """How many of each kind are to run on each width."""
    name: str
    """Of the alternative that is taken."""
    chooser: _Chooser = field(repr=False, compare=False)
    description: str = ""
    first: Order = "longest"
    at_once: int = 0
    promised: float = 0.0
    """When all is done, by the decision that this one goes on with, if it does."""
    seconds: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """What that decision was told, by kind and width."""

    @property
    def lower_bound(self) -> float:
        """No schedule can end before this; see `lower_bound`."""
        return self.chooser.bound

    @cached_property
    def alternatives(self) -> tuple[Alternative, ...]:
        """What else could be done; most of it need not be calculated to the end for a decision."""
        found = {one.name: one for one in self.chooser.alternatives()}
        taken = Alternative(self.name, self.makespan, self.description)
        if self.name not in found or self.makespan < found[self.name].makespan:
            found[self.name] = taken
        return tuple(found.values()) if self.widths_planned else ()

    @property
    def rest(self) -> dict[str, dict[int, int]]:
        """What is planned for those that do not start now."""
        left = {kind: dict(row) for kind, row in self.widths_planned.items()}
        for kind, width in self.starts_now:
            left[kind][width] -= 1
        rows = {kind: {w: n for w, n in row.items() if n} for kind, row in left.items()}
        return {kind: row for kind, row in rows.items() if row}


def choose(
    tasks: Sequence[Task],
    cores: int,
    busy: Sequence[Busy] = (),
    memory: int = 0,
    nodes: Sequence[int] = (),
    at_once: int = 0,
    before: Schedule | None = None,
    since: float = 0.0,
    scatter: float = 0.0,
) -> Schedule:
    """The schedule that ends first. `memory` and `at_once` 0: no limit; both count what is busy.

    `nodes` are the cores of each node. Ranks of a simulation may lie on several, so that a width
    fits if all nodes together have the cores; memory that is needed per rank must fit into the
    share that the largest node has of it. A simulation that fits nowhere runs alone.

    `before` is what was decided so many seconds ago (`since`). If it was done since, and neither
    its end nor what it was told has changed by more than `CHANGED`, it is gone on with, which costs
    little; else it is one alternative more. `scatter` is the standard deviation of what simulations
    take, as a part of it.
    """
    cores = min(cores, sum(nodes)) if nodes else cores
    if cores < 1:
        raise ValueError("there is no core")
    chooser = _Chooser(
        [t for t in tasks if t.count > 0], cores, busy, memory, nodes, at_once, scatter
    )
    return chooser.schedule(before, since)


@dataclass(frozen=True)
class _Piece:
    """Simulations of one task that are planned on one width."""

    task: int
    width: int
    count: int


@dataclass(frozen=True)
class _Plan:
    """Widths for all that waits, the order in which it starts, and how many may run at once."""

    name: str
    description: str
    pieces: tuple[_Piece, ...]
    first: Order = "longest"
    at_once: int = 0


@dataclass(frozen=True)
class _Outcome:
    """What a plan comes to."""

    plan: _Plan
    makespan: float
    expected: float
    """The end if simulations take more or less than predicted: then the last is later."""
    missed: int
    """Simulations that end after their deadline."""
    lateness: float
    own: float
    """Mean end of the simulations whose objective is turnaround."""
    mean: float
    """Mean end of all."""
    area: float
    """Core-seconds."""
    starts: tuple[tuple[int, int], ...]
    """Task and width of each simulation that starts now."""


_Event = tuple[float, int, int, int, int]
"""When something ends: then its cores, memory and number fall free; and its place in the order."""


@dataclass
class _Waiting:
    """A piece while its plan is calculated."""

    place: int
    """In the plan's order."""
    task: int
    width: int
    seconds: float
    memory: int
    left: int


@dataclass
class _Queue:
    """Pieces of the same cores and much the same memory, the next to start at the end."""

    cores: int
    waiting: list[_Waiting] = field(default_factory=list)


class _Chooser:
    """One decision: the inputs in the form in which they are needed again and again."""

    def __init__(
        self,
        tasks: list[Task],
        cores: int,
        busy: Sequence[Busy],
        memory: int,
        nodes: Sequence[int],
        at_once: int,
        scatter: float = 0.0,
    ) -> None:
        self.tasks = tasks
        self.scatter = scatter
        self.cores = cores
        self.memory = memory or sum(b.memory for b in busy) + sum(t.memory * t.count for t in tasks)
        self.at_once = at_once or len(busy) + sum(task.count for task in tasks)
        self.running = busy
        # What ought to have ended has not: its cores are not free now.
        self.busy: list[_Event] = [(max(b.seconds, 1e-9), b.cores, b.memory, 1, -1) for b in busy]
        self.busy.sort()
        self.busy_until = self.busy[-1][0] if busy else 0.0
        self.busy_area = sum(b[0] * b[1] for b in self.busy)
        self.busy_used = sum(b[0] * b[2] for b in self.busy)
        self.busy_memory = sum(b.memory for b in busy)
        self.free = cores - sum(b.cores for b in busy)
        self.free_at: dict[int, float] = {}
        self.plain = all(t.deadline is None and t.objective == "throughput" for t in tasks)
        share = self.memory * max(nodes) / sum(nodes) if nodes and memory else self.memory
        self.curves = [_fitting(task, cores, share) for task in tasks]
        self.fronts = [_front(curve) for curve in self.curves]
        self.huge = any(task.memory > self.memory for task in tasks)
        fitting = [replace(t, seconds=curve) for t, curve in zip(tasks, self.curves)]
        self.bound = lower_bound(fitting, cores, busy)
        self.effort = 0
        self.tried: dict[tuple[tuple[_Piece, ...], Order, int], _Outcome] = {}

    def schedule(self, before: Schedule | None = None, since: float = 0.0) -> Schedule:
        """Go on as decided before, or try everything, improve the best, and take it."""
        if not self.tasks:
            return self.told(None, self.busy_until)
        going = self.going_on(before) if before else None
        if before and going and self.as_promised(before, since, going):
            return self.told(going, before.promised - since, before.seconds)
        known = self.known(going)
        best = self.improved(self.best(known))
        taken = self.best([*known, best])
        return self.told(taken, taken.makespan)

    def told(
        self,
        taken: _Outcome | None,
        promised: float,
        seconds: Mapping[str, Mapping[int, float]] | None = None,
    ) -> Schedule:
        """The decision in the words of the caller."""
        if taken is None:
            return Schedule(self.busy_until, (), {}, "nothing waits", self)
        return Schedule(
            taken.makespan,
            tuple((self.tasks[task].kind, width) for task, width in taken.starts),
            self.widths(taken.plan),
            taken.plan.name,
            self,
            taken.plan.description,
            taken.plan.first,
            taken.plan.at_once,
            promised,
            seconds or {task.kind: curve for task, curve in zip(self.tasks, self.curves)},
        )

    def known(self, going: _Outcome | None) -> list[_Outcome]:
        """What the alternatives come to that may be the best, in the order of `plans`."""
        plans = list(enumerate(self.plans(self.bound)))
        floors = [self.floor(plan) for _, plan in plans]
        known = {-1: going} if going else {}
        most = self.enough(going) if going else math.inf
        for i, plan in sorted(plans, key=lambda one: floors[one[0]]):
            if floors[i] > most or (known and self.effort > EFFORT):
                break
            one = self.outcome(plan, most)
            if one:
                known[i] = one
                most = min(most, self.enough(one))
        return [known[i] for i in sorted(known)]

    def enough(self, one: _Outcome) -> float:
        """A measure beyond which nothing is better than this, whatever else it is."""
        if not self.plain:
            return math.inf
        waits = not one.starts and self.could_start()
        return self.measure(one, one.makespan) / (1 - WAITING_PAYS if waits else 1)

    def going_on(self, before: Schedule) -> _Outcome | None:
        """What was decided before for all that waits now; None if that is something else."""
        places = {task.kind: i for i, task in enumerate(self.tasks)}
        pieces = []
        for kind, row in before.rest.items():
            for width, count in row.items():
                if kind not in places or width not in self.curves[places[kind]]:
                    return None
                pieces.append(_Piece(places[kind], width, count))
        counts = [0] * len(self.tasks)
        for piece in pieces:
            counts[piece.task] += piece.count
        if counts != [task.count for task in self.tasks]:
            return None
        pieces.sort(key=lambda piece: (piece.task, piece.width))
        plan = _Plan(before.name, before.description, tuple(pieces), before.first, before.at_once)
        return self.outcome(plan)

    def as_promised(self, before: Schedule, since: float, going: _Outcome) -> bool:
        """Whether nothing has changed that would be a reason to decide anew."""
        if not going.starts and self.could_start():
            return False
        if abs(going.makespan - (before.promised - since)) > CHANGED * going.makespan:
            return False
        for task, curve in zip(self.tasks, self.curves):
            old = before.seconds.get(task.kind, {})
            if any(abs(old.get(w, 0.0) - each) > CHANGED * each for w, each in curve.items()):
                return False
        return True

    def widths(self, plan: _Plan) -> dict[str, dict[int, int]]:
        """How many of each kind on each width."""
        found: dict[str, dict[int, int]] = {}
        for piece in plan.pieces:
            row = found.setdefault(self.tasks[piece.task].kind, {})
            row[piece.width] = row.get(piece.width, 0) + piece.count
        return found

    def alternatives(self) -> Iterator[Alternative]:
        """The best of each name, in the order in which they are looked at."""
        best: dict[str, _Outcome] = {}
        for plan in self.plans(self.bound):
            if self.effort > EFFORT and (plan.pieces, plan.first, plan.at_once) not in self.tried:
                continue
            one = self.outcome(plan)
            if one and (plan.name not in best or one.makespan < best[plan.name].makespan):
                best[plan.name] = one
        for name, one in best.items():
            yield Alternative(name, one.makespan, one.plan.description)

    # What can be done

    def plans(self, bound: float) -> Iterator[_Plan]:
        """Every alternative, each in the order that its name means."""
        each = range(len(self.tasks))
        widest = [max(curve) for curve in self.curves]
        yield self.plan(SEQUENTIAL, "each on its widest", widest, at_once=1)
        fastest = [front[-1][1] for front in self.fronts]
        if fastest != widest:
            yield self.plan(SEQUENTIAL, "each on its fastest", fastest, at_once=1)
        narrowest = [min(curve) for curve in self.curves]
        yield from self.orders(NARROWEST, "each on its fewest ranks, side by side", narrowest)
        yield from self.orders(
            WIDEST, "each on its most ranks, side by side where they fit", widest
        )
        knees = [min(curve, key=lambda r: (r * curve[r] ** 2, r)) for curve in self.curves]
        yield from self.orders(KNEE, "each where speed times efficiency is greatest", knees)
        for factor in (1.0, 1.05, 1.15, 1.3, 1.6, 0.9, 0.75, 0.6, 0.5, 0.4, 1 / 3, 0.25):
            guess = bound * factor
            # No seconds: this is for a dry run, where nothing is measured yet.
            text = "each the least work that ends soon enough for a bound on the makespan"
            yield from self.orders(DUAL, text, [self.meeting(i, guess) for i in each])
        if any(task.deadline is not None for task in self.tasks):
            for widths in (narrowest, knees):
                urgent = [
                    widths[i] if t.deadline is None else self.meeting(i, t.deadline)
                    for i, t in enumerate(self.tasks)
                ]
                yield from self.orders(DUAL, "each within its own deadline", urgent)
        for most in sorted({width for curve in self.curves for width in curve}):
            allowed = [self.fastest_within(i, most) for i in each]
            name = AT_ONCE.format(most, "rank" if most == 1 else "ranks")
            text = f"{max(1, self.cores // most)} at once"
            yield from self.orders(name, text, allowed)
            yield from self.last_wave(name, text, allowed)

    def plan(
        self,
        name: str,
        text: str,
        widths: Sequence[int],
        first: Order = "longest",
        at_once: int = 0,
    ) -> _Plan:
        """All simulations of a task on one width."""
        pieces = (_Piece(i, width, self.tasks[i].count) for i, width in enumerate(widths))
        return _Plan(name, text, tuple(pieces), first, at_once)

    def orders(self, name: str, text: str, widths: Sequence[int]) -> Iterator[_Plan]:
        """The orders that make a difference."""
        yield self.plan(name, text, widths)
        if len(set(widths)) > 1:
            yield self.plan(name, text, widths, "area")
            yield self.plan(name, text, widths, "widest")

    def last_wave(self, name: str, text: str, widths: Sequence[int]) -> Iterator[_Plan]:
        """Equal simulations of which the last do not fill the cores: these on more ranks."""
        if len(self.tasks) > 1:
            return
        count, width = self.tasks[0].count, widths[0]
        at_once = min(self.at_once, max(1, self.cores // width))
        for rest in {count % at_once, count % at_once + at_once}:
            if 0 < rest < count:
                wide = self.fastest_within(0, max(1, self.cores // min(rest, at_once)))
                if wide > width:
                    pieces = (_Piece(0, width, count - rest), _Piece(0, wide, rest))
                    yield _Plan(name, f"{text}, the last {rest} on {wide} ranks", pieces)

    def fastest_within(self, i: int, most: int) -> int:
        """The fastest width of a task of at most so many ranks, else its narrowest."""
        found = [width for _, width, _ in self.fronts[i] if width <= most]
        return found[-1] if found else min(self.curves[i])

    def meeting(self, i: int, seconds: float) -> int:
        """The width of a task that costs least of those that end in time, else its fastest."""
        curve = self.curves[i]
        meet = [width for width, each in curve.items() if each <= seconds * (1 + 1e-9)]
        if not meet:
            return self.fronts[i][-1][1]
        return min(meet, key=lambda width: (self.taken(width) * curve[width], width))

    def taken(self, width: int) -> int:
        """Cores of a simulation; one with more ranks than there are cores has all of them."""
        return min(width, self.cores)

    # What it comes to

    def outcome(self, plan: _Plan, most: float = math.inf) -> _Outcome | None:
        """When what ends, with the queue started as a list: whatever fits, in the plan's order.

        None: its measure is more than `most`, which was seen before all was calculated.
        """
        key = (plan.pieces, plan.first, plan.at_once)
        if key not in self.tried:
            found = self.simulated(plan, most)
            if found is None:
                return None
            self.tried[key] = found
        return replace(self.tried[key], plan=plan)

    def floor(self, plan: _Plan) -> float:
        """No more than the measure of this plan: most plans are far too long, and need no more.

        Neither area nor memory is used twice, and of simulations that take more than a k-th part
        of the cores fewer than k run at once.
        """
        if not self.plain:
            return 0.0
        area, used, longest, mean, count = self.busy_area, self.busy_used, 0.0, 0.0, 0
        wide: dict[int, float] = {}
        for piece in plan.pieces:
            seconds = self.curves[piece.task][piece.width]
            cores = self.taken(piece.width)
            row = piece.count * seconds
            area += cores * row
            used += self.tasks[piece.task].memory * row
            mean += row
            count += piece.count
            wide[cores] = wide.get(cores, 0.0) + row
            waves = -(-piece.count // (self.cores // cores))
            longest = max(longest, self.available(cores) + seconds, waves * seconds)
        most = min(self.at_once, plan.at_once or self.at_once)
        ends = max(longest, area / self.cores, mean / most, self.busy_until)
        if self.memory and not self.huge:
            ends = max(ends, used / self.memory)
        rows = 0.0
        for cores in sorted(wide, reverse=True):
            rows += wide[cores]
            ends = max(ends, rows / (self.cores // cores))
        return ends + ENDING_EARLY * mean / count

    def available(self, cores: int) -> float:
        """When so many cores are free at once, at the earliest."""
        if cores not in self.free_at:
            free, when = self.free, 0.0
            for end, used, *_ in self.busy:
                if free >= cores:
                    break
                free, when = free + used, end
            self.free_at[cores] = when
        return self.free_at[cores]

    def queues(self, plan: _Plan) -> list[_Queue]:
        """The pieces by what they need, so that few heads are looked at for each start."""

        def priority(piece: _Piece) -> tuple[float, ...]:
            task = self.tasks[piece.task]
            seconds = self.curves[piece.task][piece.width]
            soon = math.inf if task.deadline is None else task.deadline
            if task.objective == "turnaround":
                return (soon, 0, seconds, task.order)
            cores = self.taken(piece.width)
            if plan.first == "widest":
                return (soon, 1, -cores, -seconds, task.order)
            length = seconds * cores if plan.first == "area" else seconds
            return (soon, 1, -length, -piece.width, task.order)

        made: dict[tuple[int, int], _Queue] = {}
        for place, piece in enumerate(sorted(plan.pieces, key=priority)):
            cores, memory = self.taken(piece.width), self.tasks[piece.task].memory
            queue = made.setdefault((cores, memory.bit_length()), _Queue(cores))
            seconds = self.curves[piece.task][piece.width]
            queue.waiting.append(
                _Waiting(place, piece.task, piece.width, seconds, memory, piece.count)
            )
        for queue in made.values():
            queue.waiting.reverse()
        return list(made.values())

    def simulated(self, plan: _Plan, most: float) -> _Outcome | None:
        """Start and end everything of a plan, unless it becomes clear that it is not worth it."""
        queues = self.queues(plan)
        events = list(self.busy)
        free, memory = self.free, self.memory - self.busy_memory
        slots = min(self.at_once, plan.at_once or self.at_once) - len(events)
        tally = _Tally(self.tasks, self.plain)
        area = sum(
            piece.count * self.taken(piece.width) * self.curves[piece.task][piece.width]
            for piece in plan.pieces
        )
        left = area
        now, steps, first = 0.0, len(plan.pieces), True
        starts: list[tuple[int, int]] = []
        ends: list[tuple[float, float, int]] = []
        widest = plan.first == "widest"
        repeated, before = 0, (0, 0, 0, -1)
        while queues:
            entries, entry = 0, None
            while free > 0 and slots > 0:
                queue = None
                steps += len(queues)
                limit = math.inf
                if widest and events:
                    limit = self.kept(queues, free, memory, events) - now
                place = math.inf
                for one in queues:
                    if one.cores <= free:
                        head = one.waiting[-1]
                        if head.place < place and head.memory <= memory and head.seconds <= limit:
                            queue, place = one, head.place
                if queue is None:
                    if events:
                        break
                    # larger than all memory: alone
                    queue = min(queues, key=lambda one: one.waiting[-1].place)
                entry = queue.waiting[-1]
                entries += 1
                count = min(entry.left, slots, free // queue.cores)
                if entry.memory:
                    count = max(1, min(count, memory // entry.memory))
                end = now + entry.seconds
                used = count * queue.cores
                heapq.heappush(events, (end, used, count * entry.memory, count, entry.place))
                free -= used
                memory -= count * entry.memory
                slots -= count
                left -= used * entry.seconds
                tally.add(entry.task, end, count)
                ends.append((end, entry.seconds, count))
                if first:
                    starts += [(entry.task, entry.width)] * count
                entry.left -= count
                if not entry.left:
                    queue.waiting.pop()
                    if not queue.waiting:
                        queues.remove(queue)
                if not queues:
                    break
            if tally.last > most or now + left / self.cores > most:
                self.effort += steps
                return None
            if not events:
                break
            first = False
            state = (free, memory, slots, entry.place if entry and entries == 1 else -1)
            repeated = repeated + 1 if state == before and entries == 1 else 0
            before = state
            if entry and entry.left and repeated >= len(events) and self.plain:
                repeated = 0
                events, passed = _ahead(events, entry, now if widest else math.inf, tally)
                left -= passed * self.taken(entry.width) * entry.seconds
            now = events[0][0]
            while events and events[0][0] <= now:
                _, cores, used, count, _ = heapq.heappop(events)
                steps += 1
                free += cores
                memory += used
                slots += count
        self.effort += steps
        return _Outcome(
            plan,
            max(tally.last, self.busy_until),
            max(self.expected(ends, tally.last), self.busy_until),
            tally.missed,
            tally.lateness,
            tally.own / max(1, tally.own_count),
            tally.ends / tally.count,
            area,
            tuple(starts),
        )

    def expected(self, ends: Sequence[tuple[float, float, int]], last: float) -> float:
        """When the last has ended as likely as not: the later, the more end at about that time."""
        late: dict[tuple[float, float], int] = {}
        for end, seconds, count in ends:
            each = self.scatter * seconds
            if each and end + 3 * each > last:
                late[end, each] = late.get((end, each), 0) + count
        if sum(late.values()) < 2:
            return last
        low, high = last, max(end + 4 * each for end, each in late)
        while high - low > 0.002 * high:
            middle = (low + high) / 2
            ended = 1.0
            for (end, each), count in late.items():
                ended *= (1 - 0.5 * math.erfc((middle - end) / (each * math.sqrt(2)))) ** count
            low, high = (low, middle) if ended > 0.5 else (middle, high)
        return high

    def kept(
        self,
        queues: Sequence[_Queue],
        free: int,
        memory: int,
        events: Sequence[_Event],
    ) -> float:
        """When the first in the order can start; what overtakes it must have ended by then."""
        queue = min(queues, key=lambda one: one.waiting[-1].place)
        each = queue.waiting[-1].memory
        if (queue.cores <= free and each <= memory) or self.effort > EFFORT:
            return math.inf
        self.effort += len(events)
        for end, cores, used, _, _ in sorted(events):
            free += cores
            memory += used
            if queue.cores <= free and each <= memory:
                return end
        return math.inf

    # Which is best

    def best(self, known: Sequence[_Outcome]) -> _Outcome:
        """Deadlines first, then the objectives, then the least core-seconds; waiting must pay."""
        earliest = min(one.makespan for one in known)
        starting = [one for one in known if one.starts] or known
        taken = min(known, key=lambda one: self.cost(one, earliest))
        if taken.starts or not self.could_start():
            return taken
        other = min(starting, key=lambda one: self.cost(one, earliest))
        if other.missed > taken.missed:
            return taken
        pays = self.measure(taken, earliest) < self.measure(other, earliest) * (1 - WAITING_PAYS)
        return taken if pays else other

    def cost(self, one: _Outcome, earliest: float) -> tuple[float, ...]:
        """What is to be small."""
        return (one.missed, one.lateness, self.measure(one, earliest), one.makespan, one.area)

    def measure(self, one: _Outcome, earliest: float) -> float:
        """The end of the queue; or of its simulations for turnaround, if all do not wait long."""
        if all(task.objective == "throughput" for task in self.tasks):
            return one.expected + ENDING_EARLY * one.mean
        late = one.makespan > earliest * (1 + LATER_FOR_TURNAROUND)
        alone = all(task.objective == "turnaround" for task in self.tasks)
        return one.makespan + earliest if late and not alone else one.own

    def could_start(self) -> bool:
        """Whether anything fits at this moment, on whatever width."""
        memory = self.memory - self.busy_memory
        return len(self.busy) < self.at_once and any(
            self.taken(min(curve)) <= self.free and task.memory <= memory
            for task, curve in zip(self.tasks, self.curves)
        )

    def improved(self, best: _Outcome) -> _Outcome:
        """Move simulations to other widths for as long as this helps and the effort allows."""
        allowed = self.effort + IMPROVING
        moved = True
        while moved:
            moved = False
            most = self.measure(best, best.makespan) if self.plain else math.inf
            for plan in self.moves(best.plan):
                if self.effort > allowed:
                    return best
                self.effort += len(plan.pieces)
                one = None if self.floor(plan) > most else self.outcome(plan, most)
                if one is None:
                    continue
                earliest = min(best.makespan, one.makespan)
                if self.cost(one, earliest) < self.cost(best, earliest):
                    best, moved = one, True
                    break
        return best

    def moves(self, plan: _Plan) -> Iterator[_Plan]:
        """The plan with one, half or all simulations of a piece on another width."""
        longest = sorted(plan.pieces, key=lambda p: -self.curves[p.task][p.width])
        for piece in longest:
            for _, width, _ in reversed(self.fronts[piece.task]):
                if width == piece.width:
                    continue
                for count in sorted({1, piece.count // 2, piece.count} - {0}):
                    yield _Plan(MIXED, f"from: {plan.description}".replace("from: from:", "from:"),
                                _moved(plan.pieces, piece, width, count),
                                plan.first, plan.at_once)  # fmt: skip


class _Tally:
    """What a schedule's ends add up to."""

    def __init__(self, tasks: Sequence[Task], plain: bool) -> None:
        self.tasks, self.plain = tasks, plain
        self.last = self.lateness = self.own = self.ends = 0.0
        self.missed = self.own_count = self.count = 0

    def add(self, task: int, end: float, count: int) -> None:
        """So many simulations of a task end."""
        if end > self.last:
            self.last = end
        self.ends += count * end
        self.count += count
        if self.plain:
            return
        deadline = self.tasks[task].deadline
        if deadline is not None and end > deadline:
            self.missed += count
            self.lateness += count * (end - deadline)
        if self.tasks[task].objective == "turnaround":
            self.own += count * end
            self.own_count += count


def _ahead(
    events: list[_Event], entry: _Waiting, until: float, tally: _Tally
) -> tuple[list[_Event], int]:
    """Skip what repeats itself: each end is followed by a simulation of the same piece.

    It does so for as long as there are more of them, and until something else ends (or `until`,
    if something else runs). The ends after that, and how many simulations were skipped.
    """
    own = [one for one in events if one[4] == entry.place]
    other = [one for one in events if one[4] != entry.place]
    running = sum(one[3] for one in own)
    times = (entry.left - 1) // running
    if other:
        begin = min(one[0] for one in own) - entry.seconds
        times = min(times, int((min(until, min(other)[0]) - begin) / entry.seconds) - 2)
    if times < 1:
        return events, 0
    later = times * entry.seconds
    for end, _, _, count, _ in own:
        tally.ends += count * (times * end + later * (times + 1) / 2)
        tally.last = max(tally.last, end + later)
    tally.count += times * running
    entry.left -= times * running
    events = [(end + later, c, m, n, place) for end, c, m, n, place in own] + other
    heapq.heapify(events)
    return events, times * running


def lower_bound(tasks: Sequence[Task], cores: int, busy: Sequence[Busy] = ()) -> float:
    """Seconds before which no schedule can end.

    The least guess that area and critical path allow: all work, each at the width that costs least
    of those that end within the guess, has room on all cores; and none is longer on its fastest.
    """
    steps = []
    for task in tasks:
        least, row = math.inf, []
        for seconds, width in sorted((s, w) for w, s in task.seconds.items()):
            least = min(least, min(width, cores) * seconds)
            row.append((seconds, least * task.count))
        steps.append(([s for s, _ in row], [work for _, work in row]))
    low = max([times[0] for times, _ in steps] + [one.seconds for one in busy], default=0.0)

    def fits(guess: float) -> bool:
        area = sum(one.cores * max(0.0, one.seconds) for one in busy)
        for times, works in steps:
            area += works[bisect_right(times, guess) - 1]
        return area <= cores * guess * (1 + 1e-12)

    if fits(low):
        return low
    high = 2 * low
    while not fits(high):
        high *= 2
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low


def _fitting(task: Task, cores: int, memory_of_a_node: float) -> dict[int, float]:
    """The widths that fit, and their seconds; if none does, the narrowest, which then has all."""
    fit = {
        width: seconds
        for width, seconds in sorted(task.seconds.items())
        if width <= cores and task.memory / width <= memory_of_a_node
    }
    if fit:
        return fit
    if not task.seconds:
        raise ValueError(f"{task.kind}: no width has a time")
    least = min(task.seconds)
    return {least: task.seconds[least]}


def _front(curve: Mapping[int, float]) -> list[tuple[float, int, float]]:
    """Seconds, width and core-seconds of the widths that are faster than all narrower ones."""
    found: list[tuple[float, int, float]] = []
    for width, seconds in sorted(curve.items()):
        if not found or seconds < found[-1][0]:
            found.append((seconds, width, seconds * width))
    return found


def _moved(pieces: Sequence[_Piece], piece: _Piece, width: int, count: int) -> tuple[_Piece, ...]:
    """The same with some simulations of one piece on another width."""
    counts = {(p.task, p.width): p.count for p in pieces}
    counts[piece.task, piece.width] -= count
    counts[piece.task, width] = counts.get((piece.task, width), 0) + count
    return tuple(_Piece(t, w, n) for (t, w), n in sorted(counts.items()) if n)
