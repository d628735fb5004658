# SPDX-License-Identifier: LGPL-3.0-or-later
"""Stops LAMMPS at a restart file, and goes on from there on any number of ranks.

Inputs: the run's own copy of a case, and the input script in it. Outputs: that script with commands
of ours in it; restart files beside it.

LAMMPS has all that is needed, but in its script alone: `fix halt` ends the run once there is a
certain file, `write_restart` then keeps what it computed, and `read_restart` takes the place of
whatever made the atoms. So a plain script can be gone on with: one that makes its box once and has
one `run` with a number. For others `begin` says why they cannot. A simulation that is killed goes
on from a restart file only if its own script wrote some, in turns (`restart 1000 a b`): to write
any on the way would cost time that most never need.

Where its ranks were measured to be loaded unlike, the script that begins, or goes on, has LAMMPS
balance its atoms once before the run. That is not done again and again by `fix balance`, as a run
then depends on what else the machine does, and no two have the same last digits.

Atoms, velocities and the state of fixes go on; the order of atoms in memory, and so the last
digits of sums, may be another, as after any restart of LAMMPS.

Invariants: each function may be cut off at any point, and may then be called again; the user's
own script is kept beside the other, with `.dovetail-` before its name.

    begin(case, "in.lj")    # before LAMMPS first starts
    stop(case, "in.lj")     # while it runs; it ends by itself
    unfinished(case, ...)   # once it has: True if it was before its last step
    go_on(case, "in.lj")    # 137, the step from which it goes on, once started
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import struct
import sys
from pathlib import Path

from dovetail.core.causes import NOT_NOW, NOTHING_LEFT
from dovetail.core.errors import BadInput
from dovetail.host.private_files import write_whole

_STOP = "dovetail.stop"
_LEFT = "dovetail.unfinished"  # until the run has come to its last step
_RESTARTS = ("dovetail.restart.1", "dovetail.restart.2")
_MAGIC = b"LammpS RestartT\0"
_STEPS = re.compile(r"[1-9][0-9]{0,17}|\$\{\w+\}|\$[A-Za-z]")
"""A number of steps, or a variable, which is the same whenever the script is run."""
_LARGEST = 1 << 20  # bytes of a script
_EVERY = 10
"""Steps after which LAMMPS looks whether it is to stop; a look opens a file, some microseconds."""

_BALANCE = "balance 1.1 shift {} 10 1.05"
"""Moves the planes between ranks until none has 5 % more atoms than the mean, in ten steps along
each axis, if one has 10 % more: what a measured load balance below 0.9 tells of."""

# What a restart file holds, or is about the beginning; to do it once more would spoil it.
_AT_FIRST = {
    "change_box", "create_atoms", "delete_atoms", "displace_atoms", "group", "replicate",
    "reset_atom_ids", "reset_atoms", "reset_ids", "reset_mol_ids", "set", "velocity", "write_data",
    "write_dump", "write_restart",
}  # fmt: skip
_NOT_KEPT = [["dynamic"], ["static"]]  # of a group: a restart file has its atoms of that step
_MAKES_BOX = {"create_box", "read_data"}
# With these it is not in the line alone what is done, or how often.
_NOT_PLAIN = {
    "clear", "create_bonds", "delete_bonds", "if", "include", "jump", "label", "minimize", "neb",
    "next", "partition", "prd", "python", "quit", "read_dump", "read_restart", "rerun",
    "reset_timestep", "shell", "tad", "temper",
}  # fmt: skip

# What begins its file anew whenever it is opened: dumps for all that `dump_modify append` says, by
# their style or by the end of their file's name; and fixes that name it without `file` before it.
_ANEW_DUMPS = {"cfg", "dcd", "image", "movie", "xtc"}
_ANEW_ENDS = (".bin", ".bz2", ".gz", ".lz4", ".lzma", ".xz", ".zst")
_APPEND_PACKED = ("/gz", "/zstd")  # styles that can
_ANEW_FIX = re.compile(r"(reax/c|reaxff)/(bonds|species)\b")

# What has something in memory that no restart file has: atoms that are still to come, sums, where a
# wall is. Some fixes do with one of these words alone.
_FORGETFUL = {"controller", "phonon", "pour", "thermal/conductivity", "vector", "viscosity"}
_FORGETFUL_WITH = {"ave/": {"running", "window"}, "wall/gran": {"wiggle"}}

# What a variable's formula may have that another step has another value of. Spacings of the lattice
# are none: they are what the script says, and no restart file has them.
_CHANGES = re.compile(
    r"(?<![\w.])([cf]_\w+|step|elapsed|elaplong|time|temp|press|pe|ke|etotal|evdwl|ecoul|epair|"
    r"ebond|eangle|edihed|eimp|emol|elong|enthalpy|vol|density|l[xyz]|[xyz](lo|hi)|x[yz]|"
    r"yz|p(xx|yy|zz|xy|xz|yz)|xcm|vcm|fcm|bound|gyration|angmom|torque|inertia|omega)(?!\w)"
)
_SINCE = re.compile(r"(?<![\w.])(elapsed|time)(?!\w)")
"""What counts from where the run goes on; `time` in LAMMPS before May 2022."""
_AT_ONCE = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z])|\((.*))")  # the value of now


def begin(case: Path, script: str, balanced: bool = False) -> None:
    """Make a case ready to be stopped, and to be `balanced`; before LAMMPS first starts.

    Raises BadInput with the reason if it cannot be.
    """
    path, original = case / script, users_script(case, script)
    text = check(case, script, balanced)
    if current(case, script) == path:
        try:
            draft = original.with_name(f".{original.name}.new")
            shutil.copyfile(path, draft)
            draft.replace(original)
        except OSError as error:
            raise BadInput(f"{path}: cannot be kept: {error.strerror}") from None
    for name in (_STOP, *_restarts(case, _lines(original))):
        (case / name).unlink(missing_ok=True)  # of an earlier run, as the case was copied
    (case / _LEFT).touch()
    write_whole(path, text)


def check(case: Path, script: str, balanced: bool = False) -> str:
    """The script as it is at first. Raises BadInput with the reason if it has no checkpoints."""
    path = case / script
    if Path(script).is_absolute() or path.parent.resolve() != case.resolve():
        raise BadInput(f"{script}: an input script in the case's own directory would be right")
    try:
        lines = _lines(current(case, script))
        return stoppable(lines, _RESTARTS[0], balanced=balanced)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None


def stop(case: Path, script: str) -> None:
    """Have the running LAMMPS write a restart file and end. Raises BadInput if it cannot."""
    if current(case, script) == case / script:
        raise BadInput(f"{case}: it was not made ready to be stopped")
    (case / _STOP).touch()


def unfinished(case: Path, script: str) -> bool:
    """Whether LAMMPS, which has ended well, was stopped before its last step.

    A restart file tells nothing of that: LAMMPS ends well too where the end of one is not on the
    disk, as that is full.
    """
    return current(case, script) != case / script and (case / _LEFT).exists()


def go_on(case: Path, script: str, balanced: bool = False) -> int | None:
    """Make the case ready to go on, `balanced`, from its last whole restart file; that one's step.

    None if there is none.
    """
    original = current(case, script)
    if original == case / script:
        return None
    lines = _lines(original)
    steps = {name: written_step(case / name) for name in _restarts(case, lines)}
    found = [(step, name) for name, step in steps.items() if step is not None]
    if not found:
        return None
    step, name = max(found)
    other = _RESTARTS[name == _RESTARTS[0]]
    (case / other).unlink(missing_ok=True)
    (case / _LEFT).touch()
    write_whole(case / script, stoppable(lines, other, name, balanced))
    (case / _STOP).unlink(missing_ok=True)
    return step


def stoppable(
    lines: list[str], stopped_at: str, going_on_from: str = "", balanced: bool = False
) -> str:
    """The script with commands of ours and names of restart files; "" is the beginning.

    Raises BadInput if it is no plain script.
    """
    out: list[str] = []
    formulas: dict[str, str] = {}
    steps, has_box, axes = "", False, "xyz"
    cuts: list[str] = []  # of the user's box among the ranks
    for line in lines:
        words = line.partition("#")[0].split()
        command = words[0] if words else ""
        if command in _NOT_PLAIN:
            raise BadInput(f"'{line.strip()}': a script with `{command}` cannot be gone on with")
        if command == "fix" and ("file" in words or _ANEW_FIX.match("".join(words[3:4]))):
            raise BadInput(f"'{line.strip()}': its file would begin anew")
        if _ends_early(words):
            raise BadInput(
                f"'{line.strip()}': it may end the run before its last step, as a stop does, and "
                "what the script does after it would be left out"
            )
        if command == "fix" and _forgets(words[3:]):
            raise BadInput(f"'{line.strip()}': no restart file has what this fix has in memory")
        formula = " ".join(words[3:]) if command == "variable" and words[2:3] != ["string"] else ""
        if since := _SINCE.search(formula):
            right = {"elapsed": "elaplong", "time": "step*dt"}[since[1]]
            raise BadInput(
                f"'{line.strip()}': going on, `{since[1]}` would count from there; "
                f"`{right}` would be right"
            )
        if command == "dump" and len(words) > 5 and _begins_anew(words[3], words[5]):
            raise BadInput(
                f"'{line.strip()}': its file would begin anew; "
                "one file per snapshot, with `*` in its name, would be right"
            )
        if not steps and command not in {*_AT_FIRST, "print"} and _of_now(line, formulas):
            raise BadInput(
                f"'{line.strip()}': going on, it would have the value of a later step; "
                "a number in its place would be right"
            )
        if command == "variable" and words[2:3] == ["equal"]:
            formulas[words[1]] = " ".join(words[3:])
        if command == "dimension":
            axes = "xy" if words[1:] == ["2"] else "xyz"
        if command == "run":
            if steps or len(words) != 2 or not _STEPS.fullmatch(words[1]):
                raise BadInput(f"'{line.strip()}': one `run` with a number can be gone on with")
            if not has_box:
                raise BadInput("`run` comes before `create_box` or `read_data`")
            steps = words[1]
            out += [_BALANCE.format(axes)] if balanced else cuts
            out += _run(steps, stopped_at)
        elif steps or not going_on_from:
            out.append(line)
        elif command == "balance":  # where it stands LAMMPS would forget the state of later fixes
            cuts.append(line)
        elif command in _MAKES_BOX:
            if not has_box:
                out.append(f"read_restart {going_on_from}")
        elif command == "restart" and words[2:3] == [going_on_from] and len(words) > 3:
            one, two = words[2:4]  # of which LAMMPS writes the first one first
            out.append(" ".join([*words[:2], two, one, *words[4:]]))
        elif command == "dump" and len(words) > 5:
            out += [line, f"dump_modify {words[1]} append yes"]
        elif command == "log" and len(words) == 2 and words[1] != "none":
            out.append(f"log {words[1]} append")
        elif command not in _AT_FIRST or (command == "group" and words[2:3] in _NOT_KEPT):
            out.append(line)
        has_box = has_box or command in _MAKES_BOX
    if not steps:
        raise BadInput("a script without `run` cannot be stopped and gone on with")
    return "\n".join([*out, ""])


def _of_now(line: str, formulas: dict[str, str]) -> bool:
    """Whether a line has the value that a formula has when it is read, and not at later steps."""
    used = [formulas.get(one[1] or one[2] or "", one[3] or "") for one in _AT_ONCE.finditer(line)]
    for _ in formulas:  # each may have others in it
        names = [name for text in used for name in re.findall(r"v_(\w+)", text)]
        used += [
            formulas[name] for name in names if name in formulas and formulas[name] not in used
        ]
    return any(map(_CHANGES.search, used))


def _ends_early(words: list[str]) -> bool:
    """Whether a command may end the run before its last step, and LAMMPS not with an error."""
    pairs = [*zip(words, words[1:])]
    if words[:1] == ["timer"]:
        return any(word == "timeout" and limit != "off" for word, limit in pairs)
    return words[:1] == ["fix"] and words[3:4] == ["halt"] and ("error", "hard") not in pairs


def _forgets(words: list[str]) -> bool:
    """Whether a fix, of which these are the style and what follows, could not go on as it was."""
    style, options = "".join(words[:1]), {*words[1:]}
    return style in _FORGETFUL or any(
        style.startswith(begin) and options & some for begin, some in _FORGETFUL_WITH.items()
    )


def _begins_anew(style: str, file: str) -> bool:
    """Whether a dump cannot be appended to, and is one file for all snapshots."""
    packed = file.endswith(_ANEW_ENDS) and not style.endswith(_APPEND_PACKED)
    return "*" not in file and (packed or style.partition("/")[0] in _ANEW_DUMPS)


def _restarts(case: Path, lines: list[str]) -> list[str]:
    """Restart files in the case: ours, and those that the user's script writes there in turns."""
    words = [line.partition("#")[0].split() for line in lines]
    own = [each[2:4] for each in words if each[:1] == ["restart"] and len(each) >= 4]
    names = [name for pair in own for name in pair]
    inside = [one for one in names if (case / one).resolve().is_relative_to(case.resolve())]
    return [*_RESTARTS, *inside]


