# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the words of a command tell: of which application it is, and where its ranks go.

Inputs: the words, or the lines, of a plan. Outputs: an application's name; the same words with
the ranks put in. Pure: the names of programs are all that is looked at.

Invariant: every application has a line in `PROGRAMS`, which `applications` goes by.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Final

PROGRAMS: Final = {
    "openfoam": re.compile(r"[A-Za-z]\w*Foam|foam(Multi)?Run"),
    "lammps": re.compile(r"lmp([_-].*)?|lammps.*"),
    "generic": re.compile(r".*", re.DOTALL),
}
"""The applications, and what their programs are called; the first that fits is taken."""

IN_PERIODS: Final = {"lammps"}
"""Applications whose cases tell of time steps, while what is counted may be periods of MPI calls,
of several steps or a part of one: nobody sees the steps of a program that is linked statically."""

OWN_COUNT: Final = {"openfoam", "lammps"}
"""Applications whose checkpoints tell of the iterations that are counted, if not in periods."""

_ALONE: Final = {"openfoam", "lammps"}
"""Applications whose programs on one rank need no starter: they start no processes by MPI."""

UNCUT: Final = {"generic"}
"""Applications whose cases nobody knows how to cut anew."""

BALANCES: Final = {"lammps"}
"""Applications that cut their cases anew by what they know themselves, and by no weights."""

_STARTER = re.compile(r"(mpirun|mpiexec|orterun|prterun)([.-].*)?")
# In a shell's script `${ranks}` is a variable of its own.
_PLACE = re.compile(r"(?<!\$)\{(ranks|weights)\}")


_PARTITIONS = {"-partition", "-p"}
_SIZE = re.compile(r"[0-9]{1,9}(x[0-9]{1,9})?")


def is_starter(word: str) -> bool:
    """Whether a program starts MPI programs, as `mpirun` does."""
    return _STARTER.fullmatch(word.rpartition("/")[2]) is not None


def application_of(command: Sequence[str]) -> str:
    """The application of a command, by the name of its program.

    After a starter such as `mpirun` any word may be the program.
    """
    words = command[1:] if is_starter(command[0]) else command[:1]
    names = [word.rpartition("/")[2] for word in words]
    known = (one for one, pattern in PROGRAMS.items() if any(map(pattern.fullmatch, names)))
    return next(known, "generic")


def from_lammps_on(command: Sequence[str]) -> Sequence[str]:
    """The words from LAMMPS's program on, those before being its starter's; none without it."""
    names = (n for n, word in enumerate(command) if application_of([word]) == "lammps")
    return command[next(names, len(command)) :]


def partitions(command: Sequence[str]) -> tuple[str, ...]:
    """The partitions that LAMMPS is to have its ranks in, as `4x1`; none where nothing says so."""
    own = from_lammps_on(command)
    at = next((n for n, word in enumerate(own) if word in _PARTITIONS), len(own))
    return tuple(itertools.takewhile(_SIZE.fullmatch, own[at + 1 :]))


def is_alone(application: str, ranks: int) -> bool:
    """Whether so many ranks of it are a program that needs no starter."""
    return ranks == 1 and application in _ALONE


def has_place(text: str) -> bool:
    """Whether `{ranks}` or `{weights}` is in it."""
    return _PLACE.search(text) is not None


def filled(text: str, ranks: int, weights: Sequence[float]) -> str:
    """The text with `{ranks}` as a number and `{weights}` as numbers with commas between."""

    def value(place: re.Match[str]) -> str:
        # A plan may have a hundred thousand ranks, and most of its words have no place for them.
        if place[1] == "ranks":
            return str(ranks)
        return ",".join(f"{weight:.17g}" for weight in weights)

    return _PLACE.sub(value, text)
