# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the broker module does by Flux's own bindings, without slices that have anything in them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from dovetail.host import install_paths
from support import flux_lua
from support.clusters import eventually
from support.flux_batch import flux_command
from support.flux_lua import Instance

pytestmark = pytest.mark.flux

LOGS = """
import sys
sys.path.append(sys.argv[1])
import flux
from _flux._core import ffi, lib
from dovetail.flux.module import Log
handle = flux.Flux("loop://")
Log(handle).notice(sys.argv[2])
request, data, size = handle.recv(), ffi.new("const void **"), ffi.new("size_t *")
assert lib.flux_msg_get_payload(request.handle, data, size) == 0
print(ffi.buffer(data[0], size[0])[:].decode())
"""


def test_what_a_user_gives_as_a_reason_is_in_the_log_as_it_is_and_ends_no_module():
    reason = "slice 1: cancel: 100% of %s%s%s%s, caf\xe9"
    words = [flux_command(), "python", "-c", LOGS, str(install_paths.PACKAGES), reason]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n").endswith(f" {reason}")


# Stands in for `flux-dovetail slice`: all of its slices are ready, and it keeps what it is told to.
AGENT = """#!{python}
import json, os, sys
sys.path.insert(0, {packages!r})
from dovetail.flux.client import Client
if "--sweep" in sys.argv:
    sys.exit(0)
number = int(sys.argv[sys.argv.index("--number") + 1])
client = Client()
for line in client.lines():
    if "event" in line:
        slices = json.load(open({kept!r}))
        kept = {{"wanted": 1 + len(slices), "up": True, "slices": slices}}
        news = {{"number": number, "rank": 0, "node": f"n{{number}}", "kept": kept}}
        client.send("dovetail.attach", news, stream=True)
    elif line.get("value", {{}}).get("end"):
        break
"""


class Slices:
    """An instance with the module in it, and slices that are none."""

    def __init__(self, flux: Instance) -> None:
        self.flux, self.kept = flux, flux.scratch / "kept"
        self.kept.write_text("[]")
        self.agent = flux.scratch / "agent"
        packages = str(install_paths.PACKAGES)
        self.agent.write_text(
            AGENT.format(python=sys.executable, packages=packages, kept=str(self.kept))
        )
        self.agent.chmod(0o755)

    def load(self) -> None:
        """Load the module."""
        path = str(install_paths.flux_plugin("modules/dovetail.py"))
        self.flux.ok("module", "load", path, "nodes=1", "cores=1", f"command={self.agent}")

    def status(self) -> dict[str, Any]:
        """What it knows; nothing as long as it does not answer."""
        return self.flux.ask("dovetail.status", {})[0] or {}

    def numbers(self) -> list[int]:
        """Of the slices that it knows."""
        return [one["number"] for one in self.status().get("slices", [])]

    def jobs(self) -> list[str]:
        """The names of all jobs that are not over."""
        return self.flux.ok("jobs", "-no", "{name}").split()


@pytest.fixture
def slices():
    with flux_lua.instance(1) as flux:
        made = Slices(flux)
        yield made
        flux.run("module", "remove", "dovetail")


def test_a_slice_whose_job_was_purged_as_the_module_was_away_has_ended(slices):
    flux = slices.flux
    slices.load()
    assert eventually(lambda: slices.status().get("phase") == "up")
    job = flux.submit("true")
    flux.wait(job, "clean")
    flux.ok("module", "remove", "dovetail")
    gone = {"number": 7, "job": int(flux.ok("job", "id", job)), "state": "ready", "node": "n7"}
    slices.kept.write_text(json.dumps([{**gone, "rank": 0}]))
    assert eventually(lambda: "purged 1" in flux.ok("job", "purge", "--force", "--num-limit=0"))
    slices.load()
    assert eventually(lambda: slices.numbers() == [0, 8]), slices.status()
    assert slices.status()["lost"] == ["slice 7: its job ended"]


@pytest.mark.parametrize("absent", ["job-list", "job-info"])
def test_slices_of_before_are_looked_for_until_flux_says_which_there_are(slices, absent):
    """They wait for cores, or they would end with `job-info`."""
    flux = slices.flux
    flux.ok("queue", "stop")
    slices.load()
    assert eventually(lambda: slices.jobs() == ["kube-0"])
    flux.ok("module", "remove", "dovetail")
    flux.ok("module", "remove", "-f", absent)
    slices.load()
    assert eventually(lambda: "cannot be looked" in flux.log())
    flux.ok("module", "load", absent)
    flux.ok("queue", "start")
    assert eventually(lambda: slices.status().get("phase") == "up")
    assert slices.jobs() == ["kube-0"]


def test_a_slice_that_its_module_could_not_let_go_any_more_runs_after_a_reload(slices):
    flux = slices.flux
    flux.ok("queue", "stop")
    slices.load()
    assert eventually(lambda: slices.jobs() == ["kube-0"])
    flux.ok("module", "remove", "dovetail")
    flux.ok("job", "urgency", flux.ok("jobs", "-no", "{id}"), "hold")
    flux.ok("queue", "start")
    slices.load()
    assert eventually(lambda: slices.status().get("phase") == "up")
    assert slices.jobs() == ["kube-0"]


def test_of_two_jobs_for_one_slice_the_one_that_runs_is_it_after_a_reload(slices):
    flux = slices.flux
    slices.load()
    assert eventually(lambda: slices.status().get("phase") == "up")
    flux.ok("module", "remove", "dovetail")
    spec = flux.ok("job", "info", flux.ok("jobs", "-no", "{id}"), "jobspec")
    again = [flux.ok("job", "submit", "--urgency=0", stdin=spec) for _ in range(2)]
    slices.load()
    assert eventually(lambda: slices.status().get("phase") == "up")
    for job in again:
        flux.wait(job, "clean")
        assert "start" not in [event["name"] for event in flux.events(job)]
    assert slices.status()["phase"] == "up"


STRAYS = {"at the start": 0, "as there are more": 1}  # and how many slices there are before


@pytest.mark.parametrize("when", STRAYS)
def test_a_slice_is_submitted_once_though_its_module_went_before_it_was_told(slices, when):
    """Of two with one number, each would remove what the other has."""
    flux, before = slices.flux, STRAYS[when]
    flux.ok("run", "-n1", "true")  # for what checks jobs to run
    if before:
        slices.load()
        assert eventually(lambda: slices.status().get("phase") == "up")
    words = ["pgrep", "-P", flux.ok("getattr", "broker.pid"), "-f", "job-validator"]
    checks = [int(pid) for pid in subprocess.check_output(words).split()]
    for pid in checks:
        os.kill(pid, signal.SIGSTOP)
    try:
        if before:
            more = "import flux; flux.Flux().rpc('dovetail.resize', {'nodes': 2})"
            flux.ok("python", "-c", more)
        else:
            slices.load()
            assert eventually(lambda: flux.log().count(" adopted") == 1)
        flux.ok("module", "remove", "dovetail")
        slices.load()
        assert eventually(lambda: flux.log().count(" adopted") == 2)
    finally:
        for pid in checks:
            os.kill(pid, signal.SIGCONT)
    assert eventually(lambda: slices.status().get("phase") == "up")
    strays = ("jobs", "-no", "{id}", "-f", "canceled")
    assert eventually(lambda: flux.ok(*strays)), "it is there, some time"
    assert slices.jobs() == ["kube-0"]
    (stray,) = flux.ok(*strays).split()
    assert "start" not in [event["name"] for event in flux.events(stray)]
