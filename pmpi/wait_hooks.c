/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * Where the MPI libraries meet the wait policy: functions that their progress
 * loops call in other libraries, and that this one, preloaded, stands in for.
 *
 *   sched_yield          Open MPI, at a turn that found nothing to do, if mpi_yield_when_idle=1
 *   opal_progress        Open MPI, one turn: if it did not give way, then something moved
 *   ucp_worker_progress  MPICH over UCX, one part of a turn; 0 if nothing moved in there
 *   read                 MPICH over UCX, the last wait of MPI_Finalize, for its starter's word
 *   poll, epoll_wait     both, in a turn: where messages from other nodes come from
 *
 * MPICH has shared memory of its own beside UCX, so there a turn without news may have moved
 * something; the yields before each sleep and the sleep's timeout bound what that costs.
 *
 * In: those calls. Out: the same calls, and a wait. Invariant: a caller outside MPI, or without
 * a policy, gets exactly what it asked for.
 */
#include <dlfcn.h>
#include <errno.h>
#include <mpi.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "attributes.h"
#include "next.h"
#include "wait.h"

EXPORTED int sched_yield(void)
{
    if (!wait_inside())
        return (int)syscall(SYS_sched_yield);
    wait_idle();
    return 0;
}

/* The libraries look at their connections with one of these, without waiting; see wait_looked. */
EXPORTED int poll(struct pollfd *at, nfds_t count, int timeout);
EXPORTED int epoll_wait(int set, struct epoll_event *events, int most, int timeout);

int poll(struct pollfd *at, nfds_t count, int timeout)
{
    static int (*next)(struct pollfd *, nfds_t, int);
    if (__builtin_expect(next == NULL, 0))
        *(void **)&next = dlsym(RTLD_NEXT, "poll");
    int found = next(at, count, timeout);
    if (found == 0 && timeout == 0 && wait_inside())
        wait_looked(at, count);
    return found;
}

int epoll_wait(int set, struct epoll_event *events, int most, int timeout)
{
    static int (*next)(int, struct epoll_event *, int, int);
    if (__builtin_expect(next == NULL, 0))
        *(void **)&next = dlsym(RTLD_NEXT, "epoll_wait");
    int found = next(set, events, most, timeout);
    if (found == 0 && timeout == 0 && wait_inside()) {
        struct pollfd at = {set, POLLIN, 0}; /* a set is ready when one in it is */
        wait_looked(&at, 1);
    }
    return found;
}

#if defined(OPEN_MPI)

EXPORTED void opal_progress(void);

void opal_progress(void)
{
    static void (*next)(void);
    if (__builtin_expect(next == NULL, 0)) /* all threads find the same */
        *(void **)&next = hooked_function("opal_progress", __builtin_return_address(0));
    wait_turn();
    next();
    wait_turned();
}

#else

static unsigned (*next_progress)(void *);
static void *last_worker; /* that MPI turned; NULL once it is destroyed */

EXPORTED unsigned ucp_worker_progress(void *worker);
EXPORTED void ucp_worker_destroy(void *worker);
EXPORTED ssize_t read(int fd, void *data, size_t size);

unsigned ucp_worker_progress(void *worker)
{
    if (__builtin_expect(next_progress == NULL, 0))
        *(void **)&next_progress =
            hooked_function("ucp_worker_progress", __builtin_return_address(0));
    last_worker = worker;
    wait_turn();
    unsigned moved = next_progress(worker);
    if (moved == 0 && wait_inside())
        wait_idle();
    wait_turned();
    return moved;
}

void ucp_worker_destroy(void *worker)
{
    static void (*next)(void *);
    if (next == NULL)
        *(void **)&next = hooked_function("ucp_worker_destroy", __builtin_return_address(0));
    if (worker == last_worker)
        last_worker = NULL;
    next(worker);
}

/* MPICH 4.0 ends with a barrier of its starter's, and waits for that with a plain read. A rank
 * that still has to close a connection over TCP needs its peer's part of it, and hung for ever
 * with a peer that reads: so that one goes on with its part until there is something to read. */
ssize_t read(int fd, void *data, size_t size)
{
    static ssize_t (*next)(int, void *, size_t);
    if (__builtin_expect(next == NULL, 0))
        *(void **)&next = dlsym(RTLD_NEXT, "read");
    if (__builtin_expect(wait_ending() && last_worker != NULL, 0)) {
        const char *starter = getenv("PMI_FD");
        struct pollfd answer = {fd, POLLIN, 0};
        int saved = errno, pause = 0, found = 0;
        while (starter && atoi(starter) == fd &&
               ((found = poll(&answer, 1, pause)) == 0 || (found < 0 && errno == EINTR)))
            pause = next_progress(last_worker) ? 0 : 1; /* ms */
        errno = saved;
    }
    return next(fd, data, size);
}

#endif
