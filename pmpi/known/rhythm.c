/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * Loops that do not say where their iterations end: `rhythm KIND STEPS`. Prints the number of
 * beats that the loop has had by its own count, 0 where it has none.
 *
 * steps: neighbours exchange, all agree on a time step; every tenth and hundredth time more.
 * solver: in each step an inner loop of another length. master: ranks ask rank 0 for work.
 * told: steps, and then three that the program tells. switched: steps, after a profiler was
 * switched on by one MPI_Pcontrol(1), which tells none. unsteady: steps, and then more, among
 * which what came every tenth time comes now and then. cg: as a conjugate gradient, neighbours
 * exchange and all sum up twice. summary: steps, every tenth of which sums up five values by one
 * function. skipped: steps, many of which have an inner loop, of as many turns each time.
 *
 * In the others no call is made by all ranks, once they are set up. halo: neighbours on a line, in
 * one loop over them; every tenth time they exchange more. grid: on a plane, to all four sides, of
 * which some are MPI_PROC_NULL. persistent: as halo, with requests that are made once. groups:
 * halves of the ranks sum up. inner: between steps, turns of another number. rare: as halo, and all
 * agree at the start and when half is done. shifted: halo, and then as many steps whose every third
 * is left out, by what came at every tenth. pairs: each step with another partner, or none.
 * waitany: a master who has one request with each worker, and equal tasks. equal: as master, with
 * equal tasks.
 */
#include <mpi.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int rank, size;

/* To the library, which sees calls and the clock, a rank that sleeps here computes. */
static void compute(double milliseconds)
{
    struct timespec time = {.tv_nsec = (long)(milliseconds * 1e6)};
    nanosleep(&time, NULL);
}

static void exchange(void)
{
    double out[10] = {0}, in[10];
    MPI_Request requests[2];
    MPI_Irecv(in, 10, MPI_DOUBLE, (rank + size - 1) % size, 0, MPI_COMM_WORLD, &requests[0]);
    MPI_Isend(out, 10, MPI_DOUBLE, (rank + 1) % size, 0, MPI_COMM_WORLD, &requests[1]);
    MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
}

static void setup(void)
{
    int words[100] = {0};
    for (int i = 0; i < 60; i++) {
        MPI_Bcast(words, 1, MPI_INT, 0, MPI_COMM_WORLD);
        MPI_Bcast(words, i + 1, MPI_INT, 0, MPI_COMM_WORLD);
    }
}

