// SPDX-License-Identifier: LGPL-3.0-or-later
// See host.h: the script's name, its handlers, and what the topics of the job manager mean.
#include "host.h"

#include <fnmatch.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *host_name(const struct host *host)
{
    return strrchr(host->script, '/') + 1;
}

// Flux cuts what is longer, be it in the middle of a letter, and takes none of it then.
int host_refuse(struct host *host, flux_plugin_arg_t *args, const char *format, ...)
{
    char words[sizeof(((flux_error_t *)0)->text)];
    va_list values;

    va_start(values, format);
    if (vsnprintf(words, sizeof(words), format, values) >= (int)sizeof(words))
        words[sizeof(words) - 2] = '+'; // as Flux does
    va_end(values);
    sandbox_tidy(words);
    return flux_jobtap_reject_job(host->p, args, "%s", words);
}

// --- topics ---

bool topic_matches(const char *topic, const char *const patterns[])
{
    for (; *patterns; patterns++)
        if (fnmatch(*patterns, topic, 0) == 0)
            return true;
    return false;
}

// These two are asked in each call, and fnmatch() makes wide characters of all first.
static bool begins(const char *topic, const char *with)
{
    return strncmp(topic, with, strlen(with)) == 0;
}

bool topic_may_reject(const char *topic)
{
    return topic_introduces(topic) || strcmp(topic, "job.validate") == 0 ||
           begins(topic, "job.update.");
}

bool topic_introduces(const char *topic)
{
    return strcmp(topic, "job.create") == 0 || begins(topic, "job.dependency.");
}

// --- handlers ---

struct handler *handler_find(struct host *host, const char *topic)
{
    struct handler *handler;

    for (handler = host->handlers; handler; handler = handler->next)
        if (fnmatch(handler->topic, topic, 0) == 0)
            return handler;
    return NULL;
}

void handlers_destroy(struct host *host)
{
    struct handler *handler;

    while ((handler = host->handlers)) {
        host->handlers = handler->next;
        free(handler->topic);
        free(handler);
    }
}

struct handler *handler_add(struct host *host, const char *topic, int function)
{
    struct handler *handler = calloc(1, sizeof(*handler));
    struct handler **end = &host->handlers;

    if (!handler || !(handler->topic = strdup(topic)))
        goto error;
    handler->host = host;
    handler->function = function;
    while (*end)
        end = &(*end)->next;
    *end = handler; // as in Flux, the first that matches is called
    return handler;
error:
    free(handler);
    return NULL;
}
