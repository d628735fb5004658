/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * Traffic whose result is known to depend on nothing but the number of ranks, for the tests of
 * the wait policy: `wait_program mix|threads|fork ROUNDS`. Rank 0 prints one number.
 */
#include <mpi.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define LARGEST 65536 /* doubles: 512 kB go by rendezvous, small ones are sent eagerly */

static int rank, size, rounds;

static void fill(double *data, int count, int seed)
{
    for (int i = 0; i < count; i++)
        data[i] = (double)((i * 7 + seed * 13) % 101);
}

/* A ring of messages, a reduction, a request that is tested for, and one group after another. */
static double mix(MPI_Comm comm)
{
    static __thread double out[LARGEST], in[LARGEST];
    double sum = 0;
    for (int round = 0; round < rounds; round++) {
        const int count = round % 8 == 7 ? LARGEST : 1 << round % 8;
        const int to = (rank + 1) % size, from = (rank + size - 1) % size;
        MPI_Request requests[2];
        MPI_Status statuses[2];
        int done = 0;
        fill(out, count, rank + round);
        MPI_Irecv(in, count, MPI_DOUBLE, from, 1, comm, &requests[0]);
        MPI_Isend(out, count, MPI_DOUBLE, to, 1, comm, &requests[1]);
        while (round % 3 == 0 && !done)
            MPI_Testall(2, requests, &done, statuses);
        MPI_Waitall(2, requests, statuses);
        double here = in[0] + in[count - 1], all = 0;
        MPI_Allreduce(&here, &all, 1, MPI_DOUBLE, MPI_SUM, comm);
        MPI_Bcast(&all, 1, MPI_DOUBLE, round % size, comm);
        sum += all * (round + 1);
    }
    return sum;
}

static double halves(void)
{
    MPI_Comm half;
    double all = 0;
    MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half);
    for (int round = 0; round < rounds; round++) {
        double here = rank + round;
        MPI_Allreduce(&here, &all, 1, MPI_DOUBLE, MPI_SUM, half);
    }
    MPI_Comm_free(&half);
    return all;
}

static void *thread(void *comm)
{
    double *sum = malloc(sizeof(*sum));
    *sum = mix(*(MPI_Comm *)comm);
    return sum;
}

static double threads(void)
{
    pthread_t ids[2];
    MPI_Comm comms[2];
    double sum = 0;
    for (int i = 0; i < 2; i++)
        MPI_Comm_dup(MPI_COMM_WORLD, &comms[i]);
    for (int i = 0; i < 2; i++)
        pthread_create(&ids[i], NULL, thread, &comms[i]);
    for (int i = 0; i < 2; i++) {
        void *one;
        pthread_join(ids[i], &one);
        sum += *(double *)one;
        free(one);
        MPI_Comm_free(&comms[i]);
    }
    return sum;
}

/* The child gives way a thousand times and must come to its end; so must the parent. */
static double forks(void)
{
    int status;
    pid_t child = fork();
    if (child == 0) {
        for (int i = 0; i < 1000; i++)
            sched_yield();
        _exit(7);
    }
    if (waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 7)
        MPI_Abort(MPI_COMM_WORLD, 3);
    return mix(MPI_COMM_WORLD);
}

int main(int argc, char *argv[])
{
    int level;
    const char *what = argc == 3 ? argv[1] : "";
    rounds = argc == 3 ? atoi(argv[2]) : 0;
    MPI_Init_thread(&argc, &argv,
                    strcmp(what, "threads") == 0 ? MPI_THREAD_MULTIPLE : MPI_THREAD_SINGLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    double sum = 0;
    if (strcmp(what, "mix") == 0)
        sum = mix(MPI_COMM_WORLD) + halves();
    else if (strcmp(what, "threads") == 0 && level == MPI_THREAD_MULTIPLE)
        sum = threads();
    else if (strcmp(what, "fork") == 0)
        sum = forks();
    else
        MPI_Abort(MPI_COMM_WORLD, 2);
    if (rank == 0)
        printf("%.1f\n", sum);
    MPI_Finalize();
    return 0;
}
