// SPDX-License-Identifier: LGPL-3.0-or-later
// The global table `jobtap` of a script, by which it registers its handlers.
#ifndef DOVETAIL_API_H
#define DOVETAIL_API_H

#include <lua.h>

int api_open(lua_State *L); // to be called protected, with the host

#endif
