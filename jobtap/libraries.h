// SPDX-License-Identifier: LGPL-3.0-or-later
// The part of Lua's standard library that cannot hang, escape or abort.
#ifndef DOVETAIL_LIBRARIES_H
#define DOVETAIL_LIBRARIES_H

#include <lua.h>

int libraries_open(lua_State *L); // to be called protected

#endif
