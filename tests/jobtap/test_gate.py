# SPDX-License-Identifier: LGPL-3.0-or-later
"""Jobs wait for user-space Kubernetes (gate.lua) and for its end (release.lua)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from dovetail.flux import option
from support import lua_core
from support.flux_lua import Instance

pytestmark = pytest.mark.flux

STUB = str(Path(__file__).parents[1] / "support" / "stub_module.py")
QUICK = "--setattr=system.exec.test.run_duration=0.001s"
UP = "--dependency=dovetail:up"
SLICE = "--setattr=user.dovetail.slice=1"


@contextlib.contextmanager
def service(flux: Instance) -> Iterator[None]:
    """The service `dovetail`, which answers when it is told to."""
    flux.ok("module", "load", "--name", "dovetail", STUB)
    try:
        yield
    finally:
        flux.run("module", "remove", "dovetail")


def tell(flux: Instance, *words: str) -> None:
    flux.ok("python", STUB, *words)


def test_jobs_run_once_kubernetes_is_up_and_not_before(flux):
    with flux.plugin("gate"), service(flux):
        jobs = [flux.submit(UP, QUICK, "true") for _ in range(2)]
        other = flux.submit(QUICK, "true")
        flux.wait(other, "clean")
        assert [flux.state(job) for job in jobs] == ["DEPEND"] * 2
        tell(flux, "up")
        for job in jobs:
            flux.wait(job, "clean")
            assert flux.contexts(job, "finish") == [{"status": 0}]


def test_jobs_fail_with_the_reason_when_kubernetes_does_not_come_up(flux):
    with flux.plugin("gate"), service(flux):
        job = flux.submit(UP, QUICK, "true")
        flux.wait(job, "dependency-add")
        tell(flux, "fail", "the kubelet did not start")
        flux.wait(job, "clean")
    (raised,) = flux.contexts(job, "exception")
    assert (raised["type"], raised["severity"]) == ("dovetail", 0)
    assert raised["note"] == "Kubernetes is not up: the kubelet did not start"


def test_a_service_that_comes_later_is_found(flux):
    with flux.plugin("gate"):
        job = flux.submit(UP, QUICK, "true")
        flux.wait(job, "validate")
        with service(flux):
            asked = 0
            while not asked:
                assert flux.state(job) == "DEPEND"
                asked = "'answered': 1" in flux.ok("python", STUB, "up")
            flux.wait(job, "clean")
    assert flux.contexts(job, "finish") == [{"status": 0}]


def test_a_service_that_is_replaced_is_asked_again(flux):
    with flux.plugin("gate"):
        with service(flux):
            job = flux.submit(UP, QUICK, "true")
            flux.wait(job, "validate")
        with service(flux):
            while "'answered': 1" not in flux.ok("python", STUB, "up"):
                assert flux.state(job) == "DEPEND"
            flux.wait(job, "clean")
    assert flux.contexts(job, "finish") == [{"status": 0}]


def test_the_gate_can_be_replaced_while_jobs_wait(flux):
    with service(flux):
        with flux.plugin("gate"):
            job = flux.submit(UP, QUICK, "true")
            flux.wait(job, "dependency-add")
        with flux.plugin("gate"):
            tell(flux, "up")
            flux.wait(job, "clean")
    assert flux.contexts(job, "finish") == [{"status": 0}]


def test_a_cancelled_job_does_not_wait(flux):
    with flux.plugin("gate"), service(flux):
        job = flux.submit(UP, QUICK, "true")
        flux.ok("cancel", job)
        flux.wait(job, "clean")
        tell(flux, "up")
        found = flux.query("gate")
    assert (found["errors"], found["waiting"]) == (0, 0)


def test_a_job_that_says_twice_for_what_it_waits_runs(flux):
    with flux.plugin("gate"), service(flux):
        job = flux.submit(UP, UP, QUICK, "true")
        flux.wait(job, "dependency-add")
        tell(flux, "up")
        flux.wait(job, "clean")
    assert flux.contexts(job, "finish") == [{"status": 0}]


def test_other_values_of_the_dependency_are_refused(flux):
    with flux.plugin("gate"):
        done = flux.run("submit", "--dependency=dovetail:down", QUICK, "true")
    assert "dovetail:down is not known; dovetail:up is" in done.stderr


def test_a_slice_keeps_its_resources_until_teardown_is_confirmed(flux):
    with flux.plugin("release"), service(flux):
        job = flux.submit(SLICE, QUICK, "true")
        flux.wait(job, "epilog-start")
        other = flux.submit(QUICK, "true")
        flux.wait(other, "clean")
        assert flux.state(job) == "CLEANUP"
        tell(flux, "up")
        flux.wait(job, "clean")
    assert flux.contexts(job, "epilog-finish")[0]["status"] == 0
    assert not flux.contexts(job, "exception")
    assert not flux.contexts(other, "epilog-start")


def test_a_teardown_that_is_not_confirmed_is_waited_for_up_to_a_limit(flux):
    flux.ok("config", "load", stdin="[dovetail]\ndown-timeout = 0.1\n")
    with flux.plugin("release"), service(flux):
        job = flux.submit(SLICE, QUICK, "true")
        flux.wait(job, "clean")
        tell(flux, "up")
    (raised,) = flux.contexts(job, "exception")
    assert raised["severity"] == 4
    assert raised["note"] == "teardown is not confirmed: dovetail.wait-down: no answer in time"


# What the host would offer `gate.lua`; `main` gives it a configuration and a job, and returns the
# limit for the service's answer.
GATE_HOST = """
    local handlers, limit = {}, nil
    jobtap = { on = function(topic, handler) handlers[topic] = handler end }
    local job = { id = 1, dependency = { value = "up" } }
    function job:dependency_add() return true end
    function job:rpc(_, _, seconds) limit = seconds end

    function main(conf)
        handlers["conf.update"](conf)
        handlers["job.dependency.dovetail"](job)
        return limit
    end
