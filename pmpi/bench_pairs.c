/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * What messages cost where the ranks are: `bench_pairs pairs|hold [MS]`.
 *
 * pairs: prints the medians over the batches, in microseconds, of a ping-pong's one way between
 * ranks 0 and 1 and of an Allreduce of all ranks, of 8 bytes and of 1 MB each.
 * hold: iterations of MS milliseconds asleep, for ever, without a word to the others.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SMALL = 1, LARGE = 1 << 17, BATCHES = 41 }; /* in doubles, so 8 bytes and 1 MB */

static double mine[LARGE], theirs[LARGE];
static int rank;

static void ping_pong(int count)
{
    const int peer = 1 - rank;
    if (rank == 0) {
        MPI_Send(mine, count, MPI_DOUBLE, peer, 0, MPI_COMM_WORLD);
        MPI_Recv(theirs, count, MPI_DOUBLE, peer, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    } else if (rank == 1) {
        MPI_Recv(theirs, count, MPI_DOUBLE, peer, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        MPI_Send(mine, count, MPI_DOUBLE, peer, 0, MPI_COMM_WORLD);
    }
}

static void allreduce(int count)
{
    MPI_Allreduce(mine, theirs, count, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Microseconds per call: the median over batches of which the first is not counted. */
static double measure(void (*work)(int), int count)
{
    static double took[BATCHES];
    const int calls = count == SMALL ? 1000 : 20;
    for (int batch = -1; batch < BATCHES; batch++) {
        MPI_Barrier(MPI_COMM_WORLD);
        const double start = MPI_Wtime();
        for (int i = 0; i < calls; i++)
            work(count);
        if (batch >= 0)
            took[batch] = (MPI_Wtime() - start) * 1e6 / calls;
    }
    qsort(took, BATCHES, sizeof(*took), by_value);
    return took[BATCHES / 2];
}

int main(int argc, char *argv[])
{
    int size;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    const int pairs = argc > 1 && strcmp(argv[1], "pairs") == 0;
    if ((pairs && size < 2) || (!pairs && (argc != 3 || strcmp(argv[1], "hold") != 0)))
        MPI_Abort(MPI_COMM_WORLD, 2);
    while (!pairs) {
        usleep((useconds_t)(1000 * atoi(argv[2])));
        MPI_Pcontrol(1);
    }
    const double way8 = measure(ping_pong, SMALL) / 2, way1m = measure(ping_pong, LARGE) / 2;
    const double sum8 = measure(allreduce, SMALL), sum1m = measure(allreduce, LARGE);
    if (rank == 0)
        printf("{\"ping-pong, 8 B\": %.3f, \"ping-pong, 1 MB\": %.3f, "
               "\"Allreduce, 8 B\": %.3f, \"Allreduce, 1 MB\": %.3f}\n",
               way8, way1m, sum8, sum1m);
    MPI_Finalize();
    return 0;
}
