// SPDX-License-Identifier: LGPL-3.0-or-later
// See libraries.h.
#include "libraries.h"

#include <lauxlib.h>
#include <lualib.h>

enum { MAX_LENGTH = 1 << 21 };

static void keep_only(lua_State *L, const char *const names[])
{
    lua_newtable(L);
    for (; *names; names++) {
        lua_getfield(L, -2, *names);
        lua_setfield(L, -2, *names);
    }
    lua_remove(L, -2);
}

// Lua takes a few keys far apart for a table that is as long as the last of them, and would move so
// many values; no table without gaps is as long in a sandbox.
static int of_bounded_length(lua_State *L)
{
    luaL_argcheck(L, lua_rawlen(L, 1) <= MAX_LENGTH, 1, "a table with gaps");
    return lua_tocfunction(L, lua_upvalueindex(1))(L);
}

static void bound_length(lua_State *L, const char *name)
{
    lua_getfield(L, -1, name);
    lua_pushcclosure(L, of_bounded_length, 1);
    lua_setfield(L, -2, name);
}

// What is left out: patterns and string.rep("", 2^62) never end; so do table functions whose
// range or length comes from arguments or metatables, hence no setmetatable and no table.move;
// pcall could catch a cap's error; the rest reads files or loads code.
int libraries_open(lua_State *L)
{
    static const char *const base[] = {"assert", "error",    "ipairs",   "next", "pairs",
                                       "select", "tonumber", "tostring", "type", NULL};
    static const char *const string[] = {"byte",  "char",    "format", "len", "lower",
                                         "upper", "reverse", "sub",    NULL};
    static const char *const table[] = {"concat", "insert", "pack", "remove",
                                        "sort",   "unpack", NULL};

    luaL_requiref(L, "_G", luaopen_base, 0);
    keep_only(L, base);
    luaL_requiref(L, LUA_STRLIBNAME, luaopen_string, 0);
    keep_only(L, string);
    lua_pushliteral(L, "");
    lua_getmetatable(L, -1);
    lua_pushvalue(L, -3);
    lua_setfield(L, -2, "__index"); // s:gsub() must not find what string.gsub does not
    lua_pop(L, 2);
    lua_setfield(L, -2, LUA_STRLIBNAME);
    luaL_requiref(L, LUA_TABLIBNAME, luaopen_table, 0);
    keep_only(L, table);
    bound_length(L, "insert");
    bound_length(L, "remove");
    lua_setfield(L, -2, LUA_TABLIBNAME);
    luaL_requiref(L, LUA_MATHLIBNAME, luaopen_math, 0);
    lua_setfield(L, -2, LUA_MATHLIBNAME);
    lua_rawseti(L, LUA_REGISTRYINDEX, LUA_RIDX_GLOBALS);
    return 0;
}
