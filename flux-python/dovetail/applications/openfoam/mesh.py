# SPDX-License-Identifier: LGPL-3.0-or-later
"""Reads OpenFOAM meshes and writes what a manual decomposition needs.

Inputs: `constant/polyMesh` (points, faces, owner, neighbour) of a case, and the owner files'
headers in its processor directories. Outputs: `constant/cellDecomposition` and
`system/decomposeParDict`.

Invariants: whatever is in those files, reading ends with arrays whose every index is within
range, or in BadInput that names the file. Files are replaced whole or not at all.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dovetail.applications.openfoam.mesh_file import Floats, FoamFile, Labels, find
from dovetail.core.errors import BadInput
from dovetail.host.private_files import write_whole

MARK = "// Written by `dovetail decompose`; it will write over this file."


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
    if not os.path.isdir(case):
        raise BadInput(f"{case}: no such case directory")
    if find(directory / "owner") is None:
        raise BadInput(f"{directory}: no mesh; make it first, e.g. with `blockMesh -case {case}`")
    points = FoamFile(directory / "points").floats().reshape(-1, 3)
    sizes, corners = FoamFile(directory / "faces").faces()
    owner = FoamFile(directory / "owner").labels()
    neighbour = FoamFile(directory / "neighbour").labels()
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
    if not os.path.isdir(case):
        raise BadInput(f"{case}: no such case directory")
    found = {
        int(path.name[9:]): path
        for path in case.glob("processor[0-9]*")
        if path.name[9:].isdecimal() and os.path.isdir(path)
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


def number_of_cells(case: Path) -> int | None:
    """Cells of the case's own mesh, None if it has none that can be read."""
    try:
        return _count(case / "constant" / "polyMesh" / "owner")
    except BadInput:
        return None


def _cells(processor: Path) -> int:
    """The cells of one processor directory."""
    cells = _count(processor / "constant" / "polyMesh" / "owner")
    if cells == 0:
        raise BadInput(f"{processor}: a rank without cells has no load to share by")
    return cells


def _count(path: Path) -> int:
    """The cells of an owner file: from its header's note, else counted."""
    owner = FoamFile(path)
    note = re.search(r"nCells:\s*(\d{1,18})\b", owner.header.get("note", ""), re.ASCII)
    return int(note[1]) if note else int(owner.labels().max(initial=-1)) + 1


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
    try:
        path.parent.mkdir(exist_ok=True)
        write_whole(path, header + body)
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from None
