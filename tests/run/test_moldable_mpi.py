# SPDX-License-Identifier: LGPL-3.0-or-later
"""Real programs on each of several numbers of ranks: they start, and their results agree."""

from __future__ import annotations

import hashlib
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from dovetail.applications import expected_iterations, form, prepared_iterations
from dovetail.applications.openfoam.cell_counts import cells_per_processor
from dovetail.bench.cases import environment
from dovetail.core import protocol
from dovetail.core.protocol import Cause, Spec
from support.local_runs import site  # noqa: F401
from support.openfoam_fields import last_field, off

pytestmark = pytest.mark.mpi

ROOT = Path(__file__).resolve().parents[2]
PITZ = Path("/usr/share/doc/openfoam-examples/examples/incompressible/simpleFoam/pitzDaily")
FOAM = (("WM_PROJECT_DIR", environment().get("WM_PROJECT_DIR", "")),)
needs_openfoam = pytest.mark.skipif(
    not (PITZ.is_dir() and shutil.which("decomposePar")), reason="OpenFOAM is not installed"
)


def run(site, asked, ranks):  # noqa: F811
    """Run it on so many of its ranks; how it ended, and its copied case."""
    executor = site.executor(origin=0.0)
    try:
        share = protocol.Share((1000,) * ranks, protocol.WaitPolicy("yield"))
        executor.launch(form(asked.on(ranks)), share)
        return site.until(executor, asked.name), site.directory / "run" / asked.name / "case"
    finally:
        executor.close()


def coarse(case):
    """The same with a quarter of its cells: it converges with a fifth of the CPU time."""
    shutil.copytree(PITZ, case)
    mesh = case / "system/blockMeshDict"
    halves = lambda m: f"({int(m[1]) // 2} {-(-int(m[2]) // 2)} 1)"  # noqa: E731
    mesh.write_text(re.sub(r"(?m)\((\d\d+) (\d\d+) 1\)$", halves, mesh.read_text()))
    return case


def pitz(case=str(PITZ), **options):
    options.setdefault("prepare", ("blockMesh",))
    options.setdefault("weights", (1.0,) * 3)
    return Spec(
        "pitz", "pitz", case, 3, command=("simpleFoam",), widths=(1, 2, 3),
        application="openfoam", environment=FOAM, **options,
    )  # fmt: skip


