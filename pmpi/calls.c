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
 * choice buffer, which call PMPI functions: these are wrapped, and of the others it is only
 * noted where in the program they are called from, which the C wrappers cannot see. Whatever
 * calls whatever else inside, only the outermost wrapper counts.
 *
 * A tool of the user's that wraps MPI too, and is preloaded after this library, comes next.
 *
 * Nothing is linked: every symbol of the MPI library is weak, so this library may be preloaded
 * into any program.
 */
#include <mpi.h>
#include <stdarg.h>

#include "attributes.h"
#include "next.h"
#include "openfoam.h"
#include "own_beat.h"
#include "page.h"
#include "rank.h"
#include "rhythm.h"
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

#define CALL(name, fname, class, n, params, args)                                                  \
    _Static_assert(sizeof("MPI_" #name) - 1 <= DOVETAIL_NAME_MAX,                                  \
                   "the page has no room for a name");
#include "calls.def"
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
    if (class == WAIT_INIT || class == WAIT_OPEN)
        rank_before_init();
    if ((class == WAIT_FINAL || class == WAIT_CLOSE) && rank_last()) {
        openfoam_ends();
        rank_end();
    }
    if (class == WAIT_ABORT)
        rank_abort();
}

/* A call that the program is in. It is over where its scope ends, by an exception too. */
struct call {
    unsigned index;
    uint64_t start;
};

static inline void leave(const struct call *call)
{
    rank_leave(call->index, call->start);
}

#define INSIDE(index, start)                                                                       \
    __attribute__((cleanup(leave))) const struct call inside = {index, start}

static inline void after(int class, unsigned index, int code, const void *session)
{
    if (class == WAIT_INIT)
        rank_begin(names, INDEX_COUNT, index, NULL);
    if (class == WAIT_OPEN && code == MPI_SUCCESS)
        rank_begin(names, INDEX_COUNT, index, session);
    if (class == WAIT_FINAL || (class == WAIT_CLOSE && code == MPI_SUCCESS))
        rank_finalized();
}

/* What these are in a wrapper whose function has no such parameters. */
static const MPI_Comm comm;
static const int count;
static const void *const session;
static const int dest = OWN_BEAT_NOBODY, source = OWN_BEAT_NOBODY;
static const void *const request, *const array_of_requests;
static void *const d, *const f, *const i;

#pragma weak PMPI_Comm_size
#if defined(OPEN_MPI)
#pragma weak PMPI_Comm_f2c
#endif
/* A collective call on a communicator is over; all that is asked of the others is constant. */
static INLINED void listen(int class, unsigned index, uint64_t start, const void *comm, int count,
                           const void *site)
{
    static __typeof__(&PMPI_Comm_size) comm_size;
    int size = 0;
    if (class != WAIT_COLL || index < INDEX_Barrier || index > INDEX_Exscan || start == 0)
        return;
    if (__builtin_expect(comm_size == NULL, 0))
        comm_size = NEXT(PMPI_Comm_size);
    comm_size(*(const MPI_Comm *)comm, &size);
    rhythm_collective(index, size, count, site);
    if (own_beat_hears(site) && rank_page)
        own_beat_hear(index, site, OWN_BEAT_NOBODY, (uintptr_t) * (const MPI_Comm *)comm,
                      (uint32_t)size == rank_page->world_size ? OWN_BEAT_COMMON
                                                              : OWN_BEAT_EXCHANGE);
}

#define AMONG(first, index, last) ((index) >= INDEX_##first && (index) <= INDEX_##last)

/* A call with a peer is over, with two, or with a group of which nobody asks how large it is. */
static INLINED void listen_alone(unsigned index, uint64_t start, int dest, int source,
                                 uintptr_t group, const void *site)
{
    const bool any = AMONG(Waitany, index, Waitsome) || AMONG(Testany, index, Testsome);
    const bool takes = AMONG(Recv, index, Mprobe) || AMONG(Irecv, index, Improbe);
    const bool exchanges = (AMONG(Send, index, Sendrecv_replace) && index != INDEX_Mrecv) ||
                           AMONG(Isend, index, Irecv) ||
                           AMONG(Neighbor_allgather, index, Ineighbor_alltoallw);
    if (!(any || takes || exchanges) || start == 0 || !own_beat_hears(site))
        return;
    const int peer = dest == OWN_BEAT_NOBODY ? source : dest;
    if (any || (takes && source == MPI_ANY_SOURCE))
        own_beat_hear(index, site, OWN_BEAT_NOBODY, 0, OWN_BEAT_ANY);
    else if (exchanges && peer != MPI_PROC_NULL)
        own_beat_hear(index, site, peer, group, OWN_BEAT_EXCHANGE);
}

