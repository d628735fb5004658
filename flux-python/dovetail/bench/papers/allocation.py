# SPDX-License-Identifier: LGPL-3.0-or-later
"""Rank-aware allocation: requests, limits, cuts and phases (arXiv:2603.22691).

Inputs: a setting. Outputs: seconds per iteration and throttling of pitzDaily on 4 and on 16 ranks,
each rank in a group or pod of its own, as in the paper. Ranks wait by spinning, as the library is
shipped, and again by the doorbell. The budget is a core for each rank, or all cores that there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dovetail.bench.cases import pitz_daily
from dovetail.bench.harness import Row
from dovetail.bench.papers import published
from dovetail.bench.papers.findings import Figures, Finding, Measured, Setting, plain, ratio
from dovetail.bench.papers.place import LOCAL, Run, need_groups
from dovetail.core import cpu_requests

FOUR = (1.0, 1.0, 5.0, 15.0)
SIXTEEN = (1.0,) * 8 + (5.0,) * 4 + (15.0,) * 4
WAITS = {"off": "spinning", "doorbell": "sleeping"}
CURVE = {"off": (1.0, 1.25, 1.5, 2.0, 3.0, 0.0), "doorbell": (1.0, 2.0, 0.0)}
"""Limits over requests, by the wait; 0 is none."""
SHORT = 10_000  # microseconds: a period a tenth of the kernel's
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
    for name, proportional in (("equal", False), ("proportional", True)):
        run = Run(large, requests(setting, SIXTEEN, proportional), wait="doorbell", apart=True)
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
            made.append(Finding(what, "x", row, theirs.get(key), group=f"time, {words}"))
    row = ratio(
        measured, "16 ranks, proportional; sleeping", "16 ranks, equal; sleeping", "seconds"
    )
    note = f"{16 / setting.place.cores:g} ranks on each core; spinning ones would hardly move"
    made.append(Finding("time: proportional / equal requests, 16 ranks; sleeping", "x", row,
                        theirs["sixteen ranks"], note=note, group="time, sleeping"))  # fmt: skip
    sparse = cpu_requests.proportional(SIXTEEN, 16_000)[0] / 1000
    made.append(Finding("request of a sparse rank / 1000m, 16 ranks", "x", Row("", (sparse,)),
                        theirs["sparse request"], note="calculated, as in the paper"))  # fmt: skip
    why = "one machine; it needs ranks on several hosts"
    made.append(Finding("time on several hosts by TCP / on one", "x", None,
                        theirs["across hosts"], why))  # fmt: skip
    made += counters(measured)
    return made


def counters(measured: Measured) -> list[Finding]:
    """Time per iteration, throttling, switches and waits of each variant."""
    made = []
    for figure, what, unit in (
        ("seconds", "time per iteration", "s"),
        ("throttled", "periods throttled", "share"),
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
        for limit in (1.0, 2.0):
            run = Run(zones, fair, limit=limit, period=SHORT, apart=True)
            made[f"{_times(limit)}, period of 10 ms; spinning"] = functools.partial(
                one, setting, run
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
        made.append(Finding(f"time: {limit} / none; {words}", "x", row, number,
                            group=f"time / without a limit, {words}"))  # fmt: skip
    return [*made, *counters(measured)]


# --- phases ---


PHASES = ((1.0,) * 4, FOUR, (1.0, 1.0, 3.0, 6.0))
"""Weights of the start-up, the steady and the final phase."""


def phases_variants(setting: Setting) -> Variants:
    """Requests that stay, that change twice, and that change all the time."""
    need_groups(setting.place)
    zones = cut(setting, "phases", FOUR, setting.scale.refine)
    fair = requests(setting, FOUR, True)
    run = Run(zones, fair, wait="doorbell", apart=True)
    iterations = 3 * setting.scale.iterations

    def changed(every: int) -> Figures:
        state = {"phase": 0, "resizes": 0}

        def during(done: int, resize: Callable[[Sequence[int]], None]) -> None:
            phase = done // every
            if phase > state["phase"]:
                state["phase"] = phase
                state["resizes"] += 1
                weights = PHASES[phase % len(PHASES)]
                resize(cpu_requests.proportional(weights, budget(setting, 4)))

        seen = setting.place.measure([run], iterations, 3 * setting.scale.seconds, during)[0]
        resizes = float(state["resizes"])
        return {**seen.figures(), "resizes": resizes, "iterations": iterations, "restarts": 0.0}

    return {
        "fixed": functools.partial(changed, 10 * iterations),
        "three phases": functools.partial(changed, setting.scale.iterations),
        "a resize every 5 iterations": functools.partial(changed, 5),
    }


def phases_findings(setting: Setting, measured: Measured) -> list[Finding]:
    """What phases bring, what a resize costs, and that nothing was restarted."""
    theirs = published.of("phases")
    phases = ratio(measured, "three phases", "fixed", "seconds")
    often = ratio(measured, "a resize every 5 iterations", "fixed", "seconds")
    per_resize = [
        1000 * (after["seconds"] - before["seconds"]) * after["iterations"] / after["resizes"]
        for after, before in zip(measured["a resize every 5 iterations"], measured["fixed"])
    ]
    resizes = sum(int(one["resizes"]) for rows in measured.values() for one in rows)
    restarts = plain(measured, "a resize every 5 iterations", "restarts")
    note = f"{resizes} resizes; a simulation that ended would have ended the measurement"
    return [
        Finding("time, three phases / fixed requests", "x", phases, theirs["phases"]),
        Finding("time, a resize every 5 iterations / none", "x", often),
        Finding("what a resize adds to the ranks' time", "ms", Row("", tuple(per_resize))),
        Finding("restarts", "restarts", restarts, theirs["restarts"], note=note),
    ]
