# SPDX-License-Identifier: LGPL-3.0-or-later
"""Command lines of a plan: split without a shell, and found before anything starts.

Input: a string or a list of words from the plan. Output: words for an executor to run, or a
ValueError that says what to write instead. `search_path` is the PATH to run them with, and
`found_by` what a machine needs for them that does not have our environment.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping

from dovetail.core.units import show
from dovetail.host import install_paths

# A word that a shell would not pass on: a pipe, a list of commands, a redirection.
_SHELL = re.compile(r"\|\|?|&&?|;|\d*[<>].*|\S*;")


def search_path(environment: Mapping[str, str]) -> str:
    """The PATH on which commands are found: as given, then where `dovetail` itself lives.

    The second part lets a plan say `dovetail decompose` when nobody has activated the Python
    environment that `dovetail` is installed in.
    """
    path = environment.get("PATH", os.environ.get("PATH", os.defpath))
    return os.pathsep.join([path, os.path.dirname(sys.executable)])


def found_by(environment: Mapping[str, str]) -> dict[str, str]:
    """PATH, and LD_LIBRARY_PATH if it is set: by them programs and their libraries are found."""
    libraries = environment.get("LD_LIBRARY_PATH", os.environ.get("LD_LIBRARY_PATH", ""))
    more = {"LD_LIBRARY_PATH": libraries} if libraries else {}
    return {"PATH": search_path(environment), **more}


def split(value: object) -> tuple[str, ...]:
    """The words of a command line, given as one string or as a list of words."""
    if isinstance(value, str):
        try:
            words = shlex.split(value)
        except ValueError as error:
            raise ValueError(f"{show(value)}: {str(error).lower()}") from None
        shell = [word for word in words if _SHELL.fullmatch(word)]
        if shell:
            raise ValueError(
                f"{shell[0]} in {show(value)} needs a shell, and there is none; "
                "put the line into a script and name that"
            )
    elif isinstance(value, list) and all(isinstance(word, str) for word in value):
        words = value
    else:
        raise ValueError(f"{show(value)} is not a command line, nor a list of words (in quotes)")
    if not words or not words[0].strip():
        raise ValueError("an empty command")
    if any("\0" in word for word in words):
        raise ValueError(f"{show(value)} has a NUL in it")
    return tuple(words)


def program(line: str) -> list[str]:
    """The words of a prepare line as they are to be run.

    `dovetail` is the one that runs the plan: another version may not know what is asked of it.
    """
    words = list(split(line))
    if words[0] != "dovetail":
        return words
    return [*install_paths.dovetail_command((sys.executable,)), *words[1:]]


def check(word: str, case: str | None, environment: Mapping[str, str]) -> None:
    """Raise ValueError unless the program `word` is there.

    A bare name is looked for on PATH, a path from the `case` directory (None: not looked for,
    since the case itself is missing).
    """
    check_name(word)
    if "/" not in word:
        if shutil.which(word, path=search_path(environment)) is None:
            raise ValueError(f"{show(word)} is not found on PATH; install it or give its path")
    elif case is not None and shutil.which(os.path.join(case, word)) is None:
        raise ValueError(f"{show(word)} is not a program (looked for it from {show(case)})")


def check_name(path: str) -> None:
    """Raise ValueError where no file can be called so, as in a locale without these letters."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise ValueError(f"{show(path)} is no path in this locale; use a UTF-8 one") from None
