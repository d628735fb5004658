# SPDX-License-Identifier: LGPL-3.0-or-later
"""One simulation on three hosts that share nothing but a network."""

from __future__ import annotations

import pytest
from support import host_clusters
from support.host_clusters import PROGRAMS, busy

pytestmark = pytest.mark.kube

# A rank says what of the prepared case it sees, and where it is.
SAY = '{ cat prepared; hostname; } >rank.${OMPI_COMM_WORLD_RANK-$PMI_RANK}; exec "$@"'


@pytest.fixture(scope="module")
def three(binaries, tmp_path_factory):
    with host_clusters.started(3, binaries, tmp_path_factory.mktemp("shared")) as found:
        yield found


@pytest.mark.parametrize("mpi", PROGRAMS)
def test_ranks_on_each_have_the_case_and_what_they_wrote_comes_from_each(three, mpi):
    three.first.write(f"{host_clusters.HOME}/case/input", "as delivered\n")
    entry = busy(5, 10, 15, prepare=["cp input prepared"])
    said = ["sh", "-c", SAY, "say", PROGRAMS[mpi], *entry["command"][1:]]
    entry["command"] = [f"mpirun.{mpi}", "-np", "3", *said]
    out = three.start(entry)
    three.goes_on(out, "sim")
    three.enough(out)
    assert {*three.log(out, "Placed")[-1]["nodes"]} == {"h1", "h2", "h3"}
    found = three.first.out(f"cat {out}/sim/case/rank.*").splitlines()
    assert sorted(found) == ["as delivered"] * 3 + ["h1", "h2", "h3"]
