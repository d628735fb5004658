# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a Lua plugin can see and do in a real job manager."""

from __future__ import annotations

import re

import pytest
from support.flux_lua import TOPICS

pytestmark = pytest.mark.flux

HOLD = "--setattr=system.exec.test.run_duration=100s"  # a job that runs without processes
QUICK = "--setattr=system.exec.test.run_duration=0.001s"


def test_every_topic_reaches_lua(flux):
    script = "\n".join(
        f"""jobtap.on("{topic}", function(job, topic)
            assert(topic == "{topic}" and job.id > 0 and job.f58 and job.state)
            {"job:subscribe()" if topic == "job.new" else ""}
        end)"""
        for topic in TOPICS
    )
    flux.submit("--urgency=hold", "true")  # a plugin that is loaded is asked for its priority
    with flux.plugin("all", script):
        job = flux.submit(HOLD, "--dependency=known:x", "--urgency=hold", "true")
        flux.ok("update", job, "duration=60")
        flux.ok("job", "urgency", job, "16")
        flux.wait(job, "start")
        flux.ok("cancel", job)
        flux.wait(job, "clean")
        flux.ok("run", QUICK, "true")
        flux.ok("job", "purge", "--force", "--num-limit=0")
        found = flux.query("all")
    assert found["errors"] == 0, found["last_error"]
    assert [topic for topic in TOPICS if not found["topics"][topic]] == []


def test_a_pattern_of_topics_is_one_callback(flux):
    with flux.plugin("glob", 'jobtap.on("job.state.*", function() end)'):
        flux.ok("run", QUICK, "true")
        assert flux.query("glob")["topics"]["job.state.*"] == 6


def test_the_fields_of_a_job_are_seen(flux):
    script = """
        local seen = {}
        jobtap.on("job.state.cleanup", function(job)
            seen = {
                id = job.id, user = job.userid, urgency = job.urgency, state = job.state,
                before = job.prev_state, submitted = job.t_submit,
                command = job.jobspec.tasks[1].command,
                ranks = job.R.execution.R_lite[1].rank, ended = job.end_event.name,
                event = job.entry.name, result = job:result(), finished = job:posted("finish"),
                flown = job:posted("flown"),
            }
        end)
        jobtap.on("plugin.query", function() return { seen = seen } end)"""
    with flux.plugin("fields", script):
        job = flux.submit("--wait", QUICK, "--urgency=20", "true")
        seen = flux.query("fields")["seen"]
    assert seen.pop("id") == int(flux.ok("job", "id", job))
    assert seen.pop("submitted") == flux.events(job)[0]["timestamp"]
    user = int(flux.ok("getattr", "security.owner"))
    assert seen == {
        "user": user, "urgency": 20, "state": "CLEANUP", "before": "RUN", "command": ["true"],
        "ranks": "0", "ended": "finish", "event": "finish", "result": "COMPLETED",
        "finished": True, "flown": False,
    }  # fmt: skip


def test_a_job_that_was_kept_is_looked_up_anew(flux):
    script = """
        local kept
        jobtap.on("job.new", function(job) kept = job end)
        jobtap.on("plugin.query", function()
            return { state = kept.state, ranks = kept.R and kept.R.execution.R_lite[1].rank }
        end)"""
    with flux.plugin("kept", script):
        job = flux.submit(HOLD, "true")
        flux.wait(job, "start")
        found = flux.query("kept")
        flux.ok("cancel", job)
    assert (found["state"], found["ranks"]) == ("RUN", "0")


def test_a_jobs_table_lives_as_long_as_the_job(flux):
    script = """
        jobtap.on("job.new", function(job) job.data.n = 1 end)
        jobtap.on("job.state.*", function(job) job.data.n = job.data.n + 1 end)
        jobtap.on("job.state.inactive", function() end)
        jobtap.on("job.destroy", function(job) assert(job.data.n == 7, job.data.n) end)"""
    with flux.plugin("data", script):
        flux.ok("run", QUICK, "true")
        flux.ok("run", QUICK, "true")
        found = flux.query("data")
    assert found["errors"] == 0, found["last_error"]