static INLINED void listen_fortran(int class, unsigned index, uint64_t start, const void *handle,
                                   const void *code, const void *site)
{
    if (class != WAIT_COLL || index < INDEX_Barrier || index > INDEX_Exscan || start == 0)
        return;
    if (code != NULL && *(const MPI_Fint *)code != MPI_SUCCESS) /* in mpi_f08 it is optional */
        return;
#if defined(OPEN_MPI)
    static __typeof__(&PMPI_Comm_f2c) comm_f2c;
    if (__builtin_expect(comm_f2c == NULL, 0))
        comm_f2c = NEXT(PMPI_Comm_f2c);
    MPI_Comm comm = comm_f2c(*(const MPI_Fint *)handle);
#else
    MPI_Comm comm = MPI_Comm_f2c(*(const MPI_Fint *)handle);
#endif
    listen(class, index, start, &comm, 0, site);
}

/* In Fortran the peer is the fourth argument, of probes the first. The communicator is not asked
 * for, and a request is its address. */
static INLINED void listen_alone_fortran(unsigned index, uint64_t start, const void *a,
                                         const void *d, const void *f, const void *i,
                                         const void *site)
{
    const bool pair = (AMONG(Send, index, Sendrecv_replace) && index != INDEX_Mrecv) ||
                      AMONG(Isend, index, Irsend) || index == INDEX_Irecv;
    const bool probe = AMONG(Probe, index, Mprobe) || AMONG(Iprobe, index, Improbe);
    const bool starts = AMONG(Start, index, Startall);
    int peer = pair ? *(const int *)d : OWN_BEAT_NOBODY;
    int from = index == INDEX_Sendrecv           ? *(const int *)i
               : index == INDEX_Sendrecv_replace ? *(const int *)f
               : probe                           ? *(const int *)a
                                                 : peer;
    listen_alone(index, start, peer, from, starts ? (uintptr_t)a : 0, site);
}

/* The function that comes next, looked for once. */
#define FIND_NEXT(symbol, real)                                                                    \
    static __typeof__(&real) next;                                                                 \
    if (__builtin_expect(next == NULL, 0))                                                         \
    next = CHAINED(symbol, real)

/* --- C --- */

/* Where the program has called the Fortran function that is on its way to a C wrapper. */
static PER_THREAD const void *fortran_site;

