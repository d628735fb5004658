// SPDX-License-Identifier: LGPL-3.0-or-later
// The global table `jobtap` of a script, and the handlers that it registers.
#include <errno.h>
#include <fnmatch.h>
#include <lauxlib.h>
#include <stdlib.h>
#include <string.h>
#include <syslog.h>

#include "host.h"

static bool matches(const char *topic, const char *const patterns[])
{
    for (; *patterns; patterns++)
        if (fnmatch(*patterns, topic, 0) == 0)
            return true;
    return false;
}

bool topic_may_reject(const char *topic)
{
    static const char *const patterns[] = {"job.validate", "job.update.*", NULL};

    return topic_introduces(topic) || matches(topic, patterns);
}

bool topic_introduces(const char *topic)
{
    static const char *const patterns[] = {"job.create", "job.dependency.*", NULL};

    return matches(topic, patterns);
}

struct handler *handler_find(struct host *host, const char *topic)
{
    struct handler *handler;

    for (handler = host->handlers; handler; handler = handler->next)
        if (fnmatch(handler->topic, topic, 0) == 0)
            return handler;
    return NULL;
}

void handlers_destroy(struct host *host)
{
    struct handler *handler;

    while ((handler = host->handlers)) {
        host->handlers = handler->next;
        free(handler->topic);
        free(handler);
    }
}

static void add_handler(struct host *host, struct handler *handler)
{
    struct handler **end = &host->handlers;

    while (*end)
        end = &(*end)->next;
    *end = handler; // as in Flux, the first that matches is called
}

static struct handler *handler_create(struct host *host, const char *topic, int function)
{
    struct handler *handler = calloc(1, sizeof(*handler));

    if (!handler || !(handler->topic = strdup(topic)))
        goto error;
    handler->host = host;
    handler->function = function;
    return handler;
error:
    free(handler);
    return NULL;
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
    if (strncmp(topic, "job.", 4) != 0 && !matches(topic, own))
        return luaL_error(L, "jobtap.on: no such topic: %s", topic);
    for (handler = host->handlers; handler; handler = handler->next)
        if (strcmp(handler->topic, topic) == 0)
            return luaL_error(L, "jobtap.on: %s: has a callback already", topic);
    lua_settop(L, 2);
    if (!(handler = handler_create(host, topic, luaL_ref(L, LUA_REGISTRYINDEX))))
        return luaL_error(L, "jobtap.on: out of memory");
    add_handler(host, handler);
    if (!matches(topic, own) &&
        flux_plugin_add_handler(host->p, topic, host_job_callback, handler) < 0)
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
    job_open(L);
    luaL_newlib(L, functions);
    box = json_box(L);
    if (!(*box = json_loads(conf ? conf : "{}", 0, NULL)) && !(*box = json_object()))
        return luaL_error(L, "out of memory");
    lua_setfield(L, -2, "conf");
    lua_setglobal(L, "jobtap");
    return 0;
}
