# SPDX-License-Identifier: LGPL-3.0-or-later
"""The states of a simulation of the local executor."""

from __future__ import annotations

import signal
import subprocess

import pytest
from dovetail.core import protocol
from dovetail.core.protocol import Cause, Result
from dovetail.executors.local.job import Job, JobState
from dovetail.host import cgroups

pytestmark = pytest.mark.unit

STEPS = {
    "begun": lambda job: job.begun(),
    "halt": lambda job: job.halt(),
    "stop": lambda job: job.stop("enough", Cause.CANCELLED, 10.0),
    "end": lambda job: job.end(Result(Cause.DONE, 0)),
    "release": lambda job: job.release(10.0, "the run ended"),
}
WAYS = {  # the steps, the state they lead to, and why it was stopped
    "": (JobState.STARTING, ""),
    "begun": (JobState.RUNNING, ""),
    "halt": (JobState.STARTING, ""),  # there is nothing to write yet
    "begun halt halt": (JobState.HALTING, ""),
    "begun halt stop halt": (JobState.STOPPING, "enough"),
    "begun halt end": (JobState.ENDED, ""),
    "begun halt release": (JobState.RELEASED, "the run ended"),
    "stop": (JobState.STOPPING, "enough"),
    "stop begun": (JobState.STOPPING, "enough"),
    "begun stop stop": (JobState.STOPPING, "enough"),
    "end": (JobState.ENDED, ""),
    "begun end stop": (JobState.ENDED, ""),
    "stop end": (JobState.ENDED, "enough"),
    "release": (JobState.RELEASED, "the run ended"),
    "begun release stop begun": (JobState.RELEASED, "the run ended"),
    "begun stop release": (JobState.RELEASED, "enough"),
    "begun end release": (JobState.RELEASED, ""),
    "release end": (JobState.RELEASED, "the run ended"),
}


def launched(group):
    spec = protocol.Spec("sim", "entry", "/case", 2, (1.0, 1.0), ("true",))
    return Job(spec, protocol.Share((500, 500)), "/dev/shm/none", "/tmp/none", group)


@pytest.mark.parametrize("way", WAYS)
def test_each_step_leads_to_one_state(way):
    job = launched(cgroups.Group("", ""))
    for step in way.split():
        STEPS[step](job)
    assert (job.state, job.why_stopped) == WAYS[way]
    waits = (JobState.STARTING, JobState.RUNNING, JobState.HALTING)
    assert job.wanted == (job.state in waits)
    assert job.publishes == ("begun" in way.split() and job.state is not JobState.RELEASED)
    assert bool(job.result) == ("end" in way.split())
    assert bool(job.deadline) == (job.state is JobState.RELEASED or bool(job.why_stopped))


def test_what_cannot_be_thawed_is_told_to_stop_all_the_same(tmp_path):
    job = launched(cgroups.Group("", str(tmp_path / "gone")))
    with subprocess.Popen(
        ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as job.supervisor:
        job.stop("enough", Cause.CANCELLED, 10.0)
        job.supervisor.stdin.close()
        assert job.supervisor.stdout.read() == b"stop\n"


def test_a_signal_does_not_cut_off_what_a_supervisor_is_told():
    """More than a pipe holds, as the configuration of many ranks."""
    job = launched(cgroups.Group("", ""))
    script = "sleep 1; exec wc -c"
    job.supervisor = subprocess.Popen(
        ["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        job.tell(bytes(200_000))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert int(job.supervisor.communicate()[0]) == 200_000
