# SPDX-License-Identifier: LGPL-3.0-or-later
"""`dovetail predict`: what N simulations at once would cost and gain.

Input: the time of one simulation alone, its ranks, the vCPUs, and beta or measured times.
Output: a table over N with the knee marked; predictions, and said to be such.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterable

from dovetail.core import units
from dovetail.core.errors import BadInput
from dovetail.core.throughput_model import MAX_SIMS, Model, check_need

HELP = "predict the throughput of N simulations at once"


def configure(parser: argparse.ArgumentParser) -> None:
    """Options; see dovetail-predict(1)."""
    parser.add_argument(
        "--t1", type=float, required=True, metavar="SECONDS", help="time of one simulation alone"
    )
    parser.add_argument("--ranks", type=int, required=True, help="MPI ranks of one simulation")
    parser.add_argument("--vcpus", type=float, required=True, help="vCPUs shared by all")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--beta", type=float, help="the model's parameter, if it is known")
    source.add_argument(
        "--measured",
        action="extend",
        nargs="+",
        metavar="N:SECONDS",
        help="measured times of N simulations at once, to fit beta to",
    )
    parser.add_argument(
        "--need", type=float, metavar="CORES", help="cores that one simulation keeps busy alone"
    )
    parser.add_argument(
        "--sims", default="1..8", metavar="A..B", help="which N (default %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the table; 0."""
    first, last = _parse_sims(args.sims)
    measured: dict[int, float] = {}
    if args.measured is not None:
        measured = _parse_measured(args.measured)
        model = Model.fit(args.t1, args.ranks, args.vcpus, measured, args.need)
    else:
        model = Model(args.t1, args.ranks, args.vcpus, args.beta, args.need)
    check_need(args.need, args.vcpus)
    knee = model.knee(last)
    if args.json:
        print(json.dumps(_as_json(model, range(first, last + 1), knee)))
        return 0
    print(_heading(model))
    if model.need is not None and model.need < args.need:
        print(f"(a measured time shows that it needs less than the {args.need:g} given)")
    print(f"{'N':>6} {'makespan s':>12} {'gain':>7} {'efficiency':>10}", end="")
    print(f" {'95 % band s':>23} {'measured s':>11}" if measured else "")
    for n in range(first, last + 1):
        line = f"{n:>6} {_seconds(model.makespan(n)):>12}"
        line += f" {model.gain(n):>7.2f} {model.efficiency(n):>10.2f}"
        if measured:
            low, high = map(_seconds, model.band(n))
            line += f" {f'{low} to {high}':>23} "
            line += f"{_seconds(measured[n]) if n in measured else '':>11}"
        print((line + ("  <- knee" if n == knee else "")).rstrip())
    return 0


def _seconds(value: float) -> str:
    """For the table; days too are whole seconds, and not 1.728e+05."""
    return units.rounded(value, 5)


def _heading(model: Model) -> str:
    """What the numbers are and where they come from, one or two lines."""
    error = model.beta_error
    fitted = "" if error is None else f" +- {error:.2g}"
    text = f"prediction, not a measurement: beta {model.beta:.3g}{fitted}"
    if model.rms_error is not None:
        text += f", rms error {model.rms_error:.1%} over {model.points} measured"
    if model.need is None:
        return f"{text}\nunknown CPU need: the cores are taken never to saturate (see --need)"
    return f"{text}\n{model.need:.3g} cores needed by each: saturated beyond " + (
        f"N = {math.floor(model.vcpus / model.need + 1e-9)}"
    )


def _as_json(model: Model, sims: Iterable[int], knee: int) -> dict[str, object]:
    """The same as the table, for programs."""
    rows = []
    for n in sims:
        row: dict[str, object] = {
            "n": n,
            "makespan_s": model.makespan(n),
            "gain": model.gain(n),
            "efficiency": model.efficiency(n),
        }
        if model.points:
            row["band_s"] = model.band(n)
        rows.append(row)
    return {
        "kind": "prediction",
        "beta": model.beta,
        "beta_error": model.beta_error,
        "rms_error": model.rms_error,
        "need": model.need,
        "knee": knee,
        "sims": rows,
    }


def _parse_sims(text: str) -> tuple[int, int]:
    """`1..8` or `4` as the first and the last N."""
    match = re.fullmatch(r"(\d{1,6})(?:\.\.(\d{1,6}))?", text.strip(), re.ASCII)
    if match:
        first, last = int(match[1]), int(match[2] or match[1])
        if 1 <= first <= last <= MAX_SIMS:
            return first, last
    raise BadInput(f"--sims: {text!r} is not a range like 1..8 (from 1 to {MAX_SIMS})")


def _parse_measured(words: list[str]) -> dict[int, float]:
    """`2:1410 3:1446` (spaces or commas between) as {2: 1410.0, 3: 1446.0}."""
    measured: dict[int, float] = {}
    for word in re.split(r"[\s,]+", ",".join(words).strip(" ,")):
        n, _, seconds = word.partition(":")
        try:
            count, value = int(n), float(seconds)
        except ValueError:
            raise BadInput(f"--measured: {word!r} is not N:SECONDS like 2:1410") from None
        if count in measured:
            raise BadInput(f"--measured: N={count} is given twice; give one (mean) time")
        measured[count] = value
    return measured
