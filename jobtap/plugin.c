// SPDX-License-Identifier: LGPL-3.0-or-later
// A jobtap plugin that runs a jobtap plugin written in Lua: X.so, a link to this library, runs
// the X.lua beside it. See dovetail-jobtap(7).
//
// Inputs: the topics of flux-jobtap-plugins(7), the instance's configuration. Outputs: whatever the
// script does to jobs, errors in the log and on jobs. Invariant: every way into Lua goes through
// sandbox_call().
#include <flux/core.h>
#include <flux/jobtap.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "api.h"
#include "bounds.h"
#include "callback.h"
#include "host.h"
#include "record.h"
#include "sandbox.h"

// The first configuration refuses a broken script, since only here its error reaches the user.
static int conf_callback(flux_plugin_t *p, const char *topic, flux_plugin_arg_t *args, void *arg)
{
    struct host *host = arg;
    struct call call = {.host = host, .topic = topic, .args = args, .id = FLUX_JOBID_ANY};

    if (!host->loaded)
        return host_refuse(host, args, "%s", host->last_error);
    call.handler = handler_find(host, topic);
    (void)p;
    return call.handler ? callback_run(&call) : 0;
}

static json_t *topic_counts(const struct host *host)
{
    json_t *counts = json_object();
    struct handler *handler;

    for (handler = host->handlers; handler; handler = handler->next)
        json_object_set_new(counts, handler->topic, json_integer(handler->calls));
    return counts;
}

static int query_callback(flux_plugin_t *p, const char *topic, flux_plugin_arg_t *args, void *arg)
{
    struct host *host = arg;
    struct call call = {.host = host, .topic = topic, .args = args, .id = FLUX_JOBID_ANY};

    if (flux_plugin_arg_pack(args, FLUX_PLUGIN_ARG_OUT, "{s:s s:s s:I s:I s:s s:s s:i s:I s:o}",
                             "script", host->script, "lua", LUA_VERSION, "calls",
                             (json_int_t)host->calls, "errors", (json_int_t)host->errors,
                             "last_error", host->last_error, "off", host->off, "waiting",
                             host->waiting, "memory", (json_int_t)sandbox_memory(host->sandbox),
                             "topics", topic_counts(host)) < 0)
        return -1;
    if ((call.handler = handler_find(host, topic)))
        callback_run(&call); // a failure is in the log, and the next query's last_error
    (void)p;
    return 0;
}

static void host_destroy(void *arg)
{
    struct host *host = arg;

    if (!host)
        return;
    flux_future_destroy(host->release);
    flux_watcher_destroy(host->turns);
    orphans_abandon(host);
    sandbox_destroy(host->sandbox);
    handlers_destroy(host);
    free(host->script);
    free(host);
}

static char *script_of(const char *path)
{
    size_t stem = strlen(path);
    char *script;

    if (stem > 3 && strcmp(path + stem - 3, ".so") == 0)
        stem -= 3;
    if (asprintf(&script, "%s%.*s.lua", strchr(path, '/') ? "" : "./", (int)stem, path) < 0)
        return NULL;
    return script;
}

static struct host *host_create(flux_plugin_t *p)
{
    struct host *host = calloc(1, sizeof(*host));

    if (!host || !(host->script = script_of(flux_plugin_get_path(p))))
        goto error;
    host->p = p;
    if (!(host->h = flux_jobtap_get_flux(p)) || !(host->sandbox = sandbox_create(NULL)) ||
        bounds_watch(host) < 0)
        goto error;
    sandbox_set_owner(host->sandbox, host);
    return host;
error:
    host_destroy(host);
    return NULL;
}

// Exported, unlike everything else.
__attribute__((visibility("default"))) int flux_plugin_init(flux_plugin_t *p)
{
    struct host *host = host_create(p);

    if (!host)
        return -1;
    // Under a key, so that it is destroyed while the plugin can still act on jobs.
    if (flux_plugin_aux_set(p, "dovetail::host", host, host_destroy) < 0) {
        host_destroy(host);
        return -1;
    }
    host->loaded = sandbox_call(host->sandbox, api_open, host, host->last_error) == 0 &&
                   sandbox_run(host->sandbox, host->script, host->last_error) == 0;
    // After those of the script: Flux tries a plugin's handlers in turn, twice for each topic.
    if (flux_plugin_add_handler(p, "conf.update", conf_callback, host) < 0 ||
        flux_plugin_add_handler(p, "plugin.query", query_callback, host) < 0)
        return -1;
    return 0;
}
