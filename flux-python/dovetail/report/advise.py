# SPDX-License-Identifier: LGPL-3.0-or-later
"""What would pay: packing, fewer ranks, other weights, a limit.

In: what is known of each kind of simulation, from a profile or from a run, and the cores
they share. Out: pieces of advice, each with its evidence.

Invariants: pure. What was measured goes before what is predicted, a prediction carries its
range, and whatever beats packing is said before it. Ranges of predictions come from
measurements on other machines, which the evidence says.
"""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dovetail.core import units
from dovetail.core.cpu_requests import FLOOR, LIMIT, THROTTLED
from dovetail.core.errors import BadInput
from dovetail.core.taken_cpu import taken
from dovetail.core.throughput_model import (
    WAIT_COST,
    WINDOW,
    WINDOW_ITERATIONS,
    WINDOWS,
    Model,
)
from dovetail.mpi import profile
from dovetail.report.alternatives import SEQUENTIAL
from dovetail.report.figures import (
    QUIET,
    SPLIT,
    FamilyFigures,
    Point,
    disturbed,
    loads_on,
    needed,
    outside,
)
from dovetail.report.history import Array
from dovetail.report.summary import Summary
from dovetail.report.verdict import SAME, Totals

BETAS = (0.1, 0.0, 0.25)
"""Interference of packed ranks before it is measured: expected, least, most. Two cores with
ranks of load 1:3 gave 0.1; the papers' 96 vCPUs less."""
ELSEWHERE = f"interference as measured on other machines (beta {BETAS[1]:g} to {BETAS[2]:g})"
MOST = 8
"""The most simulations at once that packing is predicted for."""
SHOWN = 16
LASTING, LASTING_ITERATIONS = WINDOW * WINDOWS, WINDOW_ITERATIONS
"""Seconds and iterations of packing from which more of it is advised: as long as the controller
measures for one decision, at most and at least. What it takes back mostly lasted less."""


@dataclass(frozen=True)
class Known:
    """One kind of simulation, alone. Times are seconds per iteration, arrays of shape (ranks,).

    `need` is the CPU that each rank needs, `wall` the time of an iteration, `outside` what each is
    outside MPI with a core of its own, asleep or not, None if unknown. `weights` is what
    its requests are based on, empty if unknown. `points` and `totals` are there if it was run
    by Dovetail, and its ranks are `open` where its plan leaves them to the run. `got` is the share
    of a core that its spinning ranks got, where that shows that something else used the machine.
    `whence` says in words what all this was measured on.
    """

    name: str
    need: Array
    wall: float
    whence: str
    weights: tuple[float, ...] = ()
    slowdown: float = 2.0
    points: tuple[Point, ...] = ()
    totals: Totals | None = None
    open: bool = False
    got: float | None = None
    outside: Array | None = None

    @property
    def ranks(self) -> int:
        """How many ranks it has."""
        return len(self.need)

    @property
    def cores(self) -> float:
        """The cores that it keeps busy."""
        return float(self.need.sum()) / self.wall


@dataclass(frozen=True)
class Advice:
    """One answer. `topic` is packing, fewer ranks, weights, limit, or measure again.

    `gain` is the factor in throughput against one after the other as it is now (below 1 it
    costs), `range` its (lowest, highest); both None where it is not about throughput.
    """

    topic: str
    name: str
    statement: str
    evidence: str
    source: str
    gain: float | None = None
    range: tuple[float, float] | None = None


def advise(known: Sequence[Known], cores: float) -> list[Advice]:
    """Advice on each kind of simulation on `cores` cores, what pays most first."""
    rules: tuple[Callable[[Known, float], Advice | None], ...] = (_balance, _requests)
    # Where ranks are open, a run finds out by itself how many, and how many at once.
    chosen: tuple[Callable[[Known, float], Advice | None], ...] = (_packing, _fewer)
    advice: list[Advice] = []
    # Measured where it had more of them, it takes longer on these cores alone, too.
    known = [replace(one, wall=max(one.wall, float(one.need.sum()) / cores)) for one in known]
    for one in known:
        if one.got is not None:
            advice.append(_measure_again(one, one.got))
        given = [rule(one, cores) for rule in (*(() if one.open else chosen), *rules)]
        found = [piece for piece in given if piece is not None]
        advice += sorted(found, key=lambda piece: -(piece.gain or 0.0))
    return [*advice, _limit(known)] if known else []


