/* SPDX-License-Identifier: Apache-2.0
 *
 * flex_side.c - random routings and rows, windows, and the kernels' calls.
 */
#include "flex_side.h"

pthread_barrier_t together;
side sides[RANKS];
int devices;

/* ---- making ---- */

static void routing_make(side *s) {
    const shape *sh = s->sh;
    const int t = sh->tokens[s->rank], k = sh->top_k;
    s->routing = malloc(((size_t)t * (size_t)k + 1) * sizeof *s->routing);
    s->router = malloc(((size_t)t * (size_t)k + 1) * sizeof *s->router);
    for (int i = 0; i < t; i++)
        for (int j = 0; j < k; j++) {
            const uint64_t at = ((uint64_t)i * 64 + (uint64_t)j) * 64;
            const int64_t *mine = s->routing + (size_t)i * (size_t)k;
            int64_t e = -1;
            for (uint64_t n = 0; n < 64; n++) { /* distinct while that is possible */
                e = (int64_t)(test_random(sh->seed + (uint64_t)s->rank, at + n) %
                              (uint64_t)sh->experts);
                int same = 0;
                for (int q = 0; q < j; q++)
                    same += mine[q] == e;
                if (same == 0)
                    break;
            }
            if (sh->seed % 2 == 1 && test_random(sh->seed + 77, at) % 16 == 0)
                e = -1; /* a slot that is not used */
            s->routing[(size_t)i * (size_t)k + (size_t)j] = e;
            s->router[(size_t)i * (size_t)k + (size_t)j] = test_uniform(sh->seed + 5, at);
        }
}

/* Random elements; every position another one of a pool. */
static void *random_rows(uint64_t n, uint64_t seed, epo_dtype type) {
    enum { POOL = 1 << 20 };
    const size_t size = test_size(type);
    char *pool = malloc((size_t)POOL * 2 * size), *p = malloc(n * size + 16);
    for (uint64_t i = 0; i < 2 * POOL; i++)
        test_store(pool, i, type, test_uniform(seed, i));
    for (uint64_t i = 0; i < n; i += POOL / 2 + 1) { /* overlapping, shifted pieces */
        const uint64_t left = n - i < POOL / 2 + 1 ? n - i : POOL / 2 + 1;
        memcpy(p + i * size, pool + test_random(seed, i) % POOL * size, left * size);
    }
    free(pool);
    return p;
}

uint64_t most_rows(const shape *sh) {
    uint64_t rows = 0;
    for (int r = 0; r < sh->ranks; r++)
        rows += (uint64_t)sh->tokens[r] * (uint64_t)sh->top_k;
    return rows + (uint64_t)(sh->experts / sh->ranks) * (uint64_t)(sh->align - 1);
}

static void plan_make(side *s) {
    const shape *sh = s->sh;
    gpu_flex_plan *p = &s->plan;
    const uint64_t t = (uint64_t)sh->tokens[s->rank], slots = t * (uint64_t)sh->top_k;
    const int local = sh->experts / sh->ranks;
    memset(p, 0, sizeof *p);
    p->routes = (epo_routes){.experts = s->experts,
                             .tokens = sh->tokens[s->rank],
                             .top_k = sh->top_k,
                             .experts_all = sh->experts,
                             .ranks = sh->ranks};
    p->weights = s->weights;
    p->rank = s->rank;
    p->chunks = 1;
    p->stride = sh->most;
    p->block_tokens = gpu_flex_block_tokens(sh->tokens[s->rank]);
    p->width = sh->ranks < sh->top_k ? sh->ranks : sh->top_k;
    p->copy = test_device(slots * 4, 0xee);
    p->place = test_device(slots * 4, 0xee);
    p->base = test_device(130 * (uint64_t)gpu_flex_columns(p) * 4, 0xee);
    p->to = test_device(t * (uint64_t)p->width * 4, 0xee);
    p->send = test_device(t * (uint64_t)p->width * 4, 0xee);
    p->bad = test_device(8, 0);
    p->token = test_device((uint64_t)sh->ranks * (uint64_t)sh->most * 4, 0xee);
    p->sum = test_device(t * (uint64_t)p->width * 4, 0xee);
    p->slot_weight = test_device(slots * 4, 0xee);
    for (int d = 0; d < sh->ranks; d++) {
        p->peer_meta[d] =
            sides[d].window + s->f.at.meta +
            (uint64_t)s->rank * (uint64_t)sh->most * (uint64_t)epo_flex_meta_words(sh->top_k) * 4;
        p->peer_counts[d] =
            sides[d].window + s->f.at.counts + (uint64_t)s->rank * (uint64_t)(local + 2) * 4;
    }
}

