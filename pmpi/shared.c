/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * Has MPICH's shared memory in the run's directory, so that it goes with that.
 *
 * MPICH 5 keeps the name of a segment until its ranks end, and that of a rank which is killed stays
 * for ever. It cannot be told where to have it.
 *
 * In: DOVETAIL_DIR, and calls of shm_open(3) and shm_unlink(3). Out: the same, there. Invariants:
 * all ranks of a node have the same directory, and no other name than MPICH's is touched. Where
 * that is of no use, as on a node that does not have it, the segment is where MPICH has it.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "attributes.h"

EXPORTED int shm_open(const char *name, int flags, mode_t mode);
EXPORTED int shm_unlink(const char *name);

static bool place(char *path, size_t size, const char *name)
{
    const char *dir = secure_getenv("DOVETAIL_DIR");
    if (dir == NULL || dir[0] != '/' || strncmp(name, "/mpich_shm_", 11) != 0)
        return false;
    int length = snprintf(path, size, "%s%s", dir, name);
    return length > 0 && (size_t)length < size;
}

int shm_open(const char *name, int flags, mode_t mode)
{
    char path[4096];
    int (*next)(const char *, int, mode_t);
    int fd = -1;
    if (place(path, sizeof(path), name) &&
        ((fd = open(path, flags | O_NOFOLLOW | O_CLOEXEC, mode)) >= 0 || errno == EEXIST))
        return fd;
    *(void **)&next = dlsym(RTLD_NEXT, "shm_open");
    return next(name, flags, mode);
}

int shm_unlink(const char *name)
{
    char path[4096];
    int (*next)(const char *);
    if (place(path, sizeof(path), name) && unlink(path) == 0)
        return 0;
    *(void **)&next = dlsym(RTLD_NEXT, "shm_unlink");
    return next(name);
}
