# SPDX-License-Identifier: LGPL-3.0-or-later
"""Whatever ends a job, and whenever, nothing is left."""

from __future__ import annotations

import os
import signal

import pytest
from support.flux_batch import eventually

pytestmark = pytest.mark.flux

# --- Moments: what a job is at, from its submission to its end ---

SCRIPT = """
    {start}
    until [ -e fail ]; do kill -0 $PPID || exit; sleep 0.1; done # its broker, or it would stay
    exit 3"""
RUN = "flux dovetail submit --wait-up plan.yaml"
SHUT = "flux dovetail up; touch shut; flux dovetail down &"


def waits(flux, *options):
    """It is not scheduled yet."""
    return flux.batch(SCRIPT, "--urgency=hold", *options, size=2), ""


def starts(flux, *options):
    """Kubernetes is on its way up."""
    job = flux.batch(SCRIPT.format(start="touch begun"), *options, size=2)
    uri = flux.inside(job)
    assert eventually((flux.work / "begun").exists)  # earlier it could not be shut down
    return job, uri


def runs(flux, *options):
    """A simulation runs."""
    flux.plan("until [ -e go ]; do sleep 0.2; done")
    job = flux.batch(SCRIPT.format(start=RUN), *options, size=2)
    uri = flux.inside(job)
    assert eventually(lambda: "1.1:sim" in flux.run("jobs", "-no", "{name} {state}", uri=uri))
    return job, uri


def shuts(flux, *options):
    """The slices end."""
    job = flux.batch(SCRIPT.format(start=SHUT), *options, size=2)
    uri = flux.inside(job)
    assert eventually((flux.work / "shut").exists)
    return job, uri


# --- Faults: each as (flux, job, URI of its instance) ---


def module_removed(flux, job, uri):
    """Then the job is cancelled."""
    flux.run("module", "remove", "dovetail", uri=uri)
    flux.run("cancel", job)


def killed(*parts):
    """Whatever has these parts in its command line is killed; then the job is cancelled."""

    def kill(flux, job, uri):
        flux.kill(*parts)
        flux.run("cancel", job, code=None)  # it may have ended

    return kill


def shells_killed(flux, job, uri):
    """The job's shells, by which its brokers would be told to end."""
    number = flux.run("job", "id", "--to=dec", job)
    for pid, line in flux.processes().items():
        if "flux-shell" in line and number in line.split():
            os.kill(pid, signal.SIGKILL)


def time_limit(flux, job, uri):
    """Its time is over soon."""

    def shortened():
        limit = f"duration={float(flux.run('jobs', '-no', '{runtime}', job)) + 5:.0f}s"
        return "in the past" not in flux.run("update", job, limit, code=None)

    assert eventually(shortened)


FAULTS = {
    "cancelled": lambda flux, job, uri: flux.run("cancel", job),
    "an exception": lambda flux, job, uri: flux.run("job", "raise", "--type=site", job, "a note"),
    "a time limit": time_limit,
    "a shutdown": lambda flux, job, uri: flux.run("shutdown", uri=uri, code=None),
    "a script that fails": lambda flux, job, uri: (flux.work / "fail").touch(),
    "a dead leader": killed("broker -c", "/jobtmp-0-"),
}
TOLD = {"cancelled": "cancel", "an exception": "a note", "a time limit": "timeout"}
QUICK = "--conf=heartbeat.timeout=10s"  # of the followers to miss a leader: a minute otherwise
PARTS = {
    "a dead control slice": killed("flux-dovetail slice --number 0"),
    "a dead module": killed("module-python-exec", "modules/dovetail.py"),
    "no module": module_removed,
    "dead shells": shells_killed,
}
CASES = [
    *((waits, fault) for fault in ("cancelled", "an exception")),
    *((moment, fault) for moment in (starts, runs, shuts) for fault in FAULTS),
    *((runs, fault) for fault in PARTS),
]


@pytest.fixture
def flux(request, instances):
    """An instance of whoever runs the tests, or of an ordinary user."""
    with instances.one(user=request.param == "user") as made:
        yield made


@pytest.mark.parametrize(
    ("moment", "fault", "flux"),
    [(*case, ("owner", "user")[number % 2]) for number, case in enumerate(CASES)],
    indirect=["flux"],
)
def test_nothing_is_left_of_a_job_when(moment, fault, flux):
    job, uri = moment(flux, *([QUICK] if fault == "a dead leader" else []))
    {**FAULTS, **PARTS}[fault](flux, job, uri)
    flux.wait(job)
    assert TOLD.get(fault, "") in flux.run("job", "eventlog", job)
    if fault == "a script that fails":
        assert flux.code(job) == 3
    flux.nothing_left()
