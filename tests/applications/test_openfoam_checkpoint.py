# SPDX-License-Identifier: LGPL-3.0-or-later
"""An OpenFOAM solver is stopped at a written time and goes on: same fields, on any ranks."""

from __future__ import annotations

import contextlib
import gzip
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from dovetail.applications.openfoam import checkpoint, mesh_file, written_times
from dovetail.bench.cases import OPENFOAM_ETC, pitz_daily
from dovetail.core.causes import NOTHING_LEFT
from dovetail.core.errors import BadInput, WorkFailed
from dovetail.host import install_paths
from support.pipes import pipe

unit = pytest.mark.unit
mpi = [
    pytest.mark.mpi,
    pytest.mark.skipif(not shutil.which("simpleFoam"), reason="OpenFOAM is not installed"),
]
EVEN = (1.0, 1.0)
END = 60
FIELDS = ("U", "p", "k", "epsilon", "nut", "phi")
DIGITS = {"writeInterval": 10, "writePrecision": 12}
PARENTHESES = bytes.maketrans(b"()", b"  ")
IMPORT = "from dovetail.applications.openfoam import checkpoint"
ENVIRONMENT = {
    "WM_PROJECT_DIR": OPENFOAM_ETC,
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}

FOOTER = "\n// ************************************************************************* //\n"
HEADER = "FoamFile\n{\n    version 2.0;\n}\n"
SET = HEADER.replace("}", "    format ascii;\n    class cellSet;\n    object broken;\n}")

MOVING = (
    SET.replace("cellSet", "dictionary")
    + """
dynamicFvMesh dynamicMotionSolverFvMesh;
motionSolverLibs (fvMotionSolvers);
motionSolver solidBody;
solidBodyMotionFunction linearMotion;
velocity (0.5 0 0);
"""
)

STRETCHED = (
    MOVING.partition("motionSolver solidBody")[0]
    + """
motionSolver velocityComponentLaplacian;
component x;
diffusivity uniform;
"""
)
MORE = (
    ("fvSchemes", "laplacianSchemes", "laplacian(diffusivity,cellMotionU) Gauss linear corrected;"),
    (
        "fvSolution",
        "solvers",
        '"cellMotionUx.*" { solver PCG; preconditioner DIC; tolerance 1e-8; }',
    ),
)
SPEEDS = (
    SET.replace("cellSet", "pointScalarField").replace("broken", "pointMotionUx")
    + """
dimensions [0 1 -1 0 0 0 0];
internalField uniform 0;
boundaryField
{
    frontAndBack { type empty; }
    inlet { type uniformFixedValue; uniformValue constant 0.001; }
    ".*" { type uniformFixedValue; uniformValue constant 0; }
}
"""
)

# --- Which times are whole ---


def written(place: Path, name: str, *fields: str) -> None:
    """One time of one rank."""
    for field in ("uniform/time", *fields):
        path = place / name / field
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEADER + FOOTER)


@pytest.fixture
def two_ranks(tmp_path):
    """Times 0, 10 and 20 of two ranks, and a log that goes on after each."""
    places = written_times.directories(tmp_path, 2)
    for place in places:
        for name in ("0", "10", "20"):
            written(place, name, "U", "p")
    (tmp_path / "log").write_text("Time = 10\n\nTime = 20\n\nTime = 21\n")
    return places


def latest(places, sure="", before=("0",)):
    return written_times.latest(places, places[0].parent / "log", before, sure)


def truncate(path):
    os.truncate(path, path.stat().st_size - 3)


DAMAGES = {
    "a field of one rank stops in the middle": lambda place: truncate(place / "20/p"),
    "a field of one rank is empty": lambda place: os.truncate(place / "20/p", 0),
    "a field of one rank is missing": lambda place: (place / "20/p").unlink(),
    "a rank has not written that time": lambda place: shutil.rmtree(place / "20"),
    "the time's own file stops in the middle": lambda place: truncate(place / "20/uniform/time"),
    "a compressed field stops in the middle": lambda place: (
        (place / "20/p").unlink(),
        (place / "20/p.gz").write_bytes(gzip.compress((HEADER + FOOTER).encode())[:-9]),
    ),
}


@unit
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_damaged_time_is_passed_over(two_ranks, rank, damage):
    assert latest(two_ranks) == "20"
    DAMAGES[damage](two_ranks[rank])
    assert latest(two_ranks) == "10"


@unit
def test_a_pipe_beside_fields_is_not_waited_for(two_ranks):
    pipe(two_ranks[0] / "20" / "live", HEADER + "internalField uniform nan;\n" + FOOTER)
    assert latest(two_ranks) == "20"


