# SPDX-License-Identifier: LGPL-3.0-or-later
"""Concentric decomposition: zones by distance from a centre, cut into sectors.

Inputs: cell centres and one weight per rank. Output: the rank of every cell.

The rule: ranks count from the centre outwards, and neighbours with equal weights share a
zone. So weights 15,5,1,1 put rank 0 around the centre, rank 1 in a ring around it, and ranks
2 and 3 into two sectors of the outer ring. A zone is a range of distances; a sector is a range
of angles in the plane of the mesh's two longest sides. The method is that of arXiv:2603.22691;
cutting at quantiles rather than at fixed radii and angles makes the cell counts exact.

Invariants: every rank gets its exact share, rounded to a whole cell, and at least one; the
same input gives the same output.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from dovetail.applications.openfoam.mesh_file import Floats, Labels
from dovetail.core import cpu_requests
from dovetail.core.errors import BadInput


def zones(weights: Sequence[float]) -> tuple[int, ...]:
    """The zone of each rank, shape (ranks,), counted from the centre outwards."""
    return tuple(zone for zone, (_, run) in enumerate(groupby(weights)) for _ in run)


def concentric(centres: Floats, weights: Sequence[float], centre: Floats) -> Labels:
    """The rank of each cell, shape (cells,), for cell centres of shape (cells, 3), metres.

    Raises BadInput for bad weights, or fewer cells than ranks.
    """
    cpu_requests.check_weights(weights)
    if len(centres) < len(weights):
        raise BadInput(f"weights: {len(weights)} ranks for a mesh of {len(centres)} cells")
    counts = cpu_requests.apportion(weights, len(centres), floor=1)
    offset = centres - centre
    distance = np.linalg.norm(offset, axis=1)
    first, second = _plane(centres)
    angle = np.arctan2(offset[:, second], offset[:, first])

    zone_of_rank = zones(weights)
    cells_of_zone = np.bincount(zone_of_rank, weights=counts).astype(int)
    ranks_of_zone = np.bincount(zone_of_rank).tolist()
    rank_of_cell = np.empty(len(centres), np.int64)
    rank = 0
    # Equal distances, as in any regular mesh, are settled by angle and then by cell number.
    outwards = np.lexsort((angle, distance))
    for zone, cells in enumerate(np.split(outwards, np.cumsum(cells_of_zone)[:-1])):
        ranks = ranks_of_zone[zone]
        around = cells[np.argsort(angle[cells], kind="stable")]
        rank_of_cell[around] = np.repeat(np.arange(rank, rank + ranks), counts[rank : rank + ranks])
        rank += ranks
    return rank_of_cell


def _plane(centres: Floats) -> tuple[int, int]:
    """The two axes along which the mesh is longest, in order: where a 2-D mesh lies."""
    extent = np.ptp(centres, axis=0)
    first, second = sorted(np.argsort(-extent, kind="stable")[:2].tolist())
    return first, second
