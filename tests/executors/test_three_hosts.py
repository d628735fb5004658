# SPDX-License-Identifier: LGPL-3.0-or-later
"""One simulation on three hosts that share nothing but a network."""

from __future__ import annotations

import pytest
from support import host_clusters
from support.host_clusters import PROGRAMS, busy

pytestmark = pytest.mark.kube

# A rank says what of the prepared case it sees, and where it is.
SAY = '{ cat prepared; hostname; } >rank.$OMPI_COMM_WORLD_RANK; exec "$@"'


@pytest.fixture(scope="module")
def three(binaries, tmp_path_factory):
    with host_clusters.started(3, binaries, tmp_path_factory.mktemp("shared")) as found:
        yield found


def test_ranks_on_each_have_the_case_and_what_they_wrote_comes_from_each(three):
    three.first.write(f"{host_clusters.HOME}/case/input", "as delivered\n")
    entry = busy(5, 10, 15, prepare=["cp input prepared"])
    entry["command"] = ["sh", "-c", SAY, "say", *entry["command"]]
    out = three.start(entry)
    three.goes_on(out, "sim")
    three.enough(out)
    assert {*three.log(out, "Placed")[-1]["nodes"]} == {"h1", "h2", "h3"}
    found = three.first.out(f"cat {out}/sim/case/rank.*").splitlines()
    assert sorted(found) == ["as delivered"] * 3 + ["h1", "h2", "h3"]


def test_mpich_has_ranks_on_each(three):
    entry = busy(5, 10, 15)
    entry["command"][0] = PROGRAMS["mpich"]
    out = three.start(entry)
    three.goes_on(out, "sim")
    three.enough(out)
    assert {*three.log(out, "Placed")[-1]["nodes"]} == {"h1", "h2", "h3"}
