/* SPDX-License-Identifier: LGPL-3.0-or-later
 *
 * Finds the beat of one rank: a call with a neighbour, or a group of them, that its loop always
 * makes.
 *
 * In: what starts a message or takes one from a certain rank, and collective calls. Out: a boundary
 * (rank.h) at each call of the one that was chosen, numbered by how often it was made since
 * MPI_Init, from DOVETAIL_SOURCE_OWN, which all other sources go before.
 *
 * Ranks have no order of such calls in common, so each decides alone and may well err: take two
 * beats for an iteration where its neighbour takes one, or, as a worker of some master, have
 * a beat of its own. Nothing here tells. What tells is that ranks that wait for one another in each
 * iteration count alike, and that a master, who takes what comes first, has no beat at all: hence
 * readers believe a beat of this kind only where each rank has one and all count alike (page.py).
 *
 * A token is a call at its place in the program, with the peer and the communicator that it had
 * there first: who exchanges with a number of neighbours in a loop is to count once per iteration,
 * whatever their number. As in rhythm.c, a token that is new begins a new epoch, and the beat is
 * the most frequent token that comes equally often between any two of each rarer one; here also,
 * there are always as many calls with other peers at the same place between two of it. If more
 * frequent ones were refused, their number between two of it may vary, but not wildly. Tokens
 * are only counted for a while (COUNTING); then the most frequent one is compared with each that
 * comes (JUDGING), which is cheaper than all with all, and if it is refused the next. While
 * collective calls of all ranks come, or calls that take what comes first, nothing is chosen.
 *
 * With a beat (BEATING), calls that are as frequent are passed over where they are made
 * (own_beat.h), and rarer ones go on to judge. If one refuses the beat, or the ranks find a rhythm
 * together, this one is over (CLOSED).
 */
#include "own_beat.h"

#include <string.h>

#include "openfoam.h"
#include "page.h"
#include "rank.h"

#define TOKENS 96   /* a program with more has no such rhythm */
#define SLOTS 256   /* of the table by which they are found */
#define ENOUGH 5    /* times that a token comes before it may judge */
#define OFTEN 16    /* and before it may be the beat: ranks that count unlike things must differ */
#define RIPE_NS 1e9 /* tokens are counted this long, and judge this long */
#define QUIET_NS 1e10    /* one that came less often is left out after so long a silence */
#define PATIENCE_NS 6e10 /* who has judged this long and found nothing will not */
#define SPACE_NS 1e6     /* between two boundaries that are published: one costs about 1 us */
#define MEMORY 64        /* times that are remembered as usual or not, so that change is seen */

bool own_beat_open = true;
const void *own_beat_passed[OWN_BEAT_PASSED];

static enum { COUNTING, JUDGING, BEATING, CLOSED } state;

struct token {
    const void *site;
    uintptr_t group;
    int peer;
    uint32_t index;
    enum own_beat_kind kind;
    uint64_t calls;  /* with any peer, since MPI_Init */
    uint64_t total;  /* times that it came since MPI_Init */
    uint32_t epoch;  /* and in this epoch */
    uint32_t judged; /* and since the candidate is judged */
    uint64_t last;   /* tick at which it came last */
    bool refused;    /* as a beat, in this epoch */
    /* How often the candidate came between two times of this one; for the candidate, the calls. */
    uint64_t before;
    uint32_t usual, hits, misses;
};

static struct token tokens[TOKENS];
static uint8_t slots[SLOTS]; /* 1 + the number of a token, by its hash */
static unsigned count;
static struct token *candidate; /* or the beat */
static uint64_t look_at, began_at, published_at;
static bool some_refused;
static uint32_t refused_calls, refused_before; /* so far, and at the candidate's last time */
static double turns, squares; /* sums over those between two times of it, and over their squares */

static uint64_t ticks(double ns)
{
    const struct dovetail_page *page = rank_page;
    return (uint64_t)(ns / page->latest[page->latest_seq % 2].ns_per_tick);
}

static void close_ears(void)
{
    state = CLOSED;
    own_beat_open = false;
}

static void begin_epoch(uint64_t now)
{
    state = COUNTING;
    look_at = now + ticks(RIPE_NS);
    some_refused = false;
    published_at = 0;
    for (unsigned i = 0; i < count; i++) {
        tokens[i].epoch = 0;
        tokens[i].refused = false;
    }
}

/* The token of a call, a new one if need be; NULL if that is one too many. */
static struct token *find(unsigned index, const void *site)
{
    uintptr_t hash = (uintptr_t)site ^ (uintptr_t)site >> 8 ^ index;
    unsigned slot = (unsigned)(hash % SLOTS);
    for (; slots[slot]; slot = (slot + 1) % SLOTS) {
        struct token *token = &tokens[slots[slot] - 1];
        if (token->site == site && token->index == index)
            return token;
    }
    if (count == TOKENS)
        return NULL;
    tokens[count] = (struct token){.site = site, .index = index};
    slots[slot] = (uint8_t)++count;
    return &tokens[count - 1];
}

/* --- Judging --- */

static void take(struct token *token, uint32_t times)
{
    uint32_t apart = times > token->usual ? times - token->usual : token->usual - times;
    if (apart <= token->usual / 16) {
        token->hits++;
    } else if (++token->misses > token->hits) {
        token->usual = times;
        token->hits = 1;
        token->misses = 0;
    }
    if (token->hits + token->misses >= MEMORY) {
        token->hits /= 2;
        token->misses /= 2;
    }
}

