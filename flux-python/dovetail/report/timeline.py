# SPDX-License-Identifier: LGPL-3.0-or-later
"""The report's timeline: who ran when, in which phase, and what was decided.

In: a run's `History`. Out: `Markup` of one SVG, for a wide screen or for a phone.

Invariants: at most `ROWS` simulations have a bar of their own, those with something to tell
first; how many ran at once is drawn for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from dovetail.report import charts
from dovetail.report.charts import element, line, path, rect, svg, text
from dovetail.report.history import History, Track

ROWS = 30
MARKS = 200
STEPS = 500

GLYPHS = {
    "resize": "▲", "refused": "△", "phase": "▸", "admit": "+", "rollback": "↩", "capacity": "◆",
}  # fmt: skip
"""What stands for a decision in the timeline."""


def rows(history: History) -> list[Track]:
    """The simulations that get a bar, in the order of their start."""
    told = {n for mark in history.marks if mark.what == "rollback" for n in mark.names}
    started = [track for track in history.tracks if track.attempts]

    def weight(track: Track) -> tuple[bool, float]:
        plain = track.state == "done" and len(track.attempts) == 1 and track.spec.name not in told
        return plain, track.attempts[0].launch

    return sorted(sorted(started, key=weight)[:ROWS], key=lambda t: t.attempts[0].launch)


def timeline(history: History, narrow: bool) -> Markup:
    """The whole run over time; `narrow` puts names above the bars."""
    width = 340.0 if narrow else 1000.0
    left, right = (6.0, width - 10) if narrow else (170.0, width - 16)
    pitch = 52.0 if narrow else 36.0
    marks = charts.ticks(history.end, 4 if narrow else 8)
    # The axis ends with the run: a round number beyond it would be empty paper.
    end = max(history.end, 1e-6)
    scale = (right - left) / end
    shown = rows(history)
    top = 96.0
    bottom = top + pitch * len(shown) + 6
    drawn: list[Markup] = []
    for value in (one for one in marks if one <= end * 1.0001):
        x = left + value * scale
        drawn.append(line(x, 24, x, bottom, "grid"))
        anchor = "end" if x > right - 14 else "start" if value == 0 and narrow else "middle"
        drawn.append(text(x, bottom + 18, f"{value:g}", anchor, "tick"))
    drawn += _at_once(history, left, scale)
    for number, track in enumerate(shown):
        drawn += _row(track, left, scale, top + pitch * number, narrow)
    drawn += _decisions(history, shown, left, scale, top, pitch, narrow)
    drawn.append(text(right, bottom + 38, "time since the start of the run, s", "end", "axis"))
    label = f"Timeline of {len(shown)} simulations over {history.end:.0f} seconds"
    return svg(width, bottom + 46, label, *drawn)


def _at_once(history: History, left: float, scale: float) -> list[Markup]:
    """How many simulations run, as steps; thinned by keeping each stretch's highest."""
    spells = [(spell.start, spell.end, len(spell.running)) for spell in history.spells]
    stride = max(1, -(-len(spells) // STEPS))
    points = [(left, 84.0)]
    most = max((n for _, _, n in spells), default=0) or 1
    for at in range(0, len(spells), stride):
        some = spells[at : at + stride]
        y = 84 - 50 * max(n for _, _, n in some) / most
        points += [(left + some[0][0] * scale, y), (left + some[-1][1] * scale, y)]
    points.append((points[-1][0], 84.0))
    words = f"simulations at once, at most {most}"
    return [path(points, "once", close=True), text(left, 18, words, kind="axis")]


def _row(track: Track, left: float, scale: float, y: float, narrow: bool) -> list[Markup]:
    name = track.spec.name
    # Names of a family differ at their ends.
    short = name if len(name) <= 18 else f"{name[:9]}…{name[-8:]}"
    drawn = [text(left, y + 14, short) if narrow else text(left - 8, y + 28, short, "end")]
    y += _bar_top(narrow)
    for one in track.attempts:
        until = one.start if one.start is not None else one.end
        if until is not None:
            drawn.append(
                line(left + one.launch * scale, y + 9, left + until * scale, y + 9, "wait")
            )
    for letter, start, end in track.phases:
        x, w = left + start * scale, (end - start) * scale
        tip = f"{name}: phase {letter}, {start:.1f} to {end:.1f} s"
        drawn.append(rect(x, y, w, 18, f"phase{letter}", tip))
        if w > 16:
            drawn.append(text(x + w / 2, y + 14, letter, "middle", "letter"))
    for start, end in track.suspended:
        x, w = left + start * scale, (end - start) * scale
        drawn.append(rect(x, y, w, 18, "suspended", "suspended"))
    last = track.attempts[-1]
    if track.state == "failed" and last.end is not None:
        drawn.append(text(left + last.end * scale, y + 15, "✕", "middle", "failed"))
    return drawn


def _bar_top(narrow: bool) -> float:
    """Where a row's bar begins: under the marks, and on a phone under the name too."""
    return 30.0 if narrow else 14.0


def _decisions(
    history: History,
    shown: Sequence[Track],
    left: float,
    scale: float,
    top: float,
    pitch: float,
    narrow: bool,
) -> list[Markup]:
    place = {track.spec.name: number for number, track in enumerate(shown)}
    drawn = []
    known = [
        mark
        for mark in history.marks
        if mark.what in GLYPHS and (not mark.names or place.keys() & set(mark.names))
    ]
    for mark in known[:MARKS]:
        x = left + mark.t * scale
        numbers = [place[name] for name in mark.names if name in place]
        for number in numbers if numbers else [-1]:
            y = top + pitch * number + _bar_top(narrow) - 2 if number >= 0 else top
            tip = element("title", f"{mark.t:.1f} s: {mark.what}: {mark.why}")
            glyph = GLYPHS[mark.what]
            drawn.append(element("text", tip, glyph, x=x, y=y, text_anchor="middle", class_="mark"))
    return drawn
