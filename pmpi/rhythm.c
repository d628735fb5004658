/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * Finds the beat of a program: a collective call of all ranks that its loop always makes.
 *
 * In: the collective calls on communicators as large as MPI_COMM_WORLD. Out: a boundary (rank.h)
 * at each call of the one that was chosen, numbered by how often it was made since MPI_Init.
 *
 * MPI has all ranks make these calls in the same order, so all that is decided here is decided
 * alike on every rank without a word between them, and so is every number of a boundary. The clock
 * only says at which of certain calls a choice is ripe; should two ranks see that differently, and
 * choose differently too, their pages tell (page.h). Calls between two ranks, and those of a part
 * of the ranks, have no such order: they are not looked at here. Where a program makes no others,
 * each rank looks for a beat of its own (own_beat.h), over which a rhythm that is found here goes.
 *
 * A token is a call, as large as it is, at its place in the program. One that is made for the first
 * time begins a new epoch, as a program does that has left its setup: what was seen before is
 * forgotten. In a nest of loops the inner one's token may come any number of times between two of
 * the outer one's, as in a solver that iterates until it has converged; then it tells nothing about
 * progress. So the beat is the most frequent token that comes equally often between any two of each
 * rarer one; where all do (every step, every tenth, every hundredth), they tell the same.
 * While a rarer one has not come often enough to judge by, nothing is chosen. A token that comes
 * several times in a row, as of a function that sums up one value, called for each of five, is
 * taken as a group that comes once, if its groups are equally large.
 *
 * A beat that was chosen is kept, since who compares rates needs one unit. If the program leaves it
 * (rank.c sees that), it is listened to anew. If a rarer token refuses it later, there is no rhythm
 * from then on: one of both depends on something else than progress, and nothing tells which.
 */
#include "rhythm.h"

#include <stdbool.h>
#include <stdint.h>

#include "openfoam.h"
#include "page.h"
#include "rank.h"
#include "ticks.h"

#define TOKENS DOVETAIL_RHYTHMS_MAX /* a program with more has no rhythm here */
#define ENOUGH 5                    /* times that a token comes before it is judged, or judged by */
#define RIPE_NS 1e9                 /* an epoch lasts this long before anything is chosen */
#define QUIET_NS 1e10 /* a token that came less often is left out after so long a silence */
#define SPACE_NS 1e6  /* between two boundaries that are published: one costs about 1 us */
#define INTERVALS 8   /* of a beat, which may not differ wildly in time if it refuses others */

static enum { LISTENING, BEATING, DEAF } state;

struct token {
    const void *site;
    uint32_t index;
    uint32_t size;               /* 1 + the binary logarithm of the count */
    uint64_t total;              /* times that it came since MPI_Init */
    uint32_t epoch;              /* and in this epoch */
    uint32_t groups;             /* of those, times that it came after another one */
    uint64_t last;               /* tick at which it came last */
    uint64_t between[INTERVALS]; /* ticks between its last times, round and round */
};

/* How often one token comes between two groups of another, rarer one; of a token with itself, how
 * large its groups are. */
struct ratio {
    uint64_t before; /* its total at the rarer one's last group */
    uint32_t usual;
    uint32_t hits, misses; /* times that it was as usual, and not */
};

static struct token tokens[TOKENS];
static struct ratio ratios[TOKENS][TOKENS]; /* by the rarer one, then by the other */
static unsigned count;
static unsigned beat;           /* the token that was chosen */
static unsigned previous;       /* the token that came last */
static uint32_t heard, look_at; /* tokens in this epoch, and at how many there is a choice */
static uint64_t epoch_at, published_at;

static double ns(uint64_t ticks)
{
    const struct dovetail_page *page = rank_page;
    return (double)ticks * page->latest[page->latest_seq % 2].ns_per_tick;
}

/* --- What came --- */

static void begin_epoch(uint64_t now)
{
    epoch_at = now;
    heard = 0;
    look_at = ENOUGH;
    for (unsigned i = 0; i < count; i++)
        tokens[i].epoch = tokens[i].groups = 0;
    previous = TOKENS;
}

/* The number of a token; TOKENS if it is one too many. */
static unsigned find(unsigned index, uint32_t size, const void *site)
{
    unsigned i = 0;
    while (i < count &&
           !(tokens[i].site == site && tokens[i].index == index && tokens[i].size == size))
        i++;
    return i;
}

static void take_ratio(struct ratio *ratio, uint32_t times)
{
    uint32_t usual = ratio->usual;
    uint32_t apart = times > usual ? times - usual : usual - times;
    if (apart <= usual / 16) {
        ratio->hits++;
    } else if (++ratio->misses > ratio->hits) {
        ratio->usual = times;
        ratio->hits = 1;
        ratio->misses = 0;
    }
}

/* A group of token number `i` begins, before which number `j` has come `total` times. */
static void compare(unsigned i, unsigned j, uint64_t total)
{
    struct ratio *ratio = &ratios[i][j];
    if (tokens[i].groups > 0)
        take_ratio(ratio, (uint32_t)(total - ratio->before));
    else
        ratio->hits = ratio->misses = 0;
    ratio->before = total;
}

