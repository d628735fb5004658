# SPDX-License-Identifier: LGPL-3.0-or-later
"""One cut of a case for all copies of it in a run.

A run copies the user's case for each simulation, and has each copy cut. Copies that are alike in
all that decomposePar may read are cut alike, so the cut of the first is copied to the others: of a
mesh of 782,000 cells in a second, where cutting it takes twenty.

Inputs: a copy, and what tells one cut from another. Outputs: its processor directories, those of
another copy; `MARK` in a copy that is cut, with what they were like then.

Invariants: nothing is taken of a cut that was changed since, as by a solver; a copy that has any
other file, or uses another value of the environment, is cut by itself, and so is one whose files
compute something; what could not be copied whole is removed.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import mmap
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from dovetail.applications.openfoam import control_dict, processors
from dovetail.core.errors import BadInput
from dovetail.host.private_files import write_whole

MARK = ".dovetail-cut"
"""In a copy that is cut: what decided how, and what its processor directories had then."""

_OURS = ("constant/cellDecomposition", "system/decomposeParDict")
_VARIABLE = re.compile(rb"\$\{?([A-Za-z_]\w*)")
_TOOL = (b"PATH", b"WM_", b"FOAM_")
"""Variables with such names say which decomposePar there is, and how it writes."""
_COMPUTED = re.compile(rb"#(?:calc|codeStream|eval|system)\b")


def key(case: Path, words: Sequence[str]) -> str:
    """What decides how this copy is cut, of which `words` are the options; "" if nobody knows."""
    first = _first(case)
    if first is None:
        return ""
    digest = hashlib.blake2b(repr(list(words)).encode())
    used = {name: text for name, text in os.environb.items() if name.startswith(_TOOL)}
    try:
        for path in _files(case, first):
            if not path.is_file():
                return ""  # a pipe, or a link that leads nowhere
            with _content(path) as data:
                if _COMPUTED.search(data):
                    return ""
                names = {found[1] for found in _VARIABLE.finditer(data) if found[1] in os.environb}
                digest.update(repr((os.fsencode(path.relative_to(case)), len(data))).encode())
                digest.update(data)
            used.update((name, os.environb[name]) for name in names)
    except (OSError, EOFError, zlib.error):
        return ""
    digest.update(repr(sorted(used.items())).encode())
    return digest.hexdigest()


def find(case: Path, wanted: str) -> Path | None:
    """Another copy in the same run that is cut as this one is to be; None if there is none."""
    own = case.resolve()
    for mark in sorted(own.parent.parent.glob(f"*/{own.name}/{MARK}")) if wanted else ():
        told = _read(mark.parent)
        alike = mark.parent != own and told.get("key") == wanted
        if alike and told.get("parts") == _parts(mark.parent):
            return mark.parent
    return None


def take(other: Path, case: Path) -> bool:
    """Copy that one's cut; False if it did not stay whole meanwhile, or there is no room."""
    marked, first = _read(other), _first(other)
    try:
        processors.remove_all(case)
        for place in control_dict.directories(other):
            for folder in _of_cut(place, first):
                shutil.copytree(folder, case / place.name / folder.name, symlinks=True)
        for name in _OURS:
            shutil.copy2(other / name, case / name)
    except (OSError, shutil.Error):
        marked = {}
    if marked and marked.get("parts") == _parts(case):
        offer(case, str(marked["key"]))
        return True
    with contextlib.suppress(BadInput):
        processors.remove_all(case)
    return False


def offer(case: Path, made_by: str) -> None:
    """Let other copies take this one's cut, which was just made so."""
    if made_by:
        with contextlib.suppress(OSError):
            write_whole(case / MARK, json.dumps({"key": made_by, "parts": _parts(case)}))


def _first(case: Path) -> float | None:
    """The time whose fields are cut; None where the case does not say it plainly."""
    found = control_dict.entries(case)
    if not found or control_dict.INCLUDED in found:
        return None
    return control_dict.start(control_dict.times(case), found)


def _files(case: Path, first: float) -> Iterator[Path]:
    """The files of a copy, also behind links, but those of other times, of ranks and of logs."""
    seen = set()
    for name, folders, files in os.walk(case, followlinks=True):
        folder = Path(name)
        if folder.resolve() in seen:
            folders.clear()  # a link leads back
            continue
        seen.add(folder.resolve())
        if folder == case:
            parts = {path.name for path in control_dict.directories(case)}
            kept = [one for one in folders if control_dict.number(one) in (None, first)]
            folders[:] = [one for one in kept if one not in parts]
            files = [one for one in files if not one.startswith(("log", ".dovetail"))]
        folders.sort()
        yield from (folder / one for one in sorted(files))


@contextlib.contextmanager
def _content(path: Path) -> Iterator[bytes | mmap.mmap]:
    """A file's content, which may be larger than the memory."""
    with open(path, "rb") as file:
        if path.suffix == ".gz":
            yield gzip.decompress(file.read())
        elif not os.fstat(file.fileno()).st_size:
            yield b""
        else:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield data


def _of_cut(place: Path, first: float | None) -> list[Path]:
    """What decomposePar writes in a processor directory: its mesh, and fields of one time."""
    there = [path for path in place.iterdir() if path.is_dir()]
    return [
        one for one in there if one.name == "constant" or control_dict.number(one.name) == first
    ]


def _parts(case: Path) -> str:
    """What the cut's files are like: where they are, of which size, and when each was written."""
    first, digest = _first(case), hashlib.blake2b()
    with contextlib.suppress(OSError):
        folders = [one for place in control_dict.directories(case) for one in _of_cut(place, first)]
        paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
        for path in sorted([*paths, *(case / name for name in _OURS)]):
            found, name = path.stat(), os.fsencode(path.relative_to(case))
            digest.update(repr((name, found.st_size, found.st_mtime_ns)).encode())
        return digest.hexdigest()
    return ""  # it is being removed


def _read(case: Path) -> dict[str, object]:
    try:
        found = json.loads((case / MARK).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