@pytest.mark.parametrize("topic", ["job.create", "job.validate", "job.dependency.known"])
def test_the_words_of_a_rejection_reach_the_user(flux, topic):
    with flux.plugin("no", f'jobtap.on("{topic}", function(job) job:reject("not on Sundays") end)'):
        done = flux.run("submit", "--dependency=known:x", "true")
    assert done.returncode != 0
    assert "not on Sundays" in done.stderr


@pytest.mark.parametrize("first", ["", "a"])
def test_words_that_are_cut_reach_the_user_though_not_in_ascii(flux, first):
    """Flux takes 159 bytes, and a letter here has two."""
    reason = first + r"\xc3\xa4" * 100
    with flux.plugin("no", f'jobtap.on("job.validate", function(job) job:reject("{reason}") end)'):
        done = flux.run("submit", "true")
    assert done.returncode != 0
    assert first + "\u00e4" * 70 in done.stderr


def test_an_update_can_be_refused_or_granted(flux):
    script = """
        jobtap.on("job.update.attributes.system.name", function(job)
            if job.value == "no" then job:reject("no such name here") end
            assert(job.cred.userid == job.userid)
            return { validated = 1 }
        end)"""
    with flux.plugin("update", script):
        job = flux.submit("--urgency=hold", QUICK, "true")
        refused = flux.run("update", job, "attributes.system.name=no")
        flux.ok("update", job, "attributes.system.name=yes")
        flux.ok("cancel", job)
        flux.wait(job, "clean")
    assert "no such name here" in refused.stderr
    assert flux.contexts(job, "jobspec-update") == [{"attributes.system.name": "yes"}]


def test_a_dependency_holds_until_it_is_removed(flux):
    script = """
        local held = {}
        jobtap.on("job.dependency.known", function(job)
            assert(job:dependency_add("known:" .. job.dependency.value))
            held[job.dependency.value] = job
        end)
        jobtap.on("conf.update", function(conf)
            local job = conf.free and held[conf.free]
            if job then assert(job:dependency_remove("known:" .. conf.free)) end
            held[conf.free or ""] = nil
        end)"""
    with flux.plugin("dep", script):
        first = flux.submit("--dependency=known:a", QUICK, "true")
        second = flux.submit("--dependency=known:b", QUICK, "true")
        flux.ok("config", "load", stdin='free = "b"\n')
        flux.wait(second, "clean")
        assert flux.state(first) == "DEPEND"
        flux.ok("config", "load", stdin='free = "a"\n')
        flux.wait(first, "clean")
        assert flux.query("dep")["errors"] == 0


def test_prolog_and_epilog_hold_a_job_and_end(flux):
    script = """
        jobtap.on("job.state.run", function(job)
            assert(job:prolog_start("warm up"))
            job:after(0.01, function() assert(job:prolog_finish("warm up")) end)
        end)
        jobtap.on("job.state.cleanup", function(job)
            assert(job:epilog_start("clean up"))
            job:after(0.01, function() assert(job:epilog_finish("clean up", 3)) end)
        end)"""
    with flux.plugin("perilog", script):
        job = flux.submit(QUICK, "true")
        flux.wait(job, "clean")
        assert flux.query("perilog")["errors"] == 0
    names = [event["name"] for event in flux.events(job)]
    order = ["alloc", "prolog-start", "prolog-finish", "start", "finish", "epilog-start",
             "epilog-finish", "free"]  # fmt: skip
    assert sorted(order, key=names.index) == order
    assert flux.contexts(job, "epilog-finish") == [{"description": "clean up", "status": 3}]


