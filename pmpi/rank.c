/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * The life of one rank's page: made after MPI_Init or the first session, marked
 * now and then, closed by MPI_Finalize, the end of the last session or MPI_Abort. A program that
 * has iterations and no MPI_Init gets one too.
 *
 * In: DOVETAIL_DIR, the directory for pages and the wait policy (wait.h); DOVETAIL_CLOCK (ticks.h).
 * Out: the file rank.<world rank>.<pid> there, laid out as in page.h.
 *
 * Invariants: only the main thread takes marks. A forked child never writes to its parent's
 * page. Whatever fails here leaves the program as it would be without this library.
 */
#include "rank.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <mpi.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "next.h"
#include "wait.h"

#define REFRESH_NS 10000000.0 /* 10 ms: a mark costs about 1 us, so one in ten thousand */
#define SILENCE 1000u         /* refreshes without a beat, so 10 s of calls, in any rhythm */
#define QUEUED_NS 1000000000u /* 1 s: to ask the kernel for each thread's wait takes 5 us */
#define RATE_NS 1000000u      /* the rate of the ticks is not to be had from less time */

struct dovetail_page *rank_page;
bool rank_parallel;
bool rank_waits;
uint64_t rank_refresh_at;
PER_THREAD char *rank_outermost;
PER_THREAD bool rank_main;

static struct rusage usage_at_init;
static uint64_t queued_asked, queued_then; /* when it was asked for last, and what came */
static uint32_t silence, longest;          /* refreshes since the last beat, and most between two */
static uint64_t before_init, before_init_tick; /* when MPI_Init began */

/* From NO_PAGE by rank_serial to SERIAL, from both by rank_begin to IN_MPI, from that to ENDED
 * after MPI_Finalize or the last session, and back where another begins; and from any to OVER,
 * where it stays: at the end, in a forked child, or if no page can be made. */
static enum { NO_PAGE, SERIAL, IN_MPI, ENDED, OVER } life;
static struct dovetail_page *left; /* the page, while ENDED */
static unsigned begun;             /* MPI_Init and the sessions that have not ended, while IN_MPI */
static bool has_main; /* else, as it has ended the last session, the thread is that begins again */
static pthread_mutex_t beginning = PTHREAD_MUTEX_INITIALIZER; /* two threads may open sessions */

#pragma weak PMPI_Comm_rank
#pragma weak PMPI_Comm_size
#pragma weak PMPI_Comm_get_parent
#pragma weak PMPI_Query_thread
#if MPI_VERSION >= 4
#pragma weak PMPI_Group_from_session_pset
#pragma weak PMPI_Group_rank
#pragma weak PMPI_Group_size
#pragma weak PMPI_Group_free
#endif
#if defined(OPEN_MPI)
#pragma weak ompi_mpi_comm_world
#pragma weak ompi_mpi_comm_null
#define THIS_MPI DOVETAIL_OPENMPI
#define WAITS_LOCKED false
#else
extern __attribute__((weak)) char ompi_mpi_comm_world[];
#define THIS_MPI DOVETAIL_MPICH
#define WAITS_LOCKED rank_parallel /* one lock for all threads, held through a turn of progress */
#endif

/* Is the MPI that has begun the one that this library is for? A script may start a program of the
 * other, and some bring an MPI for one rank of their own, without the profiling names. */
static bool is_this_mpi(void)
{
    bool open_mpi = known_function((void *)&ompi_mpi_comm_world, "ompi_mpi_comm_world") != NULL;
    return KNOWN(PMPI_Comm_rank) != NULL && open_mpi == (THIS_MPI == DOVETAIL_OPENMPI) &&
           !standard_abi();
}

/* MPI_COMM_WORLD and MPI_COMM_NULL are addresses in Open MPI, and may be as late as functions. */
static MPI_Comm world(void)
{
#if defined(OPEN_MPI)
    return next_function(MPI_COMM_WORLD, "ompi_mpi_comm_world");
#else
    return MPI_COMM_WORLD;
#endif
}

static bool spawned(void)
{
    MPI_Comm parent;
    NEXT(PMPI_Comm_get_parent)(&parent);
#if defined(OPEN_MPI)
    return parent != (MPI_Comm)next_function(MPI_COMM_NULL, "ompi_mpi_comm_null");
#else
    return parent != MPI_COMM_NULL;
#endif
}

