/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * A program whose profile is known: `busy sleep|burn ITERATIONS MS0 MS1 ...`
 *
 * In each iteration rank r works for MSr milliseconds outside MPI, asleep or burning that much
 * CPU time, and then meets the others in a barrier. So useful time is ITERATIONS * MSr, the load
 * balance is average(MS) / max(MS), and the communication efficiency is close to 1.
 * There may be more MS than ranks: the rest is for runs on more ranks. With BUSY_SHARED in the
 * environment they are times of one rank alone, and each rank of N works for MSr / N.
 *
 * With 0 ITERATIONS they go on until one of them finds a file by the name in BUSY_UNTIL. With
 * BUSY_LONG=SECONDS rank 0 burns so much more CPU time before its hundredth iteration, or with
 * BUSY_CHILD a process does that it starts and waits for.
 */
#include <mpi.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

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

/* Meet the others; whether anybody says that it is enough. */
static int meet(const char *until)
{
    int enough = 0, any = 0;
    if (until == NULL) {
        MPI_Barrier(MPI_COMM_WORLD);
        return 0;
    }
    enough = access(until, F_OK) == 0;
    MPI_Allreduce(&enough, &any, 1, MPI_INT, MPI_LOR, MPI_COMM_WORLD);
    return any;
}

static void work_long(double seconds)
{
    pid_t child = getenv("BUSY_CHILD") != NULL ? fork() : -1;
    if (child <= 0)
        work(1, seconds);
    if (child == 0)
        _exit(0);
    if (child > 0)
        waitpid(child, NULL, 0);
}

int main(int argc, char *argv[])
{
    int rank, size;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (argc < 3 + size)
        MPI_Abort(MPI_COMM_WORLD, 2);
    const int burn = strcmp(argv[1], "burn") == 0;
    const int iterations = atoi(argv[2]);
    const int parts = getenv("BUSY_SHARED") != NULL ? size : 1;
    const double seconds = 1e-3 * atof(argv[3 + rank]) / parts;
    const char *until = iterations == 0 ? getenv("BUSY_UNTIL") : NULL;
    int over = iterations == 0 && until == NULL;
    for (int i = 0; !over; i++) {
        work(burn, seconds);
        if (i == 99 && rank == 0 && getenv("BUSY_LONG") != NULL)
            work_long(atof(getenv("BUSY_LONG")));
        over = meet(until) || i + 1 == iterations;
        MPI_Pcontrol(1);
    }
    MPI_Finalize();
    return 0;
}