BINARY = HEADER.replace("}", "    format binary;\n}")
FIELDS_OF_NAN = {
    "a scalar": f"{HEADER}internalField nonuniform List<scalar> \n3\n(\n1\n-nan\n2\n)\n;{FOOTER}",
    "a vector": f"{HEADER}internalField nonuniform List<vector> \n1\n(\n(1 0 inf)\n)\n;{FOOTER}",
    "a uniform value": f"{HEADER}internalField uniform nan;{FOOTER}",
    "a patch's vector": f"{HEADER}value uniform (nan 0 0);{FOOTER}",
    "binary": f"{BINARY}internalField nonuniform List<vector> 2(".encode()
    + struct.pack("=6d", 1, 2, 3, 4, math.nan, 6) + f");{FOOTER}".encode(),
    "compressed": gzip.compress(f"{HEADER}internalField uniform nan;{FOOTER}".encode()),
}  # fmt: skip
FIELDS_OF_NUMBERS = {
    "a patch of that name": f"{HEADER}boundaryField\n{{\n    inf\n    {{\n    }}\n}}{FOOTER}",
    "binary": f"{BINARY}internalField nonuniform List<scalar> 2(".encode()
    + b"\nnan\n (nan nan nan) "[:16] + f");{FOOTER}".encode(),
    "a list of words": f"{BINARY}names List<word> 2(a b);{FOOTER}",
}  # fmt: skip


def write_field(places, name, content):
    suffix = ".gz" if content[:2] == b"\x1f\x8b" else ""
    places[1].joinpath(name, f"T{suffix}").write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )
    places[0].joinpath(name, "T").write_text(HEADER + FOOTER)


@unit
@pytest.mark.parametrize("what", FIELDS_OF_NAN)
def test_a_time_of_a_solver_that_diverged_is_passed_over(two_ranks, what):
    write_field(two_ranks, "20", FIELDS_OF_NAN[what])
    assert latest(two_ranks) == "10"
    write_field(two_ranks, "10", FIELDS_OF_NAN[what])
    assert latest(two_ranks) == "20", "as ever, where all are so"


@unit
@pytest.mark.parametrize("what", FIELDS_OF_NUMBERS)
def test_what_only_looks_like_it_is_none(two_ranks, what):
    write_field(two_ranks, "20", FIELDS_OF_NUMBERS[what])
    assert latest(two_ranks) == "20"


@unit
def test_fields_that_all_ranks_lack_are_missed_where_the_log_ends_there(two_ranks):
    log = two_ranks[0].parent / "log"
    for place in two_ranks:
        (place / "20/p").unlink()
    assert latest(two_ranks) == "20"  # the solver had gone on: it writes no p at 20
    log.write_text("Time = 10\n\nTime = 20\n")
    assert latest(two_ranks) == "10"
    # The log of an earlier part of the run, which came further, proves nothing.
    log.write_text("Time = 10\nTime = 20\nTime = 25\nTime = 10\nTime = 11\nTime = 20\n")
    assert latest(two_ranks) == "10"


@unit
def test_the_first_time_needs_a_proof_that_its_writing_was_over(two_ranks):
    log = two_ranks[0].parent / "log"
    for place in two_ranks:
        shutil.rmtree(place / "20")
    for text in (
        "Time = 10\nTime = 11\n",
        "Time = 10\n\nEnd\n",
        "Time = 10s\n\nTime = 11s\n",
        "\n Time = 10\n\n Time = 11\n",
    ):
        log.write_text(text)
        assert latest(two_ranks) == "10", text
    for text in ("", "Time = 9\nTime = 10\n", "Time = 10\nFoam::error::printStack\n"):
        log.write_text(text)
        assert latest(two_ranks) is None, text
    assert latest(two_ranks, sure="10") == "10"
    log.unlink()
    assert latest(two_ranks) is None


@unit
def test_times_may_be_before_zero(two_ranks):
    for place in two_ranks:
        (place / "20").rename(place / "-5")
        (place / "10").rename(place / "-12.5")
        (place / "0").rename(place / "-180")
    log = two_ranks[0].parent / "log"
    log.write_text("Time = -12.5\n\nTime = -5\n\nTime = -4.5\n")
    assert latest(two_ranks, before=("-180",)) == "-5"
    truncate(two_ranks[1] / "-5" / "U")
    assert latest(two_ranks, before=("-180",)) == "-12.5"


@unit
def test_times_of_before_are_no_checkpoints(two_ranks):
    assert latest(two_ranks, before=("0", "20")) == "10"
    assert latest(two_ranks, before=("0", "10", "20")) is None
    assert latest(written_times.directories(Path("/nonexistent"), 1)) is None


@unit
def test_times_are_ordered_as_numbers(tmp_path):
    for name in ("1e-05", "0.5", "100", "9", "constant", "0.orig", "-1", "nan"):
        (tmp_path / name).mkdir()
    assert written_times.times(tmp_path) == ["-1", "1e-05", "0.5", "9", "100"]


