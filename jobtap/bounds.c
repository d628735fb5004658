// SPDX-License-Identifier: LGPL-3.0-or-later
// See bounds.h.
//
// The job manager puts the events of a job into a queue and works on that until it is empty, so a
// plugin that posts one whenever it is called never lets it return. Nobody tells a plugin whose
// deed called it: a call counts as its own doing if it acted on the job since it was last called
// for that, if it comes while the plugin is called already, or if it is a reply or a timer. A job
// has a number of such calls that is filled up again slowly, as the reactor turns: while the queue
// is worked on, the clock alone would fill it as fast as a slow script on a busy machine uses it.
// In them, each act on a job counts too, else every call could queue thousands. In other calls a
// job bears as many in each: Flux takes four times as long for twice the events of a job.
#include "bounds.h"

#include <stdio.h>
#include <time.h>

#include "record.h"

enum { BURST = 200, MAX_DEPTH = 16 };
static const double rate = 20.;         // of calls, a second
static const double cpu_burst = 1.;     // seconds of processor time
static const double turn_cpu = 0.1;     // in one turn of the reactor
static const double cpu_share = 1. / 5; // of the job manager's
static const double slice = 0.05;       // seconds of replies and timers,
static const double slice_share = 0.5;  // before others have as much

static double now(clockid_t clock)
{
    struct timespec t;

    clock_gettime(clock, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

// Fills up what is left of a budget, which begins full.
static double *filled(struct budget_left *budget, double time, double most, double a_second)
{
    budget->left += budget->filled ? (time - budget->filled) * a_second : most;
    if (budget->left > most)
        budget->left = most;
    budget->filled = time;
    return &budget->left;
}

static void turned(flux_reactor_t *reactor, flux_watcher_t *watcher, int revents, void *arg)
{
    struct host *host = arg;

    host->turned = now(CLOCK_MONOTONIC);
    host->turn_cpu = 0.;
    (void)reactor, (void)watcher, (void)revents;
}

int bounds_watch(struct host *host)
{
    host->turned = now(CLOCK_MONOTONIC);
    host->turns = flux_prepare_watcher_create(flux_get_reactor(host->h), turned, host);
    if (!host->turns)
        return -1;
    flux_watcher_start(host->turns);
    return 0;
}

double bounds_wait(struct host *host)
{
    // Thousands may be due in one turn, as where the job manager was held up. Time goes by while
    // they are put off, too: filled up then, the slice would reach what is too much for a turn.
    double left = *filled(&host->slice, host->turned, slice, slice_share);

    return left > 0. ? 0. : (slice - left) / slice_share;
}

// --- switching off ---

static void off_for_job(struct record *record, const char *where, const char *why)
{
    struct host *host = record->host;
    char error[SANDBOX_ERROR_SIZE];

    record->effects = EFFECTS_OFF;
    if (record->laters)
        record->destroy_laters(record);
    snprintf(error, sizeof(error), "switched off for this job: %s", why);
    record_failed(host, record->id, where, error); // which may be the end of the record
}

// From the reactor, where no record is in use. Letting go of one job may be the end of others.
static void release(flux_future_t *future, void *arg)
{
    struct host *host = arg;
    struct record *record = host->records;

    while (record) {
        if (record->effects == EFFECTS_OFF || (!record->holds && !record->laters)) {
            record = record->next;
            continue;
        }
        off_for_job(record, "switched off", host->off);
        record = host->records;
    }
    (void)future;
}

static void off_for_all(struct host *host, flux_jobid_t id, const char *where)
{
    if (host->off[0])
        return;
    snprintf(host->off, sizeof(host->off),
             "what its own effects called took more than %g s and %g %% of the job manager's time",
             cpu_burst, cpu_share * 100);
    record_failed(host, FLUX_JOBID_ANY, where, host->off);
    record_failed(host, id, where, "switched off, until it is loaded again");
    if (!(host->release = flux_future_create(NULL, NULL)))
        return;
    flux_future_set_flux(host->release, host->h);
    flux_future_then(host->release, HOST_AT_ONCE, release, host);
}

const char *bounds_reason(const struct host *host)
{
    return host->off[0] ? host->off : "switched off for this job";
}

// --- counting ---

int bounds_act(struct host *host, flux_jobid_t id)
{
    struct record *record = record_get(host, id);

    if (!record)
        return 0; // Flux will say that there is no such job
    if (record->effects == EFFECTS_OFF)
        return host->charging ? -1 : 0;
    record->effects = EFFECTS_SOME;
    if (record->visit != host->visits) {
        record->visit = host->visits;
        record->acts = 0;
    }
    if (!host->charging && ++record->acts > BURST) {
        off_for_job(record, "job", "its own effects in one call were too many");
        return -1;
    }
    if (!host->charging || (*filled(&record->calls, host->turned, BURST, rate) -= 1.) >= 0.)
        return 0;
    off_for_job(record, "job", "its own effects caused too many others");
    return -1;
}

int bounds_enter(struct visit *visit, struct host *host, flux_jobid_t id, const char *where,
                 bool own)
{
    bool of_job = id != FLUX_JOBID_ANY;
    struct record *record = of_job && host->records ? record_find(host, id) : NULL;
    bool caused = own || host->depth > 0 || (record && record->effects == EFFECTS_SOME);

    *visit = (struct visit){host, id, where, caused && !host->charging};
    if (host->off[0] || (record && record->effects == EFFECTS_OFF))
        return -1;
    if (record && host->depth >= MAX_DEPTH)
        return off_for_job(record, where, "its own effects called it back too deeply"), -1;
    if (record && caused && (*filled(&record->calls, host->turned, BURST, rate) -= 1.) < 0.)
        return off_for_job(record, where, "its own effects called it back too often"), -1;
    if (record)
        record->effects = EFFECTS_NONE;
    if (host->depth == 0)
        host->visits++;
    if (visit->charged) {
        host->charging = true;
        host->since = now(CLOCK_THREAD_CPUTIME_ID);
    }
    host->depth++;
    return 0;
}

void bounds_failed(const struct visit *visit, int rc, const char *error)
{
    struct record *record = NULL;

    if (rc == SANDBOX_RUNAWAY && visit->id != FLUX_JOBID_ANY)
        record = record_get(visit->host, visit->id);
    if (record)
        off_for_job(record, visit->where, error);
    else
        record_failed(visit->host, visit->id, visit->where, error);
}

void bounds_leave(struct visit *visit)
{
    struct host *host = visit->host;
    struct record *record;
    double used;

    host->depth--;
    if (!visit->charged)
        return;
    host->charging = false;
    used = now(CLOCK_THREAD_CPUTIME_ID) - host->since;
    host->turn_cpu += used;
    host->slice.left -= used;
    if ((*filled(&host->cpu, host->turned, cpu_burst, cpu_share) -= used) < 0.) {
        off_for_all(host, visit->id, visit->where);
        return;
    }
    if (host->turn_cpu < turn_cpu || visit->id == FLUX_JOBID_ANY)
        return;
    record = record_find(host, visit->id);
    if (record && record->effects == EFFECTS_SOME) // else nothing follows from it
        off_for_job(record, visit->where, "its own effects kept the job manager from all else");
}
