// SPDX-License-Identifier: LGPL-3.0-or-later
// JSON values as Lua sees them. Used by the jobtap host, and alone by the unit tests; knows nothing
// of Flux.
//
// Objects and arrays are not copied: Lua gets a read-only view that converts what is asked for,
// because a whole jobspec costs ten times what a policy looks at. Invariant: no JSON value leaks
// when Lua raises an error, since each is owned by a userdata from the start.
#ifndef DOVETAIL_JSON_H
#define DOVETAIL_JSON_H

#include <jansson.h>
#include <lua.h>

// Once per state, protected.
void json_open(lua_State *L);

// Pushes a view of `value`, or the Lua value of a scalar; null and NULL become nil.
void json_push(lua_State *L, json_t *value);

// Pushes an empty box: assign *box a new reference, and the box frees it when collected.
json_t **json_box(lua_State *L);

// The box at `index`, NULL if there is none. Allocates nothing.
json_t **json_to_box(lua_State *L, int index);

#endif