def content(directory):
    """A digest of all files below a directory."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    parts = [str(path).encode() + path.read_bytes() for path in files]
    return hashlib.sha256(b"".join(parts)).hexdigest()


@needs_openfoam
def test_openfoam_converges_to_the_same_fields_on_any_ranks(site):  # noqa: F811
    delivered = coarse(site.directory / "coarse")
    before, found = content(delivered), {}
    for ranks in (1, 2, 3):
        # Another cut in the user's case is of no matter.
        asked = pitz(str(delivered), prepare=("blockMesh", "mkdir -p processor0/0 processors2"))
        finished, case = run(site, asked, ranks)
        assert finished.cause is Cause.DONE, site.log("pitz")[-2000:]
        assert "SIMPLE solution converged" in site.log("pitz")
        processors = sorted(path.name for path in case.glob("processor*"))
        assert processors == [f"processor{rank}" for rank in range(ranks if ranks > 1 else 0)]
        if ranks > 1:
            shutil.copytree(case, site.directory / f"joined{ranks}")
            words = ("reconstructPar", "-latestTime")
            joined = Spec(
                "joined", "joined", str(site.directory / f"joined{ranks}"), 1, (1.0,),
                words, environment=FOAM,
            )  # fmt: skip
            finished, case = run(site, joined, 1)
            assert finished.cause is Cause.DONE, site.log("joined")[-2000:]
        found[ranks] = {name: last_field(case, name) for name in ("p", "U")}
    assert content(delivered) == before
    for name, tolerance in (("p", 1e-2), ("U", 1e-3)):  # those of the case's residualControl
        alone = found[1][name]
        for ranks in (2, 3):
            assert off(found[ranks][name], alone) < tolerance, (name, ranks)


@needs_openfoam
def test_weights_are_those_of_the_most_ranks_and_a_right_cut_is_kept(site):  # noqa: F811
    asked = pitz(
        weights=(1.0, 1.0, 2.0),
        prepare=("blockMesh", "foamDictionary -entry endTime -set 3 system/controlDict"),
    )
    for ranks, wanted in ((3, (3056, 3056, 6113)), (2, (6113, 6112))):
        finished, case = run(site, asked, ranks)
        assert finished.cause is Cause.DONE, site.log("pitz")[-2000:]
        assert sorted(cells_per_processor(case)) == sorted(wanted)
    ours = "dovetail decompose --ranks {ranks} --weights {weights} --force --apply --method "
    asked = pitz(prepare=(*asked.prepare, f"{ours} concentric ."))
    finished, _ = run(site, asked, 2)
    assert finished.cause is Cause.DONE, site.log("pitz")[-2000:]
    assert "cut so already" in site.log("pitz")


@needs_openfoam
def test_copies_that_are_alike_share_a_cut_and_end_alike(site):  # noqa: F811
    steps = ("blockMesh", "foamDictionary -entry endTime -set 3 system/controlDict")
    steps = (*steps, "foamDictionary -entry writeInterval -set 3 system/controlDict")
    ended = {}
    for name, more in (("one", ()), ("two", ()), ("three", ("touch constant/of-this-one",))):
        asked = replace(pitz(prepare=(*steps, *more)), name=name)
        finished, case = run(site, asked, 2)
        assert finished.cause is Cause.DONE, site.log(name)[-2000:]
        assert ("is cut as that of one is" in site.log(name)) == (name == "two")
        ended[name] = [(case / f"processor{rank}" / "3" / "U").read_bytes() for rank in (0, 1)]
    assert ended["one"] == ended["two"] == ended["three"]


WRONG = {
    "is not meshed": ((), "no mesh; make it first"),
    "has a field that cannot be decomposed": (
        ("blockMesh", "foamDictionary -entry internalField -set nothing 0/p"),
        "FOAM FATAL",
    ),
}


@needs_openfoam
@pytest.mark.parametrize("name", WRONG)
def test_a_case_that_cannot_be_cut_fails_with_the_reason(name, site):  # noqa: F811
    prepare, reason = WRONG[name]
    finished, _ = run(site, pitz(prepare=prepare), 2)
    assert finished.cause is Cause.LAUNCH_FAILED
    assert "dovetail decompose --ranks 2" in finished.reason
    assert reason in finished.reason


@needs_openfoam
def test_iterations_are_read_off_the_case_that_no_step_changes_any_more():
    assert expected_iterations(pitz()) == 0
    assert expected_iterations(pitz(prepare=())) == 2000  # its end time
    assert prepared_iterations(pitz(), str(PITZ)) == 2000


@pytest.mark.skipif(shutil.which("lmp") is None, reason="LAMMPS is not installed")
def test_lammps_comes_to_the_same_energy_on_any_ranks(site):  # noqa: F811
    shutil.copy(ROOT / "examples" / "in.lj", site.case)
    words = ("lmp", "-in", "in.lj", "-log", "none")
    asked = Spec(
        "melt", "melt", str(site.case), 2, (1.0, 1.0), words, widths=(1, 2), application="lammps"
    )
    energy = {}
    for ranks in (1, 2):
        finished, _ = run(site, asked, ranks)
        assert finished.cause is Cause.DONE, site.log("melt")[-2000:]
        grid = re.search(r"(\d+) by (\d+) by (\d+) MPI processor grid", site.log("melt"))
        assert math.prod(map(int, grid.groups())) == ranks
        steps = re.findall(r"^ +(\d+) +\S+ +\S+ +\S+ +(\S+)", site.log("melt"), re.MULTILINE)
        assert steps[-1][0] == "200"
        energy[ranks] = float(steps[-1][1])
    assert energy[2] == pytest.approx(energy[1], rel=1e-5)


def test_any_program_gets_its_ranks_by_its_prepare_lines(site):  # noqa: F811
    asked = Spec(
        "any", "any", str(site.case), 3, (1.0, 2.0, 3.0),
        ("sh", "-c", "cat parts.{ranks} ${ranks}"),
        ("sh -c 'echo parts {ranks} of {weights} > parts.{ranks}'",),
        widths=(2, 3), environment=site.spec("any", "").environment,
    )  # fmt: skip
    for ranks, told in ((2, "parts 2 of 1,1\n"), (3, "parts 3 of 1,2,3\n")):
        finished, _ = run(site, asked, ranks)
        assert finished.cause is Cause.DONE, site.log("any")
        assert site.log("any") == told * ranks
