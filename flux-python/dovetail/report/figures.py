# SPDX-License-Identifier: LGPL-3.0-or-later
"""The figures of one family of simulations, each with where it comes from.

In: a run's `History`, and the alternatives measured for it. Out: a `FamilyFigures`.

Invariants: pure. Every figure is `measured`, `predicted`, or None with the reason why there
is none. Where something has to be assumed, the assumption is the one that flatters Dovetail
less. Nothing is compared unless the family's whole queue is done.
"""

from __future__ import annotations

import contextlib
import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dovetail.core import units
from dovetail.core.errors import BadInput
from dovetail.core.taken_cpu import taken
from dovetail.core.throughput_model import Model
from dovetail.report.alternatives import DOVETAIL, FEWER, NAIVE, SEQUENTIAL, Alternative
from dovetail.report.history import Array, Attempt, History, Load, Spell, Track
from dovetail.report.verdict import Figure, Totals, Verdict, judge, ratio

SPLIT = 0.8
"""Share of the ideal that fewer ranks side by side keep where cache or memory is short."""

KINDS = {
    "spinning": "alone, waiting ranks spinning",
    "yielding": "alone, waiting ranks yielding",
    "blocking": "alone, waiting ranks sleeping",
    "packed": "beside others",
}
"""How a load of each kind was measured, in words."""

ENOUGH = 3
"""Iterations alone from which others are judged, at least: the last one alone may write results."""

QUIET = 0.9
"""Share of a core below which spinning ranks were disturbed: alone they take all of it."""

ALIKE = 0.1
"""Share of the run's cores by which an alternative's may differ: a cluster keeps some back."""

MISSING = Figure(how="not measured; `dovetail bench demo` does, of its own queue")

UNSEEN = Figure(
    how="simulations went on while the run stood; it was killed or stopped, for a time that its "
    "clock leaves out"
)


@dataclass(frozen=True)
class Point:
    """Throughput (in simulations run alone) and mean slowdown, measured with N running.

    The pairs are (lowest, highest) over the spells of time that had this N; `seconds` is how
    long they lasted.
    """

    n: int
    throughput: float
    throughput_spread: tuple[float, float]
    slowdown: float
    slowdown_spread: tuple[float, float]
    seconds: float


@dataclass(frozen=True)
class FamilyFigures:
    """The simulations of one plan entry, together.

    `ranks` are the first one's, `widths` all numbers of ranks that some ran on; they are `open`
    where the plan leaves them to the run; `weights` and
    `budget` (the slowdown that each may suffer) are the plan's. `alone` is
    seconds per iteration of a simulation that has the machine to itself. `model` is fitted to
    `points` (its t1 is 1), None where nothing was packed. `recut` are the measured weights by
    which later launches were cut anew, empty if none was.
    """

    name: str
    simulations: int
    ranks: int
    widths: tuple[int, ...]
    open: bool
    weights: tuple[float, ...]
    recut: tuple[float, ...]
    budget: float
    n_max: int
    totals: Totals
    alone: Figure
    points: tuple[Point, ...]
    loads: tuple[Load, ...]
    alternatives: tuple[Alternative, ...]
    model: Model | None
    verdict: Verdict


def families(history: History, measured: Sequence[Alternative]) -> tuple[FamilyFigures, ...]:
    """The figures of each family, in the order of the plan."""
    tracks = _by_family(history)
    family_of = {track.spec.name: track.spec.family for track in history.tracks}
    spells: dict[str, list[Spell]] = {name: [] for name in tracks}
    for spell in history.spells:
        names = {family_of[name] for name in spell.running}
        if len(names) == 1:
            spells[names.pop()].append(spell)
    return tuple(
        _family(name, mine, spells[name], history, measured) for name, mine in tracks.items()
    )


def _by_family(history: History) -> dict[str, list[Track]]:
    tracks: dict[str, list[Track]] = {}
    for track in history.tracks:
        tracks.setdefault(track.spec.family, []).append(track)
    return tracks


