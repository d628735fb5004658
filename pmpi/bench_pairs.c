/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * What messages cost where the ranks are: `bench_pairs pairs|sweep|hold [MS]`.
 *
 * pairs: prints the medians over the batches, in microseconds, of a ping-pong's one way between
 * ranks 0 and 1 and of an Allreduce of all ranks, of 8 bytes and of 1 MB each.
 * sweep: the same for four sizes, with the bandwidth of a window of messages from rank 0 to 1,
 * MB/s, and a Barrier; as the OSU benchmarks name and define them. hold: iterations of MS
 * milliseconds asleep, for ever, without a word to the others.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SMALL = 1, LARGE = 1 << 17, BATCHES = 41, WINDOW = 64 }; /* sizes in doubles: 8 B, 1 MB */

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

/* A window of messages one way, into the same place, and a word back: OSU's bandwidth. */
static void window(int count)
{
    MPI_Request all[WINDOW];
    for (int i = 0; i < WINDOW && rank < 2; i++) {
        if (rank == 0)
            MPI_Isend(mine, count, MPI_DOUBLE, 1, 0, MPI_COMM_WORLD, &all[i]);
        else
            MPI_Irecv(theirs, count, MPI_DOUBLE, 0, 0, MPI_COMM_WORLD, &all[i]);
    }
    if (rank < 2) {
        MPI_Waitall(WINDOW, all, MPI_STATUSES_IGNORE);
        if (rank == 0)
            MPI_Recv(theirs, 1, MPI_DOUBLE, 1, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        else
            MPI_Send(mine, 1, MPI_DOUBLE, 0, 1, MPI_COMM_WORLD);
    }
}

static void barrier(int count)
{
    (void)count;
    MPI_Barrier(MPI_COMM_WORLD);
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
    const int calls = work == window ? 4 : count == SMALL ? 1000 : count < LARGE ? 200 : 20;
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

static void sweep(void)
{
    static const struct {
        const char *name;
        int count;
    } sizes[] = {{"8 B", SMALL}, {"1 KB", 1 << 7}, {"64 KB", 1 << 13}, {"1 MB", LARGE}};
    const int last = sizeof(sizes) / sizeof(*sizes);
    const char *comma = "{";
    for (int i = 0; i < last; i++) {
        const double way = measure(ping_pong, sizes[i].count) / 2;
        const double burst = measure(window, sizes[i].count);
        const double sum = measure(allreduce, sizes[i].count);
        if (rank == 0)
            printf("%s\"latency, %s\": %.3f, \"bandwidth, %s\": %.3f, \"Allreduce, %s\": %.3f",
                   comma, sizes[i].name, way, sizes[i].name, WINDOW * 8.0 * sizes[i].count / burst,
                   sizes[i].name, sum);
        comma = ", ";
    }
    const double meeting = measure(barrier, SMALL);
    if (rank == 0)
        printf(", \"Barrier\": %.3f}\n", meeting);
}

int main(int argc, char *argv[])
{
    int size;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    const int pairs = argc == 2 && strcmp(argv[1], "pairs") == 0;
    const int swept = argc == 2 && strcmp(argv[1], "sweep") == 0;
    const int held = argc == 3 && strcmp(argv[1], "hold") == 0;
    if (!held && (!(pairs || swept) || size < 2))
        MPI_Abort(MPI_COMM_WORLD, 2);
    while (held) {
        usleep((useconds_t)(1000 * atoi(argv[2])));
        MPI_Pcontrol(1);
    }
    if (swept) {
        sweep();
        MPI_Finalize();
        return 0;
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
