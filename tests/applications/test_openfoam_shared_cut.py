# SPDX-License-Identifier: LGPL-3.0-or-later
"""Copies of a case in a run: alike, one cut serves all of them; else each has its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from dovetail.bench.cases import pitz_daily
from dovetail.cli.main import main

PITZ = Path("/usr/share/doc/openfoam-examples/examples/incompressible/simpleFoam/pitzDaily")
pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(
        not (PITZ.is_dir() and shutil.which("decomposePar")), reason="OpenFOAM is not installed"
    ),
]


class Site:
    """A run's directory, where each copy is in a folder of its own."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.case = pitz_daily(run.parent / "users", (1,), 5, refine=1)

    def copy(self, name: str) -> Path:
        place = self.run / name / "case"
        shutil.copytree(self.case, place)
        return place

    def cut(self, place: Path, weights: str = "1,1", *more: str) -> None:
        ranks = str(len(weights.split(",")))
        words = ["--ranks", ranks, "--weights", weights, "--force", "--apply", *more]
        assert main(["decompose", *words, str(place)]) == 0


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_DIR", "/none")  # as for a prepare step of a run
    monkeypatch.setenv("WM_PROJECT_DIR", "/usr/share/openfoam")
    return Site(tmp_path / "run")


def ranks_files(case: Path) -> dict[str, bytes]:
    found = [path for path in case.glob("processor*/**/*") if path.is_file()]
    return {str(path.relative_to(case)): path.read_bytes() for path in found}


def test_a_copy_that_is_alike_is_cut_as_the_first_is_to_the_byte(site, capsys):
    first, second, apart = site.copy("a"), site.copy("b"), site.copy("../other/c")
    site.cut(first)
    site.cut(apart)
    assert "is cut as" not in capsys.readouterr().out
    (first / "processor0" / "2").mkdir()  # a solver has run there since
    (first / "processor0" / "2" / "U").write_text("later")
    (second / "log.blockMesh").write_text("of another moment")
    site.cut(second)
    assert capsys.readouterr().out == f"{second} is cut as that of a is\n"
    assert len(ranks_files(second)) > 20
    assert ranks_files(second) == ranks_files(apart)
    for name in ("constant/cellDecomposition", "system/decomposeParDict"):
        assert (second / name).read_bytes() == (first / name).read_bytes()
    third = site.copy("c")
    shutil.rmtree(first)
    site.cut(third, "1,1", "--json")
    assert '"copied_from": "b"' in capsys.readouterr().out


def more_in(path: Path) -> None:
    path.write_text(f"{path.read_text()}\n// more\n")


def rewritten(path: Path) -> None:
    """As by a solver that writes the same again, at another time."""
    before = path.stat().st_mtime_ns
    while path.stat().st_mtime_ns == before:
        path.write_bytes(path.read_bytes())


CHANGES = {
    "a field": lambda first, second: more_in(second / "0" / "U"),
    "what a field may include": lambda first, second: more_in(second / "constant" / "values"),
    "the mesh": lambda first, second: more_in(second / "constant" / "polyMesh" / "boundary"),
    "the first's cut": lambda first, second: rewritten(first / "processor0" / "0" / "U"),
    "the first's mesh": lambda first, second: rewritten(
        first / "processor1" / "constant" / "polyMesh" / "faces"
    ),
    "a part is gone": lambda first, second: shutil.rmtree(first / "processor1"),
    "the time that is cut": lambda first, second: (second / "3").mkdir(),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_copy_that_differs_is_cut_by_itself(what, site, capsys):
    (site.case / "constant" / "values").write_text("inlet 10;")
    control = site.case / "system" / "controlDict"
    control.write_text(control.read_text().replace("startTime;", "latestTime;", 1))
    first, second = site.copy("a"), site.copy("b")
    site.cut(first)
    CHANGES[what](first, second)
    capsys.readouterr()
    site.cut(second)
    assert "is cut as" not in capsys.readouterr().out
    assert len(ranks_files(second)) > 20 or what == "the time that is cut"


def test_other_ranks_and_weights_are_other_cuts(site, capsys):
    for name, weights, more in (
        ("a", "1,1", ()),
        ("b", "1,3", ()),
        ("c", "1,1,1", ()),
        ("d", "1,1", ("--method", "concentric")),
        ("e", "1,1", ("--centre", "0,0,0")),
    ):
        site.cut(site.copy(name), weights, *more)
    assert "is cut as" not in capsys.readouterr().out


def test_values_of_the_environment_that_a_file_uses_count(site, monkeypatch, capsys):
    more = site.case / "constant" / "values"
    more.write_text("inlet $INLET; // and $WM_PROJECT_DIR")
    for name, inlet, alike in (("a", "1", ""), ("b", "2", ""), ("c", "2", "b")):
        monkeypatch.setenv("INLET", inlet)
        monkeypatch.setenv("OTHER", name)
        place = site.copy(name)
        site.cut(place)
        told = capsys.readouterr().out
        assert (f"is cut as that of {alike} is" in told) == bool(alike)
    monkeypatch.setenv("FOAM_SIGFPE", "0")  # not of a file's, but of decomposePar's
    site.cut(site.copy("of-another-tool"))
    assert "is cut as" not in capsys.readouterr().out
    more.write_text('inlet #calc "1 + 1";')  # may be of anything
    for name in ("d", "e"):
        site.cut(site.copy(name))
    assert "is cut as" not in capsys.readouterr().out


def test_what_cannot_be_copied_whole_is_cut_by_itself(site, monkeypatch, capsys):
    first, second = site.copy("a"), site.copy("b")
    site.cut(first)

    def full(source, target, **more):
        os.makedirs(target)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", full)
    site.cut(second)
    assert "is cut as" not in capsys.readouterr().out
    assert ranks_files(second) == ranks_files(first)


def test_a_case_of_the_users_own_is_never_taken_from_another(site, monkeypatch, capsys):
    site.cut(site.copy("a"))
    monkeypatch.delenv("DOVETAIL_DIR")
    mine = site.copy("b")
    site.cut(mine)
    assert "is cut as" not in capsys.readouterr().out
    assert not [*mine.glob(".dovetail*")]
