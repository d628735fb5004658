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

from dovetail.applications.openfoam.mesh import Mesh
from dovetail.applications.openfoam.mesh_file import Labels
from dovetail.core import cpu_requests
from dovetail.core.errors import BadInput


def bisection(mesh: Mesh, weights: Sequence[float]) -> Labels:
    """The rank of each cell, shape (cells,). BadInput for bad weights, or too few cells."""
    cpu_requests.check_weights(weights)
    cells = len(mesh.centres)
    if cells < len(weights):
        raise BadInput(f"weights: {len(weights)} ranks for a mesh of {cells} cells")
    counts = cpu_requests.apportion(weights, cells, floor=1)
    inner = np.stack([mesh.owner[: len(mesh.neighbour)], mesh.neighbour])
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
        best, fewest = part, -1
        for axis in _axes(mesh, part):
            order = part[np.lexsort((part, *mesh.centres[part][:, axis].T))]
            low[part] = False
            low[order[:size]] = True
            cut = int((low[faces[0]] != low[faces[1]]).sum())
            if fewest < 0 or cut < fewest:
                best, fewest = order, cut
        low[part] = False
        low[best[:size]] = True
        sides = low[faces]
        parts.append((first, middle, best[:size], faces[:, sides.all(axis=0)]))
        parts.append((middle, end, best[size:], faces[:, ~sides.any(axis=0)]))
    return rank_of_cell


def cut_faces(mesh: Mesh, rank_of_cell: Labels) -> int:
    """Inner faces between cells of two ranks."""
    inner = len(mesh.neighbour)
    return int((rank_of_cell[mesh.owner[:inner]] != rank_of_cell[mesh.neighbour]).sum())


def _axes(mesh: Mesh, part: Labels) -> list[list[int]]:
    """For each axis, longest first, the coordinates to sort by: its own last, as lexsort has it.

    Cells at one coordinate, as in a regular mesh, are taken in the order of the next longest axis.
    """
    longest = np.argsort(-np.ptp(mesh.centres[part], axis=0), kind="stable").tolist()
    return [[other for other in longest[::-1] if other != axis] + [axis] for axis in longest]
