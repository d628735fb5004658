// SPDX-License-Identifier: LGPL-3.0-or-later
// See callback.h. A failed script rejects the job that it was to judge, and otherwise never makes a
// callback of the job manager fail, since that would keep it from other plugins.
#include "callback.h"

#include <jansson.h>
#include <lauxlib.h>

#include "bounds.h"
#include "convert.h"
#include "job.h"
#include "json.h"
#include "record.h"
#include "sandbox.h"

// Flux leaves a job where it is if its priority makes no sense, without a word.
static const char *complaint(json_t *out)
{
    json_t *priority = json_object_get(out, "priority");
    json_t *annotations = json_object_get(out, "annotations");
    json_t *updates = json_object_get(out, "updates");

    if (priority && !json_is_false(priority) &&
        (!json_is_integer(priority) || json_integer_value(priority) < FLUX_JOB_PRIORITY_MIN ||
         json_integer_value(priority) > FLUX_JOB_PRIORITY_MAX))
        return "priority is a whole number from 0 to 4294967295, or false";
    if (annotations && !json_is_object(annotations))
        return "annotations is a table of named values";
    if (updates && !json_is_object(updates))
        return "updates is a table of named values";
    return NULL;
}

static void pack_priority(struct call *call, json_t *out)
{
    if (json_is_false(json_object_get(out, "priority"))) {
        json_object_del(out, "priority");
        flux_jobtap_priority_unavail(call->host->p, call->args);
    }
}

// Lua's side of a callback: function(job or configuration, topic), whose table, if it returns
// one, becomes output arguments.
static int run_handler(lua_State *L)
{
    struct call *call = lua_touserdata(L, 1);
    json_t *conf = NULL, *out;
    const char *wrong;

    lua_rawgeti(L, LUA_REGISTRYINDEX, call->handler->function);
    if (call->id != FLUX_JOBID_ANY)
        job_push(L, call->id);
    else if (flux_plugin_arg_unpack(call->args, FLUX_PLUGIN_ARG_IN, "{s:o}", "conf", &conf) == 0)
        json_push(L, conf);
    else
        lua_pushnil(L);
    lua_pushstring(L, call->topic);
    lua_call(L, 2, 1);
    if (lua_isnil(L, -1))
        return 0;
    if (!lua_istable(L, -1))
        return luaL_error(L, "%s: a callback returns a table or nothing, not a %s", call->topic,
                          luaL_typename(L, -1));
    lua_pushnil(L);
    if (lua_next(L, -2) == 0)
        return 0;
    lua_pop(L, 2);
    if (!json_is_object(out = json_from_lua(L, -1)))
        return luaL_error(L, "%s: the keys of a returned table are text", call->topic);
    if (call->id != FLUX_JOBID_ANY && (wrong = complaint(out)))
        return luaL_error(L, "%s: %s", call->topic, wrong);
    pack_priority(call, out);
    if (flux_plugin_arg_pack(call->args, FLUX_PLUGIN_ARG_OUT, "O", out) < 0)
        return luaL_error(L, "%s: %s", call->topic, flux_plugin_arg_strerror(call->args));
    return 0;
}

// Whoever is switched off cannot say yes.
static int refuse_unjudged(struct call *call)
{
    struct host *host = call->host;

    return host_refuse(host, call->args, "%s: %s", host_name(host), bounds_reason(host));
}

int callback_run(struct call *call)
{
    struct host *host = call->host;
    bool rejects = topic_may_reject(call->topic);
    char error[SANDBOX_ERROR_SIZE];
    struct visit visit;
    int rc;

    if (bounds_enter(&visit, host, call->id, call->topic, false) < 0)
        return rejects ? refuse_unjudged(call) : 0;

    call->outer = host->call;
    host->call = call;
    host->calls++;
    call->handler->calls++;
    rc = sandbox_call(host->sandbox, run_handler, call, error);
    host->call = call->outer;
    if (rc < 0)
        rejects ? record_failed(host, FLUX_JOBID_ANY, call->topic, error)
                : bounds_failed(&visit, rc, error);
    bounds_leave(&visit);
    if (rc == 0 || call->rejected)
        return call->rejected ? -1 : 0;
    if (rc == SANDBOX_STOPPED)
        return rejects ? refuse_unjudged(call) : 0;
    if (rejects)
        return host_refuse(host, call->args, "%s failed: %s", host_name(host), error);
    return call->id == FLUX_JOBID_ANY ? host_refuse(host, call->args, "%s", error) : 0;
}

int callback_job(flux_plugin_t *p, const char *topic, flux_plugin_arg_t *args, void *arg)
{
    struct handler *handler = arg;
    struct call call = {
        .host = handler->host,
        .handler = handler,
        .topic = topic,
        .args = args,
    };
    json_int_t id;

    (void)p;
    if (flux_plugin_arg_unpack(args, FLUX_PLUGIN_ARG_IN, "{s:I}", "id", &id) < 0)
        return -1;
    call.id = id;
    return callback_run(&call);
}
