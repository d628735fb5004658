# SPDX-License-Identifier: LGPL-3.0-or-later
"""Processor directories for any ranks and weights, made by decomposePar from a cut of ours.

Inputs: a case, and one weight per rank. Outputs: whether the case is cut so already; processor
directories. No partitioning library is needed, as the ranks of cells are written by ourselves.

Invariants: fields are never removed that are in processor directories alone; in a run's copy of a
case, which is made anew from the user's, those alone count from which the solver would begin. What
links lead to is neither removed nor, in such a copy, left for a solver to write in.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from dovetail.applications.openfoam import control_dict, foam_header
from dovetail.applications.openfoam.cell_counts import cells_per_processor, number_of_cells
from dovetail.core.errors import BadInput, WorkFailed

_PROGRAM = "decomposePar"
ALIKE = 0.05
"""A cut is as good as ours if no rank's share differs by more than this part of it: that much
imbalance is what partitioning libraries allow themselves for fewer faces between ranks."""

BESIDE = ("constant/polyMesh/cellProc", "constant/polyMesh/cellProc.gz")
"""What decomposePar of some versions writes beside the ranks, for reconstructPar."""

LATER = 60.0
"""Seconds by which a file was written after what is cut of it, at least, if it has changed since:
one that copies a case may give its files the times of the copy, in any order."""


def are_cut(case: Path, weights: Sequence[float], *, copied: bool) -> bool:
    """Whether the case's processor directories are of its mesh, with such shares of it.

    Those that a run's copy has as links are not its own, and those of an older mesh, or with older
    fields than the case begins from now, are of what it was. Of several regions' shares nothing is
    asked, as they are not ours to cut.
    """
    there = control_dict.directories(case)
    if len(weights) == 1:
        return not there
    if copied and any(path.is_symlink() for path in there):
        return False
    if _has_regions(case):
        return len(there) == len(weights)
    try:
        cells = cells_per_processor(case)
    except BadInput:
        return False
    total = sum(cells)
    if len(cells) != len(weights) or number_of_cells(case) not in (None, total):
        return False
    if _has_changed(case, there[0]):
        return False
    whole = math.fsum(weights)
    wanted = [total * weight / whole for weight in weights]
    return all(abs(has - ask) <= max(1.0, ALIKE * ask) for has, ask in zip(cells, wanted))


def _has_changed(case: Path, part: Path) -> bool:
    """Whether the mesh, or a field from which a run begins, was written after that of a rank."""
    times = sorted({*control_dict.times(part), *control_dict.times(case)})
    begin = control_dict.start(times, control_dict.entries(case))
    try:
        names = [path.name for path in part.iterdir() if control_dict.number(path.name) == begin]
        fields = [path for name in names if begin is not None for path in (case / name).glob("*")]
        for path in (*fields, foam_header.find(case / "constant" / "polyMesh" / "points")):
            if path is None or not path.is_file():
                continue
            theirs = foam_header.find(part / str(path.relative_to(case)).removesuffix(".gz"))
            if theirs and path.stat().st_mtime >= theirs.stat().st_mtime + LATER:
                return True
    except OSError:
        pass  # as decomposePar will say
    return False


def check(case: Path, *, copied: bool) -> None:
    """Refuse to remove fields that are nowhere else; `copied` is the case of a run.

    Raises BadInput.
    """
    alone = control_dict.times_in_parts(case)
    if alone and (not copied or control_dict.starts_in_parts(case)):
        first = control_dict.directories(case)[0].name
        raise BadInput(
            f"{case}: its fields of time {alone[-1]:g} are in {first} and its like alone; "
            "run `reconstructPar` before it is cut again"
        )


def check_regions(case: Path) -> None:
    """Refuse to cut what has several meshes. Raises BadInput."""
    if _has_regions(case):
        raise BadInput(
            f"{case}: has several regions; cut it by `{_PROGRAM} -allRegions`, or `-region` and "
            "the name of each, in a run by lines of `prepare`"
        )


def _has_regions(case: Path) -> bool:
    """By what lists them, or, as for a film's on a wall, by a mesh that is solved for, too."""
    if (case / "constant" / "regionProperties").exists():
        return True
    meshes = case.glob("constant/*/polyMesh")
    return any((case / "system" / mesh.parent.name).is_dir() for mesh in meshes)


def check_program() -> None:
    """Refuse to begin where decomposePar is not found. Raises BadInput."""
    if shutil.which(_PROGRAM) is None:
        raise _not_run("No such file or directory")


def _not_run(why: str | None) -> BadInput:
    return BadInput(f"{_PROGRAM} cannot be run: {why}; is OpenFOAM's environment set up?")


def own_folders(case: Path) -> None:
    """Have a run's copy its own folders to write in, where they are links to the user's.

    What is in those stays where it is, and is linked; what decomposePar would write over is
    copied, as it tells reconstructPar how the case is cut until then. Raises BadInput.
    """
    path = case
    try:
        for path in (case / "constant", case / "system", case / "constant" / "polyMesh"):
            if path.is_symlink() and path.is_dir():
                draft = path.with_name(f".{path.name}.{os.getpid()}.new")
                draft.mkdir()
                for entry in path.resolve().iterdir():
                    (draft / entry.name).symlink_to(entry)
                path.unlink()
                draft.rename(path)
        for path in map(case.joinpath, BESIDE):
            if path.is_symlink() and path.is_file():
                draft = path.with_name(f".{path.name}.{os.getpid()}.new")
                shutil.copyfile(path, draft)
                draft.replace(path)
            elif path.is_symlink():
                path.unlink()
    except OSError as error:
        raise BadInput(f"{path}: cannot be made the run's own: {error.strerror}") from None


def make(case: Path, ranks: int) -> None:
    """Replace the processor directories, after `check`, by those of the case's own decomposition.

    On one rank there are none. Raises BadInput or WorkFailed with the reason.
    """
    remove_all(case)
    if ranks == 1:
        return
    try:
        # Its words are for a log; standard output may be for a program that reads JSON.
        done = subprocess.run([_PROGRAM, "-force"], cwd=case, stdout=2, check=False)
    except OSError as error:
        raise _not_run(error.strerror) from None
    if done.returncode:
        remove_all(case)  # as on a full disk, they may have a mesh and no fields
        raise WorkFailed(f"{_PROGRAM} in {case} ended with exit code {done.returncode}")


def remove_all(case: Path) -> None:
    """Remove the processor directories. Raises BadInput."""
    try:
        for directory in control_dict.directories(case):
            # decomposePar, too, would remove what is behind a link.
            directory.unlink() if directory.is_symlink() else shutil.rmtree(directory)
    except OSError as error:
        raise BadInput(f"{error.filename}: cannot be removed: {error.strerror}") from None
