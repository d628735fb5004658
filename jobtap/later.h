// SPDX-License-Identifier: LGPL-3.0-or-later
// What a script asks for now and is told later: replies of Flux services, and timers. The functions
// are methods of a job in Lua.
#ifndef DOVETAIL_LATER_H
#define DOVETAIL_LATER_H

#include <lua.h>

int later_rpc(lua_State *L);
int later_after(lua_State *L);

#endif
