/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * Four threads on each of two ranks talk at once: each thread sends and receives 1000
 * messages, so each rank calls MPI_Send and MPI_Recv 4000 times.
 */
#include <mpi.h>
#include <pthread.h>
#include <stdio.h>

enum { THREADS = 4, MESSAGES = 1000 };
static int rank;

static void *talk(void *argument)
{
    const int tag = *(int *)argument;
    int value = 0;
    for (int i = 0; i < MESSAGES; i++) {
        if (rank == 0)
            MPI_Send(&i, 1, MPI_INT, 1, tag, MPI_COMM_WORLD);
        MPI_Recv(&value, 1, MPI_INT, 1 - rank, tag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        if (rank == 1)
            MPI_Send(&value, 1, MPI_INT, 0, tag, MPI_COMM_WORLD);
    }
    return value == MESSAGES - 1 ? argument : NULL;
}

int main(int argc, char *argv[])
{
    pthread_t threads[THREADS];
    int tags[THREADS], level, good = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (level == MPI_THREAD_MULTIPLE) {
        for (int i = 0; i < THREADS; i++) {
            tags[i] = i;
            pthread_create(&threads[i], NULL, talk, &tags[i]);
        }
        for (int i = 0; i < THREADS; i++) {
            void *result;
            pthread_join(threads[i], &result);
            good += result != NULL;
        }
    }
    printf("%s\n", level < MPI_THREAD_MULTIPLE ? "unsupported" : good == THREADS ? "good" : "bad");
    MPI_Finalize();
    return 0;
}
