// SPDX-License-Identifier: LGPL-3.0-or-later
// See api.h.
#include "api.h"

#include <errno.h>
#include <jansson.h>
#include <lauxlib.h>
#include <string.h>
#include <syslog.h>

#include "action.h"
#include "callback.h"
#include "host.h"
#include "job.h"
#include "json.h"
#include "sandbox.h"

// Whether Flux ever calls anybody for what a topic, or a pattern of topics, says.
static bool topic_exists(const char *topic)
{
    static const char *const open[] = {"job.dependency.?*", "job.event.?*", "job.update.?*", NULL};
    static const char *const fixed[] = {"conf.update",
                                        "plugin.query",
                                        "job.create",
                                        "job.validate",
                                        "job.new",
                                        "job.destroy",
                                        "job.state.depend",
                                        "job.state.priority",
                                        "job.state.sched",
                                        "job.state.run",
                                        "job.state.cleanup",
                                        "job.state.inactive",
                                        "job.priority.get",
                                        "job.update",
                                        "job.inactive-add",
                                        "job.inactive-remove",
                                        "job.dependency.one",
                                        "job.event.alloc"};
    const char *const patterns[] = {topic, NULL};
    size_t i;

    for (i = 0; i < sizeof(fixed) / sizeof(fixed[0]); i++)
        if (topic_matches(fixed[i], patterns))
            return true;
    return topic_matches(topic, open);
}

static int jobtap_on(lua_State *L)
{
    static const char *const own[] = {"conf.update", "plugin.query", NULL};
    struct host *host = sandbox_owner(L);
    const char *topic = luaL_checkstring(L, 1);
    struct handler *handler;

    luaL_checktype(L, 2, LUA_TFUNCTION);
    if (host->loaded)
        return luaL_error(L, "jobtap.on: only while the script is loaded");
    if (!topic_exists(topic) || (strncmp(topic, "job.", 4) != 0 && !topic_matches(topic, own)))
        return luaL_error(L, "jobtap.on: no such topic: %s", topic);
    for (handler = host->handlers; handler; handler = handler->next)
        if (strcmp(handler->topic, topic) == 0)
            return luaL_error(L, "jobtap.on: %s: has a callback already", topic);
    lua_settop(L, 2);
    if (!(handler = handler_add(host, topic, luaL_ref(L, LUA_REGISTRYINDEX))))
        return luaL_error(L, "jobtap.on: out of memory");
    if (!topic_matches(topic, own) &&
        flux_plugin_add_handler(host->p, topic, callback_job, handler) < 0)
        return luaL_error(L, "jobtap.on: %s: %s", topic, strerror(errno));
    return 0;
}

static int jobtap_log(lua_State *L)
{
    static const char *const names[] = {"err", "warning", "notice", "info", "debug", NULL};
    static const int levels[] = {LOG_ERR, LOG_WARNING, LOG_NOTICE, LOG_INFO, LOG_DEBUG};
    struct host *host = sandbox_owner(L);
    int level = luaL_checkoption(L, 1, NULL, names);

    sandbox_act(L);
    flux_log(host->h, levels[level], "%s: %s", host_name(host), luaL_tolstring(L, 2, NULL));
    return 0;
}

static int jobtap_job(lua_State *L)
{
    lua_Integer id = luaL_checkinteger(L, 1);

    luaL_argcheck(L, id >= 0, 1, "not a job's number"); // -1 is whatever job is current
    job_push(L, id);
    return 1;
}

int api_open(lua_State *L)
{
    static const luaL_Reg functions[] = {
        {"on", jobtap_on}, {"log", jobtap_log}, {"job", jobtap_job}, {NULL, NULL}};
    struct host *host = lua_touserdata(L, 1);
    const char *conf = flux_plugin_get_conf(host->p);
    json_t **box;

    json_open(L);
    action_push_methods(L);
    job_open(L);
    luaL_newlib(L, functions);
    box = json_box(L);
    if (!(*box = json_loads(conf ? conf : "{}", 0, NULL)) && !(*box = json_object()))
        return luaL_error(L, "out of memory");
    lua_setfield(L, -2, "conf");
    lua_setglobal(L, "jobtap");
    return 0;
}
