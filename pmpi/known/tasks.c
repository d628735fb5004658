/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * Work without a rhythm: `tasks KIND SECONDS`, CPU seconds that one rank takes at most.
 *
 * master: rank 0 hands out tasks of 5 to 45 ms of CPU until each worker has had SECONDS of them.
 * last: all but the last rank have nothing to do between MPI_Init and MPI_Finalize, where they wait
 * for it.
 */
#include <mpi.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void burn(double seconds)
{
    const double end = cpu_seconds() + seconds;
    while (cpu_seconds() < end)
        ;
}

static void hand_out(int workers, double left)
{
    unsigned seed = 1;
    double asked;
    MPI_Status from;
    for (left *= workers; workers > 0;) {
        double task = left > 0 ? 0.005 + 0.04 * rand_r(&seed) / RAND_MAX : -1;
        MPI_Recv(&asked, 1, MPI_DOUBLE, MPI_ANY_SOURCE, 0, MPI_COMM_WORLD, &from);
        MPI_Send(&task, 1, MPI_DOUBLE, from.MPI_SOURCE, 0, MPI_COMM_WORLD);
        left -= task;
        workers -= task < 0;
    }
}

static void work(void)
{
    double task = 0;
    do {
        MPI_Send(&task, 1, MPI_DOUBLE, 0, 0, MPI_COMM_WORLD);
        MPI_Recv(&task, 1, MPI_DOUBLE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        burn(task);
    } while (task >= 0);
}

int main(int argc, char *argv[])
{
    int rank, size;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (argc != 3)
        MPI_Abort(MPI_COMM_WORLD, 2);
    const double seconds = atof(argv[2]);
    if (strcmp(argv[1], "master") != 0)
        burn(rank == size - 1 ? seconds : 0);
    else if (rank == 0)
        hand_out(size - 1, seconds);
    else
        work();
    MPI_Finalize();
    return 0;
}
