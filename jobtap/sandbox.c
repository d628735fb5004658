// SPDX-License-Identifier: LGPL-3.0-or-later
// See sandbox.h. Three caps work together: the allocator refuses bytes, a hook counts
// instructions, and the same hook looks at the clock at every function call, because one call of
// a library function (sorting, joining long strings) can cost as much as a million instructions.
#include "sandbox.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "libraries.h"

enum { COUNT_INTERVAL = 1000, MAX_SOURCE = 1 << 20 };

const struct sandbox_limits sandbox_defaults = {
    .memory = 32 << 20,
    .instructions = 4 * 1000 * 1000,
    .seconds = .05,
    .actions = 2000,
};

struct budget {
    long instructions;
    int actions;
    double wall; // when to look at the processor clock, which is much dearer to read
    double cpu;  // its limit, 0 if it was not looked at yet
    bool runaway;
};

struct sandbox {
    lua_State *L;
    struct sandbox_limits limits;
    struct budget budget;
    size_t memory;
    void *owner;
};

static const char stop_key; // its address is the error value of sandbox_stop()

static struct sandbox *sandbox_of(lua_State *L)
{
    return *(struct sandbox **)lua_getextraspace(L);
}

static double now(clockid_t clock)
{
    struct timespec t;

    clock_gettime(clock, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void *allocate(void *arg, void *p, size_t old, size_t size)
{
    struct sandbox *sandbox = arg;
    void *q;

    if (!p)
        old = 0; // Lua passes a type there
    if (size == 0) {
        free(p);
        sandbox->memory -= old;
        return NULL;
    }
    if (size > old && size - old > sandbox->limits.memory - sandbox->memory)
        return NULL;
    if (!(q = realloc(p, size)))
        return NULL;
    sandbox->memory += size - old;
    return q;
}

static void stop_runaway(lua_State *L, int amount, const char *unit)
{
    sandbox_of(L)->budget.runaway = true;
    luaL_where(L, 0);
    if (lua_rawlen(L, -1) == 0)
        luaL_where(L, 1); // in a library function: the line that called it
    lua_pushfstring(L, "stopped after %d %s", amount, unit);
    lua_concat(L, 2);
    lua_error(L);
}

static void hook(lua_State *L, lua_Debug *event)
{
    struct sandbox *sandbox = sandbox_of(L);
    struct budget *budget = &sandbox->budget;
    double wall, cpu;

    if (event->event == LUA_HOOKCOUNT && (budget->instructions -= COUNT_INTERVAL) <= 0)
        stop_runaway(L, sandbox->limits.instructions, "instructions");
    if ((wall = now(CLOCK_MONOTONIC)) < budget->wall)
        return;
    // The machine may have been busy with others: only our own time counts, from here on.
    cpu = now(CLOCK_THREAD_CPUTIME_ID);
    if (budget->cpu == 0.)
        budget->cpu = cpu + sandbox->limits.seconds;
    if (cpu > budget->cpu)
        stop_runaway(L, sandbox->limits.seconds * 1000, "ms");
    budget->wall = wall + sandbox->limits.seconds / 10;
}

static void budget_fill(struct sandbox *sandbox)
{
    struct sandbox_limits *limits = &sandbox->limits;

    sandbox->budget = (struct budget){
        .instructions = limits->instructions,
        .actions = limits->actions,
        .wall = now(CLOCK_MONOTONIC) + limits->seconds,
    };
}

// Length of the UTF-8 sequence that text begins with, 0 if it is none.
static int sequence(const unsigned char *text)
{
    int i, length = *text < 0x80 ? 1 : *text < 0xc2 ? 0 : *text < 0xe0 ? 2 : *text < 0xf0 ? 3 : 4;

    if (*text > 0xf4)
        return 0;
    for (i = 1; i < length; i++)
        if ((text[i] & 0xc0) != 0x80)
            return 0;
    return length;
}

// A message goes to places that take one line of UTF-8 only, and it was cut to fit.
void sandbox_tidy(char *text)
{
    unsigned char *at = (unsigned char *)text;
    int length;

    for (; *at; at += length) {
        if ((length = sequence(at)) == 0 || *at < ' ')
            *at = ' ';
        length += length == 0;
    }
}

static void describe_error(lua_State *L, char *error)
{
    const char *text = lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : NULL;

    if (text)
        snprintf(error, SANDBOX_ERROR_SIZE, "%s", text);
    else
        snprintf(error, SANDBOX_ERROR_SIZE, "error of type %s", luaL_typename(L, -1));
    sandbox_tidy(error);
}

int sandbox_call(struct sandbox *sandbox, lua_CFunction body, void *arg, char *error)
{
    lua_State *L = sandbox->L;
    struct budget outer = sandbox->budget;
    int rc;

    if (!lua_checkstack(L, LUA_MINSTACK)) {
        snprintf(error, SANDBOX_ERROR_SIZE, "stack overflow");
        return -1;
    }
    budget_fill(sandbox);
    lua_pushcfunction(L, body);
    lua_pushlightuserdata(L, arg);
    if (lua_pcall(L, 1, 0, 0) == LUA_OK)
        return sandbox->budget = outer, 0;
    rc = sandbox->budget.runaway ? SANDBOX_RUNAWAY : -1;
    sandbox->budget = outer;
    if (lua_touserdata(L, -1) == &stop_key)
        rc = SANDBOX_STOPPED;
    else
        describe_error(L, error);
    lua_pop(L, 1);
    return rc;
}

int sandbox_stop(lua_State *L)
{
    lua_pushlightuserdata(L, (void *)&stop_key);
    return lua_error(L);
}

void sandbox_act(lua_State *L)
{
    struct sandbox *sandbox = sandbox_of(L);

    if (--sandbox->budget.actions < 0)
        luaL_error(L, "stopped after %d actions", sandbox->limits.actions);
}

struct source {
    char *text;
    size_t size;
    const char *name;
};

static int run_source(lua_State *L)
{
    struct source *source = lua_touserdata(L, 1);

    lua_pushfstring(L, "@%s", source->name);
    if (luaL_loadbufferx(L, source->text, source->size, lua_tostring(L, -1), "t") != LUA_OK)
        return lua_error(L);
    lua_call(L, 0, 0);
    return 0;
}

static char *read_source(const char *path, size_t *size)
{
    FILE *f = NULL;
    char *text = NULL;
    struct stat st;

    if (!(f = fopen(path, "re")) || fstat(fileno(f), &st) < 0)
        goto error;
    if (!S_ISREG(st.st_mode) || st.st_size > MAX_SOURCE) {
        errno = S_ISREG(st.st_mode) ? EFBIG : EINVAL;
        goto error;
    }
    if (!(text = malloc(st.st_size + 1)))
        goto error;
    *size = fread(text, 1, st.st_size, f);
    fclose(f);
    return text;
error:
    if (f)
        fclose(f);
    return NULL;
}

int sandbox_run(struct sandbox *sandbox, const char *path, char *error)
{
    struct source source = {.name = strrchr(path, '/')};
    int rc;

    source.name = source.name ? source.name + 1 : path;
    if (!(source.text = read_source(path, &source.size))) {
        snprintf(error, SANDBOX_ERROR_SIZE, "%s: %s", path, strerror(errno));
        return -1;
    }
    rc = sandbox_call(sandbox, run_source, &source, error);
    free(source.text);
    return rc;
}

struct sandbox *sandbox_create(const struct sandbox_limits *limits)
{
    struct sandbox *sandbox;
    char error[SANDBOX_ERROR_SIZE];

    if (!(sandbox = calloc(1, sizeof(*sandbox))))
        return NULL;
    sandbox->limits = limits ? *limits : sandbox_defaults;
    if (!(sandbox->L = lua_newstate(allocate, sandbox)))
        goto error;
    *(struct sandbox **)lua_getextraspace(sandbox->L) = sandbox;
    lua_sethook(sandbox->L, hook, LUA_MASKCALL | LUA_MASKCOUNT, COUNT_INTERVAL);
    if (sandbox_call(sandbox, libraries_open, NULL, error) != 0)
        goto error;
    return sandbox;
error:
    sandbox_destroy(sandbox);
    errno = ENOMEM;
    return NULL;
}

void sandbox_destroy(struct sandbox *sandbox)
{
    int saved_errno = errno;

    if (!sandbox)
        return;
    if (sandbox->L)
        lua_close(sandbox->L);
    free(sandbox);
    errno = saved_errno;
}

void sandbox_set_owner(struct sandbox *sandbox, void *owner)
{
    sandbox->owner = owner;
}

void *sandbox_owner(lua_State *L)
{
    return sandbox_of(L)->owner;
}

size_t sandbox_memory(const struct sandbox *sandbox)
{
    return sandbox->memory;
}