"""


@pytest.mark.unit
@pytest.mark.parametrize(
    "more", [{}, {"provider": "dovetail"}, {"provider": "usernetes"}, {"up-timeout": 7.0}]
)
@pytest.mark.parametrize("lua", lua_core.VERSIONS)
def test_a_job_waits_as_long_as_the_service_may_take(lua, more):
    script = str(lua_core.TOP / "jobtap" / "gate.lua")
    table = {"nodes": 1, **more}
    done = lua_core.run([lua_core.build(lua)], json.dumps({"dovetail": table}), GATE_HOST, script)
    assert float(done) == option.from_table(table).up_timeout + 60.0


# What it would offer `release.lua`, with a clock: a service that goes away after `case.after`
# seconds, each time that it is asked. `main` returns when the epilog ends, and what is said.
RELEASE_HOST = """
    local handlers, due, now, found = {}, {}, 0, {}
    jobtap = { on = function(topic, handler) handlers[topic] = handler end }
    local after = 0
    local job = {
        id = 1, R = {}, end_event = { name = "finish" },
        jobspec = { attributes = { user = { dovetail = { slice = 1 } } } },
    }
    function job:epilog_start() return true end
    function job:epilog_finish() found.ended = found.ended or now end
    function job:raise(_, _, note) found.note = note end
    function job:after(seconds, call) table.insert(due, { now + seconds, call }) end
    function job:rpc(_, _, seconds, call)
        if after < seconds then
            job:after(after, function() call(nil, "Connection reset by peer", "ECONNRESET") end)
        else
            job:after(seconds, function() call(nil, "no answer in time", "ETIMEDOUT") end)
        end
    end

    function main(case)
        after = case.after
        handlers["conf.update"](case.conf)
        handlers["job.state.cleanup"](job)
        while #due > 0 do
            table.sort(due, function(a, b) return a[1] < b[1] end)
            local first = table.remove(due, 1)
            now = first[1]
            first[2]()
        end
        return found
    end
"""


@pytest.mark.unit
@pytest.mark.parametrize("after", [0, 20, 1000])
@pytest.mark.parametrize("lua", lua_core.VERSIONS)
def test_the_limit_of_a_teardown_is_in_seconds_however_often_the_service_goes_away(lua, after):
    script = str(lua_core.TOP / "jobtap" / "release.lua")
    case = {"after": after, "conf": {"dovetail": {"down-timeout": 30}}}
    done = lua_core.run([lua_core.build(lua)], json.dumps(case), RELEASE_HOST, script)
    found = json.loads(done)
    assert found["ended"] == 30
    assert found["note"].startswith("teardown is not confirmed: ")


def test_a_teardown_is_confirmed_by_a_service_that_was_replaced(flux):
    with flux.plugin("release"):
        with service(flux):
            job = flux.submit(SLICE, QUICK, "true")
            flux.wait(job, "epilog-start")
        with service(flux):
            while "'answered': 1" not in flux.ok("python", STUB, "up"):
                assert flux.state(job) == "CLEANUP"
            flux.wait(job, "clean")
    assert not flux.contexts(job, "exception")


def test_nothing_is_held_where_there_is_no_service(flux):
    with flux.plugin("release"):
        job = flux.submit(SLICE, QUICK, "true")
        flux.wait(job, "clean")
    assert flux.contexts(job, "epilog-finish")[0]["status"] == 0


def test_the_site_s_policy_is_applied_at_submission_in_its_own_words(flux):
    flux.ok("config", "load", stdin='[dovetail-policy]\nmax-nodes = 1\ncontact = "ask us"\n')
    with flux.plugin("carve"):
        words = ("submit", "-N1", "--setattr=user.dovetail.cores=1", QUICK)
        refused = flux.run(*words, "--setattr=user.dovetail.nodes=2", "true")
        job = flux.ok(*words, "--setattr=user.dovetail.nodes=1", "true")
        wrong = flux.run("config", "load", stdin="[dovetail-policy]\nmax-node = 1\n")
    assert "dovetail: nodes=2 is more than the 1 allowed here; ask us" in refused.stderr
    assert flux.ok("jobs", "-no", "{annotations.user.dovetail.nodes}", job) == "1"
    assert "dovetail-policy.max-node is not known" in wrong.stderr
