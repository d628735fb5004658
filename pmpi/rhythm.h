/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * The rhythm of a program that does not say itself where its iterations end.
 */
#ifndef DOVETAIL_RHYTHM_H
#define DOVETAIL_RHYTHM_H

/* After a collective call, number `index`, on a communicator of `size` processes; `count` are its
 * elements where all ranks give the same number, else 0; `site` is where it was called from. */
void rhythm_collective(unsigned index, int size, int count, const void *site);

#endif