/* Token number `i` came, which has come before; `first` to `last` are those to compare it with. */
static void take(unsigned i, unsigned first, unsigned last, uint64_t now)
{
    struct token *token = &tokens[i];
    if (i != previous) {
        for (unsigned j = first; j <= last; j++)
            if (j != i)
                compare(i, j, tokens[j].total);
        compare(i, i, token->total);
        token->groups++;
    }
    previous = i;
    if (token->epoch > 0)
        token->between[token->epoch % INTERVALS] = now - token->last;
    token->epoch++;
    token->last = now;
}

/* --- What is made of it --- */

static bool even(const struct token *token)
{
    uint32_t n = token->epoch - 1 < INTERVALS ? token->epoch - 1 : INTERVALS;
    double sum = 0, squares = 0;
    for (uint32_t k = 0; k < n; k++) {
        double x = (double)token->between[(token->epoch - 1 - k) % INTERVALS];
        sum += x;
        squares += x * x;
    }
    double mean = sum / n;
    return squares / n - mean * mean < 0.25 * mean * mean; /* a deviation of half the mean */
}

static bool regular(const struct ratio *ratio)
{
    return ratio->hits >= ENOUGH - 1 && 8 * ratio->misses <= ratio->hits;
}

/* Does token number `y`, if it is rarer than number `x`, allow that to be the beat? */
static bool allows(unsigned y, unsigned x)
{
    if (tokens[y].groups < ENOUGH || tokens[y].epoch >= tokens[x].epoch)
        return true;
    return regular(&ratios[y][x]) && regular(&ratios[y][y]);
}

/* Has it come too rarely to be judged, or to judge by, if one comes `most` times? */
static bool young(const struct token *token, uint32_t most)
{
    return token->epoch < ENOUGH || (token->groups < ENOUGH && token->epoch < most);
}

static bool steady(unsigned x)
{
    for (unsigned y = 0; y < count; y++)
        if (!allows(y, x))
            return false;
    return true;
}

static void choose(uint64_t now)
{
    unsigned best = TOKENS;
    bool refused = false;
    uint32_t most = 0;
    for (unsigned i = 0; i < count; i++)
        most = tokens[i].epoch > most ? tokens[i].epoch : most;
    for (unsigned i = 0; i < count; i++) {
        bool lives = tokens[i].epoch > 0 && ns(now - tokens[i].last) < QUIET_NS;
        if (lives && young(&tokens[i], most))
            return;
        if (tokens[i].epoch < ENOUGH)
            continue;
        if (!steady(i))
            refused = true;
        else if (best == TOKENS || tokens[i].epoch > tokens[best].epoch + 1)
            best = i;
    }
    if (best < TOKENS && (!refused || even(&tokens[best]))) {
        beat = best;
        state = openfoam_loaded() ? DEAF : BEATING; /* that tells its steps itself */
    }
}

static void listen(unsigned i, bool known, uint64_t now)
{
    if (!known) {
        begin_epoch(now);
        return;
    }
    take(i, 0, count - 1, now);
    if (++heard < look_at)
        return;
    look_at += look_at / 4;
    if (ns(now - epoch_at) >= RIPE_NS)
        choose(now);
}

void rhythm_collective(unsigned index, int size, int elements, const void *site)
{
    const struct dovetail_page *page = rank_page;
    if (state == DEAF || !rank_main || page == NULL || (uint32_t)size != page->world_size)
        return;
    if (page->source != DOVETAIL_SOURCE_NONE && page->source < DOVETAIL_SOURCE_RHYTHM) {
        state = DEAF; /* the program tells its iterations itself */
        return;
    }
    if (state == BEATING && published_at && page->source == DOVETAIL_SOURCE_NONE) {
        state = LISTENING; /* the program has left this beat */
        published_at = 0;
        begin_epoch(ticks_now());
    }
    uint32_t class = elements > 0 ? 32 - (uint32_t)__builtin_clz((unsigned)elements) : 0;
    unsigned i = find(index, class, site);
    uint64_t now = ticks_now();
    bool known = i < count;
    if (i == TOKENS) {
        if (state == LISTENING)
            state = DEAF;
        return;
    }
    if (!known)
        tokens[count++] = (struct token){.site = site, .index = index, .size = class};
    tokens[i].total++;
    if (state == LISTENING) {
        listen(i, known, now);
    } else if (state == BEATING) {
        take(i, beat, beat, now);
        bool judged = ratios[i][beat].misses >= ENOUGH - 1 || tokens[i].groups >= 2 * ENOUGH;
        if (judged && !allows(i, beat)) {
            state = DEAF;
            rank_no_rhythm();
        }
    }
    if (state == BEATING && i == beat && (!published_at || ns(now - published_at) >= SPACE_NS)) {
        published_at = now;
        rank_iteration(DOVETAIL_SOURCE_RHYTHM + beat, tokens[i].total);
    }
}
