// SPDX-License-Identifier: LGPL-3.0-or-later
// See action.h.
#include "action.h"

#include <errno.h>
#include <jansson.h>
#include <lauxlib.h>
#include <string.h>

#include "bounds.h"
#include "convert.h"
#include "host.h"
#include "job.h"
#include "later.h"
#include "record.h"
#include "sandbox.h"

struct action {
    struct host *host;
    flux_jobid_t id;
    bool current;
};

static struct action check_job(lua_State *L)
{
    struct action action = {.host = sandbox_owner(L), .id = job_check(L)};

    // Flux has some actions for the job whose callback is running only.
    action.current = action.host->call && action.host->call->id == action.id;
    sandbox_act(L);
    return action;
}

// The same for what may call us back.
static struct action check_action(lua_State *L)
{
    struct action action = check_job(L);

    if (bounds_act(action.host, action.id) < 0)
        sandbox_stop(L);
    return action;
}

static int result(lua_State *L, int rc)
{
    int code = errno;

    if (rc >= 0)
        return lua_pushboolean(L, 1), 1;
    lua_pushnil(L);
    lua_pushstring(L, strerror(code));
    return 2;
}

static int job_reject(lua_State *L)
{
    struct action action = check_job(L);
    const char *reason = luaL_checkstring(L, 2);
    struct call *call = action.host->call;
    int state = FLUX_JOB_STATE_NEW;

    if (!action.current || !topic_may_reject(call->topic))
        return luaL_error(L, "job:reject: not in this callback");
    flux_plugin_arg_unpack(call->args, FLUX_PLUGIN_ARG_IN, "{s:i}", "state", &state);
    host_refuse(action.host, call->args, "%s", reason);
    // A plugin that is loaded later is shown jobs that were accepted without it.
    if (state != FLUX_JOB_STATE_NEW && topic_introduces(call->topic))
        flux_jobtap_raise_exception(action.host->p, action.id, "jobtap", 0, "%s", reason);
    call->rejected = true;
    return sandbox_stop(L);
}

// Remember first: a hold that cannot be remembered must not be placed.
static int start(lua_State *L, enum hold_kind kind)
{
    struct action action = check_action(L);
    const char *description = luaL_checkstring(L, 2);
    struct record *record = record_get(action.host, action.id);
    int rc;

    // Flux holds the job once by it, and of a second removal the job would never recover.
    if (record && kind == HOLD_DEPENDENCY && record_holds(record, kind, description))
        return result(L, 0);
    if (!record || record_hold(record, kind, description) < 0)
        return result(L, -1);
    if (kind == HOLD_DEPENDENCY)
        rc = flux_jobtap_dependency_add(action.host->p, action.id, description);
    else if (!action.current)
        return record_unhold(record, kind, description),
               luaL_error(L, "only in a callback of this job");
    else if (kind == HOLD_PROLOG)
        rc = flux_jobtap_prolog_start(action.host->p, description);
    else
        rc = flux_jobtap_epilog_start(action.host->p, description);
    if (rc < 0)
        record_unhold(record, kind, description);
    return result(L, rc);
}

static int job_dependency_add(lua_State *L)
{
    return start(L, HOLD_DEPENDENCY);
}

static int job_prolog_start(lua_State *L)
{
    return start(L, HOLD_PROLOG);
}

static int job_epilog_start(lua_State *L)
{
    return start(L, HOLD_EPILOG);
}

static int finish(lua_State *L, enum hold_kind kind)
{
    struct action action = check_action(L);
    const char *description = luaL_checkstring(L, 2);
    int status = luaL_optinteger(L, 3, 0);
    struct record *record = record_find(action.host, action.id);
    flux_plugin_t *p = action.host->p;

    // First, because the job may be gone afterwards. What is not there Flux would find out later,
    // and then forget the job's other events, so that the job never ends.
    if (!record || !record_unhold(record, kind, description)) {
        lua_pushnil(L);
        return lua_pushliteral(L, "the job is not held by this"), 2;
    }
    if (kind == HOLD_DEPENDENCY)
        return result(L, flux_jobtap_dependency_remove(p, action.id, description));
    if (kind == HOLD_PROLOG)
        return result(L, flux_jobtap_prolog_finish(p, action.id, description, status));
    return result(L, flux_jobtap_epilog_finish(p, action.id, description, status));
}

static int job_dependency_remove(lua_State *L)
{
    return finish(L, HOLD_DEPENDENCY);
}

static int job_prolog_finish(lua_State *L)
{
    return finish(L, HOLD_PROLOG);
}

static int job_epilog_finish(lua_State *L)
{
    return finish(L, HOLD_EPILOG);
}

