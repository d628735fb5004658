/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * The rhythm of one rank by itself, in a program whose ranks have none together.
 */
#ifndef DOVETAIL_OWN_BEAT_H
#define DOVETAIL_OWN_BEAT_H

#include <stdbool.h>
#include <stdint.h>

#include "attributes.h"

enum own_beat_kind {
    OWN_BEAT_EXCHANGE, /* with `peer` alone, or with a group if there is none */
    OWN_BEAT_COMMON,   /* with all ranks: whether that is a rhythm is not for one rank to say */
    OWN_BEAT_ANY,      /* with whoever comes first */
};

#define OWN_BEAT_NOBODY (-1000000) /* a peer that is none; neither MPI has such a number */
#define OWN_BEAT_PASSED 64

extern bool own_beat_open;                           /* there is something to hear */
extern const void *own_beat_passed[OWN_BEAT_PASSED]; /* but not at these places */

static inline unsigned own_beat_slot(const void *site)
{
    return (unsigned)(((uintptr_t)site ^ (uintptr_t)site >> 6) % OWN_BEAT_PASSED);
}

/* Whether a call from this place is to be heard. It is all that most calls cost. */
static INLINED bool own_beat_hears(const void *site)
{
    return __builtin_expect(own_beat_open, 0) && own_beat_passed[own_beat_slot(site)] != site;
}

/* After such a call, number `index`; `group` stands for the communicator or the request. */
void own_beat_hear(unsigned index, const void *site, int peer, uintptr_t group,
                   enum own_beat_kind kind);

#endif
