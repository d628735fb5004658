# SPDX-License-Identifier: LGPL-3.0-or-later
"""The manual page of the Lua interface has all of it, and its examples work."""

from __future__ import annotations

import fnmatch
import json
import re

import pytest
from support import flux_lua, lua_core
from support.flux_lua import TOPICS

PAGE = (lua_core.TOP / "doc" / "dovetail-jobtap.7").read_text()
QUICK = "--setattr=system.exec.test.run_duration=0.001s"


def registered(source: str) -> list[str]:
    """The names that a C file gives to Lua."""
    text = (lua_core.TOP / "jobtap" / source).read_text()
    return re.findall(r'\{"(\w+)",\s*\w+\}', text)


def examples() -> dict[str, str]:
    """The scripts of the page, by name."""
    blocks = re.findall(r"\.Bd -literal[^\n]*\n-- (\w+)\.lua\n(.*?)\.Ed", PAGE, re.DOTALL)
    return {name: text.replace("\\e", "\\") for name, text in blocks}


@pytest.mark.unit
@pytest.mark.parametrize(("source", "table"), [("api.c", "jobtap."), ("action.c", "job:")])
def test_every_function_is_in_the_manual_page(source, table):
    names = registered(source)
    assert len(names) >= 3
    assert [name for name in names if f"Fn {table}{name} " not in PAGE.replace("\n", " ")] == []


@pytest.mark.unit
def test_every_function_of_the_manual_page_is_there():
    names = re.findall(r"Fn (jobtap\.\w+|job:\w+)", PAGE)
    there = {f"jobtap.{name}" for name in registered("api.c")}
    there |= {f"job:{name}" for name in registered("action.c")}
    assert set(names) == there


@pytest.mark.unit
def test_every_topic_of_the_manual_page_is_tested():
    text = re.search(r"for a topic of\n(.*?)\.\n", PAGE, re.DOTALL).group(1)
    topics = re.findall(r"Ql (job\.[\w.-]+)", text)
    assert len(topics) >= 12
    patterns = [re.sub(r"[A-Z]+", "*", topic) for topic in topics]
    assert [one for one in patterns if not fnmatch.filter(TOPICS, one)] == []
    assert [one for one in TOPICS if not any(fnmatch.fnmatch(one, p) for p in patterns)] == []


@pytest.mark.unit
def test_every_library_function_is_in_the_manual_page():
    text = (lua_core.TOP / "jobtap" / "libraries.c").read_text()
    base = re.search(r"base\[\] = \{(.*?)NULL", text, re.DOTALL).group(1)
    for name in re.findall(r'"(\w+)"', base):
        assert re.search(rf"Fn {name}\b", PAGE), name


@pytest.mark.unit
def test_every_policy_key_is_in_the_manual_page():
    text = (lua_core.TOP / "jobtap" / "carve.lua").read_text()
    table = re.search(r"local keys = \{(.*?)\}", text, re.DOTALL).group(1)
    keys = re.findall(r'([\w-]+)"?\]? = "', table)
    assert len(keys) == 7
    assert [key for key in keys if f".It Va {key}" not in PAGE] == []


@pytest.mark.unit
@pytest.mark.parametrize("lua", lua_core.VERSIONS)
@pytest.mark.parametrize("name", ["long", "licence"])
def test_an_example_is_correct_lua(name, lua):
    host = "jobtap = { on = function() end } function main() return true end"
    assert lua_core.run([lua_core.build(lua)], "{}", host, examples()[name]) == "true"


@pytest.mark.unit
@pytest.mark.parametrize("lua", lua_core.VERSIONS)
@pytest.mark.parametrize(("duration", "long"), [(0, True), (None, True), (60, False), (1e6, True)])
def test_the_example_for_long_jobs_takes_those_without_a_limit_for_such(duration, long, lua):
    host = """
        local handlers = {}
        jobtap = { on = function(topic, handler) handlers[topic] = handler end }
        function main(jobspec)
            local job = { jobspec = jobspec, reject = function(_, why) error(why, 0) end }
            handlers["job.validate"](job)
            return true
        end"""
    spec = {
        "resources": [{"type": "node", "count": 5}],
        "attributes": {"system": {"duration": duration}},
    }
    done = lua_core.run([lua_core.build(lua)], json.dumps(spec), host, examples()["long"])
    assert done == ("error: long jobs have at most 4 nodes" if long else "true")


@pytest.mark.unit
def test_a_plugin_of_ours_is_short():
    plugins = list((lua_core.TOP / "jobtap").glob("*.lua"))
    assert len(plugins) == 3
    assert [path.name for path in plugins if len(path.read_text().splitlines()) >= 120] == []


@pytest.mark.flux
def test_the_examples_do_what_the_page_says():
    with flux_lua.instance() as flux:
        flux.ok("config", "load", stdin="[long-jobs]\nseconds = 60\nnodes = 1\n")
        with flux.plugin("long", examples()["long"]):
            refused = flux.run("submit", "-N2", "-t", "2m", QUICK, "true")
            assert "long jobs have at most 1 nodes" in refused.stderr
            assert flux.run("submit", "-N2", QUICK, "true").returncode != 0, "it has no limit"
            flux.ok("submit", "-N1", "-t", "2m", QUICK, "true")
        with flux.plugin("licence", examples()["licence"]):
            job = flux.submit("--dependency=licence:matlab", QUICK, "true")
            flux.wait(job, "clean")
            found = flux.query("licence")
        (raised,) = flux.contexts(job, "exception")
        assert raised["note"] == "no licence for matlab: licence.take: no such service"
        assert found["errors"] == 0, found["last_error"]
