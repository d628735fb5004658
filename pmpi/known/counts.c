/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * Calls each family of MPI functions a known number of times, on an even number of ranks
 *: `counts DIRECTORY`. Prints "rank name count" for each function, as counted here, and
 * "rank result CHECKSUM" over everything that the calls returned.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct {
    const char *name;
    int count;
} called[200];
static unsigned checksum = 2166136261u;
static int rank, size, peer;

static void add(unsigned value)
{
    checksum = (checksum ^ value) * 16777619u;
}

static void count(const char *name)
{
    int i = 0;
    while (called[i].name && strcmp(called[i].name, name) != 0)
        i++;
    called[i].name = name;
    called[i].count++;
}

static void add_code(int code)
{
    int class = MPI_SUCCESS;
    if (code != MPI_SUCCESS)
        MPI_Error_class(code, &class);
    add((unsigned)class);
}

/* DO(MPI_Send, (arguments)) calls it, counts it and takes its error class into the checksum. */
#define DO(name, arguments) (count(#name), add_code(name arguments))
#define WORLD MPI_COMM_WORLD

static void point_to_point(void)
{
    int out = rank, in = -1, flag, n, index[2];
    char space[4096];
    MPI_Request r[2];
    MPI_Status s[2];
    MPI_Message m;
    for (int i = 0; i < 3; i++) {
        if (rank < peer) {
            DO(MPI_Send, (&out, 1, MPI_INT, peer, 1, WORLD));
            DO(MPI_Ssend, (&out, 1, MPI_INT, peer, 2, WORLD));
            MPI_Buffer_attach(space, sizeof(space));
            DO(MPI_Bsend, (&out, 1, MPI_INT, peer, 3, WORLD));
            DO(MPI_Buffer_detach, (&(void *){NULL}, &n));
        } else {
            DO(MPI_Recv, (&in, 1, MPI_INT, peer, 1, WORLD, s));
            DO(MPI_Probe, (peer, 2, WORLD, s));
            DO(MPI_Recv, (&in, 1, MPI_INT, peer, 2, WORLD, s));
            DO(MPI_Mprobe, (peer, 3, WORLD, &m, s));
            DO(MPI_Mrecv, (&in, 1, MPI_INT, &m, s));
        }
        DO(MPI_Sendrecv, (&out, 1, MPI_INT, peer, 4, &in, 1, MPI_INT, peer, 4, WORLD, s));
        DO(MPI_Sendrecv_replace, (&in, 1, MPI_INT, peer, 5, peer, 5, WORLD, s));
        add((unsigned)in);
        DO(MPI_Irecv, (&in, 1, MPI_INT, peer, 6, WORLD, &r[0]));
        DO(MPI_Isend, (&out, 1, MPI_INT, peer, 6, WORLD, &r[1]));
        DO(MPI_Waitall, (2, r, s));
        DO(MPI_Wait, (&r[0], s));
        DO(MPI_Waitany, (2, r, &n, s));
        DO(MPI_Waitsome, (2, r, &n, index, s));
        DO(MPI_Test, (&r[0], &flag, s));
        DO(MPI_Testall, (2, r, &flag, s));
        DO(MPI_Testany, (2, r, &n, &flag, s));
        DO(MPI_Testsome, (2, r, &n, index, s));
        DO(MPI_Iprobe, (peer, 99, WORLD, &flag, s));
        add((unsigned)flag);
    }
    MPI_Recv_init(&in, 1, MPI_INT, peer, 7, WORLD, &r[0]);
    MPI_Send_init(&out, 1, MPI_INT, peer, 7, WORLD, &r[1]);
    DO(MPI_Startall, (2, r));
    DO(MPI_Waitall, (2, r, s));
    DO(MPI_Start, (&r[0]));
    DO(MPI_Rsend, (&out, 1, MPI_INT, MPI_PROC_NULL, 7, WORLD));
    DO(MPI_Send, (&out, 1, MPI_INT, peer, 7, WORLD));
    DO(MPI_Wait, (&r[0], s));
    MPI_Request_free(&r[0]);
    MPI_Request_free(&r[1]);
}

