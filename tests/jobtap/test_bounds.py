# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a Lua plugin does never calls it back without end, so the job manager always answers.

`DOVETAIL_RANDOM_PLUGINS` is the number of random plugins that are tried.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import flux_lua
from support.flux_lua import TOPICS, Instance

pytestmark = pytest.mark.flux

QUICK = "--setattr=system.exec.test.run_duration=0.001s"
RANDOM_PLUGINS = int(os.environ.get("DOVETAIL_RANDOM_PLUGINS", "20"))
FLAT = 96 << 20  # bytes that a broker may grow by; a plugin in a loop takes 60 MB a second

SUBSCRIBE = 'jobtap.on("job.new", function(job) job:subscribe() end)'
LOOPS = {
    "a jobspec that is updated in each state": """
        jobtap.on("job.state.sched", function(job)
            job:update({ ["attributes.system.duration"] = 60 }) end)""",
    "an annotation for each event": f"""{SUBSCRIBE}
        jobtap.on("job.event.*", function(job) job:annotate({{ colour = "red" }}) end)""",
    "an event for each event": f"""{SUBSCRIBE}
        jobtap.on("job.event.*", function(job) job:post("another") end)""",
    "a thousand events for each event": f"""{SUBSCRIBE}
        jobtap.on("job.event.*", function(job)
            for _ = 1, 1000 do job:post("another") end end)""",
    "an exception for each event": f"""{SUBSCRIBE}
        jobtap.on("job.event.*", function(job) job:raise("loud", 4, "again") end)""",
    "ten thousand exceptions in one call": """
        jobtap.on("job.state.depend", function(job)
            for _ = 1, 9000 do job:raise("loud", 4, "again") end end)""",
    "ten thousand events in one call": f"""{SUBSCRIBE}
        jobtap.on("job.state.depend", function(job)
            for _ = 1, 9000 do job:post("another") end end)""",
    "an error for each event": f"""{SUBSCRIBE}
        jobtap.on("job.event.*", function(job) error("again", 0) end)""",
    "two jobs that call each other": """
        local jobs = {}
        jobtap.on("job.new", function(job) job:subscribe() jobs[#jobs + 1] = job
            if #jobs == 2 then job:post("first") end end)
        jobtap.on("job.event.*", function(job)
            for _, other in ipairs(jobs) do
                if other.id ~= job.id then other:post("another") end
            end
        end)""",
    "a timer that starts itself": """
        local function again(job) job:after(0, function() again(job) end) end
        jobtap.on("job.new", again)""",
    "timers that double": """
        local function again(job)
            for _ = 1, 2 do job:after(0, function() again(job) end) end
        end
        jobtap.on("job.new", again)""",
    "a question for each reply": """
        local function again(job)
            job:rpc("broker.ping", { seq = 1 }, 30, function() again(job) end)
        end
        jobtap.on("job.new", again)""",
    "an update for each event, by a slow plugin": f"""{SUBSCRIBE}
        jobtap.on("job.event.*", function(job)
            job:update({{ ["attributes.system.duration"] = 60 }}) while true do end end)""",
}  # fmt: skip


@pytest.fixture(scope="module")
def running() -> Iterator[Instance]:
    with flux_lua.instance(3) as one:
        yield one


def brokers(flux: Instance) -> int:
    """Bytes of memory of the leading broker, in which the job manager is."""
    pid = flux.ok("getattr", "broker.pid")
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


