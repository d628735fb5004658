/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * What the profiling library adds to one MPI call: `bench_calls [REPEATS]`,
 * with the library preloaded and DOVETAIL_DIR set, or without for comparison.
 *
 * MPI_Test of no request is as cheap as an MPI call gets. Batches of calls through the wrapper
 * and past it (PMPI_Test) alternate, short enough to pass within a time slice; prints the medians
 * over the batches, in nanoseconds of CPU time.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { CALLS = 10000, MOST = 10000 };

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Nanoseconds per call of one batch. */
static double batch(int (*test)(MPI_Request *, int *, MPI_Status *))
{
    MPI_Request none = MPI_REQUEST_NULL;
    int flag;
    const double start = seconds();
    for (int i = 0; i < CALLS; i++)
        test(&none, &flag, MPI_STATUS_IGNORE);
    return (seconds() - start) * 1e9 / CALLS;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int n)
{
    qsort(values, (size_t)n, sizeof(*values), by_value);
    return values[n / 2];
}

int main(int argc, char *argv[])
{
    static double with[MOST], without[MOST], added[MOST];
    int n = argc > 1 ? atoi(argv[1]) : 1000;
    n = n < 1 ? 1 : n > MOST ? MOST : n;
    MPI_Init(&argc, &argv);
    batch(MPI_Test);
    for (int i = 0; i < n; i++) {
        with[i] = batch(MPI_Test);
        without[i] = batch(PMPI_Test);
        added[i] = with[i] - without[i];
    }
    printf("{\"calls\": %d, \"batches\": %d, \"wrapped_ns\": %.2f, \"plain_ns\": %.2f, "
           "\"added_ns\": %.2f}\n",
           CALLS, n, median(with, n), median(without, n), median(added, n));
    MPI_Finalize();
    return 0;
}
