/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * How a rank waits inside MPI: as shipped, giving way, or asleep on a doorbell.
 *
 * In: the file `control` in DOVETAIL_DIR (page.h), which the launcher may change at any time.
 * Out: the file `bells` there, which the ranks of one node share (wait.c).
 *
 * Invariants: every function here is safe to call from any thread, in any mode, and keeps
 * errno except where it returns -1. Only a thread between wait_enter and wait_leave waits in
 * any other way than the program's own.
 */
#ifndef DOVETAIL_WAIT_H
#define DOVETAIL_WAIT_H

#include <poll.h>
#include <stdbool.h>

/* How a call waits; the classes of calls.def. */
enum {
    WAIT_NONE,
    WAIT_START,
    WAIT_SEND,
    WAIT_P2P,
    WAIT_COLL,
    WAIT_INIT,
    WAIT_FINAL,
    WAIT_ABORT,
    WAIT_OPEN,
    WAIT_CLOSE
};

/* After MPI_Init; `spawned` says that the world is not the job's first, `holds_lock` that the
 * library waits with a lock that other threads need: then nobody sleeps. 0, or -1 with errno: the
 * program waits as ever. */
int wait_init(const char *dir, int world_rank, int world_size, bool spawned, bool holds_lock);
/* At the entry of a wrapped call, the outermost only; `kind` is its class, WAIT_SEND etc. */
void wait_enter(int kind);
/* At its exit: rings the peers that sleep, unless the class says that it sends nothing and
 * no turn of the library's progress loop moved anything. */
void wait_leave(void);
/* Before PMPI_Finalize, which then waits as ever. */
void wait_finalize(void);
/* MPI begins again, after its end; false without a policy to follow. */
bool wait_again(bool holds_lock);
/* Is this the main thread after that? */
bool wait_ending(void);
/* In a forked child: it is no rank. */
void wait_child(void);

/* Is this thread inside a wrapped call, with a policy to follow? */
bool wait_inside(void);
/* The library found nothing to do: wait a little, as the policy says. */
void wait_idle(void);
/* Around a turn of the library's progress loop; one without wait_idle moved something. */
void wait_turn(void);
void wait_turned(void);
/* In a turn, the library has looked for messages here, and there were none. */
void wait_looked(const struct pollfd *at, nfds_t count);

#endif
