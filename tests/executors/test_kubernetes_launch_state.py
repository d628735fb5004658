# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the executor keeps of a launch, without a cluster."""

from __future__ import annotations

import pytest
from dovetail.core import protocol
from dovetail.executors.kubernetes.launch import Launched

pytestmark = pytest.mark.unit


def launched(connected, addresses):
    """A simulation of two rank groups, and as much of them as has been seen."""
    spec = protocol.Spec("sim", "sim", "/case", 3, (1.0,) * 3, ("program",))
    job = Launched(spec, protocol.Share((1, 1, 1)), "sim", "gathering", [1, 2])
    job.connected.update(dict.fromkeys(connected, "node"))
    for group, address in addresses.items():
        job.pods[group] = {"status": {"podIP": address} if address else {}}
    return job


@pytest.mark.parametrize(
    ("connected", "addresses"),
    [
        pytest.param((), {}, id="nothing is there"),
        pytest.param((0, 1), {0: "10.0.0.1"}, id="a pod has called that the API has not shown"),
        pytest.param((0,), {0: "10.0.0.1", 1: "10.0.0.2"}, id="a pod is there and has not called"),
        pytest.param((0, 1), {0: "", 1: "10.0.0.2"}, id="the first pod's address is not known yet"),
        pytest.param((0, 1), {0: "10.0.0.1", 1: ""}, id="another pod's address is not known yet"),
    ],
)
def test_ranks_do_not_start_before_all_is_known_of_their_pods(connected, addresses):
    assert launched(connected, addresses).hosts() == []


def test_ranks_start_where_their_pods_are():
    job = launched((1, 0), {1: "10.0.0.2", 0: "10.0.0.1"})
    assert job.hosts() == [{"address": "10.0.0.1", "ranks": 1}, {"address": "10.0.0.2", "ranks": 2}]
