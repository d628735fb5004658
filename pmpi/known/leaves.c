/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * A call of MPI that does not return: `leaves`, on one rank.
 *
 * An error handler of the communicator leaves MPI_Send to a rank that there is not, twice by
 * longjmp, as a C program does; compiled as C++ (-xc++) by an exception. Then 5 times
 * MPI_Barrier.
 */
#include <mpi.h>
#include <setjmp.h>
#include <stdio.h>

#if defined(__cplusplus)
#define TRY(what)                                                                                  \
    try {                                                                                          \
        what;                                                                                      \
    } catch (int) {                                                                                \
        left++;                                                                                    \
    }
#define LEAVE throw 1
#else
static jmp_buf place;
#define TRY(what)                                                                                  \
    if (setjmp(place) == 0)                                                                        \
        what;                                                                                      \
    else                                                                                           \
        left++;
#define LEAVE longjmp(place, 1)
#endif

static volatile int left;

static void fail(MPI_Comm *comm, int *code, ...)
{
    (void)comm;
    (void)code;
    LEAVE;
}

int main(int argc, char *argv[])
{
    MPI_Errhandler handler;
    int value = 0;
    MPI_Init(&argc, &argv);
    MPI_Comm_create_errhandler(fail, &handler);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, handler);
    TRY(MPI_Send(&value, 1, MPI_INT, 99, 0, MPI_COMM_WORLD))
    TRY(MPI_Send(&value, 1, MPI_INT, 99, 0, MPI_COMM_WORLD))
    for (int i = 0; i < 5; i++)
        MPI_Barrier(MPI_COMM_WORLD);
    printf("%d\n", left);
    MPI_Finalize();
    return 0;
}