void side_make(side *s, int rank, const shape *sh) {
    const uint64_t row = (uint64_t)sh->hidden * test_size(sh->type);
    const int local = sh->experts / sh->ranks, t = sh->tokens[rank];
    const uint64_t slots = (uint64_t)t * (uint64_t)sh->top_k, rows = most_rows(sh);
    memset(s, 0, sizeof *s);
    s->rank = rank;
    s->sh = sh;
    s->device = rank % devices;
    TEST_CUDA(cudaSetDevice(s->device));
    for (int d = 0; d < devices; d++)
        if (d != s->device && cudaDeviceEnablePeerAccess(d, 0) != cudaSuccess)
            (void)cudaGetLastError();
    TEST_CUDA(cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking));
    TEST_CUDA(cudaEventCreate(&s->start));
    TEST_CUDA(cudaEventCreate(&s->end));
    s->f.at = gpu_flex_lay_out(sh->ranks, local, sh->top_k, sh->most, (uint32_t)row);
    s->window = test_device(s->f.at.bytes, 0xee);
    TEST_CUDA(cudaMemset(s->window, 0, s->f.at.counts)); /* the flags */
    s->far = test_device(COPY, 0);
    routing_make(s);
    s->experts = test_upload(s->routing, slots * 8);
    s->weights = test_upload(s->router, slots * 4);
    void *x =
        random_rows((uint64_t)t * (uint64_t)sh->hidden, sh->seed + 100 + (uint64_t)rank, sh->type);
    void *z = random_rows(rows * (uint64_t)sh->hidden, sh->seed + 200 + (uint64_t)rank, sh->type);
    s->x = test_upload(x, (uint64_t)t * row);
    s->z = test_device(rows * row > COPY ? rows * row : COPY, 0);
    TEST_CUDA(cudaMemcpy(s->z, z, rows * row, cudaMemcpyHostToDevice));
    free(x);
    free(z);
    s->rows = test_device(rows * row, 0xff);
    s->y = test_device((uint64_t)t * row, 0xff);
    TEST_CUDA(cudaHostAlloc((void **)&s->late, 64, cudaHostAllocMapped | cudaHostAllocPortable));
    memset(s->late, 0, 64);
    s->f.rank = rank;
    s->f.ranks = sh->ranks;
    s->f.local = local;
    s->f.top_k = sh->top_k;
    s->f.width = sh->ranks < sh->top_k ? sh->ranks : sh->top_k;
    s->f.tokens = t;
    s->f.max_tokens = sh->most;
    s->f.align = sh->align;
    s->f.row_bytes = s->f.wire_bytes = (uint32_t)row;
    s->f.type = sh->type;
    s->f.blocks = sh->blocks;
    s->f.limit_ns = UINT64_C(5000000000);
    TEST_CUDA(cudaHostGetDevicePointer((void **)&s->f.late, s->late, 0));
    s->f.fan =
        test_device((uint64_t)sh->ranks * (uint64_t)sh->most * (uint64_t)sh->top_k * 4, 0xee);
    s->f.rows_of = test_device((uint64_t)sh->ranks * 4, 0);
    s->f.first = test_device((uint64_t)(local + 1) * 4, 0);
    s->f.count = test_device((uint64_t)local * 4, 0);
    s->f.weight = test_device(rows * 4, 0xff);
    s->f.capacity = (int32_t)rows;
    s->f.epoch = 1;
}

void side_meet(side *s) {
    for (int d = 0; d < s->sh->ranks; d++)
        s->f.peer[d] = sides[d].window;
    plan_make(s);
    s->f.sum = s->plan.sum;
    s->f.token = s->plan.token;
}

void side_free(side *s) {
    void *all[] = {s->window,     s->x,
                   s->rows,       s->z,
                   s->y,          s->experts,
                   s->weights,    s->far,
                   s->f.fan,      s->f.rows_of,
                   s->f.first,    s->f.count,
                   s->f.weight,   s->plan.copy,
                   s->plan.place, s->plan.base,
                   s->plan.to,    s->plan.send,
                   s->plan.bad,   s->plan.token,
                   s->plan.sum,   s->plan.slot_weight};
    TEST_CUDA(cudaSetDevice(s->device));
    TEST_CUDA(cudaDeviceSynchronize());
    pthread_barrier_wait(&together);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        TEST_CUDA(cudaFree(all[i]));
    TEST_CUDA(cudaFreeHost(s->late));
    TEST_CUDA(cudaStreamDestroy(s->stream));
    free(s->routing);
    free(s->router);
}

void *fetch(const void *device, uint64_t bytes) {
    void *p = malloc(bytes + 16);
    TEST_CUDA(cudaMemcpy(p, device, bytes, cudaMemcpyDeviceToHost));
    return p;
}

/* ---- the calls ---- */

