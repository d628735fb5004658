# SPDX-License-Identifier: LGPL-3.0-or-later
"""Several simulations at once: throughput, slowdown, fairness, the model, the cost
(arXiv:2604.00377).

Inputs: a setting. Outputs: seconds per iteration of each of N = 1 to 5 simulations that run at
once. The paper had 80 ranks on 96 vCPU, so that cores were idle; here it is both: simulations that
fill the cores, cut 1 to 3, and simulations of one rank, of which as many as there are cores find
one idle. The second is also how the same cases run on fewer ranks, side by side.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from dovetail.bench.harness import Row
from dovetail.bench.papers import published
from dovetail.bench.papers.allocation import cut
from dovetail.bench.papers.findings import Figures, Finding, Measured, Setting
from dovetail.bench.papers.place import KUBERNETES, Run, need_groups
from dovetail.core import cpu_requests
from dovetail.core.throughput_model import Model

MOST = 5
EQUALS = 2
"""The paper has equal requests for one and two."""
IDLE = "one rank each"
EQUAL, THEIRS = "full cores, equal, spinning", "full cores, proportional, spinning"
SLEEPING = "full cores, proportional, sleeping"
OWN = "full cores, one group each, sleeping"
WAYS = (EQUAL, THEIRS, SLEEPING, OWN, IDLE)
"""Simulations that fill the cores: a group for each rank, as in the paper, with equal requests or
proportional ones, waits that spin or sleep; Dovetail's own, one group for all ranks; and
simulations of one rank."""
Variants = Mapping[str, Callable[[], Figures]]


def weights(setting: Setting) -> tuple[float, ...]:
    """Of the ranks that fill the cores: half of them have a third of the others' cells."""
    cores = max(2, setting.place.cores)
    return (1.0,) * (cores // 2) + (3.0,) * (cores - cores // 2)


def packing_variants(setting: Setting) -> Variants:
    """N at once in every way."""
    need_groups(setting.place)
    wide = weights(setting)
    full = cut(setting, "full", wide, setting.scale.refine)
    single = cut(setting, "single", (1.0,), setting.scale.refine)
    even = (1.0,) * len(wide)
    made: dict[str, Callable[[], Figures]] = {}
    for n in range(1, MOST + 1):
        equal, fair, one = (_requests(setting, shares, n) for shares in (even, wide, (1.0,)))
        for way, run in (
            *([(EQUAL, Run(full, equal, apart=True))] if n <= EQUALS else []),
            (THEIRS, Run(full, fair, apart=True)),
            (SLEEPING, Run(full, fair, wait="doorbell", apart=True)),
            (OWN, Run(full, fair, wait="doorbell")),
            (IDLE, Run(single, one, command=("simpleFoam",))),
        ):
            made[f"{way}: {n}"] = functools.partial(_at_once, setting, run, n)
    return made


def _requests(setting: Setting, shares: Sequence[float], n: int) -> tuple[int, ...]:
    """A core for each rank, or as pods, which must fit, a part of the cores for each of N."""
    total = 1000 * len(shares)
    if setting.place.kind == KUBERNETES:
        total = min(total, 1000 * setting.place.cores // n)
    return cpu_requests.proportional(shares, total)


def _at_once(setting: Setting, run: Run, n: int) -> Figures:
    scale = setting.scale
    seen = setting.place.measure([run] * n, scale.iterations, scale.seconds)
    times = [one.seconds for one in seen]
    return {
        "rate": sum(1 / time for time in times),
        "mean": sum(times) / n,
        "makespan": max(times),
        "unfair": max(times) / min(times),
        "cores": sum(one.cores for one in seen),
        "requested": n * sum(run.requests) / 1000,
        "switches": sum(one.switches for one in seen),
        "waited_s": sum(one.waited_s for one in seen),
        **{f"time {number}": time for number, time in enumerate(times, 1)},
    }


def _gain(measured: Measured, way: str, n: int) -> Row:
    """Throughput of N at once over that of one after the other, which is that of one alone."""
    pairs = zip(measured[f"{way}: {n}"], measured[f"{way}: 1"])
    return Row("", tuple(many["rate"] / one["rate"] for many, one in pairs))


def _best_rate(measured: Mapping[str, Sequence[Figures]], way: str) -> list[float]:
    """Throughput of each round with as many at once as were best in it."""
    rounds = zip(*(measured[f"{way}: {n}"] for n in range(1, MOST + 1)))
    return [max(one["rate"] for one in turn) for turn in rounds]


def _over(measured: Measured, way: str, n: int, figure: str, below: str = "mean") -> Row:
    pairs = zip(measured[f"{way}: {n}"], measured[f"{way}: 1"])
    return Row("", tuple(many[figure] / one[below] for many, one in pairs))


def packing_findings(setting: Setting, measured: Measured) -> list[Finding]:
    """Every N in every way; the papers' numbers stand beside ours of the same requests."""
    theirs = published.of("packing")
    made = []
    for way in WAYS:
        for n in range(2, (EQUALS if way == EQUAL else MOST) + 1):
            number = theirs[f"throughput {n}"]
            if way == EQUAL:
                number = theirs["throughput 2E"]
            made.append(Finding(f"throughput, {n} at once / one after the other, {way}", "x",
                                _gain(measured, way, n), number, group=f"throughput, {way}",
                                at=n, note=_room(setting, way, n)))  # fmt: skip
    # A way that is slow alone gains much by its own measure; by that of a plain mpirun it need not.
    for way in WAYS[1:-1]:
        for n in range(1, MOST + 1):
            pairs = zip(measured[f"{way}: {n}"], measured[f"{EQUAL}: 1"])
            row = Row("", tuple(a["rate"] / b["rate"] for a, b in pairs))
            made.append(Finding(f"throughput, {n} at once / one after the other, equal, spinning: "
                                f"{way}", "x", row,
                                group=f"throughput / equal requests, spinning: {way}",
                                at=n))  # fmt: skip
    for way in (THEIRS, IDLE):
        for n in range(2, MOST + 1):
            made.append(Finding(f"mean slowdown, {n} at once, {way}", "x",
                                _over(measured, way, n, "mean"), theirs[f"slowdown {n}"],
                                group=f"slowdown, {way}", at=n))  # fmt: skip
    for way in (THEIRS, OWN, IDLE):
        for n in range(2, MOST + 1):
            makespan = _over(measured, way, n, "makespan", "makespan").values
            made.append(Finding(f"makespan, {n} at once / one after the other, {way}", "x",
                                Row("", tuple(value / n for value in makespan)),
                                theirs[f"makespan {n}"], group=f"makespan, {way}",
                                at=n))  # fmt: skip
            gain = _gain(measured, way, n).values
            made.append(Finding(f"efficiency, {n} at once: throughput / {n} times that of one, "
                                f"{way}", "share", Row("", tuple(value / n for value in gain)),
                                theirs[f"efficiency {n}"], group=f"efficiency, {way}",
                                at=n))  # fmt: skip
            made += [Finding(f"slowdown of number {number} of {n}, {way}", "x",
                             _over(measured, way, n, f"time {number}"), detail=True,
                             group=f"slowdown of each, {way}")
                     for number in range(1, n + 1)]  # fmt: skip
    for way in WAYS[1:-1]:
        best = zip(_best_rate(measured, way), _best_rate(measured, IDLE))
        row = Row("", tuple(few / many for many, few in best))
        what = f"throughput, one rank each / {way}, each with as many at once as are best"
        made.append(Finding(what, "x", row, group="fewer ranks side by side"))  # fmt: skip
    alone = zip(measured[f"{THEIRS}: 1"], measured[f"{EQUAL}: 1"])
    made.append(Finding("time of one alone, proportional / equal", "x",
                        Row("", tuple(a["mean"] / b["mean"] for a, b in alone)),
                        theirs["proportional alone"]))  # fmt: skip
    for way in WAYS[1:]:
        unfair = [max(measured[f"{way}: {n}"][i]["unfair"] for n in range(2, MOST + 1))
                  for i in range(len(measured[f"{way}: 1"]))]  # fmt: skip
        made.append(Finding(f"slowest / fastest of those at once, worst N, {way}", "x",
                            Row("", tuple(unfair)), theirs["fairness"]))  # fmt: skip
    made += _model(setting, measured)
    why = "`dovetail bench moldable` and `dovetail bench queue` measure the controller"
    made.append(Finding("throughput of 4 under the controller", "x", None,
                        theirs["controller"], why))  # fmt: skip
    for figure, what, unit in (("cores", "cores in use", "cores"),
                               ("switches", "context switches", "1/s")):  # fmt: skip
        made += [Finding(f"{what}, {n} at once, {way}", unit,
                         Row("", tuple(one[figure] for one in measured[f"{way}: {n}"])),
                         group=f"{what}, {way}", at=n, detail=True)
                 for way in WAYS[1:] for n in range(1, MOST + 1)]  # fmt: skip
    return made


def _room(setting: Setting, way: str, n: int) -> str:
    ranks = n * (1 if way == IDLE else len(weights(setting)))
    return f"{ranks} ranks on {setting.place.cores} cores; the paper: {16 * n} on 96"


def _model(setting: Setting, measured: Measured) -> list[Finding]:
    """The error for the N that the model was fitted to, and for those that it has not seen."""
    theirs = published.of("packing")["model"]
    made = []
    for way in WAYS[1:]:
        ranks = 1 if way == IDLE else len(weights(setting))
        known: list[float] = []
        unseen: list[float] = []
        betas: list[float] = []
        for turn in range(len(measured[f"{way}: 1"])):
            times = {n: measured[f"{way}: {n}"][turn]["makespan"] for n in range(1, MOST + 1)}
            need = measured[f"{way}: 1"][turn]["cores"]
            later = {n: time for n, time in times.items() if n > 1}
            fitted = Model.fit(times[1], ranks, setting.place.cores, later, need)
            betas.append(fitted.beta)
            known.append(_error(fitted, later))
            early = Model.fit(times[1], ranks, setting.place.cores, {2: times[2]}, need)
            unseen.append(_error(early, {n: time for n, time in later.items() if n > 2}))
        note = f"β {sorted(betas)[len(betas) // 2]:.2f} of the model that knows full cores; " \
               f"the paper's is {published.BETA:g}"  # fmt: skip
        made.append(Finding(f"largest error of the model fitted to N=2 to {MOST}, {way}", "share",
                            Row("", tuple(known)), theirs, note=note))  # fmt: skip
        made.append(Finding(f"largest error for N=3 to {MOST}, fitted to N=2 alone, {way}",
                            "share", Row("", tuple(unseen))))  # fmt: skip
    return made


def _error(model: Model, times: Mapping[int, float]) -> float:
    return max(abs(model.makespan(n) / time - 1) for n, time in times.items())


# --- the cost, from the same measurements ---


def cost_findings(setting: Setting, measured: Mapping[str, Sequence[Figures]]) -> list[Finding]:
    """Cost of a simulation against one alone, cores wasted; dollars by the user's price."""
    theirs = published.of("cost")
    cores = setting.place.cores
    made = []
    for way in (OWN, IDLE):
        for n in range(2, MOST + 1):
            gain = _gain(measured, way, n)
            row = Row("", tuple(1 / value for value in gain.values))
            made.append(Finding(f"cost of a simulation, {n} at once / alone, {way}", "x", row,
                                theirs[f"cost {n}"], group=f"cost, {way}", at=n))  # fmt: skip
        for n in (1, MOST):
            rows = measured[f"{way}: {n}"]
            used = Row("", tuple(one["cores"] / cores for one in rows))
            made.append(Finding(f"core-hours wasted, {n} at once, {way}", "share",
                                Row("", tuple(max(0.0, 1 - share) for share in used.values)),
                                note=f"{rows[0]['requested']:g} cores requested of {cores}; "
                                     f"{used.median:.0%} used"))  # fmt: skip
    if not setting.price:
        made.append(Finding("price of a simulation", "$", None, theirs["dollars"],
                            "no price: give --price, dollars for a vCPU-hour"))  # fmt: skip
        return made
    for way in (OWN, IDLE):
        for n in (1, MOST):
            rates = [one["rate"] for one in measured[f"{way}: {n}"]]
            dollars = tuple(1000 * setting.price * cores / 3600 / rate for rate in rates)
            note = f"at {setting.price:g} a vCPU-hour, {cores} cores"
            made.append(Finding(f"price of 1,000 iterations, {n} at once, {way}", "$",
                                Row("", dollars), note=note))  # fmt: skip
    made.append(Finding("price of a simulation", "$", None, theirs["dollars"],
                        "another case: the ratios above compare"))  # fmt: skip
    return made
