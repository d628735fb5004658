# SPDX-License-Identifier: LGPL-3.0-or-later
"""What was measured, in a file: an interrupted run goes on where it stopped.

Inputs: the output directory, and what the measurements depend on. Outputs: `measured.jsonl` there,
a line for each variant and round. Invariants: a line is written once a measurement is complete, and
whole; results of another scale, executor or machine are never mixed with these.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from dovetail.bench.papers.findings import Figures
from dovetail.core.errors import BadInput, WorkFailed

FILE = "measured.jsonl"


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON objects; a last one that was cut off is removed from it.

    A run that was killed while it wrote leaves that. Raises BadInput where another is damaged.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    parsed = []
    for number, line in enumerate(lines):
        try:
            if not line.endswith(b"\n"):
                raise ValueError
            found = json.loads(line)
            if not isinstance(found, dict):
                raise ValueError
            parsed.append(found)
        except ValueError:
            if number < len(lines) - 1 or line.endswith(b"\n"):  # whole, and not of ours
                raise BadInput(f"{path}: line {number + 1} is damaged") from None
            # In place: to write the others anew would lose them where the disk is full.
            os.truncate(path, sum(map(len, lines[:-1])))
    return parsed


def _hold(file: IO[str]) -> None:
    """Keep others from a file until it is closed. Raises BadInput where another has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadInput(
            f"{file.name}: another `dovetail bench papers` writes there; "
            "wait for it, or give another directory with -o"
        ) from None
    except OSError:
        pass  # a file system without locks


class Kept:
    """The results so far; `about` is what they depend on. Raises BadInput if that has changed."""

    def __init__(self, directory: Path, about: Mapping[str, Any]) -> None:
        self.path = directory / FILE
        self._found: dict[tuple[str, str], dict[int, Figures]] = {}
        self._finished: dict[str, list[str]] = {}
        self._others: dict[str, dict[int, list[float]]] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
            _hold(self._file)
            lines = whole_lines(self.path)
            for number, line in enumerate(self._of(lines, about), 2):
                try:
                    self._take(line)
                except (KeyError, TypeError, ValueError):
                    raise BadInput(f"{self.path}: line {number} is damaged") from None
        except OSError as error:
            raise BadInput(f"-o {directory}: {error.strerror}") from error
        if not lines:
            self._write(dict(about))

    def _take(self, line: Mapping[str, Any]) -> None:
        """What a line says."""
        if "finished" in line:
            self._finished[line["finished"]] = line["variants"]
            return
        by_round = self._found.setdefault((line["experiment"], line["variant"]), {})
        by_round[line["round"]] = line["figures"]
        by_turn = self._others.setdefault(line["experiment"], {})
        by_turn.setdefault(line["round"], []).append(float(line["others"]))

    def _of(self, lines: list[dict[str, Any]], about: Mapping[str, Any]) -> list[dict[str, Any]]:
        for name, value in about.items() if lines else ():
            had = lines[0].get(name)
            if had != value:
                raise BadInput(
                    f"{self.path} holds measurements with {name} {had}, not {value}; "
                    "give another directory with -o"
                )
        return lines[1:]

    def has(self, experiment: str, variant: str, turn: int) -> bool:
        """Whether it was measured."""
        return turn in self._found.get((experiment, variant), {})

    def add(
        self, experiment: str, variant: str, turn: int, figures: Figures, others: float
    ) -> None:
        """Keep a measurement; `others` is how many cores others used just before it."""
        self._others.setdefault(experiment, {}).setdefault(turn, []).append(others)
        self._found.setdefault((experiment, variant), {})[turn] = figures
        self._write({"experiment": experiment, "variant": variant, "round": turn,
                     "figures": dict(figures), "others": round(others, 3)})  # fmt: skip

    def others(self, experiment: str) -> dict[int, float]:
        """By round, cores that others used: the median before its measurements."""
        by_turn = self._others.get(experiment, {})
        return {turn: statistics.median(by_turn[turn]) for turn in sorted(by_turn)}

    def finished(self, experiment: str) -> bool:
        """Whether nothing of it is missing."""
        return experiment in self._finished

    def finish(self, experiment: str, variants: Sequence[str]) -> None:
        """All of it was measured, which is these variants."""
        self._finished[experiment] = list(variants)
        self._write({"finished": experiment, "variants": list(variants)})

    def rounds(self, experiment: str, count: int) -> dict[str, list[Figures]]:
        """By variant of what is finished, its rounds in order, as many as all of them have.

        What else was measured is left out: a program for it may have been there at first, and not
        when this went on.
        """
        mine = {one: self._found.get((experiment, one), {}) for one in self._finished[experiment]}
        common = [turn for turn in range(count) if all(turn in by for by in mine.values())]
        return {variant: [by[turn] for turn in common] for variant, by in mine.items()}

    def close(self) -> None:
        """No more is kept; what could not be written was said then."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise WorkFailed(f"{self.path}: {error.strerror}") from error