def from_summary(summary: Summary, cores: float | None = None) -> list[Known]:
    """What a run taught about each of its families; those never measured are left out.

    On other `cores` than the run's, how its simulations shared these tells nothing.
    """
    found = [from_family(family, summary.cores) for family in summary.families]
    known = [one for one in found if one is not None]
    if cores not in (None, summary.cores):
        known = [replace(one, points=(), totals=None) for one in known]
    return known


def from_family(family: FamilyFigures, cores: float) -> Known | None:
    """What a run taught about one family, None if it was never measured."""
    loads = loads_on(family.loads, family.ranks)
    cpu, whence = needed(loads, cores)
    if cpu is None or family.alone.value is None or not cpu.sum() > 0:
        return None
    return Known(
        name=family.name,
        need=cpu,
        wall=family.alone.value,
        whence=whence,
        weights=family.weights if not family.recut else (),
        slowdown=family.budget,
        points=family.points,
        totals=family.totals,
        open=family.open,
        got=disturbed(loads, cores),
        outside=outside(loads, cores),
    )


def why_unknown(family: FamilyFigures) -> str:
    """Why a family is not among those of `from_summary`, in words."""
    if family.alone.value is None:
        return family.alone.how
    return "no CPU time of its ranks was seen"


def from_file(path: pathlib.Path) -> Known:
    """What a profile file says. Raises BadInput where it is damaged, or holds too little."""
    found = profile.load(path)
    try:
        found.check_all_seen()
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None
    ranks = [rank for rank in found.ranks if rank.world == 0]
    per = [
        (rank.cpu_per_iteration, rank.useful_per_iteration, rank.seconds_per_iteration)
        for rank in ranks
    ]
    whence = f"{min((rank.iterations for rank in ranks), default=0)} iterations profiled"
    if any(value is None for three in per for value in three):
        per = [(rank.cpu_s, rank.useful_s, rank.elapsed_s) for rank in ranks]
        whence = "the whole run profiled, start and end included"
    table = np.array(per, dtype=np.float64).reshape(-1, 3)
    need, wall = table[:, :2].min(axis=1), float(table[:, 2].max(initial=0.0))
    if wall <= 0 or need.sum() <= 0:
        raise BadInput(f"{path}: no rank did any work; profile a longer run")
    inside = (table[:, 2] - table[:, 1]).clip(min=0.0)
    lost = taken(*(column.tolist() for column in (table[:, 0], table[:, 1], inside)))
    share = 1.0 - (lost or 0.0)
    # Whether each rank had a core is not in the file; this machine has to stand for that one.
    alone = found.wait == "off" and len(ranks) <= len(os.sched_getaffinity(0))
    got = share if alone and share < QUIET else None
    own = table[:, 1] if alone and got is None else None
    return Known(path.stem, need, wall, whence, got=got, outside=own)


# --- the rules ---


def _measure_again(one: Known, got: float) -> Advice:
    return Advice(
        "measure again",
        one.name,
        f"{one.name}: measure again on a quiet machine; something else was using this one, so the "
        "other advice on this simulation is in doubt.",
        f"its ranks, which spin while they wait, got at most {got:.0%} of a core each "
        f"({one.whence})",
        "measured",
    )


def _packing(one: Known, cores: float) -> Advice:
    packed = [point for point in one.points if point.n > 1]
    if packed:
        return _packing_measured(one, packed, cores)
    bound = cores / one.cores
    evidence = f"each keeps {one.cores:.2f} of {cores:g} cores busy ({one.whence})"
    best, gain, low, high = _predicted_packing(one, cores)
    if best == 1 and gain >= SAME:
        slower = unfitted(one, cores)[0].slowdown(2)
        return Advice(
            "packing",
            one.name,
            f"{one.name}: do not pack; 2 at once would give about {gain:.2f} times the throughput, "
            f"and each would run about {units.rounded(slower, 4)} times slower than alone, where "
            f"its slowdown is {one.slowdown:g} at most.",
            evidence + f"; {ELSEWHERE}",
            "predicted",
            gain,
            (low, high),
        )
    if best == 1 or gain < SAME:
        return Advice(
            "packing",
            one.name,
            f"{one.name}: do not pack; it would give about {gain:.2f} times the throughput, and "
            f"{bound:.2f} times if simulations did not slow each other down.",
            evidence + f"; {ELSEWHERE}",
            "predicted",
            gain,
            (low, high),
        )
    return Advice(
        "packing",
        one.name,
        f"{one.name}: packing {best} at once would give about {gain:.2f} times the throughput "
        f"({low:.2f} to {high:.2f}; at most {bound:.2f}) while they iterate, if waiting ranks give "
        "their CPU time back.",
        evidence + f"; {ELSEWHERE}; giving CPU time back costs {WAIT_COST:.0%}",
        "predicted",
        gain,
        (low, high),
    )


