# SPDX-License-Identifier: LGPL-3.0-or-later
"""Reads OpenFOAM meshes and writes what a manual decomposition needs (before step 1).

Inputs: `constant/polyMesh` (points, faces, owner, neighbour) of a case, as OpenFOAM writes it:
ascii or binary, labels of 32 or 64 bits, scalars of 32 or 64, either byte order, plain or
.gz; and the headers of `processorN/constant/polyMesh/owner`. Outputs: `constant/
cellDecomposition` and `system/decomposeParDict`.

Invariants: whatever is in those files, reading ends with arrays whose every index is within
range, or in BadInput that names the file. Files are replaced whole or not at all.
"""

from __future__ import annotations

import gzip
import os
import re
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.errors import BadInput

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]

MARK = "// Written by `dovetail decompose`; it will write over this file."

_COMMENT = re.compile(rb"/\*.*?\*/|//[^\n]*", re.DOTALL)
_ENTRY = re.compile(r'(\w+)\s+("[^"]*"|[^;"\s]+)\s*;')


@dataclass(frozen=True)
class Mesh:
    """The topology and geometry that a decomposition needs.

    `centres` has shape (cells, 3), metres: the mean of the centres of a cell's faces, each the
    mean of its points. That is not the centroid that OpenFOAM computes from volumes, but it
    is inside any convex cell, and sorting cells needs no more. `owner` has shape (faces,),
    `neighbour` (internal faces,); `low` and `high` are the corners of the bounding box.
    """

    centres: Floats
    owner: Labels
    neighbour: Labels
    low: Floats
    high: Floats


def read_mesh(case: Path) -> Mesh:
    """The mesh in `case`/constant/polyMesh. Raises BadInput if there is none, or it is damaged."""
    directory = case / "constant" / "polyMesh"
    if not case.is_dir():
        raise BadInput(f"{case}: no such case directory")
    if _find(directory / "owner") is None:
        raise BadInput(f"{directory}: no mesh; make it first, e.g. with `blockMesh -case {case}`")
    points = _File(directory / "points").floats().reshape(-1, 3)
    sizes, corners = _File(directory / "faces").faces()
    owner = _File(directory / "owner").labels()
    neighbour = _File(directory / "neighbour").labels()
    _check(directory, points, sizes, corners, owner, neighbour)

    faces = len(sizes)
    face_of_corner = np.repeat(np.arange(faces), sizes)
    face_centres = _means(face_of_corner, points[corners], faces)
    sides = np.concatenate([owner, neighbour])
    centres = _means(
        sides,
        np.concatenate([face_centres, face_centres[: len(neighbour)]]),
        int(sides.max()) + 1,
    )
    return Mesh(centres, owner, neighbour, points.min(axis=0), points.max(axis=0))


def _check(
    directory: Path, points: Floats, sizes: Labels, corners: Labels, owner: Labels, other: Labels
) -> None:
    """Raise BadInput unless the parts fit together and every cell has faces."""
    if not len(points) or not len(owner) or not np.isfinite(points).all():
        raise BadInput(f"{directory}: a mesh without points or faces, or with a point at infinity")
    if len(sizes) != len(owner) or len(other) > len(owner):
        raise BadInput(
            f"{directory}: {len(sizes)} faces, {len(owner)} owners, {len(other)} neighbours "
            "do not belong together"
        )
    if sizes.min() < 3 or corners.min() < 0 or corners.max() >= len(points):
        raise BadInput(f"{directory / 'faces'}: a face with less than 3 points or unknown points")
    cells = int(max(owner.max(), other.max(initial=-1))) + 1
    if min(owner.min(), other.min(initial=0)) < 0 or cells > 2 * len(owner):
        raise BadInput(f"{directory / 'owner'}: cell numbers out of range")
    if not np.bincount(np.concatenate([owner, other]), minlength=cells).all():
        raise BadInput(f"{directory / 'owner'}: a cell without faces")


def _means(group: Labels, values: Floats, groups: int) -> Floats:
    """The mean of `values`, shape (n, 3), over each of the groups; shape (groups, 3)."""
    count = np.bincount(group, minlength=groups)
    sums = [np.bincount(group, values[:, axis], minlength=groups) for axis in range(3)]
    return np.stack(sums, axis=1) / count[:, None]


