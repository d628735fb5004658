/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * A program of MPI 4.0 on two ranks that never calls MPI_Init: two sessions, one within the other,
 * and in the first a communicator on which each kind of call that came with MPI 4.0 is made a known
 * number of times. A thread ends the last session. `wait SECONDS`: instead, rank 1 keeps rank 0
 * waiting in MPI_Recv_c for so long. `late SECONDS`: the same, and then both pause for so long
 * before the end; `again SECONDS`: all that, after a thread has had a session. Prints "good" on
 * each rank if all that arrived is right, "unsupported" before MPI 4.0.
 */
#include <mpi.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if MPI_VERSION >= 4

enum { TIMES = 3 };

static int rank, peer;
static MPI_Comm comm;

static int large_counts(void)
{
    int one = 1, sum = 0, got = -1, good = 1;
    MPI_Request request;
    for (int i = 0; i < TIMES; i++) {
        MPI_Allreduce_c(&one, &sum, 1, MPI_INT, MPI_SUM, comm);
        MPI_Irecv_c(&got, 1, MPI_INT, peer, 0, comm, &request);
        MPI_Send_c(&rank, 1, MPI_INT, peer, 0, comm);
        MPI_Wait(&request, MPI_STATUS_IGNORE);
        good &= sum == 2 && got == peer;
    }
    return good;
}

static int both_ways(void)
{
    int got = -1, there = rank;
    MPI_Request requests[2];
    MPI_Isendrecv(&rank, 1, MPI_INT, peer, 1, &got, 1, MPI_INT, peer, 1, comm, &requests[0]);
    MPI_Isendrecv_replace(&there, 1, MPI_INT, peer, 2, peer, 2, comm, &requests[1]);
    MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
    return got == peer && there == peer;
}

static int persistent(void)
{
    int one = 1, sum = 0, good = 1;
    MPI_Request request;
    MPI_Allreduce_init(&one, &sum, 1, MPI_INT, MPI_SUM, comm, MPI_INFO_NULL, &request);
    for (int i = 0; i < TIMES; i++) {
        sum = 0;
        MPI_Start(&request);
        MPI_Wait(&request, MPI_STATUS_IGNORE);
        good &= sum == 2;
    }
    MPI_Request_free(&request);
    return good;
}

static int by_parts(void)
{
    int parts[2] = {5, 6};
    MPI_Request request;
    if (rank == 0) {
        MPI_Psend_init(parts, 2, 1, MPI_INT, peer, 3, comm, MPI_INFO_NULL, &request);
        MPI_Start(&request);
        MPI_Pready(0, request);
        MPI_Pready(1, request);
    } else {
        parts[0] = parts[1] = 0;
        MPI_Precv_init(parts, 2, 1, MPI_INT, peer, 3, comm, MPI_INFO_NULL, &request);
        MPI_Start(&request);
    }
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    MPI_Request_free(&request);
    return parts[0] == 5 && parts[1] == 6;
}

static int keep_waiting(int seconds)
{
    int got = -1;
    if (rank == 0) {
        MPI_Recv_c(&got, 1, MPI_INT, peer, 4, comm, MPI_STATUS_IGNORE);
        return got == peer;
    }
    poll(NULL, 0, seconds * 1000);
    MPI_Send_c(&rank, 1, MPI_INT, peer, 4, comm);
    return 1;
}

static void *begin_and_end(void *nothing)
{
    MPI_Session session;
    MPI_Session_init(MPI_INFO_NULL, MPI_ERRORS_ARE_FATAL, &session);
    MPI_Session_finalize(&session);
    return nothing;
}

static void *end(void *session)
{
    MPI_Session_finalize(session);
    return NULL;
}

int main(int argc, char *argv[])
{
    MPI_Session outer, inner;
    pthread_t thread;
    MPI_Group all;
    const char *what = argc > 2 ? argv[1] : "";
    if (strcmp(what, "again") == 0) {
        pthread_create(&thread, NULL, begin_and_end, NULL);
        pthread_join(thread, NULL);
    }
    MPI_Session_init(MPI_INFO_NULL, MPI_ERRORS_ARE_FATAL, &outer);
    MPI_Group_from_session_pset(outer, "mpi://WORLD", &all);
    MPI_Comm_create_from_group(all, "known", MPI_INFO_NULL, MPI_ERRORS_ARE_FATAL, &comm);
    MPI_Group_free(&all);
    MPI_Comm_rank(comm, &rank);
    peer = 1 - rank;
    MPI_Session_init(MPI_INFO_NULL, MPI_ERRORS_ARE_FATAL, &inner);
    MPI_Session_finalize(&inner);
    int good = argc > 2 ? keep_waiting(atoi(argv[2]))
                        : large_counts() & both_ways() & persistent() & by_parts();
    printf(good ? "good\n" : "bad\n");
    MPI_Comm_free(&comm);
    if (strcmp(what, "late") == 0 || strcmp(what, "again") == 0)
        poll(NULL, 0, atoi(argv[2]) * 1000);
    pthread_create(&thread, NULL, end, &outer);
    pthread_join(thread, NULL);
    return 0;
}

#else

int main(void)
{
    printf("unsupported\n");
    return 0;
}

#endif
