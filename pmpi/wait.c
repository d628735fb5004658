/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * The wait policy of a rank: gives the CPU back while MPI waits.
 *
 * In: turns of the MPI library's progress loop that found nothing to do (wait_hooks.c), and the
 * control page, read at each of them. Out: CPU time for others, and the file `bells`.
 *
 * The doorbell. A rank that waits gives way some times, since most waits are short. Then it
 * announces itself: its bit among the sleepers. The library looks once more for a message after
 * that, and only then the rank sleeps on its bell (a futex). Each MPI call that may have sent
 * something looks at the sleepers when it ends, and when it begins to wait after something moved;
 * it clears the bit of each, changes its bell and wakes it. (Not when nothing moved: two ranks
 * that wait for a third would wake each other for ever.) Either the sleeper's last look came after
 * the message, or the sender's look at the bits came after the announcement, or both.
 *
 * A call that does not wait (MPI_Test, MPI_Put) neither gives way nor sleeps: what it returns is
 * wanted now. Each wait is measured anew from the last turn that moved something.
 *
 * Invariants: no sleep without a timeout, so a bell that is missed (a peer on another node, a
 * peer killed, a send that no wrapper sees) costs time and never hangs. The file may hold
 * anything when it is opened: a wrong bit costs one needless wake. The order of fields in
 * `struct bells` is private to the library, as all who map one file come from one job.
 */
#include "wait.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "attributes.h"
#include "next.h"
#include "page.h"

#define TIMEOUT_US_MIN 1000u  /* defaults of the control page's fields: bells are seldom missed, */
#define TIMEOUT_US_MAX 10000u /* and sleeps of 100 to 500 us cost more CPU than they saved */
#define SPIN_NS 70000u /* no sleep before this: a wake costs both sides together about as much */
#define TIMEOUT_US_LIMIT 50000u /* so that a change of mode is seen soon, whatever is asked for */

#define SOURCES 256 /* the most that a rank looks at for messages in one turn and sleeps on */

struct slot {
    uint32_t bell;
    uint32_t polls; /* the sleeper waits for messages, and hears its bell on a socket */
    char rest[56];  /* a cache line each */
};

struct bells {
    uint32_t ranks; /* of the world whose file this is */
    char rest[60];
    struct slot slots[]; /* by world rank; then the sleepers, one bit per rank */
};

/* What this thread does in the call that it is in. */
struct waiting {
    uint32_t inside; /* 1 + kind, 0 outside */
    uint32_t idle;   /* times that the library found nothing to do */
    uint64_t since;  /* when it did so first, nanoseconds */
    uint32_t timeout_us;
    uint32_t seen; /* the bell when it was announced */
    bool announced;
    bool waits;   /* the call is known to go on until a peer did something */
    bool idled;   /* the turn of the progress loop that it is in found nothing to do */
    bool moved;   /* a turn since the last look at the sleepers may have sent something */
    bool stirred; /* a turn in this call moved something */
    bool slack;   /* timer slack is set for this thread */
    nfds_t sources;
    struct pollfd source[1 + SOURCES]; /* from the second on, where the last turn looked */
};

static const struct dovetail_control *control; /* NULL: wait as ever */
static const struct dovetail_control *mapped;  /* the same, after wait_finalize too */
static struct bells *bells;                    /* NULL: no doorbell, give way instead */
static uint64_t *sleepers;
static bool shipped_yields; /* Open MPI gives way by itself: more ranks than slots on the node */
static bool locked;         /* MPI waits with a lock that other threads need */
static int slots;           /* in the mapping; the file may say otherwise later */
static int words;           /* of sleepers */
static int own = -1; /* this rank's slot; -1 for a rank that only rings: it was spawned and has
                         none, or MPI would hold a lock while it slept */
static PER_THREAD struct waiting me;
static PER_THREAD bool ending; /* in MPI_Finalize, or after it */

static const char *directory; /* of the files, for as long as there are ranks on other nodes */
static int messenger = -1;    /* a socket: bells of ranks that wait for messages; -1: none does */
static bool hears;            /* it has a name, by which others ring this rank */

/* --- Files --- */

static int open_in(const char *dir, const char *name, int flags)
{
    char path[4096];
    int length = snprintf(path, sizeof(path), "%s/%s", dir, name);
    if (length < 0 || (size_t)length >= sizeof(path)) {
        errno = ENAMETOOLONG;
        return -1;
    }
    return open(path, flags | O_NOFOLLOW | O_CLOEXEC, 0600);
}

