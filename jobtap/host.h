// SPDX-License-Identifier: LGPL-3.0-or-later
// A host is one loaded plugin: one Lua script in one sandbox, the topics that it wants to be called
// for, and the call that is being served. The job manager calls it in one thread; nothing here
// blocks.
//
// The files of the host lie in layers, and each calls only those before it:
//
//   sandbox (libraries), json, convert   Lua, and JSON in it; they know nothing of Flux
//   host                                 this: what all of the following share
//   record                               what is kept of a job, and how a job is let go
//   bounds                               what the script's own effects may call back
//   job                                  the job that Lua sees
//   later                                replies and timers
//   action                               what Lua can do to a job
//   callback                             a call from the job manager becomes one of a Lua function
//   api                                  the global table `jobtap`
//   plugin                               made when Flux loads the library, gone when it is removed
#ifndef DOVETAIL_HOST_H
#define DOVETAIL_HOST_H

#include <flux/core.h>
#include <flux/jobtap.h>
#include <stdbool.h>

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

// Seconds of the shortest timer: a future takes 0 for no limit at all, and would never fire.
#define HOST_AT_ONCE 1e-6

// What is left of a budget that fills up as the reactor turns; all zero, it is full.
struct budget_left {
    double left;
    double filled; // when, 0 for never
};

struct host {
    flux_plugin_t *p;
    flux_t *h;
    struct sandbox *sandbox;
    char *script; // path of the Lua file
    bool loaded;
    struct handler *handlers;
    struct record *records;
    struct orphan *orphans;
    struct call *call;
    unsigned long calls;
    unsigned long errors;
    int waiting; // RPCs and timers
    // These are of bounds.c.
    int depth;                    // of calls within calls
    unsigned long visits;         // calls so far that were not within others
    bool charging;                // what is done now is the script's own doing,
    double since;                 // from this processor time on
    struct budget_left cpu;       // for that,
    struct budget_left slice;     // and for replies and timers at a time
    flux_watcher_t *turns;        // of the job manager's reactor,
    double turned;                // when it last turned,
    double turn_cpu;              // and the script's processor time since
    char off[SANDBOX_ERROR_SIZE]; // why the script is called no more
    flux_future_t *release;       // of the jobs that it holds, then
    char last_error[SANDBOX_ERROR_SIZE];
};

const char *host_name(const struct host *host);

// The handler that is called for a topic, NULL if there is none.
struct handler *handler_find(struct host *host, const char *topic);
// Adds a handler with a Lua function, by reference; NULL if there is no memory.
struct handler *handler_add(struct host *host, const char *topic, int function);
void handlers_destroy(struct host *host);

// Rejects what a call was to judge, with as many of these words as Flux takes. Returns -1.
int host_refuse(struct host *host, flux_plugin_arg_t *args, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

// Whether the job manager takes no for an answer; and whether that answer comes too late for a
// job that was accepted before the plugin was loaded.
bool topic_may_reject(const char *topic);
bool topic_introduces(const char *topic);
bool topic_matches(const char *topic, const char *const patterns[]); // the last one is NULL

#endif
