# SPDX-License-Identifier: LGPL-3.0-or-later
"""A clock that is wrong.

A fake, as no namespace has a real-time clock of its own: a library to preload. It moves the clock
of dynamic programs: of all that have the variables, or of pods' agents, entrypoints and ranks on
one node, where `TEST_NODE` names it and `TEST_SESSION` the session there. Kubernetes itself, linked
statically, keeps the right time.
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

CLOCK = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* Whether we are on the node that is meant: a rank is where its directory is, a pod has a name. */
static int meant(void)
{
    const char *session = getenv("TEST_SESSION"), *directory = getenv("DOVETAIL_DIR");
    const char *only = getenv("TEST_NODE"), *node = getenv("NODE_NAME");
    if (!only)
        return 1;
    return directory ? strstr(directory, session) != NULL : node && strcmp(only, node) == 0;
}

static long wrong(void)
{
    static const volatile long long *said;
    const char *name = getenv("TEST_CLOCK");
    if (!name || !meant())
        return 0;
    if (!said) {
        const int file = open(name, O_RDONLY | O_CLOEXEC);
        void *there = file < 0 ? MAP_FAILED : mmap(NULL, 8, PROT_READ, MAP_SHARED, file, 0);
        if (there == MAP_FAILED)
            abort();
        close(file);
        said = there;
    }
    return (long)*said;
}

int clock_gettime(clockid_t id, struct timespec *t)
{
    const long code = syscall(SYS_clock_gettime, id, t);
    if (code == 0 && id == CLOCK_REALTIME)
        t->tv_sec += wrong();
    return (int)code;
}

time_t time(time_t *t)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t)
        *t = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *t, void *zone)
{
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec;
    t->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""


def made(folder: Path) -> tuple[dict[str, str], Callable[[int], None]]:
    """Variables for it, and what sets the clock by so many seconds; with a library in a folder."""
    source, library, value = (folder / name for name in ("clock.c", "clock.so", "clock"))
    source.write_text(CLOCK)
    words = ["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, source]
    subprocess.run(words, check=True)
    value.touch(mode=0o644)
    for path in (library, value):
        path.chmod(0o755)

    def put(seconds: int) -> None:
        with value.open("r+b" if value.stat().st_size else "wb") as file:
            file.write(struct.pack("=q", seconds))

    put(0)
    return {"LD_PRELOAD": str(library), "TEST_CLOCK": str(value)}, put
