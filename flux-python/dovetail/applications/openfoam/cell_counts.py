# SPDX-License-Identifier: LGPL-3.0-or-later
"""How many cells a case has, whole and in each of its processor directories.

Input: the headers of the meshes' owner files, in which OpenFOAM notes it: large meshes are not
read for it, and what has no note is counted.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from dovetail.applications.openfoam import foam_header
from dovetail.core.errors import BadInput


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
    """The cells of an owner file."""
    header, _ = foam_header.entries(path, foam_header.read(path, foam_header.LONGEST))
    note = re.search(r"nCells:\s*(\d{1,18})\b", header.get("note", ""), re.ASCII)
    if note:
        return int(note[1])
    from dovetail.applications.openfoam.mesh_file import FoamFile  # and with it numpy

    return int(FoamFile(path).labels().max(initial=-1)) + 1
