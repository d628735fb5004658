# SPDX-License-Identifier: LGPL-3.0-or-later
"""The core of the Lua host, compiled without Flux against each Lua that is here."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
import textwrap
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
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


def compiled(name: str, words: list[str], modules: list[str], path: str = "") -> Path:
    """What a C compiler makes of these words; skips where it or the headers are missing."""
    if not shutil.which("pkg-config") or not shutil.which("cc"):
        pytest.skip("no C compiler or no pkg-config here")
    found = subprocess.run(
        ["pkg-config", "--cflags", "--libs", *modules], capture_output=True, text=True,
        env={**os.environ, "PKG_CONFIG_PATH": f"{path}:{os.environ.get('PKG_CONFIG_PATH', '')}"},
    )  # fmt: skip
    if found.returncode != 0:
        pytest.skip(f"no headers of {' and '.join(modules)} here")
    words = ["cc", "-std=c99", "-D_GNU_SOURCE", "-g", "-O1", "-Wall", "-Wextra", "-Werror", *words]
    words += ["-o", str(directory() / name)]
    done = subprocess.run([*words, *found.stdout.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return directory() / name


@functools.cache
def build(lua: str, *flags: str) -> str:
    """The test program for one Lua."""
    sources = [str(TOP / "jobtap" / name) for name in SOURCES]
    return str(compiled("-".join(("core", lua, *flags)), [*flags, *sources], [lua, "jansson"]))


def build_host(lua: str, flux: str) -> Path:
    """The whole host for one Lua, and for the Flux of this command."""
    sources = [str(path) for path in (TOP / "jobtap").glob("*.c") if path.name != "core_test.c"]
    words = ["-shared", "-fPIC", "-fvisibility=hidden", *sources]
    path = str(Path(flux).parents[1] / "lib" / "pkgconfig")
    return compiled(f"host-{lua}.so", words, [lua, "jansson", "flux-core"], path)


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
