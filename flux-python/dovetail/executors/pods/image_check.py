# SPDX-License-Identifier: LGPL-3.0-or-later
"""Tells whether a container image is of use: run in a container of it, by the machine's Python.

Input: one argument, JSON: `programs`, pairs of a program and the PATH to look on (the image's own
if empty), and `libraries`, the MPI that each profiling library is for. Output: nothing and exit
code 0, or a line that says what is wrong, and 1.
"""

from __future__ import annotations

import json
import os
import platform
import struct
import sys

from dovetail.mpi import launcher

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_MACHINES = {3: "i386", 20: "ppc", 21: "ppc64", 22: "s390x", 40: "arm", 62: "x86_64",
             183: "aarch64", 243: "riscv64", 258: "loongarch64"}  # fmt: skip


def machine_of(file: str) -> str:
    """The architecture that a program is for; empty for a script, or what cannot be read."""
    try:
        with open(file, "rb") as program:
            header = program.read(20)
    except OSError:
        return ""
    if len(header) < 20 or header[:4] != b"\x7fELF":
        return ""
    (number,) = struct.unpack(">H" if header[5] == 2 else "<H", header[18:20])
    return _MACHINES.get(number, f"machine {number}")


def trouble(programs: list[list[str]], libraries: Mapping[str, str]) -> str:
    """What is wrong; empty if nothing is."""
    own = os.environ.get("PATH", os.defpath)
    here = machine_of("/proc/self/exe") or platform.machine()
    starters = [name for name in launcher.STARTERS if launcher.which(name, own)]
    found = {"sh": launcher.which("sh", own)}
    for name, path in programs:
        if "/" not in name or name.startswith("/"):
            found[name] = launcher.which(name, path or own)
    found["mpirun"] = launcher.which(starters[0], own) if starters else ""
    for file in found.values():
        its = machine_of(file) if file else ""
        if its and its != here:
            return f"it is for {its}, and the node is {here}"
    for name, file in found.items():
        if not file:
            return f"it has no program {name}" + ("" if "/" in name else f" on its PATH, {own}")
    kinds = {launcher.flavour(found[name], own) for name in found if name != "sh"}
    for mpi in sorted(kinds & libraries.keys()):
        said = _loads(found["sh"], libraries[mpi])
        if said:
            return f"its C library does not load {os.path.basename(libraries[mpi])}: {said}"
    return ""


def _loads(shell: str, library: str) -> str:
    """What the image's loader says against a library of ours; empty for nothing."""
    output, output_end = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, output_end, 2)]
    environment = {**os.environ, "LD_PRELOAD": library}
    pid = os.posix_spawn(shell, [shell, "-c", ":"], environment, file_actions=actions)
    os.close(output_end)
    with open(output, errors="replace") as file:
        said = file.read().strip().splitlines()
    _, status = os.waitpid(pid, 0)
    if status or said:
        return said[0] if said else f"exit code {os.waitstatus_to_exitcode(status)}"
    return ""


def main() -> None:
    """Say what is wrong."""
    asked = json.loads(sys.argv[1])
    sys.exit(trouble(asked["programs"], asked["libraries"]) or 0)
