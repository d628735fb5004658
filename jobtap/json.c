// SPDX-License-Identifier: LGPL-3.0-or-later
// The read-only views of json.h.
#include "json.h"

#include <lauxlib.h>

enum { MAX_TEXT = 4 << 20 };

static const char view_key; // its address is the metatable's key in the registry

json_t **json_box(lua_State *L)
{
    json_t **box = lua_newuserdata(L, sizeof(*box));

    *box = NULL;
    lua_rawgetp(L, LUA_REGISTRYINDEX, &view_key);
    lua_setmetatable(L, -2);
    return box;
}

json_t **json_to_box(lua_State *L, int index)
{
    json_t **box = lua_touserdata(L, index);
    int same;

    if (!box || !lua_getmetatable(L, index))
        return NULL;
    lua_rawgetp(L, LUA_REGISTRYINDEX, &view_key);
    same = lua_rawequal(L, -1, -2);
    lua_pop(L, 2);
    return same ? box : NULL;
}

static json_t *check_view(lua_State *L)
{
    json_t **box = json_to_box(L, 1);

    luaL_argcheck(L, box && *box, 1, "not a JSON value");
    return *box;
}

void json_push(lua_State *L, json_t *value)
{
    switch (value ? json_typeof(value) : JSON_NULL) {
    case JSON_NULL:
        lua_pushnil(L);
        break;
    case JSON_TRUE:
    case JSON_FALSE:
        lua_pushboolean(L, json_is_true(value));
        break;
    case JSON_INTEGER:
        lua_pushinteger(L, json_integer_value(value));
        break;
    case JSON_REAL:
        lua_pushnumber(L, json_real_value(value));
        break;
    case JSON_STRING:
        lua_pushlstring(L, json_string_value(value), json_string_length(value));
        break;
    default:
        *json_box(L) = json_incref(value);
    }
}

static int view_index(lua_State *L)
{
    json_t *view = check_view(L);

    if (json_is_object(view) && lua_type(L, 2) == LUA_TSTRING)
        json_push(L, json_object_get(view, lua_tostring(L, 2)));
    else if (json_is_array(view) && lua_isinteger(L, 2) && lua_tointeger(L, 2) > 0)
        json_push(L, json_array_get(view, lua_tointeger(L, 2) - 1));
    else
        lua_pushnil(L);
    return 1;
}

static int view_newindex(lua_State *L)
{
    return luaL_error(L, "a JSON value cannot be changed");
}

static int view_len(lua_State *L)
{
    lua_pushinteger(L, json_array_size(check_view(L)));
    return 1;
}

static int next_entry(lua_State *L, json_t *view)
{
    void *entry;

    if (lua_isnil(L, 2))
        entry = json_object_iter(view);
    else if ((entry = json_object_iter_at(view, luaL_checkstring(L, 2))))
        entry = json_object_iter_next(view, entry);
    if (!entry)
        return lua_pushnil(L), 1;
    lua_pushstring(L, json_object_iter_key(entry));
    json_push(L, json_object_iter_value(entry));
    return 2;
}

static int view_next(lua_State *L)
{
    json_t *view = check_view(L);
    lua_Integer i;

    lua_settop(L, 2);
    if (json_is_object(view))
        return next_entry(L, view);
    i = luaL_optinteger(L, 2, 0);
    if (i < 0 || (size_t)i >= json_array_size(view))
        return lua_pushnil(L), 1;
    lua_pushinteger(L, i + 1);
    json_push(L, json_array_get(view, i));
    return 2;
}

static int view_pairs(lua_State *L)
{
    check_view(L);
    lua_pushcfunction(L, view_next);
    lua_pushvalue(L, 1);
    lua_pushnil(L);
    return 3;
}

static int view_tostring(lua_State *L)
{
    json_t *view = check_view(L);
    size_t size = json_dumpb(view, NULL, 0, JSON_COMPACT | JSON_ENCODE_ANY);
    char *text;

    luaL_argcheck(L, size <= MAX_TEXT, 1, "too large to print");
    text = lua_newuserdata(L, size + 1);
    lua_pushlstring(L, text, json_dumpb(view, text, size, JSON_COMPACT | JSON_ENCODE_ANY));
    return 1;
}

static int view_gc(lua_State *L)
{
    json_t **box = json_to_box(L, 1);

    if (box) {
        json_decref(*box);
        *box = NULL;
    }
    return 0;
}

void json_open(lua_State *L)
{
    static const luaL_Reg methods[] = {
        {"__index", view_index},
        {"__newindex", view_newindex},
        {"__len", view_len},
        {"__pairs", view_pairs},
        {"__tostring", view_tostring},
        {"__gc", view_gc},
        {NULL, NULL},
    };

    luaL_newlib(L, methods);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &view_key);
}
