/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * The real functions behind those that this library stands in for.
 *
 * Nothing is linked: every symbol of the MPI library is weak, and may belong to a library that the
 * program loaded for itself alone.
 */
#ifndef DOVETAIL_NEXT_H
#define DOVETAIL_NEXT_H

#include <stdbool.h>

/* The real function, or variable: `linked` if the linker found it, else by name in an MPI library
 * that the program loaded by itself; NULL if there is none. */
void *known_function(void *linked, const char *name);

/* The same. Ends the process if there is none: the program would have called it. */
void *next_function(void *linked, const char *name);

/* The function that comes next under the name that the program calls, `name`: that of a tool which
 * is preloaded after this library, or the MPI library's own. Where MPI is not among what comes
 * next, the real function, as above, or that in what the object with the address `caller` needs. */
void *chained_function(const char *name, void *linked, const char *real, const void *caller);

/* The function of another library that comes next under a name, or that in what the caller's object
 * needs: a program may have loaded the library for itself alone. Ends the process likewise. */
void *hooked_function(const char *name, const void *caller);

/* Is a library of the standard ABI of MPI 5 loaded, in which handles are those of no MPI that this
 * library may be for? */
bool standard_abi(void);

/* The same for weak symbols, with their type; CHAINED is for the caller of where it stands. */
#define KNOWN(symbol) ((__typeof__(&symbol))known_function((void *)&symbol, #symbol))
#define NEXT(symbol) ((__typeof__(&symbol))next_function((void *)&symbol, #symbol))
#define CHAINED(symbol, real)                                                                      \
    ((__typeof__(&real))chained_function(#symbol, (void *)&real, #real,                            \
                                         __builtin_return_address(0)))

#endif
