/* SPDX-License-Identifier: Apache-2.0
 *
 * intercept_rank.c - one rank of a program that knows NCCL and nothing of us:
 *     intercept_rank WHAT [COUNT]        RANK, WORLD_SIZE and UNIQUE set
 * Sends and receives messages of random sizes, checks every byte, says "ok N" or what is
 * wrong.  Runs on the stand-ins of this folder or on a GPU with a real libcuda.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "preload/intercept/nccl_abi.h"

#define RANKS 8
#define MOST (1 << 20)

ncclResult_t ncclCommUserRank(ncclComm_t, int *);
ncclResult_t ncclCommCount(ncclComm_t, int *);

static int (*mem_alloc)(uintptr_t *, size_t), (*mem_free)(uintptr_t),
    (*copy)(uintptr_t, uintptr_t, size_t);
static int (*copy_on)(uintptr_t, uintptr_t, size_t, cudaStream_t);
static int (*stream_create)(cudaStream_t *, unsigned, int), (*sync_stream)(cudaStream_t);
static int (*capture_begin)(cudaStream_t, int), (*capture_end)(cudaStream_t, void **);
static int (*graph_launch)(void *, cudaStream_t);
static int (*wait_value)(cudaStream_t, uintptr_t, uint32_t, unsigned);
static int (*write_value)(cudaStream_t, uintptr_t, uint32_t, unsigned);
static int (*instantiate)(void **, void *, unsigned long long); /* NULL: the stand-in */
static int (*opened)(int *); /* of the stand-in; NULL: the driver */
static int (*renew_pieces)(uintptr_t, int);
static int rank, ranks;
static uint64_t state = 1;

static uint64_t next(uint64_t most) { /* the same on all ranks */
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return most == 0 ? 0 : (state >> 33) % most;
}

static void fail(const char *what, long a, long b) {
    printf("rank %d: %s: %ld, %ld\n", rank, what, a, b);
    exit(1);
}
#define MUST(call)                                                                                 \
    do {                                                                                           \
        const int r_ = (call);                                                                     \
        if (r_ != 0)                                                                               \
            fail(#call, r_, __LINE__);                                                             \
    } while (0)

static void *symbol(void *lib, const char *name) {
    void *f = dlsym(lib, name);
    if (f == NULL)
        fail(name, 0, 0);
    return f;
}

/* The driver, as a CUDA program has it: with a context. */
static void open_cuda(void) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL), *f;
    if (cuda == NULL)
        fail(dlerror(), 0, 0);
#define FIND(variable, name)                                                                       \
    f = symbol(cuda, name);                                                                        \
    memcpy(&variable, &f, sizeof f)
    FIND(mem_alloc, "cuMemAlloc_v2");
    FIND(mem_free, "cuMemFree_v2");
    FIND(copy, "cuMemcpy");
    FIND(copy_on, "cuMemcpyAsync");
    FIND(stream_create, "cuStreamCreateWithPriority");
    FIND(sync_stream, "cuStreamSynchronize");
    FIND(capture_begin, "cuStreamBeginCapture_v2");
    FIND(capture_end, "cuStreamEndCapture");
    FIND(graph_launch, "cuGraphLaunch");
    FIND(wait_value, "cuStreamWaitValue32_v2");
    FIND(write_value, "cuStreamWriteValue32_v2");
    f = dlsym(cuda, "fake_cuda_opened");
    memcpy(&opened, &f, sizeof f);
    f = dlsym(cuda, "fake_cuda_renew");
    memcpy(&renew_pieces, &f, sizeof f);
    int (*init)(unsigned), (*retain)(void **, int), (*set)(void *);
    f = dlsym(cuda, "cuInit"); /* the stand-in needs none of this */
    if (f == NULL)
        return;
    FIND(instantiate, "cuGraphInstantiateWithFlags");
    void *context;
    FIND(init, "cuInit");
    MUST(init(0));
    FIND(retain, "cuDevicePrimaryCtxRetain");
    FIND(set, "cuCtxSetCurrent");
    MUST(retain(&context, 0));
    MUST(set(context));
}

