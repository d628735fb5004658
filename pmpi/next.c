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
#else /* as Debian calls them, and as its makers do */
#define LIBRARIES "libmpich.so.12", "libmpichfort.so.12", "libmpi.so.12", "libmpifort.so.12"
#define TOO_WIDE "ompi_mpi_comm_world" /* of the MPI whose handles the wrappers would cut */
#endif

static void *other; /* an MPI library by another name that a caller of MPI led to; stays open */

/* In a library that is loaded, or in one that it needs. */
static void *find_in(const char *library, const char *name)
{
    void *handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    void *symbol = handle ? dlsym(handle, name) : NULL;
    if (handle)
        dlclose(handle);
    return symbol;
}

static void *find_from(const void *caller, const char *name)
{
    Dl_info info;
    return dladdr(caller, &info) ? find_in(info.dli_fname, name) : NULL;
}

bool standard_abi(void)
{
    return find_in("libmpi_abi.so.1", "PMPI_Init") || find_in("libmpi_abi.so.0", "PMPI_Init");
}

static void *or_abort(void *symbol, const char *name)
{
    if (symbol)
        return symbol;
    fprintf(stderr, "dovetail: no %s in any loaded MPI library\n", name);
    abort();
}

void *known_function(void *linked, const char *name)
{
    static const char *const libraries[] = {LIBRARIES};
    void *symbol = linked;
    for (size_t i = 0; symbol == NULL && i < sizeof(libraries) / sizeof(*libraries); i++)
        symbol = find_in(libraries[i], name);
    return symbol == NULL && other ? dlsym(other, name) : symbol;
}

void *next_function(void *linked, const char *name)
{
    return or_abort(known_function(linked, name), name);
}

void *hooked_function(const char *name, const void *caller)
{
    void *symbol = dlsym(RTLD_NEXT, name);
    return next_function(symbol ? symbol : find_from(caller, name), name);
}

void *chained_function(const char *name, void *linked, const char *real, const void *caller)
{
    Dl_info info;
    void *symbol = dlsym(RTLD_NEXT, name);
    if (symbol == NULL)
        symbol = known_function(linked, real);
    if (symbol == NULL && (symbol = find_from(caller, real)) != NULL && dladdr(symbol, &info))
        other = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
#if defined(TOO_WIDE)
    if (other && dlsym(other, TOO_WIDE))
        symbol = NULL;
#endif
    return or_abort(symbol, real);
}
