# SPDX-License-Identifier: LGPL-3.0-or-later
"""One file of an OpenFOAM mesh as arrays.

Input: a list file as OpenFOAM writes it: ascii or binary, labels of 32 or 64 bits, scalars of
32 or 64, either byte order, plain or .gz. Output: its header's entries and its lists.

Invariants: a list has as many items as the file announces, or reading ends in BadInput that
names the file; what the items mean, and whether they are in range, is for the caller.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.applications.openfoam import foam_header
from dovetail.core.errors import BadInput

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]


class FoamFile:
    """An OpenFOAM file: its header's entries, and its list or lists."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = foam_header.read(path)
        self.header, self._at = foam_header.entries(path, self._data)
        arch = self.header.get("arch", "")
        order = ">" if "MSB" in arch else "<"
        self._label = np.dtype(f"{order}i{8 if 'label=64' in arch else 4}")
        self._scalar = np.dtype(f"{order}f{4 if 'scalar=32' in arch else 8}")
        form = self.header.get("format", "ascii")
        if form not in ("ascii", "binary"):
            raise self._bad(f"format {form!r} is neither ascii nor binary")
        self._binary = form == "binary"
        if not self._binary:
            self._data, self._at = foam_header.COMMENT.sub(b" ", self._data[self._at :]), 0

    def _bad(self, why: str) -> BadInput:
        return foam_header.incomplete(self.path, why)

    def labels(self) -> Labels:
        """The file's next list of labels, shape (n,)."""
        count = self._count()
        if self._take(rb"\s*\{\s*(-?\d{1,18})\s*\}"):
            if count > 1_000_000:
                raise self._bad("a uniform list of absurd length")
            return np.full(count, int(self._last[1]), np.int64)
        if self._binary:
            return self._block(count, self._label).astype(np.int64)
        return self._numbers(count)

    def floats(self) -> Floats:
        """A list of vectors, flat: shape (3n,)."""
        count = self._count() * 3
        if self._binary:
            return self._block(count, self._scalar).astype(np.float64)
        body = self._data[self._at :].translate(_PARENTHESES)
        values = _parse(body, np.dtype(np.float64))
        if len(values) != count:
            raise self._bad(f"{len(values)} numbers where {count} are announced")
        return values

    def faces(self) -> tuple[Labels, Labels]:
        """Faces as (points per face, shape (faces,); all their point labels one after another)."""
        if self.header.get("class") == "faceCompactList":
            starts, corners = self.labels(), self.labels()
            sizes = np.diff(starts)
            if not len(starts) or starts[0] or starts[-1] != len(corners) or (sizes < 0).any():
                raise self._bad("face offsets that do not fit")
            return sizes, corners
        if self._binary:
            raise self._bad("a binary faceList is not supported, write it as ascii")
        count = self._count()
        flat = _parse(self._data[self._at :].translate(_PARENTHESES), np.dtype(np.int64))
        starts = self._face_starts(flat, count)
        is_corner = np.ones(len(flat), bool)
        is_corner[starts] = False
        return flat[starts], flat[is_corner]

    def _face_starts(self, flat: Labels, count: int) -> Labels:
        """Where each face begins in `3 a b c 4 a b c d …`."""
        starts, at, values = [], 0, flat.tolist()
        while at < len(values) and values[at] > 0:
            starts.append(at)
            at += values[at] + 1
        if at != len(values) or len(starts) != count:
            raise self._bad(f"not the {count} faces that are announced")
        return np.array(starts, np.int64)

    def _take(self, pattern: bytes) -> bool:
        """Advance over `pattern` if it is next; its match is then `_last`."""
        match = re.compile(pattern).match(self._data, self._at)
        if match:
            self._last, self._at = match, match.end()
        return match is not None

    def _count(self) -> int:
        """The length that stands before a list."""
        while self._binary and self._take(rb"\s*(?:/\*.*?\*/|//[^\n]*)"):
            pass
        if not self._take(rb"\s*(\d{1,18})"):
            raise self._bad("no list where one should be")
        return int(self._last[1])

    def _block(self, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """`count` binary items in parentheses; OpenFOAM writes none for an empty list."""
        if count == 0:
            self._take(rb"\s*\(\s*\)")
            return np.empty(0, dtype)
        if not self._take(rb"\s*\("):
            raise self._bad("no list where one should be")
        end = self._at + count * dtype.itemsize
        if self._data[end : end + 1] != b")":
            raise self._bad(f"not the {count} items that are announced")
        block = np.frombuffer(self._data, dtype, count, self._at)
        self._at = end + 1
        return block

    def _numbers(self, count: int) -> Labels:
        """An ascii `( … )` of integers."""
        if not self._take(rb"\s*\(([^()]*)\)"):
            if count == 0:
                return np.empty(0, np.int64)
            raise self._bad("no list where one should be")
        values = _parse(self._last[1], np.dtype(np.int64))
        if len(values) != count:
            raise self._bad(f"{len(values)} numbers where {count} are announced")
        return values


_PARENTHESES = bytes.maketrans(b"()", b"  ")


def _parse(text: bytes, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Numbers separated by space; none at all if anything else is among them."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return np.fromstring(text.strip(), dtype, sep=" ")
        except (ValueError, DeprecationWarning):
            return np.empty(0, dtype)
