# SPDX-License-Identifier: LGPL-3.0-or-later
"""mpi4py's own test suite has the same outcomes under the library, in each wait mode, as bare.

In: mpi4py, as flux-python/requirements-dev.txt has it; the tests from the source archive of the
same version, which pip downloads into build/. With MPI4PY_SUITE=all they all run, which takes
minutes in each mode; else those of the modules that send, wait, and start threads.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support import known_programs, suites

pytestmark = [pytest.mark.mpi, pytest.mark.first]

MODULES = r"test_(p2p_buf|cco_buf|cco_nb_buf|cco_pr_buf|comm|request|rma|session|threads|win)\b"
RANKS = 2
# What a rank says of itself goes to a file of its own, as lines of two ranks mix.
APART = 'exec "$@" 2>"$0/${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"'
VERDICT = re.compile(
    r"^(\w+ \([\w.]+\))(?:\n.*)? \.\.\. (?:.*\n)*?.*?\b(ok|FAIL|ERROR|skipped|expected failure"
    r"|unexpected success)\b", re.MULTILINE
)  # fmt: skip


@pytest.fixture(scope="module")
def sources() -> Path:
    """The unpacked source archive."""
    version = importlib.metadata.version("mpi4py")
    folder = known_programs.TOP / "build" / "suites"
    folder.mkdir(parents=True, exist_ok=True)
    unpacked = folder / f"mpi4py-{version}"
    if not unpacked.exists():
        with tempfile.TemporaryDirectory(dir=folder) as half:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", half]
            pip += ["--no-binary", "mpi4py", f"mpi4py=={version}"]
            subprocess.run(pip, check=True)
            archive = Path(half) / f"{unpacked.name}.tar.gz"
            subprocess.run(["tar", "-xf", archive, "-C", half], check=True)
            (Path(half) / unpacked.name).rename(unpacked)
    return unpacked


def verdicts(mpi: str, sources: Path, mode: str, folder: Path) -> list[list[tuple[str, str]]]:
    """Of each rank, the tests in their order, and what came of each."""
    folder.mkdir()
    more = suites.mpi4py_environment(mpi, folder)
    some = [] if os.environ.get("MPI4PY_SUITE") == "all" else ["-i", MODULES]
    words = ["sh", "-c", APART, str(folder), sys.executable, str(sources / "test" / "main.py")]
    ended = suites.run(mpi, RANKS, [*words, "-v", "--no-builddir", *some], mode, **more)
    assert ended.code is not None, f"{mode}: never ended; {ended.output[-2000:]}"
    said = [(folder / str(rank)).read_text(errors="replace") for rank in range(RANKS)]
    return [VERDICT.findall(text) for text in said]


@pytest.mark.parametrize("mpi", known_programs.MPIS)
def test_its_tests_have_the_outcomes_that_they_have_bare(
    mpi: str, sources: Path, tmp_path: Path
) -> None:
    bare = verdicts(mpi, sources, suites.BARE, tmp_path / suites.BARE)
    assert all(sum(how == "ok" for _, how in rank) > 200 for rank in bare), bare
    for mode in suites.MODES:
        for here, there in zip(verdicts(mpi, sources, mode, tmp_path / mode), bare):
            assert sorted(set(here) ^ set(there)) == [], mode
            assert len(here) == len(there), mode