/* Maps `size` bytes of a file that has them, else NULL with errno. Closes it. */
static void *map_file(int fd, size_t size, int protection)
{
    struct stat status;
    void *memory = MAP_FAILED;
    if (fstat(fd, &status) == 0) {
        if (S_ISREG(status.st_mode) && status.st_size >= (off_t)size)
            memory = mmap(NULL, size, protection, MAP_SHARED, fd, 0);
        else
            errno = EINVAL;
    }
    int saved = errno;
    close(fd);
    errno = saved;
    return memory == MAP_FAILED ? NULL : memory;
}

static const struct dovetail_control *map_control(const char *dir)
{
    int fd = open_in(dir, "control", O_RDONLY);
    const struct dovetail_control *page = fd < 0 ? NULL : map_file(fd, sizeof(*page), PROT_READ);
    if (page == NULL)
        return NULL;
    if (memcmp(page->magic, DOVETAIL_CONTROL_MAGIC, sizeof(page->magic)) == 0 &&
        page->version == DOVETAIL_CONTROL_VERSION && page->size >= sizeof(*page))
        return page;
    munmap((void *)page, sizeof(*page));
    errno = EINVAL;
    return NULL;
}

static size_t bells_size(uint32_t ranks)
{
    return sizeof(struct bells) + ranks * sizeof(struct slot) + (ranks + 63u) / 64u * 8u;
}

/* The file of the first world. A spawned rank takes it as it is: it numbers its ranks from 0
 * again and must not use the slots of others, but the ranks that wait for it are in there. */
static struct bells *map_bells(const char *dir, uint32_t *count, bool spawned)
{
    uint32_t ranks = *count;
    int trouble = 0;
    int fd = open_in(dir, "bells", spawned ? O_RDWR : O_RDWR | O_CREAT);
    if (fd < 0)
        return NULL;
    if (spawned) {
        if (pread(fd, &ranks, sizeof(ranks), 0) != sizeof(ranks) || ranks > INT_MAX / 128) {
            close(fd);
            return NULL;
        }
    } else {
        while ((trouble = posix_fallocate(fd, 0, (off_t)bells_size(ranks))) == EINTR)
            ; /* the program may have a timer */
    }
    if (trouble != 0) {
        close(fd); /* a full file system must not become a SIGBUS later */
        return NULL;
    }
    struct bells *file = map_file(fd, bells_size(ranks), PROT_READ | PROT_WRITE);
    if (file && !spawned)
        __atomic_store_n(&file->ranks, ranks, __ATOMIC_RELAXED); /* all write the same */
    *count = ranks; /* from here on what the file says is not believed: it may change */
    return file;
}

/* --- The doorbell --- */

static socklen_t bell_name(struct sockaddr_un *name, int rank)
{
    *name = (struct sockaddr_un){.sun_family = AF_UNIX};
    int length = snprintf(name->sun_path, sizeof(name->sun_path), "%s/bell.%d", directory, rank);
    return length > 0 && (size_t)length < sizeof(name->sun_path) ? sizeof(*name) : 0;
}

