# SPDX-License-Identifier: LGPL-3.0-or-later
"""The lists of files in dovetail-architecture(7) hold: each file follows from the one above it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
from dovetail.flux.instance.requests import REQUESTS

pytestmark = pytest.mark.unit

TOP = Path(__file__).resolve().parents[1]
PACKAGES = (TOP / "flux-python" / "dovetail", TOP / "usernetes-setup" / "usernetes_setup")
PAGE = (TOP / "doc" / "dovetail-architecture.7").read_text()
LINKS = ("starts", "preloads", "asks", "reads")


@dataclass(frozen=True)
class Step:
    """A file of a flow, and how it says that it is connected; empty for an import.

    `command` is what starts it, where it does not go by its file's name.
    """

    path: str
    link: str
    command: str = ""

    @property
    def file(self) -> Path:
        """Where it is."""
        outside = self.path.startswith(("pmpi/", "usernetes-setup/"))
        return TOP / self.path if outside else PACKAGES[0] / self.path


def flows(page: str = PAGE) -> dict[str, list[Step]]:
    """The lists of the section FLOWS, by heading; further lists of a heading are numbered."""
    section = page[page.index("\n.Sh FLOWS") : page.index("\n.Sh SEE ALSO")]
    found = {}
    for block in section.split("\n.Ss ")[1:]:
        lists = re.findall(r"\n\.Bl[^\n]*\n(.*?)\n\.El", block, re.DOTALL)
        for number, text in enumerate(lists, 1):
            steps = []
            for item in re.split(r"(?:^|\n)\.It ", text)[1:]:
                path, _, words = item.partition("\n")
                marked = re.match(r"\.Em (\w+)", words)
                typed = re.search(r"\.Ql .*?(\w+) ?[,.]?$", words, re.MULTILINE)
                link, command = marked[1] if marked else "", typed[1] if typed else ""
                steps.append(Step(path.removeprefix("Pa "), link, command))
            found[f"{block.partition(chr(10))[0]} {number}"] = steps
    return found


def module(file: Path) -> str:
    """The name that a Python file is imported by."""
    package = next(one for one in PACKAGES if one in file.parents)
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


@lru_cache
def imports(file: Path) -> frozenset[str]:
    """The names that a file imports, wherever in it: modules, and what may be modules."""
    if file.suffix != ".py":
        return frozenset(re.findall(r'#include "([\w.]+)"', file.read_text()))
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return frozenset(found)


def imported(one: Path, other: Path) -> bool:
    """Whether the first imports the second."""
    return (module(other) if other.suffix == ".py" else other.name) in imports(one)


def broken(above: Step, below: Step) -> str:
    """Why the second does not follow from the first; empty if it does."""
    for step in (above, below):
        if not step.file.is_file():
            return f"there is no {step.path}"
    text = above.file.read_text()
    if below.link == "starts":
        name = below.command or below.file.stem
        good = re.search(rf'"([\w.-]*\W)?{name}(\.py)?"', text) is not None
        good = good or imported(above.file, below.file)
    elif below.link == "preloads":
        good = "LD_PRELOAD" in text
    elif below.link == "asks":
        good = bool(set(re.findall(r"\"dovetail\.([\w-]+)\"", text)) & set(REQUESTS))
    elif below.link == "reads":
        good = above.path in below.file.read_text()
    else:
        good = imported(above.file, below.file) or imported(below.file, above.file)
    return "" if good else f"{below.path} does not follow from {above.path} ({below.link})"


def test_the_page_has_the_flows():
    names = " ".join(flows())
    for thing in ("plan entry", "sample", "admission", "resize", "batch job"):
        assert thing in names
    assert all(len(steps) >= 3 for steps in flows().values())
    assert {step.link for steps in flows().values() for step in steps} == {"", *LINKS}


@pytest.mark.parametrize("name", flows())
def test_each_file_follows_from_the_one_above_it(name):
    steps = flows()[name]
    assert [why for pair in zip(steps, steps[1:]) if (why := broken(*pair))] == []


def test_a_file_that_is_gone_or_not_connected_is_noticed():
    loop, table = Step("run/loop.py", ""), Step("core/cpu_requests.py", "")
    assert "no run/lop.py" in broken(Step("run/lop.py", ""), loop)
    assert "does not follow" in broken(loop, table)
    assert "does not follow" in broken(table, Step("mpi/supervisor.py", "starts"))
    assert "does not follow" in broken(loop, Step("pmpi/rank.c", "preloads"))
    assert "does not follow" in broken(loop, Step("flux/instance/requests.py", "asks"))
    assert "does not follow" in broken(Step("pmpi/page.h", ""), Step("run/loop.py", "reads"))


def test_every_package_is_in_the_page():
    files = PAGE[PAGE.index("\n.Sh FILES") : PAGE.index("\n.Ss Import rules")]
    packages = {path.parent.name for path in PACKAGES[0].glob("*/__init__.py")}
    assert packages <= set(re.findall(r"\.It Pa ([\w/-]+)", files))


def test_packages_import_only_those_on_the_lines_below():
    block = re.search(r"\.Ss Import rules.*?\.Bd[^\n]*\n(.*?)\n\.Ed", PAGE, re.DOTALL)[1]
    lines = [set(re.findall(r"\w+", line)) for line in block.split("\n")]
    below = {name: set().union(*lines[n + 1 :]) for n, line in enumerate(lines) for name in line}
    assert set(below) == {path.parent.name for path in PACKAGES[0].glob("*/__init__.py")}
    wrong = []
    for name, allowed in below.items():
        for file in (PACKAGES[0] / name).rglob("*.py"):
            packages = {one.split(".")[1] for one in imports(file) if one.startswith("dovetail.")}
            wrong += [f"{file.name}: {one}" for one in packages & set(below) - allowed - {name}]
    assert wrong == []
