/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * See next.h. In: the names of the libraries of the MPI that this one is compiled for.
 */
#include "next.h"

#include <dlfcn.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

#if defined(OPEN_MPI)
#define LIBRARIES "libmpi.so.40", "libmpi_mpifh.so.40", "libmpi_usempif08.so.40"
#else
#define LIBRARIES "libmpich.so.12", "libmpichfort.so.12"
#endif

static void *find(const char *name)
{
    static const char *const libraries[] = {LIBRARIES};
    for (size_t i = 0; i < sizeof(libraries) / sizeof(*libraries); i++) {
        void *library = dlopen(libraries[i], RTLD_LAZY | RTLD_NOLOAD);
        void *symbol = library ? dlsym(library, name) : NULL;
        if (library)
            dlclose(library);
        if (symbol)
            return symbol;
    }
    return NULL;
}

void *next_function(void *linked, const char *name)
{
    void *symbol = linked ? linked : find(name);
    if (symbol)
        return symbol;
    fprintf(stderr, "dovetail: no %s in any loaded MPI library\n", name);
    abort();
}

void *chained_function(const char *name, void *linked, const char *real)
{
    void *symbol = dlsym(RTLD_NEXT, name);
    return symbol ? symbol : next_function(linked, real);
}
