# SPDX-License-Identifier: LGPL-3.0-or-later
"""Rank-aware allocation: requests, limits, cuts and phases (arXiv:2603.22691).

Inputs: a setting. Outputs: seconds per iteration and throttling of pitzDaily on 4 and on 16 ranks,
each rank in a group or pod of its own, as in the paper. Ranks wait by spinning, as the library is
shipped, and again by the doorbell. The budget is a core for each rank, or all cores that there are.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dovetail.bench.cases import SOLVER, environment, pitz_daily
from dovetail.bench.harness import Row, dovetail_run
from dovetail.bench.papers import published
from dovetail.bench.papers.findings import Figures, Finding, Measured, Setting, plain, ratio
from dovetail.bench.papers.place import LOCAL, Run, need_groups
from dovetail.core import cpu_requests
from dovetail.core.errors import WorkFailed

FOUR = (1.0, 1.0, 5.0, 15.0)
SIXTEEN = (1.0,) * 8 + (5.0,) * 4 + (15.0,) * 4
WAITS = {"off": "spinning", "doorbell": "sleeping"}
CURVE = {"off": (1.0, 1.25, 1.5, 2.0, 3.0, 0.0), "doorbell": (1.0, 2.0, 0.0)}
"""Limits over requests, by the wait; 0 is none."""
CURVES = "time / without a limit"
PERIODS = (10_000, 30_000)  # microseconds, beside the kernel's, of which all the curve is
ENDLESS = 10_000_000
Variants = Mapping[str, Callable[[], Figures]]


def budget(setting: Setting, ranks: int) -> int:
    """Millicores for a simulation: a core for each rank, as far as there are any."""
    return 1000 * min(ranks, setting.place.cores)


def requests(setting: Setting, weights: Sequence[float], proportional: bool) -> tuple[int, ...]:
    """By rank, in proportion to the weights or equal."""
    shares = weights if proportional else (1.0,) * len(weights)
    return cpu_requests.proportional(shares, budget(setting, len(weights)))


def cut(setting: Setting, name: str, weights: Sequence[float], refine: int) -> Path:
    """A case that never ends, of refine x refine times 12,225 cells."""
    setting.progress(f"{name}: making the case")
    return pitz_daily(setting.place.scratch / name, weights, ENDLESS, refine=refine)


def one(setting: Setting, run: Run) -> Figures:
    """A simulation alone."""
    scale = setting.scale
    return setting.place.measure([run], scale.iterations, scale.seconds)[0].figures()


# --- C0 to C5 ---


def allocation_variants(setting: Setting) -> Variants:
    """Cuts, requests, limits and ways of waiting."""
    need_groups(setting.place)
    even = cut(setting, "even", (1.0,) * 4, setting.scale.refine)
    zones = cut(setting, "zones", FOUR, setting.scale.refine)
    large = cut(setting, "sixteen", SIXTEEN, setting.scale.large)
    equal, fair = requests(setting, FOUR, False), requests(setting, FOUR, True)
    made: dict[str, Callable[[], Figures]] = {}
    for mode, words in WAITS.items():
        for name, case, shares, limit in (
            ("even cut, equal", even, equal, 0.0),
            ("even cut, equal, limits at once", even, equal, 1.0),
            ("zones, equal", zones, equal, 0.0),
            ("zones, proportional", zones, fair, 0.0),
            ("zones, proportional, limits at once", zones, fair, 1.0),
            ("zones, proportional, limits twice", zones, fair, 2.0),
        ):
            run = Run(case, shares, wait=mode, limit=limit, apart=True)
            made[f"{name}; {words}"] = functools.partial(one, setting, run)
    uniform = cut(setting, "sixteen-even", (1.0,) * 16, setting.scale.large)
    for name, case, proportional in (("even cut, equal", uniform, False),
                                     ("equal", large, False),
                                     ("proportional", large, True)):  # fmt: skip
        run = Run(case, requests(setting, SIXTEEN, proportional), wait="doorbell", apart=True)
        made[f"16 ranks, {name}; sleeping"] = functools.partial(one, setting, run)
    return made


def allocation_findings(setting: Setting, measured: Measured) -> list[Finding]:
    """Ratios of times, and what the control groups and the kernel counted."""
    theirs = published.of("allocation")
    made = []
    for words in WAITS.values():
        for key, said, over, under in (
            ("limits at once", "limits of the requests / none, zones, proportional",
             "zones, proportional, limits at once", "zones, proportional"),
            ("limits twice", "limits of twice the requests / none, the same",
             "zones, proportional, limits twice", "zones, proportional"),
            ("", "limits of the requests / none, even cut, equal",
             "even cut, equal, limits at once", "even cut, equal"),
            ("concentric", "zones / even cut, equal requests",
             "zones, equal", "even cut, equal"),
            ("proportional", "proportional / equal requests, zones",
             "zones, proportional", "zones, equal"),
            ("both", "zones, proportional / even cut, equal",
             "zones, proportional", "even cut, equal"),
        ):  # fmt: skip
            row = ratio(measured, f"{over}; {words}", f"{under}; {words}", "seconds")
            what = f"time: {said}; {words}"
            made.append(Finding(what, "x", row, theirs.get(key), group=f"time, {words}",
                                note=_lifted(measured[f"{over}; {words}"])))  # fmt: skip
    row = ratio(
        measured, "16 ranks, proportional; sleeping", "16 ranks, equal; sleeping", "seconds"
    )
    note = f"{16 / setting.place.cores:g} ranks on each core; spinning ones would hardly move"
    made.append(Finding("time: proportional / equal requests, 16 ranks; sleeping", "x", row,
                        theirs["sixteen ranks"], note=note, group="time, sleeping"))  # fmt: skip
    row = ratio(
        measured, "16 ranks, equal; sleeping", "16 ranks, even cut, equal; sleeping", "seconds"
    )
    made.append(Finding("time: zones / even cut, equal requests, 16 ranks; sleeping", "x", row,
                        group="time, sleeping"))  # fmt: skip
    sparse = cpu_requests.proportional(SIXTEEN, 16_000)[0] / 1000
    made.append(Finding("request of a sparse rank / 1000m, 16 ranks", "x", Row("", (sparse,)),
                        theirs["sparse request"], note="calculated, as in the paper"))  # fmt: skip
    why = "one machine; it needs ranks on several hosts"
    made.append(Finding("time on several hosts by TCP / on one", "x", None,
                        theirs["across hosts"], why))  # fmt: skip
    made += counters(measured)
    return made


def _lifted(rounds: Sequence[Figures]) -> str:
    """In how many rounds ranks had to begin without their limits, if in any."""
    some = sum(one["lifted"] > 0 for one in rounds)
    return (
        f"{some} of {len(rounds)} began without limits, as they did not with them" if some else ""
    )


def counters(measured: Measured) -> list[Finding]:
    """Time per iteration, throttling, switches and waits of each variant."""
    made = []
    for figure, what, unit in (
        ("seconds", "time per iteration", "s"),
        ("throttled", "nr_throttled / nr_periods", "share"),
        ("throttled_s", "throttled, all ranks", "s/s"),
        ("switches", "context switches", "1/s"),
        ("waited_s", "ready without a core, all ranks", "s/s"),
    ):
        made += [Finding(f"{what}: {name}", unit, plain(measured, name, figure), group=what,
                         detail=True)
                 for name in measured]  # fmt: skip
    return made


# --- the curve of limits ---


def limits_variants(setting: Setting) -> Variants:
    """Limit over request, by the kernel's period and by a short one, and by the wait."""
    need_groups(setting.place)
    zones = cut(setting, "limited", FOUR, setting.scale.refine)
    fair = requests(setting, FOUR, True)
    made: dict[str, Callable[[], Figures]] = {}
    for mode, words in WAITS.items():
        for limit in CURVE[mode]:
            run = Run(zones, fair, wait=mode, limit=limit, apart=True)
            made[f"{_times(limit)}; {words}"] = functools.partial(one, setting, run)
    if setting.place.kind == LOCAL:  # a kubelet has one period for all its pods
        for period in PERIODS:
            for limit in (1.0, 2.0):
                run = Run(zones, fair, limit=limit, period=period, apart=True)
                made[f"{_times(limit)}, period of {period // 1000} ms; spinning"] = (
                    functools.partial(one, setting, run)
                )
    return made


