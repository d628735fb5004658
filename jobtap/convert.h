// SPDX-License-Identifier: LGPL-3.0-or-later
// Lua values as JSON. Knows nothing of Flux.
#ifndef DOVETAIL_CONVERT_H
#define DOVETAIL_CONVERT_H

#include <jansson.h>
#include <lua.h>

// Pushes a box with the JSON of the Lua value at `index`, and returns what is in it. Raises an
// error where there is none: functions, mixed keys, text that is not UTF-8, NaN, cycles.
json_t *json_from_lua(lua_State *L, int index);

#endif
