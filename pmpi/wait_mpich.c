/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * MPICH's way to the wait policy (steps 5 and 7): its progress loop, since 4.0 over UCX, never
 * gives way, but asks UCX for news at each turn. No news means that the library is idle, or
 * that it was busy in its own shared memory: then the next turns find something.
 *
 * In: calls of ucp_worker_progress by libmpich. Out: the same call, and a wait after it.
 */
#include <dlfcn.h>
#include <mpi.h>

#include "rank.h"
#include "wait.h"

#if defined(MPICH)

RANK_EXPORT unsigned ucp_worker_progress(void *worker);

unsigned ucp_worker_progress(void *worker)
{
    static unsigned (*next)(void *);
    if (next == NULL) /* all threads would find the same */
        *(void **)&next = dlsym(RTLD_NEXT, "ucp_worker_progress");
    unsigned news = next(worker);
    if (news == 0 && wait_inside())
        wait_idle();
    return news;
}

#else
typedef int not_an_empty_file;
#endif
