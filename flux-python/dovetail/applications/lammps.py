# SPDX-License-Identifier: LGPL-3.0-or-later
"""LAMMPS: it cuts its box itself, for any number of ranks.

So it is started like any program. Input: a simulation, and the input script in its case. Output:
the time steps that a plain script asks for.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from dovetail.applications import lammps_checkpoint
from dovetail.applications.generic import command as command
from dovetail.applications.generic import prepare as prepare
from dovetail.core import programs
from dovetail.core.errors import BadInput
from dovetail.core.protocol import Spec
from dovetail.host import install_paths

# With these, how often a line is run, or what it says, is not in the line.
_NOT_PLAIN = re.compile(
    r"\s*(clear|if|include|jump|label|minimize|neb|next|partition|prd|python|rerun|shell|tad|"
    r"temper|run\s+.*\b(upto|start|stop|every)\b)\b"
)
_RUN = re.compile(r"\s*run\s+(\S+)")
_INDEX = re.compile(r"\s*variable\s+(\w+)\s+index\s+(\S+)")
_VALUE = re.compile(r"\$(?:\{(\w+)\}|(\w))")
_LARGEST = 1 << 20  # bytes of an input script


def checkpoint(spec: Spec, step: str) -> str:
    """See `lammps_checkpoint`. What is to be cut anew is balanced by LAMMPS.

    Raises BadInput where the command names no script, or, if that is to be checked and the case has
    it already, one that cannot be gone on with; or has partitions, whose restart files nobody tells
    apart.
    """
    script = _option(spec.command, "-in", "-i")
    if script is None:
        raise BadInput("its command has no `-in SCRIPT`")
    if programs.partitions(spec.command):
        raise BadInput("its partitions would all write the same restart files")
    if step == "check":
        if Path(spec.case, script).exists():
            lammps_checkpoint.check(Path(spec.case), script)
        return ""
    statement = "from dovetail.applications.lammps_checkpoint import main; main()"
    log = [_option(spec.command, "-log", "-l") or "log.lammps"] if step == "go-on" else []
    balanced = ["balanced"] if spec.recut and step in ("begin", "go-on") else []
    return shlex.join([*install_paths.python_command(statement), step, script, *log, *balanced])


def expected_iterations(spec: Spec) -> int:
    """The sum of the script's `run` lines, if it has no loops.

    Their numbers may be in `index` variables, which those of the command line go before.
    """
    script = _option(spec.command, "-in", "-i")
    if script is None:
        return 0
    try:
        path = lammps_checkpoint.current(Path(spec.case), script)
        if not path.is_file():  # a pipe would have us wait for who writes to it
            return 0
        with path.open(errors="replace") as file:
            lines = file.read(_LARGEST).replace("&\n", " ").split("\n")
    except OSError:
        return 0
    steps, variables = 0, _variables(spec.command)
    for line in lines:
        line = line.partition("#")[0]
        if _NOT_PLAIN.match(line):
            return 0
        if found := _INDEX.match(line):
            variables.setdefault(found[1], found[2])
        if found := _RUN.match(line):
            number = _VALUE.sub(lambda at: variables.get(at[1] or at[2], at[0]), found[1])
            if not re.fullmatch(r"[0-9]{1,12}", number):
                return 0
            steps += int(number)
    return steps


def _variables(words: Sequence[str]) -> dict[str, str]:
    """Variables that the command sets: `-var NAME VALUE`."""
    places = zip(words, words[1:], words[2:])
    return {name: value for word, name, value in places if word in ("-var", "-v")}


def _option(words: Sequence[str], *names: str) -> str | None:
    """The file that an option of LAMMPS names, as seen from the case; None without it.

    Options before the program are its starter's, as `mpiexec -l`.
    """
    own = programs.from_lammps_on(words) or words  # a plan may say that another program is one
    return next((after for word, after in zip(own, own[1:]) if word in names), None)