def fewer_ranks(history: History) -> Figure:
    """All families' simulations as one queue, on fewer ranks side by side; all have to be done."""
    works = []
    for name, tracks in _by_family(history).items():
        loads = [load for load in history.loads if load.family == name]
        work = _work(tracks, history, loads)
        if work is None:
            return MISSING
        works.append(work)
    return _fewer(works, history.cpu / 1000)


def _family(
    name: str,
    tracks: Sequence[Track],
    spells: Sequence[Spell],
    history: History,
    measured: Sequence[Alternative],
) -> FamilyFigures:
    loads = tuple(load for load in history.loads if load.family == name)
    mine = [one for one in measured if one.family == name]
    others = comparable(history, mine)
    missing = MISSING
    if len(others) < len(mine):
        missing = Figure(how=f"measured on {mine[0].cores:g} cores, not on the run's")
    ranks = tracks[0].spec.ranks
    widths = tuple(sorted({track.spec.ranks for track in tracks if track.attempts})) or (ranks,)
    alone = _alone(spells)
    if alone.value is None and any(track.measure == "work" for track in tracks):
        alone = Figure(how=_by_work(name, history))
    if len(widths) > 1:
        alone = Figure(how="its simulations ran on different numbers of ranks")
    # Where ranks are open, one alone is no measure of the others: it would have had more.
    is_open = len(tracks[0].spec.widths) > 1
    points = () if is_open else _points(spells, alone.value)
    totals = _totals(tracks, history, loads, others, missing, alone)
    return FamilyFigures(
        name=name,
        simulations=len(tracks),
        ranks=ranks,
        widths=widths,
        open=is_open,
        weights=tracks[0].spec.weights,
        recut=_recut(tracks, history),
        budget=tracks[0].spec.slowdown,
        n_max=max((len(spell.running) for spell in spells), default=0),
        totals=totals,
        alone=alone,
        points=points,
        loads=loads,
        alternatives=others,
        model=_fit(points, ranks, history.cpu / 1000, loads_on(loads, ranks), alone.value),
        verdict=judge(totals, alike(tracks, others), len(tracks)),
    )


def comparable(history: History, measured: Iterable[Alternative]) -> tuple[Alternative, ...]:
    """Those that had as many cores as the run; None is not known to have had others."""
    cores = history.cpu / 1000
    return tuple(
        one for one in measured if one.cores is None or abs(one.cores - cores) <= ALIKE * cores
    )


def alike(tracks: Iterable[Track], measured: Iterable[Alternative]) -> int:
    """How many simulations ended on as many ranks as in the way with fewer, if that is known.

    What has a single rank has it in each way.
    """
    fewer = {one.family: one.ranks for one in measured if one.name == FEWER}
    ended = [track.spec for track in tracks if track.attempts]
    return sum(
        spec.ranks == fewer.get(spec.family, 1 if spec.widths in ((), (1,)) else None)
        for spec in ended
    )


def _recut(tracks: Sequence[Track], history: History) -> tuple[float, ...]:
    """The measured weights by which the family was cut anew; empty if it was not."""
    names = {track.spec.name for track in tracks if any(one.recut for one in track.attempts)}
    cuts = [mark.cut for mark in history.marks if mark.cut and names & set(mark.names)]
    return cuts[-1] if cuts else ()


def _alone(spells: Iterable[Spell]) -> Figure:
    """Seconds per iteration of a simulation that runs alone, as shipped if that was seen.

    It is as the plan has it: cut anew they are quicker, and that is no merit of the plan's.
    """
    single = [spell for spell in spells if len(spell.running) == 1 and spell.steps]
    single = [spell for spell in single if not spell.recut] or single
    for kind, which in (
        ("waiting ranks spin as shipped", [s for s in single if s.wait == {"off"}]),
        ("waiting ranks give the CPU back", single),
    ):
        steps = [step for spell in which for step in spell.steps.values()]
        count = sum(step[0] for step in steps)
        if count >= ENOUGH:
            each = [seconds / n for n, seconds in steps]
            how = f"{count:.0f} iterations while nothing else ran, {kind}"
            mean = sum(step[1] for step in steps) / count
            return Figure(mean, "measured", how, (min(each), max(each)))
    seen = sum(step[0] for spell in single for step in spell.steps.values())
    how = "no iteration was"
    if seen:
        how = f"only {seen:.0f} iteration{'s were' if seen > 1 else ' was'}"
    return Figure(how=f"{how} seen while a simulation ran alone")


