/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * The wrappers: one shape in C and one in Fortran, stamped out over the table
 * in calls.def, and MPI_Pcontrol.
 *
 * In: calls of the program. Out: the same calls to the MPI library, unchanged, and counts in
 * the page of this rank (rank.h).
 *
 * Which Fortran symbols exist, and why each call is counted once: Open MPI's bindings call
 * PMPI functions, so both `mpi_x_` (mpif.h, `use mpi`) and `mpi_x_f08_` are wrapped. MPICH's
 * call MPI functions and so arrive at the C wrappers, except those of `mpi_f08` without a
 * choice buffer, which call PMPI functions: only these are wrapped. Whatever calls whatever
 * else inside, only the outermost wrapper counts.
 *
 * Nothing is linked: every symbol of the MPI library is weak, so this library may be preloaded
 * into any program.
 */
#include <mpi.h>
#include <stdarg.h>

#include "attributes.h"
#include "next.h"
#include "openfoam.h"
#include "page.h"
#include "rank.h"
#include "wait.h"

#define STRING(x) #x

/* --- The table as numbers and as names --- */

#define CALL(name, fname, class, n, params, args) INDEX_##name,
enum {
    INDEX_Pcontrol,
#include "calls.def"
    INDEX_COUNT
};
#undef CALL

#define CALL(name, fname, class, n, params, args) "MPI_" #name,
static const char *const names[] = {
    "MPI_Pcontrol",
#include "calls.def"
};
#undef CALL

_Static_assert(INDEX_COUNT <= DOVETAIL_CALLS_MAX, "the page has no room for so many calls");

/* --- What the few special classes do; `class` is a constant, so the rest costs nothing --- */

static inline void before(int class)
{
    if (class == WAIT_INIT)
        rank_before_init();
    if (class == WAIT_FINAL) {
        openfoam_ends();
        rank_end();
    }
    if (class == WAIT_ABORT)
        rank_abort();
}

static inline void after(int class, unsigned index, uint64_t start)
{
    rank_leave(index, start);
    if (class == WAIT_INIT)
        rank_begin(names, INDEX_COUNT, index);
    if (class == WAIT_FINAL)
        rank_finalized();
}

/* --- C --- */

#define CALL(name, fname, class, n, params, args)                                                  \
    _Pragma(STRING(weak PMPI_##name)) EXPORTED int MPI_##name params                               \
    {                                                                                              \
        static __typeof__(&PMPI_##name) next;                                                      \
        if (__builtin_expect(next == NULL, 0))                                                     \
            next = NEXT(PMPI_##name);                                                              \
        before(WAIT_##class);                                                                      \
        uint64_t start = rank_enter(INDEX_##name, WAIT_##class);                                   \
        int code = next args;                                                                      \
        after(WAIT_##class, INDEX_##name, start);                                                  \
        return code;                                                                               \
    }
#include "calls.def"
#undef CALL

#pragma weak PMPI_Pcontrol
EXPORTED int MPI_Pcontrol(const int level, ...)
{
    uint64_t start = rank_enter(INDEX_Pcontrol, WAIT_NONE);
    /* Both libraries ignore the further arguments, and the standard gives them no types. */
    int code = NEXT(PMPI_Pcontrol)(level);
    if (start)
        rank_pcontrol(level);
    rank_leave(INDEX_Pcontrol, start);
    return code;
}

/* --- Fortran --- */

#define PARAMS_1 void *a
#define PARAMS_2 PARAMS_1, void *b
#define PARAMS_3 PARAMS_2, void *c
#define PARAMS_4 PARAMS_3, void *d
#define PARAMS_5 PARAMS_4, void *e
#define PARAMS_6 PARAMS_5, void *f
#define PARAMS_7 PARAMS_6, void *g
#define PARAMS_8 PARAMS_7, void *h
#define PARAMS_9 PARAMS_8, void *i
#define PARAMS_10 PARAMS_9, void *j
#define PARAMS_11 PARAMS_10, void *k
#define PARAMS_12 PARAMS_11, void *l
#define PARAMS_13 PARAMS_12, void *m
#define PARAMS_14 PARAMS_13, void *n
#define ARGS_1 a
#define ARGS_2 ARGS_1, b
#define ARGS_3 ARGS_2, c
#define ARGS_4 ARGS_3, d
#define ARGS_5 ARGS_4, e
#define ARGS_6 ARGS_5, f
#define ARGS_7 ARGS_6, g
#define ARGS_8 ARGS_7, h
#define ARGS_9 ARGS_8, i
#define ARGS_10 ARGS_9, j
#define ARGS_11 ARGS_10, k
#define ARGS_12 ARGS_11, l
#define ARGS_13 ARGS_12, m
#define ARGS_14 ARGS_13, n

/* All arguments are addresses, and the lengths of strings behind them are as wide as one. */
#define FORTRAN(symbol, real, name, class, n)                                                      \
    extern __attribute__((weak)) void real(PARAMS_##n);                                            \
    EXPORTED void symbol(PARAMS_##n);                                                              \
    void symbol(PARAMS_##n)                                                                        \
    {                                                                                              \
        static __typeof__(&real) next;                                                             \
        if (__builtin_expect(next == NULL, 0))                                                     \
            next = NEXT(real);                                                                     \
        before(WAIT_##class);                                                                      \
        uint64_t start = rank_enter(INDEX_##name, WAIT_##class);                                   \
        next(ARGS_##n);                                                                            \
        after(WAIT_##class, INDEX_##name, start);                                                  \
    }

/* Only MPICH's mpi_f08 gives MPI_Pcontrol the optional error code. */
#define FORTRAN_PCONTROL(symbol, real, n)                                                          \
    extern __attribute__((weak)) void real(PARAMS_##n);                                            \
    EXPORTED void symbol(PARAMS_##n);                                                              \
    void symbol(PARAMS_##n)                                                                        \
    {                                                                                              \
        uint64_t start = rank_enter(INDEX_Pcontrol, WAIT_NONE);                                    \
        NEXT(real)(ARGS_##n);                                                                      \
        if (start)                                                                                 \
            rank_pcontrol(*(const int *)a);                                                        \
        rank_leave(INDEX_Pcontrol, start);                                                         \
    }

#if defined(OPEN_MPI)
#define CALL(name, fname, class, n, params, args)                                                  \
    FORTRAN(mpi_##fname##_, pmpi_##fname##_, name, class, n)                                       \
    FORTRAN(mpi_##fname##_f08_, pmpi_##fname##_f08_, name, class, n)
FORTRAN_PCONTROL(mpi_pcontrol_, pmpi_pcontrol_, 1)
FORTRAN_PCONTROL(mpi_pcontrol_f08_, pmpi_pcontrol_f08_, 1)
#else
#define CALL(name, fname, class, n, params, args)                                                  \
    FORTRAN(mpi_##fname##_f08_, pmpir_##fname##_f08_, name, class, n)
FORTRAN_PCONTROL(mpi_pcontrol_f08_, pmpir_pcontrol_f08_, 2)
#endif
#include "calls.def"