@unit
def test_a_case_that_is_not_the_runs_own_is_not_changed(tmp_path, monkeypatch):
    theirs, case = tmp_path / "theirs", tmp_path / "case"
    theirs.mkdir()
    case.mkdir()
    (theirs / "controlDict").write_text("endTime 3;\n")
    (case / "system").symlink_to(theirs)
    with pytest.raises(BadInput, match="is a link"):
        checkpoint.begin(case, EVEN)
    (case / "system").unlink()
    (case / "system").mkdir()
    (case / "system/controlDict").symlink_to(theirs / "controlDict")
    checkpoint.begin(case, EVEN)
    checkpoint.stop(case)
    assert (theirs / "controlDict").read_text() == "endTime 3;\n"
    assert "stopAt writeNow;" in (case / "system/controlDict").read_text()
    monkeypatch.setenv("FOAM_FILEHANDLER", "collated")
    with pytest.raises(BadInput, match="collated"):
        checkpoint.begin(case, EVEN)
    monkeypatch.setenv("FOAM_FILEHANDLER", "uncollated")
    checkpoint.begin(case, EVEN)
    (case / "processors2").mkdir()
    with pytest.raises(BadInput, match="collated"):
        checkpoint.begin(case, EVEN)


@unit
@pytest.mark.parametrize(
    ("rule", "over"),
    [
        ("startFrom startTime; startTime 20;", 30),
        ("startFrom latestTime;", 30),
        ("startFrom firstTime;", 50),
    ],
)
def test_steps_that_the_users_case_came_with_are_not_over(two_ranks, tmp_path, rule, over):
    (tmp_path / "system").mkdir()
    (tmp_path / "system/controlDict").write_text(rule)
    (tmp_path / "log").write_text("Time = 50\n\nTime = 51\n")
    for name, index in (("20", 20), ("50", 50)):
        if name == "50":
            checkpoint.begin(tmp_path, EVEN)
            for place in two_ranks:
                written(place, "50", "U", "p")
        for place in two_ranks:
            (place / name / "uniform/time").write_text(f"{HEADER}index {index};\n{FOOTER}")
    assert checkpoint.go_on(tmp_path, EVEN, tmp_path / "log") == "50"
    assert checkpoint.over(tmp_path, "50") == over


@unit
def test_what_was_added_to_the_control_file_goes_away_again(tmp_path):
    (tmp_path / "system").mkdir()
    path = tmp_path / "system/controlDict"
    path.write_text("stopAt endTime;\n")
    checkpoint.begin(tmp_path, (1.0,))
    begun = path.read_text()
    checkpoint.stop(tmp_path)
    asked = path.stat().st_mtime
    assert path.read_text() != begun
    written(tmp_path, "7", "p")
    (tmp_path / "log").write_text("Time = 7\n\nEnd\n")
    assert checkpoint.go_on(tmp_path, (1.0,), tmp_path / "log") == "7"
    assert path.read_text() == begun + "startFrom startTime;\nstartTime 7;\n"
    assert path.stat().st_mtime >= asked + 10  # less, and OpenFOAM would overlook it
    # It may have been started a moment before, and not have read yet from where it goes on.
    checkpoint.stop(tmp_path)
    assert "startFrom startTime;\nstartTime 7;\n" in path.read_text()
    checkpoint.stopped(tmp_path)
    assert path.read_text() == begun


@unit
@pytest.mark.parametrize(
    ("said", "begins"),
    [
        ('value 7.0000004999999996;\nname "7";\n', "7.0000004999999996"),
        ('value 7.0000004999999996;\nname "6";\n', "7"),
        ('value here;\nname "7";\n', "7"),
        ("index 7;\n", "7"),
    ],
)
def test_it_goes_on_at_the_time_that_the_name_is_short_for(tmp_path, said, begins):
    (tmp_path / "system").mkdir()
    (tmp_path / "system/controlDict").write_text("endTime 10;\n")
    checkpoint.begin(tmp_path, (1.0,))
    written(tmp_path, "7", "p")
    (tmp_path / "7/uniform/time").write_text(HEADER + said + FOOTER)
    (tmp_path / "log").write_text("Time = 7\n\nEnd\n")
    assert checkpoint.go_on(tmp_path, (1.0,), tmp_path / "log") == "7"
    assert f"\nstartTime {begins};\n" in (tmp_path / "system/controlDict").read_text()


@unit
def test_what_a_user_adds_to_the_control_file_while_it_runs_stays(tmp_path):
    (tmp_path / "system").mkdir()
    path = tmp_path / "system/controlDict"
    path.write_text("stopAt endTime;\nendTime 20;\n")
    checkpoint.begin(tmp_path, (1.0,))
    more = "endTime 500;\nfunctions\n{\n    forces {}\n}\n"
    with path.open("a") as file:
        file.write(more)
    checkpoint.stop(tmp_path)
    checkpoint.stop(tmp_path)
    text = path.read_text()
    assert text.count(more) == 1
    assert text.index(more) < text.index("stopAt writeNow;")
    assert text.count("stopAt writeNow;") == 1


@unit
def test_a_film_on_a_wall_stays_cut_as_it_was(two_ranks, tmp_path, capsys):
    (tmp_path / "constant/film/polyMesh").mkdir(parents=True)
    (tmp_path / "system/film").mkdir(parents=True)
    (tmp_path / "system/controlDict").write_text("endTime 60;\n")
    checkpoint.begin(tmp_path, EVEN)
    for place in two_ranks:
        written(place, "40", "U", "film/deltaf")
    log = tmp_path / "log"
    log.write_text("Time = 40\n\nEnd\n")
    with pytest.raises(WorkFailed, match="has several regions"):
        checkpoint.go_on(tmp_path, (1.0,), log)
    assert checkpoint.go_on(tmp_path, (1.0, 3.0), log) == "40"
    assert "it goes on as it was cut" in capsys.readouterr().out
    assert sorted(tmp_path.glob("**/40")) == [place / "40" for place in two_ranks]


