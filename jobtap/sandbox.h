// SPDX-License-Identifier: LGPL-3.0-or-later
// A Lua state that cannot hang, escape or abort the program it lives in.
//
// Used by the jobtap host, and alone by the unit tests. Knows nothing of Flux.
// Inputs: Lua 5.3 or 5.4 source text. Invariants: Lua runs only inside sandbox_call(), where it
// has a cap of memory, instructions and processor time; every allocation of Lua is counted;
// no library function can loop without end on small input (so none with patterns), read a file,
// load code, or catch the error that a cap raises.
#ifndef DOVETAIL_SANDBOX_H
#define DOVETAIL_SANDBOX_H

#include <lauxlib.h>
#include <lua.h>
#include <stddef.h>

struct sandbox_limits {
    size_t memory;     // bytes that Lua may hold
    long instructions; // of the virtual machine, for each outermost call
    double seconds;    // of wall time, likewise, and then of processor time
    int actions;       // calls of sandbox_act(), likewise
};
extern const struct sandbox_limits sandbox_defaults;

struct sandbox;

// Returns NULL with errno set. `limits` may be NULL for the defaults.
struct sandbox *sandbox_create(const struct sandbox_limits *limits);
void sandbox_destroy(struct sandbox *sandbox);

// The one gate: runs `body` with `arg` as its only argument (a light userdata), protected.
// Everything that touches Lua's stack or may allocate goes in there. May be called from inside
// itself; the inner call has caps of its own. Returns 0, or -1 with a message in `error`, or, where
// a cap of time ended it, SANDBOX_RUNAWAY with one; if the body ended in sandbox_stop(),
// SANDBOX_STOPPED.
enum { SANDBOX_STOPPED = 1, SANDBOX_RUNAWAY = -2, SANDBOX_ERROR_SIZE = 512 };
int sandbox_call(struct sandbox *sandbox, lua_CFunction body, void *arg, char *error);

// Runs a file of Lua source (no bytecode), protected. Returns like sandbox_call().
int sandbox_run(struct sandbox *sandbox, const char *path, char *error);

// Puts spaces where a text is no UTF-8, perhaps since it was cut, and where its lines end.
void sandbox_tidy(char *text);

// For C functions that Lua calls: ends the running sandbox_call() as SANDBOX_STOPPED.
int sandbox_stop(lua_State *L);
// For C functions that act on the world: raises an error once a call has acted too often.
void sandbox_act(lua_State *L);

// The pointer given here is what sandbox_owner() returns for every state of this sandbox.
void sandbox_set_owner(struct sandbox *sandbox, void *owner);
void *sandbox_owner(lua_State *L);

size_t sandbox_memory(const struct sandbox *sandbox);

#endif
