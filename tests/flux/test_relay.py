# SPDX-License-Identifier: LGPL-3.0-or-later
"""The relay between programs without Flux's bindings and a real instance."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.flux_batch import LIMIT, flux_command

pytestmark = pytest.mark.flux

SENDS_BEFORE_IT_READS = """
from dovetail.flux.client import Client
client = Client()
numbers = {client.send("broker.ping", {"seq": n, "pad": "x" * 5000}) for n in range(100)}
for line in client.lines():
    if "id" in line:
        numbers.remove(line["id"])
        assert len(line["value"]["pad"]) == 5000
    if not numbers:
        break
client.close()
print("all answered")
"""

SENDS_WHAT_IS_NO_TEXT = """
import os
from dovetail.flux.client import Client
client = Client()
name = os.fsdecode(b"caf\\xe9 \\xc3\\xa9")
print(ascii(next(client.answers("broker.ping", {"seq": 1, "pad": name}))["pad"]))
client.close()
"""

SUBMITS_BESIDE_A_JOB_OF_WHICH_THE_TIME_WAS_EXTENDED = """
import json, subprocess, sys
from dovetail.flux import jobspec
from dovetail.flux.client import SUBMIT, Client


def flux(*words):
    return subprocess.check_output(["flux", *words], text=True).strip()


flux("jobtap", "load", "alloc-bypass.so")
held = flux("submit", "-n1", "-t60s", "sleep", "inf")
flux("job", "wait-event", held, "start")
flux("update", held, "duration=1h")
client = Client()
spec = jobspec.proxy_job({"run": 1, "name": "sim", "launch": "1"})
spec["tasks"][0]["command"] = ["sleep", "inf"]
number = client.send(SUBMIT, {"spec": spec, "jobs": [int(flux("job", "id", held))]})
job = next(str(line["value"]["job"]) for line in client.lines() if line.get("id") == number)
flux("job", "wait-event", "-t60", job, sys.argv[1])
client.close()
ends = [json.loads(flux("job", "info", one, "R"))["execution"]["expiration"] for one in (held, job)]
print(*ends, flux("jobs", "-no", "{duration}", job))
flux("cancel", held, job)
"""


def test_one_line_says_that_there_is_no_instance():
    environment = {**os.environ, "FLUX_URI": "local:///nowhere"}
    environment["PATH"] = f"{Path(flux_command()).parent}:{environment['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", "from dovetail.flux.command import main; main(['status'])"],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    why = "there is no Flux instance here: use it in a batch job or `flux alloc`"
    assert done.stderr == f"flux dovetail: {why}\n"


def test_whoever_sends_more_than_a_pipe_holds_before_reading_gets_all_answers():
    words = [flux_command(), "start", sys.executable, "-c", SENDS_BEFORE_IT_READS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout == "all answered\n", done.stderr


def test_what_is_no_text_in_utf_8_ends_no_relay():
    words = [flux_command(), "start", sys.executable, "-c", SENDS_WHAT_IS_NO_TEXT]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout == "'caf? \\xe9'\n", done.stderr


def of_a_simulation(event, *options):
    """When the job that a simulation is for Flux ends, and its slice's; and its own duration."""
    words = [flux_command(), "start", *options, sys.executable, "-c"]
    words += [SUBMITS_BESIDE_A_JOB_OF_WHICH_THE_TIME_WAS_EXTENDED, event]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return map(float, done.stdout.split())


def test_a_simulations_job_has_the_time_that_its_slices_have_now():
    slices, simulations, duration = of_a_simulation("start")
    assert slices == simulations > 0.0
    assert duration == 0.0


def test_a_default_duration_ends_no_simulation():
    default = '--conf=policy.jobspec.defaults.system.duration="2m"'
    _, end, duration = of_a_simulation("resource-update", default)
    assert end == duration == 0.0, "it has as long as its instance, which has no limit"
