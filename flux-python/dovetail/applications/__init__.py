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

    def checkpoint(self, spec: Spec, step: str) -> str:
        """The command line for a step of stopping and going on; "" where nothing is to be done.

        It is run in the copied case: `begin` after `prepare`, so that the case is ready to be
        stopped; for `go-on`, `halt` and `halted` see `Spec`. For `check` nothing is run: before
        anything starts, it is to raise BadInput where the user's case has no checkpoints.
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
    command, prepare = spec.command, spec.prepare
    own = APPLICATIONS[spec.application]
    if spec.widths:
        command = own.command(spec)
    if spec.widths or spec.recut:
        prepare = (*prepare, *own.prepare(spec))
    begin = go_on = halt = halted = ""
    if spec.checkpoint:
        begin, halt, halted = (own.checkpoint(spec, step) for step in ("begin", "halt", "halted"))
        go_on = own.checkpoint(spec, "go-on") if continued else ""

    def filled(text: str) -> str:
        return programs.filled(text, spec.ranks, spec.weights)

    return replace(
        spec,
        go_on=filled(go_on),
        halt=filled(halt),
        halted=halted,
        command=tuple(map(filled, command)),
        prepare=(*map(filled, prepare), *filter(None, [begin])),
    )


def check_checkpoints(spec: Spec) -> None:
    """Raise BadInput where what may be stopped at a checkpoint, by its plan, cannot be.

    Not as it is started: its user's case may have changed by then, and it runs all the same.
    """
    form(spec)
    APPLICATIONS[spec.application].checkpoint(spec, "check")


def expected_iterations(spec: Spec) -> int:
    """The iterations that the plan expects, else those that the case says; 0 if unknown.

    They are known where ranks or a restart go by them, and not before the user's own prepare steps,
    which may change the case.
    """
    if spec.iterations or spec.prepare or not (spec.widths or spec.checkpoint):
        return spec.iterations
    return APPLICATIONS[spec.application].expected_iterations(spec)


def prepared_iterations(spec: Spec, case: str) -> int:
    """The same once its copied case is prepared; 0 if it was known before."""
    asked = replace(spec, case=case, prepare=())
    return 0 if spec.iterations else expected_iterations(asked)
