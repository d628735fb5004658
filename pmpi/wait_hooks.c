/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * Where the MPI libraries meet the wait policy (steps 5 and 7): functions that their progress
 * loops call in other libraries, and that this one, preloaded, stands in for.
 *
 *   sched_yield          Open MPI, at a turn that found nothing to do, if mpi_yield_when_idle=1
 *   opal_progress        Open MPI, one turn: if it did not give way, then something moved
 *   ucp_worker_progress  MPICH over UCX, one part of a turn; 0 if nothing moved in there
 *
 * MPICH has shared memory of its own beside UCX, so there a turn without news may have moved
 * something; the yields before each sleep and the sleep's timeout bound what that costs.
 *
 * In: those calls. Out: the same calls, and a wait. Invariant: a caller outside MPI, or without
 * a policy, gets exactly what it asked for.
 */
#include <dlfcn.h>
#include <mpi.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "rank.h"
#include "wait.h"

RANK_EXPORT int sched_yield(void)
{
    if (!wait_inside())
        return (int)syscall(SYS_sched_yield);
    wait_idle();
    return 0;
}

/* The function that we stand in for. A library that the program loaded for itself alone is not
 * among the next ones, but rank_next knows the names of the MPI libraries. */
static void *hooked(const char *name)
{
    return rank_next(dlsym(RTLD_NEXT, name), name);
}

#if defined(OPEN_MPI)

RANK_EXPORT void opal_progress(void);

void opal_progress(void)
{
    static void (*next)(void);
    if (__builtin_expect(next == NULL, 0)) /* all threads find the same */
        *(void **)&next = hooked("opal_progress");
    wait_turn();
    next();
    wait_turned();
}

#else

RANK_EXPORT unsigned ucp_worker_progress(void *worker);

unsigned ucp_worker_progress(void *worker)
{
    static unsigned (*next)(void *);
    if (__builtin_expect(next == NULL, 0))
        *(void **)&next = hooked("ucp_worker_progress");
    wait_turn();
    unsigned moved = next(worker);
    if (moved == 0 && wait_inside())
        wait_idle();
    wait_turned();
    return moved;
}

#endif