static void collectives(MPI_Comm comm)
{
    int one = rank + 1, sum = 0, n, *all, *most;
    MPI_Request r;
    MPI_Comm_size(comm, &n);
    all = calloc((size_t)n, sizeof(int));
    most = calloc((size_t)n, sizeof(int));
    DO(MPI_Barrier, (comm));
    DO(MPI_Bcast, (&sum, 1, MPI_INT, 0, comm));
    DO(MPI_Reduce, (&one, &sum, 1, MPI_INT, MPI_SUM, 0, comm));
    DO(MPI_Allreduce, (&one, &sum, 1, MPI_INT, MPI_SUM, comm));
    add((unsigned)sum);
    DO(MPI_Gather, (&one, 1, MPI_INT, all, 1, MPI_INT, 0, comm));
    DO(MPI_Scatter, (all, 1, MPI_INT, &one, 1, MPI_INT, 0, comm));
    DO(MPI_Allgather, (&one, 1, MPI_INT, all, 1, MPI_INT, comm));
    DO(MPI_Alltoall, (all, 1, MPI_INT, most, 1, MPI_INT, comm));
    DO(MPI_Reduce_scatter_block, (all, &sum, 1, MPI_INT, MPI_SUM, comm));
    DO(MPI_Scan, (&one, &sum, 1, MPI_INT, MPI_SUM, comm));
    add((unsigned)sum);
    DO(MPI_Exscan, (&one, &sum, 1, MPI_INT, MPI_SUM, comm));
    DO(MPI_Ibarrier, (comm, &r));
    DO(MPI_Wait, (&r, MPI_STATUS_IGNORE));
    DO(MPI_Iallreduce, (&one, &sum, 1, MPI_INT, MPI_MAX, comm, &r));
    DO(MPI_Wait, (&r, MPI_STATUS_IGNORE));
    add((unsigned)sum);
    free(all);
    free(most);
}

static void communicators(void)
{
    const int no[1] = {0};
    int in[2], dims[1] = {size};
    MPI_Comm half, cart, copy;
    DO(MPI_Comm_split, (WORLD, rank % 2, rank, &half));
    collectives(half);
    DO(MPI_Comm_free, (&half));
    DO(MPI_Comm_dup, (WORLD, &copy));
    collectives(copy);
    DO(MPI_Comm_free, (&copy));
    DO(MPI_Cart_create, (WORLD, 1, dims, no, 0, &cart));
    DO(MPI_Neighbor_allgather, (&rank, 1, MPI_INT, in, 1, MPI_INT, cart));
    DO(MPI_Comm_free, (&cart));
}

static void one_sided(void)
{
    int shared = rank, got = -1;
    MPI_Win win;
    DO(MPI_Win_create, (&shared, sizeof(int), sizeof(int), MPI_INFO_NULL, WORLD, &win));
    DO(MPI_Win_fence, (0, win));
    DO(MPI_Get, (&got, 1, MPI_INT, peer, 0, 1, MPI_INT, win));
    DO(MPI_Win_fence, (0, win));
    add((unsigned)got);
    DO(MPI_Win_lock, (MPI_LOCK_SHARED, peer, 0, win));
    DO(MPI_Win_flush, (peer, win));
    DO(MPI_Win_unlock, (peer, win));
    DO(MPI_Win_lock_all, (0, win));
    DO(MPI_Win_flush_all, (win));
    DO(MPI_Win_unlock_all, (win));
    DO(MPI_Win_free, (&win));
}

static void files(const char *dir)
{
    char path[4096];
    int value = rank, back = -1;
    MPI_File file;
    MPI_Status s;
    snprintf(path, sizeof(path), "%s/counts.data", dir);
    DO(MPI_File_open, (WORLD, path, MPI_MODE_CREATE | MPI_MODE_RDWR | MPI_MODE_DELETE_ON_CLOSE,
                       MPI_INFO_NULL, &file));
    DO(MPI_File_write_at_all, (file, 4 * rank, &value, 1, MPI_INT, &s));
    DO(MPI_File_sync, (file));
    DO(MPI_File_read_at_all, (file, 4 * rank, &back, 1, MPI_INT, &s));
    add((unsigned)back);
    DO(MPI_File_read_at_all_begin, (file, 4 * rank, &back, 1, MPI_INT));
    DO(MPI_File_read_at_all_end, (file, &back, &s));
    DO(MPI_File_write_at, (file, 4 * rank, &value, 1, MPI_INT, &s));
    DO(MPI_File_close, (&file));
}

static void errors(void)
{
    MPI_Comm_set_errhandler(WORLD, MPI_ERRORS_RETURN);
    DO(MPI_Send, (&rank, 1, MPI_INT, size + 7, 0, WORLD));
    DO(MPI_Bcast, (&rank, 1, MPI_INT, size + 7, WORLD));
}

int main(int argc, char *argv[])
{
    DO(MPI_Init, (&argc, &argv));
    MPI_Comm_rank(WORLD, &rank);
    MPI_Comm_size(WORLD, &size);
    peer = rank ^ 1;
    point_to_point();
    collectives(WORLD);
    communicators();
    one_sided();
    files(argc > 1 ? argv[1] : ".");
    errors();
    DO(MPI_Pcontrol, (0));
    DO(MPI_Pcontrol, (2));
    DO(MPI_Finalize, ());
    for (int i = 0; called[i].name; i++)
        printf("%d %s %d\n", rank, called[i].name, called[i].count);
    printf("%d result %u\n", rank, checksum);
    return 0;
}
