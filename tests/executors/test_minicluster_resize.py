# SPDX-License-Identifier: LGPL-3.0-or-later
"""Requests at birth and in place, by the real Flux Operator.

The executor is driven here without a controller, so that every share is known.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from dovetail.core import protocol
from dovetail.executors.kubernetes import lifecycle
from dovetail.executors.kubernetes.nodes import Nodes
from support import flux_lua
from support.clusters import LIMIT, ROOT
from support.driven_executor import shares
from support.flux_operator import with_operator

pytestmark = pytest.mark.kube


@pytest.fixture(scope="module")
def site(binaries):
    """As whoever runs the tests: the executor runs in their process, and looks there for `flux`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(Path(flux_lua.command()).parent), prepend=os.pathsep)
        yield from with_operator(binaries, not ROOT, "--cpus", "1")


def test_each_pod_is_born_with_its_own_request_and_resized_as_one_without_a_restart(
    driver, monkeypatch
):
    spec, _ = driver.specs(ranks_per_pod=1)
    driver.launch(spec, 150, 450)
    driver.until_started("one")
    light, heavy = driver.weights("one")
    assert heavy / light == pytest.approx(3, rel=0.05)
    generations = {pod["metadata"]["generation"] for pod in driver.site.pods("one")}
    assert generations == {1}, "born so, not resized after birth"
    before = driver.identities("one")
    assert driver.resize(one=shares(450, 150)) == ""
    driver.until(lambda: driver.weights("one") == [heavy, light])
    # As if the node had become smaller this moment: else nobody asks it for so much.
    monkeypatch.setattr(Nodes, "fitted", lambda self, node, wanted, taken: list(wanted))
    why = driver.resize(one=shares(100, 50_000))
    assert "Infeasible" in why or "allocatable" in why, "by its node, or a newer API server"
    driver.until(lambda: driver.weights("one") == [heavy, light])
    assert driver.identities("one") == before


def test_all_pods_start_or_none_and_what_does_not_fit_waits(driver):
    why = driver.until_held_up((350, 350), (100, 250), "miniclusters")
    assert "of CPU, and at most" in why
    driver.executor.stop("one", "enough")
    driver.until_started("two")
    (end,) = driver.until(lambda: driver.of(protocol.Finished, "one"))
    assert end.reason == "stopped: enough"
    assert end.code != 0


def test_ranks_of_mpich_meet_across_pods_with_limits_and_are_suspended_and_go_on(driver):
    spec, _ = driver.specs("mpich", ranks_per_pod=1, limit=3.0)
    driver.launch(spec, 300, 300)
    driver.until_started("one")
    driver.until(lambda: driver.limits("one") == [900, 900], LIMIT)
    driver.suspend_and_resume()


def test_an_operator_that_does_nothing_is_named_and_not_waited_for_for_ever(driver, monkeypatch):
    monkeypatch.setattr(lifecycle, "GATHER", 2.0)
    manager = driver.site.operator.manager.pid
    os.kill(manager, signal.SIGSTOP)
    try:
        spec, _ = driver.specs()
        driver.launch(spec, 100, 100)
        (end,) = driver.until(lambda: driver.of(protocol.Finished, "one"))
        assert end.code != 0
        assert "nobody makes pods of MiniClusters of the Flux Operator" in end.reason
    finally:
        os.kill(manager, signal.SIGCONT)
