# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the executor keeps of a launch, without a cluster."""

from __future__ import annotations

import pytest
from dovetail.core import protocol
from dovetail.core.protocol import Result
from dovetail.executors.kubernetes.lifecycle import Gathering, Launched, Over, Pending, Running

pytestmark = pytest.mark.unit


def launched(connected, addresses):
    """A simulation of two rank groups, and as much of them as has been seen."""
    spec = protocol.Spec("sim", "sim", "/case", 3, (1.0,) * 3, ("program",))
    job = Launched(spec, protocol.Share((1, 1, 1)), "sim", Gathering(60.0, 3.0), [1, 2])
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


def pending():
    spec = protocol.Spec("sim", "sim", "/case", 3, (1.0,) * 3, ("program",))
    return Launched(spec, protocol.Share((1, 1, 1)), "sim", Pending(0.0))


def test_a_launch_goes_from_state_to_state_and_starts_again_under_another_name():
    job = pending()
    job.create()
    assert not job.expected
    job.gather(10.0)
    assert isinstance(job.state, Gathering)
    assert job.state.deadline > job.state.ask_at > 10.0
    assert job.expected
    job.connected[0] = "node"
    job.terminate(None, 20.0)
    assert (job.expected, job.result) == (False, None)
    job.start_over(30.0)
    assert isinstance(job.state, Pending)
    assert job.key.startswith("sim.")
    assert not job.connected, "its pods are others"


def test_only_the_last_state_is_left_by_nothing_and_how_it_ended_stays():
    job = pending()
    job.create()
    job.gather(0.0)
    job.run()
    assert not job.ended_well
    assert isinstance(job.state, Running)
    job.state.doubted = Result(0)
    assert (job.ended_well, job.result) == (True, None), "what its ranks said is not known to be so"
    job.terminate(job.state.doubted, 1.0)
    job.finish()
    assert (job.ended_well, job.result) == (True, Result(0))
    assert isinstance(job.state, Over)


@pytest.mark.parametrize("step", ["gather", "run", "terminate", "start over"])
def test_what_waits_for_room_has_no_pods_to_start_or_to_end(step):
    job = pending()
    steps = {
        "gather": lambda: job.gather(0.0), "run": job.run,
        "terminate": lambda: job.terminate(None, 0.0), "start over": lambda: job.start_over(0.0),
    }  # fmt: skip
    with pytest.raises(AssertionError):
        steps[step]()
