# SPDX-License-Identifier: LGPL-3.0-or-later
"""What an OpenFOAM file begins with: the entries of its header.

Input: a file as OpenFOAM writes it, plain or .gz. Output: its bytes, or its first ones, which are
enough for the header; the header's entries.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from pathlib import Path

from dovetail.core.errors import BadInput

COMMENT = re.compile(rb"/\*.*?\*/|//[^\n]*", re.DOTALL)
LONGEST = 1 << 16
"""Bytes in which a header ends, of those that OpenFOAM writes."""

_HEADER = re.compile(rb"\bFoamFile\s*\{([^}]*)\}")  # no nested braces; a comment may precede it
_ENTRY = re.compile(r'(\w+)\s+("[^"]*"|[^;"\s]+)\s*;')


def find(path: Path) -> Path | None:
    """`path`, or `path`.gz, whichever is there."""
    for candidate in (path, path.with_name(path.name + ".gz")):
        if os.path.isfile(candidate):
            return candidate
    return None


def read(path: Path, limit: int = -1) -> bytes:
    """The bytes of `path` or of `path`.gz, or so many of them. Raises BadInput."""
    found = find(path)
    if found is None:
        raise BadInput(f"{path}: not found; the mesh is not complete")
    try:
        with gzip.open(found) if found.suffix == ".gz" else found.open("rb") as file:
            return file.read(limit)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{found}: cannot be read: {error}") from None


def entries(path: Path, data: bytes) -> tuple[dict[str, str], int]:
    """The header's entries, and where it ends in the bytes of `path`. Raises BadInput."""
    header = _HEADER.search(data)
    if not header:
        raise incomplete(path, "no FoamFile header")
    found = _ENTRY.findall(COMMENT.sub(b"", header[1]).decode("latin-1"))
    return {key: value.strip('"') for key, value in found}, header.end()


def incomplete(path: Path, why: str) -> BadInput:
    """What to say of a file that does not have what it should."""
    return BadInput(f"{path}: {why}; is the file complete?")
