# SPDX-License-Identifier: LGPL-3.0-or-later
"""What is started on the ranks that were chosen, and what the user's cases say of their length."""

from __future__ import annotations

import dataclasses
import subprocess
import typing
from pathlib import Path
from types import SimpleNamespace

import pytest
from dovetail.applications import APPLICATIONS, expected_iterations, form
from dovetail.core import programs
from dovetail.core.protocol import Spec
from dovetail.mpi.launcher import STARTERS
from dovetail.plan import command_line, schema
from support.pipes import pipe

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]


def spec(command, ranks=4, widths=(1, 2, 4), **options):
    options.setdefault("weights", (1.0,) * ranks)
    options.setdefault("application", programs.application_of(command.split()))
    options.setdefault("case", "/none")
    words = tuple(command.split())
    return Spec("a", "a", ranks=ranks, command=words, widths=widths, **options)


COMMANDS = {
    "OpenFOAM on several": ("simpleFoam", 2, "simpleFoam -parallel"),
    "OpenFOAM on one": ("simpleFoam", 1, "simpleFoam"),
    "OpenFOAM with -parallel on several": ("simpleFoam -parallel -v", 2, "simpleFoam -parallel -v"),
    "OpenFOAM with -parallel on one": ("simpleFoam -parallel -v", 1, "simpleFoam -v"),
    "OpenFOAM under the user's own starter": (
        "mpirun -np {ranks} pimpleFoam",
        4,
        "mpirun -np 4 pimpleFoam -parallel",
    ),
    "LAMMPS": ("lmp -in in.lj", 2, "lmp -in in.lj"),
    "any other": ("solver --parts {ranks}:{weights}", 4, "solver --parts 4:1,1,1,1"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_on_the_ranks_that_were_chosen(name):
    command, ranks, wanted = COMMANDS[name]
    assert " ".join(form(spec(command).on(ranks)).command) == wanted


def test_a_case_of_openfoam_is_cut_after_the_users_own_steps():
    asked = spec("simpleFoam", 2, (1, 2), weights=(1.0, 3.0), prepare=("blockMesh",))
    cut = "dovetail decompose --ranks {} --weights {} --force --apply ."
    assert form(asked).prepare == ("blockMesh", cut.format(2, "1,3"))
    assert form(asked.on(1)).prepare == ("blockMesh", cut.format(1, "1"))


def test_a_case_in_one_piece_is_not_cut_for_one_rank(tmp_path):
    (tmp_path / "0").mkdir()
    asked = spec("simpleFoam", 1, (1, 2), case=str(tmp_path))
    assert not form(asked).prepare
    assert "decompose" in form(dataclasses.replace(asked, prepare=("blockMesh",))).prepare[1]


def test_a_case_that_is_cut_comes_in_one_piece_for_one_rank(tmp_path):
    for name in ("0", "processor0", "processor11", "processors2", "processorTypes"):
        (tmp_path / name / "0").mkdir(parents=True)
    (step,) = form(spec("simpleFoam", 1, (1, 2), case=str(tmp_path))).prepare
    subprocess.run(command_line.split(step), cwd=tmp_path, check=True)
    assert sorted(place.name for place in tmp_path.iterdir()) == ["0", "processorTypes"]


def test_fields_that_ranks_have_alone_are_left_to_decompose(tmp_path):
    (tmp_path / "processor0" / "0").mkdir(parents=True)
    (step,) = form(spec("simpleFoam", 1, (1, 2), case=str(tmp_path))).prepare
    assert step.startswith("dovetail decompose --ranks 1 ")


@pytest.mark.parametrize(
    ("control", "alone"),
    [
        ("startFrom latestTime; startTime 0;", True),
        ("startFrom firstTime;", False),
        ("startFrom startTime; startTime 500;", True),
        ("startFrom startTime; startTime 0;", False),
    ],
)
def test_one_rank_begins_where_several_would(control, alone, tmp_path):
    for name in ("0", "system", "processor0/0", "processor0/500"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "system" / "controlDict").write_text(control)
    (step,) = form(spec("simpleFoam", 1, (1, 2), case=str(tmp_path))).prepare
    assert step.startswith("dovetail decompose --ranks 1 ") == alone


def test_weights_are_written_only_where_they_have_a_place():
    class Unread(tuple):
        def __iter__(self):
            raise AssertionError("nobody asked for them")

    assert programs.filled("solver {ranks}", 2, Unread((1.0, 1.0))) == "solver 2"


def test_weights_are_told_as_they_are():
    asked = spec("tool {weights}", 2, weights=(0.1, 1 / 3))
    told = form(asked).command[1].split(",")
    assert [float(word) for word in told] == [0.1, 1 / 3]


@pytest.mark.parametrize("command", ["simpleFoam", "lmp -in in.lj", "solver ${ranks} {rank} {}"])
def test_what_has_one_number_of_ranks_is_started_as_the_plan_says(command):
    asked = spec(command, 1, (), prepare=("sh -c 'echo ${weights}'",))
    assert form(asked) == asked


def test_ranks_are_put_into_words_of_what_has_one_number_of_ranks():
    made = form(spec("solver {ranks}", 3, (), prepare=("cut {ranks} {weights}",)))
    assert (made.command, made.prepare) == (("solver", "3"), ("cut 3 1,1,1",))


NAMES = {
    "simpleFoam": "openfoam",
    "/opt/bin/myOwnFoam -parallel": "openfoam",
    "foamRun -solver fluid": "openfoam",
    "mpirun -np 4 simpleFoam -parallel": "openfoam",
    "mpiexec.hydra -n 4 lmp_mpi -in in.lj": "lammps",
    "lmp -in in.lj": "lammps",
    "lammps-daily -in in.lj": "lammps",
    "solver simpleFoam": "generic",
    "lmpx": "generic",
    "python3 Foam": "generic",
}


@pytest.mark.parametrize("command", NAMES)
def test_the_application_is_told_by_the_programs_name(command):
    assert programs.application_of(command.split()) == NAMES[command]


def test_every_application_is_known_everywhere():
    named = typing.get_type_hints(schema._Entry)["application"]
    choices = typing.get_args(typing.get_args(named)[0])
    assert list(APPLICATIONS) == list(programs.PROGRAMS) == list(choices)
    assert all(map(programs.is_starter, STARTERS))


def test_the_example_of_the_manual_is_an_application(monkeypatch):
    page = (ROOT / "doc" / "dovetail-applications.7").read_text()
    text = page[page.index("# dovetail/applications/lattice.py") :].partition("\n.Ed")[0]
    space: dict[str, typing.Any] = {}
    exec(compile(text, "lattice.py", "exec"), space)
    monkeypatch.setitem(APPLICATIONS, "lattice", SimpleNamespace(**space))
    asked = spec("lattice --steps 70", application="lattice")
    assert form(asked.on(2)).command == ("lattice", "--steps", "70", "--parts", "parts.2")
    assert form(asked.on(2)).prepare == ("lattice-parts --weights 1,1 --to parts.2",)
    assert form(asked.on(1)).command == asked.command
    assert expected_iterations(asked) == 70


# --- Iterations ---

CONTROL = """
FoamFile {{ version 2.0; class dictionary; object controlDict; endTime 7; }}
// endTime 8;
application simpleFoam;
startFrom {start}; startTime 10; stopAt {stop};
endTime {end}; deltaT {step}; /* deltaT 9; */
functions {{ probes {{ deltaT 99; text "}}"; }} }}
{more}
"""
RUNS = {
    "from its start time": ({}, 90),
    "from its latest time": ({"start": "latestTime"}, 80),
    "from its first time": ({"start": "firstTime"}, 100),
    "small steps": ({"step": "1e-3"}, 90000),
    "an end before its start": ({"end": "5"}, 0),
    "from a time in quotes": ({"start": '"latestTime"'}, 80),
    "from its start time in quotes": ({"start": '"startTime"'}, 90),
    "another way to stop in quotes": ({"stop": '"nextWrite"'}, 0),
    "a pattern, which yields to a word": ({"more": '"endTime" 30; "(end|start)Time" 30;'}, 90),
    "steps that it chooses": ({"more": "adjustTimeStep yes;"}, 0),
    "steps that it might choose": ({"more": "adjustTimeStep no;"}, 90),
    "another way to stop": ({"stop": "nextWrite"}, 0),
    "another way to start": ({"start": "$here"}, 0),
    "an end that is computed": ({"end": "$last"}, 0),
    "an entry that is computed": ({"more": '#calc "1 + 1";'}, 0),
    "a start by code": ({"more": "startTime #codeStream { code #{ os << 5; #}; };"}, 0),
    "an end by newer code": ({"more": "endTime #stream #{ return 5; #};"}, 0),
    "code of a function": ({"more": "functions { it { at #codeStream { code #{ #}; }; } }"}, 90),
    "entries of another file": ({"more": '#include "over"'}, 0),
    "entries of another file, if that is there": ({"more": '#sinclude "over"'}, 0),
    "functions of another file": ({"more": 'functions { #include "probes" }'}, 90),
    "steps of nothing": ({"step": "0"}, 0),
}


@pytest.mark.parametrize("name", RUNS)
def test_iterations_of_an_openfoam_case(name, tmp_path):
    changes, wanted = RUNS[name]
    values = {"start": "startTime", "stop": "endTime", "end": "100", "step": "1", "more": ""}
    for directory in ("system", "0", "20", "constant", "processor0"):
        (tmp_path / directory).mkdir()
    (tmp_path / "system" / "controlDict").write_text(CONTROL.format(**{**values, **changes}))
    asked = spec("simpleFoam", case=str(tmp_path))
    assert expected_iterations(asked) == wanted
    assert expected_iterations(dataclasses.replace(asked, iterations=3)) == 3


SCRIPTS = {
    "one run": ("units lj\nrun 100\n", 100),
    "two runs": ("run 100 # run 7\n  run 50 post no\nthermo 10 # until 3\n", 150),
    "a line that goes on": ("fix 1 all &\nnve\nrun &\n 30\n", 30),
    "a number in a variable": (
        "variable n index 100\nrun $n\nvariable n index 7\nrun ${n}0\n",
        1100,
    ),
    "a number from the command": ("variable steps index 100\nrun ${steps}\n", 40),
    "a formula": ("variable n equal 2*50\nrun $n\n", 0),
    "an outer step of several": ("run_style respa 2 2\nrun 100\n", 100),
    "a loop": ("label again\nrun 100\nnext i\njump SELF again\n", 0),
    "an end of its own": ("run 100 upto\n", 0),
    "a minimisation": ("minimize 1 1 10 10\nrun 100\n", 0),
    "no run": ("units lj\n", 0),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_iterations_of_a_lammps_script(name, tmp_path):
    text, wanted = SCRIPTS[name]
    (tmp_path / "in.lj").write_text(text)
    assert expected_iterations(spec("lmp -var steps 40 -in in.lj", case=str(tmp_path))) == wanted


@pytest.mark.parametrize(
    ("command", "file", "text"),
    [
        ("simpleFoam", "system/controlDict", "startTime 0; endTime 7; deltaT 1;"),
        ("lmp -in in.lj", "in.lj", "run 7\n"),
    ],
)
def test_who_asks_for_iterations_waits_for_no_pipe(command, file, text, tmp_path):
    (tmp_path / "system").mkdir()
    pipe(tmp_path / file, text)
    assert expected_iterations(spec(command, case=str(tmp_path))) == 0


@pytest.mark.parametrize("command", ["simpleFoam", "lmp -in in.lj", "lmp", "solver"])
def test_iterations_are_unknown_where_nothing_says_them(command, tmp_path):
    assert expected_iterations(spec(command, case=str(tmp_path))) == 0
