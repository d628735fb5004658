# SPDX-License-Identifier: LGPL-3.0-or-later
"""OpenFOAM's motorBike, with as few cells as fit the machine.

Inputs: the tutorial and its surface, of the installed OpenFOAM examples, and how finely the surface
is meshed: the tutorial refines the edges of the motor cycle six times, which makes 350,000 cells
and takes many minutes. Output: a meshed case that begins with a potential flow and never ends.
Invariant: a mesh that is there is complete, since it gets its name last; so it is made once.
"""

from __future__ import annotations

import gzip
import re
import shutil
from pathlib import Path

from dovetail.applications.openfoam import mesh
from dovetail.bench import cases
from dovetail.core.errors import BadInput

FINEST = 6  # the tutorial's own
TOOLS = ("surfaceFeatureExtract", "blockMesh", "snappyHexMesh", "potentialFoam")
_NAME = "motorBike"
_SURFACE = "resources/geometry/motorBike.obj.gz"


def missing() -> str:
    """Why there is no motorBike here; empty if there is."""
    absent = next((name for name in TOOLS if not shutil.which(name)), "")
    if absent:
        return f"there is no {absent}: install OpenFOAM"
    try:
        _source()
    except BadInput as error:
        return str(error)
    return ""


def _source() -> tuple[Path, Path]:
    """The tutorial and its surface. Raises BadInput."""
    for path in map(Path, cases.TUTORIALS):
        tutorial, surface = path.with_name(_NAME), path.parents[2] / _SURFACE
        if tutorial.is_dir() and surface.exists():
            return tutorial, surface
    raise BadInput("OpenFOAM's motorBike example is missing: install openfoam-examples")


def meshed(folder: Path, level: int, iterations: int) -> Path:
    """The case in `folder`, refined so many times at the edges of the motor cycle.

    Its run takes that many iterations. Raises BadInput, or WorkFailed where a tool fails.
    """
    if folder.is_dir():
        return folder
    tutorial, surface = _source()
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(tutorial, part)
    shutil.copy(surface, part / "constant/triSurface")
    _coarsen(part, level)
    cases.endure(part, iterations)
    control = part / "system/controlDict"  # `dovetail decompose` reads faces as text
    control.write_text(
        re.sub(r"(?m)^writeFormat\s+\S+;", "writeFormat ascii;", control.read_text())
    )
    if not (part / "0").exists():
        shutil.copytree(part / "0.orig", part / "0")
    for words in (TOOLS[:1], TOOLS[1:2], (TOOLS[2], "-overwrite"), TOOLS[3:]):
        cases.tool(part, *words)
    shutil.rmtree(part / "constant/triSurface")
    part.rename(folder)
    return folder


def _coarsen(case: Path, level: int) -> None:
    """Give surface, edges and wake of the motor cycle the tutorial's levels, less so many."""
    path = case / "system/snappyHexMeshDict"
    packed = path.with_name(f"{path.name}.gz")  # as Debian packages it
    if packed.exists():
        path.write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()
    text = path.read_text()
    for found, made in (
        (rf"\blevel\s+{FINEST};", f"level {level};"),
        (rf"\blevel\s+\({FINEST - 1}\s+{FINEST}\);", f"level ({level - 1} {level});"),
        (rf"\blevels\s+\(\((\S+)\s+{FINEST - 2}\)\);", rf"levels ((\1 {level - 2}));"),
    ):
        text, count = re.subn(found, made, text)
        if not count:
            raise BadInput(f"{path.name} of the motorBike example is not as expected: no {found}")
    path.write_text(text)


def cut(source: Path, folder: Path, ranks: int) -> Path:
    """A copy for so many ranks, cut evenly."""
    shutil.copytree(source, folder)
    if ranks > 1:
        cases.cut(folder, (1.0,) * ranks)
    return folder


def cells(case: Path) -> int:
    """How many its mesh has."""
    return len(mesh.read_mesh(case).centres)