static int job_raise(lua_State *L)
{
    struct action action = check_action(L);
    const char *type = luaL_checkstring(L, 2);
    int severity = luaL_checkinteger(L, 3);
    const char *note = luaL_checkstring(L, 4);

    luaL_argcheck(L, severity >= 0 && severity <= 7, 3, "not a severity from 0 to 7");
    return result(L, record_raise(action.host, action.id, type, severity, note));
}

static int post(lua_State *L, struct action action, const char *name, int index)
{
    json_t *context = json_from_lua(L, index);

    luaL_argcheck(L, json_is_object(context), index, "not a table of named values");
    return result(L, flux_jobtap_event_post_pack(action.host->p, action.id, name, "O", context));
}

// The job manager acts on these: one at the wrong time, or with another context than it should
// have, and it forgets the job's other events.
static bool is_fluxs_own(const char *name)
{
    static const char *const own[] = {
        "alloc",
        "clean",
        "depend",
        "exception",
        "finish",
        "free",
        "flux-restart",
        "invalidate",
        "memo",
        "priority",
        "release",
        "set-flags",
        "start",
        "submit",
        "urgency",
        "validate",
        "dependency-add",
        "dependency-remove",
        "prolog-start",
        "prolog-finish",
        "epilog-start",
        "epilog-finish",
        "jobspec-update",
        "resource-update",
        NULL,
    };
    int i = 0;

    while (own[i] && strcmp(own[i], name) != 0)
        i++;
    return own[i] != NULL;
}

static int job_post(lua_State *L)
{
    struct action action = check_action(L);
    const char *name = luaL_checkstring(L, 2);

    luaL_argcheck(L, !is_fluxs_own(name), 2, "an event of Flux itself");
    lua_settop(L, 3);
    if (lua_isnil(L, 3))
        return result(L, flux_jobtap_event_post_pack(action.host->p, action.id, name, NULL));
    return post(L, action, name, 3);
}

// A memo, since only memos outlive a restart and may be posted at any time.
static int job_annotate(lua_State *L)
{
    return post(L, check_action(L), "memo", 2);
}

static int job_update(lua_State *L)
{
    struct action action = check_action(L);
    json_t *update = json_from_lua(L, 2);
    flux_plugin_t *p = action.host->p;

    luaL_argcheck(L, json_is_object(update), 2, "not a table of named values");
    if (action.current)
        return result(L, flux_jobtap_jobspec_update_pack(p, "O", update));
    return result(L, flux_jobtap_jobspec_update_id_pack(p, action.id, "O", update));
}

static int job_reprioritize(lua_State *L)
{
    struct action action = check_action(L);
    lua_Integer priority = luaL_checkinteger(L, 2);

    luaL_argcheck(L, priority >= FLUX_JOB_PRIORITY_MIN && priority <= FLUX_JOB_PRIORITY_MAX, 2,
                  "not a priority");
    return result(L, flux_jobtap_reprioritize_job(action.host->p, action.id, priority));
}

static int job_posted(lua_State *L)
{
    struct action action = check_job(L);
    const char *name = luaL_checkstring(L, 2);

    lua_pushboolean(L, flux_jobtap_job_event_posted(action.host->p, action.id, name) == 1);
    return 1;
}

static int job_subscribe(lua_State *L)
{
    struct action action = check_job(L);
    struct record *record = record_get(action.host, action.id);
    int rc = -1;

    if (record &&
        (record->subscribed || (rc = flux_jobtap_job_subscribe(action.host->p, action.id)) == 0))
        rc = record->subscribed = true; // twice would call twice
    return result(L, rc);
}

static int job_result(lua_State *L)
{
    struct action action = check_job(L);
    flux_job_result_t value;

    if (flux_jobtap_get_job_result(action.host->p, action.id, &value) < 0)
        return result(L, -1);
    lua_pushstring(L, flux_job_resulttostr(value, "L"));
    return 1;
}

void action_push_methods(lua_State *L)
{
    static const luaL_Reg methods[] = {
        {"after", later_after},
        {"annotate", job_annotate},
        {"dependency_add", job_dependency_add},
        {"dependency_remove", job_dependency_remove},
        {"epilog_finish", job_epilog_finish},
        {"epilog_start", job_epilog_start},
        {"post", job_post},
        {"posted", job_posted},
        {"prolog_finish", job_prolog_finish},
        {"prolog_start", job_prolog_start},
        {"raise", job_raise},
        {"reject", job_reject},
        {"reprioritize", job_reprioritize},
        {"result", job_result},
        {"rpc", later_rpc},
        {"subscribe", job_subscribe},
        {"update", job_update},
        {NULL, NULL},
    };

    luaL_newlib(L, methods);
}
