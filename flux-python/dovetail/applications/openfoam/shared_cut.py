# SPDX-License-Identifier: LGPL-3.0-or-later
"""One cut of a case for all copies of it in a run.

A run copies the user's case for each simulation, and has each copy cut. Copies that are alike in
all that decomposePar may read are cut alike, so the cut of the first is copied to the others: of a
mesh of 782,000 cells in a second, where cutting it takes twenty.

Inputs: a copy, and what tells one cut from another. Outputs: its processor directories, those of
another copy; `MARK` in a copy that is cut, with what they were like then.

Invariants: what is taken is what decomposePar wrote, to the byte; a copy that has any other file,
or uses another value of the environment, is cut by itself, and so is one whose files compute
something or include others from elsewhere; a cut that names the case it is of is of no other; what
could not be copied whole is removed, and nothing is written where links lead.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO

from dovetail.applications.openfoam import control_dict, processors
from dovetail.core.errors import BadInput
from dovetail.host.private_files import write_whole

MARK = ".dovetail-cut"
"""In a copy that is cut: what decided how, and what its processor directories had then."""

_OURS = ("constant/cellDecomposition", "system/decomposeParDict")
_VARIABLE = re.compile(rb"\$\{?([A-Za-z_]\w*)")
_TOOL = (b"PATH", b"WM_", b"FOAM_", b"LD_", b"HOME")
"""Variables with such names say which decomposePar there is, with what, and how it writes."""
_COMPUTED = re.compile(rb"#(?:calc|code|eval|stream|system)")
_ELSEWHERE = re.compile(
    rb'#s?include(?:IfPresent)?\s+"?'
    rb"(?:/|~/|\.\./\.\./|\$(?!\{?(?:FOAM_CASE|FOAM_ETC|WM_PROJECT_DIR)\b))"
)
"""What a file may include that is in no copy, or may change while a run goes on."""
_LOG = re.compile(r"log\b|log_|\.dovetail")
_PACKED = 1 << 27
"""Bytes of a compressed file that is looked into, at most: it takes as long as a cut."""
_PIECE = 1 << 20  # bytes that are read at once,
_OVERLAP = 1 << 12  # and of those before them, in which a word begins that is looked for
_TRIED = 8
"""Cuts of which it is seen whether they have changed, at most: where one has, all may have."""


def key(case: Path, words: Sequence[str]) -> str:
    """What decides how this copy is cut, of which `words` are the options; "" if nobody knows."""
    first, there = _first(case), control_dict.times(case)
    meshes = {control_dict.number(mesh.parent.name) for mesh in case.glob("*/*Mesh")}
    if first is None or (there and first not in there) or meshes.intersection(there) - {first}:
        return ""  # it begins from a time of another name, or on a mesh of another time
    digest = hashlib.blake2b(repr([*words, *_program()]).encode())
    used = {name: text for name, text in os.environb.items() if name.startswith(_TOOL)}
    try:
        for path in _files(case, first):
            if not path.is_file():
                return ""  # a pipe, or a link that leads nowhere
            content = _digest(path, lambda text: _is_unclear(text, used))
            if content is None:
                return ""
            digest.update(repr((os.fsencode(path.relative_to(case)), content)).encode())
    except (OSError, EOFError, zlib.error):
        return ""
    digest.update(repr(sorted(used.items())).encode())
    return digest.hexdigest()


def find(case: Path, wanted: str) -> Path | None:
    """Another copy in the same run that is cut as this one is to be; None if there is none."""
    own = case.resolve()
    marks = sorted(own.parent.parent.glob(f"*/{own.name}/{MARK}")) if wanted else ()
    others = (mark.parent for mark in marks if mark.parent != own and _same_owner(mark, own))
    told = ((other, _read(other)) for other in others)
    alike = ((other, mark) for other, mark in told if mark.get("key") == wanted)
    for other, mark in islice(alike, _TRIED):
        if mark.get("parts") == _parts(other):
            return other
    return None


def take(other: Path, case: Path) -> bool:
    """Copy that one's cut; False if it did not stay whole meanwhile, or there is no room."""
    marked, first = _read(other), _first(other)
    try:
        processors.remove_all(case)
        for place in control_dict.directories(other):
            for folder in _of_cut(place, first):
                shutil.copytree(folder, case / place.name / folder.name, symlinks=True)
        for path in _beside(other):
            own = case / path.relative_to(other)
            own.unlink(missing_ok=True)  # a link may lead to the user's own
            shutil.copy2(path, own)
    except (OSError, shutil.Error):
        marked = {}
    content = _of_all(case) if marked else ""
    if content and marked.get("content") == content:
        _mark(case, str(marked["key"]), content)
        return True
    with contextlib.suppress(BadInput):
        processors.remove_all(case)
    return False


