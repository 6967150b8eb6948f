/* SPDX-License-Identifier: Apache-2.0
 *
 * The interposer against what NCCL promises, in random programs: forked ranks, each with two
 * threads that have communicators and streams of their own, make groups of any shape and size on
 * any stream, late or held up, and split, abort and end communicators in between.  Every byte that
 * is received is compared with the sender's; a receiver's memory is used before and afterwards on
 * the same stream, so whoever writes or reads at the wrong time is found out. test_intercept_random
 * [SEED [CALLS [RANKS]]]
 */
#include "config.h"

#include "unit.h"

#include <glob.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../fake/nccl_streams.h"
#include "preload/intercept/channel.h"

enum {
    RANKS = FAKE_NCCL_RANKS,
    LANES = 2,   /* threads of a rank */
    STREAMS = 3, /* of a lane */
    COMMS = 5,   /* of a lane */
    PIECES = 512,
    GUARD = 64,
    LIMIT_S = 150
};
#define BASE (2u << 20) /* bytes of a rank's data */
#define MOST (1u << 19)
#define AREA (6u << 20)
#define STALE 0xa5
#define UNTOUCHED 0x5a

/* Of cuda_streams.c. */
extern cu_result cuMemAlloc_v2(uintptr_t *, size_t), cuMemFree_v2(uintptr_t);
extern cu_result cuStreamCreateWithPriority(cu_stream *, unsigned, int);
extern cu_result cuStreamDestroy_v2(cu_stream), cuStreamSynchronize(cu_stream);
extern cu_result cuMemcpyAsync(cu_pointer, cu_pointer, size_t, cu_stream);
extern cu_result cuStreamWaitValue32_v2(cu_stream, cu_pointer, uint32_t, unsigned);
extern cu_result cuStreamWriteValue32_v2(cu_stream, cu_pointer, uint32_t, unsigned);
extern cu_result fake_cuda_opened(int *);

/* ---- what the ranks share ---- */

static struct {
    atomic_int met[LANES], at[RANKS][LANES];
    atomic_ulong messages, carried, compared, calls, ended;
    unsigned char base[RANKS][BASE];
} * all;

static int me, ranks;
static uint64_t run_seed;

static uint64_t draw(uint64_t *state, uint64_t below) {
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return below == 0 ? 0 : (*state >> 33) % below;
}

/* Most are small. */
static uint64_t draw_size(uint64_t *state) {
    const uint64_t bits = draw(state, 20), most = UINT64_C(1) << bits;
    return draw(state, 8) == 0 ? 0 : most / 2 + draw(state, most / 2 + 1);
}

/* ---- one thread of a rank ---- */

typedef struct crew {
    ncclComm_t handle; /* NULL: this rank is not in it */
    bool there;
    int count, member[RANKS];
} crew;

typedef struct piece {          /* received */
    unsigned char *at, *copied; /* copied: in stream order behind it; NULL: not */
    const unsigned char *want;
    uint64_t bytes;
    int team; /* -1: of one that was aborted */
    bool guarded;
    cu_stream stream;
} piece;

typedef struct spent { /* sent from where it is overwritten afterwards */
    unsigned char *at;
    uint64_t bytes;
    cu_stream stream;
} spent;

typedef struct lane {
    int number;
    uint64_t common, own; /* random numbers: the same at all ranks, and not */
    crew team[COMMS];
    int ids;
    cu_stream stream[STREAMS];
    unsigned char *area, *out, *stage, *stale; /* received, copied, sent from; STALE alone */
    size_t used, stage_used;
    piece piece[PIECES];
    spent staged[PIECES];
    int pieces, stageds;
    uint32_t word, held; /* held: the value that streams wait for */
    bool holds;
    int call;
} lane;

