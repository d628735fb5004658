/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * What messages cost where the ranks are: `bench_pairs pairs|sweep|stream|hold [MS]`.
 *
 * pairs: prints the medians over the batches, in microseconds, of a ping-pong's one way between
 * ranks 0 and 1 and of an Allreduce of all ranks, of 8 bytes and of 1 MB each.
 * sweep: the same for five sizes, with the bandwidth of a window of messages from rank 0 to 1,
 * MB/s, and a Barrier; as the OSU benchmarks name and define them. One byte is no number, so there
 * is no Allreduce of that. hold: iterations of MS milliseconds asleep, for ever, without a word to
 * the others. stream: iterations of STREAM's triad over 96 MB, for ever, likewise.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef BATCHES /* tests have fewer */
#define BATCHES 41
#endif

enum { SMALL = 8, LARGE = 1 << 20, WINDOW = 64 }; /* sizes in bytes */

static double mine[LARGE / sizeof(double)], theirs[LARGE / sizeof(double)];
static int rank;

static void ping_pong(int bytes)
{
    const int peer = 1 - rank;
    if (rank == 0) {
        MPI_Send(mine, bytes, MPI_BYTE, peer, 0, MPI_COMM_WORLD);
        MPI_Recv(theirs, bytes, MPI_BYTE, peer, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    } else if (rank == 1) {
        MPI_Recv(theirs, bytes, MPI_BYTE, peer, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        MPI_Send(mine, bytes, MPI_BYTE, peer, 0, MPI_COMM_WORLD);
    }
}

static void allreduce(int bytes)
{
    MPI_Allreduce(mine, theirs, bytes / (int)sizeof(double), MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
}

/* A window of messages one way, into the same place, and a word back: OSU's bandwidth. */
static void window(int bytes)
{
    MPI_Request all[WINDOW];
    for (int i = 0; i < WINDOW && rank < 2; i++) {
        if (rank == 0)
            MPI_Isend(mine, bytes, MPI_BYTE, 1, 0, MPI_COMM_WORLD, &all[i]);
        else
            MPI_Irecv(theirs, bytes, MPI_BYTE, 0, 0, MPI_COMM_WORLD, &all[i]);
    }
    if (rank < 2) {
        MPI_Waitall(WINDOW, all, MPI_STATUSES_IGNORE);
        if (rank == 0)
            MPI_Recv(theirs, SMALL, MPI_BYTE, 1, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        else
            MPI_Send(mine, SMALL, MPI_BYTE, 0, 1, MPI_COMM_WORLD);
    }
}

static void barrier(int bytes)
{
    (void)bytes;
    MPI_Barrier(MPI_COMM_WORLD);
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Microseconds per call: the median over batches of which the first is not counted. */
static double measure(void (*work)(int), int bytes)
{
    static double took[BATCHES];
    const int large = bytes == LARGE, few = work == window;
    const int calls = few ? (large ? 1 : 4) : bytes <= SMALL ? 1000 : large ? 20 : 200;
    for (int batch = -1; batch < BATCHES; batch++) {
        MPI_Barrier(MPI_COMM_WORLD);
        const double start = MPI_Wtime();
        for (int i = 0; i < calls; i++)
            work(bytes);
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
        int bytes;
    } sizes[] = {
        {"1 B", 1}, {"8 B", SMALL}, {"1 KB", 1 << 10}, {"64 KB", 1 << 16}, {"1 MB", LARGE}};
    const int last = sizeof(sizes) / sizeof(*sizes);
    for (int i = 0; i < last; i++) {
        const char *name = sizes[i].name;
        const int bytes = sizes[i].bytes;
        const double way = measure(ping_pong, bytes) / 2, burst = measure(window, bytes);
        if (rank == 0)
            printf("%s\"latency, %s\": %.3f, \"bandwidth, %s\": %.3f", i == 0 ? "{" : ", ", name,
                   way, name, (double)WINDOW * bytes / burst);
        if (bytes < SMALL)
            continue;
        const double sum = measure(allreduce, bytes);
        if (rank == 0)
            printf(", \"Allreduce, %s\": %.3f", name, sum);
    }
    const double meeting = measure(barrier, 0);
    if (rank == 0)
        printf(", \"Barrier\": %.3f}\n", meeting);
}

/* Three arrays that no cache holds; they change places, so that each is read and written. */
static void triad(void)
{
    enum { COUNT = 1 << 22 };
    double *a = malloc(3 * sizeof(*a) * COUNT), *b = a + COUNT, *c = b + COUNT;
    if (!a)
        MPI_Abort(MPI_COMM_WORLD, 1);
    for (int i = 0; i < 3 * COUNT; i++)
        a[i] = 1;
    for (;;) {
        for (int i = 0; i < COUNT; i++)
            a[i] = b[i] + 1e-9 * c[i];
        double *written = a;
        a = b;
        b = c;
        c = written;
        MPI_Pcontrol(1);
    }
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
    const int streamed = argc == 2 && strcmp(argv[1], "stream") == 0;
    if (!held && !streamed && (!(pairs || swept) || size < 2))
        MPI_Abort(MPI_COMM_WORLD, 2);
    while (held) {
        usleep((useconds_t)(1000 * atoi(argv[2])));
        MPI_Pcontrol(1);
    }
    if (streamed)
        triad();
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
