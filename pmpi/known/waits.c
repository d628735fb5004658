/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * What the wait policy does in rank 0 of two: it stands in for syscall(3), by which the policy
 * gives way, sleeps and wakes others, and says how often one of these happened on the thread that
 * is looked at.
 *
 * beside: a thread waits in MPI_Recv for 0.3 s, in which nobody else calls MPI
 * turns: the same, and says how often it gave way
 * polls: 1000 times MPI_Iprobe and 1000 times MPI_Test, which find nothing
 * starts: one MPI_Fetch_and_op on the other rank, which does not call MPI for 1 s
 * trickle: one MPI_Recv, during which the rank sleeps and then gets 1000 other messages
 * accepts: 5 times MPI_Irecv, of a long message that has come, while its sender sleeps; and says
 *     how often these woke others
 * tests: the same of 5 times MPI_Test, which is the first that sees the message
 * news: 100 times MPI_Recv, of messages that come 5 ms apart
 */
#include <dlfcn.h>
#include <linux/futex.h>
#include <mpi.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>

enum {
    POLLS = 1000,
    MESSAGES = 1000,
    NEWS = 100,
    LONG = 1 << 18,
    TIMES = 5,
    LAST = 1,
    OTHER = 2,
    NEVER = 3
};
static __thread unsigned yields, sleeps, wakes;
static int data[LONG];