@pytest.mark.parametrize("what", LOOPS)
def test_a_loop_of_a_plugins_own_effects_ends_and_is_said(flux, what):
    with flux.plugin("loop", LOOPS[what]):
        held = [flux.submit("--urgency=hold", QUICK, "true") for _ in range(2)]
        job = flux.submit(QUICK, "true")
        for one in (*held, job):
            flux.wait(one, "priority")
        if "job.new" in LOOPS[what] and "event" not in LOOPS[what]:
            for one in held:
                flux.wait(one, "exception")
        found = flux.query("loop")
        flux.ok("cancel", *held)
        for one in (*held, job):
            flux.wait(one, "clean")
    notes = [c["note"] for one in (*held, job) for c in flux.contexts(one, "exception")]
    assert any("switched off for this job: " in note for note in notes)
    assert "switched off for this job" in flux.log()
    assert found["errors"] >= 1
    assert found["waiting"] == 0
    flux.ok("run", QUICK, "true")


def test_a_plugin_that_takes_the_job_managers_time_is_switched_off_for_all(flux):
    # All in one turn of the reactor, and in calls of C, which are stopped by the clock: on a busy
    # machine the broker itself gets too little time, on a fast one its share is not used up.
    script = """
        local long = "x"
        for _ = 1, 16 do long = long .. long end
        jobtap.on("job.state.depend", function(job)
            job:subscribe()
            assert(job:dependency_add("for-ever"))
            job:post("own")
        end)
        jobtap.on("job.event.exception", function()
            while true do long:upper() end
        end)
        jobtap.on("job.validate", function() end)"""
    with flux.plugin("burns", script):
        jobs = flux.ok("submit", "--cc=1-40", QUICK, "true").split()
        for job in jobs:
            flux.wait(job, "own")
        flux.ok("cancel", "--all")
        for job in jobs:
            flux.wait(job, "clean")
        found = flux.query("burns")
        refused = flux.run("submit", QUICK, "true")
        flux.ok("config", "load", stdin="")
    assert "of the job manager's time" in found["off"]
    assert found["waiting"] == 0
    assert refused.returncode != 0
    assert f"burns.lua: {found['off']}" in refused.stderr
    assert "burns.lua: job.event.exception: switched off, until it is loaded again" in flux.log()
    flux.ok("run", QUICK, "true")


def test_jobs_do_not_wait_for_a_plugin_that_is_switched_off(flux):
    script = """
        local function burn(job)
            for _ = 1, 3000000 do end
            job:after(0, function() burn(job) end)
        end
        jobtap.on("job.state.depend", function(job)
            assert(job:dependency_add("burning"))
            burn(job)
        end)"""
    with flux.plugin("waits", script):
        job = flux.submit(QUICK, "true")
        flux.wait(job, "clean")
        found = flux.query("waits")
    assert "switched off" in flux.log()
    assert found["waiting"] == 0
    flux.ok("run", QUICK, "true")


def test_what_others_do_as_often_switches_nothing_off(flux):
    script = """
        jobtap.on("job.new", function(job) job:subscribe() end)
        jobtap.on("job.event.*", function() end)"""
    with flux.plugin("quiet", script):
        job = flux.submit("--urgency=hold", QUICK, "true")
        flux.ok(
            "python",
            "-c",
            f"""
import flux
handle = flux.Flux()
memo = {{"id": {int(flux.ok("job", "id", job))}, "memo": {{"n": 1}}}}
asked = [handle.rpc("job-manager.memo", memo) for _ in range(3000)]
[one.get() for one in asked]""",
        )
        found = flux.query("quiet")
        flux.ok("cancel", job)
        flux.wait(job, "clean")
    assert found["topics"]["job.event.*"] >= 3000
    assert (found["errors"], found["off"]) == (0, "")


def test_timers_that_are_due_at_once_as_the_job_manager_was_held_up_switch_nothing_off(flux):
    """Some are served in that turn of the reactor, and the others after it."""
    wait = 10.0  # seconds, in which all jobs are submitted
    script = f"""
        jobtap.on("job.new", function(job)
            job:after({wait}, function()
                for _ = 1, 300000 do end
                job:annotate({{ n = 1 }})
            end)
        end)"""
    pid = int(flux.ok("getattr", "broker.pid"))
    with flux.plugin("many", script):
        flux.ok("submit", "--cc=1-300", "--urgency=hold", "--quiet", QUICK, "true")
        assert flux.query("many")["waiting"] == 300
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(wait)
        finally:
            os.kill(pid, signal.SIGCONT)
        while (found := flux.query("many"))["waiting"]:
            time.sleep(0.1)
        flux.ok("cancel", "--all")
    assert (found["errors"], found["off"]) == (0, ""), found["last_error"]


