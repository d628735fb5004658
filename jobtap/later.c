// SPDX-License-Identifier: LGPL-3.0-or-later
// See later.h. Each is a future with a time limit that belongs to a job's record, so it is
// destroyed with the job or the plugin. A timer is a future that nobody fulfils.
#include "later.h"

#include <errno.h>
#include <jansson.h>
#include <lauxlib.h>
#include <stdlib.h>
#include <string.h>

#include "bounds.h"
#include "convert.h"
#include "host.h"
#include "job.h"
#include "json.h"
#include "record.h"
#include "sandbox.h"

enum { MAX_WAITING = 100 * 1000 };

struct later {
    struct host *host;
    flux_jobid_t id;
    flux_future_t *future;
    int function;         // reference
    flux_future_t *pause; // until it is served, NULL without
    char *topic;          // NULL for a timer
    struct later *next;
};

static int drop_function(lua_State *L)
{
    struct later *later = lua_touserdata(L, 1);

    luaL_unref(L, LUA_REGISTRYINDEX, later->function);
    return 0;
}

static void later_destroy(struct later *later)
{
    int saved_errno = errno;
    char error[SANDBOX_ERROR_SIZE];

    if (!later)
        return;
    sandbox_call(later->host->sandbox, drop_function, later, error);
    flux_future_destroy(later->future);
    flux_future_destroy(later->pause);
    later->host->waiting--;
    free(later->topic);
    free(later);
    errno = saved_errno;
}

static struct later *later_create(struct record *record, int function, const char *topic)
{
    struct later *later = calloc(1, sizeof(*later));

    if (!later)
        return NULL;
    later->host = record->host;
    later->id = record->id;
    later->function = LUA_NOREF; // the caller's until all is well
    later->host->waiting++;
    if (topic && !(later->topic = strdup(topic)))
        goto error;
    later->function = function;
    return later;
error:
    later_destroy(later);
    return NULL;
}

static void later_detach(struct later *later)
{
    struct record *record = record_find(later->host, later->id);
    struct later **link = &record->laters;

    while (*link != later)
        link = &(*link)->next;
    *link = later->next;
}

static void destroy_all(struct record *record)
{
    struct later *later;

    while ((later = record->laters)) {
        record->laters = later->next;
        later_destroy(later);
    }
}

// --- telling the script ---

