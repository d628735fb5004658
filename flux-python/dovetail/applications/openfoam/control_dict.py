# SPDX-License-Identifier: LGPL-3.0-or-later
"""`system/controlDict`: its plain entries, how many iterations they ask for, and from where.

Input: a case directory. Outputs: entries as text; the times that are written in it, in one piece
or in its processor directories. Invariant: what is computed, included or conditional in the file
is left out, never guessed at.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Final

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_ENTRY = re.compile(r"([A-Za-z]\w*)\s+([^\s;{}]+)\s*;")
_QUOTED = re.compile(r'"\w+"')  # which OpenFOAM takes for a word where it wants one
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[{}]|#\w+')
_LARGEST = 1 << 20  # bytes

INCLUDED: Final = "#include"
"""Among the entries where another file may have others, which go before those here."""

COLLATED: Final = ("collated", "hostCollated")
"""OpenFOAM's file handlers that put what several ranks write into one directory."""


def entries(case: Path) -> dict[str, str]:
    """The file's own entries of one word each; empty if it cannot be read, as a pipe cannot."""
    path = case / "system" / "controlDict"
    try:
        if not path.is_file():
            return {}
        with open(path, errors="replace") as file:
            return read(file.read(_LARGEST))
    except OSError:
        return {}


def read(text: str) -> dict[str, str]:
    """The entries of one word each in what such a file has."""
    text = _COMMENT.sub(" ", text)
    outer, depth, at, found = "", 0, 0, {}
    for token in _TOKEN.finditer(text):
        word = token[0]
        if word in ("#calc", "#eval") or word.startswith("#if"):
            return {}
        if depth == 0 and word.startswith(("#code", "#stream")):
            return {}
        if depth == 0 and word.startswith(("#include", "#sinclude")):
            found[INCLUDED] = word
        if depth == 0:
            outer += text[at : token.start()]
            value = outer.rstrip()[-1:] not in ("", ";")  # in quotes at its beginning is a pattern
            outer += word[1:-1] if value and _QUOTED.fullmatch(word) else "" if word == "{" else " "
        depth += {"{": 1, "}": -1}.get(word, 0)
        outer += ";" if word == "}" and depth == 0 else ""
        at = token.end()
    outer += text[at:] if depth == 0 else ""
    return {**found, **dict(_ENTRY.findall(outer))}


def times(case: Path) -> list[float]:
    """The times of the case's own time directories, ascending."""
    try:
        names = [entry.name for entry in os.scandir(case) if entry.is_dir()]
    except OSError:
        return []
    return sorted(found for name in names if (found := number(name)) is not None)


def directories(case: Path) -> list[Path]:
    """Processor directories, each rank's own or collated, and links to such."""
    found = [*case.glob("processor[0-9]*"), *case.glob("processors[0-9]*")]
    return sorted(path for path in found if path.is_dir())


def times_in_parts(case: Path) -> list[float]:
    """The times that processor directories have and the case itself has not, ascending."""
    there = times(parts[0]) if (parts := directories(case)) else []
    return sorted({*there}.difference(times(case)))


def starts_in_parts(case: Path) -> bool:
    """Whether the time that a run begins from, or may, is in processor directories alone."""
    parts, own = times_in_parts(case), times(case)
    first = start(sorted([*parts, *own]), entries(case))
    return bool(parts) and (not own or first is None or first in parts)


def number(text: str) -> float | None:
    """A finite number as OpenFOAM writes it, None for anything else."""
    if not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,3})?", text, re.ASCII):
        return None
    value = float(text)
    return value if math.isfinite(value) else None


def iterations(case: Path) -> int:
    """Time steps from the start to the end of a run of fixed steps; 0 for any other."""
    found = entries(case)
    first = start(times(case), found)
    end, step = (number(found.get(key, "")) for key in ("endTime", "deltaT"))
    plain = found.get("stopAt", "endTime") == "endTime" and INCLUDED not in found
    if not plain or varies(found) or first is None or end is None or step is None or step <= 0.0:
        return 0
    count = (end - first) / step
    return round(count) if 0.5 <= count <= 1e12 else 0


def varies(found: dict[str, str]) -> bool:
    """Whether the solver of a case with these entries chooses its time steps itself."""
    return found.get("adjustTimeStep", "no") not in ("no", "off", "false", "n", "f", "none")


def start(there: list[float], found: dict[str, str]) -> float | None:
    """The time that a run begins from, of a case with these; None if that cannot be told."""
    given = number(found.get("startTime", "0"))
    rule = found.get("startFrom", "latestTime")
    if rule == "startTime":
        return given
    if rule not in ("firstTime", "latestTime"):
        return None
    return there[0 if rule == "firstTime" else -1] if there else given