#define MUST(call)                                                                                 \
    do {                                                                                           \
        const int r_ = (call);                                                                     \
        if (r_ != 0)                                                                               \
            stop(l, #call, r_);                                                                    \
    } while (0)

static _Noreturn void stop(const lane *l, const char *what, long value) {
    printf("seed %llu: rank %d, thread %d, call %d: %s: %ld\n", (unsigned long long)run_seed, me,
           l->number, l->call, what, value);
    fflush(stdout);
    _exit(1);
}

static void let_go(lane *l) {
    if (l->holds)
        MUST(cuStreamWriteValue32_v2(NULL, (cu_pointer)&l->word, l->held, 0));
    l->holds = false;
}

static void hold_up(lane *l) {
    if (!l->holds)
        l->held++;
    l->holds = true;
    MUST(cuStreamWaitValue32_v2(l->stream[draw(&l->own, STREAMS)], (cu_pointer)&l->word, l->held,
                                0));
}

/* All ranks' threads of this number. */
static void meet(lane *l) {
    const int turn = atomic_fetch_add(&all->met[l->number], 1) / ranks;
    while (atomic_load(&all->met[l->number]) < (turn + 1) * ranks)
        usleep(50);
}

static bool is_all(const unsigned char *at, uint64_t bytes, int value) {
    return bytes == 0 || (at[0] == value && memcmp(at, at + 1, bytes - 1) == 0);
}

static void compare(const lane *l, const piece *p) {
    if (memcmp(p->copied != NULL ? p->copied : p->at, p->want, p->bytes) != 0)
        stop(l, "wrong bytes of a message of", (long)p->bytes);
    if (p->copied != NULL && !is_all(p->at, p->bytes, STALE))
        stop(l, "written when it was over: a message of", (long)p->bytes);
    if (p->guarded && !is_all(p->at + p->bytes, GUARD, UNTOUCHED))
        stop(l, "written behind a message of", (long)p->bytes);
}

/* Waits for the streams and compares what has come since the last time. */
static void finish(lane *l) {
    let_go(l);
    for (int i = 0; i < STREAMS; i++)
        MUST(cuStreamSynchronize(l->stream[i]));
    for (int i = 0; i < l->pieces; i++)
        if (l->piece[i].team >= 0)
            compare(l, &l->piece[i]);
    atomic_fetch_add(&all->compared, (unsigned long)l->pieces);
    memset(l->area, UNTOUCHED, l->used);
    l->pieces = l->stageds = 0;
    l->used = l->stage_used = 0;
}

static void memory_open(lane *l) {
    uintptr_t at;
    MUST(cuMemAlloc_v2(&at, AREA));
    l->area = (unsigned char *)at;
    memset(l->area, UNTOUCHED, AREA);
}

/* Peers have it open. */
static void memory_renew(lane *l) {
    finish(l);
    meet(l); /* (nobody writes to it) */
    MUST(cuMemFree_v2((uintptr_t)l->area));
    memory_open(l);
}

/* ---- messages ---- */

typedef struct plan { /* of a group: sizes by sender and receiver; count: of messages */
    struct {
        int count;
        uint64_t bytes[2], first[2];
    } pair[RANKS][RANKS];
} plan;

enum { SHAPE_EVEN, SHAPE_FULL, SHAPE_SPARSE, SHAPE_MANY };

static void plan_draw(lane *l, plan *p, int count, int shape) {
    const uint64_t even = draw_size(&l->common) / 16 * 8;
    for (int a = 0; a < count; a++)
        for (int b = 0; b < count; b++) {
            p->pair[a][b].count = shape == SHAPE_SPARSE ? (int)draw(&l->common, 2)
                                  : shape == SHAPE_MANY ? (int)draw(&l->common, 3)
                                                        : 1;
            for (int k = 0; k < 2; k++) {
                p->pair[a][b].first[k] = draw(&l->common, BASE - MOST);
                p->pair[a][b].bytes[k] =
                    shape == SHAPE_EVEN ? even
                                        : draw_size(&l->common) / (shape == SHAPE_MANY ? 4 : 1);
            }
        }
}

/* Where something is received. */
static piece *piece_new(lane *l, int team, uint64_t bytes, const unsigned char *want) {
    piece *p = &l->piece[l->pieces++];
    *p = (piece){
        .at = l->area + l->used, .want = want, .bytes = bytes, .team = team, .guarded = true};
    l->used += (bytes + 2 * GUARD - 1) / GUARD * GUARD;
    return p;
}

static void receive(lane *l, int team, uint64_t bytes, const unsigned char *want, int from,
                    cu_stream s) {
    piece *p = piece_new(l, team, bytes, want);
    if (draw(&l->own, 3) == 0) {
        p->copied = l->out + (p->at - l->area);
        p->stream = s;
        MUST(cuMemcpyAsync((cu_pointer)p->at, (cu_pointer)l->stale, bytes, s));
    }
    const bool words = bytes % 8 == 0;
    MUST(ncclRecv(p->at, words ? bytes / 8 : bytes, words ? 4 : 0, from, l->team[team].handle, s));
}

static void send(lane *l, int team, uint64_t bytes, const unsigned char *source, int to,
                 cu_stream s) {
    if (draw(&l->own, 3) == 0 && l->stage_used + bytes <= AREA && l->stageds < PIECES) {
        unsigned char *const at = l->stage + l->stage_used;
        l->stage_used += bytes;
        l->staged[l->stageds++] = (spent){at, bytes, s};
        MUST(cuMemcpyAsync((cu_pointer)at, (cu_pointer)source, bytes, s));
        source = at;
    }
    const bool words = bytes % 8 == 0;
    MUST(ncclSend(source, words ? bytes / 8 : bytes, words ? 4 : 0, to, l->team[team].handle, s));
}

/* Behind the group: what came is copied, and what was used is overwritten, on the same streams. */
static void use_up(lane *l, int first, int first_staged) {
    for (int i = first; i < l->pieces; i++) {
        const piece *p = &l->piece[i];
        if (p->copied == NULL)
            continue;
        MUST(cuMemcpyAsync((cu_pointer)p->copied, (cu_pointer)p->at, p->bytes, p->stream));
        MUST(cuMemcpyAsync((cu_pointer)p->at, (cu_pointer)l->stale, p->bytes, p->stream));
    }
    for (int i = first_staged; i < l->stageds; i++) {
        const spent *t = &l->staged[i];
        MUST(cuMemcpyAsync((cu_pointer)t->at, (cu_pointer)l->stale, t->bytes, t->stream));
    }
}

static int index_in(const crew *t) {
    for (int i = 0; i < t->count; i++)
        if (t->member[i] == me)
            return i;
    return -1;
}

static cu_stream any_stream(lane *l) { return l->stream[draw(&l->own, STREAMS)]; }

/* This rank's messages of one communicator; `s` NULL: each on any stream. */
static void messages_of(lane *l, int number, const plan *p, cu_stream s) {
    const crew *t = &l->team[number];
    const int i = index_in(t), from = (int)draw(&l->own, (uint64_t)t->count);
    for (int n = 0; n < t->count; n++) {
        const int peer = (from + n) % t->count;
        for (int k = 0; k < p->pair[i][peer].count; k++)
            send(l, number, p->pair[i][peer].bytes[k], all->base[me] + p->pair[i][peer].first[k],
                 peer, s != NULL ? s : any_stream(l));
        for (int k = 0; k < p->pair[peer][i].count; k++)
            receive(l, number, p->pair[peer][i].bytes[k],
                    all->base[t->member[peer]] + p->pair[peer][i].first[k], peer,
                    s != NULL ? s : any_stream(l));
    }
}

/* ---- calls ---- */

static int any_team(lane *l) {
    for (;;) {
        const int n = (int)draw(&l->common, COMMS);
        if (l->team[n].there)
            return n;
    }
}

static bool is_mine(const lane *l, int n) { return n >= 0 && l->team[n].handle != NULL; }

/* A group of messages of one communicator or two. */
static void call_group(lane *l) {
    plan p[2];
    const int shape = (int)draw(&l->common, 8), two = draw(&l->common, 5) == 0;
    int team[2] = {any_team(l), any_team(l)};
    if (!two || team[1] == team[0])
        team[1] = -1;
    for (int i = 0; i < 2 && team[i] >= 0; i++)
        plan_draw(l, &p[i], l->team[team[i]].count,
                  shape < 5   ? SHAPE_FULL
                  : shape < 7 ? SHAPE_SPARSE
                              : SHAPE_MANY);
    const bool nested = draw(&l->common, 6) == 0, reduce = draw(&l->common, 6) == 0;
    if (!is_mine(l, team[0]) && !is_mine(l, team[1]))
        return;
    const bool mixed = draw(&l->own, 10) == 0; /* several streams */
    cu_stream s = any_stream(l);
    const int first = l->pieces, first_staged = l->stageds;
    MUST(ncclGroupStart());
    if (nested)
        MUST(ncclGroupStart());
    for (int i = 0; i < 2; i++)
        if (is_mine(l, team[i]))
            messages_of(l, team[i], &p[i], mixed ? NULL : s);
    if (nested)
        MUST(ncclGroupEnd());
    if (reduce && is_mine(l, team[0]))
        MUST(ncclAllReduce(l->stale, l->stale, 4, 7, 0, l->team[team[0]].handle, s));
    MUST(ncclGroupEnd());
    use_up(l, first, first_staged);
}

/* ncclAlltoAll: pieces lie one behind the other. */
static void call_alltoall(lane *l) {
    const int n = any_team(l);
    const uint64_t bytes = draw_size(&l->common) / 32 * 8,
                   first = draw(&l->common, BASE - MOST) / 8 * 8;
    if (!is_mine(l, n))
        return;
    const crew *t = &l->team[n];
    const int i = index_in(t);
    unsigned char *const to = l->area + l->used;
    for (int p = 0; p < t->count; p++) {
        piece *q = piece_new(l, n, bytes, all->base[t->member[p]] + first + (uint64_t)i * bytes);
        q->at = to + (uint64_t)p * bytes;
        q->guarded = p + 1 == t->count;
    }
    l->used = (size_t)(to - l->area) + ((uint64_t)t->count * bytes + 2 * GUARD - 1) / GUARD * GUARD;
    MUST(ncclAlltoAll(all->base[me] + first, to, bytes / 8, 4, t->handle, any_stream(l)));
}

/* One message, of two ranks, outside a group. */
static void call_alone(lane *l) {
    const int n = any_team(l);
    const crew *t = &l->team[n];
    const int from = (int)draw(&l->common, (uint64_t)t->count), to = (from + 1) % t->count;
    const uint64_t bytes = draw_size(&l->common), first = draw(&l->common, BASE - MOST);
    if (from == to || !is_mine(l, n))
        return;
    const int count = l->pieces, stageds = l->stageds;
    if (t->member[from] == me)
        send(l, n, bytes, all->base[me] + first, to, any_stream(l));
    else if (t->member[to] == me)
        receive(l, n, bytes, all->base[t->member[from]] + first, from, any_stream(l));
    use_up(l, count, stageds);
}

/* ---- communicators ---- */

static int free_team(const lane *l) {
    for (int n = 0; n < COMMS; n++)
        if (!l->team[n].there)
            return n;
    return -1;
}

static void draw_settings(lane *l) {
    static const uint64_t least[] = {1, 1, 1, 64, 20000};
    fake_settings.least = least[draw(&l->common, 5)];
    fake_settings.wait_us = draw(&l->common, 4) == 0 ? 1000 : 20000;
}

/* A communicator of all. */
static void call_init(lane *l) {
    const int n = free_team(l);
    ncclUniqueId id;
    draw_settings(l);
    if (n < 0 || l->ids >= 64 / LANES)
        return;
    let_go(l);
    fake_nccl_id(l->ids++ * LANES + l->number, &id);
    snprintf(id.internal + 64, 64, "%d %d %llu", (int)getppid(), ranks,
             (unsigned long long)run_seed);
    MUST(ncclCommInitRank(&l->team[n].handle, ranks, id, me));
    l->team[n].there = true;
    l->team[n].count = ranks;
    for (int i = 0; i < ranks; i++)
        l->team[n].member[i] = i;
}

/* In two, or a part that is in none; the order is kept or turned round. */
static void call_split(lane *l) {
    const int n = free_team(l), parent = any_team(l), turned = (int)draw(&l->common, 2);
    int color[RANKS];
    draw_settings(l);
    for (int i = 0; i < RANKS; i++)
        color[i] = (int)draw(&l->common, 4) - 1;
    if (n < 0)
        return;
    const crew *from = &l->team[parent];
    crew t = {.there = true};
    for (int i = 0; i < from->count; i++) { /* colours from 1 on are one */
        const int k = turned ? from->count - 1 - i : i;
        if (color[k] >= 0)
            t.member[t.count++] = from->member[k];
    }
    if (from->handle != NULL) {
        const int i = index_in(from);
        let_go(l);
        MUST(ncclCommSplit(from->handle, color[i] >= 0 ? 1 : -1, turned ? -i : i, &t.handle, NULL));
    }
    if (t.count > 0)
        l->team[n] = t;
}

static void forget_team(lane *l, int n) {
    for (int i = 0; i < l->pieces; i++)
        if (l->piece[i].team == n)
            l->piece[i].team = -1;
    memset(&l->team[n], 0, sizeof l->team[n]);
}

static void *abort_soon(void *handle) {
    usleep((useconds_t)((uintptr_t)handle / 64 % 3000));
    if (ncclCommAbort(handle) != 0)
        _exit(1);
    return NULL;
}

/* Another thread aborts it in the middle of groups, which end with an error then. */
static void abort_beside(lane *l, int n) {
    plan p;
    pthread_t other;
    ncclResult_t r = ncclSuccess;
    if (pthread_create(&other, NULL, abort_soon, l->team[n].handle) != 0)
        stop(l, "no thread", 0);
    for (int i = 0; i < 60 && r == ncclSuccess && l->used < AREA - MOST / 4; i++) {
        const crew *t = &l->team[n];
        const int it = index_in(t);
        plan_draw(l, &p, t->count, SHAPE_FULL);
        cu_stream s = any_stream(l);
        r = ncclGroupStart();
        for (int peer = 0; peer < t->count && r == ncclSuccess; peer++) {
            const uint64_t in = p.pair[peer][it].bytes[0] / 64,
                           out = p.pair[it][peer].bytes[0] / 64;
            r = ncclSend(l->stale, out, 0, peer, t->handle, s);
            if (r == ncclSuccess)
                r = ncclRecv(piece_new(l, -1, in, NULL)->at, in, 0, peer, t->handle, s);
        }
        const ncclResult_t ended = ncclGroupEnd();
        r = r == ncclSuccess ? ended : r;
    }
    pthread_join(other, NULL);
    if (r != ncclSuccess && r != ncclInvalidArgument)
        stop(l, "a group of an aborted communicator", r);
}

/* Ends one, not the first: when its messages have come, or while they are on their way; by an
 * abort, of this thread or another, or behind a revocation. */
static void call_end(lane *l) {
    const int n = any_team(l), how = (int)draw(&l->common, 6);
    if (n == 0)
        return;
    const bool aborts = how >= 2;
    const uint64_t common = l->common;
    let_go(l); /* (its end waits for what is on its way here) */
    if (aborts)
        meet(l); /* (nobody waits for messages that do not come any more) */
    if (is_mine(l, n)) {
        ncclComm_t c = l->team[n].handle;
        if (how == 0)
            finish(l);
        if (how == 5)
            MUST(ncclCommRevoke(c, 0));
        if (how == 4)
            abort_beside(l, n);
        else
            MUST(aborts && how != 5 ? ncclCommAbort(c) : ncclCommDestroy(c));
    }
    l->common = common; /* (how far a group beside an abort came is each rank's own) */
    if (!aborts) {
        finish(l);
        forget_team(l, n);
        return;
    }
    forget_team(l, n);
    finish(l);
    meet(l); /* a peer that aborts later may write until then */
    memset(l->area, UNTOUCHED, AREA);
}

enum { KIND_END = 978, KIND_RENEW = 994 }; /* of a thousand calls, from which on */

static void one_call(lane *l) {
    const uint64_t kind = draw(&l->common, 1000);
    const bool ends = kind >= KIND_END && kind < KIND_RENEW;
    if (!ends && (l->used > AREA / 4 || l->pieces > PIECES / 3 || kind < 60))
        finish(l);
    if (draw(&l->own, 40) == 0)
        usleep((useconds_t)draw(&l->own, 3000));
    if (draw(&l->own, 12) == 0)
        hold_up(l);
    if (l->holds && draw(&l->own, 8) == 0)
        let_go(l);
    if (kind < 750)
        call_group(l);
    else if (kind < 860)
        call_alltoall(l);
    else if (kind < 940)
        call_alone(l);
    else if (kind < 960)
        call_init(l);
    else if (kind < KIND_END)
        call_split(l);
    else if (ends)
        call_end(l);
    else
        memory_renew(l);
}

/* ---- ranks ---- */

static int calls_of_a_lane = 500;

static void lane_open(lane *l) {
    l->common = run_seed * 1000003 + (uint64_t)l->number;
    l->own = l->common * 31 + (uint64_t)me + 1;
    for (int i = 0; i < STREAMS; i++)
        MUST(cuStreamCreateWithPriority(&l->stream[i], 1, 0));
    memory_open(l);
    l->out = malloc(AREA);
    l->stage = malloc(AREA);
    l->stale = malloc(MOST);
    if (l->out == NULL || l->stage == NULL || l->stale == NULL)
        stop(l, "no memory", 0);
    memset(l->stage, 0, AREA);
    memset(l->stale, STALE, MOST);
    call_init(l);
}

static void lane_close(lane *l) {
    finish(l);
    for (int n = 0; n < COMMS; n++)
        if (l->team[n].handle != NULL)
            MUST(ncclCommDestroy(l->team[n].handle));
    for (int i = 0; i < STREAMS; i++)
        MUST(cuStreamDestroy_v2(l->stream[i]));
    MUST(cuMemFree_v2((uintptr_t)l->area));
    free(l->out);
    free(l->stage);
    free(l->stale);
}

static void *lane_main(void *argument) {
    lane *l = argument;
    lane_open(l);
    for (l->call = 1; l->call <= calls_of_a_lane; l->call++) {
        atomic_store(&all->at[me][l->number], l->call);
        one_call(l);
    }
    lane_close(l);
    meet(l);
    return NULL;
}

static void count(const comm *c, void *ended) {
    atomic_fetch_add(&all->messages, atomic_load(&c->send.calls));
    atomic_fetch_add(&all->carried, atomic_load(&c->carried.calls));
    *(unsigned long *)ended += c->handle == NULL;
}

static _Noreturn void rank_main(int rank) {
    if (rank % 2 == 1) /* its memory is mapped in pieces */
        setenv("FAKE_CUDA_PIECES", "49152", 1);
    static lane lanes[LANES];
    pthread_t thread[LANES];
    char text[16];
    unsigned long ended = 0;
    int left = 0;
    me = rank;
    snprintf(text, sizeof text, "%d", rank);
    setenv("RANK", text, 1);
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm(LIMIT_S);
    for (int i = 0; i < LANES; i++) {
        lanes[i].number = i;
        if (pthread_create(&thread[i], NULL, lane_main, &lanes[i]) != 0)
            stop(&lanes[i], "no thread", 0);
    }
    for (int i = 0; i < LANES; i++)
        pthread_join(thread[i], NULL);
    comm_each(count, &ended);
    atomic_fetch_add(&all->ended, ended);
    atomic_fetch_add(&all->calls, (unsigned long)(LANES * calls_of_a_lane));
    if (fake_cuda_opened(&left) != 0 || left != 0)
        stop(&lanes[0], "peers' memory left open", left);
    exit(0);
}

static bool run(uint64_t seed, int count_) {
    pid_t child[RANKS];
    bool well = true;
    run_seed = seed;
    ranks = count_;
    memset(all, 0, offsetof(__typeof__(*all), messages));
    CU_ASSERT_TRUE_FATAL(fake_nccl_open());
    fflush(NULL);
    for (int r = 0; r < ranks; r++)
        if ((child[r] = fork()) == 0)
            rank_main(r);
    for (int n = 0; n < ranks; n++) {
        int status = 0;
        const pid_t gone = wait(&status);
        if (gone > 0 && status != 0 && well) { /* the others wait for it */
            well = false;
            for (int r = 0; r < ranks; r++)
                (void)kill(child[r], SIGKILL);
        }
    }
    for (int r = 0; r < ranks && !well; r++)
        for (int i = 0; i < LANES; i++)
            printf("seed %llu: rank %d, thread %d was at call %d\n", (unsigned long long)seed, r, i,
                   atomic_load(&all->at[r][i]));
    return well;
}

static void sweep(void) { /* what ranks that were killed left */
    char pattern[64];
    glob_t found;
    snprintf(pattern, sizeof pattern, "/dev/shm/ep-fake-%s-*", getenv("UNIQUE"));
    if (glob(pattern, 0, NULL, &found) != 0)
        return;
    for (size_t i = 0; i < found.gl_pathc; i++)
        (void)unlink(found.gl_pathv[i]);
    globfree(&found);
}

static uint64_t first_seed = 20261130;
static int only_ranks;

static void test_programs(void) {
    uint64_t state = first_seed;
    for (size_t i = 0; i < sizeof all->base / 8; i++) {
        const uint64_t word = (draw(&state, UINT32_MAX) << 32) ^ draw(&state, UINT32_MAX);
        memcpy((unsigned char *)all->base + 8 * i, &word, 8);
    }
    for (int n = only_ranks ? only_ranks : 2; n <= (only_ranks ? only_ranks : RANKS); n++) {
        printf("\n  seed %llu, %d ranks\n", (unsigned long long)first_seed, n);
        CU_ASSERT_TRUE(run(first_seed, n));
        sweep();
    }
    const unsigned long messages = atomic_load(&all->messages),
                        carried = atomic_load(&all->carried);
    printf("  %lu calls, %lu communicators ended, %lu messages, %lu carried, %lu compared\n",
           atomic_load(&all->calls), atomic_load(&all->ended), messages, carried,
           atomic_load(&all->compared));
    CU_ASSERT_TRUE(carried > messages / 50 && carried < messages - messages / 20);
    CU_ASSERT_TRUE(atomic_load(&all->ended) > 0);
}

int main(int argc, char **argv) {
    const CU_TestInfo tests[] = {{"random programs", test_programs}, CU_TEST_INFO_NULL};
    char unique[16];
    if (argc > 1)
        first_seed = strtoull(argv[1], NULL, 10);
    if (argc > 2)
        calls_of_a_lane = (int)strtol(argv[2], NULL, 10);
    if (argc > 3)
        only_ranks = (int)strtol(argv[3], NULL, 10);
    snprintf(unique, sizeof unique, "r%d", (int)getpid());
    setenv("UNIQUE", unique, 1);
    all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return all == MAP_FAILED ? 99 : unit_run("intercept_random", tests);
}
