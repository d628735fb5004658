// SPDX-License-Identifier: LGPL-3.0-or-later
// See convert.h. No function before json_from_lua() raises an error or lets Lua
// allocate: the part that is already converted would leak.
#include "convert.h"

#include <lauxlib.h>
#include <math.h>

#include "json.h"

enum { MAX_DEPTH = 32, MAX_VALUES = 1 << 16, MAX_TEXT = 4 << 20 };

struct conversion {
    int values;
    size_t text;
    const char *error;
};

static json_t *convert(lua_State *L, struct conversion *c, int depth);

static json_t *fail(struct conversion *c, json_t *partial, const char *error)
{
    if (!c->error)
        c->error = error;
    json_decref(partial);
    return NULL;
}

static void weigh(json_t *value, struct conversion *c)
{
    const char *key;
    json_t *member;
    size_t i;

    c->values++;
    c->text += json_string_length(value);
    json_object_foreach(value, key, member) weigh(member, c);
    json_array_foreach(value, i, member) weigh(member, c);
}

// A view is copied, since whoever gets the JSON may change it.
static json_t *convert_view(json_t *view, struct conversion *c)
{
    weigh(view, c);
    if (c->values > MAX_VALUES || c->text > MAX_TEXT)
        return fail(c, NULL, "too large");
    return json_deep_copy(view);
}

static json_t *convert_text(lua_State *L, struct conversion *c)
{
    size_t size;
    const char *text = lua_tolstring(L, -1, &size);
    json_t *value;

    if ((c->text += size) > MAX_TEXT)
        return fail(c, NULL, "too large");
    if (!(value = json_stringn(text, size)))
        return fail(c, NULL, "text that is not UTF-8");
    return value;
}

static json_t *convert_number(lua_State *L, struct conversion *c)
{
    lua_Number number = lua_tonumber(L, -1);

    if (lua_isinteger(L, -1))
        return json_integer(lua_tointeger(L, -1));
    return isfinite(number) ? json_real(number) : fail(c, NULL, "a number that is not finite");
}

static json_t *convert_array(lua_State *L, struct conversion *c, int depth)
{
    json_t *array = json_array();
    lua_Integer i, n = lua_rawlen(L, -1), keys = 0;
    json_t *value;

    for (i = 1; i <= n; i++) {
        lua_rawgeti(L, -1, i);
        value = convert(L, c, depth + 1);
        lua_pop(L, 1);
        if (!value || json_array_append_new(array, value) < 0)
            return fail(c, array, "out of memory");
    }
    for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1))
        keys++;
    return keys == n ? array : fail(c, array, "a table with keys of both kinds");
}

static json_t *convert_object(lua_State *L, struct conversion *c, int depth)
{
    json_t *object = json_object();
    json_t *value;

    for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
        if (lua_type(L, -2) != LUA_TSTRING || !(value = convert(L, c, depth + 1))) {
            lua_pop(L, 2);
            return fail(c, object, "a table key that is not text");
        }
        if (json_object_set_new(object, lua_tostring(L, -2), value) < 0) {
            lua_pop(L, 2);
            return fail(c, object, "a table key that is not UTF-8");
        }
    }
    return object;
}

static json_t *convert(lua_State *L, struct conversion *c, int depth)
{
    json_t **box;

    if (depth > MAX_DEPTH || !lua_checkstack(L, 8))
        return fail(c, NULL, "nested too deeply");
    if (++c->values > MAX_VALUES)
        return fail(c, NULL, "too large");
    switch (lua_type(L, -1)) {
    case LUA_TNIL:
        return json_null();
    case LUA_TBOOLEAN:
        return json_boolean(lua_toboolean(L, -1));
    case LUA_TNUMBER:
        return convert_number(L, c);
    case LUA_TSTRING:
        return convert_text(L, c);
    case LUA_TTABLE:
        return lua_rawlen(L, -1) > 0 ? convert_array(L, c, depth) : convert_object(L, c, depth);
    case LUA_TUSERDATA:
        if ((box = json_to_box(L, -1)) && *box)
            return convert_view(*box, c);
        // fall through
    default:
        return fail(c, NULL, "a value of a kind that JSON does not have");
    }
}

json_t *json_from_lua(lua_State *L, int index)
{
    struct conversion c = {0};
    json_t **box;

    index = lua_absindex(L, index);
    box = json_box(L);
    lua_pushvalue(L, index);
    *box = convert(L, &c, 0);
    lua_pop(L, 1);
    if (!*box)
        luaL_error(L, "cannot be made JSON: %s", c.error ? c.error : "out of memory");
    return *box;
}
