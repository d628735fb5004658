# SPDX-License-Identifier: LGPL-3.0-or-later
"""Time steps of LAMMPS are counted on every rank, exactly, whatever its script does with them."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from support import known_programs

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(shutil.which("lmp") is None, reason="LAMMPS is not installed"),
]
LJ = Path(__file__).resolve().parents[2] / "examples" / "in.lj"
SMALL = "variable x index 4\nvariable y index 4\nvariable z index 4\n"

RUNS = {
    "one run": ("thermo 50\nrun 300\n", 300),
    "no output": ("thermo 0\nrun 300\n", 300),
    "as short as can be": ("run 1\n", 1),
    "several": ("run 20\nrun 0\nrun 10 pre no post no\nrun 50 upto\n", 50),
    "in pieces": ('run 12 every 5 "print here"\n', 12),
    "from zero again": ("run 20\nreset_timestep 0\nrun 30\n", 50),
    "after a minimization": ("minimize 0 0 7 100\nrun 20\n", 27),
    "with inner steps": ("run_style respa 2 3 pair 1\nrun 15\n", 15),
    "ended early": ("variable s equal step\nfix 2 all halt 1 v_s >= 40 error soft\nrun 90\n", 40),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("what", RUNS)
def test_steps_are_those_that_lammps_took(what, ranks, tmp_path):
    lines, steps = RUNS[what]
    text = SMALL + re.sub(r"(?m)^run .*\n", lines, LJ.read_text())
    (tmp_path / "in.lj").write_text(text)
    words = ["lmp", "-log", "none", "-in", str(tmp_path / "in.lj")]
    done = known_programs.run("openmpi", ranks, words, tmp_path)
    assert done.code == 0, done.output + done.errors
    assert [one.iterations for one in done.pages] == [steps] * ranks
    assert {one.iteration_source for one in done.pages} == {"lammps"}
    for one in done.pages:
        assert one.first is not None
        assert one.first.iterations == 0
        assert one.first.stamp < one.iter_stamp <= one.stamp


PROGRAM = """
import ctypes, sys
lammps = ctypes.CDLL("liblammps.so.0")  # for this program alone: others do not see its functions
words = (ctypes.c_char_p * 3)(b"lmp", b"-log", b"none")
lammps.lammps_open_no_mpi.restype = ctypes.c_void_p
one = ctypes.c_void_p(lammps.lammps_open_no_mpi(3, words, None))
lammps.lammps_file(one, sys.argv[1].encode())
lammps.lammps_close(one)
lammps.lammps_mpi_finalize()
"""


def test_a_program_may_load_lammps_for_itself_alone(tmp_path):
    words = [sys.executable, "-c", PROGRAM, str(LJ)]
    done = known_programs.run("openmpi", 2, words, tmp_path)
    assert done.code == 0, done.output + done.errors
    assert [one.iterations for one in done.pages] == [200, 200]
