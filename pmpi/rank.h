/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * One MPI process and its page, as the wrappers see them.
 *
 * The files of this library lie in layers, and each calls only those before it:
 *
 *   page, attributes    what its readers share; how symbols are declared
 *   listen, shared      where MPI listens, and where MPICH's shared memory is
 *   weak                leaves programs without MPI, and of another, alone
 *   ticks, next, wait   the clock; the real functions; how a rank waits
 *   wait_hooks          the MPI libraries' progress loops, in which it does
 *   rank                this: the life of one rank's page
 *   openfoam, lammps    iterations of OpenFOAM, time steps of LAMMPS
 *   rhythm              iterations of programs that do not tell theirs
 *   own_beat            the same where a rank has to find them alone
 *   calls               the wrappers
 *
 * Invariants: `rank_page` is NULL unless this very process is between MPI_Init, or its
 * first session (or the first iteration, where that comes without either), and the end of the last
 * of them, and has a page to
 * write to; then every function here is safe to call from any thread. A wrapped call that runs
 * inside another one, on the same thread, is not counted.
 */
#ifndef DOVETAIL_RANK_H
#define DOVETAIL_RANK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "attributes.h"
#include "page.h"
#include "ticks.h"
#include "wait.h"

extern struct dovetail_page *rank_page;
extern bool rank_parallel;              /* MPI_THREAD_MULTIPLE: counts need atomic additions */
extern bool rank_waits;                 /* there is a wait policy to follow */
extern uint64_t rank_refresh_at;        /* tick at which the latest mark is too old */
extern PER_THREAD char *rank_outermost; /* frame of the wrapped call that this thread is in */
extern PER_THREAD bool rank_main;       /* this thread called MPI_Init */

/* Before and after MPI_Init or MPI_Session_init, which is call number `index` of the `ncalls` with
 * these names; `session` is the address of the new session, NULL after MPI_Init. Whichever comes
 * first makes the page. Without a usable DOVETAIL_DIR there will be no page, and the program runs
 * as ever. */
void rank_before_init(void);
void rank_begin(const char *const *names, unsigned ncalls, unsigned index, const void *session);
/* At an iteration of a program that has not called MPI_Init, and may never: its page is made, as
 * that of the only rank. True if it was made now. */
bool rank_serial(void);
/* Whether MPI_Finalize or MPI_Session_finalize will end the last of what has begun; before it does
 * so, after either, and before MPI_Abort. */
bool rank_last(void);
void rank_end(void);
void rank_finalized(void);
void rank_abort(void);
/* The program passed a boundary: `complete` iterations are over, says `source`, which is heard
 * unless a better one has spoken. */
void rank_iteration(uint32_t source, uint64_t complete);
/* The rhythm that was heard tells nothing: there is no source of iterations. */
void rank_no_rhythm(void);
/* Takes a new latest mark. */
void rank_refresh(uint64_t now);
/* MPI_Pcontrol(level). */
void rank_pcontrol(int level);
/* A wrapped call of a class begins, in this frame; returns its first tick, 0 if it is not to be
 * counted. */
static inline uint64_t rank_enter(unsigned index, int class, char *frame)
{
    struct dovetail_page *page = rank_page;
    if (page == NULL || (rank_outermost != NULL && frame < rank_outermost))
        return 0;
    rank_outermost = frame;
    uint64_t now = ticks_now();
    if (rank_main) {
        page->current = index + 1;
        page->enter_tick = now;
    }
    if (rank_waits)
        wait_enter(class);
    return now;
}

static inline void rank_add(struct dovetail_calls *calls, uint64_t ticks)
{
    if (__builtin_expect(rank_parallel, 0)) {
        __atomic_fetch_add(&calls->count, 1, __ATOMIC_RELAXED);
        __atomic_fetch_add(&calls->ticks, ticks, __ATOMIC_RELAXED);
    } else {
        calls->count++;
        calls->ticks += ticks;
    }
}

/* It ends; `start` is what rank_enter returned. */
static inline void rank_leave(unsigned index, uint64_t start)
{
    struct dovetail_page *page = rank_page;
    if (start == 0)
        return;
    rank_outermost = NULL;
    if (page == NULL)
        return;
    if (rank_waits)
        wait_leave();
    uint64_t now = ticks_now();
    rank_add(&page->calls[index], now - start);
    if (!rank_main)
        return;
    page->mpi_ticks += now - start;
    page->last_tick = now;
    page->enter_tick = 0;
    page->current = 0;
    if (__builtin_expect(now >= rank_refresh_at, 0))
        rank_refresh(now);
}

#endif
