# SPDX-License-Identifier: LGPL-3.0-or-later
"""Lua in the job manager can neither hang, escape nor abort it, and leaks nothing."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from support import lua_core

pytestmark = pytest.mark.unit

each_lua = pytest.mark.parametrize("lua", lua_core.VERSIONS)

# Lua says that this table is at least 2^40 long.
GAPS = "local t = {} repeat local n = #t for k = 0, 45 do t[n + 1 << k] = 1 end until n >= 1 << 40 "

# What a script does, and what becomes of it.
RUNAWAY = {
    "a loop without end": ("while true do end", "script0.lua:2: stopped after"),
    "a loop in C": (
        "local t = {} for i = 1, 400000 do t[i] = i % 7 end while true do table.sort(t) end",
        "stopped after",
    ),
    # Whichever of the two it meets first.
    "recursion without end": (
        "local function f() return 1 + f() end f()",
        "not enough memory|stopped after",
    ),
    "text that doubles": ("local s = 'x' while true do s = s .. s end", "not enough memory"),
    "a table that grows": ("local t = {} while true do t[#t + 1] = {} end", "error: "),
    "too many results": ("return table.unpack({}, 1, 1e8)", "too many results to unpack"),
    "an insertion among gaps": (GAPS + "table.insert(t, 1, 0)", "script0.lua:2: .* with gaps"),
    "a removal among gaps": (GAPS + "table.remove(t, 1)", "script0.lua:2: .* with gaps"),
    "an error that is a table": ("error({})", "error of type table"),
    "an error of broken text": ("error('a\\xffb\\n', 0)", "error: a b"),
    "an error without end": ("error(('x'):upper() .. tostring(error), 0)", "error: X"),
    "a changed view": ("document.a = 1", "a JSON value cannot be changed"),
}

# Names that would let a script out of the sandbox, or let it hang.
ABSENT = (
    "os", "io", "debug", "package", "coroutine", "utf8", "load", "loadstring", "dofile", "loadfile",
    "require", "pcall", "xpcall", "collectgarbage", "setmetatable", "getmetatable", "rawset",
    "rawget", "rawequal", "rawlen", "print", "_G", "string.find", "string.match", "string.gmatch",
    "string.gsub", "string.rep", "string.dump", "string.pack", "string.unpack", "table.move",
    "('').find", "('').rep", "('').gsub", "('').dump",
)  # fmt: skip

JSON = {
    "scalars": ("{a = 1, b = 2.5, c = true, d = 'x'}", '{"a":1,"b":2.5,"c":true,"d":"x"}'),
    "a list": ("{1, 'x', {2}}", '[1,"x",[2]]'),
    "nothing": ("{}", "{}"),
    "a view": ("{v = document}", '{"v":{"a":1,"b":[1,2,3],"c":null}}'),
    "a large integer": ("math.maxinteger", "9223372036854775807"),
    "a function": ("{f = error}", "a value of a kind that JSON does not have"),
    "itself": ("(function() local t = {} t.t = t return t end)()", "nested too deeply"),
    "what doubles": (
        "(function() local t = {} for _ = 1, 30 do t = {t, t} end return t end)()", "too large",
    ),
    "both kinds of keys": ("{1, a = 2}", "keys of both kinds"),
    "keys that are numbers": ("{[7] = 1}", "a table key that is not text"),
    "not a number": ("0/0", "not finite"),
    "infinity": ("{1/0}", "not finite"),
    "broken text": ("'\\xff'", "not UTF-8"),
    "a broken key": ("{['\\xff'] = 1}", "not UTF-8"),
    "megabytes of text": (
        "(function() local s = 'x' while #s < 5e6 do s = s .. s end return s end)()", "too large",
    ),
}  # fmt: skip

VIEWS = {
    "a member": ("document.a", "1"),
    "an item": ("document.b[3]", "3"),
    "one that is not there": ("tostring(document.x)", '"nil"'),
    "one beyond the end": ("tostring(document.b[4])", '"nil"'),
    "one of the wrong kind": ("tostring(document[1])", '"nil"'),
    "null": ("tostring(document.c)", '"nil"'),
    "the length": ("#document.b", "3"),
    "as text": ("tostring(document.b)", '"[1,2,3]"'),
    "all items": (
        "(function() local n = 0 for _, v in ipairs(document.b) do n = n + v end return n end)()",
        "6",
    ),
    "all members": (
        "(function() local n = '' for k in pairs(document) do n = n .. k end return n end)()",
        '"abc"',
    ),
    "all pairs of a list": (
        "(function() local n = 0 for k, v in pairs(document.b) do n = n + k * v end "
        "return n end)()",
        "14",
    ),
}
DOCUMENT = '{"a": 1, "b": [1, 2, 3], "c": null}'


def returning(expression: str) -> str:
    """A script that returns the value of an expression."""
    return f"function main(document)\n return {expression}\nend"


def doing(statements: str) -> str:
    """A script that does something."""
    return f"function main(document)\n{statements}\nend"


@each_lua
@pytest.mark.parametrize("what", RUNAWAY)
def test_a_script_that_does_this_is_ended_with_an_error(lua, what):
    statements, outcome = RUNAWAY[what]
    assert re.search(outcome, lua_core.run([lua_core.build(lua)], DOCUMENT, doing(statements)))


@each_lua
def test_after_a_runaway_the_script_can_be_called_again(lua):
    script = """
        local calls = 0
        again = true
        function main()
            calls = calls + 1
            if calls == 1 then local t = {} while true do t[#t + 1] = {1, 2, 3} end end
            return calls
        end"""
    printed = lua_core.run([lua_core.build(lua)], DOCUMENT, script).splitlines()
    assert printed[0].startswith("error: ")
    assert printed[1] == "2"


@each_lua
@pytest.mark.parametrize("name", ABSENT)
def test_a_script_does_not_find_what_could_hang_or_escape(lua, name):
    outer = name.rpartition(".")[0]
    expression = f"{name} == nil" if outer else f"tostring({name}) == 'nil'"
    assert lua_core.run([lua_core.build(lua)], DOCUMENT, returning(expression)) == "true"


@each_lua
def test_precompiled_code_is_refused(lua, tmp_path):
    script = tmp_path / "code.lua"
    script.write_bytes(b"\x1bLuaS\x00\x19\x93\r\n\x1a\n")
    assert "attempt to load a binary chunk" in lua_core.run(
        [lua_core.build(lua)], DOCUMENT, str(script)
    )


@each_lua
@pytest.mark.parametrize("what", JSON)
def test_a_lua_value_becomes_json_or_an_error(lua, what):
    expression, outcome = JSON[what]
    printed = lua_core.run([lua_core.build(lua)], DOCUMENT, returning(expression))
    assert outcome == printed or (printed.startswith("error: ") and outcome in printed)


@each_lua
def test_views_with_megabytes_of_text_do_not_become_json_over_and_over(lua):
    script = doing("local t = {} for i = 1, 50 do t[i] = document end return t")
    printed = lua_core.run([lua_core.build(lua)], json.dumps({"text": "x" * 100_000}), script)
    assert printed == "error: cannot be made JSON: too large"


@each_lua
@pytest.mark.parametrize("what", VIEWS)
def test_json_is_seen_without_being_copied(lua, what):
    expression, outcome = VIEWS[what]
    assert lua_core.run([lua_core.build(lua)], DOCUMENT, returning(expression)) == outcome


@each_lua
def test_the_cap_of_memory_is_what_was_asked_for(lua):
    script = doing("local t = {} for i = 1, 200000 do t[i] = i end return #t")
    program = lua_core.build(lua)
    assert lua_core.run([program, "--memory=8"], DOCUMENT, script).startswith("200000")
    assert "not enough memory" in lua_core.run([program, "--memory=1"], DOCUMENT, script)


def everything() -> list[str]:
    """Each thing that tests do above, as one script each."""
    return [
        *(doing(statements) for statements, _ in RUNAWAY.values()),
        *(returning(expression) for expression, _ in (*JSON.values(), *VIEWS.values())),
        "function main() stop() end",
        "function main( = ",
    ]


@pytest.mark.slow
@each_lua
def test_nothing_leaks_or_is_undefined_whatever_a_script_does(lua):
    program = lua_core.build(lua, *lua_core.SANITIZE)
    for script in everything():
        assert lua_core.run([program, "--memory=4"], DOCUMENT, script)


@pytest.mark.slow
@each_lua
def test_valgrind_finds_nothing(lua):
    if not shutil.which("valgrind"):
        pytest.skip("no valgrind here")
    words = ["valgrind", "-q", "--error-exitcode=99", "--leak-check=full"]
    words += ["--errors-for-leak-kinds=all", "--show-leak-kinds=all", lua_core.build(lua)]
    scripts = [RUNAWAY["an error that is a table"][0]]
    scripts = [*map(doing, scripts), returning(JSON["both kinds of keys"][0]), *everything()[-4:]]
    for script in scripts:
        # Under valgrind all takes long, on a busy machine longer than a callback may.
        assert lua_core.run([*words, "--memory=2", "--seconds=60"], DOCUMENT, script)