def _times(limit: float) -> str:
    return f"limit {limit:g} x request" if limit else "no limit"


def limits_findings(setting: Setting, measured: Measured) -> list[Finding]:
    """Time over that without a limit; the paper has numbers for a limit at once only."""
    theirs = published.of("allocation")
    made = []
    for name in measured:
        limit, _, words = name.rpartition("; ")
        if limit == "no limit":
            continue
        number = None
        if limit.startswith("limit 1 x"):
            number = theirs["limits at once"]
        elif limit.startswith("limit 2 x"):
            number = theirs["limits twice"]
        row = ratio(measured, name, f"no limit; {words}", "seconds")
        _, _, period = limit.partition(", ")
        made.append(Finding(f"time: {limit} / none; {words}", "x", row, number,
                            note=_lifted(measured[name]), at=float(limit.split()[1]),
                            group=", ".join(filter(None, [CURVES, words, period]))))  # fmt: skip
    return [*made, *counters(measured)]


# --- phases ---


PHASES = ((1.0,) * 4, FOUR, (1.0, 1.0, 3.0, 6.0))
"""Weights of the start-up, the steady and the final phase."""
RESIDUAL = 0.01  # a steady simulation's
PLAN_FIXED, PLAN_PHASES = "a plan with one phase", "a plan with three phases"