def _by_work(name: str, history: History) -> str:
    """What the run's last trial of a family that tells no iterations found, in words."""
    how = "measured by work, which tells of rates and not of how much there is"
    for mark in reversed(history.marks):
        mix = mark.data.get("mix")
        if mark.what == "keep" and mix and {family for family, _ in mix} == {name}:
            found = mark.data["throughput"], mark.data["error"]
            how += (
                f": {sum(count for _, count in mix)} at once did {found[0]:.2f} times the work of "
                f"one alone, give or take {found[1]:.2f}"
            )
            break
    return how


def loads_on(loads: Iterable[Load], ranks: int) -> tuple[Load, ...]:
    """Those that were measured on so many ranks."""
    return tuple(load for load in loads if len(load.cpu) == ranks)


def needed(loads: Sequence[Load], cores: float) -> tuple[Array | None, str]:
    """CPU seconds that each rank needs for one iteration, shape (ranks,), and whence.

    A rank outside MPI may have lost its core to others, and its CPU time may hold spinning:
    each alone is too much, so the smaller counts. Best seen alone; spinning, unless ranks
    share cores, where only blocking waits keep the ranks out of each other's way.
    """
    by_kind = {load.kind: load for load in loads}
    crowded = any(len(load.cpu) > cores for load in loads)
    kinds = ["blocking", "spinning"] if crowded else ["spinning", "blocking"]
    for kind in (*kinds, "yielding", "packed"):
        if kind in by_kind:
            load = by_kind[kind]
            whence = f"{load.iterations:.0f} iterations {KINDS[kind]}"
            return np.minimum(load.cpu, load.useful), whence
    return None, "no two samples of a running simulation"


def outside(loads: Sequence[Load], cores: float) -> Array | None:
    """Seconds of an iteration that each rank is outside MPI with a core of its own, shape (ranks,).

    That is more than it needs of CPU where it sleeps, as for a disk: that does not go away with
    the other ranks. None if it was not seen so.
    """
    own = [one.useful for one in loads if one.kind != "packed" and len(one.useful) <= cores]
    if not own or disturbed(loads, cores) is not None:
        return None
    least: Array = np.minimum.reduce(own)
    return least


def disturbed(loads: Sequence[Load], cores: float) -> float | None:
    """The share of a core that spinning ranks got, where others took too much of it.

    None if nothing is wrong, or it cannot be known; see `taken_cpu`.
    """
    blocking = next((load.cpu for load in loads if load.kind == "blocking"), np.zeros(0))
    for load in loads:
        if load.kind == "spinning" and len(load.cpu) <= cores:
            lost = taken(*(one.tolist() for one in (load.cpu, load.useful, load.mpi, blocking)))
            return 1.0 - lost if lost is not None and lost > 1.0 - QUIET else None
    return None