def cells_per_processor(case: Path) -> tuple[int, ...]:
    """Cells of each processor of a decomposed case, shape (ranks,).

    Raises BadInput if the case is not decomposed, in collated files, or with a rank missing.
    """
    if not case.is_dir():
        raise BadInput(f"{case}: no such case directory")
    found = {
        int(path.name[9:]): path
        for path in case.glob("processor[0-9]*")
        if path.name[9:].isdecimal() and path.is_dir()
    }
    if not found:
        if any(case.glob("processors[0-9]*")):
            raise BadInput(
                f"{case}: decomposed into collated files, which hold no count per rank; "
                "run `decomposePar -force -fileHandler uncollated`"
            )
        raise BadInput(f"{case}: not decomposed (no processor0); run decomposePar first")
    if sorted(found) != list(range(len(found))):
        raise BadInput(f"{case}: processor0 to processor{max(found)} are not all there")
    return tuple(_cells(found[rank]) for rank in range(len(found)))


def _cells(processor: Path) -> int:
    """The cells of one processor directory: from the header's note, else counted."""
    owner = _File(processor / "constant" / "polyMesh" / "owner")
    note = re.search(r"nCells:\s*(\d{1,18})\b", owner.header.get("note", ""), re.ASCII)
    cells = int(note[1]) if note else int(owner.labels().max(initial=-1)) + 1
    if cells == 0:
        raise BadInput(f"{processor}: a rank without cells has no load to share by")
    return cells


# --- One file ---


class _File:
    """An OpenFOAM file: its header's entries, and its list or lists."""

    def __init__(self, path: Path) -> None:
        self.path = path
        data = _read(path)
        # The header has no nested braces; a comment may precede it.
        match = re.search(rb"\bFoamFile\s*\{([^}]*)\}", data)
        if not match:
            raise self._bad("no FoamFile header")
        entries = _ENTRY.findall(_COMMENT.sub(b"", match[1]).decode("latin-1"))
        self.header = {key: value.strip('"') for key, value in entries}
        self._data = data
        self._at = match.end()
        arch = self.header.get("arch", "")
        order = ">" if "MSB" in arch else "<"
        self._label = np.dtype(f"{order}i{8 if 'label=64' in arch else 4}")
        self._scalar = np.dtype(f"{order}f{4 if 'scalar=32' in arch else 8}")
        form = self.header.get("format", "ascii")
        if form not in ("ascii", "binary"):
            raise self._bad(f"format {form!r} is neither ascii nor binary")
        self._binary = form == "binary"
        if not self._binary:
            self._data, self._at = _COMMENT.sub(b" ", data[match.end() :]), 0

    def _bad(self, why: str) -> BadInput:
        return BadInput(f"{self.path}: {why}; is the file complete?")

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


def _find(path: Path) -> Path | None:
    """`path`, or `path`.gz, whichever is there."""
    for candidate in (path, path.with_name(path.name + ".gz")):
        if candidate.is_file():
            return candidate
    return None


def _read(path: Path) -> bytes:
    """The bytes of `path` or of `path`.gz."""
    found = _find(path)
    if found is None:
        raise BadInput(f"{path}: not found; the mesh is not complete")
    try:
        data = found.read_bytes()
        return gzip.decompress(data) if found.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{found}: cannot be read: {error}") from None


# --- Writing ---


def is_ours(path: Path) -> bool:
    """Whether `path` may be written over: it is not there, or carries our mark."""
    try:
        with path.open("rb") as file:
            return MARK.encode() in file.read(2048)
    except FileNotFoundError:
        return True
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None


def write_decomposition(case: Path, rank_of_cell: Labels, ranks: int) -> None:
    """Write both files that `decomposePar` needs; the dictionary, which names the list, last."""
    cells = "\n".join(map(str, rank_of_cell.tolist()))
    body = f"{len(rank_of_cell)}\n(\n{cells}\n)\n"
    _write(case / "constant" / "cellDecomposition", "labelList", body)
    body = (
        f"numberOfSubdomains {ranks};\n\nmethod manual;\n\n"
        'manualCoeffs\n{\n    dataFile "cellDecomposition";\n}\n'
    )
    _write(case / "system" / "decomposeParDict", "dictionary", body)


def _write(path: Path, kind: str, body: str) -> None:
    """Replace `path` by an ascii OpenFOAM file, whole or not at all."""
    header = (
        f"{MARK}\nFoamFile\n{{\n    version     2.0;\n    format      ascii;\n"
        f'    class       {kind};\n    location    "{path.parent.name}";\n'
        f"    object      {path.name};\n}}\n\n"
    )
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(exist_ok=True)
        draft.write_text(header + body)
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from None
