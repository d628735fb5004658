/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * The ways in which a rank can begin and end: `life spawn|fork|abort|wreck|hang|exit`.
 *
 * spawn: each of two ranks takes part in starting two more, which meet in 5 barriers of their own
 * fork: rank 0 has a child that calls MPI_Pcontrol 7 times, the rank itself does 3 times
 * abort: after 4 barriers rank 1 calls MPI_Abort with code 3
 * wreck: the same, in a handler of the signal by which malloc tells, locked, of a broken heap
 * hang: barriers and iterations for ever
 * exit: after 4 barriers, leaves without MPI_Finalize
 */
#define _DEFAULT_SOURCE /* sbrk */
#include <mpi.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int rank;

static void barriers(int n)
{
    while (n-- != 0) {
        MPI_Barrier(MPI_COMM_WORLD);
        MPI_Pcontrol(1);
    }
}

static void have_child(void)
{
    pid_t child = rank == 0 ? fork() : -1;
    for (int i = 0; i < (child == 0 ? 7 : 3); i++)
        MPI_Pcontrol(0);
    if (child == 0)
        _exit(0);
    if (child > 0)
        waitpid(child, NULL, 0);
}

static char *volatile block; /* what is written to it is not left out */

static void *rest(void *nothing)
{
    pause();
    return nothing;
}

static void give_up(int number)
{
    (void)number;
    MPI_Abort(MPI_COMM_WORLD, 3);
}

/* Writes beyond the end of a block, into all that malloc knows of the room above it. */
static void wreck(void)
{
    pthread_t other; /* without one malloc takes no lock */
    pthread_create(&other, NULL, rest, NULL);
    signal(SIGABRT, give_up);
    block = malloc(100000);
    memset(block, 'A', (size_t)((char *)sbrk(0) - block));
    for (int i = 0; i < 100; i++)
        block = malloc(30000 + 1000 * (size_t)i);
    free(block);
}

int main(int argc, char *argv[])
{
    MPI_Comm other;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_get_parent(&other);
    const char *what = argc > 1 ? argv[1] : "";
    if (other != MPI_COMM_NULL) {
        barriers(5);
        MPI_Comm_disconnect(&other);
    } else if (strcmp(what, "spawn") == 0) {
        MPI_Comm_spawn(argv[0], MPI_ARGV_NULL, 2, MPI_INFO_NULL, 0, MPI_COMM_WORLD, &other,
                       MPI_ERRCODES_IGNORE);
        MPI_Comm_disconnect(&other);
    } else if (strcmp(what, "fork") == 0) {
        have_child();
    } else if (strcmp(what, "hang") == 0) {
        barriers(-1);
    } else {
        barriers(4);
        if (strcmp(what, "abort") == 0 && rank == 1)
            MPI_Abort(MPI_COMM_WORLD, 3);
        if (strcmp(what, "wreck") == 0 && rank == 1)
            wreck();
        if (strcmp(what, "exit") == 0)
            _exit(0);
        barriers(-1);
    }
    MPI_Finalize();
    return 0;
}
