// SPDX-License-Identifier: LGPL-3.0-or-later
// See record.h.
//
// A record lives in the job's aux, so it goes when the job goes, and when the plugin is removed. In
// the latter case held jobs must not be left waiting for a plugin that is no more. They cannot be
// released where their record is destroyed, since the job manager may be shutting down then, so
// they are remembered as orphans and seen to when the plugin itself is destroyed: if the job
// manager still knows the job then, it was the plugin that went.
#include "record.h"

#include <errno.h>
#include <lauxlib.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <syslog.h>

#include "sandbox.h"

enum { MAX_HOLDS = 64 };

static const char record_name[] = "dovetail::record";

struct hold {
    enum hold_kind kind;
    struct hold *next;
    char description[];
};

struct orphan {
    flux_jobid_t id;
    struct hold *holds;
    struct orphan *next;
};

static void holds_free(struct hold *hold)
{
    struct hold *next;

    for (; hold; hold = next) {
        next = hold->next;
        free(hold);
    }
}

static flux_job_state_t state_of(struct host *host, flux_jobid_t id)
{
    flux_plugin_arg_t *args = flux_jobtap_job_lookup(host->p, id);
    int state = FLUX_JOB_STATE_INACTIVE;

    if (args)
        flux_plugin_arg_unpack(args, FLUX_PLUGIN_ARG_IN, "{s:i}", "state", &state);
    flux_plugin_arg_destroy(args);
    return state;
}

static int drop_data(lua_State *L)
{
    struct record *record = lua_touserdata(L, 1);

    luaL_unref(L, LUA_REGISTRYINDEX, record->data);
    return 0;
}

static void record_destroy(void *arg)
{
    struct record *record = arg;
    struct host *host = record->host;
    struct orphan *orphan;
    char error[SANDBOX_ERROR_SIZE];

    *(record->previous ? &record->previous->next : &host->records) = record->next;
    if (record->next)
        record->next->previous = record->previous;
    if (record->laters)
        record->destroy_laters(record);
    if (record->data != LUA_NOREF)
        sandbox_call(host->sandbox, drop_data, record, error);
    if (record->holds && state_of(host, record->id) != FLUX_JOB_STATE_INACTIVE &&
        (orphan = calloc(1, sizeof(*orphan)))) {
        *orphan = (struct orphan){record->id, record->holds, host->orphans};
        host->orphans = orphan;
        record->holds = NULL;
    }
    holds_free(record->holds);
    free(record);
}

struct record *record_find(struct host *host, flux_jobid_t id)
{
    return flux_jobtap_job_aux_get(host->p, id, record_name);
}

struct record *record_get(struct host *host, flux_jobid_t id)
{
    struct record *record = record_find(host, id);

    if (record)
        return record;
    if (!(record = calloc(1, sizeof(*record))))
        return NULL;
    *record = (struct record){.host = host, .id = id, .data = LUA_NOREF};
    if (flux_jobtap_job_aux_set(host->p, id, record_name, record, record_destroy) < 0) {
        int saved_errno = errno;
        free(record);
        errno = saved_errno;
        return NULL;
    }
    if ((record->next = host->records))
        record->next->previous = record;
    host->records = record;
    return record;
}

int record_hold(struct record *record, enum hold_kind kind, const char *description)
{
    struct hold *hold;
    int n = 0;

    for (hold = record->holds; hold; hold = hold->next)
        n++;
    // Flux counts 255 prologs and epilogs of a job, and with one more the job would never end.
    if (n >= MAX_HOLDS) {
        errno = EOVERFLOW;
        return -1;
    }
    if (!(hold = malloc(sizeof(*hold) + strlen(description) + 1)))
        return -1;
    hold->kind = kind;
    hold->next = record->holds;
    strcpy(hold->description, description);
    record->holds = hold;
    return 0;
}

bool record_holds(const struct record *record, enum hold_kind kind, const char *description)
{
    const struct hold *hold = record->holds;

    while (hold && (hold->kind != kind || strcmp(hold->description, description) != 0))
        hold = hold->next;
    return hold;
}

bool record_unhold(struct record *record, enum hold_kind kind, const char *description)
{
    struct hold **link = &record->holds, *hold;

    for (; (hold = *link); link = &hold->next)
        if (hold->kind == kind && strcmp(hold->description, description) == 0) {
            *link = hold->next;
            free(hold);
            return true;
        }
    return false;
}

// --- letting go of jobs ---

