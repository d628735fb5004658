// SPDX-License-Identifier: LGPL-3.0-or-later
// What a plugin's own effects may call back: how often for each job, how deeply, and for how much
// processor time altogether. What others do calls a plugin as often as they do it; but an effect
// that calls the plugin that had it, which then has it again, would keep the job manager for ever.
//
// Nobody else is served before the queue of events that a plugin's effects make is empty, so what
// it may use fills up only when the job manager has turned to others.
//
// A plugin that goes beyond is switched off: for the job, where that alone suffices, or for all
// jobs. It is not called any more then, and what it was to judge is refused.
#ifndef DOVETAIL_BOUNDS_H
#define DOVETAIL_BOUNDS_H

#include <stdbool.h>

#include "host.h"

// One call of the script's code: for a topic, or for a reply or timer of its own.
struct visit {
    struct host *host;
    flux_jobid_t id;
    const char *where;
    bool charged; // its processor time is the plugin's own doing
};

// Has the reactor's turns watched; -1 where that fails.
int bounds_watch(struct host *host);
// Returns -1 where the script is not to be called. Otherwise, bounds_leave() follows.
int bounds_enter(struct visit *visit, struct host *host, flux_jobid_t id, const char *where,
                 bool own);
void bounds_leave(struct visit *visit);
// The call failed; what ran away, as sandbox_call() says, would do so at the job's next event too.
void bounds_failed(const struct visit *visit, int rc, const char *error);
// Seconds for which no reply and no timer of the script is to be served, since others wait.
double bounds_wait(struct host *host);
// The script is about to act on a job; returns -1 where it did so too often, and is to end.
int bounds_act(struct host *host, flux_jobid_t id);
// Why the script is not called for a job.
const char *bounds_reason(const struct host *host);

#endif