static unsigned char byte_of(int from, int to, uint64_t call, uint64_t i) {
    return (unsigned char)((i * 131 + (i >> 8) * 17 + call * 29 + (uint64_t)from * 7 +
                            (uint64_t)to * 3) &
                           255);
}

typedef struct buffer {
    uintptr_t device;
    unsigned char *host;
} buffer;

static buffer send_buffer, recv_buffer;

static void buffers(void) {
    buffer *const all[] = {&send_buffer, &recv_buffer};
    for (int i = 0; i < 2; i++) {
        if (all[i]->host == NULL)
            all[i]->host = malloc((size_t)RANKS * MOST);
        MUST(mem_alloc(&all[i]->device, (size_t)RANKS * MOST));
    }
}

static void fill(int to, uint64_t call, uint64_t bytes) {
    unsigned char *at = send_buffer.host + (size_t)to * MOST;
    for (uint64_t i = 0; i < bytes; i++)
        at[i] = byte_of(rank, to, call, i);
    if (bytes > 0)
        MUST(copy(send_buffer.device + (size_t)to * MOST, (uintptr_t)at, bytes));
    MUST(sync_stream(NULL)); /* a copy from the host returns before it has arrived */
}

static void check(int from, uint64_t call, uint64_t bytes) {
    unsigned char *at = recv_buffer.host + (size_t)from * MOST;
    if (bytes > 0)
        MUST(copy((uintptr_t)at, recv_buffer.device + (size_t)from * MOST, bytes));
    for (uint64_t i = 0; i < bytes; i++)
        if (at[i] != byte_of(from, rank, call, i))
            fail("wrong byte", (long)i, (long)call);
}

static ncclComm_t world(void) {
    ncclUniqueId id;
    ncclComm_t c;
    memset(&id, 0, sizeof id);
    snprintf(id.internal, sizeof id.internal, "%s", getenv("UNIQUE"));
    MUST(ncclCommInitRank(&c, ranks, id, rank));
    return c;
}

static uint64_t random_size(void) {
    const uint64_t kind = next(5);
    if (kind == 0)
        return 0;
    return kind == 1 ? next(4096) : 1 + next(MOST - 1);
}

/* One exchange of random sizes: grouped, nested, or ncclAlltoAll. */
static void exchange(ncclComm_t c, cudaStream_t s, uint64_t call) {
    uint64_t size[RANKS][RANKS]; /* [from][to] */
    const uint64_t kind = next(6), even = random_size() / 4 * 4;
    int n = 0, me = 0;
    MUST(ncclCommCount(c, &n));
    MUST(ncclCommUserRank(c, &me));
    for (int a = 0; a < n; a++)
        for (int b = 0; b < n; b++)
            size[a][b] = kind < 2 ? even : random_size();
    for (int p = 0; p < n; p++)
        fill(p, call, size[me][p]);
    if (kind == 0) { /* pieces lie one behind the other there */
        for (int p = 0; p < n && even > 0; p++)
            MUST(copy(send_buffer.device + (size_t)p * even,
                      (uintptr_t)send_buffer.host + (size_t)p * MOST, even));
        MUST(sync_stream(NULL));
        MUST(ncclAlltoAll((void *)send_buffer.device, (void *)recv_buffer.device, even / 4, 7, c,
                          s));
        MUST(sync_stream(s));
        for (int p = n - 1; p >= 0 && even > 0; p--) {
            unsigned char *at = recv_buffer.host;
            MUST(copy((uintptr_t)at, recv_buffer.device + (size_t)p * even, even));
            for (uint64_t i = 0; i < even; i++)
                if (at[i] != byte_of(p, rank, call, i))
                    fail("wrong byte of ncclAlltoAll", (long)i, (long)call);
        }
        return;
    }
    MUST(ncclGroupStart());
    if (kind == 3)
        MUST(ncclGroupStart());
    for (int p = 0; p < n; p++) {
        MUST(ncclSend((void *)(send_buffer.device + (size_t)p * MOST), size[me][p], 0, p, c, s));
        MUST(ncclRecv((void *)(recv_buffer.device + (size_t)p * MOST), size[p][me], 0, p, c, s));
    }
    if (kind == 3)
        MUST(ncclGroupEnd());
    if (kind == 4)
        MUST(ncclAllReduce((void *)send_buffer.device, (void *)send_buffer.device, 4, 7, 0, c, s));
    MUST(ncclGroupEnd());
    MUST(sync_stream(s));
    for (int p = 0; p < n; p++)
        check(p, call, size[p][me]);
}

