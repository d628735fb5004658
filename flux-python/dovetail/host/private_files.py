# SPDX-License-Identifier: LGPL-3.0-or-later
"""Files that are replaced as a whole, some of which only their owner can read.

Inputs: a path and its new text. Output: the file. Invariants: whoever opens the path sees the old
text or the new one, never a part, whoever else writes it at that moment; a private file is private
from its first byte on; of a write that fails nothing is left.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from dovetail.core.errors import BadInput


@contextlib.contextmanager
def looking(at: object) -> Iterator[None]:
    """BadInput where a path that was given cannot even be looked at.

    It is in a folder that others may not search, or of links that lead to each other.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or "its links lead to each other"
        raise BadInput(f"{at}: cannot be used: {why}") from None


def written(path: Path) -> bool:
    """Whether a file is there, and not empty, as a machine that went down may leave a new one.

    Raises OSError.
    """
    return path.exists() and not (path.is_file() and path.stat().st_size == 0)


def replaceable(path: Path) -> bool:
    """Whether a file can be put there: in place of one, or of nothing, and of no device or pipe.

    Where root replaces /dev/null it is gone for everybody. Raises OSError.
    """
    return path.absolute().parent.is_dir() and (path.is_file() or not path.exists())


def input_path(text: str) -> Path:
    """What an argument names; BadInput where that is nothing, as of an unset variable."""
    if not text:
        raise BadInput("'' names nothing; a path would be right, or . for this directory")
    return Path(text)


def output_path(text: str) -> Path:
    """What -o names; BadInput where that is nothing, as of an unset variable of the shell."""
    if not text:
        raise BadInput("-o '': names nothing; a path would be right, or . for this directory")
    return Path(text)


def check_output(option: str, path: Path) -> None:
    """Say at the start, not after an hour, that a file cannot be written. Raises BadInput."""
    folder = path.absolute().parent
    with looking(f"{option} {path}"):
        right = replaceable(path)
    if not right:
        raise BadInput(f"{option} {path}: a file in an existing directory would be right")
    if not os.access(folder, os.W_OK):
        raise BadInput(f"{option} {path}: its directory is not writable")


def write_whole(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace a file in one step; `mode` is what the user's umask leaves of it.

    Raises OSError. What UTF-8 cannot hold becomes a question mark.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    draft.unlink(missing_ok=True)  # of a dead process with our number
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None  # a full disk names no file


def write_private(path: Path, text: str) -> None:
    """Replace a file in one step; only its owner can read it."""
    write_whole(path, text, 0o600)
