// SPDX-License-Identifier: LGPL-3.0-or-later
// Runs Lua in the host's sandbox without Flux, for the unit tests (and valgrind, sanitizers).
//
//   core_test [--memory=MB] [--seconds=S] JSON SCRIPT...
//
// Runs the scripts in order, then calls the global function `main` with a view of JSON. Prints
// the JSON of what it returns, or the error as `error: ...`; either way the exit code is 0.
// `again = true` makes it call `main` a second time, to see what an error left behind.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "convert.h"
#include "json.h"
#include "sandbox.h"

static int prepare(lua_State *L)
{
    json_open(L);
    lua_pushcfunction(L, sandbox_stop);
    lua_setglobal(L, "stop");
    return 0;
}

static int call_main(lua_State *L)
{
    json_t **box = json_box(L);
    const char *text = lua_touserdata(L, 1);
    json_t *result;

    lua_getglobal(L, "main");
    if (!(*box = json_loads(text, JSON_DECODE_ANY, NULL)))
        return luaL_error(L, "the test's JSON is broken");
    json_push(L, *box);
    lua_call(L, 1, 1);
    result = json_from_lua(L, -1);
    json_dumpf(result, stdout, JSON_COMPACT | JSON_ENCODE_ANY | JSON_SORT_KEYS);
    putchar('\n');
    return 0;
}

static int wants_again(lua_State *L)
{
    lua_getglobal(L, "again");
    *(int *)lua_touserdata(L, 1) = lua_toboolean(L, -1);
    return 0;
}

static void tell(int rc, const char *error)
{
    if (rc == SANDBOX_STOPPED)
        printf("stopped\n");
    else if (rc < 0)
        printf("error: %s\n", error);
}

int main(int argc, char **argv)
{
    struct sandbox_limits limits = sandbox_defaults;
    struct sandbox *sandbox;
    char error[SANDBOX_ERROR_SIZE];
    int i, rc, again = 0;

    for (; argc > 1 && strncmp(argv[1], "--", 2) == 0; argc--, argv++) {
        if (strncmp(argv[1], "--memory=", 9) == 0)
            limits.memory = (size_t)atoi(argv[1] + 9) << 20;
        else if (strncmp(argv[1], "--seconds=", 10) == 0)
            limits.seconds = atof(argv[1] + 10);
    }
    if (argc < 3 || !(sandbox = sandbox_create(&limits)))
        return 2;
    rc = sandbox_call(sandbox, prepare, NULL, error);
    for (i = 2; i < argc && rc == 0; i++)
        rc = sandbox_run(sandbox, argv[i], error);
    tell(rc, error);
    if (rc == 0) {
        tell(sandbox_call(sandbox, call_main, argv[1], error), error);
        if (sandbox_call(sandbox, wants_again, &again, error) == 0 && again)
            tell(sandbox_call(sandbox, call_main, argv[1], error), error);
    }
    sandbox_destroy(sandbox);
    return 0;
}
