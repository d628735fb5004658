/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * Iterations of OpenFOAM solvers, without touching them: this library exports
 * two of OpenFOAM's own functions, which then are called in their stead, and passes the calls on.
 *
 * In: Foam::Time::operator++(), which begins a time step, and Foam::subCycleTime::operator++(),
 * which begins a part of one and calls the first, and then must not count.
 * Out: iteration boundaries (rank.h). A step ends where the next begins, the last in MPI_Finalize.
 * A solver that runs without `-parallel` never calls that, nor MPI_Init: its page is made at its
 * first step, and its last step ends where it exits with code 0.
 */
#include "openfoam.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#include "attributes.h"
#include "next.h"
#include "page.h"
#include "rank.h"

static uint64_t begun;
static bool in_part;

/* These are C++ functions without arguments that return `this` by reference. */
EXPORTED void *_ZN4Foam4TimeppEv(void *self);
EXPORTED void *_ZN4Foam12subCycleTimeppEv(void *self);

static void serial_ends(int code, void *unused)
{
    (void)unused;
    if (code == 0) {
        openfoam_ends();
        rank_end();
    } else {
        rank_abort();
    }
}

void *_ZN4Foam4TimeppEv(void *self)
{
    static void *(*next)(void *);
    if (next == NULL)
        *(void **)&next = hooked_function(__func__, __builtin_return_address(0));
    if (rank_serial())
        on_exit(serial_ends, NULL);
    if (!in_part)
        rank_iteration(DOVETAIL_SOURCE_OPENFOAM, begun++);
    return next(self);
}

void *_ZN4Foam12subCycleTimeppEv(void *self)
{
    static void *(*next)(void *);
    if (next == NULL)
        *(void **)&next = hooked_function(__func__, __builtin_return_address(0));
    in_part = true;
    void *result = next(self);
    in_part = false;
    return result;
}

bool openfoam_loaded(void)
{
    return dlsym(RTLD_NEXT, "_ZN4Foam4TimeppEv") != NULL;
}

void openfoam_ends(void)
{
    if (begun > 0)
        rank_iteration(DOVETAIL_SOURCE_OPENFOAM, begun);
}