static int steps(int n)
{
    double mine = 1, all, parts[100];
    for (int step = 1; step <= n; step++) {
        exchange();
        compute(2);
        MPI_Allreduce(&mine, &all, 1, MPI_DOUBLE, MPI_MIN, MPI_COMM_WORLD);
        if (step % 10 == 0)
            MPI_Reduce(&mine, &all, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
        if (step % 100 == 0)
            MPI_Gather(&mine, 1, MPI_DOUBLE, parts, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
    }
    return n;
}

static int told(int n)
{
    steps(n);
    for (int step = 0; step < 3; step++)
        MPI_Pcontrol(1);
    return 3;
}

static int switched(int n)
{
    MPI_Pcontrol(1);
    return steps(n);
}

static int unsteady(int n)
{
    double mine = 1, all;
    for (int step = 1; step <= 2 * n; step++) {
        compute(2);
        MPI_Allreduce(&mine, &all, 1, MPI_DOUBLE, MPI_MIN, MPI_COMM_WORLD);
        if (step <= n ? step % 10 == 0 : step * step % 23 < 2)
            MPI_Reduce(&mine, &all, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
    }
    return 0;
}

static int solver(int n)
{
    double mine = 1, all;
    for (int step = 1; step <= n; step++) {
        MPI_Allreduce(&mine, &all, 1, MPI_DOUBLE, MPI_MIN, MPI_COMM_WORLD);
        for (int turn = 10 + step * 7 % 13; turn > 0; turn--) {
            exchange();
            compute(0.3);
            MPI_Allreduce(&mine, &all, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
            MPI_Allreduce(&mine, &all, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        }
    }
    return n;
}

static void sum_up(double *value)
{
    double all;
    MPI_Reduce(value, &all, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
}

static int summary(int n)
{
    double mine = 1, all, values[5] = {0};
    for (int step = 1; step <= n; step++) {
        compute(2);
        MPI_Allreduce(&mine, &all, 1, MPI_DOUBLE, MPI_MIN, MPI_COMM_WORLD);
        for (int i = 0; i < 5 && step % 10 == 0; i++)
            sum_up(&values[i]);
    }
    return n;
}

static int skipped(int n)
{
    double mine = 1, all;
    for (int step = 1; step <= n; step++) {
        compute(2);
        MPI_Allreduce(&mine, &all, 1, MPI_DOUBLE, MPI_MIN, MPI_COMM_WORLD);
        for (int turn = 0; turn < 5 && step * step % 23 > 7; turn++)
            MPI_Allreduce(&mine, &all, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    }
    return n;
}

static int cg(int n)
{
    double mine = 1, all;
    for (int step = 1; step <= n; step++) {
        exchange();
        compute(1);
        MPI_Allreduce(&mine, &all, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
        compute(1);
        MPI_Allreduce(&mine, &all, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    }
    return n;
}

/* With the neighbours on a line, of which the first and the last rank have one. */
static void line(int tag)
{
    double out[10] = {0}, in[20];
    MPI_Request requests[4];
    int n = 0;
    for (int peer = rank - 1; peer <= rank + 1; peer += 2) {
        if (peer < 0 || peer >= size)
            continue;
        MPI_Irecv(in + 5 * n, 10, MPI_DOUBLE, peer, tag, MPI_COMM_WORLD, &requests[n]);
        MPI_Isend(out, 10, MPI_DOUBLE, peer, tag, MPI_COMM_WORLD, &requests[n + 1]);
        n += 2;
    }
    MPI_Waitall(n, requests, MPI_STATUSES_IGNORE);
}

/* The first and the last rank do not take part; of two, both do. */
static void some(void)
{
    int word = 0, peer = size == 2 ? 1 - rank : rank == 1 ? 2 : rank == 2 ? 1 : MPI_PROC_NULL;
    MPI_Sendrecv_replace(&word, 1, MPI_INT, peer, 1, peer, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

static int halo(int n)
{
    for (int step = 1; step <= n; step++) {
        line(0);
        compute(2);
        if (step % 10 == 0)
            some();
    }
    return n;
}

static int shifted(int n)
{
    for (int step = 1; step <= 2 * n; step++) {
        line(0);
        compute(2);
        if (step <= n ? step % 10 == 0 : step * step % 23 < 2)
            some();
    }
    return 0;
}

static int rare(int n)
{
    double mine = 1, all;
    for (int step = 1; step <= n; step++) {
        if (step == 1 || step == n / 2)
            MPI_Allreduce(&mine, &all, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
        line(0);
        compute(12);
    }
    return n;
}

static int grid(int n)
{
    int dims[2] = {0, 0}, periods[2] = {0, 0}, left, right;
    double out[10] = {0}, in[10];
    MPI_Comm plane;
    MPI_Dims_create(size, 2, dims);
    MPI_Cart_create(MPI_COMM_WORLD, 2, dims, periods, 0, &plane);
    for (int step = 1; step <= n; step++) {
        for (int side = 0; side < 4; side++) {
            MPI_Cart_shift(plane, side / 2, side % 2 ? 1 : -1, &left, &right);
            MPI_Sendrecv(out, 10, MPI_DOUBLE, right, 0, in, 10, MPI_DOUBLE, left, 0, plane,
                         MPI_STATUS_IGNORE);
        }
        compute(2);
    }
    return n;
}

static int persistent(int n)
{
    double out[10] = {0}, in[20];
    MPI_Request requests[4];
    int made = 0;
    for (int peer = rank - 1; peer <= rank + 1; peer += 2) {
        if (peer < 0 || peer >= size)
            continue;
        MPI_Recv_init(in + 5 * made, 10, MPI_DOUBLE, peer, 0, MPI_COMM_WORLD, &requests[made]);
        MPI_Send_init(out, 10, MPI_DOUBLE, peer, 0, MPI_COMM_WORLD, &requests[made + 1]);
        made += 2;
    }
    for (int step = 1; step <= n; step++) {
        for (int i = 0; i < made; i++)
            MPI_Start(&requests[i]);
        MPI_Waitall(made, requests, MPI_STATUSES_IGNORE);
        compute(2);
    }
    for (int i = 0; i < made; i++)
        MPI_Request_free(&requests[i]);
    return n;
}

static int groups(int n)
{
    double mine = 1, all;
    MPI_Comm half;
    MPI_Comm_split(MPI_COMM_WORLD, 2 * rank / size, rank, &half);
    for (int step = 1; step <= n; step++) {
        MPI_Allreduce(&mine, &all, 1, MPI_DOUBLE, MPI_SUM, half);
        compute(2);
    }
    MPI_Comm_free(&half);
    return n;
}

static int inner(int n)
{
    for (int step = 1; step <= n; step++) {
        for (int turn = 10 + step * 7 % 13; turn > 0; turn--) {
            line(0);
            compute(0.2);
        }
        exchange();
    }
    return n;
}

/* All ranks draw the same numbers, and so agree who is whose partner. */
static int pairs(int n)
{
    unsigned seed = 1;
    int word = 0;
    for (int step = 1; step <= n; step++) {
        seed = seed * 1103515245u + 12345u;
        int peer = rank ^ (int)(seed >> 16) % size;
        compute(1);
        if (peer != rank && peer < size)
            MPI_Sendrecv_replace(&word, 1, MPI_INT, peer, 0, peer, 0, MPI_COMM_WORLD,
                                 MPI_STATUS_IGNORE);
        if (peer != rank && peer < size && seed >> 8 & 64)
            MPI_Sendrecv_replace(&word, 2 - 1, MPI_INT, peer, 1, peer, 1, MPI_COMM_WORLD,
                                 MPI_STATUS_IGNORE);
    }
    return 0;
}

static int tasks(int n, bool any)
{
    enum { MOST = 64 };
    int task = 0, none = -1, got[MOST], at;
    MPI_Request requests[MOST];
    if (rank > 0) {
        do {
            MPI_Send(&task, 1, MPI_INT, 0, 0, MPI_COMM_WORLD);
            MPI_Recv(&task, 1, MPI_INT, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            compute(task < 0 ? 0 : 2);
        } while (task >= 0);
        return 0;
    }
    n *= size - 1;
    for (int i = 1; i < size && !any; i++)
        MPI_Irecv(&got[i - 1], 1, MPI_INT, i, 0, MPI_COMM_WORLD, &requests[i - 1]);
    for (int workers = size - 1; workers > 0; n--) {
        MPI_Status from = {.MPI_SOURCE = 0};
        if (any)
            MPI_Recv(&task, 1, MPI_INT, MPI_ANY_SOURCE, 0, MPI_COMM_WORLD, &from);
        else
            MPI_Waitany(size - 1, requests, &at, MPI_STATUS_IGNORE);
        int worker = any ? from.MPI_SOURCE : at + 1;
        MPI_Send(n > 0 ? &n : &none, 1, MPI_INT, worker, 0, MPI_COMM_WORLD);
        workers -= n <= 0;
        if (!any && n > 0)
            MPI_Irecv(&got[at], 1, MPI_INT, worker, 0, MPI_COMM_WORLD, &requests[at]);
    }
    return 0;
}

static int equal(int n)
{
    return tasks(n, true);
}

static int waitany(int n)
{
    return tasks(n, false);
}

static int master(int n)
{
    int task = n, none = -1;
    MPI_Status from;
    if (rank == 0) {
        for (int workers = size - 1; workers > 0;) {
            MPI_Recv(&task, 1, MPI_INT, MPI_ANY_SOURCE, 0, MPI_COMM_WORLD, &from);
            MPI_Send(n > 0 ? &n : &none, 1, MPI_INT, from.MPI_SOURCE, 0, MPI_COMM_WORLD);
            workers -= n <= 0;
            n--;
        }
    } else {
        do {
            MPI_Send(&task, 1, MPI_INT, 0, 0, MPI_COMM_WORLD);
            MPI_Recv(&task, 1, MPI_INT, 0, 0, MPI_COMM_WORLD, &from);
            compute(task < 0 ? 0 : task % 7);
        } while (task >= 0);
    }
    return 0;
}

static const struct {
    const char *name;
    int (*loop)(int);
} kinds[] = {
    {"steps", steps},
    {"told", told},
    {"switched", switched},
    {"unsteady", unsteady},
    {"solver", solver},
    {"master", master},
    {"cg", cg},
    {"summary", summary},
    {"skipped", skipped},
    {"halo", halo},
    {"shifted", shifted},
    {"rare", rare},
    {"grid", grid},
    {"persistent", persistent},
    {"groups", groups},
    {"inner", inner},
    {"pairs", pairs},
    {"equal", equal},
    {"waitany", waitany},
};

int main(int argc, char *argv[])
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    const char *kind = argc > 1 ? argv[1] : "steps";
    int n = argc > 2 ? atoi(argv[2]) : 1000;
    setup();
    int beats = 0;
    for (unsigned i = 0; i < sizeof(kinds) / sizeof(*kinds); i++)
        if (!strcmp(kind, kinds[i].name))
            beats = kinds[i].loop(n);
    if (rank == 0)
        printf("%d\n", beats);
    MPI_Finalize();
    return 0;
}
