# SPDX-License-Identifier: LGPL-3.0-or-later
"""The report of a run: one HTML file that needs nothing else.

In: a run's `Summary` and `History`. Out: the page's text, from the template `report.html`.

Invariants: no requests, no scripts; what comes from the log is escaped by Jinja2 or
`Markup`; the page is bounded (2 MB for 1,000 simulations) by showing the rows that tell
most and saying how many there are. Each chart's title says what it shows.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from dovetail.core.errors import BadInput, WorkFailed
from dovetail.core.units import progress, rounded
from dovetail.host.private_files import looking, replaceable, write_whole
from dovetail.report import advise, charts, plan_phases, time_spent
from dovetail.report.alternatives import DOVETAIL, FEWER, NAIVE, SEQUENTIAL
from dovetail.report.charts import Bar, Curve
from dovetail.report.figures import FamilyFigures, loads_on
from dovetail.report.history import Array, History
from dovetail.report.summary import HEADINGS, Simulation, Summary, figure, number
from dovetail.report.timeline import GLYPHS, rows, timeline
from dovetail.report.verdict import SAME, as_quick

TABLE_ROWS = 200
FAMILIES = 12
TABLE_FAMILIES = 50
ADVICE = 40
RANK_ROWS = 16

NAMES = {
    DOVETAIL: "makespan_s",
    SEQUENTIAL: "sequential_s",
    NAIVE: "naive_s",
    FEWER: "fewer_ranks_s",
}
PHASES = {
    "A": "baseline run: its own rate and load are measured",
    "C": "pack: on trial beside the others",
    "D": "fairness: runs on, and must not become too slow",
}


def publish(directory: pathlib.Path, summary: Summary, history: History) -> pathlib.Path:
    """Write `report.html` and `summary.json` into a run's directory; returns the page's path.

    Raises as `replace_file` does.
    """
    text = json.dumps(summary.to_json(), indent=1, allow_nan=False)
    replace_file(directory / "summary.json", text + "\n")
    path = directory / "report.html"
    replace_file(path, page(summary, history))
    return path


def replace_file(path: pathlib.Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises BadInput where `path` cannot be a file, WorkFailed where it cannot be written.
    """
    with looking(path):
        right = replaceable(path)
    if not right:
        raise BadInput(f"{path}: not a file in an existing directory")
    try:
        write_whole(path, text)
    except OSError as error:
        raise WorkFailed(f"{path}: {error.strerror}") from error


@functools.cache  # with the templates that were read
def templates(*others: jinja2.BaseLoader) -> jinja2.Environment:
    """Where templates are found: those of this package, and what others have."""
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader("dovetail.report", "."), *others]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=number, figure=figure, progress=progress)
    return environment


def page(summary: Summary, history: History) -> str:
    """The report as one HTML document."""
    decisions = [mark for mark in history.marks if mark.what != "profile" or mark.why]
    advice = advise.advise(advise.from_summary(summary), summary.cores)
    return (
        templates()
        .get_template("report.html")
        .render(
            summary=summary,
            headline=headline(summary),
            phases=PHASES,
            glyphs=GLYPHS,
            headings=HEADINGS,
            timelines=[timeline(history, narrow) for narrow in (False, True)],
            timeline_title=_timeline_title(summary),
            shown=len(rows(history)),
            families=[_family(one, summary.cores) for one in summary.families[:FAMILIES]],
            simulations=_worth_showing(summary.simulations),
            time_spent=time_spent.table(_worth_showing(summary.simulations), summary.efficiency),
            phase_headings=plan_phases.HEADINGS,
            plan_phases=plan_phases.table((one.name, one.phases) for one in summary.simulations)[
                :TABLE_ROWS
            ],
            hindrances=time_spent.sentences(summary.simulations)[:ADVICE],
            decisions=decisions[:TABLE_ROWS],
            decision_count=len(decisions),
            advice=advice[:ADVICE],
            advice_count=len(advice),
            shown_families=TABLE_FAMILIES,
        )
    )


def headline(summary: Summary) -> str:
    """The page's main finding, one line."""
    counts = summary.counts
    total = len(summary.simulations)
    simulations = f"{total:,} simulation{'s' if total != 1 else ''}"
    gain = summary.totals.throughput_gain
    if counts.get("done", 0) < total:
        parts = [f"{n:,} {state}" for state, n in sorted(counts.items())]
        return f"{simulations}: {', '.join(parts)}"
    cores = f"{summary.cores:g} core{'s' if summary.cores != 1 else ''}"
    if gain.value is None:
        return f"{simulations} done on {cores}"
    about = "about " if gain.source == "predicted" else ""
    return (
        f"{simulations} on {cores}: {about}{gain.value:.2f} times the throughput of "
        "one after the other"
    )