static void random_calls(ncclComm_t c, cudaStream_t s, uint64_t count) {
    for (uint64_t call = 0; call < count; call++)
        exchange(c, s, call);
}

/* A graph of one exchange, captured by rank r before call 2 + r; replayed from then on. */
static void graphs(ncclComm_t c, cudaStream_t s, uint64_t count) {
    const uint64_t bytes = 300000;
    void *graph = NULL;
    for (uint64_t call = 0; call < count; call++) {
        for (int p = 0; p < ranks; p++)
            fill(p, call, bytes);
        const int capture = call == 2 + (uint64_t)rank;
        if (capture)
            MUST(capture_begin(s, 1));
        if (graph == NULL || instantiate == NULL) { /* (the stand-in captures nothing of NCCL's) */
            MUST(ncclGroupStart());
            for (int k = 1; k < ranks; k++) {
                const int p = (rank + k) % ranks;
                MUST(ncclSend((void *)(send_buffer.device + (size_t)p * MOST), bytes, 1, p, c, s));
                MUST(ncclRecv((void *)(recv_buffer.device + (size_t)p * MOST), bytes, 1, p, c, s));
            }
            MUST(ncclGroupEnd());
        }
        if (capture)
            MUST(capture_end(s, &graph));
        if (capture && instantiate != NULL)
            MUST(instantiate(&graph, graph, 0));
        if (graph != NULL && instantiate != NULL)
            MUST(graph_launch(graph, s));
        MUST(sync_stream(s));
        for (int p = 0; p < ranks; p++)
            if (p != rank)
                check(p, call, bytes);
    }
}

/* Every rank sends before it receives, in groups of their own: NCCL has room for that. */
static void ahead(ncclComm_t c, cudaStream_t s, uint64_t count) {
    const int to = (rank + 1) % ranks, from = (rank + ranks - 1) % ranks;
    for (uint64_t call = 0; call < count; call++) {
        const uint64_t bytes = 100000 + next(100000);
        fill(to, call, bytes);
        MUST(ncclSend((void *)(send_buffer.device + (size_t)to * MOST), bytes, 1, to, c, s));
        if (call % 3 == 0)
            usleep(3000);
        MUST(ncclRecv((void *)(recv_buffer.device + (size_t)from * MOST), bytes, 1, from, c, s));
        MUST(sync_stream(s));
        check(from, call, bytes);
    }
}

/* The two ends of a message differ in its size: nothing behind what is received changes, and what
 * fits arrives where it is carried.  (Where it is NCCL's, its content is as NCCL leaves it.) */
static void mismatch(ncclComm_t c, cudaStream_t s, uint64_t count) {
    const int to = (rank + 1) % ranks, from = (rank + ranks - 1) % ranks;
    unsigned char *guard = recv_buffer.host;
    int (*fetched)(void), passed = 0;
    void *const f = dlsym(RTLD_DEFAULT, "fake_nccl_fetched");
    memcpy(&fetched, &f, sizeof f);
    for (uint64_t call = 0; call < count; call++) {
        const int before = fetched != NULL ? fetched() : 0;
        const uint64_t sent = 70000 + next(400000), taken = 70000 + next(400000);
        const uint64_t fits = sent < taken ? sent : taken;
        fill(to, call, sent);
        memset(guard, 0x5a, MOST);
        MUST(copy(recv_buffer.device + (size_t)from * MOST, (uintptr_t)guard, MOST));
        MUST(sync_stream(NULL));
        MUST(ncclGroupStart());
        MUST(ncclSend((void *)(send_buffer.device + (size_t)to * MOST), sent, 1, to, c, s));
        MUST(ncclRecv((void *)(recv_buffer.device + (size_t)from * MOST), taken, 1, from, c, s));
        MUST(ncclGroupEnd());
        MUST(sync_stream(s));
        if (fetched != NULL && fetched() == before)
            check(from, call, fits);
        else
            passed++;
        MUST(copy((uintptr_t)guard, recv_buffer.device + (size_t)from * MOST, MOST));
        for (uint64_t i = fits; i < MOST; i++)
            if (guard[i] != 0x5a)
                fail("written behind the message", (long)i, (long)call);
    }
    printf("rank %d: of %llu messages %d were NCCL's\n", rank, (unsigned long long)count, passed);
}

