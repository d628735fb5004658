# SPDX-License-Identifier: LGPL-3.0-or-later
"""Broken Lua plugins, and plugins that are removed at the wrong time, harm no job."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from xml.etree import ElementTree

import pytest
from support import flux_lua, lua_core
from support.flux_lua import Instance

pytestmark = pytest.mark.flux

HOLD = "--setattr=system.exec.test.run_duration=100s"  # a job that runs without processes
QUICK = "--setattr=system.exec.test.run_duration=0.001s"

BROKEN = {
    "runaway": ("while true do end", "stopped after"),
    "memory-eating": ("local t = {} while true do t[#t + 1] = { {} } end", "stopped after|memory"),
    "crashing": ("local x = nil + 1", "attempt to perform arithmetic on a nil value"),
    "flooding": ('while true do jobtap.log("debug", "x") end', "stopped after 2000 actions"),
    "returning nonsense": ("return 7", "a callback returns a table or nothing, not a number"),
    "calling wrongly": ("job:raise(1, 2, 3, 4)  job.raise()", "bad argument"),
    "asking wrongly": ('job:rpc("a.b", {}, -1, function() end)', "not a number of seconds"),
    "asking without limit": ('job:rpc("a.b", {}, nil, function() end)', "number expected"),
}
UNLOADABLE = {
    "a mistake in the syntax": ("local x = = 1", "unexpected symbol near '='"),
    "an error at load": ("error('no licence', 0)", "no licence"),
    "a loop at load": ("while true do end", "stopped after"),
    "a topic that is not there": ("jobtap.on('jbo.new', function() end)", "no such topic: jbo.new"),
    "a state that is not there": (
        "jobtap.on('job.state.shed', function() end)", "no such topic: job.state.shed",
    ),
    "a pattern that nothing matches": (
        "jobtap.on('job.stat.*', function() end)", "no such topic: job.stat.*",
    ),
    "a topic twice": (
        "jobtap.on('job.new', function() end) jobtap.on('job.new', function() end)",
        "has a callback already",
    ),
    "no function": ("jobtap.on('job.new', 1)", "function expected"),
}  # fmt: skip


@pytest.fixture(scope="module")
def running() -> Iterator[Instance]:
    with flux_lua.instance(3) as one:  # three jobs have cores at once
        yield one


def matches(text: str, alternatives: str) -> bool:
    return any(part in text for part in alternatives.split("|"))


@pytest.mark.parametrize("what", BROKEN)
def test_a_policy_that_fails_rejects_the_job_and_says_why(flux, what):
    body, why = BROKEN[what]
    with flux.plugin("broken", f'jobtap.on("job.validate", function(job) {body} end)'):
        done = flux.run("submit", QUICK, "true")
        assert flux.query("broken")["errors"] >= 1
    assert done.returncode != 0
    assert "broken.lua failed: " in done.stderr
    assert matches(done.stderr, why)
    flux.ok("run", QUICK, "true")


@pytest.mark.parametrize("what", ["runaway", "memory-eating", "crashing"])
def test_a_plugin_that_fails_later_is_noted_on_the_job_which_goes_on(flux, what):
    body, why = BROKEN[what]
    with flux.plugin("broken", f'jobtap.on("job.state.run", function(job) {body} end)'):
        job = flux.submit(QUICK, "true")
        flux.wait(job, "clean")
    (raised,) = flux.contexts(job, "exception")
    assert (raised["type"], raised["severity"]) == ("jobtap", 4)
    assert matches(raised["note"], why)
    assert flux.contexts(job, "finish") == [{"status": 0}]


FAILS = 'job:after(0.01, function() error("slipped", 0) end)'


@pytest.mark.parametrize(
    ("topic", "hold"),
    [
        ("job.new", 'job:dependency_add("x")'),
        ("job.state.depend", 'job:dependency_add("x")'),
        ("job.state.run", 'job:prolog_start("x")'),
    ],
)
def test_a_job_does_not_wait_for_a_plugin_that_has_failed(flux, topic, hold):
    for script in (f"assert({hold}) {FAILS}", f'assert({hold}) error("slipped", 0)'):
        with flux.plugin("broken", f'jobtap.on("{topic}", function(job) {script} end)'):
            job = flux.submit(QUICK, "true")
            flux.wait(job, "clean")
        raised = flux.contexts(job, "exception")[0]
        assert (raised["severity"], raised["note"]) == (0, "broken.lua failed: slipped")
        assert not flux.contexts(job, "start")


def test_an_epilog_ends_when_the_plugin_fails(flux):
    script = f"""jobtap.on("job.state.cleanup", function(job)
        assert(job:epilog_start("x")) {FAILS} end)"""
    with flux.plugin("broken", script):
        job = flux.submit(QUICK, "true")
        flux.wait(job, "clean")
    assert flux.contexts(job, "epilog-finish") == [{"description": "x", "status": 1}]
    assert flux.contexts(job, "exception")[0]["severity"] == 4


@pytest.mark.parametrize("what", UNLOADABLE)
def test_a_script_with_this_is_not_loaded_and_the_user_is_told(flux, what):
    script, why = UNLOADABLE[what]
    done = flux.run("jobtap", "load", str(flux.write("unloadable", script)))
    assert done.returncode != 0
    assert why in done.stderr
    assert "unloadable" not in flux.ok("jobtap", "list")
    flux.ok("run", QUICK, "true")


def test_a_plugin_without_its_script_is_not_loaded(flux):
    path = flux.write("absent", "")
    path.with_suffix(".lua").unlink()
    done = flux.run("jobtap", "load", str(path))
    assert "absent.lua: No such file or directory" in done.stderr


@pytest.mark.parametrize("topic", ["job.create", "job.dependency.held"])
def test_a_job_that_was_accepted_before_is_ended_by_a_plugin_that_rejects_it(flux, topic):
    with flux.plugin(
        "first",
        """jobtap.on("job.dependency.held", function(job)
            job:dependency_add("held:x") end)""",
    ):
        job = flux.submit("--dependency=held:x", QUICK, "true")
        flux.wait(job, "validate")
        with flux.plugin("second", f'jobtap.on("{topic}", function(job) job:reject("no") end)'):
            flux.wait(job, "clean")
    assert flux.contexts(job, "exception")[0]["note"] == "no"


# What the job manager refuses only as it works on a job's events: it then drops those that follow.
UNTIMELY = {
    "a dependency that is not there": 'assert(not job:dependency_remove("x"))',
    "a prolog that was not started": 'assert(not job:prolog_finish("x"))',
    "an epilog that was not started": 'assert(not job:epilog_finish("x", 0))',
    "a priority without a number": 'job:post("priority", { n = 1 })',
    "a memo without a context": 'job:post("memo")',
    "a submission": 'job:post("submit", { userid = 1 })',
    "an exception that is fatal": 'job:raise("fatal", 0, "too early")',
}


@pytest.mark.parametrize("topic", ["job.new", "job.state.depend", "job.state.sched"])
@pytest.mark.parametrize("what", UNTIMELY)
def test_a_job_ends_whatever_a_plugin_does_to_it_at_the_wrong_time(flux, topic, what):
    script = f"""
        jobtap.on("job.validate", function(job) job:prolog_start("held") end)
        jobtap.on("{topic}", function(job) {UNTIMELY[what]} end)"""
    with flux.plugin("untimely", script):
        job = flux.submit(QUICK, "true")
        flux.wait(job, "depend")
    flux.wait(job, "clean")
    names = [entry["name"] for entry in flux.events(job)]
    assert names.count("prolog-start") == names.count("prolog-finish") == 1
    assert names.count("submit") == 1


HOLDING = """
    jobtap.on("job.dependency.held", function(job)
        assert(job:dependency_add("held:x"))
        if jobtap.conf.free then
            job:after(0.01, function() job:dependency_remove("held:x") end)
        else
            job:rpc("job-manager.drain", {}, 1000, function() end)
        end
    end)
    local function wanted(job, where)
        local user = job.jobspec.attributes.user
        return user and user[where]
    end
    jobtap.on("job.state.run", function(job)
        if wanted(job, "prolog") then
            assert(job:prolog_start("held"))
            job:after(1000, function() end)
        end
    end)
    jobtap.on("job.state.cleanup", function(job)
        if wanted(job, "epilog") then assert(job:epilog_start("held")) end
    end)
    jobtap.on("job.new", function(job) job:subscribe() job.data.seen = true end)
    jobtap.on("job.event.*", function() end)
