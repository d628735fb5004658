# SPDX-License-Identifier: LGPL-3.0-or-later
"""A cut that must not be taken, or not be written where it would be; decomposePar is a script."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from applications.test_openfoam_decompose import ascii_mesh, put
from dovetail.applications.openfoam import processors, shared_cut
from dovetail.cli.main import main
from dovetail.host import install_paths

pytestmark = pytest.mark.unit

CUT = """#!/bin/sh
for rank in 0 1; do
    mkdir -p processor$rank/constant/polyMesh processor$rank/0
    echo points > processor$rank/constant/polyMesh/points
    cp 0/* processor$rank/0
done
if grep -q 'commsDir' 0/U; then echo "$PWD/comms" > processor1/0/U; fi
"""
CONTROL = "startFrom startTime;\nstartTime 0;\nendTime 1;\n"


class Site:
    """A run's directory, where each copy is in a folder of its own."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.bin = run.parent / "bin"
        self.bin.mkdir()
        (self.bin / "decomposePar").write_text(CUT)
        (self.bin / "decomposePar").chmod(0o755)
        self.case = put(run.parent / "users", ascii_mesh())
        for name in ("system", "0"):
            (self.case / name).mkdir()
        (self.case / "system" / "controlDict").write_text(CONTROL)
        (self.case / "0" / "U").write_text("uniform 1")

    def copy(self, name: str) -> Path:
        place = self.run / name / "case"
        shutil.copytree(self.case, place, symlinks=True)
        return place

    def cut(self, place: Path) -> None:
        assert main(["decompose", "--ranks", "2", "--force", "--apply", str(place)]) == 0


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_DIR", "/none")  # as for a prepare step of a run
    made = Site(tmp_path / "run")
    monkeypatch.setenv("PATH", f"{made.bin}:{os.environ['PATH']}")
    return made


def test_one_that_is_alike_takes_it(site, capsys):
    first, second = site.copy("a"), site.copy("b")
    site.cut(first)
    site.cut(second)
    assert capsys.readouterr().out.endswith(f"{second} is cut as that of a is\n")
    assert (second / "processor1" / "0" / "U").read_text() == "uniform 1"


def test_what_was_written_within_the_same_second_is_not_taken(site, capsys):
    """As by a solver where the times of files are whole seconds."""
    first, second = site.copy("a"), site.copy("b")
    site.cut(first)
    field = first / "processor1" / "0" / "U"
    found = field.stat()
    field.write_text("uniform 2")
    os.utime(field, ns=(found.st_atime_ns, found.st_mtime_ns))
    site.cut(second)
    assert "is cut as" not in capsys.readouterr().out
    assert (second / "processor1" / "0" / "U").read_text() == "uniform 1"


@pytest.mark.parametrize(
    "links", [("constant", "system"), ("constant/polyMesh",), ("constant/polyMesh/cellProc",)]
)
def test_nothing_is_written_where_links_of_the_copy_lead(links, site, capsys):
    """The user's own case has a cut that dovetail wrote, for other ranks.

    decomposePar of OpenFOAM 10 and later writes beside the mesh, as the script does here.
    """
    beside = "constant/polyMesh/cellProc"
    (site.case / beside).write_text("of the user's cut")
    (site.bin / "decomposePar").write_text(f"{CUT}echo new > {beside}\n")
    theirs = site.run.parent / "theirs"
    shutil.copytree(site.case, theirs)
    assert main(["decompose", "--ranks", "1", str(theirs)]) == 0
    before = {path: path.read_bytes() for path in theirs.rglob("*") if path.is_file()}
    for name in map(site.case.joinpath, links):
        shutil.rmtree(name) if name.is_dir() else name.unlink()
        name.symlink_to(theirs / name.relative_to(site.case))
    first, second = site.copy("a"), site.copy("b")
    site.cut(first)
    site.cut(second)
    assert "is cut as that of a is" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in theirs.rglob("*") if path.is_file()} == before
    assert [(one / beside).read_text() for one in (first, second)] == ["new\n"] * 2
    assert (second / "constant/polyMesh/points").read_bytes() == before[
        theirs / "constant/polyMesh/points"
    ]


def test_how_a_case_was_cut_is_known_until_it_is_cut_anew(site):
    """As where the ranks of the user's own cut are to be reconstructed before."""
    users = site.case / "constant" / "polyMesh" / "cellProc"
    users.write_text("of the user's cut")
    users.chmod(0o444)
    copy = site.run / "a" / "case"
    (copy / "constant").mkdir(parents=True)
    (copy / "constant" / "polyMesh").symlink_to(users.parent)
    processors.own_folders(copy)
    kept = copy / "constant" / "polyMesh" / users.name
    assert (kept.read_text(), kept.is_symlink()) == ("of the user's cut", False)
    kept.write_text("new")
    assert users.read_text() == "of the user's cut"
    kept.unlink()
    kept.symlink_to("nowhere")
    processors.own_folders(copy)
    assert not [one for one in kept.parent.iterdir() if "cellProc" in one.name]


def test_a_cut_that_names_its_case_is_of_no_other(site, capsys):
    """As where a coupled patch has `commsDir "$FOAM_CASE/comms"`, which decomposePar expands."""
    (site.case / "0" / "U").write_text('commsDir "$FOAM_CASE/comms";')
    first, second = site.copy("a"), site.copy("b")
    site.cut(first)
    site.cut(second)
    assert "is cut as" not in capsys.readouterr().out
    assert (second / "processor1" / "0" / "U").read_text() == f"{second}/comms\n"


def test_what_some_versions_write_beside_the_ranks_is_taken_too(site, capsys):
    """By it, reconstructPar of OpenFOAM 10 and later goes; the user's case has one of his own."""
    mesh, program = site.case / "constant" / "polyMesh", site.bin / "decomposePar"
    (mesh / "cellProc").write_text("of the user's cut")
    program.write_text(f"{CUT}echo new > constant/polyMesh/cellProc\n")
    first, second = site.copy("a"), site.copy("b")
    site.cut(first)
    site.cut(second)
    assert "is cut as that of a is" in capsys.readouterr().out
    assert (second / "constant" / "polyMesh" / "cellProc").read_text() == "new\n"


def begins(site: Site, **entries: str) -> None:
    control = site.case / "system" / "controlDict"
    control.write_text(CONTROL + "".join(f"{key} {value};\n" for key, value in entries.items()))


def mesh_of_another_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenFOAM takes the points of the last time up to the one that it begins from."""
    begins(site, startTime="4")
    (site.case / "0").rename(site.case / "4")
    (site.case / "0").mkdir()
    (site.case / "0" / "U").write_text("uniform 1")
    (site.case / "3" / "polyMesh").mkdir(parents=True)
    (site.case / "3" / "polyMesh" / "points").write_text("moved")


def time_of_a_shorter_name(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenFOAM writes times with six digits."""
    begins(site, startTime="0.1234567")
    (site.case / "0.123457").mkdir()
    (site.case / "0.123457" / "U").write_text("uniform 1")


def includes(path: str):
    def change(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SHARED", str(site.run.parent))
        (site.case / "0" / "U").write_text(f'#include "{path}"\n')

    return change


def computes(words: str):
    def change(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        (site.case / "0" / "U").write_text(f"value {words};\n")

    return change


def large_archive(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """To unpack it would take long."""
    monkeypatch.setattr(shared_cut, "_PACKED", 10)
    (site.case / "results.tar.gz").write_bytes(gzip.compress(bytes(100)))


ALONE = {
    "it has a large archive": large_archive,
    "its mesh is of another time": mesh_of_another_time,
    "its start time has a shorter name": time_of_a_shorter_name,
    "it includes a file of a path": includes("/somewhere/values"),
    "it includes a file beside the case": includes("../../values"),
    "it includes a file of a variable's path": includes("${SHARED}/values"),
    "a block of code": computes("#codeBlock"),
    "a stream": computes("#stream"),
}


@pytest.mark.parametrize("why", ALONE)
def test_of_such_a_case_nobody_knows_how_it_is_cut(why, site, monkeypatch):
    ALONE[why](site, monkeypatch)
    assert shared_cut.key(site.copy("a"), ()) == ""


@pytest.mark.parametrize("piece", [1, 7, 8])
def test_words_are_seen_wherever_a_file_is_taken_apart(piece, site, monkeypatch):
    monkeypatch.setattr(shared_cut, "_PIECE", piece)
    monkeypatch.setenv("INLET", "1")
    first, second, third = site.copy("a"), site.copy("b"), site.copy("c")
    before = shared_cut.key(first, ())
    (second / "0" / "U").write_text("uniform $INLET;")
    used = shared_cut.key(second, ())
    monkeypatch.setenv("INLET", "2")
    assert shared_cut.key(first, ()) == before != ""
    assert shared_cut.key(second, ()) not in (used, "")
    (third / "0" / "U").write_text("value #calc;")
    assert shared_cut.key(third, ()) == ""


SHORTENED = """
import os, sys
from pathlib import Path
from dovetail.applications.openfoam import shared_cut

class Computed:
    def search(self, text):
        if len(text) > 1 << 19:
            os.truncate(sys.argv[2], 0)

shared_cut._COMPUTED = Computed()
print(len(shared_cut.key(Path(sys.argv[1]), ())))
"""


def test_a_file_that_its_owner_shortens_while_it_is_read_ends_nobody(site):
    """As one of the user's, to which a link of the copy leads."""
    theirs = site.run.parent / "values"
    theirs.write_bytes(b"1 " * (1 << 20))
    (site.case / "constant" / "values").symlink_to(theirs)
    words = [sys.executable, "-c", SHORTENED, str(site.copy("a")), str(theirs)]
    ours = install_paths.package_environment()
    done = subprocess.run(words, env=ours, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "128\n"), done.stderr


def test_a_case_without_any_time_shares_its_mesh(site):
    shutil.rmtree(site.case / "0")
    assert shared_cut.key(site.copy("a"), ()) != ""


@pytest.mark.parametrize("path", ["include/values", "../constant/values", "$FOAM_CASE/0/values"])
def test_what_it_includes_of_its_own_is_compared(path, site, monkeypatch):
    includes(path)(site, monkeypatch)
    assert shared_cut.key(site.copy("a"), ()) != ""


def libraries(site: Site, case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/of/others")


def home(site: Site, case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/of/others")


def program(site: Site, case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(site.bin / "decomposePar", (1, 1))


def no_log(site: Site, case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (case / "logLaw").write_text("values")


@pytest.mark.parametrize("change", [libraries, home, program, no_log])
def test_what_decomposepar_may_be_or_read_counts(change, site, monkeypatch):
    first, second = site.copy("a"), site.copy("b")
    before = shared_cut.key(first, ())
    assert before == shared_cut.key(second, ()) != ""
    for name in ("log", "log.blockMesh", "log_of_mesh"):
        (second / name).write_text("of another moment")
    assert shared_cut.key(second, ()) == before
    change(site, second, monkeypatch)
    assert shared_cut.key(second, ()) not in (before, "")


def test_of_many_cuts_that_have_changed_a_few_are_looked_at(site, monkeypatch):
    copies = [site.copy(f"a{number}") for number in range(12)]
    for place in copies[1:]:
        shutil.copytree(site.bin, place / "processor0")
        (place / shared_cut.MARK).write_text('{"key": "of all", "parts": "of before"}')
    looked: list[Path] = []
    monkeypatch.setattr(shared_cut, "_parts", lambda case: looked.append(case) or "now")
    assert shared_cut.find(copies[0], "of all") is None
    assert 0 < len(looked) < 11


@pytest.mark.skipif(os.geteuid() != 0, reason="a file is given to another user")
def test_a_cut_of_another_user_is_not_taken(site, capsys):
    first, second = site.copy("a"), site.copy("b")
    site.cut(first)
    os.chown(first / shared_cut.MARK, 12345, -1)
    site.cut(second)
    assert "is cut as" not in capsys.readouterr().out
