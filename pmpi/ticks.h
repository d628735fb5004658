/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * The cheapest clock there is: the processor's time stamp counter where it
 * runs at one rate whatever the processor does, CLOCK_MONOTONIC elsewhere.
 *
 * Invariant: `ticks_now` never goes back on one thread, and its rate is constant.
 */
#ifndef DOVETAIL_TICKS_H
#define DOVETAIL_TICKS_H

#include <stdbool.h>
#include <stdint.h>
#include <time.h>
#if defined(__x86_64__)
#include <x86intrin.h>
#endif

extern bool ticks_counter; /* the time stamp counter is used; set once by ticks_init */

static inline uint64_t ticks_clock(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline uint64_t ticks_now(void)
{
#if defined(__x86_64__)
    if (__builtin_expect(ticks_counter, 1))
        return __rdtsc();
#endif
    return ticks_clock(CLOCK_MONOTONIC);
}

/* DOVETAIL_CLOCK=monotonic refuses the counter, for machines that lie about it. */
void ticks_init(void);

#endif
