# SPDX-License-Identifier: LGPL-3.0-or-later
"""The report's charts as inline SVG.

In: plain numbers and names. Out: `Markup` of one `<svg>` each, without scripts, fonts or
links, coloured by the page's CSS variables so that it follows light and dark.

Drawn here and not by a plotting library because the page must be small, follow the reader's
colour scheme, and stay legible on a phone: a panel is 460 units wide with 16 unit text,
which a 390 px screen shows at 11 px or more.

Invariants: every string is escaped by `Markup`; the number of elements is bounded by the
caller's rows and not by the length of a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

PANEL = 460.0
TEXT = 16.0


def element(name: str, *inside: str, **attributes: object) -> Markup:
    """One element; `_` in attribute names stands for `-`, text and values are escaped."""
    words = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _short(value))
        for key, value in attributes.items()
    )
    body = Markup("").join(inside)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), words, body)


def _short(value: object) -> object:
    return f"{value:.1f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


def svg(width: float, height: float, label: str, *inside: str) -> Markup:
    """A drawing that fills its box; `label` is what a screen reader says."""
    box = f"0 0 {width:g} {height:g}"
    return element("svg", *inside, viewBox=box, role="img", aria_label=label, class_="chart")


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> Markup:
    """One line of text, its baseline at y."""
    return element("text", words, x=x, y=y, text_anchor=anchor, class_=kind or "label")


def rect(x: float, y: float, w: float, h: float, kind: str, tip: str = "") -> Markup:
    """A box; `tip` appears when the pointer rests on it."""
    inside = (element("title", tip),) if tip else ()
    return element("rect", *inside, x=x, y=y, width=max(0.5, w), height=h, class_=kind)


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    """A straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)


def path(points: Sequence[tuple[float, float]], kind: str, close: bool = False) -> Markup:
    """A line through points, or with `close` an area."""
    steps = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return element("path", d=f"M{steps}{'Z' if close else ''}", class_=kind)


def ticks(top: float, most: int = 5) -> list[float]:
    """Round numbers from 0 to at least `top`, at most `most` + 2 of them."""
    if not math.isfinite(top) or top <= 0:
        return [0.0, 1.0]
    raw = top / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    return [n * step for n in range(math.ceil(top / step - 1e-6) + 1)]


@dataclass(frozen=True)
class Bar:
    """One bar of `bars`: a length made of parts, each (value, CSS class), and a remark.

    `spread` draws a whisker from lowest to highest; a bar without parts only has its remark.
    """

    label: str
    parts: tuple[tuple[float, str], ...]
    remark: str = ""
    spread: tuple[float, float] | None = None


def bars(groups: Sequence[tuple[str, Sequence[Bar]]], unit: str, label: str) -> Markup:
    """Horizontal bars under group headings, with a common axis from zero."""
    reach = [sum(v for v, _ in bar.parts) for _, some in groups for bar in some]
    reach += [bar.spread[1] for _, some in groups for bar in some if bar.spread]
    marks = ticks(max(reach, default=1.0), 4)
    # The remarks stand after the bars, so the longest bar leaves room for the longest one.
    remarks = [len(bar.remark) for _, some in groups for bar in some if bar.parts]
    left, right = 4.0, max(PANEL / 2, PANEL - 10 - 0.65 * TEXT * max(remarks, default=0))
    scale = (right - left) / marks[-1]
    drawn: list[Markup] = []
    y = 4.0
    for heading, some in groups:
        if heading:
            y += 20
            drawn.append(text(left, y, heading, kind="strong"))
            y += 6
        for bar in some:
            drawn.append(text(left, y + 15, bar.label))
            y += 21
            if bar.parts:
                drawn += _bar(bar, left, y, scale)
                y += 24
        y += 4
    grid = []
    for value in marks:
        x = left + value * scale
        grid.append(line(x, 4, x, y, "grid"))
        anchor = "start" if value == 0 else "middle"
        grid.append(text(x, y + 18, f"{value:g}", anchor, "tick"))
    drawn.append(text(left, y + 40, unit, kind="axis"))
    return svg(PANEL, y + 48, label, *grid, *drawn)


def _bar(bar: Bar, left: float, y: float, scale: float) -> list[Markup]:
    drawn, x = [], left
    for value, kind in bar.parts:
        drawn.append(rect(x, y, value * scale, 16, kind))
        x += max(0.0, value) * scale  # what is below 0 has no length, but its number
    if bar.spread:
        low, high = (left + max(0.0, value) * scale for value in bar.spread)
        drawn.append(line(low, y + 8, high, y + 8, "whisker"))
        drawn += [line(end, y + 3, end, y + 13, "whisker") for end in (low, high)]
        x = max(x, high)
    drawn.append(text(x + 6, y + 14, bar.remark, kind="label"))
    return drawn


@dataclass(frozen=True)
class Curve:
    """What `against_n` draws: measured points (n, value, low, high), the model's middle and
    band as (n, middle, low, high), level lines (value, words), and what n is."""

    points: tuple[tuple[float, float, float, float], ...]
    model: tuple[tuple[float, float, float, float], ...]
    levels: tuple[tuple[float, str], ...]
    unit: str
    axis: str = "N, simulations at once"


def against_n(curve: Curve, label: str) -> Markup:
    """Measured points and the model's band against N, the simulations at once, or another n."""
    left, right, top, bottom = 52.0, PANEL - 14, 30.0, 280.0
    last = max([p[0] for p in curve.points] + [m[0] for m in curve.model] + [2.0])
    highest = max(
        [p[3] for p in curve.points] + [m[3] for m in curve.model] + [v for v, _ in curve.levels]
    )
    marks = ticks(highest * 1.05)

    def at(n: float, value: float) -> tuple[float, float]:
        x = left + 16 + (right - left - 32) * (n - 1) / (last - 1)
        return x, bottom - (bottom - top) * min(value, marks[-1]) / marks[-1]

    drawn = []
    for value in marks:
        y = at(1, value)[1]
        drawn += [
            line(left, y, right, y, "grid"),
            text(left - 6, y + 5, f"{value:g}", "end", "tick"),
        ]
    for mark in range(1, int(last) + 1, max(1, math.ceil(last / 8))):
        drawn.append(text(at(mark, 0)[0], bottom + 20, str(mark), "middle", "tick"))
    if curve.model:
        upper = [at(n, high) for n, _, _, high in curve.model]
        lower = [at(n, low) for n, _, low, _ in reversed(curve.model)]
        drawn.append(path([*upper, *lower], "band", close=True))
        drawn.append(path([at(n, middle) for n, middle, _, _ in curve.model], "model"))
    for value, words in curve.levels:
        y = at(1, value)[1]
        drawn += [line(left, y, right, y, "level"), text(right, y - 5, words, "end", "small")]
    free = 0.0
    for n, value, low, high in curve.points:
        x, y = at(n, value)
        drawn += [line(x, at(n, low)[1], x, at(n, high)[1], "whisker")]
        drawn.append(element("circle", cx=x, cy=y, r=6, class_="point"))
        if x >= free:
            side, anchor = (-9, "end") if n == last else (9, "start")
            below = 22 if y < bottom - 24 else -10  # where marks of the axis stand
            drawn.append(text(x + side, y + below, f"{value:.2f}", anchor, "value"))
            free = x + 52
    drawn.append(text(4, 16, curve.unit, kind="axis"))
    drawn.append(text(right, bottom + 42, curve.axis, "end", "axis"))
    return svg(PANEL, bottom + 50, label, *drawn)
