# SPDX-License-Identifier: LGPL-3.0-or-later
"""Which MPI a command line will use, so that the right library is preloaded.

In: the words of a command such as `mpirun -np 4 simpleFoam -parallel`. Out: `openmpi` or
`mpich`. The linked libraries of the program decide; scripts and interpreters hide theirs, and
then the launcher does. Raises BadInput for what cannot be profiled: static programs, a
launcher of the other MPI, commands that do not exist.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
from collections.abc import Sequence

from dovetail.core.errors import BadInput
from dovetail.mpi.launcher import linked, of_starter

LAUNCHERS = re.compile(r"(mpirun|mpiexec|orterun|prterun)([.-].*)?|hydra.*")
_SHELL = re.compile(r"([bd]?a|[ckz]|mk)?sh")
NO_COMMAND = "no command: `dovetail profile -- mpirun -np 4 PROGRAM` would be right"
PT_INTERP = 3


def mpi_of(command: Sequence[str]) -> str:
    """`openmpi` or `mpich`; raises BadInput."""
    if not command:
        raise BadInput(NO_COMMAND)
    first = shutil.which(command[0])
    if first is None:
        raise BadInput(f"{command[0]}: no such command")
    launcher = LAUNCHERS.fullmatch(os.path.basename(command[0])) is not None
    theirs = of_starter(first) if launcher else ""
    static = ""
    for word in command[1:] if launcher else command:
        file = shutil.which(word)
        kind = _of_program(file) if file else ""
        if kind in ("openmpi", "mpich"):
            if theirs and theirs != kind:
                raise BadInput(f"{word} is linked with {kind}, but {command[0]} is of {theirs}")
            return kind
        if kind == "static" and not static:
            static = word
    if static:
        raise BadInput(f"{static} is statically linked and cannot be profiled: link it dynamically")
    if not theirs:
        raise BadInput(
            f"{command[0]}: is no MPI launcher and not linked with Open MPI or MPICH; "
            "if it starts an MPI program, add --mpi openmpi or --mpi mpich"
        )
    return theirs


def by_starter(command: Sequence[str]) -> bool:
    """Whether a starter runs the ranks, as far as the command tells; any script may call one."""
    first = shutil.which(command[0])
    if first and _begins(first, b"#!"):
        return True
    names = [os.path.basename(part) for word in command for part in word.split()]
    shell = len(command) > 1 and _SHELL.fullmatch(os.path.basename(command[0]))
    return bool(shell) or any(LAUNCHERS.fullmatch(name) for name in names)


def _of_program(path: str) -> str:
    """`openmpi`, `mpich`, `static` or, for all else, empty."""
    if not _is_elf(path):
        return ""
    if not _has_interpreter(path):
        return "static"
    return linked(path)


def _is_elf(path: str) -> bool:
    return _begins(path, b"\x7fELF\x02")


def _begins(path: str, start: bytes) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(start)) == start
    except OSError:
        return False


def _has_interpreter(path: str) -> bool:
    """Whether a 64-bit ELF file asks for a dynamic linker, as the ELF specification has it."""
    try:
        with open(path, "rb") as file:
            header = file.read(64)
            offset, entry, count = (
                struct.unpack_from("=Q", header, 32)[0],
                *struct.unpack_from("=2H", header, 54),
            )
            file.seek(offset)
            table = file.read(entry * count)
        kinds = [struct.unpack_from("=I", table, i * entry)[0] for i in range(count)]
    except (OSError, struct.error):
        return False
    return PT_INTERP in kinds