@unit
def test_until_it_is_cut_anew_the_case_says_how_it_was_cut(two_ranks, tmp_path, monkeypatch):
    """Solvers refuse to start on fewer ranks; reconstructPar of some versions takes as many."""
    cut = [tmp_path / "constant/cellDecomposition", tmp_path / "system/decomposeParDict"]
    for path in (tmp_path / "system/controlDict", *cut):
        path.parent.mkdir(exist_ok=True)
        path.write_text("of two ranks\n")
    seen, assigned, full = [], threading.Event(), [WorkFailed("the disk is full")]

    def tool(case: Path, *words: str) -> None:
        if "decompose" in words:
            for path in cut:
                mine = case / words[-1] / path.relative_to(tmp_path)
                mine.parent.mkdir(parents=True, exist_ok=True)
                mine.write_text("of three ranks\n")
            assigned.set()
            return
        assert assigned.wait(60)
        seen.append((words[0], [path.read_text() for path in cut]))
        if words[0] == "reconstructPar":
            written(case, "40", "U")
        elif full:
            raise full.pop()

    monkeypatch.setattr(checkpoint, "_tool", tool)
    checkpoint.begin(tmp_path, EVEN)
    for place in two_ranks:
        written(place, "40", "U")
    log = tmp_path / "log"
    log.write_text("Time = 40\n\nEnd\n")
    two, three = (["of two ranks\n"] * 2, ["of three ranks\n"] * 2)
    with pytest.raises(WorkFailed, match="is full"):
        checkpoint.go_on(tmp_path, (1.0, 1.0, 1.0), log)
    assert [path.read_text() for path in cut] == two
    assert sorted(tmp_path.glob("processor*")) == two_ranks
    assert [path.name for path in tmp_path.glob(".dovetail*")] == [".dovetail-checkpoint"]
    assert checkpoint.go_on(tmp_path, (1.0, 1.0, 1.0), log) == "40"
    assert [path.read_text() for path in cut] == three
    assert seen == [("reconstructPar", two), ("decomposePar", three)] * 2
    assert [path.name for path in tmp_path.glob(".dovetail*")] == [".dovetail-checkpoint"]


@unit
@pytest.mark.parametrize(("free", "together"), [(1 << 30, True), (1 << 20, False)])
def test_a_cut_is_made_beside_only_where_memory_is_enough(
    free, together, two_ranks, tmp_path, monkeypatch
):
    for path in (tmp_path / "system/controlDict", *(tmp_path / name for name in checkpoint._CUT)):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    monkeypatch.setattr(checkpoint, "free_memory", lambda: free)
    monkeypatch.setattr(checkpoint, "number_of_cells", lambda case: 1000)
    reconstructs, ends = threading.Event(), []

    def tool(case: Path, *words: str) -> None:
        if "decompose" in words:
            assert reconstructs.wait(60 if together else 0.1) == together
        elif words[0] == "reconstructPar":
            reconstructs.set()
            written(case, "40", "U")
        ends.append(words[0])

    monkeypatch.setattr(checkpoint, "_tool", tool)
    checkpoint.begin(tmp_path, EVEN)
    for place in two_ranks:
        written(place, "40", "U")
    (tmp_path / "log").write_text("Time = 40\n\nEnd\n")
    assert checkpoint.go_on(tmp_path, (1.0, 1.0, 1.0), tmp_path / "log") == "40"
    assert ends[-1] == "decomposePar"
    assert together or ends[1] == "reconstructPar"


BY_TIME = "writeControl runTime;\nwriteInterval 10;\nendTime 60;\ndeltaT 0.5;\n"
WRITES = {
    "fixed steps are counted": (BY_TIME, "timeStep; writeInterval 20"),
    "of steps that vary as many writes end as the last did": (
        BY_TIME.replace("runTime", "adjustable") + "adjustTimeStep yes;\n",
        "adjustable; writeInterval 8.75",
    ),
    "steps that do not divide the interval are as if they varied": (
        BY_TIME.replace("0.5", "0.7"), "runTime; writeInterval 8.75",
    ),
    "where the case began counts": (
        BY_TIME.replace("60", "62") + "startTime 4;\nadjustTimeStep yes;\n",
        "runTime; writeInterval 9.666666666666666",
    ),
    "it goes on from one of the writes": (
        BY_TIME.replace("10", "5") + "adjustTimeStep yes;\n", "",
    ),
    "there would be no further write": (
        BY_TIME.replace("60", "29.5") + "adjustTimeStep yes;\n", "",
    ),
    "steps are counted anyhow": (BY_TIME.replace("runTime", "timeStep"), ""),
    "an included file may say else": (BY_TIME + '#include "more"\n', ""),
    "it does not say": ("endTime 60;\n", ""),
}  # fmt: skip