static void ring_one(int rank)
{
    struct slot *slot = &bells->slots[rank];
    struct sockaddr_un name;
    __atomic_fetch_add(&slot->bell, 1, __ATOMIC_RELEASE);
    if (messenger >= 0 && __atomic_load_n(&slot->polls, __ATOMIC_RELAXED))
        sendto(messenger, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL, (struct sockaddr *)&name,
               bell_name(&name, rank));
    else
        syscall(SYS_futex, &slot->bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Wakes all who sleep. The own rank is among them: another of its threads may sleep. */
static void ring(void)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* what was sent comes before the look at the bits */
    for (int word = 0; word < words; word++) {
        uint64_t left = __atomic_load_n(&sleepers[word], __ATOMIC_RELAXED);
        while (left != 0) {
            int bit = __builtin_ctzll(left);
            uint64_t mask = UINT64_C(1) << bit;
            left &= ~mask;
            if (word * 64 + bit < slots &&
                __atomic_fetch_and(&sleepers[word], ~mask, __ATOMIC_SEQ_CST) & mask)
                ring_one(word * 64 + bit);
        }
    }
}

static void announce(void)
{
    struct slot *slot = &bells->slots[own];
    me.seen = __atomic_load_n(&slot->bell, __ATOMIC_ACQUIRE);
    __atomic_store_n(&slot->polls, hears && me.sources > 0, __ATOMIC_RELAXED);
    __atomic_fetch_or(&sleepers[own / 64], UINT64_C(1) << own % 64, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* ARM lets a look overtake what announces it */
    me.announced = true;
}

/* With several threads this may take back the bit of another one, which then sleeps until its
 * timeout. */
static void take_back(void)
{
    uint64_t mask = UINT64_C(1) << own % 64;
    if (__atomic_load_n(&sleepers[own / 64], __ATOMIC_RELAXED) & mask)
        __atomic_fetch_and(&sleepers[own / 64], ~mask, __ATOMIC_RELAXED);
    me.announced = false;
}

static uint32_t or_default(uint32_t asked, uint32_t value)
{
    value = asked ? asked : value;
    return value < TIMEOUT_US_LIMIT ? value : TIMEOUT_US_LIMIT;
}

/* Sleeps until there is a message, or a peer on this node rings; false after the timeout. */
static bool listen_for(const struct timespec *timeout)
{
    char rung[64];
    me.source[0] = (struct pollfd){messenger, POLLIN, 0};
    struct timespec left = *timeout; /* the kernel changes it */
    if (syscall(SYS_ppoll, me.source, 1 + me.sources, &left, NULL, 0) <= 0)
        return false;
    if (me.source[0].revents & POLLNVAL) { /* the program has closed it */
        messenger = -1;
        hears = false;
    }
    while (me.source[0].revents && recv(messenger, rung, sizeof(rung), MSG_DONTWAIT) > 0)
        ; /* several may have rung */
    return true;
}

static void doze(const struct dovetail_control *policy)
{
    if (!me.slack) {
        me.slack = true;
        prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0); /* else the kernel adds 50 us to each timeout */
    }
    uint32_t longest = or_default(policy->timeout_us_max, TIMEOUT_US_MAX);
    uint32_t next = me.timeout_us * 2;
    me.timeout_us = next ? next : or_default(policy->timeout_us_min, TIMEOUT_US_MIN);
    if (me.timeout_us > longest)
        me.timeout_us = longest;
    struct timespec timeout = {0, (long)me.timeout_us * 1000};
    struct slot *slot = &bells->slots[own];
    bool woken;
    if (__atomic_load_n(&slot->polls, __ATOMIC_RELAXED))
        woken = listen_for(&timeout);
    else
        woken = syscall(SYS_futex, &slot->bell, FUTEX_WAIT, me.seen, &timeout, NULL, 0) == 0;
    if (woken)
        me.timeout_us = 0; /* the bell works, start again with a short one */
    take_back();
}

static void give_way(void)
{
    syscall(SYS_sched_yield);
}

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Whether the wait has earned a sleep: by turns, which are long where others need the CPU, and by
 * time, as turns are short where nobody does. */
static bool long_enough(uint32_t yields)
{
    if (me.idle++ == 0)
        me.since = now_ns();
    return me.idle > yields && now_ns() - me.since >= SPIN_NS;
}

/* Whoever gives way at once with a lock lets all others who need it wait for a time slice, and a
 * call that only starts something mostly finds room for it at once. */
static bool gives_way(void)
{
    return me.waits && !locked;
}

void wait_idle(void)
{
    const struct dovetail_control *policy = control;
    uint32_t mode = policy ? policy->mode : DOVETAIL_WAIT_OFF;
    int saved = errno;
    me.idled = true;
    if (mode == DOVETAIL_WAIT_DOORBELL && bells) {
        if (me.moved) {
            me.moved = false;
            ring();
        }
        bool long_wait = !me.announced && long_enough(policy->yields);
        if (me.announced)
            doze(policy);
        else if (long_wait && own >= 0)
            announce();
        else if (shipped_yields || gives_way() || long_wait)
            give_way();
    } else if (mode == DOVETAIL_WAIT_DOORBELL || mode == DOVETAIL_WAIT_YIELD) {
        if (shipped_yields || gives_way() || long_enough(policy->yields))
            give_way();
    } else if (shipped_yields) {
        give_way();
    }
    errno = saved;
}

bool wait_inside(void)
{
    return me.inside && control;
}

/* What came before says nothing of how long the next wait in this call will be. */
static void begin_wait(void)
{
    me.idle = 0;
    me.timeout_us = 0;
    me.announced = false;
    me.moved = true; /* it may have sent something */
}

void wait_turn(void)
{
    me.idled = false;
    me.sources = 0;
}

void wait_looked(const struct pollfd *at, nfds_t count)
{
    if (!hears || me.sources + count > SOURCES)
        return;
    memcpy(&me.source[1 + me.sources], at, count * sizeof(*at));
    me.sources += count;
}

void wait_turned(void)
{
    if (me.idled || !me.inside)
        return;
    if (me.announced)
        take_back();
    begin_wait();
    me.stirred = true;
}

/* --- From the wrappers --- */

/* Are ranks of the world on other nodes? */
static bool spread_out(int world_size)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"};
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        const char *here = getenv(names[i]);
        if (here)
            return atoi(here) < world_size;
    }
    const char *nodes = getenv("FLUX_JOB_NNODES");
    return nodes && atoi(nodes) > 1;
}

