# SPDX-License-Identifier: LGPL-3.0-or-later
"""The papers' numbers and ours in one self-contained HTML page, with plots of both.

Inputs: `Outcome`s. Output: the page's text, from the template `papers.html`; it has the looks and
the charts of a run's report. Invariants: no requests, no scripts; what was not measured is there,
with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jinja2
from markupsafe import Markup

from dovetail import __version__
from dovetail.bench.papers import allocation, published
from dovetail.bench.papers.findings import (
    CONFIRMED,
    DISTURBED,
    LARGER,
    NOT_SEEN,
    OPPOSITE,
    SMALLER,
    VERDICTS,
    Finding,
)
from dovetail.report import charts, html
from dovetail.report.charts import Bar, Curve

CLASSES = {CONFIRMED: "confirmed", SMALLER: "smaller", LARGER: "larger", OPPOSITE: "opposite",
           NOT_SEEN: "unseen"}  # fmt: skip
WORTH_SAYING = 0.1  # cores
_LONGEST = 50  # letters of a label in a chart
_BARS = 24  # of a chart
AXES = {"speed-up": "ranks", allocation.CURVES: "limit / request"}
"""What the axis of a chart is, by how its name begins; else it is the simulations at once."""


@dataclass(frozen=True)
class Outcome:
    """One experiment: its name and title, what was found, and the command that finds it again.

    `others` is how many cores others used before measurements of the round with most of that, and
    `disturbed` the rounds, from 1, with too much of it.
    """

    name: str
    title: str
    findings: tuple[Finding, ...]
    command: str
    others: float = 0.0
    disturbed: tuple[int, ...] = ()


def page(outcomes: Sequence[Outcome], machine: str) -> str:
    """The whole page."""
    loader = jinja2.PackageLoader("dovetail.bench.papers", ".")
    compared = [f for one in outcomes for f in one.findings if f.published is not None]
    counts = Counter(f.verdict for f in compared)
    used = {f.published.paper for f in compared if f.published}
    return html.templates(loader).get_template("papers.html").render(
        version=__version__,
        headline=headline(compared),
        machine=machine,
        counts=[(word, counts[word]) for word in VERDICTS if counts[word]],
        papers=[(number, title, published.MACHINES[number])
                for number, title in published.PAPERS.items() if number in used],
        experiments=[_experiment(one) for one in outcomes],
    )  # fmt: skip


def disturbance(one: Outcome) -> str:
    """How much others took, if that is worth a word."""
    if one.others <= WORTH_SAYING:
        return ""
    said = f"Others used up to {one.others:.1f} cores just before measurements"
    if one.disturbed:
        said += f", a quarter of all or more in round {', '.join(map(str, one.disturbed))}"
    return said


def headline(compared: Sequence[Finding]) -> str:
    """The page's main finding, one line."""
    judged = [f for f in compared if f.verdict in CLASSES]
    if not judged and any(f.verdict == DISTURBED for f in compared):
        return "No verdict on the papers' numbers: the machine was not at rest"
    if not judged:
        return "None of the papers' numbers could be compared here"
    seen = sum(f.verdict == CONFIRMED for f in judged)
    return f"{seen} of {len(judged)} comparisons with the papers' numbers are confirmed here"