def _predicted_packing(one: Known, cores: float) -> tuple[int, float, float, float]:
    """(N, gain, lowest, highest) of the best N within the slowdown budget.

    As in a run, whose ranks have cores to themselves need no budget.
    """
    models = unfitted(one, cores)
    every = range(2, MOST + 1)
    free = [n for n in every if n * one.ranks <= cores]
    allowed = [n for n in every if n in free or models[0].slowdown(n) <= one.slowdown]
    best = max(allowed, key=lambda n: models[0].gain(n), default=2)
    middle, high, low = (model.gain(best) for model in models)
    return (best if allowed else 1), middle, low, high


def unfitted(one: Known, cores: float) -> list[Model]:
    """The throughput model before anything was packed: expected, best and worst."""
    cost = 1.0 + WAIT_COST if one.ranks > 1 else 1.0
    return [Model(1.0, one.ranks, cores, beta, one.cores * cost) for beta in BETAS]


def _packing_measured(one: Known, packed: Sequence[Point], cores: float) -> Advice:
    within = [
        point
        for point in packed
        if point.n * one.ranks <= cores or point.slowdown <= one.slowdown * SAME
    ]
    lasting = [point for point in within if _lasted(point, one.wall)]
    best = max(lasting or within or packed, key=lambda point: point.throughput)
    if lasting:  # of equals the fewest: the others only take more memory
        equals = [point for point in lasting if point.throughput * SAME >= best.throughput]
        best = min(equals, key=lambda point: point.n)
    low, high = best.throughput_spread
    evidence = (
        f"measured for {units.rounded(best.seconds, 2)} s with {best.n} at once, {low:.2f} to "
        f"{high:.2f} times; each ran {best.slowdown:.2f} times slower than alone"
    )
    gave = f"{best.n} at once gave {best.throughput:.2f} times the throughput of {SEQUENTIAL}"
    if best.throughput < SAME:
        statement = f"{one.name}: do not pack; {gave}."
    elif not within:
        statement = f"{one.name}: do not pack; {gave} while they iterated, but each ran "
        statement += f"{best.slowdown:.2f} times slower than alone, where its slowdown is "
        statement += f"{one.slowdown:g} at most."
    elif not lasting:
        statement = f"{one.name}: whether packing pays is not known; {gave} while they iterated, "
        statement += "for too short a time to go by."
    else:
        statement = f"{one.name}: pack {best.n} at once; while they iterate, it gives "
        statement += f"{best.throughput:.2f} times the throughput of {SEQUENTIAL}."
    return Advice(
        "packing", one.name, statement, evidence, "measured", best.throughput, (low, high)
    )


def _lasted(point: Point, wall: float) -> bool:
    return point.seconds >= max(LASTING, LASTING_ITERATIONS * wall * point.slowdown)


def _fewer(one: Known, cores: float) -> Advice | None:
    if one.ranks < 2:
        return None
    totals = one.totals
    if totals is not None and totals.fewer_ranks_s.source == "measured":
        return _fewer_measured(one, totals)
    each = one.need if one.outside is None else np.maximum(one.need, one.outside)
    work = float(each.sum())
    slept = work - float(one.need.sum())
    # One rank each uses every core; more are only worth it if one is too slow or too large.
    side = int(cores)
    if side < 1:
        return None
    ideal = side * one.wall / work
    gain = ideal * (1 + SPLIT) / 2
    if gain < SAME:
        return None
    return Advice(
        "fewer ranks",
        one.name,
        f"{one.name}: if the simulations need not be wide, put {_widths(one)} into the plan; "
        f"{side} or more of them with 1 rank each, {side} side by side, would have about "
        f"{gain:.2f} times the throughput ({SPLIT * ideal:.2f} to {ideal:.2f}) while they iterate; "
        f"each then takes "
        f"{work / one.wall:.1f} times as long as now, and all {side} must fit into memory.",
        f"the ranks' work adds up to {units.rounded(work - slept)} CPU seconds per iteration"
        + (
            f", and {units.rounded(slept)} s that they sleep outside MPI"
            if slept > 0.05 * work
            else ""
        )
        + f" ({one.whence}); "
        f"communication is left out, and cache and memory may cost {1 - SPLIT:.0%}",
        "predicted",
        gain,
        (SPLIT * ideal, ideal),
    )