@unit
@pytest.mark.parametrize("how", WRITES)
def test_fields_are_written_at_the_end_wherever_it_goes_on_from(tmp_path, how):
    said, wanted = WRITES[how]
    (tmp_path / "system").mkdir()
    path = tmp_path / "system/controlDict"
    path.write_text(said + "startFrom startTime;\n")
    checkpoint.begin(tmp_path, (1.0,))
    begun = path.read_text()
    written(tmp_path, "25", "p")
    (tmp_path / "25/uniform/time").write_text(f"{HEADER}index 50;\n{FOOTER}")
    (tmp_path / "log").write_text("Time = 25\n\nEnd\n")
    for _ in range(2):
        assert checkpoint.go_on(tmp_path, (1.0,), tmp_path / "log") == "25"
        more = f"writeControl {wanted};\n" if wanted else ""
        assert path.read_text() == f"{begun}startFrom startTime;\nstartTime 25;\n{more}"
    checkpoint.stopped(tmp_path)
    assert path.read_text() == begun


@mpi[0]
@mpi[1]
@pytest.mark.parametrize(
    "said",
    [
        BY_TIME.replace("endTime 60;", '#include "more"'),
        BY_TIME.replace("endTime 60;", 'endTime 30;\n#sinclude "more"'),
        BY_TIME.replace("writeInterval 10;", "fifth 10;\nwriteInterval $fifth;"),
    ],
)
def test_what_the_control_file_has_from_elsewhere_counts_as_openfoam_reads_it(tmp_path, said):
    (tmp_path / "system").mkdir()
    path = tmp_path / "system/controlDict"
    path.write_text(SET.replace("cellSet", "dictionary") + said + "startFrom startTime;\n")
    (tmp_path / "system/more").write_text("endTime 60;\n")
    checkpoint.begin(tmp_path, (1.0,))
    written(tmp_path, "25", "p")
    (tmp_path / "25/uniform/time").write_text(f"{HEADER}index 50;\n{FOOTER}")
    log = tmp_path / "log"
    log.write_text("Time = 25\n\nEnd\n")
    assert checkpoint.unfinished(tmp_path, log)
    assert checkpoint.go_on(tmp_path, (1.0,), log) == "25"
    assert "writeControl timeStep; writeInterval 20;" in path.read_text()
    log.write_text("Time = 60\n\nEnd\n")
    assert not checkpoint.unfinished(tmp_path, log)


ENDS = {
    "before its end": ("Time = 7\n", True),
    "at its end": ("Time = 19\nTime = 20\n\nEnd\n", False),
    "at its end, told after a blank": ("\n Time = 19\n\n Time = 20\n\nEnd\n", False),
    "at its end, but for rounding": ("Time = 19.9999999\n\nEnd\n", False),
    "converged": ("Time = 7\n\nSIMPLE solution converged in 7 iterations\n\nEnd\n", False),
    "converged within a time step": ("PIMPLE: converged in 3 iterations\nTime = 7\n", True),
    "converged before it went on": ("SIMPLE solution converged in 5 iterations\nTime = 6\n", True),
    "without a word": ("", True),
}


@unit
@pytest.mark.parametrize("how", ENDS)
def test_whether_a_solver_that_ended_well_has_steps_left(tmp_path, how):
    said, left = ENDS[how]
    (tmp_path / "system").mkdir()
    (tmp_path / "system/controlDict").write_text("endTime 20;\ndeltaT 1;\n")
    checkpoint.begin(tmp_path, (1.0,))
    checkpoint.stop(tmp_path)
    (tmp_path / "log").write_text(said)
    assert checkpoint.unfinished(tmp_path, tmp_path / "log") == left
    for elsewhere in ("endTime #calc 20;\ndeltaT 1;\n", 'endTime 20;\ndeltaT 1;\n#include "o"\n'):
        (tmp_path / "system/controlDict").write_text(elsewhere)
        assert checkpoint.unfinished(tmp_path, tmp_path / "log") == (left or "at its" in how)