/* A number for this MPI_COMM_WORLD that all its ranks on this machine agree on without talking:
 * 0 for the first of a job. mpirun numbers the worlds of a job from 1 in the low half of a job
 * id, and since Open MPI 5 behind an @; elsewhere the launcher's process for this world is the
 * number. */
static uint32_t world_number(void)
{
    if (!spawned())
        return 0;
    const char *job = getenv("PMIX_NAMESPACE");
    const char *at = job ? strrchr(job, '@') : NULL;
    char *end = NULL;
    job = at ? at + 1 : job;
    unsigned long id = job ? strtoul(job, &end, 10) : 0;
    if (job && *job && *end == '\0' && (id & 0xffff) > 1)
        return (uint32_t)(id & 0xffff) - 1;
    return (uint32_t)getppid();
}

/* When the process started, in clock ticks after boot; with the pid it names the process. */
static uint64_t start_ticks(void)
{
    char text[1024];
    unsigned long long start = 0;
    int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, text, sizeof(text) - 1) : -1;
    if (fd >= 0)
        close(fd);
    if (n <= 0)
        return 0;
    text[n] = '\0';
    char *field = strrchr(text, ')'); /* ends field 2, which may hold anything */
    for (int i = 2; field && i < 22; i++)
        field = strchr(field + 1, ' ');
    if (field)
        sscanf(field, "%llu", &start);
    return start;
}

/* The number that a thread's own file has for the time that it waited for a core, ns; or -1. */
static long long queued_thread(int threads, const char *thread)
{
    char name[NAME_MAX + sizeof("/schedstat")], text[128];
    unsigned long long waited;
    snprintf(name, sizeof(name), "%s/schedstat", thread);
    int fd = openat(threads, name, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, text, sizeof(text) - 1) : -1;
    if (fd >= 0)
        close(fd);
    text[n > 0 ? n : 0] = '\0';
    return sscanf(text, "%*s %llu", &waited) == 1 ? (long long)waited : -1;
}

/* How long the threads that there are have waited for a core, ns; UINT64_MAX if that is unknown.
 * Allocates nothing, as opendir would: MPI_Abort comes from handlers of signals too, where malloc
 * may have been interrupted, and have its lock. */