# --- random plugins ---

TABLE = '{ ["attributes.system.duration"] = 60 }'
ACTIONS = [
    'job:annotate({ n = 1 })', 'job:post("event", { n = 1 })', 'job:raise("type", 4, "note")',
    f"job:update({TABLE})", 'job:reprioritize(7)', 'job:dependency_add("x")', "job:subscribe()",
    'job:dependency_remove("x")', 'job:prolog_start("p")', 'job:prolog_finish("p")',
    'job:epilog_start("e")', 'job:epilog_finish("e", 1)', 'job:reject("no")', "return { a = 1 }",
    "return { priority = false }", "return { priority = 7 }", "return { annotations = { n = 1 } }",
    'error("failed", 0)', "for _ = 1, 100000 do end", "while true do end", "job.data[1] = job",
    "kept[#kept + 1] = job", "job = kept[1] or job", 'jobtap.log("debug", job.jobspec)',
]  # fmt: skip
LATER = ("job:after({seconds}, function() {then_} end)",
         'job:rpc("broker.ping", {{ seq = 1 }}, 5, function() {then_} end)',
         'job:rpc("job-manager.raise", {{ id = job.id, type = "x", severity = 4 }}, 5, '
         "function() {then_} end)",
         'job:rpc("job-manager.memo", {{ id = job.id, memo = {{ n = 1 }} }}, 5, '
         "function() {then_} end)",
         "for _ = 1, {times} do {then_} end")  # fmt: skip


def body(dice: random.Random, depth: int = 0) -> str:
    """Statements of a callback, some of them for later."""
    found = []
    for _ in range(dice.randint(1, 3)):
        if depth < 3 and dice.random() < 0.35:
            times, seconds = dice.choice((2, 50, 1000)), dice.choice((0, 0, 0.01))
            inner = dice.choice((body(dice, depth + 1), "again(job)"))
            found.append(dice.choice(LATER).format(then_=inner, times=times, seconds=seconds))
        else:
            found.append(f"do {dice.choice(ACTIONS)} end")
    return " ".join(found)


def random_plugin(seed: int) -> str:
    """A script for some topics, in which anything may call anything."""
    dice = random.Random(seed)
    patterns = [*TOPICS, "job.state.*", "job.event.*", "job.*"]
    topics = dice.sample(patterns, dice.randint(1, 6))
    lines = [f"local kept = {{}} local function again(job) {body(dice)} end"]
    if "job.new" not in topics and "job.*" not in topics:
        lines.append(SUBSCRIBE)
    lines += [f'jobtap.on("{topic}", function(job) {body(dice)} end)' for topic in topics]
    return "\n".join(lines)


def test_the_job_manager_answers_and_stays_small_whatever_plugins_do():
    with flux_lua.instance(1) as flux:
        grown = 0
        for seed in range(RANDOM_PLUGINS):
            before = brokers(flux)
            script = random_plugin(seed)
            with flux.plugin(f"random{seed}", script):
                for words in (["--urgency=hold"], ["--dependency=known:x"], []):
                    flux.run("submit", *words, QUICK, "true")
                flux.query(f"random{seed}")  # answered, if not at once: its limit is for hangs
            flux.run("cancel", "--all")
            flux.ok("queue", "idle")
            flux.ok("job", "purge", "--force", "--num-limit=0")
            grown = max(grown, brokers(flux) - before)
            assert grown < FLAT, f"plugin {seed} took {grown >> 20} MB:\n{script}"
        flux.ok("run", QUICK, "true")