def _fewer_measured(one: Known, totals: Totals) -> Advice | None:
    fewer, sequential = totals.fewer_ranks_s, totals.sequential_s
    if fewer.value is None or sequential.value is None:
        return None
    gain = sequential.value / fewer.value
    against = f"{gain:.2f} times the throughput of {SEQUENTIAL}"
    own = totals.makespan_s.value
    better = own is not None and fewer.value * SAME < own
    start = f"run on fewer ranks side by side, by {_widths(one)} in the plan; that gives"
    if not better:
        start = "stay with these ranks; fewer ranks side by side give"
    compared = "" if own is None else f", {own / fewer.value:.2f} times that of Dovetail"
    return Advice(
        "fewer ranks",
        one.name,
        f"{one.name}: {start} {against}{compared}.",
        f"{fewer.value:.1f} s, {fewer.how}; {SEQUENTIAL} {sequential.value:.1f} s, "
        f"{sequential.source}",
        "measured" if sequential.source == "measured" else "predicted",
        gain,
        (gain, gain) if fewer.spread is None else _over(sequential.value, fewer.spread),
    )


def _widths(one: Known) -> str:
    """The plan's key by which the ranks are chosen by the run, from 1 to those of now."""
    return f"`ranks: 1-{one.ranks}`"


def _over(value: float, spread: tuple[float, float]) -> tuple[float, float]:
    return value / spread[1], value / spread[0]


def _balance(one: Known, cores: float) -> Advice | None:
    """Equal work for all ranks, where each has a core to itself."""
    mean, most = float(one.need.mean()), float(one.need.max())
    if one.ranks < 2 or one.ranks > cores or mean >= most / SAME:
        return None
    gain = one.wall / (one.wall - most + mean)
    heaviest = int(np.argmax(one.need))
    return Advice(
        "weights",
        one.name,
        f"{one.name}: the load balance is {mean / most:.2f}; a decomposition that gives every "
        f"rank the same work would give up to {gain:.2f} times the throughput.",
        f"rank {heaviest} needs {units.rounded(most)} CPU seconds per iteration, the mean is "
        f"{units.rounded(mean)} "
        f"({one.whence}); new neighbours may cost communication",
        "predicted",
        gain,
        (1.0, gain),
    )


def _requests(one: Known, cores: float) -> Advice | None:
    """Whether the weights that requests are based on are those of the load."""
    if len(one.weights) != one.ranks or one.ranks < 2:
        return None
    load = one.need / one.need.sum()
    asked = np.array(one.weights) / sum(one.weights)
    off = np.abs(load - asked) / np.maximum(asked, 1e-9)
    worst = int(np.argmax(off))
    if off[worst] <= 0.1:
        return None
    least = load.min() if load.min() > 0 else 1.0
    shown = ",".join(units.rounded(value / least, 2) for value in load[:SHOWN])
    shown += ",…" if one.ranks > SHOWN else ""
    return Advice(
        "weights",
        one.name,
        f"{one.name}: put weights {shown} into the plan; its weights are not the ranks' load.",
        f"rank {worst} does {_percent(load[worst])} of the work and has "
        f"{_percent(asked[worst])} of the weight ({one.whence})",
        "measured",
    )


def _percent(share: float) -> str:
    """With two digits that count: ranks of many have little of the whole."""
    return f"{units.rounded(100 * share, 2)}%"


def _limit(known: Sequence[Known]) -> Advice:
    peaks = [(1000 * float(one.need.max()) / one.wall, one.name) for one in known]
    peak, name = max(peaks)
    request = max(FLOOR, math.ceil(peak))
    return Advice(
        "limit",
        name,
        f"Set no CPU limits; where the site demands them, at least {LIMIT:g} times the request "
        f"({name}: {LIMIT * request:.0f}m for the heaviest rank's {request}m).",
        THROTTLED,
        "predicted",
    )
