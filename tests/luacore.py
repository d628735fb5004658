# SPDX-License-Identifier: LGPL-3.0-or-later
"""The core of the Lua host (step 2), compiled without Flux against each Lua that is here."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import tempfile
import textwrap
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[1]
VERSIONS = ("lua5.3", "lua5.4")
SOURCES = ("sandbox.c", "libraries.c", "json.c", "convert.c", "core_test.c")
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
LIMIT = 120  # seconds; a limit for hangs, not an expectation


@functools.cache
def directory() -> Path:
    """Where programs and scripts go."""
    made = tempfile.mkdtemp(prefix="dovetail-lua-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


@functools.cache
def build(lua: str, *flags: str) -> str:
    """The test program for one Lua; skips where its headers, or jansson's, are missing."""
    query = ["pkg-config", "--cflags", "--libs", lua, "jansson"]
    if not shutil.which("pkg-config") or not shutil.which("cc"):
        pytest.skip("no C compiler or no pkg-config here")
    found = subprocess.run(query, capture_output=True, text=True)
    if found.returncode != 0:
        pytest.skip(f"no headers of {lua} and jansson here")
    program = directory() / "-".join(("core", lua, *map(str, flags)))
    words = ["cc", "-std=c99", "-D_GNU_SOURCE", "-g", "-O1", "-Wall", "-Wextra", "-Werror", *flags]
    words += [*(str(TOP / "jobtap" / name) for name in SOURCES), "-o", str(program)]
    done = subprocess.run([*words, *found.stdout.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return str(program)


def write(*scripts: str) -> list[str]:
    """Files with these Lua texts; a path of a file is taken as it is."""
    paths = []
    for number, script in enumerate(scripts):
        if script.endswith(".lua"):
            paths.append(script)
            continue
        path = directory() / f"script{number}.lua"
        path.write_text(textwrap.dedent(script))
        paths.append(str(path))
    return paths


def run(words: list[str], json: str, *scripts: str) -> str:
    """What the test program prints: the JSON that `main` returns, or what is wrong."""
    done = subprocess.run(
        [*words, json, *write(*scripts)], capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()
