# SPDX-License-Identifier: LGPL-3.0-or-later
"""Recursive coordinate bisection: halves, halves of halves, across the side that costs least.

Inputs: a mesh and one weight per rank. Output: the rank of every cell.

The rule: ranks are divided into two halves, cells by a plane across one of the three axes so that
each half has its ranks' share; then each half likewise. The axis is the one whose plane cuts the
fewest faces, as each of those is a value to send in every exchange. See M. J. Berger and
S. H. Bokhari, A Partitioning Strategy for Nonuniform Problems on Multiprocessors, IEEE
Transactions on Computers C-36 (1987).

Invariants: every rank gets its exact share, rounded to a whole cell, and at least one; the same
input gives the same output.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dovetail.applications.openfoam.mesh import Mesh
from dovetail.applications.openfoam.mesh_file import Labels
from dovetail.core import cpu_requests
from dovetail.core.errors import BadInput

Flags = npt.NDArray[np.bool_]


def bisection(mesh: Mesh, weights: Sequence[float]) -> Labels:
    """The rank of each cell, shape (cells,). BadInput for bad weights, or too few cells."""
    cpu_requests.check_weights(weights)
    cells = len(mesh.centres)
    if cells < len(weights):
        raise BadInput(f"weights: {len(weights)} ranks for a mesh of {cells} cells")
    counts = cpu_requests.apportion(weights, cells, floor=1)
    inner = np.stack([mesh.owner[: len(mesh.neighbour)], mesh.neighbour])
    place = _places(mesh)
    rank_of_cell = np.empty(cells, np.int64)
    low = np.zeros(cells, bool)  # of the cells in hand, those that are in the lower half
    parts = [(0, len(weights), np.arange(cells), inner)]
    while parts:
        first, end, part, faces = parts.pop()
        if end - first == 1:
            rank_of_cell[part] = first
            continue
        middle = (first + end) // 2
        size = sum(counts[first:middle])
        halves: list[tuple[int, Flags]] = []
        for axis in np.argsort(-np.ptp(mesh.centres[part], axis=0), kind="stable").tolist():
            along = place[axis][part]
            low[part] = along < np.partition(along, size)[size]
            halves.append((int((low[faces[0]] != low[faces[1]]).sum()), low[part]))
        lower = min(halves, key=lambda half: half[0])[1]
        low[part] = lower
        sides = low[faces]
        parts.append((first, middle, part[lower], faces[:, sides.all(axis=0)]))
        parts.append((middle, end, part[~lower], faces[:, ~sides.any(axis=0)]))
    return rank_of_cell


def cut_faces(mesh: Mesh, rank_of_cell: Labels) -> int:
    """Inner faces between cells of two ranks."""
    inner = len(mesh.neighbour)
    return int((rank_of_cell[mesh.owner[:inner]] != rank_of_cell[mesh.neighbour]).sum())


def _places(mesh: Mesh) -> Labels:
    """Each cell's place in the order along each axis, shape (3, cells).

    Cells at one coordinate, as in a regular mesh, follow each other along the longest other axis.
    """
    longest = np.argsort(-np.ptp(mesh.centres, axis=0), kind="stable").tolist()
    place = np.empty((3, len(mesh.centres)), np.int64)
    for axis in range(3):
        others = [mesh.centres[:, other] for other in longest[::-1] if other != axis]
        order = np.lexsort((*others, mesh.centres[:, axis]))  # the last one goes first
        place[axis][order] = np.arange(len(order))
    return place