static void sleep_ms(void *ms) { usleep(1000 * (useconds_t)(uintptr_t)ms); }

/* Rank 0's CPU comes `ms` after the others now and then; all have `busy` ms of work before each. */
static void late(ncclComm_t c, cudaStream_t s, uint64_t count, unsigned ms, unsigned busy) {
    int (*host)(cudaStream_t, void (*)(void *), void *);
    *(void **)&host = dlsym(RTLD_DEFAULT, "cuLaunchHostFunc");
    for (uint64_t call = 0; call < count; call++) {
        if (rank == 0 && call % 3 == 2)
            usleep(1000 * ms);
        if (busy > 0)
            MUST(host(s, sleep_ms, (void *)(uintptr_t)busy));
        exchange(c, s, call);
    }
}

/* Exchanges of one communicator on two streams, of which one is held up at one rank: NCCL has them
 * one behind the other.  What is sent is written where it is held up, and what is received is
 * overwritten there, so whoever does not wait for that is found out. */
static void two_streams(ncclComm_t c, cudaStream_t s, uint64_t count) {
    const int other = 1 - rank;
    const uintptr_t slot = MOST / 4;
    unsigned char *const old = malloc(slot), *const at = malloc(slot);
    uintptr_t word, stale, fresh;
    cudaStream_t stream[2] = {s, NULL};
    MUST(stream_create(&stream[1], 1, 0));
    MUST(mem_alloc(&word, 4096));
    MUST(mem_alloc(&stale, slot));
    MUST(mem_alloc(&fresh, 8 * slot));
    memset(old, 0x5a, slot);
    MUST(copy(stale, (uintptr_t)old, slot));
    for (uint64_t call = 0; call < count; call++) {
        uint64_t bytes[8];
        const uint64_t held = next(4), n = 2 + next(7);
        for (uint64_t i = 0; i < n; i++) {
            bytes[i] = 1 + next(slot - 1);
            for (uint64_t k = 0; k < bytes[i]; k++)
                at[k] = byte_of(rank, other, 8 * call + i, k);
            MUST(copy(fresh + i * slot, (uintptr_t)at, bytes[i]));
        }
        MUST(sync_stream(NULL)); /* a copy from the host returns before it has arrived */
        if (held / 2 == (uint64_t)rank)
            MUST(wait_value(stream[held % 2], word, (uint32_t)call + 1, 0));
        for (uint64_t i = 0; i < n; i++) {
            cudaStream_t on = stream[(i + next(4) / 3) % 2];
            const uintptr_t out = send_buffer.device + i * slot, in = recv_buffer.device + i * slot;
            MUST(copy_on(out, fresh + i * slot, bytes[i], on));
            MUST(copy_on(in, stale, bytes[i], on));
            MUST(ncclGroupStart());
            MUST(ncclSend((void *)out, bytes[i], 1, other, c, on));
            MUST(ncclRecv((void *)in, bytes[i], 1, other, c, on));
            MUST(ncclGroupEnd());
        }
        usleep((useconds_t)next(3) * 700);
        MUST(write_value(NULL, word, (uint32_t)call + 1, 0));
        for (int i = 0; i < 2; i++)
            MUST(sync_stream(stream[i]));
        for (uint64_t i = 0; i < n; i++) {
            MUST(copy((uintptr_t)at, recv_buffer.device + i * slot, bytes[i]));
            for (uint64_t k = 0; k < bytes[i]; k++)
                if (at[k] != byte_of(other, rank, 8 * call + i, k))
                    fail("wrong byte", (long)k, (long)(8 * call + i));
        }
    }
    free(at);
    free(old);
}

