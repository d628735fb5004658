// SPDX-License-Identifier: LGPL-3.0-or-later
// A jobtap plugin that runs a jobtap plugin written in Lua: X.so, a link to this library, runs
// the X.lua beside it. See dovetail-jobtap(7).
//
// Steps: 2 (carve) and 3 (up). Inputs: the topics of flux-jobtap-plugins(7), the instance's
// configuration. Outputs: whatever the script does to jobs, errors in the log and on jobs.
// Invariants: every way into Lua goes through sandbox_call(); a failed script rejects the job it
// was to judge and otherwise never makes a callback of the job manager fail, since that would
// keep it from other plugins.
#include "host.h"

#include <errno.h>
#include <lauxlib.h>
#include <stdlib.h>
#include <string.h>
#include <syslog.h>

const char *host_name(const struct host *host)
{
    return strrchr(host->script, '/') + 1;
}

void host_failed(struct host *host, flux_jobid_t id, const char *where, const char *error)
{
    char reason[SANDBOX_ERROR_SIZE + 64];

    host->errors++;
    snprintf(host->last_error, sizeof(host->last_error), "%s", error);
    flux_log(host->h, LOG_ERR, "jobtap: %s: %s: %s", host_name(host), where, error);
    if (id == FLUX_JOBID_ANY)
        return;
    snprintf(reason, sizeof(reason), "%s failed: %s", host_name(host), error);
    record_abandon(host, id, reason);
}

// --- one callback ---

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
    pack_priority(call, out);
    if (flux_plugin_arg_pack(call->args, FLUX_PLUGIN_ARG_OUT, "O", out) < 0)
        return luaL_error(L, "%s: %s", call->topic, flux_plugin_arg_strerror(call->args));
    return 0;
}

static int run_call(struct call *call)
{
    struct host *host = call->host;
    char error[SANDBOX_ERROR_SIZE];
    bool rejects;
    int rc;

    call->outer = host->call;
    host->call = call;
    host->calls++;
    call->handler->calls++;
    rc = sandbox_call(host->sandbox, run_handler, call, error);
    host->call = call->outer;
    if (rc == 0 || (rc == SANDBOX_STOPPED && call->rejected))
        return call->rejected ? -1 : 0;
    rejects = topic_may_reject(call->topic);
    host_failed(host, rejects ? FLUX_JOBID_ANY : call->id, call->topic, error);
    if (rejects)
        return flux_jobtap_reject_job(host->p, call->args, "%s failed: %s", host_name(host), error);
    return call->id == FLUX_JOBID_ANY ? flux_jobtap_error(host->p, call->args, "%s", error) : 0;
}

int host_job_callback(flux_plugin_t *p, const char *topic, flux_plugin_arg_t *args, void *arg)
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
    return run_call(&call);
}

// --- the plugin ---

// The first configuration refuses a broken script, since only here its error reaches the user.
static int conf_callback(flux_plugin_t *p, const char *topic, flux_plugin_arg_t *args, void *arg)
{
    struct host *host = arg;
    struct call call = {.host = host, .topic = topic, .args = args, .id = FLUX_JOBID_ANY};

    if (!host->loaded)
        return flux_jobtap_error(p, args, "%s", host->last_error);
    call.handler = handler_find(host, topic);
    return call.handler ? run_call(&call) : 0;
}

static json_t *topic_counts(const struct host *host)
{
    json_t *counts = json_object();
    struct handler *handler;

    for (handler = host->handlers; handler; handler = handler->next)
        json_object_set_new(counts, handler->topic, json_integer(handler->calls));
    return counts;
}

static int query_callback(flux_plugin_t *p, const char *topic, flux_plugin_arg_t *args, void *arg)
{
    struct host *host = arg;
    struct call call = {.host = host, .topic = topic, .args = args, .id = FLUX_JOBID_ANY};

    if (flux_plugin_arg_pack(
            args, FLUX_PLUGIN_ARG_OUT, "{s:s s:s s:I s:I s:s s:i s:I s:o}", "script", host->script,
            "lua", LUA_VERSION, "calls", (json_int_t)host->calls, "errors",
            (json_int_t)host->errors, "last_error", host->last_error, "waiting", host->waiting,
            "memory", (json_int_t)sandbox_memory(host->sandbox), "topics", topic_counts(host)) < 0)
        return -1;
    if ((call.handler = handler_find(host, topic)))
        run_call(&call); // a failure is in the log, and the next query's last_error
    (void)p;
    return 0;
}

static void host_destroy(void *arg)
{
    struct host *host = arg;

    if (!host)
        return;
    orphans_abandon(host);
    sandbox_destroy(host->sandbox);
    handlers_destroy(host);
    free(host->script);
    free(host);
}

static char *script_of(const char *path)
{
    size_t stem = strlen(path);
    char *script;

    if (stem > 3 && strcmp(path + stem - 3, ".so") == 0)
        stem -= 3;
    if (asprintf(&script, "%s%.*s.lua", strchr(path, '/') ? "" : "./", (int)stem, path) < 0)
        return NULL;
    return script;
}

static struct host *host_create(flux_plugin_t *p)
{
    struct host *host = calloc(1, sizeof(*host));

    if (!host || !(host->script = script_of(flux_plugin_get_path(p))))
        goto error;
    host->p = p;
    if (!(host->h = flux_jobtap_get_flux(p)) || !(host->sandbox = sandbox_create(NULL)))
        goto error;
    sandbox_set_owner(host->sandbox, host);
    return host;
error:
    host_destroy(host);
    return NULL;
}

// Exported, unlike everything else.
__attribute__((visibility("default"))) int flux_plugin_init(flux_plugin_t *p)
{
    struct host *host = host_create(p);

    if (!host)
        return -1;
    // Under a key, so that it is destroyed while the plugin can still act on jobs.
    if (flux_plugin_aux_set(p, "dovetail::host", host, host_destroy) < 0) {
        host_destroy(host);
        return -1;
    }
    host->loaded = sandbox_call(host->sandbox, api_open, host, host->last_error) == 0 &&
                   sandbox_run(host->sandbox, host->script, host->last_error) == 0;
    // After those of the script: Flux tries a plugin's handlers in turn, twice for each topic.
    if (flux_plugin_add_handler(p, "conf.update", conf_callback, host) < 0 ||
        flux_plugin_add_handler(p, "plugin.query", query_callback, host) < 0)
        return -1;
    return 0;
}