/* A token came while there is a candidate. */
static void judge(struct token *token)
{
    uint64_t sum = token == candidate ? token->calls : candidate->total;
    if (token->judged++ > 0) {
        take(token, (uint32_t)(sum - token->before));
        if (token == candidate) {
            double calls = refused_calls - refused_before;
            turns += calls;
            squares += calls * calls;
        }
    }
    token->before = sum;
    if (token == candidate)
        refused_before = refused_calls;
}

static bool as_frequent(const struct token *token)
{
    return token->judged + 1 >= candidate->judged;
}

static bool allows(const struct token *token)
{
    if (token != candidate && (token->judged < ENOUGH || as_frequent(token)))
        return true;
    return token->hits >= ENOUGH - 1 && 8 * token->misses <= token->hits;
}

static bool even(void)
{
    double n = candidate->judged - 1, mean = turns / n;
    return squares / n - mean * mean < 0.25 * mean * mean; /* a deviation of half the mean */
}

/* The most frequent token that may be the beat and was not refused, NULL if there is none. */
static struct token *most_frequent(void)
{
    struct token *best = NULL;
    for (unsigned i = 0; i < count; i++) {
        struct token *token = &tokens[i];
        if (token->kind == OWN_BEAT_EXCHANGE && !token->refused && token->epoch >= OFTEN &&
            (best == NULL || token->epoch > best->epoch + 1))
            best = token;
    }
    return best;
}

static void begin_judging(uint64_t now)
{
    candidate = most_frequent();
    if (candidate == NULL) {
        if (some_refused)
            close_ears();
        return;
    }
    if (state == COUNTING)
        began_at = now;
    state = JUDGING;
    turns = squares = 0;
    for (unsigned i = 0; i < count; i++)
        tokens[i].judged = tokens[i].usual = tokens[i].hits = tokens[i].misses = 0;
}

static void begin_beating(void)
{
    if (openfoam_loaded()) { /* that tells its steps itself */
        close_ears();
        return;
    }
    state = BEATING;
    for (unsigned i = 0; i < count; i++)
        if (&tokens[i] != candidate && as_frequent(&tokens[i]) && tokens[i].judged > 0)
            own_beat_passed[own_beat_slot(tokens[i].site)] = tokens[i].site;
}

/* It is time for the next step. */
static void look(uint64_t now)
{
    bool refused = false;
    look_at = now + ticks(RIPE_NS);
    for (unsigned i = 0; i < count; i++)
        if (tokens[i].kind == OWN_BEAT_ANY && tokens[i].epoch >= ENOUGH) {
            close_ears();
            return;
        }
    if (state == COUNTING) {
        begin_judging(now);
        return;
    }
    if (now - began_at >= ticks(PATIENCE_NS) && candidate->judged >= OFTEN) {
        close_ears();
        return;
    }
    bool wait = candidate->judged < OFTEN;
    for (unsigned i = 0; i < count; i++) {
        const struct token *token = &tokens[i];
        bool lives = token->epoch > 0 && now - token->last < ticks(QUIET_NS);
        bool able = token->judged >= ENOUGH && token->kind == OWN_BEAT_EXCHANGE;
        wait = wait || (lives && !able);
        refused = refused || !allows(token);
    }
    if (candidate->judged >= OFTEN && (refused || (some_refused && !even()))) {
        some_refused = true;
        for (unsigned i = 0; i < count; i++) /* what comes as often tells as little */
            tokens[i].refused = tokens[i].refused || as_frequent(&tokens[i]);
        begin_judging(now);
    } else if (!wait) {
        begin_beating();
    }
}

/* --- What came --- */

static void beat(struct token *token, uint64_t now)
{
    bool judged = token->misses >= ENOUGH - 1 || token->judged >= 2 * ENOUGH;
    if (judged && !allows(token)) {
        close_ears();
        if (rank_page->source == DOVETAIL_SOURCE_OWN)
            rank_no_rhythm();
    } else if (token == candidate && (!published_at || now - published_at >= ticks(SPACE_NS))) {
        published_at = now;
        rank_iteration(DOVETAIL_SOURCE_OWN, token->total);
    }
}

void own_beat_hear(unsigned index, const void *site, int peer, uintptr_t group,
                   enum own_beat_kind kind)
{
    const struct dovetail_page *page = rank_page;
    if (state == CLOSED || !rank_main || page == NULL)
        return;
    if (page->source != DOVETAIL_SOURCE_NONE && page->source != DOVETAIL_SOURCE_OWN) {
        close_ears(); /* there is a better source */
        return;
    }
    uint64_t now = page->last_tick;
    if (state == BEATING && published_at && page->source == DOVETAIL_SOURCE_NONE) {
        memset(own_beat_passed, 0, sizeof(own_beat_passed)); /* the program has left this beat */
        begin_epoch(now);
    }
    struct token *token = find(index, site);
    if (token == NULL) {
        if (state != BEATING)
            close_ears();
        return;
    }
    if (token->calls++ == 0) {
        token->peer = peer;
        token->group = group;
        token->kind = kind;
        if (state != BEATING)
            begin_epoch(now);
    }
    if (kind > token->kind)
        token->kind = kind;
    if (kind != OWN_BEAT_ANY && (token->peer != peer || token->group != group))
        return;
    token->total++;
    token->epoch++;
    refused_calls += token->refused;
    if (state == JUDGING || state == BEATING)
        judge(token);
    token->last = now;
    if (state == BEATING)
        beat(token, now);
    else if (now >= look_at)
        look(now);
}
