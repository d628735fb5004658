# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a program needs to run on any number of ranks: OpenFOAM, LAMMPS, and all others.

Input: a simulation whose plan lets it run on several numbers of ranks, with the one that was
chosen. Output: the same as it is to be started: its command, and the steps before it that cut its
case. An application is a module with the four functions of `Application`; dovetail-applications(7)
has an example.

Invariants: what has one number of ranks is started as its plan says; the user's own case
directory is read and not changed, since steps run in a copy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Protocol

from dovetail.applications import generic, lammps
from dovetail.applications.openfoam import application as openfoam
from dovetail.core import programs
from dovetail.core.protocol import Spec


class Application(Protocol):
    """What a module must have to be an application; `spec` has the ranks that were chosen."""

    def command(self, spec: Spec) -> tuple[str, ...]:
        """The program and its arguments, on that many ranks."""

    def prepare(self, spec: Spec) -> tuple[str, ...]:
        """Command lines to run in the copied case, after the user's own."""

    def checkpoint(self, spec: Spec, begins: bool) -> str:
        """What makes a case ready for checkpoints, or for going on; "" if there are none.

        It is run in the copied case: as it `begins`, after `prepare`; otherwise instead, and see
        `Spec.go_on` for what it must print.
        """

    def expected_iterations(self, spec: Spec) -> int:
        """How many iterations the user's case says that it takes; 0 if that cannot be told."""


APPLICATIONS: Final[dict[str, Application]] = {
    "openfoam": openfoam,
    "lammps": lammps,
    "generic": generic,
}
"""By the names of `core.programs`."""


def form(spec: Spec, continued: bool = False) -> Spec:
    """The simulation as it is to be started on `spec.ranks` ranks, or `continued` on them."""
    command, prepare, go_on = spec.command, spec.prepare, ""
    own = APPLICATIONS[spec.application]
    if spec.widths:
        command, prepare = own.command(spec), (*prepare, *own.prepare(spec))
    lines = [programs.filled(line, spec.ranks, spec.weights) for line in prepare]
    if spec.checkpoint and (begin := own.checkpoint(spec, True)):
        lines.append(begin)
        go_on = own.checkpoint(spec, False) if continued else ""
    return replace(
        spec,
        go_on=go_on,
        command=tuple(programs.filled(word, spec.ranks, spec.weights) for word in command),
        prepare=tuple(lines),
    )


def expected_iterations(spec: Spec) -> int:
    """The iterations that the plan expects, else those that the case says; 0 if unknown."""
    return spec.iterations or APPLICATIONS[spec.application].expected_iterations(spec)