def phases_variants(setting: Setting) -> Variants:
    """Requests that stay, that change twice, and that change all the time."""
    need_groups(setting.place)
    zones = cut(setting, "phases", FOUR, setting.scale.refine)
    fair = requests(setting, FOUR, True)
    iterations = 3 * setting.scale.iterations

    def phase_requests(phase: int) -> tuple[int, ...]:
        return cpu_requests.proportional(PHASES[phase % len(PHASES)], budget(setting, 4))

    def changed(every: int, begins: tuple[int, ...]) -> Figures:
        run = Run(zones, begins, wait="doorbell", apart=True)
        state = {"phase": 0, "resizes": 0, "done": 0}

        def during(done: int, resize: Callable[[Sequence[int]], None]) -> None:
            state["done"] = done  # a slow one does not get to all
            phase = done // every
            if phase > state["phase"] and done < iterations:  # else it is measured
                state["phase"] = phase
                state["resizes"] += 1
                resize(phase_requests(phase))

        seen = setting.place.measure([run], iterations, 3 * setting.scale.seconds, during)[0]
        counted = {name: float(state[name]) for name in ("resizes", "done")}
        return {**seen.figures(), **counted}

    made: dict[str, Callable[[], Figures]] = {
        "fixed": functools.partial(changed, 10 * iterations, fair),
        "three phases": functools.partial(changed, setting.scale.iterations, phase_requests(0)),
        "a resize every 5 iterations": functools.partial(changed, 5, phase_requests(0)),
    }
    if setting.place.kind == LOCAL:  # pods of another run would have to share the cluster
        case = pitz_daily(
            setting.place.scratch / "planned", FOUR, iterations, refine=setting.scale.refine
        )
        for name, weights in ((PLAN_FIXED, (FOUR,)), (PLAN_PHASES, PHASES)):
            made[name] = functools.partial(_planned, setting, case, weights)
    return made


def _planned(setting: Setting, case: Path, phases: Sequence[Sequence[float]]) -> Figures:
    """`dovetail run` of a plan with phases, of which the first ends by its iterations, and the
    second, if the last does not come before, by its residual."""
    parts: list[dict[str, object]] = []
    for number, weights in enumerate(phases):
        shares = cpu_requests.proportional(weights, budget(setting, len(weights)))
        parts.append({"requests": [f"{share}m" for share in shares]})
        if number < len(phases) - 1:
            until: dict[str, float] = {"iteration": (number + 1) * setting.scale.iterations}
            parts[-1]["until"] = until if number == 0 else {**until, "residual": RESIDUAL}
    added = {k: v for k, v in environment().items() if os.environ.get(k) != v}
    entry = {"name": "sim", "case": str(case), "ranks": len(FOUR), "weights": list(FOUR),
             "ranks_per_pod": 1, "command": list(SOLVER), "phases": parts,
             "environment": added}  # fmt: skip
    plan, out = setting.place.scratch / "plan.json", setting.place.scratch / "planned-out"
    plan.write_text(json.dumps({"simulations": [entry]}))
    shutil.rmtree(out, ignore_errors=True)
    seen = dovetail_run(plan, out).simulations[0]
    if seen.wall_s is None or not seen.iterations:
        raise WorkFailed(f"the simulation of the plan is {seen.state}: {seen.reason}")
    return {"seconds": seen.wall_s / seen.iterations, "phases": float(len(seen.phases)),
            "restarts": float(seen.restarts)}  # fmt: skip


def phases_findings(setting: Setting, measured: Measured) -> list[Finding]:
    """What phases bring, what a resize costs, and whether anything was restarted."""
    theirs = published.of("phases")
    phases = ratio(measured, "three phases", "fixed", "seconds")
    often = ratio(measured, "a resize every 5 iterations", "fixed", "seconds")
    per_resize = [
        1000 * (after["seconds"] - before["seconds"]) * after["done"] / after["resizes"]
        for after, before in zip(measured["a resize every 5 iterations"], measured["fixed"])
        if after["resizes"]
    ]
    added = Row("", tuple(per_resize)) if per_resize else None
    why = "" if added else "no round had five iterations in its time"
    resizes = sum(int(one.get("resizes", 0)) for rows in measured.values() for one in rows)
    restarts = sum(one.get("restarts", 0.0) for rows in measured.values() for one in rows)
    note = f"{resizes} resizes, in all rounds; a simulation that ended would have ended the " \
           "measurement"  # fmt: skip
    made = [
        Finding("time, three phases / fixed requests", "x", phases, theirs["phases"]),
        Finding("time, a resize every 5 iterations / none", "x", often),
        Finding("what a resize adds to the ranks' time", "ms", added, why=why),
        Finding("restarts", "restarts", Row("", (restarts,)), theirs["restarts"], note=note),
    ]
    if PLAN_PHASES in measured:
        begun = sorted(int(one["phases"]) for one in measured[PLAN_PHASES])
        note = f"`dovetail run` with the plan's `phases`; {begun[0]} or more phases began"
        made.insert(1, Finding("time, a plan with three phases / with one", "x",
                               ratio(measured, PLAN_PHASES, PLAN_FIXED, "seconds"),
                               theirs["phases"], note=note))  # fmt: skip
    return made
