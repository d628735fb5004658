# SPDX-License-Identifier: LGPL-3.0-or-later
"""Agents and entrypoints run simulations for a hub, from the first message to the last."""

from __future__ import annotations

import os

import pytest
from dovetail.core import protocol
from dovetail.executors.pods import messages
from dovetail.host import processes
from dovetail.mpi.control_page import Control
from support.local_runs import wait_for
from support.pod_processes import cluster, state  # noqa: F401

pytestmark = pytest.mark.unit


def test_a_simulation_runs_in_a_pod_and_its_result_comes_back(cluster):  # noqa: F811
    cluster.agent()
    cluster.launch("sim", "cat input; echo here; exit 3", "echo first")
    assert cluster.until(messages.Started, "sim").mpi in ("", "openmpi", "mpich")
    result = cluster.until(messages.Result, "sim")
    assert (result.code, result.trouble) == (3, "")
    assert result.reason == "exit code 3: here"
    assert cluster.log("sim") == "first\nas delivered\nhere\n"
    cluster.end("sim", 3)


def test_a_stop_ends_a_simulation_that_does_not_want_to_end(cluster):  # noqa: F811
    cluster.agent()
    cluster.launch("sim", "trap '' TERM; setsid sleep 1000 & while :; do sleep 1000; done")
    cluster.until(messages.Started, "sim")
    cluster.hub.tell(messages.Stop("sim"))
    assert cluster.until(messages.Result, "sim").code in (137, 143)
    cluster.end("sim", 9)


def test_a_suspended_simulation_stands_still_and_goes_on(cluster):  # noqa: F811
    cluster.agent()
    cluster.launch("sim", "while [ ! -e go ]; do sleep 0.05; done")
    cluster.until(messages.Started, "sim")
    ranks = wait_for(lambda: processes.members(f"DOVETAIL_DIR={cluster.session('one')}/sim"))
    cluster.hub.tell(messages.Suspend("sim", True))
    wait_for(lambda: {state(pid) for pid in ranks} == {"T"})
    (cluster.directory / "run" / "sim" / "case" / "go").touch()
    cluster.hub.tell(messages.Suspend("sim", False))
    assert cluster.until(messages.Result, "sim").code == 0
    cluster.end("sim")


def test_the_wait_policy_reaches_the_control_page(cluster):  # noqa: F811
    cluster.agent()
    cluster.launch("sim", "sleep 1000")
    cluster.until(messages.Started, "sim")
    cluster.hub.tell(messages.Wait("sim", "doorbell", 7))
    control = Control(cluster.session("one") / "sim")
    wait_for(lambda: control.get() == protocol.WaitPolicy("doorbell", 7))
    control.close()
    cluster.end("sim", 1)


def test_the_lines_of_a_log_are_counted_where_no_rank_counts(cluster):  # noqa: F811
    cluster.agent()
    cluster.launch("sim", "echo Time = 1; echo Time = 2; sleep 1000")
    while cluster.until(messages.Sample).lines.get("sim", [0])[0] != 2:
        pass
    cluster.end("sim", 1)


def test_many_simulations_share_a_node(cluster):  # noqa: F811
    cluster.agent()
    for number in range(5):
        cluster.launch(f"sim{number}", f"exit {number}")
    for number in range(5):
        assert cluster.until(messages.Result, f"sim{number}").code == number
    for number in range(5):
        cluster.end(f"sim{number}", number)
    wait_for(lambda: sorted(os.listdir(cluster.session("one"))) == ["agent.sock", "owner"])
