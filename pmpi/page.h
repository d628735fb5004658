/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * What the preloaded library and its readers share, in memory.
 *
 * Two kinds of file in the directory that DOVETAIL_DIR names, both fixed in size, both
 * little or big endian as the machine is, both described field by field in dovetail-page(5):
 *
 *   rank.<world rank>.<pid>   struct dovetail_page, written by one MPI process, read by anyone
 *   control                   struct dovetail_control, written by the launcher, read by ranks
 *
 * Invariants: a page has one writer. Every field of 4 or 8 bytes is aligned, so a reader sees
 * its old or its new value and never half of each. Values that belong together are in a
 * `dovetail_mark`, of which there are two: the writer fills the one that is not current and
 * then counts the sequence number up, so a page is whole after a kill -9 at any instruction.
 */
#ifndef DOVETAIL_PAGE_H
#define DOVETAIL_PAGE_H

#include <stdint.h>

#define DOVETAIL_PAGE_MAGIC "DVTPAGE" /* 8 bytes with its zero */
#define DOVETAIL_PAGE_VERSION 3
#define DOVETAIL_CALLS_MAX 256
#define DOVETAIL_NAME_MAX 32

enum { DOVETAIL_OPENMPI = 1, DOVETAIL_MPICH = 2 };

enum { DOVETAIL_RUNNING = 1, DOVETAIL_FINALIZED = 2, DOVETAIL_ABORTED = 3 };

/* What marks the end of an iteration; of two the lower number counts. A rhythm adds to its number
 * that of the call which it was taken from, by the order of first calls: ranks that do not agree on
 * that do not count the same. A rank that found a rhythm alone says OWN, and is to be believed only
 * where all ranks do and count alike. */
enum {
    DOVETAIL_SOURCE_NONE = 0,
    DOVETAIL_SOURCE_OPENFOAM = 1,
    DOVETAIL_SOURCE_PCONTROL = 2,
    DOVETAIL_SOURCE_LAMMPS = 3,
    DOVETAIL_SOURCE_RHYTHM = 4,
    DOVETAIL_RHYTHMS_MAX = 32,
    DOVETAIL_SOURCE_OWN = DOVETAIL_SOURCE_RHYTHM + DOVETAIL_RHYTHMS_MAX,
};

/* The process at one moment. Times are nanoseconds; all but `stamp` count from init. */
struct dovetail_mark {
    uint64_t iterations; /* complete at this moment */
    uint64_t stamp;      /* CLOCK_MONOTONIC */
    uint64_t tick;       /* the tick counter at the same moment */
    uint64_t cpu;        /* CPU time of the process, all threads */
    uint64_t useful;     /* wall time of the main thread outside MPI */
    uint64_t mpi;        /* wall time of the main thread inside MPI */
    uint64_t peak_rss;   /* bytes, since the process began */
    double ns_per_tick;  /* best estimate so far */
};

/* One MPI function: how often it was called and the ticks spent in it, over all threads. */
struct dovetail_calls {
    uint64_t count;
    uint64_t ticks;
};

struct dovetail_page {
    char magic[8];
    uint32_t version;
    uint32_t size;         /* of this struct, and of the file */
    uint32_t ncalls;       /* entries of `calls` and `names` in use */
    uint32_t mpi;          /* DOVETAIL_OPENMPI or DOVETAIL_MPICH */
    uint32_t rank;         /* in its MPI_COMM_WORLD */
    uint32_t world_size;   /* of its MPI_COMM_WORLD */
    uint32_t world;        /* 0 for the first one of a job, another for each spawned one */
    uint32_t thread_level; /* 0 single, 1 funneled, 2 serialized, 3 multiple */
    uint32_t pid;
    uint32_t state;       /* DOVETAIL_RUNNING ... */
    uint32_t source;      /* DOVETAIL_SOURCE_... */
    uint32_t current;     /* 1 + index of the call that the main thread is in, 0 outside MPI */
    uint64_t start_ticks; /* the process's start, as field 22 of /proc/PID/stat */
    uint64_t init;        /* CLOCK_MONOTONIC when MPI_Init returned, nanoseconds */
    uint64_t init_tick;   /* the tick counter at the same moment */
    char host[64];        /* name of the machine, ends in a zero */

    uint64_t enter_tick; /* when the main thread entered its current call */
    uint64_t last_tick;  /* when it last left one */
    uint64_t mpi_ticks;  /* what it has spent inside, without the current call */
    uint64_t init_cpu;   /* CPU time of the process when MPI_Init returned, nanoseconds */

    uint64_t iteration_seq; /* iteration[iteration_seq % 2] is the last iteration boundary */
    uint64_t latest_seq; /* latest[latest_seq % 2] was taken at most some 10 ms before last_tick */

    /* Since init, of all threads, each for itself: how often the process gave up its core to wait
     * for something, how often others took it, and for how long it waited for one. */
    uint64_t voluntary;
    uint64_t involuntary;
    uint64_t queued; /* nanoseconds, at most some 1 s old; UINT64_MAX where the kernel says none */

    struct dovetail_mark first; /* the first iteration boundary; stamp is 0 until there is one */
    struct dovetail_mark iteration[2];
    struct dovetail_mark latest[2];

    struct dovetail_calls calls[DOVETAIL_CALLS_MAX];
    char names[DOVETAIL_CALLS_MAX][DOVETAIL_NAME_MAX]; /* end in a zero if they are shorter */
};

#define DOVETAIL_CONTROL_MAGIC "DVTCTRL"
#define DOVETAIL_CONTROL_VERSION 1

/* How a rank waits: as shipped, giving way, or giving way and then asleep on the doorbell. */
enum { DOVETAIL_WAIT_OFF = 0, DOVETAIL_WAIT_YIELD = 1, DOVETAIL_WAIT_DOORBELL = 2 };

/* The launcher may store to any field below `seq` at any time; ranks look when they like. */
struct dovetail_control {
    char magic[8];
    uint32_t version;
    uint32_t size;
    volatile uint32_t seq;            /* counts the changes */
    volatile uint32_t mode;           /* DOVETAIL_WAIT_... */
    volatile uint32_t yields;         /* how often to give way before sleeping */
    volatile uint32_t timeout_us_min; /* first sleep on the doorbell, at most; 0: the default */
    volatile uint32_t timeout_us_max; /* it doubles up to this; 0: the default */
    uint32_t spare[7];
};

#endif