static uint64_t queued(void)
{
    char entries[4096] __attribute__((aligned(8)));
    uint64_t sum = UINT64_MAX;
    long size;
    int saved = errno, threads = open("/proc/self/task", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    while (threads >= 0 && (size = syscall(SYS_getdents64, threads, entries, sizeof(entries))) > 0)
        for (long at = 0; at < size; at += ((struct dirent64 *)&entries[at])->d_reclen) {
            const char *thread = ((struct dirent64 *)&entries[at])->d_name;
            /* above is the first thread's once more */
            long long waited = thread[0] == '.' ? -1 : queued_thread(threads, thread);
            if (waited >= 0)
                sum = (sum == UINT64_MAX ? 0 : sum) + (uint64_t)waited;
        }
    if (threads >= 0)
        close(threads);
    errno = saved;
    return sum;
}

/* 0, or -1 if it does not fit. */
static int name_page(char *path, size_t size, const char *dir, int rank)
{
    int length = snprintf(path, size, "%s/rank.%d.%ld", dir, rank, (long)getpid());
    return length < 0 || (size_t)length >= size ? -1 : 0;
}

/* Is there the page of this very process, from before it became another program by exec(2)? */
static bool is_own(const char *path)
{
    uint64_t start = 0;
    int fd = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t n = pread(fd, &start, sizeof(start), offsetof(struct dovetail_page, start_ticks));
    close(fd);
    return n == sizeof(start) && start != 0 && start == start_ticks();
}

/* A new file of the page's size, its memory taken at once: a full file system must be an error
 * here, not a SIGBUS in the program later. */
static struct dovetail_page *map_page(const char *dir, int rank)
{
    char path[4096];
    void *memory = MAP_FAILED;
    if (name_page(path, sizeof(path), dir, rank) != 0)
        return NULL;
    const int flags = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    int fd = open(path, flags, 0600);
    if (fd < 0 && errno == EEXIST && is_own(path) && unlink(path) == 0)
        fd = open(path, flags, 0600);
    if (fd < 0)
        return NULL;
    const size_t size = sizeof(struct dovetail_page);
    int trouble;
    while ((trouble = posix_fallocate(fd, 0, (off_t)size)) == EINTR)
        ; /* the program may have a timer */
    if (trouble == 0)
        memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (memory == MAP_FAILED) {
        unlink(path);
        return NULL;
    }
    return memory;
}

static void forked(void)
{
    life = OVER;
    rank_page = NULL;
    rank_outermost = NULL;
    rank_waits = false;
    wait_child();
}

void rank_before_init(void)
{
    if (life == IN_MPI)
        return;
    ticks_init();
    before_init = ticks_clock(CLOCK_MONOTONIC);
    before_init_tick = ticks_now();
}

static double first_rate(uint64_t now, uint64_t tick)
{
    if (!ticks_counter || tick <= before_init_tick || now - before_init < RATE_NS)
        return 1.0;
    return (double)(now - before_init) / (double)(tick - before_init_tick);
}

/* The page of this process, which nobody takes for one before `publish`; NULL if there is none. */
static struct dovetail_page *make_page(int rank, int size, const char *const *names,
                                       unsigned ncalls)
{
    const char *dir = secure_getenv("DOVETAIL_DIR");
    struct dovetail_page *page = dir && dir[0] == '/' ? map_page(dir, rank) : NULL;
    if (page == NULL)
        return NULL;
    page->version = DOVETAIL_PAGE_VERSION;
    page->size = sizeof(*page);
    page->ncalls = ncalls;
    page->mpi = THIS_MPI;
    page->rank = (uint32_t)rank;
    page->world_size = (uint32_t)size;
    page->pid = (uint32_t)getpid();
    page->state = DOVETAIL_RUNNING;
    page->start_ticks = start_ticks();
    gethostname(page->host, sizeof(page->host) - 1);
    for (unsigned i = 0; i < ncalls; i++)
        strncpy(page->names[i], names[i], DOVETAIL_NAME_MAX); /* one is as long as that */
    getrusage(RUSAGE_SELF, &usage_at_init);
    queued_then = queued();
    page->queued = queued_then == UINT64_MAX ? UINT64_MAX : 0;
    page->init_cpu = ticks_clock(CLOCK_PROCESS_CPUTIME_ID);
    page->init = ticks_clock(CLOCK_MONOTONIC);
    page->init_tick = page->last_tick = ticks_now();
    page->latest[0].ns_per_tick = first_rate(page->init, page->init_tick);
    rank_main = has_main = true;
    pthread_atfork(NULL, NULL, forked);
    return page;
}

/* Has the program ended that a page is of, and was it of the same world? What is in another pid
 * namespace cannot be asked for. */
static bool has_ended(int dir, const char *name, uint32_t world)
{
    struct {
        uint32_t world, thread_level, pid, state;
    } of = {0};
    const off_t at = offsetof(struct dovetail_page, world);
    int fd = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return false;
    bool known = pread(fd, &of, sizeof(of), at) == sizeof(of) && of.world == world;
    close(fd);
    return known && (of.state == DOVETAIL_FINALIZED || of.state == DOVETAIL_ABORTED) &&
           kill((pid_t)of.pid, 0) != 0 && errno == ESRCH;
}

/* A script may start one program after another in a directory, thousands of them. Where this rank
 * begins, nobody looks at the pages any more that it had in those that have ended. */
static void remove_ended(const struct dovetail_page *page)
{
    char prefix[32];
    struct dirent *entry;
    DIR *dir = opendir(secure_getenv("DOVETAIL_DIR"));
    int length = snprintf(prefix, sizeof(prefix), "rank.%u.", page->rank);
    while (dir && (entry = readdir(dir)))
        if (strncmp(entry->d_name, prefix, (size_t)length) == 0 &&
            has_ended(dirfd(dir), entry->d_name, page->world))
            unlinkat(dirfd(dir), entry->d_name, 0);
    if (dir)
        closedir(dir);
}

static void publish(struct dovetail_page *page)
{
    rank_page = page;
    rank_refresh(page->init_tick);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    memcpy(page->magic, DOVETAIL_PAGE_MAGIC, sizeof(page->magic));
    remove_ended(page);
}

/* This rank and all, of MPI_COMM_WORLD or of what a session has in its place; 0, or -1. */
static int find_place(const void *session, int *rank, int *size)
{
    if (session == NULL) {
        NEXT(PMPI_Comm_rank)(world(), rank);
        NEXT(PMPI_Comm_size)(world(), size);
        return 0;
    }
#if MPI_VERSION >= 4
    MPI_Group all;
    MPI_Session opened = *(const MPI_Session *)session;
    if (opened == MPI_SESSION_NULL ||
        NEXT(PMPI_Group_from_session_pset)(opened, "mpi://WORLD", &all) != MPI_SUCCESS)
        return -1;
    NEXT(PMPI_Group_rank)(all, rank);
    NEXT(PMPI_Group_size)(all, size);
    NEXT(PMPI_Group_free)(&all);
    return 0;
#else
    return -1;
#endif
}

static void take_thread_level(struct dovetail_page *page)
{
    int level;
    NEXT(PMPI_Query_thread)(&level); /* MPICH answers in a session too */
    page->thread_level = (uint32_t)(level - MPI_THREAD_SINGLE);
    rank_parallel = level == MPI_THREAD_MULTIPLE;
}

/* The program had ended its sessions, as one that asked MPI something first, and begins anew. */
static void go_on(unsigned index)
{
    if (!has_main)
        rank_main = has_main = true;
    uint64_t now = ticks_now(), took = now - before_init_tick;
    rank_add(&left->calls[index], took);
    if (rank_main) {
        left->mpi_ticks += took;
        left->last_tick = now;
    }
    take_thread_level(left);
    left->state = DOVETAIL_RUNNING;
    rank_refresh_at = now;
    rank_waits = wait_again(WAITS_LOCKED);
    life = IN_MPI;
    rank_page = left;
}

static void begin(const char *const *names, unsigned ncalls, unsigned index, const void *session)
{
    int rank, size;
    char path[4096];
    const char *dir = secure_getenv("DOVETAIL_DIR");
    if (life == IN_MPI || life == OVER || dir == NULL)
        return;
    if (life == ENDED) {
        go_on(index);
        return;
    }
    if (!is_this_mpi()) {
        rank_end();
        life = OVER;
        rank_page = NULL;
        return;
    }
    if (find_place(session, &rank, &size) != 0)
        return;
    if (life == SERIAL && name_page(path, sizeof(path), dir, 0) == 0)
        unlink(path); /* a process has one page, and this one knows its rank */
    rank_page = NULL;
    struct dovetail_page *page = make_page(rank, size, names, ncalls);
    life = page ? IN_MPI : OVER;
    if (page) {
        page->world = world_number();
        take_thread_level(page);
        rank_add(&page->calls[index], page->init_tick - before_init_tick);
        rank_waits = wait_init(dir, rank, size, page->world != 0, WAITS_LOCKED) == 0;
        publish(page);
    }
}

void rank_begin(const char *const *names, unsigned ncalls, unsigned index, const void *session)
{
    int saved = errno;
    pthread_mutex_lock(&beginning);
    begin(names, ncalls, index, session);
    if (life == IN_MPI)
        __atomic_add_fetch(&begun, 1, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&beginning);
    errno = saved;
}

bool rank_serial(void)
{
    int saved = errno;
    if (life != NO_PAGE)
        return false;
    rank_before_init();
    struct dovetail_page *page = make_page(0, 1, NULL, 0);
    life = page ? SERIAL : OVER;
    if (page)
        publish(page);
    errno = saved;
    return page != NULL;
}

static int64_t at_least(int64_t value, int64_t least)
{
    return value > least ? value : least;
}

/* What the process has done until now, on the main thread. */
static void mark(struct dovetail_mark *mark, uint64_t iterations, double ns_per_tick)
{
    struct dovetail_page *page = rank_page;
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    mark->cpu = ticks_clock(CLOCK_PROCESS_CPUTIME_ID) - page->init_cpu;
    mark->stamp = ticks_clock(CLOCK_MONOTONIC);
    mark->tick = ticks_now();
    if (ticks_counter && mark->stamp - page->init > RATE_NS)
        ns_per_tick = (double)(mark->stamp - page->init) / (double)(mark->tick - page->init_tick);
    /* Counters of two cores may be apart, and a rank have gone from one to the other. */
    int64_t all = at_least((int64_t)(mark->tick - page->init_tick), 0);
    int64_t current = page->enter_tick ? (int64_t)(mark->tick - page->enter_tick) : 0;
    int64_t inside = at_least((int64_t)page->mpi_ticks + current, 0);
    mark->mpi = (uint64_t)((double)inside * ns_per_tick);
    mark->useful = (uint64_t)((double)at_least(all - inside, 0) * ns_per_tick);
    mark->peak_rss = (uint64_t)usage.ru_maxrss * 1024u;
    page->voluntary = (uint64_t)(usage.ru_nvcsw - usage_at_init.ru_nvcsw);
    page->involuntary = (uint64_t)(usage.ru_nivcsw - usage_at_init.ru_nivcsw);
    mark->iterations = iterations;
    mark->ns_per_tick = ns_per_tick;
}

/* Threads that have ended take what they waited with them: what was known of it stays, and what the
 * others waited meanwhile is lost. */
static void ask_queued(uint64_t now)
{
    struct dovetail_page *page = rank_page;
    if (page->queued == UINT64_MAX || now - queued_asked < QUEUED_NS)
        return;
    queued_asked = now;
    uint64_t all = queued();
    if (all == UINT64_MAX)
        return;
    if (all > queued_then)
        page->queued += all - queued_then;
    queued_then = all;
}

/* A rhythm that the program has left counts no longer. What counts as silence is the refreshes
 * that came without a beat: neither a rank that is suspended nor one that computes makes any. */
static void await_beat(void)
{
    if (rank_page->source >= DOVETAIL_SOURCE_RHYTHM && ++silence > SILENCE && silence / 8 > longest)
        rank_no_rhythm();
}

void rank_no_rhythm(void)
{
    struct dovetail_page *page = rank_page;
    struct dovetail_mark *next = &page->iteration[(page->iteration_seq + 1) % 2];
    *next = page->iteration[page->iteration_seq % 2];
    next->iterations = 0;
    page->source = DOVETAIL_SOURCE_NONE;
    __atomic_store_n(&page->iteration_seq, page->iteration_seq + 1, __ATOMIC_RELEASE);
}

void rank_refresh(uint64_t now)
{
    struct dovetail_page *page = rank_page;
    await_beat();
    const struct dovetail_mark *old = &page->latest[page->latest_seq % 2];
    uint64_t iterations = page->iteration[page->iteration_seq % 2].iterations;
    struct dovetail_mark *next = &page->latest[(page->latest_seq + 1) % 2];
    mark(next, iterations, old->ns_per_tick);
    ask_queued(next->stamp);
    rank_refresh_at = now + (uint64_t)(REFRESH_NS / old->ns_per_tick);
    __atomic_store_n(&page->latest_seq, page->latest_seq + 1, __ATOMIC_RELEASE);
}

void rank_iteration(uint32_t source, uint64_t complete)
{
    struct dovetail_page *page = rank_page;
    if (page == NULL || !rank_main)
        return;
    if (page->source != DOVETAIL_SOURCE_NONE && page->source < source)
        return;
    longest = silence > longest ? silence : longest;
    silence = 0;
    struct dovetail_mark *next = &page->iteration[(page->iteration_seq + 1) % 2];
    mark(next, complete, page->latest[page->latest_seq % 2].ns_per_tick);
    if (page->source != source)
        page->first = *next;
    page->source = source;
    __atomic_store_n(&page->iteration_seq, page->iteration_seq + 1, __ATOMIC_RELEASE);
    if (life == SERIAL) { /* no call of MPI will do it */
        page->last_tick = next->tick;
        rank_refresh(next->tick);
    }
}

/* One call alone switches a profiler on, as the standard has it, and says nothing of iterations. */
void rank_pcontrol(int level)
{
    static uint64_t marked;
    if (level == 1 && rank_main && ++marked > 1)
        rank_iteration(DOVETAIL_SOURCE_PCONTROL, marked);
}

bool rank_last(void)
{
    return __atomic_load_n(&begun, __ATOMIC_RELAXED) <= 1;
}

void rank_end(void)
{
    struct dovetail_page *page = rank_page;
    if (page == NULL)
        return;
    queued_asked = 0;
    rank_refresh(ticks_now()); /* another thread may end a session, when no other is in MPI */
    rank_waits = false;
    wait_finalize();
    rank_refresh_at = UINT64_MAX; /* MPI_Finalize itself is no part of the profile */
    page->state = DOVETAIL_FINALIZED;
}

void rank_finalized(void)
{
    if (begun > 0 && __atomic_sub_fetch(&begun, 1, __ATOMIC_RELAXED) > 0)
        return;
    if (rank_main)
        rank_main = has_main = false;
    life = rank_page && life == IN_MPI ? ENDED : OVER;
    left = rank_page; /* the mapping stays: another thread may still hold the pointer */
    rank_page = NULL;
}

void rank_abort(void)
{
    if (rank_page == NULL)
        return;
    queued_asked = 0;
    if (rank_main)
        rank_refresh(ticks_now());
    rank_page->state = DOVETAIL_ABORTED;
}
