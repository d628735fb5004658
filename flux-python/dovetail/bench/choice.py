# SPDX-License-Identifier: LGPL-3.0-or-later
"""Random queues under the choice of widths, against every way in which a user could run them.

Inputs: how many queues, and where results are kept so that an interrupted run is gone on with.
Outputs: claims on the end of each queue, in proportion to that of the best alternative and to the
lower bound; on the time of a decision; and on the papers' queue.

A queue has 1 to 1,000 simulations of up to eight kinds, a node of 2 to 128 cores, and sometimes too
little memory for all cores; small and large queues are as frequent. Its curves are those of
`SHAPES`. It is executed event by event: whenever a simulation ends, the choice is asked again (but
see `ASKED`), and told what it decided before. What it is told is not the truth:

- `EXACT`: it is; what is lost here is lost by the algorithm;
- `EACH`: each simulation takes 10 % (standard deviation) more or less than its kind does;
- `CURVE`: moreover, the time of each kind on each width is told wrong by 10 %, independently.

With noise the choice is told how large it is, from the beginning; in a run the controller measures
that on the first simulations. It is asked at ends alone, where the controller also asks when rates
are learned. A curve with errors is smoothed as in `speedup`, and what was predicted for a width
counts as `PREDICTED` of the simulations that ended there; a run trusts what it measured alone.

An alternative follows one rule from beginning to end, and starts the longest first: one after the
other, all narrowest, all widest, knee, and k at once for each k. The best of these is known only
afterwards, so that no choice can always be nearly as good where curves are told wrong: one
simulation runs on one width, and another may turn out to be faster. What a user could have taken
who knows what is told, the rule that is best by that, stands beside the choice.

Invariants: no processes but helpers that calculate; the same number of a queue is always the same
queue; no clock but the one that times decisions.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import multiprocessing
import os
import platform
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dovetail.bench.harness import Claim, Progress, Row
from dovetail.bench.papers.kept import whole_lines
from dovetail.bench.papers.published import MAKESPAN, THROUGHPUT
from dovetail.controller import choice, speedup
from dovetail.controller.choice import Busy, Task
from dovetail.controller.speedup import FIT_ERROR, Prior, predict, smoothed
from dovetail.core.errors import BadInput

QUEUES = 10_000
NOISE = 0.10
NOISES = ("exact times", "noise of simulations", "noise of simulations and curves")
EXACT, EACH, CURVE = NOISES
PREDICTED = (NOISE / FIT_ERROR) ** 2
"""As many simulations as a prediction is worth: their mean would be as wrong."""
ASKED = 64
"""Where more than this many wait, the choice is asked once for so manieth a part of them, and in
between what ends is followed by its like if the plan has more of these: long queues would take
hours otherwise."""

SHAPES = {
    "OpenFOAM, 48,900 cells, even": (Prior(serial=0.16, communication=0.003), math.inf),
    "OpenFOAM and LAMMPS, uneven": (Prior(serial=0.63, communication=0.003), math.inf),
    "streams memory": (Prior(serial=0.01, communication=0.001), 64.0),
    "large": (Prior(serial=0.02, communication=0.001), math.inf),
}
"""The first two measured on two cores (two ranks take 0.583 and 0.82 of one), the third published
(no more than 1.06 times faster from 64 to 120 cores), the last one supposed; with the ranks at
which speed saturates."""


@dataclass(frozen=True)
class Kind:
    """Equal simulations of a queue, but for the factor by which each differs."""

    seconds: Mapping[int, float]
    factors: tuple[float, ...]
    told: Mapping[int, float]
    """Seconds by width as they are predicted."""
    memory: int


@dataclass(frozen=True)
class Queue:
    """What is to be done, and where."""

    cores: int
    memory: int
    kinds: tuple[Kind, ...]
    noise: str = EXACT

    @property
    def count(self) -> int:
        """Simulations."""
        return sum(len(kind.factors) for kind in self.kinds)


@dataclass(frozen=True)
class Result:
    """What became of one queue."""

    number: int
    makespan: float
    alternatives: Mapping[str, float]
    bound: float
    """Area and critical path at once: no guess that is smaller has room for all work, each at the
    width that costs least and ends by then."""
    plain_bound: float
    """The larger of the least area and the longest critical path, each by itself."""
    slowest: float
    """CPU seconds of the slowest decision."""
    noise: str = EXACT
    picked: str = ""
    """The alternative that was best by the times that were told."""

    @property
    def best(self) -> float:
        """The end by the best alternative."""
        return min(self.alternatives.values())

    @property
    def foreseen(self) -> float:
        """The end by the alternative that a user would have taken, who knows what is told."""
        return self.alternatives[self.picked] if self.picked else self.best


def draw(number: int, noise: str = EXACT) -> Queue:
    """The queue of that number; of the same work with every noise."""
    dice, wrong = random.Random(number), random.Random(-1 - number)
    cores = round(2 * 64 ** dice.random())
    count = round(1000 ** dice.random())
    parts = min(count, dice.randint(1, 8))
    cuts = [0, *sorted(dice.sample(range(1, count), parts - 1)), count]
    scarce = dice.random() < 0.25
    kinds = []
    for low, high in zip(cuts, cuts[1:]):
        told = seconds = _curve(dice, cores)
        factors = tuple(max(0.5, wrong.gauss(1.0, NOISE)) for _ in range(high - low))
        if noise == EXACT:
            factors = (1.0,) * (high - low)
        if noise == CURVE:
            told = {r: s * max(0.5, wrong.gauss(1.0, NOISE)) for r, s in seconds.items()}
        memory = dice.randint(1, 100) if scarce else 0
        kinds.append(Kind(seconds, factors, told, memory))
    memory = 100 * dice.randint(1, cores) if scarce else 0
    return Queue(cores, memory, tuple(kinds), noise)


def _curve(dice: random.Random, cores: int) -> dict[int, float]:
    prior, most = dice.choice(list(SHAPES.values()))
    times = 2 ** dice.uniform(-1, 0.5)
    alone = 10 * 100 ** dice.random()
    widths = [2**n for n in range(8)] + [3 * 2**n for n in range(6) if dice.random() < 0.5]
    widths = sorted({width for width in [*widths, cores] if width <= cores})
    first = dice.randint(0, len(widths) - 1) if dice.random() < 0.3 else 0
    last = dice.randint(first, len(widths) - 1) if dice.random() < 0.3 else len(widths) - 1
    return {
        r: alone * prior.share((r**-4 + most**-4) ** -0.25, times) for r in widths[first : last + 1]
    }


class Execution:
    """One queue on its cores, event by event."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.now = 0.0
        self.free, self.memory = queue.cores, queue.memory or math.inf
        self.left = [list(reversed(kind.factors)) for kind in queue.kinds]
        self.running: list[tuple[float, int, int, int, float]] = []
        """End, number, kind, width and begin."""
        self.started = 0
        self.ended: dict[tuple[int, int], list[float]] = {}
        self.scatter = 0.0 if queue.noise == EXACT else NOISE
        self.curves: list[Mapping[int, float]] = [kind.told for kind in queue.kinds]

    def fits(self, kind: int, width: int) -> bool:
        """Whether one more may start now."""
        return (
            bool(self.left[kind])
            and width <= self.free
            and self.queue.kinds[kind].memory <= self.memory
        )

    def start(self, kind: int, width: int) -> None:
        """The next one of a kind."""
        one = self.queue.kinds[kind]
        assert self.fits(kind, width), "the choice goes beyond cores or memory"
        end = self.now + one.seconds[width] * self.left[kind].pop()
        self.started += 1
        heapq.heappush(self.running, (end, self.started, kind, width, self.now))
        self.free -= width
        self.memory -= one.memory

    def end(self) -> tuple[int, int]:
        """Go on to the next end; the kind and width that it was."""
        self.now, _, kind, width, begin = heapq.heappop(self.running)
        self.free += width
        self.memory += self.queue.kinds[kind].memory
        self.ended.setdefault((kind, width), []).append(self.now - begin)
        return kind, width

    def told(self, kind: int) -> dict[int, float]:
        """Seconds by width, as well as they are known."""
        found = {}
        for width, seconds in self.curves[kind].items():
            ended = self.ended.get((kind, width), [])
            found[width] = (PREDICTED * seconds + sum(ended)) / (PREDICTED + len(ended))
        return found

    def chosen(self) -> float:
        """Ask the choice at every end; CPU seconds of the slowest decision."""
        if self.queue.noise == CURVE:
            self.curves = [smoothed(kind.told, NOISE) for kind in self.queue.kinds]
        slowest, then = 0.0, 0.0
        found: choice.Schedule | None = None
        while any(self.left):
            begin = time.process_time()
            found, then = self.ask(found, self.now - then), self.now
            slowest = max(slowest, time.process_time() - begin)
            assert found.starts_now or self.running, "the cores are idle for ever"
            for name, width in found.starts_now:
                self.start(int(name), width)
            rest = found.rest
            kind, width = self.end()
            for _ in range(sum(map(len, self.left)) // ASKED):
                more = rest.get(str(kind), {}).get(width, 0)
                if not self.fits(kind, width) or not more:
                    break
                self.start(kind, width)
                rest[str(kind)][width] -= 1
                kind, width = self.end()
            while self.running and self.running[0][0] <= self.now:
                self.end()
            found = replace(found, widths_planned=rest, starts_now=())
        return slowest

    def ask(self, before: choice.Schedule | None, since: float) -> choice.Schedule:
        """The decision at this moment."""
        curves = [self.told(kind) for kind in range(len(self.left))]
        tasks = [
            Task(str(i), len(left), curves[i], self.queue.kinds[i].memory, order=i)
            for i, left in enumerate(self.left)
        ]
        busy = []
        for _, _, kind, width, begin in self.running:
            expected = curves[kind][width]
            rest = max(begin + expected - self.now, 0.05 * expected)  # late: it ends any moment
            busy.append(Busy(width, rest, self.queue.kinds[kind].memory))
        return choice.choose(
            tasks,
            self.queue.cores,
            busy,
            self.queue.memory,
            before=before,
            since=since,
            scatter=self.scatter,
        )

    def by_rule(self, widths: Sequence[int], at_once: int) -> None:
        """The longest first, whatever fits, on one width for each kind."""
        told = [kind.told[width] for kind, width in zip(self.queue.kinds, widths)]
        order = sorted(range(len(widths)), key=lambda i: -told[i])
        while any(self.left):
            for kind in order:
                while len(self.running) < at_once and self.fits(kind, widths[kind]):
                    self.start(kind, widths[kind])
            self.end()

    def makespan(self) -> float:
        """When all is done."""
        return max([self.now, *(end for end, *_ in self.running)])


def rules(queue: Queue) -> dict[str, tuple[list[int], int]]:
    """Width of each kind and most at once, of every alternative."""
    curves = [kind.told for kind in queue.kinds]
    found = {
        "one after the other": ([max(curve) for curve in curves], 1),
        "all narrowest": ([min(curve) for curve in curves], queue.cores),
        "all widest": ([max(curve) for curve in curves], queue.cores),
        "knee": ([_knee(curve) for curve in curves], queue.cores),
    }
    for k in range(1, min(queue.count, queue.cores) + 1):
        widths = [max([r for r in c if r * k <= queue.cores] or [min(c)]) for c in curves]
        if (widths, queue.cores) not in found.values():
            found[f"{k} at once"] = (widths, k)
    return found


def _knee(curve: Mapping[int, float]) -> int:
    """Where speed times efficiency is greatest."""
    return min(curve, key=lambda ranks: ranks * curve[ranks] ** 2)


def bounds(queue: Queue) -> tuple[float, float]:
    """What no schedule can be faster than: with both conditions at once, and each by itself."""
    tasks = [
        Task(f"{i},{j}", 1, {r: s * factor for r, s in kind.seconds.items()})
        for i, kind in enumerate(queue.kinds)
        for j, factor in enumerate(kind.factors)
    ]
    area = sum(min(r * s for r, s in task.seconds.items()) for task in tasks) / queue.cores
    path = max(min(task.seconds.values()) for task in tasks)
    return choice.lower_bound(tasks, queue.cores), max(area, path)


def ends_by_rules(queue: Queue) -> dict[str, float]:
    """When all is done by each alternative."""
    ends = {}
    for name, (widths, at_once) in rules(queue).items():
        execution = Execution(queue)
        execution.by_rule(widths, at_once)
        ends[name] = execution.makespan()
    return ends


def as_told(queue: Queue) -> Queue:
    """The queue if all that is told of it were true."""
    kinds = (replace(k, seconds=k.told, factors=(1.0,) * len(k.factors)) for k in queue.kinds)
    return replace(queue, kinds=tuple(kinds))


def execute(number: int, noise: str) -> Result:
    """One queue in every way."""
    queue = draw(number, noise)
    ends = ends_by_rules(queue)
    told = ends if noise == EXACT else ends_by_rules(as_told(queue))
    execution = Execution(queue)
    slowest = execution.chosen()
    bound, plain = bounds(queue)
    picked = min(told, key=lambda name: told[name])
    return Result(number, execution.makespan(), ends, bound, plain, slowest, noise, picked)


def with_every_noise(number: int) -> list[Result]:
    """The same work, as it is known more and less well."""
    return [execute(number, noise) for noise in NOISES]


def helper() -> None:
    """Leave interrupts to who started this process, and end when it says so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Kept:
    """Results in a file, one a line, so that what was interrupted is gone on with.

    A line holds for the program that wrote it, and the machine, since decisions were timed: what
    another one calculated is not counted.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        sources = (Path(str(one.__file__)).read_bytes() for one in (choice, speedup))
        code = hashlib.sha256(Path(__file__).read_bytes() + b"".join(sources))
        code.update(platform.node().encode())
        self.program = code.hexdigest()[:16]

    def results(self) -> list[Result]:
        """Of this program, of queues that are done with every noise."""
        lines = whole_lines(self.path) if self.path else []
        mine = [Result(**line["result"]) for line in lines if line["program"] == self.program]
        found = {(one.number, one.noise): one for one in mine}
        return [one for one in found.values() if all((one.number, n) in found for n in NOISES)]

    def add(self, results: Sequence[Result]) -> None:
        """Keep them, each with the two alternatives that count."""
        if self.path is None:
            return
        text = ""
        for one in results:
            counting = {k: v for k, v in one.alternatives.items() if v == one.best}
            few = {**counting, one.picked: one.foreseen}
            row = {"program": self.program, "result": asdict(replace(one, alternatives=few))}
            text += json.dumps(row) + "\n"
        with self.path.open("a") as file:
            file.write(text)


def choice_of_widths(
    scratch: Path,
    repeat: int,
    progress: Progress,
    queues: int | None = None,
    output: Path | None = None,
) -> list[Claim]:
    """Claims on so many queues with every noise, on one large decision, and on the papers' case."""
    queues = queues or QUEUES
    try:
        if output:
            output.mkdir(parents=True, exist_ok=True)
        kept = Kept(output / "choice.jsonl" if output else None)
        results = [one for one in kept.results() if one.number < queues]
    except OSError as error:
        raise BadInput(f"-o {output}: {error.strerror}") from error
    left = sorted(set(range(queues)) - {one.number for one in results})
    if len(left) < queues:
        progress(f"{queues - len(left)} of {queues} queues are in {kept.path}")
    with multiprocessing.Pool(len(os.sched_getaffinity(0)), helper) as pool:
        for some in pool.imap_unordered(with_every_noise, left):
            kept.add(some)
            results += some
        pool.close()
        pool.join()
    results.sort(key=lambda one: one.number)
    claims = []
    for noise in NOISES:
        claims += judged(noise, [one for one in results if one.noise == noise], progress)
    large = tuple(decision() for _ in range(repeat))
    name = "a decision over 1,000 simulations and 10,000 cores"
    claims.append(Claim(Row(name, large), "s", "<=", 0.5))
    return claims + papers(progress)


def judged(noise: str, results: Sequence[Result], progress: Progress) -> list[Claim]:
    """What the queues with one noise come to; the misses are told, each by its number."""
    missed = [one for one in results if one.makespan > 1.05 * one.best]
    for one in sorted(missed, key=lambda one: one.best / one.makespan)[:10]:
        name = min(one.alternatives, key=lambda key: one.alternatives[key])
        queue = draw(one.number, noise)
        progress(
            f"{noise}: queue {one.number}, {queue.count} simulations of {len(queue.kinds)} kinds "
            f"on {queue.cores} cores: {one.makespan:.1f} s, {one.makespan / one.best:.3f} times "
            f"{name!r}"
        )

    def row(name: str, values: Callable[[Result], float]) -> Row:
        return Row(f"{noise}: {name}", tuple(map(values, results)))

    ratio = row("makespan / the best alternative's", lambda one: one.makespan / one.best)
    worst = Row(f"{noise}: the worst of these", (max(ratio.values),))
    ordered = sorted(ratio.values)
    nearly = Row(f"{noise}: 99.9 % are below", (ordered[math.ceil(0.999 * len(ordered)) - 1],))
    share = Row(f"{noise}: queues above 1.05 times", (100 * len(missed) / len(results),))
    foreseen = row("the rule predicted best / the best", lambda one: one.foreseen / one.best)
    worst_rule = Row(f"{noise}: the worst of these rules", (max(foreseen.values),))
    above = sum(value > 1.05 for value in foreseen.values)
    beside = Row(f"{noise}: such rules above 1.05 times", (100 * above / len(results),))
    bound = row("makespan / the lower bound", lambda one: one.makespan / one.bound)
    plain = row("the same, area and path apart", lambda one: one.makespan / one.plain_bound)
    slowest = Row(f"{noise}: slowest decision", (max(one.slowest for one in results),))
    return [
        Claim(ratio, "times"),
        Claim(worst, "times", "<=", 1.05),
        Claim(nearly, "times"),
        Claim(share, "%"),
        Claim(worst_rule, "times"),
        Claim(beside, "%"),
        Claim(bound, "times", "<=", 1.10),
        Claim(plain, "times"),
        Claim(slowest, "s", "<=", 0.5),
    ]


def decision() -> float:
    """CPU seconds of one decision: a thousand unlike simulations, and half of the cores busy."""
    dice = random.Random(0)
    tasks = []
    for i in range(1000):
        alone = dice.uniform(10, 100)
        tasks.append(Task(str(i), 1, {2**n: alone * (0.05 + 0.95 / 2**n) for n in range(10)}))
    busy = [Busy(1, dice.uniform(1, 50)) for _ in range(5000)]
    begin = time.process_time()
    found = choice.choose(tasks, 10_000, busy)
    assert found.alternatives
    return time.process_time() - begin


ALONE, FIVE = MAKESPAN[1], MAKESPAN[5]
"""Published (arXiv:2604.00377): seconds on 16 ranks of 96 vCPUs, of one and of five at once."""


def papers(progress: Progress) -> list[Claim]:
    """Five simulations of 16 ranks on 96 vCPUs, and what would be chosen with free widths.

    The only width that is known is 16, on a node that is full; the others follow the prior's curve.
    """
    curve = predict([*range(1, 33), 48, 64, 96], {16: FIVE}).seconds
    told = " ".join(f"{r}: {curve[r]:.0f} s" for r in (1, 8, 16, 19, 24, 32, 48, 96))
    found = choice.choose([Task("paper", 5, curve)], 96)
    gain = Row("5 simulations on 96 vCPUs, widths free, predicted", (5 * ALONE / found.makespan,))
    progress(
        f"published: {THROUGHPUT[2]:g} (two at once) to {THROUGHPUT[5]:g} (five) times one after "
        f"the other on 16 ranks. Chosen: {found.name}, "
        f"{dict(found.widths_planned['paper'])}, {found.makespan:.0f} s against {5 * ALONE:.0f} s; "
        f"predicted from {FIVE:.0f} s on 16 ranks, with five at once: {told}"
    )
    return [Claim(gain, "times", ">=", THROUGHPUT[5])]
