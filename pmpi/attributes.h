/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * What the compiler is told of a symbol: EXPORTED, in a library that hides all others; INLINED, for
 * a function of which most callers need little or nothing; and PER_THREAD, for a variable that
 * every MPI call looks at. The library is loaded at the start, so the fast way to reach such a
 * variable is open to it.
 */
#ifndef DOVETAIL_ATTRIBUTES_H
#define DOVETAIL_ATTRIBUTES_H

#define EXPORTED __attribute__((visibility("default")))
#define INLINED __attribute__((always_inline)) inline
#define PER_THREAD __thread __attribute__((tls_model("initial-exec")))

#endif
