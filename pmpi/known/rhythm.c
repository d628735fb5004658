/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * Loops that do not say where their iterations end: `rhythm KIND STEPS`. Prints the number of
 * beats that the loop has had by its own count, 0 where it has none.
 *
 * steps: neighbours exchange, all agree on a time step; every tenth and hundredth time more.
 * solver: in each step an inner loop of another length. master: ranks ask rank 0 for work.
 * told: steps, and then three that the program tells. unsteady: steps, and then more of them, among
 * which what came every tenth time comes now and then.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int rank, size;

static void compute(double milliseconds)
{
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    do
        clock_gettime(CLOCK_MONOTONIC, &now);
    while ((double)(now.tv_sec - start.tv_sec) * 1e3 + (double)(now.tv_nsec - start.tv_nsec) / 1e6 <
           milliseconds);
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

int main(int argc, char *argv[])
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    const char *kind = argc > 1 ? argv[1] : "steps";
    int n = argc > 2 ? atoi(argv[2]) : 1000;
    setup();
    int beats = 0;
    if (!strcmp(kind, "steps"))
        beats = steps(n);
    if (!strcmp(kind, "told"))
        beats = told(n);
    if (!strcmp(kind, "unsteady"))
        beats = unsteady(n);
    if (!strcmp(kind, "solver"))
        beats = solver(n);
    if (!strcmp(kind, "master"))
        beats = master(n);
    if (rank == 0)
        printf("%d\n", beats);
    MPI_Finalize();
    return 0;
}