def _totals(
    tracks: Sequence[Track],
    history: History,
    loads: Sequence[Load],
    others: Sequence[Alternative],
    missing: Figure,
    alone: Figure,
) -> Totals:
    by_name: dict[str, Alternative] = {one.name: one for one in others}
    undone = sum(track.state != "done" for track in tracks)
    makespan = _measured(by_name.get(DOVETAIL)) or _makespan(tracks, history)
    curve = _curve(tracks[0], history)
    sequential = _measured(by_name.get(SEQUENTIAL)) or (
        _chosen_against(tracks, curve) if curve else _sequential(tracks, history, alone)
    )
    cores = history.cpu / 1000
    work = _work(tracks, history, loads)
    fewer = _measured(by_name.get(FEWER)) or (_fewer([work], cores) if work else missing)
    bound = _bound(tracks, loads, cores)
    totals = Totals(
        makespan_s=makespan,
        sequential_s=sequential,
        naive_s=_measured(by_name.get(NAIVE)) or missing,
        fewer_ranks_s=fewer,
        bound_s=bound,
        throughput_gain=ratio(sequential, makespan),
        bound_ratio=ratio(bound, makespan),
    )
    if undone:
        why = Figure(how=f"{undone} of {len(tracks)} simulations are not done")
        totals = replace(totals, bound_s=why, throughput_gain=why, bound_ratio=why)
        if DOVETAIL not in by_name:
            totals = replace(totals, makespan_s=why)
        for key, name in (("sequential_s", SEQUENTIAL), ("fewer_ranks_s", FEWER)):
            if name not in by_name:
                totals = replace(totals, **{key: why})
    return totals


def _bound(tracks: Iterable[Track], loads: Sequence[Load], cores: float) -> Figure:
    """CPU seconds over cores, of each iteration as measured on the ranks that computed it."""
    done: Counter[int] = Counter()
    for track in tracks:
        until = track.iterations
        for one in reversed(track.attempts):
            if one.start is not None and one.over < until:
                done[one.ranks] += until - one.over
                until = one.over
    work, whence = 0.0, []
    for ranks, iterations in sorted(done.items()):
        cpu, how = needed(loads_on(loads, ranks), cores)
        if len(done) > 1:
            how += f", on {ranks} rank{'s' if ranks > 1 else ''}"
        if cpu is None:
            return Figure(how=how)
        work += float(cpu.sum()) * iterations
        whence.append(how)
    if not whence or not cores:
        return Figure(how="no iteration was seen")
    return Figure(work / cores, "measured", f"CPU seconds from {', and '.join(whence)}")


def _measured(one: Alternative | None) -> Figure | None:
    if one is None:
        return None
    repeats = len(one.makespan_s)
    how = f"median of {repeats} runs" if repeats > 1 else "one run"
    how += f" of {one.ranks} rank{'s' if one.ranks > 1 else ''} each"
    if one.at_once:
        how += f", {one.at_once} at once"
    return Figure(one.median, "measured", how, one.spread)


def _makespan(tracks: Sequence[Track], history: History) -> Figure:
    """Seconds from its first launch to its last end, without those of families in between."""
    if any(attempt.unseen for track in tracks for attempt in track.attempts):
        return UNSEEN
    mine = {track.spec.name for track in tracks}
    spans = [
        (a.launch, a.end if a.end is not None else history.end, t.spec.name in mine)
        for t in history.tracks
        for a in t.attempts
    ]
    total, until, other_until = 0.0, -math.inf, -math.inf
    before = False  # whether the last one was its own: what lies between is of the family, too
    for start, end, own in sorted(spans):
        if own:
            if start < other_until:
                return Figure(how="ran together with other families")
            total += max(0.0, end - (until if before else start))
            until = max(until, end)
        else:
            if start < until:
                return Figure(how="ran together with other families")
            other_until = max(other_until, end)
        before = own
    if until == -math.inf:
        return Figure(how="nothing was started")
    return Figure(total, "measured", "this run, from first launch to last end")


def _sequential(tracks: Sequence[Track], history: History, alone: Figure) -> Figure:
    """One after the other, predicted from the rate alone and the time to start and end."""
    if alone.value is None:
        return Figure(how=alone.how)
    extra = _starting(tracks)
    total = sum(one.iterations * alone.value + extra for one in tracks)
    return Figure(total + _first_preparing(tracks, history), "predicted", f"from {alone.how}")


def _starting(tracks: Sequence[Track]) -> float:
    """Seconds that a simulation takes beside its iterations, to be prepared, to start and to end.

    The quickest stands for all: packed ones are slower at it.
    """
    prepare = [_preparing(one) for one in _prepared(tracks)]
    extra = [
        max(0.0, t.wall - (t.iterations - t.attempts[-1].over) * t.stepping[1] / t.stepping[0])
        for t in tracks
        if t.wall is not None and t.stepping[0]
    ]
    return min(prepare, default=0.0) + min(extra, default=0.0)


