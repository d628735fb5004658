// SPDX-License-Identifier: LGPL-3.0-or-later
// What the host keeps of a job: its Lua table, what is to come later, and what it is held by; and
// how a job is let go when the script fails or the plugin is removed.
#ifndef DOVETAIL_RECORD_H
#define DOVETAIL_RECORD_H

#include <flux/core.h>
#include <stdbool.h>

#include "host.h"

// Whether the script acted on a job since it was last called for it; off: it is called no more.
enum effects { EFFECTS_NONE, EFFECTS_SOME, EFFECTS_OFF };
enum hold_kind { HOLD_DEPENDENCY, HOLD_PROLOG, HOLD_EPILOG };

struct record {
    struct host *host;
    flux_jobid_t id;
    bool subscribed;
    enum effects effects;
    struct budget_left calls; // of bounds.c, as the next two:
    unsigned long visit;      // the call in which the script acted on the job last,
    int acts;                 // and how often in that one
    int data;                 // reference of the job's Lua table, or LUA_NOREF
    struct hold *holds;
    struct later *laters; // of later.c, which knows how they end:
    void (*destroy_laters)(struct record *record);
    struct record *previous, *next;
};

struct record *record_find(struct host *host, flux_jobid_t id);
struct record *record_get(struct host *host, flux_jobid_t id); // made if need be
int record_hold(struct record *record, enum hold_kind kind, const char *description);
bool record_holds(const struct record *record, enum hold_kind kind, const char *description);
// False if the job is not held by that.
bool record_unhold(struct record *record, enum hold_kind kind, const char *description);
// Raises an exception on a job in any state.
int record_raise(struct host *host, flux_jobid_t id, const char *type, int severity,
                 const char *note);
// Logs the failure of a callback, counts it, and sees to it that no job waits for it for ever.
// Where the failure is of no job, `id` is FLUX_JOBID_ANY.
void record_failed(struct host *host, flux_jobid_t id, const char *where, const char *error);
// Every job that was held when the plugin was removed gets an exception, and its prologs and
// epilogs end.
void orphans_abandon(struct host *host);

#endif
