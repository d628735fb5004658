# SPDX-License-Identifier: LGPL-3.0-or-later
"""The OpenFOAM cases that the comparisons run.

Input: the pitzDaily tutorial of the installed OpenFOAM examples. Output: a meshed and, for more
than one rank, decomposed case. Invariant: a case depends on its arguments alone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dovetail.core.errors import BadInput, WorkFailed
from dovetail.mpi.launcher import complaint

TUTORIALS = (
    "/usr/share/doc/openfoam-examples/examples/incompressible/simpleFoam/pitzDaily",
    "/usr/share/openfoam/tutorials/incompressible/simpleFoam/pitzDaily",
)

SOLVER = ("simpleFoam", "-parallel")
OPENFOAM_ETC = "/usr/share/openfoam"  # where Debian's package keeps what WM_PROJECT_DIR names


def environment() -> dict[str, str]:
    """The environment that OpenFOAM needs; what the user has set stays."""
    made = dict(os.environ)
    if os.path.isdir(OPENFOAM_ETC):
        made.setdefault("WM_PROJECT_DIR", OPENFOAM_ETC)
    return made


def tool(case: Path, *words: str) -> None:
    """Run one preparing command in a case; raises WorkFailed with what it complains of."""
    done = subprocess.run(
        words, cwd=case, env=environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = complaint(done.stdout + done.stderr)
        raise WorkFailed(f"{' '.join(words)} in {case}: exit code {done.returncode}: {said}")


def pitz_daily(
    case: Path, weights: Sequence[float], iterations: int, *, refine: int = 2, centre: str = ""
) -> Path:
    """Make the pitzDaily case with one rank per weight, cells in proportion to the weights.

    The tutorial has 12,225 cells; `refine` splits each of them into refine x refine (2: 48,900).
    The run is `iterations` long and writes no fields, so that the solver alone is measured.
    Ranks are concentric zones around `centre` ("X,Y,Z" in metres; default: the middle).
    """
    source = next((path for path in map(Path, TUTORIALS) if path.is_dir()), None)
    if source is None:
        raise BadInput("OpenFOAM's pitzDaily example is missing: install openfoam-examples")
    shutil.copytree(source, case)
    mesh = case / "system/blockMeshDict"
    mesh.write_text(
        re.sub(
            r"^(\s*)\((\d+) (\d+) 1\)$",
            lambda m: f"{m[1]}({int(m[2]) * refine} {int(m[3]) * refine} 1)",
            mesh.read_text(),
            flags=re.MULTILINE,
        )
    )
    endure(case, iterations)
    tool(case, "blockMesh")
    if len(weights) > 1:
        cut(case, weights, centre)
    return case


def endure(case: Path, iterations: int) -> None:
    """Make a run that many iterations long: it neither converges before, nor writes fields."""
    control = case / "system/controlDict"
    text = re.sub(r"(?ms)^functions\s*\{.*?^\}", "", control.read_text())
    for key, value in (("endTime", iterations), ("writeInterval", iterations + 1)):
        text = re.sub(rf"(?m)^{key}\s+\S+;", f"{key} {value};", text)
    control.write_text(text)
    # The tutorial stops when it has converged; here the length is part of the question.
    solution = case / "system/fvSolution"
    solution.write_text(re.sub(r"(?ms)residualControl\s*\{.*?\}", "", solution.read_text()))


def cut(case: Path, weights: Sequence[float], centre: str = "") -> None:
    """Cut a meshed case for one rank per weight, as `pitz_daily` says."""
    options = ["--ranks", str(len(weights)), "--weights", ",".join(map(str, weights))]
    if centre:
        options += ["--centre", centre]
    tool(case, sys.executable, "-m", "dovetail", "decompose", *options, ".")
    tool(case, "decomposePar")


def copies(scratch: Path, weights: Sequence[float], iterations: int, count: int) -> list[Path]:
    """The same case several times."""
    return [
        pitz_daily(scratch / f"{'-'.join(map(str, weights))}.{number}", weights, iterations)
        for number in range(count)
    ]


def mpirun(ranks: int) -> list[str]:
    """The plain command, as a user would type it."""
    return ["mpirun", "-np", str(ranks), *SOLVER]


def plan_entry(
    name: str,
    case: Path,
    weights: Sequence[float],
    count: int,
    ranks: str = "",
    command: Sequence[str] = SOLVER,
) -> str:
    """A plan of one entry, as text; `ranks` if they are not just as many as weights."""
    return f"""simulations:
  - name: {name}
    case: {case}
    ranks: {ranks or len(weights)}
    weights: {list(weights)}
    command: {" ".join(command)}
    count: {count}
    environment: {{WM_PROJECT_DIR: /usr/share/openfoam}}
"""
