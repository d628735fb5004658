// SPDX-License-Identifier: LGPL-3.0-or-later
// See job.h.
#include "job.h"

#include <errno.h>
#include <jansson.h>
#include <lauxlib.h>
#include <string.h>

#include "host.h"
#include "json.h"
#include "record.h"
#include "sandbox.h"

struct job {
    flux_jobid_t id;
};

static const char job_type[] = "jobtap.job";

void job_push(lua_State *L, flux_jobid_t id)
{
    struct job *job = lua_newuserdata(L, sizeof(*job));

    job->id = id;
    luaL_setmetatable(L, job_type);
}

static struct call *call_of(struct host *host, flux_jobid_t id)
{
    struct call *call = host->call;

    while (call && call->id != id)
        call = call->outer;
    return call;
}

flux_jobid_t job_check(lua_State *L)
{
    struct job *job = luaL_checkudata(L, 1, job_type);

    return job->id;
}

// --- fields ---

static json_t *argument(flux_plugin_arg_t *args, const char *key)
{
    json_t *value = NULL;

    flux_plugin_arg_unpack(args, FLUX_PLUGIN_ARG_IN, "{s:o}", key, &value);
    return value;
}

static int push_field(lua_State *L, const char *key, json_t *value)
{
    if (value && (strcmp(key, "state") == 0 || strcmp(key, "prev_state") == 0))
        lua_pushstring(L, flux_job_statetostr(json_integer_value(value), "L"));
    else
        json_push(L, value);
    return 1;
}

static int push_looked_up(lua_State *L, struct host *host, flux_jobid_t id, const char *key)
{
    json_t **box = json_box(L); // keeps the value while Lua may raise errors
    flux_plugin_arg_t *args = flux_jobtap_job_lookup(host->p, id);

    if (args)
        *box = json_incref(argument(args, key));
    flux_plugin_arg_destroy(args);
    return push_field(L, key, *box);
}

// A Lua table that lives as long as the job, or until the plugin is removed.
static int push_data(lua_State *L, struct host *host, flux_jobid_t id)
{
    struct record *record = record_get(host, id);

    if (!record)
        return luaL_error(L, "job.data: %s", strerror(errno));
    if (record->data == LUA_NOREF) {
        lua_newtable(L);
        record->data = luaL_ref(L, LUA_REGISTRYINDEX);
    }
    lua_rawgeti(L, LUA_REGISTRYINDEX, record->data);
    return 1;
}

static int push_f58(lua_State *L, flux_jobid_t id)
{
    char buffer[64];

    if (flux_job_id_encode(id, "f58", buffer, sizeof(buffer)) < 0)
        return luaL_error(L, "job.f58: %s", strerror(errno));
    lua_pushstring(L, buffer);
    return 1;
}

static int job_index(lua_State *L)
{
    struct host *host = sandbox_owner(L);
    struct job *job = luaL_checkudata(L, 1, job_type);
    const char *key = luaL_checkstring(L, 2);
    struct call *call;

    if (luaL_getmetafield(L, 1, "methods") != LUA_TNIL && lua_getfield(L, -1, key) != LUA_TNIL)
        return 1;
    if (strcmp(key, "id") == 0)
        return lua_pushinteger(L, job->id), 1;
    if (strcmp(key, "f58") == 0)
        return push_f58(L, job->id);
    if (strcmp(key, "data") == 0)
        return push_data(L, host, job->id);
    if ((call = call_of(host, job->id)))
        return push_field(L, key, argument(call->args, key));
    return push_looked_up(L, host, job->id, key);
}

void job_open(lua_State *L)
{
    luaL_newmetatable(L, job_type);
    lua_pushcfunction(L, job_index);
    lua_setfield(L, -2, "__index");
    lua_insert(L, -2); // the methods are on top again
    lua_setfield(L, -2, "methods");
    lua_pop(L, 1);
}