def _first_preparing(tracks: Sequence[Track], history: History) -> float:
    """Seconds more than the quickest that the first one took to be prepared, if alone at it.

    Later ones may take its cut of their case.
    """
    some = _prepared(tracks)
    if not some:
        return 0.0
    first = min(some, key=lambda one: one.launch)
    until = first.launch + _preparing(first)
    others = [one for track in history.tracks for one in track.attempts if one is not first]
    if any(one.launch < until and (one.end is None or one.end > first.launch) for one in others):
        return 0.0
    return _preparing(first) - min(map(_preparing, some))


def _prepared(tracks: Sequence[Track]) -> list[Attempt]:
    """First attempts that were started; what goes on from a checkpoint was prepared before."""
    started = ([one for one in track.attempts if one.start is not None] for track in tracks)
    return [some[0] for some in started if some]


def _preparing(one: Attempt) -> float:
    return 0.0 if one.start is None else one.start - one.launch


def _curve(track: Track, history: History) -> dict[int, float]:
    """Seconds of a simulation by number of ranks, as the run's last choice had them.

    Without numbers that no run chooses: where the cores are full, more ranks only share them.
    """
    for mark in reversed(history.marks):
        if mark.what == "choice":
            found = mark.data.get("seconds", {}).get(track.spec.family, {})
            curve = {int(ranks): float(seconds) for ranks, seconds in found.items() if seconds}
            cores = mark.data.get("cores", math.inf)
            most = min((ranks for ranks in curve if ranks >= cores), default=math.inf)
            return {ranks: seconds for ranks, seconds in curve.items() if ranks <= most}
    return {}


def _chosen_against(tracks: Sequence[Track], curve: Mapping[int, float]) -> Figure:
    """One after the other, each on the ranks on which it would be quickest."""
    ranks = min(curve, key=lambda one: curve[one])
    how = f"{units.rounded(curve[ranks])} s each on {ranks} rank{'s' if ranks > 1 else ''}"
    how += ", by the run's model of what it had measured"
    if all(one.spec.ranks != ranks for one in tracks):
        how += ", where none was on so many ranks"
    return Figure(len(tracks) * curve[ranks], "predicted", how)


@dataclass(frozen=True)
class _Work:
    """What a family's simulations do, each as long as one after the other, in seconds.

    `each` is its ranks' work, added up; `start` what each takes beside that.
    """

    name: str
    ranks: int
    each: tuple[float, ...]
    start: float

    def on(self, ranks: int) -> int:
        """On how many ranks these run where none shall have more than `ranks`."""
        return max(1, min(ranks, self.ranks - 1))


def _work(tracks: Sequence[Track], history: History, loads: Sequence[Load]) -> _Work | None:
    """From what the ranks of now do in an iteration; None if unknown, or the ranks are open."""
    cores = history.cpu / 1000
    here = loads_on(loads, tracks[0].spec.ranks)
    need, slept = needed(here, cores)[0], outside(here, cores)
    if need is None or _curve(tracks[0], history):
        return None
    each = float((need if slept is None else np.maximum(need, slept)).sum())
    spec, some = tracks[0].spec, tuple(each * one.iterations for one in tracks)
    return _Work(spec.family, spec.ranks, some, _starting(tracks))