/* A program that frees its memory and gets other memory at the same address. */
static void renew(ncclComm_t c, cudaStream_t s, uint64_t count) {
    for (uint64_t call = 0; call < count; call++) {
        exchange(c, s, call);
        if (call % 4 != 3 && renew_pieces != NULL && getenv("FAKE_CUDA_PIECES") != NULL)
            MUST(renew_pieces(recv_buffer.device, (int)(call % 3)));
        if (call % 4 == 3) {
            MUST(mem_free(send_buffer.device));
            MUST(mem_free(recv_buffer.device));
            buffers();
        }
        if (call % 16 == 15)
            usleep(150000); /* long enough for what is done when nothing else is */
    }
}

static int opened_now(void) {
    int n = 0;
    if (opened != NULL)
        MUST(opened(&n));
    return n;
}

/* PyTorch aborts between the start and the end of a group: what NCCL's kernels may still run on is
 * open until then. */
static void abort_in_group(ncclComm_t c) {
    const int before = opened_now();
    MUST(ncclGroupStart());
    MUST(ncclCommAbort(c));
    const int inside = opened_now();
    MUST(ncclGroupEnd());
    if (inside != before || opened_now() != 0)
        fail("closed inside the group, or not after it", inside, opened_now());
}

/* Rank 1's stream never arrives at the exchange; the abort of rank 0 ends the waits on its own. */
static void abort_one(ncclComm_t c, cudaStream_t s, bool grouped) {
    uintptr_t word;
    const int other = 1 - rank;
    exchange(c, s, 0); /* (the first is NCCL's) */
    MUST(mem_alloc(&word, 4096));
    if (rank == 1)
        MUST(wait_value(s, word, 1, 0));
    MUST(ncclGroupStart());
    MUST(ncclSend((void *)send_buffer.device, 500000, 0, other, c, s));
    MUST(ncclRecv((void *)recv_buffer.device, 500000, 0, other, c, s));
    MUST(ncclGroupEnd());
    if (rank == 1) {
        sleep(2);
        MUST(write_value(NULL, word, 1, 0));
    }
    if (grouped)
        abort_in_group(c);
    else
        MUST(ncclCommAbort(c));
    MUST(sync_stream(s));
}

/* Splits, one of them without a colour, and a communicator of one. */
static void splits(ncclComm_t c, cudaStream_t s, uint64_t count) {
    ncclComm_t same, half, none;
    MUST(ncclCommSplit(c, 0, rank, &same, NULL));
    MUST(ncclCommSplit(c, rank == 0 ? -1 : 1, 0, &none, NULL));
    MUST(ncclCommSplit(c, rank, 0, &half, NULL));
    for (uint64_t call = 0; call < count; call++)
        exchange(call % 2 ? same : c, s, call);
    MUST(ncclCommDestroy(same));
    MUST(ncclCommDestroy(half));
    if (rank != 0)
        MUST(ncclCommDestroy(none));
    MUST(ncclCommSplit(c, 0, rank, &same, NULL));
    random_calls(same, s, count);
    MUST(ncclCommDestroy(same));
}

/* What every call returns, wrong ones too: for comparing runs with and without us. */
static void codes(ncclComm_t c, cudaStream_t s) {
    void *const out = (void *)send_buffer.device, *const in = (void *)recv_buffer.device;
    ncclComm_t other = NULL;
    ncclUniqueId id;
    ncclConfig_t config = {.size = sizeof config, .magic = 0xcafebeef, .version = 22809};
    int list[16], n = 0;
    list[n++] = ncclGroupEnd(); /* without a start */
    list[n++] = ncclSend(out, 4, 0, 99, c, s);
    list[n++] = ncclSend(out, 4, 0, 0, NULL, s);
    list[n++] = ncclGroupStart();
    list[n++] = ncclRecv(in, 4, 0, -1, c, s);
    list[n++] = ncclGroupEnd();
    list[n++] = ncclGroupStart();
    list[n++] = ncclGroupStart();
    list[n++] = ncclAllReduce(out, in, 4, 7, 0, c, s);
    list[n++] = ncclGroupEnd();
    list[n++] = ncclGroupEnd();
    list[n++] = ncclCommInitAll(&other, 1, NULL);
    memset(&id, 0, sizeof id);
    snprintf(id.internal, sizeof id.internal, "%.50s-n", getenv("UNIQUE"));
    list[n++] = ncclCommInitRankConfig(&other, ranks, id, rank, &config);
    for (int i = 0; i < n; i++)
        printf("%d ", list[i]);
    printf("other %d\n", other != NULL);
    if (other == NULL)
        return;
    random_calls(other, s, 10); /* not blocking: NCCL's alone */
    printf("%d\n", ncclCommDestroy(other));
}

