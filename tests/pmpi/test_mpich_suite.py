# SPDX-License-Identifier: LGPL-3.0-or-later
"""Programs of MPICH's own test suite end under the library, in each wait mode, as they end bare.

In: MPI_SUITE, a folder with `openmpi` and `mpich`, or one of the two. Each is the folder `test/mpi`
of that suite, built by the suite's own means with that MPI's compiler, or the folder of such a
build. What fails bare too, as that MPI lacks it, is no fault of ours.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support import known_programs, suites

pytestmark = pytest.mark.mpi

# Not pt2pt/rqstatus: it reads an MPI_ERROR that nobody has set, which Open MPI leaves as it is.
PROGRAMS = {
    "pt2pt": "sendrecv2 2, sendall 4, bsendfrag 2, icsend 4, mprobe 2, greq1 1",
    "coll": "allred4 4, exscan 4, icallreduce 4",
    "comm": "dupic 4, ic1 4, cmsplit 4, comm_create_group 4, comm_idup 4, probe_intercomm 2",
    "rma": "transpose5 2, test2 2, lockopts 2, wintest 2, linked_list 4, win_shared 4, flush 4",
    "init": "attrself 1, exitst1 2, finalized 1",
    "threads": "pt2pt/greq_wait 1, rma/multirma 2, comm/comm_dup_deadlock 4",
}


def built(mpi: str) -> Path:
    """The built suite; skips where there is none."""
    found = os.environ.get("MPI_SUITE")
    if not found:
        pytest.skip("no suite of MPICH: MPI_SUITE names no folder with openmpi/ or mpich/ in it")
    if not Path(found, mpi).is_dir():
        pytest.skip(f"no suite of MPICH: MPI_SUITE={found} has no {mpi}/")
    return Path(found, mpi)


def outcome(mpi: str, ranks: int, program: Path, mode: str) -> str:
    """Whether a program ended well, badly or not at all; the suite's programs say so as well."""
    ended = suites.run(mpi, ranks, [str(program)], mode)
    if ended.code is None:
        return "never ended"
    return f"{'well' if ended.code == 0 else 'badly'}, errors {'No Errors' not in ended.output}"


@pytest.mark.parametrize("part", PROGRAMS)
@pytest.mark.parametrize("mpi", known_programs.MPIS)
def test_programs_end_as_they_end_bare(mpi: str, part: str) -> None:
    folder = built(mpi) / part
    listed = dict(entry.split() for entry in PROGRAMS[part].split(", "))
    programs = {name: int(ranks) for name, ranks in listed.items() if (folder / name).exists()}
    # A suite older or newer than the library leaves some out, not most.
    assert len(programs) > len(listed) / 2, f"{folder} has of {list(listed)} only {list(programs)}"
    different, well = {}, 0
    for name, ranks in programs.items():
        bare = outcome(mpi, ranks, folder / name, suites.BARE)
        well += bare.startswith("well")
        for mode in suites.MODES:
            here = outcome(mpi, ranks, folder / name, mode)
            if here != bare:
                different[name, mode] = f"{here}; bare {bare}"
    assert different == {}
    assert well > len(programs) / 2  # else it is the machine that is looked at
