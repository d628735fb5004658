# SPDX-License-Identifier: LGPL-3.0-or-later
"""The machine's Python where there is none, or another: in a container image.

A program of the machine runs beside any C library under the machine's own loader, with the
machine's libraries. In an image all of these are below `ROOT`, mounted and read only, so nothing
of the image is replaced, and nothing that the image's programs load is the machine's.

    ROOT/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2
        --library-path ROOT/usr/lib/x86_64-linux-gnu ROOT/usr/bin/python3.11 ...

Input: the machine's Python. Outputs: what to mount, and words to start it. Invariant: what that
Python starts has no trace of this, since the path is the loader's argument and no variable.
"""

from __future__ import annotations

import os
import struct
import sys

ROOT = "/run/dovetail/host"
PYTHON = "/usr/bin/python3"
_PT_INTERP = 3


def words(python: str = PYTHON) -> list[str]:
    """What starts this machine's Python in an image; OSError or ValueError if it has none."""
    real = os.path.realpath(python)
    return _under(ROOT + os.path.realpath(_loader(real)), ROOT + real)


def own() -> list[str]:
    """The words that start this very Python once more, wherever we are."""
    running = os.readlink("/proc/self/exe")
    if os.path.basename(running).startswith("ld-"):
        return _under(running, sys.executable)
    return [sys.executable]


def mounts() -> list[tuple[str, str]]:
    """Folders of this machine, and where an image has them."""
    loader = os.path.realpath(_loader(os.path.realpath(PYTHON)))
    wanted = ("/usr", os.path.dirname(loader), sys.base_prefix)
    outside = [one for one in wanted if not one.startswith("/usr/")]
    return [(folder, ROOT + folder) for folder in dict.fromkeys(outside)]


def _under(loader: str, program: str) -> list[str]:
    return [loader, "--library-path", os.path.dirname(loader), program]


def _loader(program: str) -> str:
    """The loader that a program asks for, as the ELF specification has it."""
    with open(program, "rb") as file:
        header = file.read(64)
        if header[:5] != b"\x7fELF\x02":
            raise ValueError(f"{program}: is no 64-bit program")
        (offset,) = struct.unpack_from("=Q", header, 32)
        size, count = struct.unpack_from("=2H", header, 54)
        for index in range(count):
            file.seek(offset + index * size)
            entry = file.read(size)
            if struct.unpack_from("=I", entry)[0] == _PT_INTERP:
                where, length = struct.unpack_from("=Q", entry, 8)[0], entry[32:40]
                file.seek(where)
                return os.fsdecode(file.read(int.from_bytes(length, "little")).rstrip(b"\0"))
    raise ValueError(f"{program}: is static")
