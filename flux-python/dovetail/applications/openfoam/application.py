# SPDX-License-Identifier: LGPL-3.0-or-later
"""OpenFOAM as an application: its case is cut for the ranks, and its solver told so.

Input: a simulation. Outputs: its command with `-parallel`, or without it on one rank, where
solvers refuse it; the step that cuts its copied case, which does nothing where it is cut so.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from dovetail.applications.openfoam import control_dict
from dovetail.core.errors import BadInput
from dovetail.core.protocol import Spec
from dovetail.host import install_paths

PARALLEL = "-parallel"
_IN_ONE_PIECE = "find . -maxdepth 1 -type d -name 'processor*[0-9]' -exec rm -rf {} +"


def command(spec: Spec) -> tuple[str, ...]:
    """The solver, told whether it is one of several ranks."""
    if spec.ranks == 1:
        return tuple(word for word in spec.command if word != PARALLEL)
    return spec.command if PARALLEL in spec.command else (*spec.command, PARALLEL)


def prepare(spec: Spec) -> tuple[str, ...]:
    """Cut the case; see dovetail-decompose(1). For one rank, what it was cut into is removed."""
    case = Path(spec.case)
    if spec.ranks == 1 and not spec.prepare and control_dict.times(case):
        if not any(case.glob("processor*")):
            return ()
        if not control_dict.starts_in_parts(case):
            return (_IN_ONE_PIECE,)
    cut = ("--ranks", "{ranks}", "--weights", "{weights}", "--force", "--apply", ".")
    return (" ".join(("dovetail", "decompose", *cut)),)


def checkpoint(spec: Spec, step: str) -> str:
    """See the module of that name. Raises BadInput where the command asks for collated files."""
    for option, handler in zip(spec.command, spec.command[1:]):
        if option == "-fileHandler" and handler in control_dict.COLLATED:
            raise BadInput("its command has files collated; use uncollated ones")
    statement = "from dovetail.applications.openfoam.checkpoint import main; main()"
    return shlex.join([*install_paths.python_command(statement), step, *map(str, spec.weights)])


def expected_iterations(spec: Spec) -> int:
    """Time steps by the case's controlDict."""
    return control_dict.iterations(Path(spec.case))