def _fewer(works: Sequence[_Work], cores: float) -> Figure:
    """The same work on at most k ranks per simulation, as many side by side as there are cores."""
    unseen = [one.name for one in works if not sum(one.each)]
    if unseen and len(works) > 1:
        return Figure(how=f"no iteration of {unseen[0]} was seen")
    best: tuple[float, int] | None = None
    ranks = max((one.ranks for one in works), default=0)
    several = sum(len(one.each) for one in works) > 1
    most = 1 if ranks == 1 and several else ranks - 1  # which they have, side by side
    for k in range(1, most + 1):
        beside = int(cores // k)
        # Of ranks of which as many fit side by side, the most are the quickest.
        if beside and not unseen and (k == most or int(cores // (k + 1)) < beside):
            queue = [(w.start + one / w.on(k), w.on(k)) for w in works for one in w.each]
            time = _side_by_side(queue, int(cores))
            best = min(best or (time, k), (time, k))
    if best is None:
        fits = "fits the cores" if ranks > 1 else "is possible"
        return Figure(how=f"no smaller number of ranks {fits}")
    ideal, k = best
    for one in works:
        work = max(one.each)
        if one.on(k) < one.ranks and one.start > work / one.on(k):
            why = f"to start and to end takes {one.start:.1f} s of each"
            why += f" {one.name}" if len(works) > 1 else ""
            why += f", more than its work of {units.rounded(work, 2)} s"
            return Figure(how=f"{why}; what fewer ranks would change in that is unknown")
    low, high = (pick(one.on(k) for one in works) for pick in (min, max))
    beside = min(int(cores // low), sum(len(one.each) for one in works))
    how = f"{low} to {high}" if low < high else f"{k}"
    how += f" rank{'s' if high > 1 else ''} each, {'up to ' if low < high else ''}{beside} at once"
    splits = any(one.on(k) < one.ranks for one in works)
    how += ", if the work splits evenly" if splits else ", as they are"
    how += f"; cache and memory may cost {1 - SPLIT:.0%}"
    # Halfway between nothing lost and as much as may be, where it is not what was measured.
    value = ideal / (1 + SPLIT) * 2 if splits else ideal
    return Figure(value, "predicted", how, (ideal, ideal / SPLIT))


def _side_by_side(queue: Iterable[tuple[float, int]], cores: int) -> float:
    """When the last of these ends, each (seconds, cores), and begun in order as cores fall free."""
    now, free = 0.0, cores
    running: list[tuple[float, int]] = []
    for seconds, taken_by_it in queue:
        while free < taken_by_it:
            now, freed = heapq.heappop(running)
            free += freed
        free -= taken_by_it
        heapq.heappush(running, (now + seconds, taken_by_it))
    return max(end for end, _ in running)


def _points(spells: Iterable[Spell], alone: float | None) -> tuple[Point, ...]:
    """Throughput and slowdown for each N that was seen with every simulation measured."""
    rows: dict[int, list[tuple[float, float, float]]] = {}
    for spell in spells:
        if alone is None or set(spell.steps) != set(spell.running):
            continue
        relative = [n * alone / seconds for n, seconds in spell.steps.values() if seconds > 0]
        if len(relative) == len(spell.running):
            slow = float(np.mean([1 / rate for rate in relative]))
            row = (sum(relative), slow, spell.end - spell.start)
            rows.setdefault(len(relative), []).append(row)
    points = []
    for n, some in sorted(rows.items()):
        table = np.array(some)
        mean = np.average(table[:, :2], axis=0, weights=table[:, 2])
        low, high = table.min(axis=0), table.max(axis=0)
        points.append(
            Point(
                n,
                float(mean[0]),
                (float(low[0]), float(high[0])),
                float(mean[1]),
                (float(low[1]), float(high[1])),
                float(table[:, 2].sum()),
            )
        )
    return tuple(points)


def _fit(
    points: Sequence[Point], ranks: int, cores: float, loads: Sequence[Load], alone: float | None
) -> Model | None:
    """The throughput model through the measured slowdowns, in units of the time alone.

    None where there are none, or such as no model goes through.
    """
    slow = {point.n: point.slowdown for point in points if point.n > 1}
    cpu, _ = needed(loads, cores)
    if not slow or not alone or cores <= 0:
        return None
    need = float(cpu.sum()) / alone if cpu is not None else 0.0
    with contextlib.suppress(BadInput):
        return Model.fit(1.0, ranks, cores, slow, need or None)
    return None
