#!/usr/bin/env python3
# SPDX-License-Identifier: LGPL-3.0-or-later
"""Feeds logs of LAMMPS to a model server, and compares its predictions with others.

    model_client.py URL learn LOG...                   teach the size and the cost of each
    model_client.py URL predict --output NAME LOG...   predict each cost from the size

The cost is the CPU time of a rank: how long a job takes on shared cores, its neighbours decide.
The second writes NAME.csv and NAME.svg, predicted against actual, and prints R squared of each
model. The logs given there must not have been learned, or R squared says nothing.
"""

import argparse
import csv
import json
import math
import re
import sys
import urllib.error
import urllib.request
from html import escape
from pathlib import Path

BOX = re.compile(r"^region box block 0 (\d+) 0 (\d+) 0 (\d+)$", re.M)
TIME = re.compile(r"^Loop time of ([\d.e+-]+) on", re.M)
USED = re.compile(r"^([\d.]+)% CPU use", re.M)
DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""The server is on these machines, and no proxy's, whatever http_proxy says."""
COLOURS = ("#1b6ca8", "#c7511f", "#3d8b40", "#8a4fa3", "#7a6a1f")


def ask(args, path, sample):
    """One request; its answer."""
    headers = {"Content-Type": "application/json"}
    if args.token:
        headers["Authorization"] = f"Bearer {args.token.read_text().strip()}"
    request = urllib.request.Request(args.url + path, json.dumps(sample).encode(), headers)
    with DIRECTLY.open(request, timeout=60) as answer:
        return json.load(answer)


def read(log):
    """What was asked of LAMMPS, and the CPU seconds that each of its ranks took on average."""
    text = log.read_text()
    box, time, used = (pattern.search(text) for pattern in (BOX, TIME, USED))
    if not (box and time and used):
        raise SystemExit(f"model_client: {log}: is no log of a finished LAMMPS job of in.lj")
    x, y, z = map(int, box.groups())
    size = {"one": 1, "cells": x * y * z / 1000, "x": x / 10, "y": y / 10, "z": z / 10}
    return size, float(time[1]) * float(used[1]) / 100


def r_squared(actual, predicted):
    """The share of the variance that is predicted; below zero, the mean would do better.

    No number where all jobs cost the same, as one alone does.
    """
    mean = sum(actual) / len(actual)
    missed = sum((a - p) ** 2 for a, p in zip(actual, predicted))
    variance = sum((a - mean) ** 2 for a in actual)
    return 1 - missed / variance if variance else math.nan


def plot(actual, guesses, scores):
    """Predicted against actual as SVG, with the line on which both are the same."""
    values = [*actual, *(guess for guessed in guesses.values() for guess in guessed)]
    low, high = min(0.0, *values), max(values)
    at = lambda value: 50 + 340 * (value - low) / (high - low or 1.0)  # noqa: E731
    parts = ['<path d="M50 390L390 50M50 50V390H390" fill="none" stroke="#888"/>',
             f'<text x="50" y="410">{low:.2g}</text><text x="390" y="410" text-anchor="end">'
             f'{high:.2g}</text><text x="220" y="430" text-anchor="middle">CPU seconds of'
             ' unseen LAMMPS jobs</text><text x="16" y="220" text-anchor="middle"'
             ' transform="rotate(-90 16 220)">CPU seconds predicted</text>']  # fmt: skip
    for number, (name, guessed) in enumerate(guesses.items()):
        colour = COLOURS[number % len(COLOURS)]
        parts += [f'<circle cx="{at(a):.1f}" cy="{440 - at(g):.1f}" r="5" fill="{colour}"/>'
                  for a, g in zip(actual, guessed)]  # fmt: skip
        parts.append(f'<text x="60" y="{66 + 20 * number}" fill="{colour}">{escape(name)}: '
                     f"R² {scores[name]:.3f}</text>")  # fmt: skip
    box = 'viewBox="0 0 440 440" font-family="sans-serif" font-size="14"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{"".join(parts)}</svg>\n'


def predict(args):
    """Predict, compare, draw."""
    samples = [read(log) for log in args.logs]
    answers = [ask(args, "/predict", {"x": x}) for x, _ in samples]
    actual = [y for _, y in samples]
    guesses = {name: [answer[name] for answer in answers] for name in answers[0]}
    scores = {name: r_squared(actual, guessed) for name, guessed in guesses.items()}
    with open(f"{args.output}.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["log", "actual", *guesses])
        table.writerows(zip([log.name for log in args.logs], actual, *guesses.values()))
    Path(f"{args.output}.svg").write_text(plot(actual, guesses, scores), encoding="utf-8")
    for name, score in scores.items():
        print(f"R squared of {name}, on {len(actual)} unseen jobs: {score:.3f}")


def learn(args):
    """Teach."""
    for log in args.logs:
        x, y = read(log)
        print(f"{log.name}: sample {ask(args, '/learn', {'x': x, 'y': y})['samples']}")


def main():
    """Parse and do; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="of the server, as `flux dovetail url model` prints it")
    parser.add_argument("what", choices=["learn", "predict"])
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG")
    parser.add_argument("--token", type=Path, metavar="FILE", help="has the server's token")
    parser.add_argument("--output", metavar="NAME", default="predicted", help="without .csv, .svg")
    args = parser.parse_args()
    try:
        {"learn": learn, "predict": predict}[args.what](args)
    except urllib.error.HTTPError as error:
        raise SystemExit(f"model_client: {args.url}: {json.load(error)['error']}") from None
    except OSError as error:
        raise SystemExit(f"model_client: {error}") from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