/* Large ones to oneself, beside one of the other's, from and to any address. */
static void selves(ncclComm_t c, cudaStream_t s, uint64_t count) {
    const int other = 1 - rank;
    unsigned char *const at = recv_buffer.host;
    for (uint64_t call = 0; call < count; call++) {
        const uint64_t bytes = next(2) * (MOST / 2) + MOST / 2 + next(2 * MOST);
        const uint64_t from = next(2) * next(64), to = next(2) * next(64);
        for (uint64_t i = 0; i < bytes; i++)
            send_buffer.host[i] = byte_of(rank, rank, call, i);
        memset(at, 0x5a, 4 * MOST);
        MUST(copy(recv_buffer.device, (uintptr_t)at, 4 * MOST));
        MUST(copy(send_buffer.device + from, (uintptr_t)send_buffer.host, bytes));
        MUST(sync_stream(NULL));
        MUST(ncclGroupStart());
        for (int p = 0; p < ranks; p++) {
            const uintptr_t out = p == rank ? from : 6 * MOST, in = p == rank ? 64 + to : 6 * MOST;
            const uint64_t n = p == rank ? bytes : 100000;
            MUST(ncclSend((void *)(send_buffer.device + out), n, 0, p, c, s));
            MUST(ncclRecv((void *)(recv_buffer.device + in), n, 0, p, c, s));
        }
        MUST(ncclGroupEnd());
        MUST(sync_stream(s));
        MUST(copy((uintptr_t)at, recv_buffer.device, 4 * MOST));
        for (uint64_t i = 0; i < 4 * MOST; i++) {
            const bool inside = i >= 64 + to && i < 64 + to + bytes;
            if (at[i] != (inside ? byte_of(rank, rank, call, i - 64 - to) : 0x5a))
                fail("wrong byte of one's own", (long)i, (long)other);
        }
    }
}

