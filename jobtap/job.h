// SPDX-License-Identifier: LGPL-3.0-or-later
// The job that Lua sees: fields of the job manager, converted when they are asked for, and methods.
// A script may keep a job after its callback; its fields are then looked up anew.
#ifndef DOVETAIL_JOB_H
#define DOVETAIL_JOB_H

#include <flux/core.h>
#include <lua.h>

// Once per state, protected. Takes the table of methods from the top of the stack.
void job_open(lua_State *L);
void job_push(lua_State *L, flux_jobid_t id);
// The job that is the first argument of a method; raises an error where there is none.
flux_jobid_t job_check(lua_State *L);

#endif
