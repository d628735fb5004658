# SPDX-License-Identifier: LGPL-3.0-or-later
"""`import dovetail`: the commands as functions, as a user's script or notebook calls them."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path

import dovetail
import numpy as np
import pytest
from dovetail import api
from dovetail.core import units

TOP = Path(__file__).resolve().parents[1]
PITZ = Path("/usr/share/doc/openfoam-examples/examples/incompressible/simpleFoam/pitzDaily")


def python(script, directory):
    """A user's script, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=directory, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.unit
class TestWithoutMpi:
    def test_what_is_offered_is_what_the_module_has(self):
        assert set(dovetail._API) == set(api.__all__)
        assert set(dovetail._API) < set(dir(dovetail))
        assert dovetail.predict is api.predict
        with pytest.raises(AttributeError, match="no attribute 'simulate'"):
            dovetail.simulate  # noqa: B018

    def test_an_import_imports_nothing_else(self, tmp_path):
        asked = "import sys, dovetail; print([m for m in sys.modules if m.startswith('dovetail.')])"
        assert python(asked, tmp_path).stdout == "[]\n"

    @pytest.mark.parametrize(
        ("words", "strangers"),
        [("--version", ("dovetail.cli.run", "pydantic")), ("--help", ("kubernetes",))],
    )
    def test_a_command_that_only_tells_of_itself_loads_little(self, words, strangers, tmp_path):
        asked = f"""
import sys
from dovetail.cli.main import main
try:
    main(["{words}"])
except SystemExit:
    print([name for name in {strangers!r} if name in sys.modules])"""
        assert python(asked, tmp_path).stdout.splitlines()[-1] == "[]"

    def test_every_function_and_parameter_is_in_the_manual(self):
        page = (TOP / "doc" / "dovetail-python.7").read_text()
        for name in api.__all__:
            one = getattr(api, name)
            if inspect.isfunction(one):
                text = re.search(rf"^\.It Fn {name}\n(.*?)(?=^\.It Fn|^\.El)", page, re.M | re.S)
                assert text, name
                missing = [
                    word
                    for word in inspect.signature(one).parameters
                    if f"Fa {word}" not in text[1]
                ]
                assert missing == [], name
            else:
                assert f"Vt {name}" in page

    def test_requests_add_up(self):
        assert dovetail.requests([1, 1, 5, 15], 4) == (182, 182, 909, 2727)
        assert dovetail.requests([1, 3], "500m", floor=0) == (125, 375)
        assert dovetail.requests([1, 3], "500m", floor=0.0) == (125, 375)
        with pytest.raises(dovetail.BadInput, match="cpus: 'two' is not a CPU quantity"):
            dovetail.requests([1, 3], "two")

    def test_requests_take_numbers_as_scripts_have_them(self):
        assert dovetail.requests(np.array([1, 3]), np.int64(4)) == (1000, 3000)
        assert dovetail.requests([1, 3], 6 * 0.7, floor=1e-2) == (1050, 3150)
        assert units.cpus(6 * 0.7) == 4200, "in a plan that is a mapping"
        with pytest.raises(dovetail.BadInput, match="cpus: '0.333333333' is not whole millicores"):
            dovetail.requests([1, 3], 1 / 3)
        for load in ("1,3", 13, [[1], [3]], ["one"], None):
            with pytest.raises(dovetail.BadInput, match="no profile, nor a list of one num"):
                dovetail.requests(load, 4)

    @pytest.mark.parametrize("command", ["mpirun -np 2 solver", ["mpirun", "-np", 2, "solver"], 7])
    def test_a_command_that_is_no_list_of_words_is_refused(self, command):
        with pytest.raises(dovetail.BadInput, match="command: .* is not a list of words"):
            dovetail.profile_command(command)

    def test_a_prediction_is_that_of_the_command(self):
        model = dovetail.predict(1203, 4, 4, measured={2: 1410})
        assert model.points == 1
        assert dovetail.predict(1203, 4, 4, beta=model.beta).makespan(3) == model.makespan(3)
        for wrong in ({}, {"beta": 0.1, "measured": {2: 1410}}):
            with pytest.raises(dovetail.BadInput, match="either beta or measured"):
                dovetail.predict(1203, 4, 4, **wrong)
        with pytest.raises(dovetail.BadInput, match="5 cores are more than the 4 vCPUs"):
            dovetail.predict(1203, 4, 4, beta=0.1, need=5)

    def test_a_plan_is_a_mapping_or_a_file(self, tmp_path):
        (tmp_path / "case").mkdir()
        (tmp_path / "plan.yaml").write_text(
            "simulations: [{name: filed, case: case, ranks: 1, command: 'true'}]"
        )
        done = python(
            """
            import pathlib, dovetail
            plan = {"simulations": [
                {"name": "well", "case": pathlib.Path("case"), "ranks": 1, "command": "true"},
                {"name": "ill", "case": "case", "ranks": 1, "command": "false"}]}
            run = dovetail.run_plan(plan, "out")
            print(run.done, *(f"{one.name} {one.state}" for one in run.summary.simulations))
            print(dovetail.run_plan("plan.yaml", "out2").done)
            try:
                dovetail.run_plan("plan.yaml", "out2")
            except dovetail.BadInput as error:
                print(error)
            """,
            tmp_path,
        )
        assert done.stdout.splitlines() == [
            "False well done ill failed",
            "True",
            "out2: holds a run already; go on with --resume or choose another",
        ], done.stderr
        assert (tmp_path / "out" / "report.html").exists()

    def test_what_the_command_warns_of_is_said_here_too(self, tmp_path, capsys):
        entry = {"name": "a", "case": tmp_path, "ranks": 1, "command": "true", "limit": 1.5}
        with pytest.raises(dovetail.BadInput, match="only pods can have one"):
            dovetail.run_plan({"simulations": [entry]}, tmp_path / "out")
        said = capsys.readouterr().err
        assert said.startswith("dovetail: a: a limit of 1.5 times the request may slow it down")

    def test_a_report_that_cannot_be_written_raises_nothing(self, tmp_path):
        """The simulations are done all the same."""
        (tmp_path / "out" / "report.html").mkdir(parents=True)
        (tmp_path / "case").mkdir()
        done = python(
            """
            import dovetail
            entry = {"name": "a", "case": "case", "ranks": 1, "command": "true"}
            run = dovetail.run_plan({"simulations": [entry]}, "out")
            print(run.done, run.report, run.trouble)
            """,
            tmp_path,
        )
        why = "out/report.html: not a file in an existing directory"
        assert done.stdout == f"True None {why}\n", done.stderr

    def test_numbers_and_letters_of_a_mapping_are_those_of_the_plan(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "case \U0001f300").mkdir()
        odd = "\U0001f300 \\ud83c\x7f\u2028"
        entry = {
            "name": "a", "case": "case \U0001f300", "ranks": 2, "command": ["sleep", odd],
            "weights": [1e-05, 2.5e-07], "environment": {"A": odd, "B": "1e-05", "C": "no"},
        }  # fmt: skip
        (spec,) = api._load({"simulations": [entry]}).specs
        assert Path(spec.case).samefile(tmp_path / "case \U0001f300")
        assert spec.weights == (1e-05, 2.5e-07)
        assert spec.command == ("sleep", odd)
        assert dict(spec.environment) == entry["environment"]

    def test_a_mapping_may_be_of_any_kind(self, tmp_path):
        entry = {
            "name": "a", "case": tmp_path, "ranks": np.int64(2), "command": "true",
            "weights": np.array([1.0, 3.0]),
        }  # fmt: skip
        plan = types.MappingProxyType({"simulations": [types.MappingProxyType(entry)]})
        (spec,) = api._load(plan).specs
        assert (spec.ranks, spec.weights) == (2, (1.0, 3.0))

    @pytest.mark.parametrize(
        ("plan", "says"),
        [
            ({"simulations": [{"name": "a"}]}, r"plan:\d+: simulations\[0\]\.\w+: "),
            ({"simulations": [{"name": {1, 2}}]}, r"plan: \{1, 2\} is no text"),
            ({}, "plan:1: simulations: "),
            ({"cpus": Path(os.fsdecode(b"\xe9"))}, r"plan:1: '\\udce9' is no text in UTF-8"),
        ],
    )
    def test_a_mapping_that_is_no_plan_is_refused(self, plan, says, tmp_path):
        with pytest.raises(dovetail.BadInput, match=says):
            dovetail.run_plan(plan, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_half_a_cluster_is_refused(self, tmp_path):
        entry = {"name": "a", "case": str(tmp_path), "ranks": 1, "command": "true"}
        with pytest.raises(dovetail.BadInput, match="name their cluster"):
            dovetail.run_plan({"simulations": [entry]}, tmp_path / "o", launcher="job")
        for wrong in ({"network": "brigde"}, {"launcher": "Job"}):
            (name, word), plan = wrong.popitem(), {"simulations": [entry]}
            with pytest.raises(dovetail.BadInput, match=f"{name}: '{word}' is not one of "):
                dovetail.run_plan(plan, "/nonesuch", kubeconfig="/none", **{name: word})
        with pytest.raises(dovetail.BadInput, match="no simulation of the plan"):
            dovetail.run_plan({"simulations": [entry]}, "/nonesuch", checkpoint=True)

    def test_other_threads_get_no_signals(self):
        said = []

        def call():
            for function in (dovetail.run_plan, dovetail.profile_command):
                with pytest.raises(dovetail.BadInput, match="main thread") as caught:
                    function([])
                said.append(str(caught.value))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert [text.split(":")[0] for text in said] == ["run_plan", "profile_command"]

    def test_a_type_checker_knows_the_functions(self, tmp_path):
        mypy = Path(sys.executable).with_name("mypy")
        if not mypy.exists():
            pytest.skip("mypy is not installed")
        (tmp_path / "user.py").write_text("import dovetail\nreveal_type(dovetail.run_plan)\n")
        done = subprocess.run(
            [mypy, "--python-executable", sys.executable, "user.py"],
            cwd=tmp_path, env={**os.environ, "MYPYPATH": str(TOP / "flux-python")},
            capture_output=True, text=True,
        )  # fmt: skip
        assert "checkpoint: builtins.bool" in done.stdout, done.stdout


@pytest.mark.mpi
class TestWithMpi:
    @pytest.fixture(autouse=True)
    def _root(self, monkeypatch):
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
            monkeypatch.setenv(name, "1")

    def test_a_program_that_fails_raises_unless_it_is_not_checked(self, tmp_path):
        pytest.importorskip("mpi4py")
        done = python(
            """
            import sys, dovetail
            command = ["mpirun", "-np", "1", sys.executable, "-c",
                       "from mpi4py import MPI; MPI.COMM_WORLD.Barrier(); raise SystemExit(3)"]
            found = dovetail.profile_command(command, check=False)
            print(found.exit_code, len(found.ranks))
            try:
                dovetail.profile_command(command)
            except dovetail.WorkFailed as error:
                print(error)
            try:
                dovetail.profile_command(command, wait="never")
            except dovetail.BadInput as error:
                print(error)
            """,
            tmp_path,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith(("3", "mpi", "wait"))]
        assert lines == [
            "3 1",
            "mpirun ended with exit code 3",
            "wait: 'never' is not one of off, yield, doorbell",
        ], done.stderr

    @pytest.mark.skipif(
        not (PITZ.is_dir() and shutil.which("decomposePar")), reason="OpenFOAM is not installed"
    )
    def test_the_notebook_runs_as_it_is(self, tmp_path, monkeypatch):
        nbclient = pytest.importorskip("nbclient")
        nbformat = pytest.importorskip("nbformat")
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
        monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        monkeypatch.setenv("PATH", path)
        book = nbformat.read(TOP / "examples" / "queue.ipynb", as_version=4)
        client = nbclient.NotebookClient(
            book, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
        )
        client.execute()
        said = "".join(
            output.get("text", "") for cell in book.cells for output in cell.get("outputs", [])
        )
        assert len(re.findall(r"^step-\d: done on [12] ranks", said, re.M)) == 4, said
        assert re.search(r"rank 1: 60 iterations, duty cycle \d+%", said), said
        assert not [place for place in tmp_path.iterdir() if place.name.startswith("dovetail-")]