#define WRAP(name, counted, class, params, args)                                                   \
    _Pragma(STRING(weak PMPI_##name)) EXPORTED int MPI_##name params                               \
    {                                                                                              \
        FIND_NEXT(MPI_##name, PMPI_##name);                                                        \
        before(WAIT_##class);                                                                      \
        int code;                                                                                  \
        uint64_t start = rank_enter(INDEX_##counted, WAIT_##class, __builtin_frame_address(0));    \
        {                                                                                          \
            INSIDE(INDEX_##counted, start);                                                        \
            code = next args;                                                                      \
        }                                                                                          \
        after(WAIT_##class, INDEX_##counted, code, session);                                       \
        start = code == MPI_SUCCESS ? start : 0;                                                   \
        const void *site = fortran_site ? fortran_site : __builtin_return_address(0);              \
        listen(WAIT_##class, INDEX_##counted, start, &comm, (int)count, site);                     \
        listen_alone(INDEX_##counted, start, dest, source,                                         \
                     INDEX_##counted == INDEX_Start      ? (uintptr_t)request                      \
                     : INDEX_##counted == INDEX_Startall ? (uintptr_t)array_of_requests            \
                                                         : (uintptr_t)comm,                        \
                     site);                                                                        \
        return code;                                                                               \
    }

#define CALL(name, fname, class, n, params, args) WRAP(name, name, class, params, args)
#include "calls.def"
#undef CALL

#if MPI_VERSION >= 4
#define CALL(name, fname, class, n, params, args)
#define LARGE(name, fname, class, n, params, args) WRAP(name##_c, name, class, params, args)
#define COUNT MPI_Count
#define DISPL MPI_Aint
#include "calls.def"
#undef CALL
#endif

/* The standard gives further arguments no types, and both libraries ignore them. A tool that comes
 * next may not, as one that takes the name of a region: it gets as many words as come in registers,
 * whether they are arguments or not. */
#pragma weak PMPI_Pcontrol
EXPORTED int MPI_Pcontrol(const int level, ...)
{
    static __typeof__(&PMPI_Pcontrol) next;
    void *more[5];
    va_list list;
    va_start(list, level);
    for (int word = 0; word < 5; word++)
        more[word] = va_arg(list, void *);
    va_end(list);
    if (__builtin_expect(next == NULL, 0))
        next = CHAINED(MPI_Pcontrol, PMPI_Pcontrol);
    uint64_t start = rank_enter(INDEX_Pcontrol, WAIT_NONE, __builtin_frame_address(0));
    INSIDE(INDEX_Pcontrol, start);
    int code = next(level, more[0], more[1], more[2], more[3], more[4]);
    if (start)
        rank_pcontrol(level);
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
/* The last but the error code: the communicator of a collective call, and a new session. */
#define BEFORE_CODE_1 a
#define BEFORE_CODE_2 a
#define BEFORE_CODE_3 b
#define BEFORE_CODE_4 c
#define BEFORE_CODE_5 d
#define BEFORE_CODE_6 e
#define BEFORE_CODE_7 f
#define BEFORE_CODE_8 g
#define BEFORE_CODE_9 h
#define BEFORE_CODE_10 i
#define BEFORE_CODE_11 j
#define BEFORE_CODE_12 k
#define BEFORE_CODE_13 l
#define BEFORE_CODE_14 m
#define CODE_1 a
#define CODE_2 b
#define CODE_3 c
#define CODE_4 d
#define CODE_5 e
#define CODE_6 f
#define CODE_7 g
#define CODE_8 h
#define CODE_9 i
#define CODE_10 j
#define CODE_11 k
#define CODE_12 l
#define CODE_13 m
#define CODE_14 n
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

#define DECLARED(symbol, real, n)                                                                  \
    extern __attribute__((weak)) void real(PARAMS_##n);                                            \
    EXPORTED void symbol(PARAMS_##n);

/* All arguments are addresses, and the lengths of strings behind them are as wide as one. */
#define FORTRAN(symbol, real, name, class, n)                                                      \
    DECLARED(symbol, real, n)                                                                      \
    void symbol(PARAMS_##n)                                                                        \
    {                                                                                              \
        FIND_NEXT(symbol, real);                                                                   \
        before(WAIT_##class);                                                                      \
        uint64_t start = rank_enter(INDEX_##name, WAIT_##class, __builtin_frame_address(0));       \
        {                                                                                          \
            INSIDE(INDEX_##name, start);                                                           \
            next(ARGS_##n);                                                                        \
        }                                                                                          \
        after(WAIT_##class, INDEX_##name, MPI_SUCCESS, BEFORE_CODE_##n);                           \
        listen_fortran(WAIT_##class, INDEX_##name, start, BEFORE_CODE_##n, CODE_##n,               \
                       __builtin_return_address(0));                                               \
        listen_alone_fortran(INDEX_##name, start, a, d, f, i, __builtin_return_address(0));        \
    }

/* Only MPICH's mpi_f08 gives MPI_Pcontrol the optional error code. */
#define FORTRAN_PCONTROL(symbol, real, n)                                                          \
    DECLARED(symbol, real, n)                                                                      \
    void symbol(PARAMS_##n)                                                                        \
    {                                                                                              \
        FIND_NEXT(symbol, real);                                                                   \
        uint64_t start = rank_enter(INDEX_Pcontrol, WAIT_NONE, __builtin_frame_address(0));        \
        INSIDE(INDEX_Pcontrol, start);                                                             \
        next(ARGS_##n);                                                                            \
        if (start)                                                                                 \
            rank_pcontrol(*(const int *)a);                                                        \
    }

/* A binding that arrives at the C wrapper, which counts. */
#define FORTRAN_ON(symbol, real, n)                                                                \
    DECLARED(symbol, real, n)                                                                      \
    void symbol(PARAMS_##n)                                                                        \
    {                                                                                              \
        FIND_NEXT(symbol, real);                                                                   \
        const void *outer = fortran_site;                                                          \
        fortran_site = outer ? outer : __builtin_return_address(0);                                \
        next(ARGS_##n);                                                                            \
        fortran_site = outer;                                                                      \
    }

#if defined(OPEN_MPI)
#define CALL(name, fname, class, n, params, args)                                                  \
    FORTRAN(mpi_##fname##_, pmpi_##fname##_, name, class, n)                                       \
    FORTRAN(mpi_##fname##_f08_, pmpi_##fname##_f08_, name, class, n)
FORTRAN_PCONTROL(mpi_pcontrol_, pmpi_pcontrol_, 1)
FORTRAN_PCONTROL(mpi_pcontrol_f08_, pmpi_pcontrol_f08_, 1)
#else
#define CALL(name, fname, class, n, params, args)                                                  \
    FORTRAN(mpi_##fname##_f08_, pmpir_##fname##_f08_, name, class, n)                              \
    FORTRAN_ON(mpi_##fname##_, pmpi_##fname##_, n)                                                 \
    FORTRAN_ON(mpi_##fname##_f08ts_, pmpir_##fname##_f08ts_, n)                                    \
    FORTRAN_ON(mpi_##fname##_f08ts_large_, pmpir_##fname##_f08ts_large_, n)
FORTRAN_PCONTROL(mpi_pcontrol_f08_, pmpir_pcontrol_f08_, 2)
#endif
#include "calls.def"