static int open_socket(void)
{
    return socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

/* Does a name stand for a socket that nobody has any more, as a program leaves it that ends? */
static bool is_left_over(const struct sockaddr_un *name, socklen_t size)
{
    int fd = open_socket();
    bool left =
        fd >= 0 && connect(fd, (const struct sockaddr *)name, size) != 0 && errno == ECONNREFUSED;
    if (fd >= 0)
        close(fd);
    return left;
}

static bool name_socket(int fd, const struct sockaddr_un *name, socklen_t size)
{
    if (bind(fd, (const struct sockaddr *)name, size) == 0)
        return true;
    return errno == EADDRINUSE && is_left_over(name, size) && unlink(name->sun_path) == 0 &&
           bind(fd, (const struct sockaddr *)name, size) == 0;
}

/* A rank that is reached by messages only sleeps on where they come from, and on this. One that
 * finds its name taken, by another world of the same simulation, rings all the same. */
static void open_messenger(const char *dir)
{
    struct sockaddr_un name;
    directory = strdup(dir);
    socklen_t size = directory ? bell_name(&name, own) : 0;
    messenger = size ? open_socket() : -1;
    hears = messenger >= 0 && own >= 0 && fchmod(messenger, 0600) == 0 &&
            name_socket(messenger, &name, size);
}

int wait_init(const char *dir, int world_rank, int world_size, bool spawned, bool holds_lock)
{
    const struct dovetail_control *page = map_control(dir);
    if (page == NULL || world_rank < 0 || world_rank >= world_size)
        return -1;
    int saved = errno;
    uint32_t ranks = (uint32_t)world_size;
    struct bells *file = map_bells(dir, &ranks, spawned);
    if (file) {
        sleepers = (uint64_t *)&file->slots[ranks];
        words = (int)((ranks + 63u) / 64u);
        slots = (int)ranks;
        own = spawned || holds_lock ? -1 : world_rank;
        bells = file;
        if (spread_out(world_size))
            open_messenger(dir);
    }
    /* Open MPI's starter says it in the environment, since version 5 the library has asked it. */
    const char *oversubscribed = getenv("OMPI_MCA_mpi_oversubscribe");
    const bool *asked = known_function(NULL, "ompi_mpi_oversubscribed");
    locked = holds_lock;
    shipped_yields = (oversubscribed && strcmp(oversubscribed, "1") == 0) || (asked && *asked);
    control = mapped = page;
    errno = saved;
    return 0;
}

bool wait_again(bool holds_lock)
{
    if (holds_lock)
        own = -1;
    locked = holds_lock;
    ending = false;
    control = mapped;
    return mapped != NULL;
}

void wait_enter(int kind)
{
    me.inside = (uint32_t)kind + 1;
    me.waits = kind != WAIT_NONE && kind != WAIT_START;
    me.stirred = false;
    begin_wait(); /* an announcement is left over if the mode changed in the last call */
}

void wait_leave(void)
{
    const struct dovetail_control *policy = control;
    uint32_t kind = me.inside - 1;
    me.inside = 0;
    if (policy == NULL || bells == NULL || policy->mode != DOVETAIL_WAIT_DOORBELL)
        return;
    if (me.announced)
        take_back();
    if (kind != WAIT_NONE || me.stirred) {
        int saved = errno;
        ring();
        errno = saved;
    }
}

void wait_finalize(void)
{
    ending = true;
    control = NULL; /* the mappings stay: another thread may be using them */
}

bool wait_ending(void)
{
    return ending;
}

void wait_child(void)
{
    ending = false;
    control = NULL;
    bells = NULL;
    messenger = -1;
    hears = false;
    memset(&me, 0, sizeof(me));
}