void issue(side *s, step what) {
    const gpu_flex *f = &s->f;
    switch (what) {
    case PLAN_PUSH:
        TEST_CUDA(gpu_flex_count(s->stream, &s->plan));
        TEST_CUDA(gpu_flex_place(s->stream, &s->plan));
        TEST_CUDA(gpu_flex_push(s->stream, f, s->x, true));
        TEST_CUDA(gpu_flex_arrived(s->stream, f));
        break;
    case PUSH:
    case PUSH_ALL:
        TEST_CUDA(gpu_flex_push(s->stream, f, s->x, what == PUSH_ALL));
        TEST_CUDA(gpu_flex_arrived(s->stream, f));
        break;
    case PUSH_EXPAND:
        TEST_CUDA(gpu_flex_push(s->stream, f, s->x, false));
        TEST_CUDA(gpu_flex_expand(s->stream, f, s->x, s->rows));
        break;
    case FP8:
    case FP8_PUSH: {
        gpu_flex wire = *f;
        wire.wire_bytes = gpu_flex_wire8((uint32_t)s->sh->hidden);
        TEST_CUDA(gpu_flex_push8(s->stream, &wire, s->x));
        if (what == FP8)
            TEST_CUDA(gpu_flex_expand8(s->stream, &wire, s->rows));
        else
            TEST_CUDA(gpu_flex_arrived(s->stream, f));
        break;
    }
    case EXPAND: TEST_CUDA(gpu_flex_expand(s->stream, f, s->x, s->rows)); break;
    case DISPATCH: TEST_CUDA(gpu_flex_dispatch(s->stream, f, s->x, s->rows)); break;
    case COMBINE: TEST_CUDA(gpu_flex_combine(s->stream, f, s->z, s->y)); break;
    case COPY_STORES: {
        const gpu_segment seg = {sides[(s->rank + 1) % s->sh->ranks].far, s->z, NULL, COPY / 4096};
        TEST_CUDA(gpu_kernel_segments(s->stream, f->blocks, &seg, 1, 4096, NULL));
        break;
    }
    case COPY_ENGINE:
        TEST_CUDA(cudaMemcpyAsync(sides[(s->rank + 1) % s->sh->ranks].far, s->z, COPY,
                                  cudaMemcpyDeviceToDevice, s->stream));
        break;
    case STORES_ROWS: {
        const int d = (s->rank + 1) % s->sh->ranks;
        const gpu_segment seg = {sides[d].window + f->at.rows +
                                     (uint64_t)s->rank * (uint64_t)f->max_tokens * f->row_bytes,
                                 s->x, s->plan.token + (size_t)d * (size_t)f->max_tokens,
                                 (uint64_t)f->tokens}; /* nearly every token has one */
        TEST_CUDA(gpu_kernel_segments(s->stream, f->blocks, &seg, 1, f->row_bytes, NULL));
        break;
    }
    case COPY_BULK: {
        const gpu_segment seg = {sides[(s->rank + 1) % s->sh->ranks].far, s->z, NULL, COPY / 4096};
        TEST_CUDA(gpu_flex_copy_segments(s->stream, f->blocks, &seg, 1, 4096));
        break;
    }
    case SUMS: {
        gpu_segment seg[RANKS];
        int n = 0;
        for (int r = 0; r < f->ranks; r++)
            if (r != s->rank)
                seg[n++] = (gpu_segment){
                    sides[r].window + f->at.back +
                        (uint64_t)s->rank * (uint64_t)f->max_tokens * f->row_bytes,
                    s->z, f->fan + (size_t)r * (size_t)f->max_tokens * (size_t)f->top_k,
                    (uint64_t)s->arrived[r]};
        TEST_CUDA(gpu_flex_sum_segments(s->stream, f->blocks, seg, n, f->top_k, f->row_bytes,
                                        f->type, NULL));
        break;
    }
    default: break;
    }
}

void flags_zero(side *s) {
    TEST_CUDA(cudaSetDevice(s->device));
    TEST_CUDA(cudaStreamSynchronize(s->stream));
    pthread_barrier_wait(&together);
    TEST_CUDA(cudaMemset(s->window, 0, s->f.at.counts));
    TEST_CUDA(cudaDeviceSynchronize());
    pthread_barrier_wait(&together);
    s->f.epoch = 1;
}

/* A plan and its maps, one whole way, for what comes after. */
void prepare(side *s) {
    flags_zero(s);
    TEST_CUDA(gpu_flex_count(s->stream, &s->plan));
    TEST_CUDA(gpu_flex_place(s->stream, &s->plan));
    TEST_CUDA(gpu_flex_push(s->stream, &s->f, s->x, true));
    TEST_CUDA(gpu_flex_expand(s->stream, &s->f, NULL, s->rows));
    TEST_CUDA(cudaMemcpyAsync(s->arrived, s->f.rows_of, (size_t)s->f.ranks * 4,
                              cudaMemcpyDeviceToHost, s->stream));
    TEST_CUDA(cudaStreamSynchronize(s->stream));
    pthread_barrier_wait(&together);
}
