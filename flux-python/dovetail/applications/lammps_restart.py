# SPDX-License-Identifier: LGPL-3.0-or-later
"""Stops LAMMPS at a restart file, and goes on from there on any number of ranks.

Inputs: the run's own copy of a case, the input script in it, and every how many time steps it may
be stopped. Outputs: that script with commands of ours in it; restart files beside it.

LAMMPS has all that is needed, but in its script alone: `restart` writes two files in turn, `fix
halt` ends the run once there is a certain file, and `read_restart` takes the place of whatever made
the atoms. So a plain script can be gone on with: one that makes its box once and has one `run`
with a number. For others `begin` says why they cannot.

Atoms, velocities and the state of fixes go on; the order of atoms in memory, and so the last
digits of sums, may be another, as after any restart of LAMMPS.

Invariants: each function may be cut off at any point, and may then be called again; the user's
own script is kept beside the other, with `.orig` after its name.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
from pathlib import Path

from dovetail.core.errors import BadInput
from dovetail.host.private_files import write_whole

_STOP = "dovetail.stop"
_RESTARTS = ("dovetail.restart.1", "dovetail.restart.2")
_MAGIC = b"LammpS RestartT\0"
_LARGEST = 1 << 20  # bytes of a script

# What a restart file holds, and making it once more would spoil.
_IN_RESTART = {
    "change_box", "create_atoms", "delete_atoms", "displace_atoms", "group", "replicate",
    "reset_timestep", "set", "velocity",
}  # fmt: skip
_MAKES_BOX = {"create_box", "read_data"}
# With these it is not in the line alone what is done, or how often.
_NOT_PLAIN = {
    "clear", "create_bonds", "delete_bonds", "if", "include", "jump", "label", "minimize", "neb",
    "next", "partition", "prd", "python", "quit", "read_dump", "read_restart", "rerun", "restart",
    "shell", "tad", "temper",
}  # fmt: skip


def begin(case: Path, script: str, every: int) -> None:
    """Make a case ready to be stopped at each so many steps; before LAMMPS first starts.

    Raises BadInput with the reason if it cannot be.
    """
    original = _original(case, script)
    if not original.exists():
        try:
            draft = original.with_name(f".{original.name}.new")
            shutil.copyfile(case / script, draft)
            draft.replace(original)
        except OSError as error:
            raise BadInput(f"{case / script}: cannot be kept: {error.strerror}") from None
    for name in (_STOP, *_RESTARTS):
        (case / name).unlink(missing_ok=True)
    write_whole(case / script, stoppable(_lines(original), every, going_on_from=""))


def stop(case: Path) -> None:
    """Have the running LAMMPS end at the next step at which it writes a restart file."""
    (case / _STOP).touch()


def go_on(case: Path, script: str, every: int) -> int | None:
    """Make the case ready to go on from its last whole restart file; the step of that.

    None if there is none.
    """
    found = [(step, name) for name in _RESTARTS if (step := written_step(case / name)) is not None]
    original = _original(case, script)
    if not found or not original.exists():
        return None
    step, name = max(found)
    write_whole(case / script, stoppable(_lines(original), every, going_on_from=name))
    (case / _STOP).unlink(missing_ok=True)
    return step


def stoppable(lines: list[str], every: int, going_on_from: str) -> str:
    """The script with commands of ours; `going_on_from` is a restart file, "" at the start.

    Raises BadInput if it is no plain script.
    """
    out: list[str] = []
    steps, has_box = 0, False
    for line in lines:
        words = line.partition("#")[0].split()
        command = words[0] if words else ""
        if command in _NOT_PLAIN:
            raise BadInput(f"'{line.strip()}': a script with `{command}` cannot be gone on with")
        if command == "run":
            if steps or len(words) != 2 or not re.fullmatch(r"[1-9][0-9]{0,17}", words[1]):
                raise BadInput(f"'{line.strip()}': one `run` with a number can be gone on with")
            steps = int(words[1])
            out += _run(steps, every, has_box)
        elif steps or not going_on_from:
            out.append(line)
        elif command in _MAKES_BOX:
            if not has_box:
                out.append(f"read_restart {going_on_from}")
        elif command == "dump" and len(words) > 5:
            out += [line, f"dump_modify {words[1]} append yes"]
        elif command not in _IN_RESTART:
            out.append(line)
        has_box = has_box or command in _MAKES_BOX
    if not steps:
        raise BadInput("a script without `run` cannot be stopped and gone on with")
    return "\n".join([*out, ""])


def _run(steps: int, every: int, has_box: bool) -> list[str]:
    """The run, up to the step where the user's ends, and what happens when it is stopped."""
    if not has_box:
        raise BadInput("`run` comes before `create_box` or `read_data`, and cannot be gone on with")
    return [
        f"variable dovetail_stop equal is_file({_STOP})",
        f"restart {every} {' '.join(_RESTARTS)}",
        f"fix dovetail_stop all halt {every} v_dovetail_stop != 0 error soft message no",
        f"run {steps} upto start 0 stop {steps}",
        'if "${dovetail_stop} != 0" then quit',
        "unfix dovetail_stop",
        "restart 0",
    ]


def written_step(path: Path) -> int | None:
    """The step at which a restart file was written; None if it is not whole."""
    try:
        with path.open("rb") as file:
            head = file.read(4096)
            file.seek(-len(_MAGIC), os.SEEK_END)
            end = file.read()
    except OSError:
        return None
    if not head.startswith(_MAGIC) or end != _MAGIC:
        return None
    # Endianness and revision; then number and value of each item: the fifth is the step.
    at = len(_MAGIC) + 8
    try:
        while True:
            (item,) = struct.unpack_from("=i", head, at)
            at += 4
            if item == 5:
                return int(struct.unpack_from("=q", head, at)[0])
            (value,) = struct.unpack_from("=i", head, at)
            at += 4 + (value if item in (0, 4) else 0)  # a text, which begins with its length
            if not 0 <= item < 256 or not 0 <= at <= len(head):
                return None
    except struct.error:
        return None


def _original(case: Path, script: str) -> Path:
    """Where the user's script is kept; raises BadInput for one that is not in the case."""
    path = case / script
    if Path(script).is_absolute() or path.parent.resolve() != case.resolve():
        raise BadInput(f"{script}: an input script in the case's own directory would be right")
    return path.with_name(f"{path.name}.orig")


def _lines(path: Path) -> list[str]:
    """The commands of a script, those over several lines in one."""
    try:
        with path.open(errors="replace") as file:
            text = file.read(_LARGEST)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    return re.sub(r"&[ \t]*\n", " ", text).splitlines()