long syscall(long number, ...)
{
    static long (*next)(long, ...);
    long words[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++)
        words[i] = va_arg(list, long);
    va_end(list);
    if (next == NULL)
        *(void **)&next = dlsym(RTLD_NEXT, "syscall");
    yields += number == SYS_sched_yield;
    sleeps += (number == SYS_futex && words[1] == FUTEX_WAIT) || number == SYS_ppoll;
    wakes += number == SYS_futex && words[1] == FUTEX_WAKE;
    return next(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}

static void receive(int tag)
{
    int value;
    MPI_Recv(&value, 1, MPI_INT, MPI_ANY_SOURCE, tag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

static void send(int rank, int tag)
{
    MPI_Send(&tag, 1, MPI_INT, rank, tag, MPI_COMM_WORLD);
}

struct counts {
    unsigned yields, sleeps;
};

static void *wait_beside(void *counted)
{
    receive(LAST);
    *(struct counts *)counted = (struct counts){yields, sleeps};
    return NULL;
}

static struct counts beside(void)
{
    pthread_t thread;
    struct counts counted = {0, 0};
    pthread_create(&thread, NULL, wait_beside, &counted);
    poll(NULL, 0, 300);
    send(1, LAST);
    pthread_join(thread, NULL);
    return counted;
}

static unsigned polls(void)
{
    MPI_Request request;
    int found, value;
    MPI_Irecv(&value, 1, MPI_INT, 1, NEVER, MPI_COMM_WORLD, &request);
    unsigned before = yields + sleeps;
    for (int i = 0; i < POLLS; i++) {
        MPI_Iprobe(1, OTHER, MPI_COMM_WORLD, &found, MPI_STATUS_IGNORE);
        MPI_Test(&request, &found, MPI_STATUS_IGNORE);
    }
    unsigned counted = yields + sleeps - before;
    MPI_Cancel(&request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    return counted;
}

/* Both ranks make the window; the call is the first on it. */
static unsigned starts(int rank)
{
    int value = 1, result;
    MPI_Win window;
    MPI_Win_create(&value, sizeof(value), sizeof(value), MPI_INFO_NULL, MPI_COMM_WORLD, &window);
    MPI_Win_lock_all(0, window);
    MPI_Barrier(MPI_COMM_WORLD);
    unsigned before = sleeps;
    if (rank == 0)
        MPI_Fetch_and_op(&value, &result, MPI_INT, 1, 0, MPI_SUM, window);
    else
        poll(NULL, 0, 1000);
    unsigned counted = sleeps - before;
    MPI_Win_unlock_all(window);
    MPI_Win_free(&window);
    return counted;
}

static unsigned trickle(void)
{
    unsigned before = sleeps;
    receive(LAST);
    unsigned counted = sleeps - before;
    for (int i = 0; i < MESSAGES; i++)
        receive(OTHER);
    return counted;
}

static unsigned accepts(void)
{
    MPI_Request request;
    int found = 0;
    while (!found)
        MPI_Iprobe(1, OTHER, MPI_COMM_WORLD, &found, MPI_STATUS_IGNORE);
    poll(NULL, 0, 100); /* the sender, whom that has woken, falls asleep again */
    unsigned before = wakes;
    MPI_Irecv(data, LONG, MPI_INT, 1, OTHER, MPI_COMM_WORLD, &request);
    unsigned counted = wakes - before;
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    return counted;
}

static unsigned tests(void)
{
    MPI_Request request;
    int found;
    MPI_Irecv(data, LONG, MPI_INT, 1, OTHER, MPI_COMM_WORLD, &request);
    send(1, LAST);
    poll(NULL, 0, 100); /* the sender falls asleep */
    unsigned before = wakes;
    MPI_Test(&request, &found, MPI_STATUS_IGNORE);
    unsigned counted = wakes - before;
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    return counted;
}

static unsigned times(unsigned (*one)(void))
{
    unsigned counted = 0;
    for (int i = 0; i < TIMES; i++)
        counted += one();
    return counted;
}

static unsigned news(void)
{
    unsigned before = sleeps;
    for (int i = 0; i < NEWS; i++)
        receive(OTHER);
    return sleeps - before;
}

/* 100 us: rank 0 falls asleep again if it thinks that it has waited long enough. */
static void pause_shortly(void)
{
    const double end = MPI_Wtime() + 1e-4;
    while (MPI_Wtime() < end)
        ;
}

static int beside_asked(const char *what)
{
    return strcmp(what, "beside") == 0 || strcmp(what, "turns") == 0;
}

static void answer(const char *what)
{
    if (beside_asked(what)) {
        receive(LAST);
        send(0, LAST);
    } else if (strcmp(what, "starts") == 0) {
        starts(1);
    } else if (strcmp(what, "trickle") == 0) {
        poll(NULL, 0, 300); /* it falls asleep */
        for (int i = 0; i < MESSAGES; i++) {
            send(0, OTHER);
            pause_shortly();
        }
        send(0, LAST);
    } else if (strcmp(what, "accepts") == 0 || strcmp(what, "tests") == 0) {
        for (int i = 0; i < TIMES; i++) {
            if (strcmp(what, "tests") == 0)
                receive(LAST);
            MPI_Send(data, LONG, MPI_INT, 0, OTHER, MPI_COMM_WORLD);
        }
    } else if (strcmp(what, "news") == 0) {
        for (int i = 0; i < NEWS; i++) {
            poll(NULL, 0, 5);
            send(0, OTHER);
        }
    }
}

int main(int argc, char *argv[])
{
    int rank, level;
    const char *what = argc > 1 ? argv[1] : "";
    int asked = beside_asked(what) ? MPI_THREAD_MULTIPLE : MPI_THREAD_SINGLE;
    MPI_Init_thread(&argc, &argv, asked, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (rank > 0)
        answer(what);
    else if (level < asked)
        printf("unsupported\n");
    else
        printf("%u\n", strcmp(what, "beside") == 0    ? beside().sleeps
                       : strcmp(what, "turns") == 0   ? beside().yields
                       : strcmp(what, "polls") == 0   ? polls()
                       : strcmp(what, "starts") == 0  ? starts(0)
                       : strcmp(what, "accepts") == 0 ? times(accepts)
                       : strcmp(what, "tests") == 0   ? times(tests)
                       : strcmp(what, "news") == 0    ? news()
                                                      : trickle());
    MPI_Finalize();
    return 0;
}