def test_exceptions_events_and_annotations_are_on_the_job(flux):
    script = """
        jobtap.on("job.state.depend", function(job)
            assert(job:annotate({ colour = "red", list = { 1, 2 } }))
            assert(job:post("painted", { coats = 2 }))
            assert(job:post("dried"))
            assert(job:raise("taste", 3, "red is loud"))
            return { annotations = { volatile = true } }
        end)"""
    with flux.plugin("acts", script):
        job = flux.submit("--wait", QUICK, "true")
    assert flux.contexts(job, "painted") == [{"coats": 2}]
    assert flux.contexts(job, "dried") == [{}]
    raised = flux.contexts(job, "exception")[0]
    assert (raised["type"], raised["severity"], raised["note"]) == ("taste", 3, "red is loud")
    assert flux.ok("jobs", "-no", "{annotations.user.colour}", job) == "red"
    assert flux.ok("jobs", "-no", "{annotations.volatile}", job) == "True"


def test_the_jobspec_and_the_priority_can_be_set(flux):
    script = """
        jobtap.on("job.state.depend", function(job)
            assert(job:update({ ["attributes.system.job.name"] = "renamed" }))
        end)
        jobtap.on("job.state.priority", function(job)
            job:after(0.01, function() assert(job:reprioritize(7)) end)
            return { priority = false }
        end)
        jobtap.on("job.priority.get", function() return { priority = 7 } end)"""
    with flux.plugin("sets", script):
        job = flux.submit("--wait", QUICK, "true")
        found = flux.query("sets")
    assert found["errors"] == 0, found["last_error"]
    assert flux.contexts(job, "priority")[-1] == {"priority": 7}
    assert flux.ok("jobs", "-no", "{name}", job) == "renamed"


@pytest.mark.parametrize("priority", ['"high"', "-5", "1.5", "4294967296", "{}", "true"])
def test_a_priority_that_makes_no_sense_is_said_and_holds_no_job(flux, priority):
    script = f"""
        jobtap.on("job.state.priority", function() return {{ priority = {priority} }} end)"""
    with flux.plugin("odd", script):
        job = flux.submit(QUICK, "true")
        flux.wait(job, "clean")
    notes = [context["note"] for context in flux.contexts(job, "exception")]
    assert notes
    assert all("priority is a whole number from 0 to 4294967295" in note for note in notes)
    assert flux.contexts(job, "finish") == [{"status": 0}]


def test_a_reply_of_a_service_comes_later(flux):
    script = """
        local got = {}
        jobtap.on("job.new", function(job)
            job:rpc("broker.ping", { seq = 3 }, 30, function(reply) got.ping = reply.seq end)
            job:rpc("kvs.getroot", { namespace = "no" }, 30, function(reply, why, code)
                got.refused = { tostring(reply), why, code }
            end)
            job:rpc("nobody.home", {}, 30, function(reply, why, code)
                got.absent = { tostring(reply), why, code }
            end)
            job:rpc("job-manager.getroot", {}, 30, function() error("lost", 0) end)
        end)
        jobtap.on("plugin.query", function() return { got = got } end)"""
    with flux.plugin("rpc", script):
        job = flux.submit("--urgency=hold", QUICK, "true")
        flux.wait(job, "exception")  # of the error
        found = flux.query("rpc")
        flux.ok("cancel", job)
    assert found["got"]["ping"] == 3
    assert found["got"]["absent"] == ["nil", "nobody.home: no such service", "ENOSYS"]
    assert found["got"]["refused"][0] == "nil"
    assert found["last_error"] == "lost"
    assert found["waiting"] == 0


def test_an_answer_without_content_and_a_timer_of_no_time_come_too(flux):
    script = """
        local got
        jobtap.on("job.new", function(job)
            job:after(0, function()
                job:rpc("job-manager.memo", { id = job.id, memo = { n = 1 } }, 30, function(reply)
                    got = reply
                    job:post("told")
                end)
            end)
        end)
        jobtap.on("plugin.query", function() return { got = got } end)"""
    with flux.plugin("empty", script):
        job = flux.submit("--urgency=hold", QUICK, "true")
        flux.wait(job, "told")
        found = flux.query("empty")
        flux.ok("cancel", job)
    assert (found["got"], found["errors"]) == (True, 0)