@unit
@pytest.mark.parametrize(
    ("said", "left"),
    [
        ("Time = 0.959\nTime = 0.96\n\nEnd\n", True),
        ("Time = 0.999\nTime = 0.9999999\n\nEnd\n", False),
        ("Time = 1.0003\n\nEnd\n", False),
        ("Time = 0.5\n\nEnd\n", True),
        ("Time = 0.97\nTime = 0.96\n", True),  # it has gone on from before
        (None, True),
    ],
)
def test_where_steps_vary_the_end_is_less_than_half_the_last_one_away(tmp_path, said, left):
    (tmp_path / "case/system").mkdir(parents=True)
    text = "endTime 1;\ndeltaT 0.1;\nadjustTimeStep yes;\n"
    (tmp_path / "case/system/controlDict").write_text(text)
    checkpoint.begin(tmp_path / "case", (1.0,))
    begun = (tmp_path / "case/system/controlDict").read_text()
    checkpoint.stop(tmp_path / "case")
    if said is not None:
        (tmp_path / "log").write_text(said)
    words = [sys.executable, "-c", f"{IMPORT}; checkpoint.main()", "halted", "1"]
    path = str(install_paths.PACKAGES)
    asked = subprocess.run(
        words, cwd=tmp_path / "case", env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert asked.returncode == (0 if left else NOTHING_LEFT)
    text = (tmp_path / "case/system/controlDict").read_text()
    assert text == begun, "who goes on by hand is not stopped after one step"


@unit
def test_where_a_solver_was_stopped_its_log_need_not_tell_times(two_ranks, tmp_path):
    (tmp_path / "system").mkdir()
    (tmp_path / "system/controlDict").write_text("endTime 90;\n")
    for place in two_ranks:
        shutil.rmtree(place / "10")
        (place / "20").rename(tmp_path / place.name / "later")
    checkpoint.begin(tmp_path, EVEN)
    checkpoint.stop(tmp_path)
    for place in two_ranks:
        (place / "later").rename(place / "20")
    log = tmp_path / "log"
    log.write_text("Iteration: 20\n\nEnd\n")
    assert latest(two_ranks) is None
    checkpoint.stopped(tmp_path)
    assert checkpoint.go_on(tmp_path, EVEN, log) == "20"
    # Stopped again before it has written, it goes on from there again.
    checkpoint.stopped(tmp_path)
    assert checkpoint.go_on(tmp_path, EVEN, log) == "20"
    truncate(two_ranks[1] / "20/p")
    assert checkpoint.go_on(tmp_path, EVEN, log) is None


@unit
def test_a_case_that_was_not_made_ready_is_not_stopped(tmp_path):
    (tmp_path / "system").mkdir()
    (tmp_path / "system/controlDict").write_text("endTime 20;\n")
    with pytest.raises(BadInput, match="not made ready"):
        checkpoint.stop(tmp_path)
    assert (tmp_path / "system/controlDict").read_text() == "endTime 20;\n"


# --- Real solvers ---


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A case of 12,225 cells, cut evenly for two ranks."""
    return pitz_daily(tmp_path_factory.mktemp("cases") / "pitz", EVEN, END, refine=1)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def copy(original: Path, case: Path, **entries: object) -> Path:
    """The case as it would be copied for a run, with other entries in its controlDict."""
    shutil.copytree(original, case)
    path = case / "system/controlDict"
    text = path.read_text()
    for key, value in entries.items():
        text = re.sub(rf"(?m)^{key}\s+\S+;", f"{key} {value};", text)
    path.write_text(text)
    return case


def start(case: Path, ranks: int) -> subprocess.Popen[bytes]:
    """The solver, in a process group of its own; its log goes on."""
    words = ["mpirun", "-np", str(ranks), "simpleFoam", "-parallel"] if ranks > 1 else []
    with (case / "log").open("ab") as log:
        return subprocess.Popen(
            words or ["simpleFoam"], cwd=case, stdout=log, stderr=log, start_new_session=True
        )


def finish(case: Path, ranks: int) -> None:
    assert start(case, ranks).wait(300) == 0, (case / "log").read_text()[-2000:]


def kill(leader: subprocess.Popen[bytes]) -> None:
    """Kill a program and all that it started, some of which has a process group of its own."""
    left = [leader.pid]
    while left:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        leader.wait()
        left = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
                if int(session) == leader.pid and state != "Z":
                    left.append(int(stat.parent.name))


def wait_for(case: Path, iteration: int, solver: subprocess.Popen[bytes]) -> None:
    while f"\nTime = {iteration}\n" not in (case / "log").read_text():
        assert solver.poll() is None, (case / "log").read_text()[-2000:]
        time.sleep(0.01)


def stop_at(case: Path, ranks: int, iteration: int) -> None:
    """Run the solver, and have it stopped once it has come to that iteration."""
    solver = start(case, ranks)
    wait_for(case, iteration, solver)
    checkpoint.stop(case)
    assert solver.wait(300) == 0, (case / "log").read_text()[-2000:]


def content(path: Path) -> bytes:
    packed = path.with_name(path.name + ".gz")
    return gzip.decompress(packed.read_bytes()) if packed.is_file() else path.read_bytes()


def same_fields(one: Path, other: Path, ranks: int) -> None:
    """Both have the same final fields, to the last bit."""
    for place in written_times.directories(Path(), ranks):
        for field in FIELDS:
            where = place / str(END) / field
            assert content(one / where) == content(other / where), where


FORMATS = {
    "ascii": {"writeInterval": 20},
    "ascii, compressed, purged": {
        "writeInterval": 5, "writeCompression": "on", "purgeWrite": 2, "writePrecision": 12,
    },
    "binary": {"writeInterval": 20, "writeFormat": "binary", "runTimeModifiable": "no"},
    "by time": {"writeInterval": 20, "writeControl": "runTime"},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("ranks", [1, 2])
class TestSameRanks:
    """Stopped and gone on with as it was cut."""

    pytestmark = mpi

    def test_it_ends_with_the_fields_of_an_undisturbed_run(self, original, tmp_path, form, ranks):
        entries = {**FORMATS[form], "endTime": END}
        weights = (1.0,) * ranks
        undisturbed = copy(original, tmp_path / "undisturbed", **entries)
        finish(undisturbed, ranks)
        case = copy(original, tmp_path / "case", **entries)
        checkpoint.begin(case, weights)
        found = []
        for iteration in (3, 30):
            stop_at(case, ranks, iteration)
            found.append(checkpoint.go_on(case, weights, case / "log"))
        assert 3 <= int(found[0]) < 30 <= int(found[1]) < END
        finish(case, ranks)
        same_fields(case, undisturbed, ranks)


def to_the_end(case: Path, *stops: tuple[float, ...]) -> list[str]:
    """Run it on two ranks, stopped after a step for each cut with which it then goes on.

    Returns the names of the times that it came to.
    """
    checkpoint.begin(case, EVEN)
    for weights in stops:
        checkpoint.stop(case)
        finish(case, 2)
        checkpoint.stopped(case)
        assert checkpoint.go_on(case, weights, case / "log")
    finish(case, 2)
    return re.findall(r"(?m)^Time = (\S+)$", (case / "log").read_text())


@mpi[0]
@mpi[1]
@pytest.mark.parametrize("after", [EVEN, (1.0, 3.0)], ids=str)
def test_times_of_many_digits_have_the_names_of_an_undisturbed_run(original, tmp_path, after):
    entries = {"deltaT": 1 / 30, "endTime": 0.2, "writeInterval": 1}
    told = to_the_end(copy(original, tmp_path / "undisturbed", **entries))
    case = copy(original, tmp_path / "case", **entries)
    found = to_the_end(case, EVEN, after)
    names = ["0.0333333", "0.0666667", "0.1", "0.133333", "0.166667", "0.2"]
    assert found == told == names
    assert written_times.times(case / "processor0")[-4:] == names[2:]


def fields(case: Path, ranks: int) -> dict[str, np.ndarray]:
    """The final fields in one piece, as numbers; the case is reconstructed for that."""
    if ranks > 1:
        tool = subprocess.run(["reconstructPar", "-latestTime"], cwd=case, capture_output=True)
        assert tool.returncode == 0, tool.stdout[-2000:]
    found = {}
    for field in ("U", "p", "k"):
        data = content(case / str(END) / field)
        first = data.index(b"nonuniform List<")
        count, body = data[first:].split(b"\n", 2)[1:]
        size = int(count) * (3 if field == "U" else 1)
        if b"format      binary" in data:
            found[field] = np.frombuffer(body, float, size, 1)
        else:
            found[field] = np.array(body.translate(PARENTHESES).split()[:size], float)
    return found


def difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> dict[str, float]:
    """The largest difference of each field, relative to its largest value."""
    return {f: float(abs(one[f] - other[f]).max() / abs(other[f]).max()) for f in one}


@pytest.fixture(scope="module")
def undisturbed(original, tmp_path_factory):
    """The final fields of undisturbed runs, by the number of their ranks."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        for ranks in (1, 2):
            case = copy(original, tmp_path_factory.mktemp("undisturbed") / "case", **DIGITS)
            finish(case, ranks)
            found[ranks] = fields(case, ranks)
    return found


def move(case: Path) -> None:
    """Move the mesh alone, on two ranks."""
    words = ["mpirun", "-np", "2", "moveDynamicMesh", "-parallel"]
    with (case / "log").open("ab") as log:
        subprocess.run(words, cwd=case, stdout=log, stderr=log, timeout=300, check=True)


class TestOtherRanks:
    """Stopped, cut again and gone on with."""

    pytestmark = mpi

    @pytest.mark.parametrize("parts", [[EVEN, (1.0,)], [(1.0,), EVEN], [EVEN, (1.0, 3.0)]], ids=str)
    def test_it_ends_as_near_as_undisturbed_runs_are_to_each_other(
        self, original, undisturbed, tmp_path, parts
    ):
        case = copy(original, tmp_path / "case", **DIGITS)
        now, after = parts
        checkpoint.begin(case, now)
        stop_at(case, len(now), 24)
        assert int(checkpoint.go_on(case, after, case / "log") or 0) >= 24
        there = {path.name for path in case.glob("processor*")}
        assert there == {f"processor{rank}" for rank in range(len(after)) if len(after) > 1}
        # The results of before are still there, in one piece and in the user's format.
        assert b"ascii" in (case / "20/p").read_bytes()
        finish(case, len(after))
        usual = difference(undisturbed[1], undisturbed[2])
        found = difference(fields(case, len(after)), undisturbed[len(now)])
        # One cut differs from another about as much as one rank from two, more in one field than in
        # the next; what had begun anew would be tens of steps behind.
        assert max(found.values()) <= 2 * max(usual.values()), (found, usual)

    def test_a_mesh_that_moves_goes_on_where_it_was(self, original, tmp_path):
        case = copy(original, tmp_path / "case", endTime=2, writeInterval=2)
        (case / "constant/dynamicMeshDict").write_text(MOVING)
        checkpoint.begin(case, EVEN)
        move(case)
        assert checkpoint.go_on(case, (1.0,), case / "log") == "2"
        first, now = (mesh_file.FoamFile(case / time / "polyMesh/points").floats()
                      for time in ("constant", "2"))  # fmt: skip
        np.testing.assert_allclose(now[::3] - first[::3], 2 * 0.5, atol=1e-5)

    def test_a_mesh_whose_ends_move_goes_on_on_other_ranks(self, original, tmp_path):
        case = copy(original, tmp_path / "case", endTime=2, writeInterval=2)
        (case / "constant/dynamicMeshDict").write_text(STRETCHED)
        for name, group, entry in MORE:
            path = case / "system" / name
            path.write_text(path.read_text().replace(f"{group}\n{{", f"{group}\n{{\n{entry}"))
        for place in written_times.directories(case, 2):
            (place / "0/pointMotionUx").write_text(SPEEDS)
        checkpoint.begin(case, EVEN)
        move(case)
        assert checkpoint.go_on(case, (1.0, 3.0), case / "log") == "2"
        text = (case / "system/controlDict").read_text()
        (case / "system/controlDict").write_text(re.sub(r"endTime\s+2;", "endTime 4;", text))
        move(case)

    def test_a_new_cut_that_fails_leaves_it_cut_as_it_was(self, original, undisturbed, tmp_path):
        case = copy(original, tmp_path / "case", **DIGITS)
        checkpoint.begin(case, EVEN)
        stop_at(case, 2, 24)
        before = written_times.times(case / "processor0")[-1]
        broken = case / "constant/polyMesh/sets/broken"  # which a decomposer reads, and no solver
        broken.parent.mkdir()
        broken.write_text(SET + "no list\n" + FOOTER)
        with pytest.raises(WorkFailed, match="decomposePar"):
            checkpoint.go_on(case, (1.0, 1.0, 1.0), case / "log")
        assert "numberOfSubdomains 2;" in (case / "system/decomposeParDict").read_text()
        assert checkpoint.go_on(case, (1.0, 3.0), case / "log") == before, "on as many ranks"
        assert sorted(case.glob("processor*")) == written_times.directories(case, 2)
        broken.unlink()
        finish(case, 2)
        found = fields(case, 2)
        assert all(np.allclose(found[f], undisturbed[2][f], rtol=1e-9, atol=1e-11) for f in found)

    def test_a_new_cut_that_is_killed_is_made_again(self, original, tmp_path):
        case = copy(original, tmp_path / "case", **DIGITS)
        checkpoint.begin(case, EVEN)
        stop_at(case, 2, 14)
        name = checkpoint.go_on(case, EVEN, case / "log")
        weights = EVEN
        for number in range(12):
            after = [(1.0,), EVEN][number % 2]
            call = f"checkpoint.go_on(Path('.'), {after}, Path('log'))"
            statement = f"from pathlib import Path; {IMPORT}; {call}"
            child = subprocess.Popen(
                [sys.executable, "-c", statement],
                cwd=case,
                env=install_paths.package_environment(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            time.sleep(0.15 * number)
            kill(child)
            weights = after
        assert checkpoint.go_on(case, weights, case / "log") == name
        finish(case, len(weights))


class TestCrash:
    """Solvers are killed at any moment, files are damaged."""

    pytestmark = mpi

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_after_kills_it_ends_with_the_fields_of_an_undisturbed_run(
        self, original, tmp_path, ranks
    ):
        # Each step is written: many of the kills come in the middle of that.
        entries = {"writeInterval": 1, "writeFormat": "binary", "purgeWrite": 3}
        weights = (1.0,) * ranks
        undisturbed = copy(original, tmp_path / "undisturbed", **entries)
        finish(undisturbed, ranks)
        case = copy(original, tmp_path / "case", **entries)
        checkpoint.begin(case, weights)
        reached = 0
        for number in range(8):
            solver = start(case, ranks)
            wait_for(case, reached + 3, solver)
            time.sleep(0.013 * number)
            kill(solver)
            name = checkpoint.go_on(case, weights, case / "log")
            assert name is not None
            assert int(name) > reached
            reached = int(name)
            if reached > END - 10:
                break
        finish(case, ranks)
        same_fields(case, undisturbed, ranks)

    def test_a_damaged_time_is_computed_again(self, original, undisturbed, tmp_path):
        case = copy(original, tmp_path / "case", **DIGITS, writeFormat="binary")
        checkpoint.begin(case, EVEN)
        stop_at(case, 2, 32)
        *_, third, second, last = written_times.times(case / "processor0")
        truncate(case / "processor1" / last / "U")
        assert checkpoint.go_on(case, EVEN, case / "log") == second
        truncate(case / "processor0" / second / "p")
        assert checkpoint.go_on(case, EVEN, case / "log") == third
        finish(case, 2)
        found = fields(case, 2)
        assert all(np.allclose(found[f], undisturbed[2][f], rtol=1e-9, atol=1e-11) for f in found)
