# SPDX-License-Identifier: LGPL-3.0-or-later
"""A cut of a mesh for ranks of any weights, by the method that suits them.

Input: a mesh, and one weight per rank. Output: the rank of each cell, and what each rank has got.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dovetail.applications.openfoam.bisection import bisection, cut_faces
from dovetail.applications.openfoam.concentric import concentric, zones
from dovetail.applications.openfoam.mesh import Mesh
from dovetail.applications.openfoam.mesh_file import Labels

Point = tuple[float, float, float]


@dataclass(frozen=True)
class Cut:
    """A decomposition, and how it was made; `zones` and `centre` are those of `concentric`.

    `cells` has shape (ranks,); `faces` lie between ranks, of so many `inner_faces`.
    """

    method: str
    rank_of_cell: Labels
    zones: tuple[int, ...] | None
    centre: Point | None
    cells: tuple[int, ...]
    faces: int
    inner_faces: int


def cut(mesh: Mesh, weights: Sequence[float], method: str = "", centre: Point | None = None) -> Cut:
    """The decomposition; by bisection for equal weights, else around `centre`, metres."""
    even = min(weights) == max(weights) and centre is None
    method = method or ("bisection" if even else "concentric")
    zone_of_rank = None
    if method == "bisection":
        centre, rank_of_cell = None, bisection(mesh, weights)
    else:
        middle = (mesh.low + mesh.high) / 2 if centre is None else np.array(centre)
        x, y, z = middle.tolist()
        centre, zone_of_rank = (x, y, z), zones(weights)
        rank_of_cell = concentric(mesh.centres, weights, middle)
    cells = tuple(np.bincount(rank_of_cell, minlength=len(weights)).tolist())
    faces = cut_faces(mesh, rank_of_cell)
    return Cut(method, rank_of_cell, zone_of_rank, centre, cells, faces, len(mesh.neighbour))
