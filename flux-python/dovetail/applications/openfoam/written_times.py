# SPDX-License-Identifier: LGPL-3.0-or-later
"""Which of a case's written times can be gone on from.

Inputs: a case directory, the directories in which its ranks write (`processor0`, ..., or the
case itself), and the solver's log. Output: the latest time that every rank has written whole.

A rank that was killed leaves files that stop in the middle, or fields that are not there at all,
and `uniform/time` tells nothing, since OpenFOAM writes it first. So a time is whole if

  - each file of it, in every rank's directory, ends as OpenFOAM ends files;
  - all ranks have the same fields; and
  - rank 0 was over with writing it: the log goes on after it, or it has all the fields of a
    time that was written before it.

A solver that diverges may go on with fields of nan, and write them: such a time is gone on from
only where there is no other, as there is none in a case that always has them.

Invariants: nothing is written; what cannot be read is not whole, and never an exception.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from array import array
from collections.abc import Collection, Sequence
from pathlib import Path

_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[-+]?\d+)?", re.ASCII)
_TIME_LINE = re.compile(rb"^ ?(?:Time = (\S+?)s?|(End))\s*$", re.MULTILINE)
_INDEX = re.compile(r"^index\s+(\d{1,18});", re.MULTILINE | re.ASCII)
_EXACT = re.compile(r'^(value|name)\s+"?([^\s";]+)"?;', re.MULTILINE)
_FOOTER = b"// ************************************************************************* //"
_LAGRANGIAN = "lagrangian"  # a rank without particles has no files of them
_PRIVATE = "functionObjects"  # rank 0 alone may have a state to keep
_LONGEST = 1 << 16  # bytes at either end of a file; far more than its header
_NOT_FINITE = re.compile(rb"^-?(?:nan|inf)$|[( ]-?(?:nan|inf)[ );]", re.MULTILINE)
_LIST = re.compile(rb"List<(\w+)>\s*(\d{1,18})\s*\(")  # before its numbers, if it is binary
_NUMBERS = {b"scalar": 1, b"vector": 3, b"sphericalTensor": 1, b"symmTensor": 6, b"tensor": 9}


def directories(case: Path, ranks: int) -> list[Path]:
    """Where the ranks write their times."""
    return [case / f"processor{rank}" for rank in range(ranks)] if ranks > 1 else [case]


def times(directory: Path) -> list[str]:
    """The names of the times in a directory, ascending; none if it cannot be read."""
    try:
        names = [path.name for path in directory.iterdir() if _NUMBER.fullmatch(path.name)]
    except OSError:
        return []
    return sorted(names, key=float)


def steps(directory: Path, name: str) -> int:
    """How many time steps were over at a whole time; 0 if it does not say."""
    found = _INDEX.search(_said(directory, name))
    return int(found[1]) if found else 0


def exact(directory: Path, name: str) -> str:
    """A whole time with all digits, of which its name has a few; the name if it does not say."""
    found = dict(_EXACT.findall(_said(directory, name)))
    value = found.get("value", "")
    return value if found.get("name") == name and _NUMBER.fullmatch(value) else name


def _said(directory: Path, name: str) -> str:
    try:
        return (directory / name / "uniform" / "time").read_text()
    except (OSError, UnicodeError):
        return ""


def latest(places: Sequence[Path], log: Path, before: Collection[str], sure: str) -> str | None:
    """The latest time that can be gone on from, None if there is none.

    `before` are the times that were there before the solver first ran. `sure` is the one that it
    went on from last, or was stopped at, "" if none: its writing was over already.
    """
    diverged = None
    written = [name for name in times(places[0]) if name not in before]
    for at in range(len(written) - 1, -1, -1):
        name = written[at]
        fields = whole(places, name)
        if fields is None:
            continue
        over = name == sure or _log_went_on(log, float(name))
        earlier = [_fields(places[0] / other, whole=False) for other in written[:at]]
        if over or any(other and other <= fields for other in earlier):
            if all(_finite(path) for place in places for path in (place / name).glob("[!.]*")):
                return name
            diverged = diverged or name
    return diverged


def whole(places: Sequence[Path], name: str) -> set[str] | None:
    """The files of one time, if none is cut off and all ranks have the same; else None."""
    first, *others = [_fields(place / name) for place in places]
    return first if all(other == first for other in others) else None


def _fields(time: Path, whole: bool = True) -> set[str] | None:
    """The files of one time in one rank's directory; None unless all are whole."""
    found = set()
    try:
        for path in time.rglob("*"):
            if not path.is_file():
                continue
            if whole and not _ends(path):
                return None
            inner = path.relative_to(time)
            if inner.parts[0] != _LAGRANGIAN and _PRIVATE not in inner.parts:
                found.add(str(inner.with_suffix("") if inner.suffix == ".gz" else inner))
    except OSError:
        return None
    return found if {"uniform/time"} < found or not whole else None


def _ends(path: Path) -> bool:
    """Whether a file of OpenFOAM's has an end; True for a file that is not of OpenFOAM's form."""
    try:
        with path.open("rb") as file:
            if path.suffix == ".gz":
                content = gzip.decompress(file.read())
                head, tail = content[:_LONGEST], content[-_LONGEST:]
            else:
                head = file.read(_LONGEST)
                file.seek(max(0, path.stat().st_size - _LONGEST))
                tail = file.read()
    except (OSError, EOFError, zlib.error):
        return False
    if not head:
        return False
    of_foam = head.startswith(b"/*") or b"FoamFile" in head
    return not of_foam or tail.rstrip().endswith(_FOOTER)


def _finite(path: Path) -> bool:
    """Whether all numbers of a field are finite; True for what is no field."""
    try:
        if not path.is_file():
            return True
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error):
        return True
    head, at = data[:_LONGEST], 0
    if b"FoamFile" not in head:
        return True
    while b"binary;" in head:
        found = _LIST.search(data, at)
        if found is None:
            break
        numbers = array("f" if b"scalar=32" in head else "d")
        size = int(found[2]) * _NUMBERS.get(found[1], 0) * numbers.itemsize
        block = data[found.end() : found.end() + size]
        numbers.frombytes(block[: len(block) - len(block) % numbers.itemsize])
        if _NOT_FINITE.search(data, at, found.end()) or not math.isfinite(sum(numbers)):
            return False
        at = found.end() + size
    return _NOT_FINITE.search(data, at) is None


def _log_went_on(log: Path, time: float) -> bool:
    """Whether the solver's log goes on after that time, or ends well."""
    try:
        lines = _TIME_LINE.findall(log.read_bytes())
    except OSError:
        return False
    went_on = False
    for text, end in reversed(lines):  # back to the last part of the run that came to that time
        value = _number(text)
        if not end and value is None:
            continue
        if value is not None and value <= time:
            return went_on and value == time
        went_on = True
    return False


def _number(text: bytes) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
