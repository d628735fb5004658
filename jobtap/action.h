// SPDX-License-Identifier: LGPL-3.0-or-later
// What Lua can do to a job. An action that Flux refuses (the job may have ended meanwhile) returns
// nil and why; one that is called wrongly raises an error.
#ifndef DOVETAIL_ACTION_H
#define DOVETAIL_ACTION_H

#include <lua.h>

// Pushes the table of a job's methods.
void action_push_methods(lua_State *L);

#endif
