# SPDX-License-Identifier: LGPL-3.0-or-later
"""Figures with their provenance, and what they say in words.

In: the makespans of a queue under Dovetail and under the alternatives. Out: which was best,
and a plain sentence or two.

Invariants: pure. An alternative that wins is named, however the others look; one that is
only predicted to win is said to be so.
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.report.alternatives import DOVETAIL, FEWER, NAIVE, SEQUENTIAL

SAME = 1.03
"""Makespans within this factor count as equal: repeats on a quiet machine differ as much."""


@dataclass(frozen=True)
class Figure:
    """A number with its provenance.

    `source` is `measured`, `predicted` or, where `value` is None, empty; `how` says from what
    it was made, or why there is none; `spread` is (lowest, highest) of the repeats.
    """

    value: float | None = None
    source: str = ""
    how: str = ""
    spread: tuple[float, float] | None = None


@dataclass(frozen=True)
class Totals:
    """The figures of a family, or of the whole queue, seconds or ratios.

    `bound_s` is the CPU seconds that the work needs, over the cores: no way to run it can be
    quicker. `throughput_gain` is sequential over makespan, `bound_ratio` bound over makespan.
    """

    makespan_s: Figure
    sequential_s: Figure
    naive_s: Figure
    fewer_ranks_s: Figure
    bound_s: Figure
    throughput_gain: Figure
    bound_ratio: Figure


@dataclass(frozen=True)
class Verdict:
    """`best` is the quickest way to run the queue (empty if unknown), `words` says so.

    It is Dovetail unless another is quicker by more than `SAME`.
    """

    best: str
    words: str


def ratio(above: Figure, below: Figure) -> Figure:
    """One figure over another; it is only as good as the weaker, and keeps both spreads."""
    if above.value is None or not below.value:
        return Figure(how=above.how if above.value is None else below.how)
    source = "measured" if above.source == below.source == "measured" else "predicted"
    spread = None
    if above.spread and below.spread:
        spread = (above.spread[0] / below.spread[1], above.spread[1] / below.spread[0])
    how = f"{above.how}; over {below.how}"
    return Figure(above.value / below.value, source, how, spread)


def judge(totals: Totals, alike: int, of: int) -> Verdict:
    """Which way was best, and by how much.

    `alike` of all `of` simulations ran on as many ranks under Dovetail as in the way with fewer.
    """
    own = totals.makespan_s
    others = _others(totals)
    if own.value is None:
        return Verdict("", f"No comparison: {own.how}.")
    words = [f"Dovetail took {own.value:.1f} s{_against(totals)}."]
    best, least = "", own.value
    for source in ("measured", "predicted"):
        times = {name: one.value for name, one in others.items() if one.source == source}
        known = {name: time for name, time in times.items() if time is not None}
        first = min(known, key=lambda name: known[name], default="")
        if first and known[first] * SAME < least:
            words.append(_better(first, others[first], own.value))
            if first == FEWER and alike:
                same = f"Dovetail ran {alike} of {of} on as many ranks"
                if alike == of:
                    same += "; what is between them is the time that finding out took, and what "
                    same += "repeats differ by"
                words.append(f"{same}.")
            # What was measured stays the best, whatever a prediction promises.
            best, least = best or first, known[first]
    sequential = totals.sequential_s
    alone = of == 1  # beside which nothing can be packed
    if alone and not best:
        words += _next(totals)
    elif not best and sequential.value is not None and sequential.value < own.value * SAME:
        if sequential.source == "measured":
            words.append("Packing does not pay here: one after the other is as quick.")
        else:
            words.append(f"By that prediction packing does not pay here ({sequential.how}).")
    elif not best:
        words += _next(totals)
    return Verdict(best or DOVETAIL, " ".join(words))


def as_quick(totals: Totals) -> tuple[str, Figure]:
    """The quickest other way that Dovetail's own lead cannot be told from; empty if there is none.

    What was measured goes before what is predicted.
    """
    own, others = totals.makespan_s.value, _others(totals)
    for source in ("measured", "predicted"):
        times = {n: f.value for n, f in others.items() if f.source == source and f.value}
        name = min(times, key=lambda one: times[one], default="")
        if own and name and times[name] < own * SAME:
            return name, others[name]
    return "", Figure()


def _others(totals: Totals) -> dict[str, Figure]:
    return {
        SEQUENTIAL: totals.sequential_s,
        NAIVE: totals.naive_s,
        FEWER: totals.fewer_ranks_s,
    }


def _next(totals: Totals) -> list[str]:
    """What the quickest of the other ways took, where they were measured."""
    name, one = as_quick(totals)
    if name not in ("", SEQUENTIAL) and one.source == "measured":
        return [f"As quick: {name}, {one.value:.1f} s ({one.how})."]
    others = _others(totals)
    times = {n: f.value for n, f in others.items() if f.source == "measured" and f.value}
    if len(times) < 2:
        return []
    name = min(times, key=lambda one: times[one])
    return [f"The quickest other way, {name}, took {times[name]:.1f} s ({others[name].how})."]


def _against(totals: Totals) -> str:
    gain = totals.throughput_gain
    if gain.value is None or totals.sequential_s.value is None:
        return ""
    time = f"{totals.sequential_s.value:.1f} s, {gain.source}"
    if 1 / SAME <= gain.value <= SAME:
        return f", as long as one after the other ({time})"
    return f", {gain.value:.2f} times the throughput of one after the other ({time})"


def _better(name: str, one: Figure, own: float) -> str:
    assert one.value is not None
    factor = f"{own / one.value:.2f} times as fast"
    if one.source == "measured":
        return f"Better: {name}, {one.value:.1f} s, {factor} ({one.how})."
    return f"Probably better: {name}, {one.value:.1f} s, {factor} (predicted: {one.how})."
