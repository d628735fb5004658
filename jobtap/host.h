// SPDX-License-Identifier: LGPL-3.0-or-later
// What the files of the jobtap host share. A host is one loaded plugin: one Lua script in one
// sandbox. The job manager calls it in one thread; nothing here blocks.
#ifndef DOVETAIL_HOST_H
#define DOVETAIL_HOST_H

#include <flux/core.h>
#include <flux/jobtap.h>
#include <jansson.h>
#include <lua.h>
#include <stdbool.h>

#include "json.h"
#include "sandbox.h"

// A topic that the script wants to be called for.
struct handler {
    struct host *host;
    char *topic;
    int function; // reference
    unsigned long calls;
    struct handler *next;
};

// A call from the job manager that is being served; the innermost is host->call.
struct call {
    struct host *host;
    struct handler *handler;
    const char *topic;
    flux_plugin_arg_t *args;
    flux_jobid_t id;
    bool rejected;
    struct call *outer;
};

struct host {
    flux_plugin_t *p;
    flux_t *h;
    struct sandbox *sandbox;
    char *script; // path of the Lua file
    bool loaded;
    struct handler *handlers;
    struct orphan *orphans;
    struct call *call;
    unsigned long calls;
    unsigned long errors;
    int waiting; // RPCs and timers
    char last_error[SANDBOX_ERROR_SIZE];
};

// --- host.c ---
const char *host_name(const struct host *host);
// Logs the failure of a callback, counts it, and sees to it that no job waits for it for ever.
void host_failed(struct host *host, flux_jobid_t id, const char *where, const char *error);
// The jobtap callback of every topic that is about a job; `arg` is the handler.
int host_job_callback(flux_plugin_t *p, const char *topic, flux_plugin_arg_t *args, void *arg);

// --- api.c: the global table `jobtap` ---
int api_open(lua_State *L); // to be called protected, with the host
struct handler *handler_find(struct host *host, const char *topic);
void handlers_destroy(struct host *host);
// Whether the job manager takes no for an answer; and whether that answer comes too late for a
// job that was accepted before the plugin was loaded.
bool topic_may_reject(const char *topic);
bool topic_introduces(const char *topic);

// --- job.c and action.c: the job that Lua sees, and what it can do to it ---
void job_open(lua_State *L);
void job_push_actions(lua_State *L);
void job_push(lua_State *L, flux_jobid_t id);
flux_jobid_t job_check(lua_State *L);

// --- record.c: what the host keeps of a job, in the job's aux ---
enum hold_kind { HOLD_DEPENDENCY, HOLD_PROLOG, HOLD_EPILOG };
struct record {
    struct host *host;
    flux_jobid_t id;
    bool subscribed;
    int data; // reference of the job's Lua table, or LUA_NOREF
    struct hold *holds;
    struct later *laters;
};
struct record *record_find(struct host *host, flux_jobid_t id);
struct record *record_get(struct host *host, flux_jobid_t id); // made if need be
int record_hold(struct record *record, enum hold_kind kind, const char *description);
void record_unhold(struct record *record, enum hold_kind kind, const char *description);
int record_raise(struct host *host, flux_jobid_t id, const char *type, int severity,
                 const char *note);
// Raises an exception on the job and finishes its prologs and epilogs, for a reason. The
// exception is fatal where the job could not go on as the plugin promised.
void record_abandon(struct host *host, flux_jobid_t id, const char *reason);
// The same for every job that was held when the plugin was removed.
void orphans_abandon(struct host *host);

// --- later.c: what comes later, replies and timers ---
int later_rpc(lua_State *L);
int later_after(lua_State *L);
void later_destroy_all(struct record *record);

#endif
