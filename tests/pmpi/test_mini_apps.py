# SPDX-License-Identifier: LGPL-3.0-or-later
"""Mini-applications of others: they compute the same in each wait mode, and their rhythm is found.

In: MINI_APPS, a folder with `openmpi` and `mpich`, or one of the two, in which are some of the
programs below, built with that MPI's compiler. None of them says where its iterations end, and each
sums up in every turn of its loop.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import known_programs, suites

pytestmark = pytest.mark.mpi


@dataclass(frozen=True)
class App:
    """How it is run, and what of its output and of the files that it writes is its result.

    `longer` are further arguments for as many turns as make a rhythm.
    """

    words: str
    ranks: int
    result: str
    longer: str = ""


APPS = {
    "xhpcg": App("--nx=24 --ny=24 --nz=24 --rt=0", 2, r"Scaled residual mean=(.*)", "--rt=10"),
    "miniFE.x": App("-nx 80 -ny 80 -nz 80", 2, r"Final Resid Norm: (.*)"),
    "lulesh": App("-s 10 -i 300", 8, r"Final Origin Energy += +(.*)"),
    "CoMD-mpi": App("-i 2 -j 1 -k 1 -x 12 -y 12 -z 12 -n 1 -N 200", 2, r"^ +200 .{60}", "-N 1000"),
}


def words(mpi: str, name: str, folder: Path) -> list[str]:
    """The command in an empty folder, for the files that it writes; skips where it is not built."""
    found = os.environ.get("MINI_APPS")
    if not found:
        pytest.skip("no mini-applications: MINI_APPS names no folder with openmpi/ or mpich/ in it")
    program = Path(found, mpi, name)
    if not program.exists():
        pytest.skip(f"no {name}: MINI_APPS={found} has no {mpi}/{name}")
    folder.mkdir()
    arguments = APPS[name].words.split()
    return ["env", "-C", str(folder), "OMP_NUM_THREADS=1", str(program.resolve()), *arguments]


def result(name: str, output: str, folder: Path) -> list[str]:
    texts = [output, *(file.read_text(errors="replace") for file in folder.iterdir())]
    return [one for text in texts for one in re.findall(APPS[name].result, text, re.MULTILINE)]


@pytest.mark.parametrize("name", APPS)
@pytest.mark.parametrize("mpi", known_programs.MPIS)
def test_the_result_is_the_same_in_each_wait_mode(mpi: str, name: str, tmp_path: Path) -> None:
    results = {}
    for mode in (suites.BARE, *suites.MODES):
        folder = tmp_path / mode
        ended = suites.run(mpi, APPS[name].ranks, words(mpi, name, folder), mode)
        assert ended.code == 0, ended.output
        results[mode] = result(name, ended.output, folder)
    assert results[suites.BARE], "it has a result"
    assert list(results.values()) == [results[suites.BARE]] * len(results)


@pytest.mark.parametrize("name", APPS)
@pytest.mark.parametrize("mpi", known_programs.MPIS)
def test_its_sums_of_all_ranks_are_its_rhythm(mpi: str, name: str, tmp_path: Path) -> None:
    command = [*words(mpi, name, tmp_path / "case"), *APPS[name].longer.split()]
    done = known_programs.run(mpi, APPS[name].ranks, command, tmp_path)
    assert done.code == 0, done.errors
    assert {one.iteration_source for one in done.pages} == {"rhythm"}
    assert len({one.beat for one in done.pages}) == 1
    for one in done.pages:
        sums = known_programs.counts(one)["MPI_Allreduce"]
        assert sums / 4 <= one.iterations <= sums
    told = re.search(r"Iteration count += +(\d+)", done.output)
    if told:  # the length of the first step is given, that of each further one is agreed on
        assert {one.iterations for one in done.pages} == {int(told[1]) - 1}