def _run(steps: str, stopped_at: str) -> list[str]:
    """The run, up to the step where the user's ends, and what happens when it is stopped.

    Whether the file is there each rank sees for itself, and perhaps not at the same time. Older
    LAMMPS, such as Debian 12's, has each halt by what it sees, and wait for those that go on for
    ever: so what counts is the most that any sees.
    """
    return [
        f"variable dovetail_stop atom is_file({_STOP})",
        "compute dovetail_stop all reduce max v_dovetail_stop",
        "variable dovetail_stopped equal c_dovetail_stop",
        f"fix dovetail_stop all halt {_EVERY} v_dovetail_stopped > 0 error soft message no",
        f"run {steps} upto start 0 stop {steps}",
        f'if "$(step) < {steps}" then "write_restart {stopped_at}" quit',
        f"shell rm {_LEFT}",
        "unfix dovetail_stop",
        "uncompute dovetail_stop",
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


def users_script(case: Path, script: str) -> Path:
    """Where the user's script is kept."""
    path = case / script
    return path.parent / f".dovetail-{path.name}"


def current(case: Path, script: str) -> Path:
    """Where the user's script is: kept, if the one in its place is ours.

    A user's case may be what an earlier run made of another, with a new script in it: what was
    kept there is old. OSError where ours cannot be read.
    """
    path, kept = case / script, users_script(case, script)
    ours = kept.exists() and _LEFT in path.read_text(errors="replace")
    return kept if ours else path


def _lines(path: Path) -> list[str]:
    """The commands of a script, those over several lines in one."""
    if path.is_fifo():
        raise BadInput(f"{path}: is a pipe, which can be read once")
    try:
        with path.open(errors="replace") as file:
            text = file.read(_LARGEST)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    return re.sub(r"&[ \t]*\n", " ", text).splitlines()


def _keep_log(log: Path, step: int) -> None:
    """Give LAMMPS's log, which it begins anew, a name that is free, by the step that follows it."""
    kept = log.with_name(f"{log.name}.{step}")
    numbers = itertools.count(2)  # killed, it may go on from one step several times
    while kept.exists():
        kept = log.with_name(f"{log.name}.{step}.{next(numbers)}")
    if log.is_file():
        log.rename(kept)


# --- As steps of a launch ---


def main() -> None:
    """A step of `Spec` and the script, in the case; `go-on` prints how many steps are over.

    After the script `balanced` may follow, for `go-on` after the name of LAMMPS's log.
    What cannot be gone on with may run all the same, so `begin` never fails. Where `halted` cannot
    tell, there may be more to do.
    """
    verb, script, *how = sys.argv[1:]
    case, balanced = Path(), how[-1:] == ["balanced"]
    try:
        if verb == "halted":
            sys.exit(0 if unfinished(case, script) else NOTHING_LEFT)
        if verb in ("begin", "halt"):
            begin(case, script, balanced) if verb == "begin" else stop(case, script)
            return
        step = go_on(case, script, balanced)
    except (BadInput, OSError) as error:
        what = "it cannot go on" if verb == "go-on" else "no checkpoint"
        print(f"{what}: {error}", flush=True)
        sys.exit({"begin": 0, "halted": 0, "go-on": NOT_NOW}.get(verb, 1))
    if step is None:
        sys.exit("no restart file is whole")
    _keep_log(case / how[0], step)
    print(f"it goes on from this time step:\n{step}", flush=True)
