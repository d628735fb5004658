# SPDX-License-Identifier: LGPL-3.0-or-later
"""Simulations as pods on the real cluster, from start to end.

As root both users are tried, an ordinary one and root itself; as a user only that user.
"""

from __future__ import annotations

import pytest
from support import cluster_runs
from support.cluster_runs import ends, running, two
from support.clusters import modes

pytestmark = pytest.mark.kube


@pytest.fixture(scope="module", params=modes())
def site(request, binaries):
    found = cluster_runs.made(binaries, request.param == "rootless")
    yield found
    found.close()


def test_two_imbalanced_simulations_run_at_once_and_leave_nothing(site):
    file, waiting = ends(site, "out")
    run = running(site, "out", two(site, **waiting))
    file.touch()
    assert site.end(run) == 0, site.errors()
    assert set(site.states().values()) == {"done"}
    assert site.summary()["n_max"] == 2, "each rank sleeps: they fit beside each other"
    site.nothing_left()


def test_ranks_in_pods_of_their_own_share_memory_on_a_node(site):
    """Second and third come to be in pods that are alike, process ids and all."""
    run = site.start(site.plan(site.busy(1, 1, 1, iterations=50, ranks_per_pod=1)), "three")
    assert site.end(run) == 0, site.errors("three")
    assert set(site.states("three").values()) == {"done"}
    site.nothing_left()


def test_the_manifests_are_what_the_server_takes(site):
    assert site.apply("operator-manifests", "--dry-run=server").count("server dry run") == 13


def test_ranks_that_are_left_open_are_chosen_and_become_pods(site):
    entry = {**site.busy(20, 20, iterations=100, count=3), "ranks": "1-2"}
    del entry["weights"]
    run = site.start(site.plan(entry), "open")
    assert site.end(run) == 0, site.errors("open")
    assert set(site.states("open").values()) == {"done"}
    ranks = {r["name"]: len(r["share"]["requests"]) for r in site.of("Launch", "open")}
    assert [ranks["sim-1"], ranks["sim-2"]] == [1, 1]
    assert site.summary("open")["n_max"] == 2
    told = {one["name"]: one for one in site.summary("open")["simulations"]}
    assert {name: one["ranks"] for name, one in told.items()} == ranks
    assert all(one["iterations"] == 100 for one in told.values())
    site.nothing_left()
