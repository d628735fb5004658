// SPDX-License-Identifier: LGPL-3.0-or-later
// A call from the job manager becomes a call of the script's function for its topic, whose answer
// becomes output arguments.
#ifndef DOVETAIL_CALLBACK_H
#define DOVETAIL_CALLBACK_H

#include "host.h"

// Serves a call; returns what the job manager is to get: 0, or -1 where it was rejected.
int callback_run(struct call *call);
// The jobtap callback of every topic that is about a job; `arg` is the handler.
int callback_job(flux_plugin_t *p, const char *topic, flux_plugin_arg_t *args, void *arg);

#endif
