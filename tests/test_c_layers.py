# SPDX-License-Identifier: LGPL-3.0-or-later
"""The files of the C libraries lie in layers: no file needs one that needs it.

Each `X.c` that others use has a header `X.h`, and whoever uses a symbol of it includes that. What a
file defines and uses is read from its text, which clang-format keeps in one shape.
"""

from __future__ import annotations

import graphlib
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[1]
LIBRARIES = {"jobtap": ("core_test.c",), "pmpi": ("bench_calls.c", "bench_pairs.c")}
"""Each library's folder, with the files in it that are programs."""

NOT_CODE = re.compile(
    r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|__attribute__\(\(.*?\)\)+ ?', re.DOTALL
)
INCLUDE = re.compile(r'^#include "(\w+)\.h"$', re.MULTILINE)
GLOBAL = r"^(?!static\b|typedef\b|extern\b|return\b|else\b|goto\b)[A-Za-z_][\w *(),]*?\b(\w+)"
FUNCTION = re.compile(GLOBAL + r"\([^;{}]*\)\n\{", re.MULTILINE)
VARIABLE = re.compile(
    GLOBAL.replace("(),", "") + r"(?:\[\w*\])?(?:;| = [^;{]*;| = \{)", re.MULTILINE
)
STATIC = re.compile(r"^static\b[^\n(;=\[{]*?(\w+) *(?=[(;=\[])", re.MULTILINE)
STAND_IN = re.compile(r"^EXPORTED [\w *]*?\b(\w+)\(", re.MULTILINE)
"""Functions that take the place of another library's: who calls them means those."""

pytestmark = pytest.mark.unit


class File:
    """A `.c` file and its header, if it has one."""

    def __init__(self, source: str, header: str | None) -> None:
        text = source + (header or "")
        code = NOT_CODE.sub("", source)
        self.header = header is not None
        self.includes = set(INCLUDE.findall(text))
        self.defines = set(FUNCTION.findall(code)) | set(VARIABLE.findall(code))
        self.offers = self.defines - set(STAND_IN.findall(code))
        words = re.findall(r"\w+", NOT_CODE.sub("", text))
        self.words = set(words) - set(STATIC.findall(code))


def read(folder: Path, programs: tuple[str, ...]) -> dict[str, File]:
    """The files of a library, by name without ending."""
    found = {}
    for path in folder.glob("*.c"):
        if path.name not in programs:
            header = path.with_suffix(".h")
            text = header.read_text() if header.exists() else None
            found[path.stem] = File(path.read_text(), text)
    return found


def users(files: Mapping[str, File]) -> dict[str, set[str]]:
    """For each file those whose symbols it uses."""
    return {
        name: {other for other, two in files.items() if other != name and one.words & two.offers}
        for name, one in files.items()
    }


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """The files of a circle, empty if there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("library", LIBRARIES)
def test_no_file_uses_a_symbol_of_one_that_uses_its_own(library):
    files = read(TOP / library, LIBRARIES[library])
    assert all(one.defines for one in files.values()), "the reader understands every file"
    assert circle(users(files)) == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_no_header_or_file_includes_one_that_includes_it(library):
    files = read(TOP / library, LIBRARIES[library])
    assert circle({name: one.includes - {name} for name, one in files.items()}) == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_whoever_uses_a_symbol_includes_the_header_of_its_file(library):
    files = read(TOP / library, LIBRARIES[library])
    missing = {(name, other) for name, used in users(files).items()
               for other in used if other not in files[name].includes}  # fmt: skip
    assert missing == set()
    assert all(files[other].header for used in users(files).values() for other in used)
    alone = {name for name, one in files.items() if one.header and name not in one.includes}
    assert alone == set(), "a file includes its own header"


def function(name: str, calls: str) -> str:
    """A C function of one line, as clang-format writes it."""
    return f"int {name}(void)\n{{\n    return {calls};\n}}\n"


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (function("b", "a()"), True),
        ("int b = 1;\n" + function("c", "a()"), True),
        ("static int a;\n" + function("b", "a"), False),
        ("/* a() */\n" + function("b", "1"), False),
    ],
    ids=["a function", "a variable", "a static name", "a comment"],
)
def test_the_reader_sees_a_circle_of_two(other, found):
    files = {"a": File(function("a", "b"), None), "b": File(other, None)}
    assert bool(circle(users(files))) is found
