/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * See ticks.h. In: DOVETAIL_CLOCK, and what the processor says of its counter.
 */
#include "ticks.h"

#include <stdlib.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

bool ticks_counter;

void ticks_init(void)
{
#if defined(__x86_64__)
    unsigned a, b, c, d = 0;
    const char *wish = getenv("DOVETAIL_CLOCK");
    bool refused = wish && wish[0] == 'm';
    ticks_counter = !refused && __get_cpuid(0x80000007, &a, &b, &c, &d) && (d & (1u << 8));
#endif
}