def offer(case: Path, made_by: str) -> None:
    """Let other copies take this one's cut, which was just made so."""
    if made_by and (content := _of_all(case)):
        _mark(case, made_by, content)


def _mark(case: Path, made_by: str, content: str) -> None:
    if parts := _parts(case):
        told = {"key": made_by, "content": content, "parts": parts}
        with contextlib.suppress(OSError):
            write_whole(case / MARK, json.dumps(told))


def _program() -> list[object]:
    """Which decomposePar there is: images may have others of the same name."""
    found = os.stat(shutil.which("decomposePar") or os.devnull)
    return [found.st_size, found.st_mtime_ns]


def _same_owner(one: Path, other: Path) -> bool:
    with contextlib.suppress(OSError):
        return one.stat().st_uid == other.stat().st_uid
    return False


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
            files = [one for one in files if not _LOG.match(one)]
        folders.sort()
        yield from (folder / one for one in sorted(files))


def _is_unclear(text: bytes, used: dict[bytes, bytes]) -> bool:
    """Whether a file has what nobody knows who reads it here; what it uses is added to `used`."""
    names = {found[1] for found in _VARIABLE.finditer(text)}
    used.update((name, os.environb[name]) for name in names if name in os.environb)
    return bool(_COMPUTED.search(text) or _ELSEWHERE.search(text))


def _digest(path: Path, stops: Callable[[bytes], bool]) -> bytes | None:
    """What tells a file's content from any other; None where one of its pieces `stops` us.

    It may be larger than the memory, and another's, who shortens it meanwhile: that would end a
    process which has it mapped. Pieces overlap, so that a word is whole in one of them. Raises
    OSError where it cannot be read.
    """
    digest, before = hashlib.blake2b(), b""
    with open(path, "rb") as plain:
        file: IO[bytes] | gzip.GzipFile = plain
        if path.suffix == ".gz":
            if os.fstat(plain.fileno()).st_size > _PACKED:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
            file = gzip.GzipFile(fileobj=plain)
        while piece := file.read(_PIECE):
            text = before + piece
            if stops(text):
                return None
            digest.update(piece)
            before = text[-_OVERLAP:]
    return digest.digest()


def _of_cut(place: Path, first: float | None) -> list[Path]:
    """What decomposePar writes in a processor directory: its mesh, and fields of one time."""
    there = [path for path in place.iterdir() if path.is_dir()]
    return [
        one for one in there if one.name == "constant" or control_dict.number(one.name) == first
    ]


def _beside(case: Path) -> list[Path]:
    """The cut's files that are in no processor directory."""
    return [case / name for name in _OURS] + [
        case / name for name in processors.BESIDE if (case / name).is_file()
    ]


def _paths(case: Path) -> list[Path]:
    """The cut's files. Raises OSError."""
    first = _first(case)
    folders = [one for place in control_dict.directories(case) for one in _of_cut(place, first)]
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return sorted([*paths, *_beside(case)])


def _parts(case: Path) -> str:
    """What the cut's files are like: where they are, of which size, and when each was written."""
    digest = hashlib.blake2b()
    with contextlib.suppress(OSError):
        for path in _paths(case):
            found, name = path.stat(), os.fsencode(path.relative_to(case))
            digest.update(repr((name, found.st_size, found.st_mtime_ns)).encode())
        return digest.hexdigest()
    return ""  # it is being removed


def _of_all(case: Path) -> str:
    """What the cut's files contain; "" if one cannot be read, or names the case that it is in.

    Times of files may be of whole seconds, within which a solver has begun to write.
    """
    digest, here = hashlib.blake2b(), case.resolve()
    own = os.fsencode(f"/{here.parent.name}/{here.name}")
    with contextlib.suppress(OSError, EOFError, zlib.error):
        for path in _paths(case):
            content = _digest(path, lambda text: own in text)
            if content is None:
                return ""
            digest.update(repr((os.fsencode(path.relative_to(case)), content)).encode())
        return digest.hexdigest()
    return ""


def _read(case: Path) -> dict[str, object]:
    try:
        found = json.loads((case / MARK).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