def test_a_job_has_no_more_epilogs_than_flux_can_count(flux):
    script = """
        local refused
        jobtap.on("job.state.cleanup", function(job)
            for _ = 1, 300 do
                local done, why = job:epilog_start("e")
                refused = refused or why
            end
            job:after(0, function() for _ = 1, 64 do job:epilog_finish("e") end end)
        end)
        jobtap.on("plugin.query", function() return { refused = refused } end)"""
    with flux.plugin("many", script):
        job = flux.submit(QUICK, "true")
        flux.wait(job, "clean")
        assert flux.query("many")["refused"] == "Value too large for defined data type"


def test_a_service_that_does_not_answer_is_not_waited_for(flux):
    # The job manager answers this only when there are no jobs left, and here is one.
    script = """
        jobtap.on("job.state.depend", function(job)
            assert(job:dependency_add("late"))
            job:rpc("job-manager.drain", {}, 0.1, function(reply, why, code)
                job:raise("late", 0, why .. " " .. code)
            end)
        end)"""
    with flux.plugin("late", script):
        job = flux.submit(QUICK, "true")
        flux.wait(job, "clean")
    note = flux.contexts(job, "exception")[0]["note"]
    assert note == "job-manager.drain: no answer in time ETIMEDOUT"


def test_what_a_job_waits_for_is_forgotten_with_it(flux):
    script = """
        jobtap.on("job.new", function(job)
            job:after(1000, function() end)
            job:rpc("job-manager.drain", {}, 1000, function() end)
        end)"""
    with flux.plugin("forget", script):
        jobs = [flux.submit("--urgency=hold", QUICK, "true") for _ in range(3)]
        assert flux.query("forget")["waiting"] == 6
        flux.ok("cancel", *jobs)
        for job in jobs:
            flux.wait(job, "clean")
        found = flux.query("forget")
    assert (found["waiting"], found["errors"]) == (0, 0)


def test_configuration_comes_at_load_and_at_every_change(flux):
    script = """
        local colour
        jobtap.on("conf.update", function(conf)
            colour = conf.colour
            if colour == "pink" then error("colour: anything but pink", 0) end
        end)
        jobtap.on("plugin.query", function()
            return { colour = colour, own = jobtap.conf.list[2] }
        end)"""
    flux.ok("config", "load", stdin='colour = "red"\n')
    with flux.plugin("conf", script, "list=[1,5]"):
        found = flux.query("conf")
        assert (found["colour"], found["own"]) == ("red", 5)
        flux.ok("config", "load", stdin='colour = "blue"\n')
        assert flux.query("conf")["colour"] == "blue"
        refused = flux.run("config", "load", stdin='colour = "pink"\n')
        assert refused.returncode != 0
        assert "colour: anything but pink" in refused.stderr
    flux.ok("config", "load", stdin="")


def test_what_a_script_logs_is_in_the_log(flux):
    with flux.plugin(
        "logs", 'jobtap.on("job.new", function(job) jobtap.log("info", job.jobspec) end)'
    ):
        flux.submit("--wait", QUICK, "true")
    assert re.search(r'info\[0\]: logs.lua: {"resources".*"tasks"', flux.log())


def test_another_job_can_be_acted_on_by_its_id(flux):
    script = """
        local first
        jobtap.on("job.new", function(job)
            first = first or job.id
            local other = jobtap.job(first)
            if first ~= job.id then other:raise("pushed", 4, "by another") end
        end)"""
    with flux.plugin("other", script):
        first = flux.submit("--urgency=hold", QUICK, "true")
        flux.submit("--wait", QUICK, "true")
        flux.wait(first, "exception")
        flux.ok("cancel", first)
        assert flux.query("other")["errors"] == 0