def words(value: float, unit: str) -> str:
    """A figure with its unit, in three digits."""
    said = _digits(value)
    return f"{said} {unit}".strip() if unit != "share" else f"{100 * value:.3g} %"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def row(finding: Finding) -> dict[str, str]:
    """A finding as cells."""
    one, ours = finding.published, finding.row
    theirs = words(one.value, one.unit) if one and one.value is not None else ""
    low, high = ours.spread if ours else (0.0, 0.0)
    scale = 100 if finding.unit == "share" else 1
    source = f"{one.where}, arXiv:{one.paper}" if one else ""
    if one and one.source:
        source += f"; number from {one.source}"
    remark = "; ".join(filter(None, [finding.why, finding.note, source]))
    return {
        "what": finding.what,
        "theirs": theirs,
        "ours": words(ours.median, finding.unit) if ours else "",
        "spread": f"{_digits(scale * low)} to {_digits(scale * high)}"
        if ours and len(ours.values) > 1
        else "",
        "n": str(len(ours.values)) if ours else "",
        "ratio": f"{finding.ratio:.2f}" if finding.ratio is not None else "",
        "verdict": "" if finding.detail else finding.verdict,
        "kind": CLASSES.get(finding.verdict, "unmeasured") if one else "unmeasured",
        "remark": remark,
    }


def _experiment(one: Outcome) -> Mapping[str, object]:
    return {
        "name": one.name,
        "title": one.title,
        "command": one.command,
        "disturbed": disturbance(one),
        "findings": [row(f) for f in one.findings if not f.detail],
        "more": [row(f) for f in one.findings if f.detail],
        "charts": plots([f for f in one.findings if not f.detail]),
        "more_charts": plots([f for f in one.findings if f.detail]),
    }


def plots(findings: Sequence[Finding]) -> list[tuple[str, Markup]]:
    """A chart for each group that was measured: (title, drawing)."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.group and finding.row:
            groups.setdefault(finding.group, []).append(finding)
    return [(name, _curve(name, some) if some[0].at is not None else _bars(name, some[:_BARS]))
            for name, some in groups.items()]  # fmt: skip


def _bars(name: str, findings: Sequence[Finding]) -> Markup:
    made = []
    factor = 100.0 if findings[0].unit == "share" else 1.0
    for finding, label in zip(findings, labels([one.what for one in findings])):
        assert finding.row is not None
        low, high = finding.row.spread
        ours = factor * finding.row.median
        bars = [Bar(label, ((ours, "own"),), _digits(ours), (factor * low, factor * high))]
        theirs = finding.published.value if finding.published else None
        if theirs is not None:
            bars.append(Bar("paper", ((factor * theirs, "other"),), _digits(factor * theirs)))
        made.append(("", bars))
    unit = "%" if findings[0].unit == "share" else findings[0].unit
    return charts.bars(made, unit, name)


def labels(whats: Sequence[str]) -> list[str]:
    """What tells these apart: without the words with which all of them begin or end."""
    first, last = 0, 0
    if len(whats) > 1:
        split = [what.split(" ") for what in whats]
        least = min(map(len, split)) - 1
        while first < least and len({tuple(some[: first + 1]) for some in split}) == 1:
            first += 1
        while last < least - first and len({tuple(some[-last - 1 :]) for some in split}) == 1:
            last += 1
        whats = [" ".join(some[first : len(some) - last]).rstrip(",;:") for some in split]
    return [what if len(what) <= _LONGEST else what[: _LONGEST - 1] + "…" for what in whats]


def _curve(name: str, findings: Sequence[Finding]) -> Markup:
    """Ours as points over N, the paper's as a line."""
    points, theirs = [], []
    for finding in findings:
        assert finding.row is not None
        assert finding.at is not None
        points.append((finding.at, finding.row.median, *finding.row.spread))
        number = finding.published
        if number is not None and number.value is not None:
            theirs.append((finding.at, number.value, number.value, number.value))
    unit = findings[0].unit
    one = ((1.0, 1.0, 1.0, 1.0),) if unit == "x" and min(points)[0] > 1 else ()
    levels = [(1.0, "alone" if one else "")] if unit == "x" else []
    line = (*one, *theirs) if theirs else ()
    if len(line) == 1:  # no line
        levels.append((line[0][1], "paper"))
    axes = [axis for start, axis in AXES.items() if name.startswith(start)]
    axis = axes[0] if axes else "N, simulations at once"
    return charts.against_n(Curve((*one, *points), line, tuple(levels), unit, axis), name)