// A job that is new can have no fatal exception yet, but it can be asked for.
int record_raise(struct host *host, flux_jobid_t id, const char *type, int severity,
                 const char *note)
{
    struct record *record = record_get(host, id);
    flux_future_t *future;

    if (record && record->effects == EFFECTS_NONE)
        record->effects = EFFECTS_SOME; // the exception is an event, for which it may be called
    if (severity > 0 || state_of(host, id) != FLUX_JOB_STATE_NEW)
        return flux_jobtap_raise_exception(host->p, id, type, severity, "%s", note);
    if (!(future = flux_rpc_pack(host->h, "job-manager.raise", FLUX_NODEID_ANY, FLUX_RPC_NORESPONSE,
                                 "{s:I s:s s:i s:s}", "id", id, "type", type, "severity", severity,
                                 "note", note)))
        return -1;
    flux_future_destroy(future);
    return 0;
}

static bool held(const struct hold *hold, enum hold_kind kind)
{
    for (; hold; hold = hold->next)
        if (hold->kind == kind)
            return true;
    return false;
}

// A job before its prolog's end must not start, one in its epilog has done its work.
static void finish_all(struct host *host, flux_jobid_t id, struct hold *holds)
{
    struct hold *hold;

    for (hold = holds; hold; hold = hold->next)
        if (hold->kind == HOLD_PROLOG)
            flux_jobtap_prolog_finish(host->p, id, hold->description, 1);
        else if (hold->kind == HOLD_EPILOG)
            flux_jobtap_epilog_finish(host->p, id, hold->description, 1);
    holds_free(holds);
}

static struct hold *take_holds(struct host *host, flux_jobid_t id)
{
    struct record *record = record_find(host, id);
    struct hold *holds = record ? record->holds : NULL;

    if (record)
        record->holds = NULL;
    return holds;
}

// Raises an exception on the job and finishes its prologs and epilogs, for a reason. The exception
// is fatal where the job could not go on as the plugin promised.
static void abandon(struct host *host, flux_jobid_t id, const char *reason)
{
    flux_job_state_t state = state_of(host, id);
    struct hold *holds;
    bool fatal;

    if (state == FLUX_JOB_STATE_INACTIVE)
        return;
    holds = take_holds(host, id); // the job may be gone once the exception is raised
    fatal = (state <= FLUX_JOB_STATE_DEPEND && held(holds, HOLD_DEPENDENCY)) ||
            (state == FLUX_JOB_STATE_RUN && held(holds, HOLD_PROLOG));
    record_raise(host, id, "jobtap", fatal ? 0 : 4, reason);
    finish_all(host, id, holds);
}

void record_failed(struct host *host, flux_jobid_t id, const char *where, const char *error)
{
    char reason[SANDBOX_ERROR_SIZE + 64];

    host->errors++;
    snprintf(host->last_error, sizeof(host->last_error), "%s", error);
    flux_log(host->h, LOG_ERR, "jobtap: %s: %s: %s", host_name(host), where, error);
    if (id == FLUX_JOBID_ANY)
        return;
    snprintf(reason, sizeof(reason), "%s failed: %s", host_name(host), error);
    abandon(host, id, reason);
}

// A dependency can wait: Flux tells a plugin that is loaded again of every job that has one. An
// open prolog or epilog cannot be taken up again.
static void orphan_abandon(struct host *host, struct orphan *orphan)
{
    flux_job_state_t state = state_of(host, orphan->id);
    const char *name = host_name(host);

    if (state == FLUX_JOB_STATE_DEPEND && held(orphan->holds, HOLD_DEPENDENCY))
        flux_jobtap_raise_exception(host->p, orphan->id, "jobtap", 4,
                                    "%s was removed; the job waits until it is loaded again", name);
    else if (held(orphan->holds, HOLD_PROLOG) && state == FLUX_JOB_STATE_RUN)
        flux_jobtap_raise_exception(host->p, orphan->id, "jobtap", 0,
                                    "%s was removed before it had prepared the job", name);
    else if (held(orphan->holds, HOLD_EPILOG) && state == FLUX_JOB_STATE_CLEANUP)
        flux_jobtap_raise_exception(host->p, orphan->id, "jobtap", 4,
                                    "%s was removed before it had cleaned up after the job", name);
    if (state != FLUX_JOB_STATE_INACTIVE)
        finish_all(host, orphan->id, orphan->holds);
    else
        holds_free(orphan->holds);
}

void orphans_abandon(struct host *host)
{
    struct orphan *orphan;

    while ((orphan = host->orphans)) {
        host->orphans = orphan->next;
        orphan_abandon(host, orphan);
        free(orphan);
    }
}
