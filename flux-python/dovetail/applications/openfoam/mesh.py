# SPDX-License-Identifier: LGPL-3.0-or-later
"""Reads OpenFOAM meshes and writes what a manual decomposition needs.

Input: `constant/polyMesh` (points, faces, owner, neighbour) of a case. Outputs:
`constant/cellDecomposition` and `system/decomposeParDict`.

Invariants: whatever is in those files, reading ends with arrays whose every index is within
range, or in BadInput that names the file. Files are replaced whole or not at all.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dovetail.applications.openfoam.foam_header import find
from dovetail.applications.openfoam.mesh_file import Floats, FoamFile, Labels
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