"""


def hold_in_every_state(flux: Instance) -> dict[str, str]:
    """Jobs that the plugin, loaded already, holds, or that are merely there."""
    jobs = {
        "depend": flux.submit("--dependency=held:x", QUICK, "true"),
        "sched": flux.submit("--urgency=hold", QUICK, "true"),
        "prolog": flux.submit("--setattr=user.prolog=1", QUICK, "true"),
        "epilog": flux.submit("--setattr=user.epilog=1", QUICK, "true"),
        "run": flux.submit(HOLD, "true"),
    }
    flux.wait(jobs["prolog"], "prolog-start")
    flux.wait(jobs["epilog"], "epilog-start")
    flux.wait(jobs["run"], "start")
    return jobs


def test_a_plugin_can_be_removed_and_loaded_again_with_jobs_in_every_state(flux):
    flux.load("holding", HOLDING)
    jobs = hold_in_every_state(flux)
    flux.ok("jobtap", "remove", "holding.so")
    flux.wait(jobs["prolog"], "clean")
    flux.wait(jobs["epilog"], "clean")
    (raised,) = flux.contexts(jobs["prolog"], "exception")
    assert raised["severity"] == 0
    assert "removed before it had prepared the job" in raised["note"]
    assert flux.contexts(jobs["prolog"], "prolog-finish") == [{"description": "held", "status": 1}]
    assert not flux.contexts(jobs["prolog"], "start")
    assert flux.contexts(jobs["epilog"], "epilog-finish") == [{"description": "held", "status": 1}]
    assert "waits until it is loaded again" in flux.contexts(jobs["depend"], "exception")[0]["note"]
    assert [flux.state(jobs[name]) for name in ("depend", "sched", "run")] == [
        "DEPEND",
        "SCHED",
        "RUN",
    ]
    flux.load("holding", HOLDING, "free=1")
    flux.wait(jobs["depend"], "clean")
    assert flux.contexts(jobs["depend"], "finish") == [{"status": 0}]
    flux.ok("cancel", jobs["sched"], jobs["run"])
    flux.wait(jobs["run"], "clean")
    assert flux.query("holding")["errors"] == 0


def test_a_plugin_is_replaced_by_a_newer_one_with_jobs_held(flux):
    flux.load("holding", HOLDING)
    jobs = hold_in_every_state(flux)
    path = str(flux.write("holding", HOLDING))
    flux.ok("jobtap", "load", "--remove=holding.so", path, "free=1")
    for name in ("depend", "prolog", "epilog"):
        flux.wait(jobs[name], "clean")
    assert flux.contexts(jobs["depend"], "finish") == [{"status": 0}]


MODULES = ("job-list", "job-exec", "sched-simple")  # those that need the job manager


def test_a_held_job_survives_a_new_job_manager_and_an_instance_can_end_with_some():
    with flux_lua.instance(3) as flux:
        if "sched-simple" not in flux.ok("module", "list"):
            pytest.skip("another scheduler has modules of its own to reload")
        flux.load("holding", HOLDING)
        job = flux.submit("--dependency=held:x", QUICK, "true")
        for name in reversed(MODULES):
            flux.ok("module", "remove", name)
        flux.ok("module", "reload", "job-manager")
        for name in MODULES:
            flux.ok("module", "load", name)
        flux.load("holding", HOLDING, "free=1")
        flux.wait(job, "clean")
        assert flux.contexts(job, "finish") == [{"status": 0}]
        flux.ok("jobtap", "remove", "holding.so")
        flux.load("holding", HOLDING)
        flux.submit("--dependency=held:x", QUICK, "true")
        flux.submit("--urgency=hold", QUICK, "true")
        flux.wait(flux.submit(HOLD, "true"), "start")
    # its end is checked by instance()


def test_a_thousand_jobs_pass_through_a_plugin_that_touches_each(flux):
    script = """
        local n = 0
        jobtap.on("job.state.*", function(job) job.data.n = (job.data.n or 0) + 1 end)
        jobtap.on("job.destroy", function(job) n = n + (job.data.n == 6 and 1 or 0) end)
        jobtap.on("plugin.query", function() return { n = n } end)"""
    with flux.plugin("thousand", script):
        flux.ok("submit", "--cc=1-1000", "--wait", "--quiet", QUICK, "true")
        found = flux.query("thousand")
    assert (found["n"], found["errors"], found["waiting"]) == (1000, 0, 0)
    assert found["memory"] < 4 << 20


# Uses every part of the host once, and some of them wrongly.
ACTING = """
    jobtap.on("conf.update", function(conf) jobtap.log("debug", conf) end)
    jobtap.on("plugin.query", function() return { conf = jobtap.conf } end)
    jobtap.on("job.validate", function(job)
        if job.jobspec.tasks[1].command[1] == "false" then job:reject("no") end
    end)
    jobtap.on("job.dependency.odd", function(job)
        job:dependency_add("odd:" .. job.dependency.value)
        job:reject("odd")
    end)
    jobtap.on("job.new", function(job)
        job.data.seen = { tostring(job.jobspec), job.f58 }
        job:subscribe()
        job:after(1000, function() end)
        job:rpc("broker.ping", { seq = 1 }, 30, function(reply) job.data.seq = reply.seq end)
        job:rpc("kvs.getroot", { namespace = "no" }, 30, function() error("lost", 0) end)
        job:after(0.01, function() job:rpc("nobody.home", { f = error }, 30, error) end)
    end)
    jobtap.on("job.event.*", function(job) job.data[job.entry.name] = job.entry end)
    jobtap.on("job.update.*", function(job) return { validated = 1 } end)
    jobtap.on("job.state.priority", function(job) return { priority = 7, x = job.jobspec } end)
    jobtap.on("job.state.depend", function(job)
        job:annotate({ colour = "red" })
        job:post("painted", { coats = 2 })
        job:raise("taste", 3, "red is loud")
        job:update({ ["attributes.system.job.name"] = "renamed" })
        return { annotations = { list = { 1, 2 } } }
    end)
    jobtap.on("job.state.cleanup", function(job) error({ job:result() }) end)