def _timeline_title(summary: Summary) -> str:
    taken_back = f", {summary.rollbacks} taken back" if summary.rollbacks else ""
    return (
        f"Up to {summary.n_max} simulations ran at once: {summary.admissions} "
        f"admission{'s' if summary.admissions != 1 else ''}{taken_back}, "
        f"{summary.resizes} resize{'s' if summary.resizes != 1 else ''}"
    )


def _worth_showing(simulations: Sequence[Simulation]) -> list[Simulation]:
    """All if they fit; else those that did not simply end well first, in the plan's order."""
    if len(simulations) <= TABLE_ROWS:
        return list(simulations)
    order = sorted(simulations, key=lambda one: one.state == "done" and not one.restarts)
    kept = {one.name for one in order[:TABLE_ROWS]}
    return [one for one in simulations if one.name in kept]


# --- the charts of one family ---


Chart = tuple[str, Markup]
Guess = tuple[tuple[int, float, float, float], ...]


def _family(family: FamilyFigures, cores: float) -> dict[str, Any]:
    """What the template needs for a family: its titles and charts."""
    guess = _guess(family, cores)
    return {
        "family": family,
        "alternatives": _alternatives(family),
        "ranks": _ranks(family, cores),
        "throughput": _throughput(family, guess),
        "slowdown": _slowdown(family, guess),
    }


def _alternatives(family: FamilyFigures) -> Chart | None:
    """The makespans beside each other, None if none is known."""
    if all(getattr(family.totals, key).value is None for key in NAMES.values()):
        return None
    bars = []
    for name, key in NAMES.items():
        one = getattr(family.totals, key)
        label = "Dovetail" if name == DOVETAIL else name
        if one.value is None:
            bars.append(Bar(f"{label}: {_shorter(one.how)}", ()))
            continue
        predicted = one.source == "predicted"
        kind = "predicted" if predicted else "own" if name == DOVETAIL else "other"
        remark = f"{'~' if predicted else ''}{one.value:.1f} s"
        label += " (predicted)" if predicted else ""
        bars.append(Bar(label, ((one.value, kind),), remark, one.spread))
    label = f"{family.name}: makespans"
    return _winner(family), charts.bars([("", bars)], "time for the whole queue, s", label)


def _winner(family: FamilyFigures) -> str:
    best = family.verdict.best
    if not best:
        return "What is known of the alternatives"
    if best != DOVETAIL:
        predicted = getattr(family.totals, NAMES[best]).source == "predicted"
        return f"{'Predicted to be the quickest' if predicted else 'Quickest'}: {best}"
    name, one = as_quick(family.totals)
    if name:
        return f"As quick as {name}{' is predicted to be' if one.source == 'predicted' else ''}"
    sources = {getattr(family.totals, NAMES[one]).source for one in (SEQUENTIAL, NAIVE, FEWER)}
    if "measured" in sources:
        return "Dovetail was the quickest"
    if "predicted" in sources:
        return "Dovetail was quicker than is predicted of the others"
    return "What is known of the alternatives"


def _shorter(words: str) -> str:
    words = words.split(";")[0]
    return words if len(words) <= 40 else words[:39] + "…"


def _ranks(family: FamilyFigures, cores: float) -> Chart | None:
    """Duty cycle and CPU of each rank: (title, chart), None if nothing was measured."""
    # Of each kind the first, which may be on other ranks than that of another kind.
    loads = {load.kind: load for load in reversed(family.loads)}
    alone = loads.get("spinning") or loads.get("blocking")
    base = alone or loads.get("packed")
    if base is None:
        return None
    loads = {load.kind: load for load in loads_on(family.loads, len(base.cpu))}
    wall = base.useful + base.mpi
    duty = base.useful / np.where(wall > 0, wall, 1.0)
    where = "alone" if alone else "packed"
    lightest = int(np.argmin(duty))
    # One that shares its core may be without it.
    does = "computes" if alone and len(duty) <= cores else "is outside MPI"
    title = f"Run {where}, rank {lightest} {does} {duty[lightest]:.0%} of the time"
    if len(duty) > 1 and duty.max() - duty.min() < 0.05:
        title = f"Run {where}, every rank {does} {duty.min():.0%} of the time or more"
    elif len(duty) > 1:
        title += f", rank {int(np.argmax(duty))} {duty.max():.0%}"
    unit, factor = ("s", 1.0) if wall.max() >= 1 else ("ms", 1000.0)
    groups = []
    for first, last in _bins(len(wall)):
        mean = {kind: _means(load.cpu, first, last) * factor for kind, load in loads.items()}
        useful, mpi = (_means(x, first, last) * factor for x in (base.useful, base.mpi))
        share = useful / (useful + mpi) if useful + mpi > 0 else 0.0
        some = [Bar(f"wall time, {where}", ((useful, "busy"), (mpi, "idle")), f"{share:.0%} busy")]
        for kind, words in CPU_WORDS.items():
            if kind in mean:
                some.append(Bar(words, ((mean[kind], "cpu"),), f"{rounded(mean[kind])} {unit}"))
        groups.append((f"rank {first}" if first == last else f"ranks {first} to {last}", some))
    label = f"{family.name}: time and CPU of each rank"
    return title, charts.bars(groups, f"per iteration, {unit}", label)


