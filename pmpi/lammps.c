/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * Time steps of LAMMPS, without touching it: this library exports three of LAMMPS's own functions,
 * which then are called in their stead, and passes the calls on.
 *
 * In: LAMMPS_NS::Integrate::ev_set(bigint) and that of Min, which LAMMPS calls with the number of
 * the time step when it sets itself up and at the beginning of each step, perhaps several times,
 * and LAMMPS_NS::Finish::end(int), which it calls when a run or a minimization is over. Out:
 * iteration boundaries (rank.h). A step ends where the next begins, or the run does.
 *
 * Why not from the thermo output: that has a line for every tenth, or every hundred thousandth
 * step, or for none, and may stay in LAMMPS's buffer for long, so a line tells little of when its
 * step was. Where LAMMPS is linked statically nobody sees these calls, and its rhythm counts
 * (rhythm.h).
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "attributes.h"
#include "next.h"
#include "page.h"
#include "rank.h"
#include "ticks.h"

#define SPACE_NS 1e6 /* between two boundaries that are published: one costs about 1 us */

static enum { OUTSIDE, IN_RUN } state;
static long last;      /* number of the step that LAMMPS spoke of last */
static uint64_t begun; /* steps */
static uint64_t published_at;

/* These are C++ functions that return nothing; a bigint has 64 bits unless LAMMPS is built small.
 */
EXPORTED void _ZN9LAMMPS_NS9Integrate6ev_setEl(void *self, long step);
EXPORTED void _ZN9LAMMPS_NS3Min6ev_setEl(void *self, long step);
EXPORTED void _ZN9LAMMPS_NS6Finish3endEi(void *self, int flag);

static void take(long step)
{
    /* Where a run does not set itself up, `run 10 pre no`, its first word is of its first step. */
    bool first = state == OUTSIDE && begun > 0 && step == last + 1;
    if (first || (state == IN_RUN && step != last)) {
        const struct dovetail_page *page = rank_page;
        uint64_t now = ticks_now();
        double ns = page ? page->latest[page->latest_seq % 2].ns_per_tick : 0;
        if (begun == 0 || (double)(now - published_at) * ns >= SPACE_NS) {
            published_at = now;
            rank_iteration(DOVETAIL_SOURCE_LAMMPS, begun);
        }
        begun++;
    }
    state = IN_RUN;
    last = step;
}

void _ZN9LAMMPS_NS9Integrate6ev_setEl(void *self, long step)
{
    static void (*next)(void *, long);
    if (next == NULL)
        *(void **)&next = hooked_function(__func__, __builtin_return_address(0));
    take(step);
    next(self, step);
}

void _ZN9LAMMPS_NS3Min6ev_setEl(void *self, long step)
{
    static void (*next)(void *, long);
    if (next == NULL)
        *(void **)&next = hooked_function(__func__, __builtin_return_address(0));
    take(step);
    next(self, step);
}

void _ZN9LAMMPS_NS6Finish3endEi(void *self, int flag)
{
    static void (*next)(void *, int);
    if (next == NULL)
        *(void **)&next = hooked_function(__func__, __builtin_return_address(0));
    if (begun > 0)
        rank_iteration(DOVETAIL_SOURCE_LAMMPS, begun);
    state = OUTSIDE;
    next(self, flag);
}