"""


@pytest.mark.parametrize("lua", lua_core.VERSIONS)
def test_the_host_works_with_each_lua(flux, lua):
    name = lua.replace(".", "")
    (flux.scratch / f"{name}.so").symlink_to(lua_core.build_host(lua, flux.flux))
    with flux.plugin(name, ACTING, "list=[1,5]"):
        job = flux.submit(QUICK, "true")
        flux.wait(job, "clean")
        found = flux.query(name)
    assert (found["lua"], found["conf"]) == (f"Lua {lua[3:]}", {"list": [1, 5]})
    assert found["last_error"] == "error of type table"
    assert flux.contexts(job, "painted") == [{"coats": 2}]


def in_the_host(error: ElementTree.Element) -> bool:
    """Whether what valgrind found has to do with our library, which may be unloaded by then."""
    return any(
        str(frame.findtext("obj")).endswith("/lua.so")
        or str(frame.findtext("dir")).endswith("/jobtap")
        for frame in error.iter("frame")
    )


def test_valgrind_finds_nothing_in_a_job_manager_with_plugins(tmp_path):
    if not shutil.which("valgrind"):
        pytest.skip("no valgrind here")
    found = tmp_path / "found.xml"
    words = ["valgrind", "-q", "--leak-check=full", "--keep-debuginfo=yes"]
    words += ["--child-silent-after-fork=yes", "--xml=yes", f"--xml-file={found}"]
    with flux_lua.instance(1, "--wrap=" + ",".join(words)) as flux:
        for what in ("a mistake in the syntax", "a topic twice"):
            path = str(flux.write("unloadable", UNLOADABLE[what][0]))
            assert flux.run("jobtap", "load", path).returncode != 0
        with flux.plugin("acting", ACTING, "list=[1,5]"):
            for refused in (["false"], ["--dependency=odd:1", "true"]):
                assert flux.run("submit", *refused).returncode != 0
            job = flux.submit("--urgency=hold", QUICK, "true")
            flux.ok("update", job, "attributes.system.name=yes")
            flux.ok("job", "urgency", job, "16")
            flux.wait(job, "clean")
            assert flux.query("acting")["last_error"] == "error of type table"
        for hold in ("prolog", "epilog"):  # in turn, since there may be one core
            flux.load("holding", HOLDING)
            held = flux.submit("--dependency=held:x", QUICK, "true")
            job = flux.submit(f"--setattr=user.{hold}=1", QUICK, "true")
            flux.wait(job, f"{hold}-start")
            flux.ok("jobtap", "remove", "holding.so")
            flux.wait(job, "clean")
        flux.load("holding", HOLDING)  # and stays, with the jobs that it holds
        assert flux.state(held) == "DEPEND"
    errors = ElementTree.parse(found).getroot().findall("error")
    texts = [ElementTree.tostring(one, "unicode") for one in errors if in_the_host(one)]
    assert texts == []