#define LATE(name, parameters)                                                                     \
    ncclResult_t(*name) parameters;                                                                \
    f = symbol(RTLD_DEFAULT, #name);                                                               \
    memcpy(&name, &f, sizeof f)

/* What carries nothing: every other collective, and communicators made and ended in the other ways.
 */
static void others(ncclComm_t c, cudaStream_t s) {
    void *const out = (void *)send_buffer.device, *const in = (void *)recv_buffer.device, *f;
    LATE(ncclCommInitRankScalable, (ncclComm_t *, int, int, int, ncclUniqueId *, ncclConfig_t *));
    LATE(ncclCommShrink, (ncclComm_t, int *, int, ncclComm_t *, ncclConfig_t *, int));
    LATE(ncclCommRevoke, (ncclComm_t, int));
    LATE(ncclGroupSimulateEnd, (ncclSimInfo_t *));
    ncclComm_t more, few = NULL, one;
    ncclUniqueId id;
    int list[32], n = 0, last = ranks - 1;
    list[n++] = ncclAllGather(out, in, 4, 7, c, s);
    list[n++] = ncclReduceScatter(out, in, 4, 7, 0, c, s);
    list[n++] = ncclBroadcast(out, in, 4, 7, 0, c, s);
    list[n++] = ncclReduce(out, in, 4, 7, 0, 0, c, s);
    list[n++] = ncclGroupStart();
    list[n++] = ncclSend(out, 300000, 0, rank, c, s);
    list[n++] = ncclGroupSimulateEnd(NULL);
    memset(&id, 0, sizeof id);
    snprintf(id.internal, sizeof id.internal, "%.50s-scalable", getenv("UNIQUE"));
    list[n++] = ncclCommInitRankScalable(&more, ranks, rank, 0, &id, NULL);
    list[n++] = ncclCommInitRankScalable(&more, ranks, rank, 1, &id, NULL);
    random_calls(more, s, 6);
    if (rank != last)
        list[n++] = ncclCommShrink(more, &last, 1, &few, NULL, 0);
    for (uint64_t call = 0; rank != last && call < 6; call++)
        exchange(few, s, call);
    list[n++] = few != NULL ? ncclCommDestroy(few) : 0;
    list[n++] = ncclCommRevoke(more, 0);
    list[n++] = rank != last ? ncclCommShrink(more, &last, 1, &few, NULL, 1) : 0;
    if (rank != last)
        exchange(few, s, 6); /* (nobody ends what others have not seen yet) */
    list[n++] = rank != last ? ncclCommAbort(few) : 0;
    list[n++] = ncclCommAbort(more);
    list[n++] = ncclCommInitAll(&one, 1, NULL);
    list[n++] = ncclGroupStart();
    list[n++] = ncclSend(out, 70000, 0, 0, one, s);
    list[n++] = ncclRecv(in, 70000, 0, 0, one, s);
    list[n++] = ncclGroupEnd();
    list[n++] = ncclCommDestroy(one);
    for (int i = 0; i < n; i++)
        printf("%d ", list[i]);
    printf("of %d\n", n);
}

/* A child has nothing to do with the parent's communicators. */
static void forks(ncclComm_t c, cudaStream_t s, uint64_t count) {
    for (uint64_t call = 0; call < count; call++) {
        exchange(c, s, call);
        pid_t child = fork();
        int status = 0;
        if (child == 0)
            exit(0); /* with exit handlers */
        if (waitpid(child, &status, 0) != child || status != 0)
            fail("child", status, 0);
    }
}

#include "intercept_life.h"

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    const uint64_t count = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    rank = (int)strtol(getenv("RANK"), NULL, 10);
    ranks = (int)strtol(getenv("WORLD_SIZE"), NULL, 10);
    cudaStream_t s;
    open_cuda();
    buffers();
    MUST(stream_create(&s, 1, 0));
    ncclComm_t c = world();
    exhaust();
    if (strcmp(what, "random") == 0)
        random_calls(c, s, count);
    else if (strcmp(what, "heirs") == 0)
        heirs(c, s, count);
    else if (strcmp(what, "inherited") == 0)
        inherited(c, s, count);
    else if (strcmp(what, "default") == 0)
        random_calls(c, NULL, count);
    else if (strcmp(what, "graph") == 0)
        graphs(c, s, count);
    else if (strcmp(what, "split") == 0)
        splits(c, s, count);
    else if (strcmp(what, "abort") == 0)
        abort_one(c, s, count > 1);
    else if (strcmp(what, "ahead") == 0)
        ahead(c, s, count);
    else if (strcmp(what, "mismatch") == 0)
        mismatch(c, s, count);
    else if (strcmp(what, "late") == 0)
        late(c, s, count, 30, 0);
    else if (strcmp(what, "busy") == 0)
        late(c, s, count, 5, 60);
    else if (strcmp(what, "streams") == 0)
        two_streams(c, s, count);
    else if (strcmp(what, "renew") == 0)
        renew(c, s, count);
    else if (strcmp(what, "codes") == 0)
        codes(c, s);
    else if (strcmp(what, "fork") == 0)
        forks(c, s, count);
    else if (strcmp(what, "self") == 0)
        selves(c, s, count);
    else if (strcmp(what, "others") == 0)
        others(c, s);
    else if (strcmp(what, "loaders") == 0)
        loaders(c, s, count);
    else if (strcmp(what, "crash") == 0)
        crash(c, s, count > 1);
    else if (strcmp(what, "cycles") == 0)
        cycles(c, s, count);
    else
        fail(what, argc, 0);
    if (strcmp(what, "abort") != 0 && strcmp(what, "loaders") != 0 &&
        !(strcmp(what, "crash") == 0 && count > 1))
        MUST(ncclCommDestroy(c));
    printf("rank %d: ok %llu\n", rank, (unsigned long long)count);
    return 0;
}
