/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * A program whose profile is known (step 5): `busy sleep|burn ITERATIONS MS0 MS1 ...`
 *
 * In each iteration rank r works for MSr milliseconds outside MPI, asleep or burning that much
 * CPU time, and then meets the others in a barrier. So useful time is ITERATIONS * MSr, the load
 * balance is average(MS) / max(MS), and the communication efficiency is close to 1.
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

static void work(int burn, double seconds)
{
    if (burn) {
        const double end = cpu_seconds() + seconds;
        while (cpu_seconds() < end)
            ;
    } else {
        const time_t whole = (time_t)seconds;
        struct timespec rest = {whole, (long)((seconds - (double)whole) * 1e9)};
        while (nanosleep(&rest, &rest) != 0)
            ;
    }
}

int main(int argc, char *argv[])
{
    int rank, size;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (argc != 3 + size)
        MPI_Abort(MPI_COMM_WORLD, 2);
    const int burn = strcmp(argv[1], "burn") == 0;
    const int iterations = atoi(argv[2]);
    const double seconds = 1e-3 * atof(argv[3 + rank]);
    for (int i = 0; i < iterations; i++) {
        work(burn, seconds);
        MPI_Barrier(MPI_COMM_WORLD);
        MPI_Pcontrol(1);
    }
    MPI_Finalize();
    return 0;
}