static const char *code_name(int code)
{
    static const struct {
        int code;
        const char *name;
    } names[] = {{ENOSYS, "ENOSYS"},         {ETIMEDOUT, "ETIMEDOUT"},
                 {ECONNRESET, "ECONNRESET"}, {EHOSTUNREACH, "EHOSTUNREACH"},
                 {EPERM, "EPERM"},           {EINVAL, "EINVAL"},
                 {ENOENT, "ENOENT"},         {EPROTO, "EPROTO"},
                 {EAGAIN, "EAGAIN"}};
    size_t i;

    for (i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (names[i].code == code)
            return names[i].name;
    return "EIO";
}

static int push_failure(lua_State *L, struct later *later)
{
    int code = errno;

    lua_pushnil(L);
    if (code == ETIMEDOUT)
        lua_pushfstring(L, "%s: no answer in time", later->topic);
    else if (code == ENOSYS)
        lua_pushfstring(L, "%s: no such service", later->topic);
    else
        lua_pushstring(L, flux_future_error_string(later->future)); // the service's own words
    lua_pushstring(L, code_name(code));
    return 3;
}

static int push_reply(lua_State *L, struct later *later)
{
    const char *text = NULL;
    json_t **box;

    if (flux_rpc_get(later->future, &text) < 0)
        return push_failure(L, later);
    box = json_box(L);
    if (text)
        *box = json_loads(text, JSON_DECODE_ANY, NULL);
    if (!*box) {
        lua_pushboolean(L, 1); // an answer without content
        lua_replace(L, -2);
    }
    return 1;
}

static int run_later(lua_State *L)
{
    struct later *later = lua_touserdata(L, 1);

    lua_rawgeti(L, LUA_REGISTRYINDEX, later->function);
    lua_call(L, later->topic ? push_reply(L, later) : 0, 0);
    return 0;
}

static void later_callback(flux_future_t *future, void *arg);

static int put_off(struct later *later, double seconds)
{
    flux_future_t *pause = flux_future_create(NULL, NULL);

    if (!pause)
        return -1;
    flux_future_set_flux(pause, later->host->h);
    if (flux_future_then(pause, seconds, later_callback, later) < 0) {
        flux_future_destroy(pause);
        return -1;
    }
    flux_future_destroy(later->pause);
    later->pause = pause;
    return 0;
}

static void later_callback(flux_future_t *future, void *arg)
{
    struct later *later = arg;
    struct host *host = later->host;
    const char *where = later->topic ? later->topic : "timer";
    char error[SANDBOX_ERROR_SIZE];
    struct visit visit;
    double wait;
    int rc;

    if ((wait = bounds_wait(host)) > 0. && put_off(later, wait) == 0)
        return;
    later_detach(later); // since the script may end the job, and with it the record
    if (bounds_enter(&visit, host, later->id, where, true) == 0) {
        host->calls++;
        if ((rc = sandbox_call(host->sandbox, run_later, later, error)) < 0)
            bounds_failed(&visit, rc, error);
        bounds_leave(&visit);
    }
    later_destroy(later);
    (void)future;
}

// --- asking ---

static struct record *check_record(lua_State *L)
{
    struct host *host = sandbox_owner(L);
    flux_jobid_t id = job_check(L);

    sandbox_act(L);
    if (bounds_act(host, id) < 0)
        sandbox_stop(L);
    if (host->waiting >= MAX_WAITING)
        luaL_error(L, "more than %d replies and timers are awaited", MAX_WAITING);
    return record_get(host, id);
}

static double check_seconds(lua_State *L, int index)
{
    double seconds = luaL_checknumber(L, index);

    luaL_argcheck(L, seconds >= 0 && seconds <= 1e9, index, "not a number of seconds");
    return seconds > HOST_AT_ONCE ? seconds : HOST_AT_ONCE;
}

static int refused(lua_State *L, int function)
{
    int code = errno;

    luaL_unref(L, LUA_REGISTRYINDEX, function);
    lua_pushnil(L);
    lua_pushstring(L, strerror(code));
    return 2;
}

static int later_start(lua_State *L, struct record *record, const char *topic, json_t *payload,
                       double seconds)
{
    struct host *host = record->host;
    int function = luaL_ref(L, LUA_REGISTRYINDEX); // what is on top of the stack
    struct later *later;

    if (!(later = later_create(record, function, topic)))
        return refused(L, function);
    if (topic)
        later->future = flux_rpc_pack(host->h, topic, FLUX_NODEID_ANY, 0, "O", payload);
    else if ((later->future = flux_future_create(NULL, NULL)))
        flux_future_set_flux(later->future, host->h);
    if (!later->future || flux_future_then(later->future, seconds, later_callback, later) < 0) {
        later->function = LUA_NOREF;
        later_destroy(later);
        return refused(L, function);
    }
    later->next = record->laters;
    record->laters = later;
    record->destroy_laters = destroy_all;
    lua_pushboolean(L, 1);
    return 1;
}

// job:rpc(topic, payload, seconds, function(reply, error, code))
int later_rpc(lua_State *L)
{
    struct record *record = check_record(L);
    const char *topic = luaL_checkstring(L, 2);
    double seconds = check_seconds(L, 4);
    json_t *payload;

    luaL_checktype(L, 5, LUA_TFUNCTION);
    lua_settop(L, 5);
    luaL_argcheck(L, json_is_object(payload = json_from_lua(L, 3)), 3,
                  "not a table of named values");
    if (!record)
        return lua_pushnil(L), lua_pushliteral(L, "no such job"), 2;
    lua_pushvalue(L, 5);
    return later_start(L, record, topic, payload, seconds);
}

// job:after(seconds, function())
int later_after(lua_State *L)
{
    struct record *record = check_record(L);
    double seconds = check_seconds(L, 2);

    luaL_checktype(L, 3, LUA_TFUNCTION);
    lua_settop(L, 3);
    if (!record)
        return lua_pushnil(L), lua_pushliteral(L, "no such job"), 2;
    return later_start(L, record, NULL, NULL, seconds);
}