CPU_WORDS = {
    "spinning": "CPU, alone, waiting ranks spin",
    "yielding": "CPU, alone, waiting ranks yield",
    "blocking": "CPU, alone, waiting ranks sleep",
    "packed": "CPU, packed",
}


def _bins(count: int) -> list[tuple[int, int]]:
    """(first, last) of at most RANK_ROWS runs of ranks."""
    edges = np.linspace(0, count, min(count, RANK_ROWS) + 1).astype(int)
    return [(int(a), int(b) - 1) for a, b in zip(edges[:-1], edges[1:])]


def _means(values: Array, first: int, last: int) -> float:
    return float(values[first : last + 1].mean())


def _throughput(family: FamilyFigures, guess: Guess) -> Chart | None:
    points = family.points
    if not points:
        return None
    best = max(points, key=lambda one: one.throughput)
    packed = [one for one in points if one.n > 1]
    if packed and 1 / SAME <= max(one.throughput for one in packed) <= SAME:
        title = "Packing changes nothing: throughput is that alone"
    elif packed and best.n > 1:
        title = f"Throughput is highest at N={best.n}: {best.throughput:.2f} times that alone"
        title += f", over {best.seconds:.1f} s"
    elif packed:
        most = max(packed, key=lambda one: one.throughput)
        title = f"Packing loses: at most {most.throughput:.2f} times that alone, at N={most.n}"
    elif guess:
        title = f"Nothing was packed; the model expects {2 / guess[1][1]:.2f} at N=2"
    else:
        title = "Nothing was packed, so only N=1 is known"
    curve = Curve(
        tuple((p.n, p.throughput, *p.throughput_spread) for p in points),
        tuple((n, n / middle, n / high, n / low) for n, middle, low, high in guess),
        ((1.0, "one after the other"),),
        "throughput, alone = 1",
    )
    return title, charts.against_n(curve, f"{family.name}: throughput against N")


def _slowdown(family: FamilyFigures, guess: Guess) -> Chart | None:
    points = family.points
    if not points:
        return None
    worst = max(points, key=lambda one: (one.n > 1, one.slowdown))
    title = f"At N={worst.n} each runs {worst.slowdown:.2f} times slower than alone"
    if worst.n > 1 and worst.slowdown < SAME:
        title = f"Up to N={points[-1].n} none is slowed down"
    elif worst.n == 1:
        title = "Alone, nothing is slowed down"
        if guess:
            title += f"; two at once would run {guess[1][1]:.2f} times slower"
    curve = Curve(
        tuple((p.n, p.slowdown, *p.slowdown_spread) for p in points),
        guess,
        ((family.budget, "allowed"),) if guess or worst.n > 1 else (),
        "slowdown, alone = 1",
    )
    return title, charts.against_n(curve, f"{family.name}: slowdown against N")


def _guess(family: FamilyFigures, cores: float) -> Guess:
    """The model's (N, slowdown, lowest, highest): fitted, or with what is usual elsewhere."""
    if not family.points:
        return ()
    reach = range(1, max(point.n for point in family.points) + 3)
    if family.model:
        model = family.model
        return tuple((n, model.slowdown(n), *model.band(n)) for n in reach)
    known = advise.from_family(family, cores)
    if known is None:
        return ()
    models = advise.unfitted(known, cores)
    middle, low, high = models
    return tuple((n, middle.slowdown(n), low.slowdown(n), high.slowdown(n)) for n in reach)
