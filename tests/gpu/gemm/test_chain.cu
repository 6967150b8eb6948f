/* SPDX-License-Identifier: Apache-2.0
 *
 * test_chain.cu - chains of the experts' two products against the same products one by
 * one, bit for bit: random shapes, parts, SM budgets, launches that join, rows that
 * arrive late and in any order, rows taken away the moment their part's word says so.
 *
 *   test_chain [--cases N] [--seed S] [--only I] [--cluster 1|2] [--time 1]
 *
 * --time: workload Q (64 experts, H 2048, F 768, 512 rows on average), chains of 1 to 8
 * parts beside the products in one piece and in pieces; medians over 15 turns.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/kernels.h"
#include "chain_pass.cuh"

/* Uploads the layout; fills inputs, poison between the experts. */
static void inputs_make(pass *p, uint32_t seed) {
    int *owner = (int *)malloc(p->rows * 4 + 4), *part = (int *)malloc(p->rows * 4 + 4);
    for (uint64_t r = 0; r < p->rows; r++) {
        owner[r] = part[r] = -1;
    }
    for (int i = 0; i < p->parts; i++) {
        for (int e = p->cut[i]; e < p->cut[i + 1]; e++) {
            for (uint64_t r = 0; r < p->count[e]; r++) {
                owner[p->first[e] + r] = e;
                part[p->first[e] + r] = i;
            }
        }
    }
    CHECK(cudaMemcpy(p->owner, owner, p->rows * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(p->part_of, part, p->rows * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(p->op_first, p->first, p->experts * 8, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(p->op_count, p->count, p->experts * 8, cudaMemcpyHostToDevice));
    free(owner);
    free(part);
    uint64_t each = (uint64_t)p->hidden * p->ffn;
    ref::fill<<<kBlocks, 256>>>(p->w1, p->type, p->experts, 2 * each, NULL, seed + 1);
    ref::fill<<<kBlocks, 256>>>(p->w2, p->type, p->experts, each, NULL, seed + 2);
    if (p->rows > 0) {
        ref::fill<<<kBlocks, 256>>>(p->x, p->type, p->rows, p->hidden, p->owner, seed);
        ref::fill<<<kBlocks, 256>>>(p->weight, EPO_F32, p->rows, 1, NULL, seed + 3);
    }
}

/* Outputs of run `i` become poison; backward h is what forward left. */
static void outputs_make(pass *p, int i, uint32_t seed) {
    CHECK(cudaMemset(p->a[i], 0xff, p->rows * act_bytes(p)));
    CHECK(cudaMemset(p->y[i], 0xff, p->rows * row_bytes(p)));
    CHECK(cudaMemset(p->dweight[i], 0xff, p->rows * 4));
    if (!p->back) {
        CHECK(cudaMemset(p->h[i], 0xff, p->rows * 2 * act_bytes(p)));
    } else if (p->rows > 0) {
        ref::fill<<<kBlocks, 256>>>(p->h[i], p->type, p->rows, 2 * p->ffn, p->owner, seed + 4);
    }
    CHECK(cudaGetLastError());
}

static epo_gg product(const pass *p, bool second, int i) {
    epo_gg g = EPO_GG_INIT;
    bool w1 = p->back == second;
    g.kind = p->back ? EPO_GG_DGRAD : EPO_GG_FORWARD;
    g.fuse = !p->back && !second ? EPO_GG_SWIGLU : EPO_GG_PLAIN;
    g.type = g.c_type = p->type;
    g.n = w1 ? 2 * p->ffn : p->hidden;
    g.k = w1 ? p->hidden : p->ffn;
    g.experts = p->experts;
    g.first = p->cut[0];
    g.count = p->cut[p->parts] - p->cut[0];
    g.rows = p->rows;
    g.row_first = p->op_first;
    g.row_count = p->op_count;
    g.a = !second ? p->x : (p->back ? p->h[i] : p->a[i]);
    g.b = w1 ? p->w1 : p->w2;
    g.c = second ? p->y[i] : p->a[i];
    g.row_weight = !p->back && !second ? p->weight : NULL;
    g.h = !p->back && !second ? p->h[i] : NULL;
    g.path = EPO_GG_SM90;
    g.cluster = p->cluster;
    g.error = p->error;
    g.spin_ns = p->spin;
    g.workspace = p->ws;
    g.workspace_bytes = p->ws_bytes;
    return g;
}

static epo_gg_chain chain_of(const pass *p, int i) {
    epo_gg_chain c = EPO_GG_CHAIN_INIT;
    c.first = product(p, false, i);
    c.second = product(p, true, i);
    if (p->back) {
        c.h = p->from != NULL ? p->from : p->h[i];
        c.dh = p->h[i];
        c.row_weight = p->weight;
        c.row_dweight = p->dweight[i];
    }
    c.parts = p->parts;
    for (int k = 0; k < p->parts; k++) {
        c.part[k].first = p->cut[k];
        c.part[k].count = p->cut[k + 1] - p->cut[k];
        c.part[k].done = p->done + k;
        c.part[k].done_value = p->epoch;
    }
    c.timeout_ns = 5000000000ull;
    c.workspace = p->ws;
    c.workspace_bytes = p->ws_bytes;
    return c;
}

/* The same, product by product, in pieces of experts. */
static void run_apart(const pass *p, int i, int pieces, cudaStream_t stream) {
    int first = p->cut[0], all = p->cut[p->parts] - first;
    for (int k = 0; k < pieces; k++) {
        epo_gg a = product(p, false, i), b = product(p, true, i);
        a.first = b.first = first + all * k / pieces;
        a.count = b.count = first + all * (k + 1) / pieces - a.first;
        if (a.count == 0) {
            continue;
        }
        MUST(epo_gg_launch(&a, stream));
        if (p->back) {
            int last = a.first + a.count - 1;
            uint64_t row = p->first[a.first], end = p->first[last] + p->count[last];
            const void *h = p->from != NULL ? p->from : p->h[i];
            epo_swiglu s = {h,   p->weight, p->a[i], p->a[i], p->h[i], p->dweight[i],
                            row, end - row, p->ffn,  p->type};
            CHECK(gpu_kernel_swiglu(stream, &s));
        }
        MUST(epo_gg_launch(&b, stream));
    }
}

/* ---- rows that come late, rows that are taken at once ---- */

__global__ void arrive(pass p, int words, uint64_t epoch, const int *order, uint32_t seed) {
    for (int i = 0; i < p.parts; i++) {
        for (uint64_t x = threadIdx.x; x < p.rows * p.hidden; x += blockDim.x) {
            if (p.part_of[x / p.hidden] == order[i]) {
                ref::put(p.x, p.type, x, ref::draw(seed, x));
            }
        }
        __threadfence_system();
        __syncthreads();
        if ((int)threadIdx.x < words) {
            *(volatile uint64_t *)&p.flags[order[i] * 4 + threadIdx.x] = epoch;
        }
        __syncthreads();
    }
}
/* Copies a part's rows as soon as its word allows. */
__global__ void take(pass p, const uint64_t *done, uint64_t value, void *y) {
    for (int i = 0; i < p.parts; i++) {
        if (threadIdx.x == 0) {
            uint64_t v = 0;
            while (v < value) {
                asm volatile("ld.acquire.sys.global.u64 %0, [%1];"
                             : "=l"(v)
                             : "l"(done + i)
                             : "memory");
            }
        }
        __syncthreads();
        for (uint64_t x = threadIdx.x; x < p.rows * p.hidden / 2; x += blockDim.x) {
            if (p.part_of[x * 2 / p.hidden] == i) {
                ((uint32_t *)p.taken)[x] = ((const volatile uint32_t *)y)[x];
            }
        }
        for (uint64_t x = threadIdx.x; x < p.rows; x += blockDim.x) {
            if (p.part_of[x] == i) {
                p.taken_dweight[x] = *(const volatile float *)&p.dweight[1][x];
            }
        }
    }
}

/* ---- random cases ---- */

static void draw_pass(dice *r, pass *p) {
    p->back = r->chance(50);
    p->type = r->chance(70) ? EPO_BF16 : EPO_F16;
    p->hidden = 8 * (1 + r->upto(r->chance(30) ? 7 : 79));
    p->ffn = 8 * (1 + r->upto(r->chance(30) ? 7 : 79));
    p->experts = 1 + r->upto(23);
    p->parts = 1 + r->upto(r->chance(50) ? 3 : EPO_GG_PARTS - 1);
    p->cut[0] = r->chance(50) ? 0 : r->upto(p->experts - 1);
    for (int i = 1; i <= p->parts; i++) {
        int left = p->experts - p->cut[i - 1];
        p->cut[i] = i == p->parts && r->chance(50)
                        ? p->experts
                        : p->cut[i - 1] + r->upto(left) / (r->chance(70) ? 4 : 1);
    }
    uint64_t at = r->chance(50) ? 0 : (uint64_t)r->upto(40);
    int style = r->upto(3), align = r->chance(50) ? 1 : 16;
    for (int e = 0; e < p->experts; e++) {
        at = (at + (uint64_t)align - 1) / (uint64_t)align * (uint64_t)align;
        int count = style == 0 ? r->upto(300)
                               : (style == 1 ? (r->chance(60) ? 0 : r->upto(900))
                                             : (style == 2 ? 128 * r->upto(2) : 1));
        p->first[e] = at;
        p->count[e] = at + (uint64_t)count > 3600 ? 0 : (uint64_t)count;
        at += p->count[e];
    }
    p->rows = at + (uint64_t)r->upto(20);
}

static void describe(const pass *p, int i) {
    printf("case %d: back %d type %d hidden %d ffn %d experts %d parts %d rows %llu cuts", i,
           p->back, p->type, p->hidden, p->ffn, p->experts, p->parts, (unsigned long long)p->rows);
    for (int k = 0; k <= p->parts; k++) {
        printf(" %d", p->cut[k]);
    }
    printf("; counts");
    for (int e = 0; e < p->experts; e++) {
        printf(" %llu", (unsigned long long)p->count[e]);
    }
    printf("\n");
}

static unsigned differences(const void *x, const void *y, uint64_t bytes) {
    static unsigned *count;
    unsigned found = 0;
    if (count == NULL) {
        get_memory(&count, 4);
    }
    CHECK(cudaMemset(count, 0, 4));
    ref::differ<<<kBlocks, 256>>>((const uint32_t *)x, (const uint32_t *)y, bytes / 4, count);
    CHECK(cudaMemcpy(&found, count, 4, cudaMemcpyDeviceToHost));
    return found;
}

/* Rows that are nobody's stay poison in both runs but for backward h, the same in both. */
static bool compare(const pass *p, int i, bool took) {
    struct {
        const char *name;
        const void *x, *y;
        uint64_t bytes;
    } all[] = {{"y", p->y[0], p->y[1], p->rows * row_bytes(p)},
               {"h or dh", p->h[0], p->h[1], p->rows * 2 * act_bytes(p)},
               {"a", p->a[0], p->a[1], p->rows * act_bytes(p)},
               {"dweight", p->dweight[0], p->dweight[1], p->back ? p->rows * 4 : 0},
               {"y taken early", p->y[0], p->taken, took ? p->rows * row_bytes(p) : 0},
               {"dweight taken early", p->dweight[0], p->taken_dweight,
                took && p->back ? p->rows * 4 : 0}};
    uint64_t done[EPO_GG_PARTS];
    uint32_t error = 0;
    bool ok = true;
    for (auto &one : all) {
        unsigned n = one.bytes > 0 ? differences(one.x, one.y, one.bytes) : 0;
        if (n != 0) {
            printf("BITS DIFFER: %s in %u words\n", one.name, n);
            ok = false;
        }
    }
    CHECK(cudaMemcpy(done, p->done, sizeof(done), cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(&error, p->error, 4, cudaMemcpyDeviceToHost));
    for (int k = 0; k < p->parts; k++) {
        if (done[k] != p->epoch) {
            printf("part %d: word %llu, wanted %llu\n", k, (unsigned long long)done[k],
                   (unsigned long long)p->epoch);
            ok = false;
        }
    }
    if (error != 0) {
        printf("error word %u\n", error);
    }
    if (!ok || error != 0) {
        describe(p, i);
    }
    return ok && error == 0;
}

/* The pass over rows by itself goes over the gaps between experts too, the chain does
 * not: there, run `i` gets its poison back. */
__global__ void poison_gaps(pass p, int i) {
    uint64_t width = 2 * (uint64_t)p.ffn;
    for (uint64_t x = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; x < p.rows * width;
         x += (uint64_t)gridDim.x * blockDim.x) {
        uint64_t row = x / width, col = x % width;
        if (p.part_of[row] >= 0) {
            continue;
        }
        ref::put(p.h[i], p.type, x, __int_as_float(0x7fc00000));
        if (col < (uint64_t)p.ffn) {
            ((uint16_t *)p.a[i])[row * p.ffn + col] = 0xffff;
        }
        ((uint32_t *)p.dweight[i])[row] = 0xffffffffu;
    }
}

/* Each expert's rows are split among the ranks, whose memories hold them in the experts'
 * order or against it. */
static void draw_direct(dice *r, pass *p) {
    epo_gg_direct *d = &p->direct;
    int32_t first[kMaxExperts * EPO_GG_RANKS], to[kMaxExperts * EPO_GG_RANKS];
    d->ranks = 1 + r->upto(EPO_GG_RANKS - 1);
    d->own = r->upto(d->ranks - 1);
    d->first = p->direct_first;
    d->to = p->direct_to;
    d->rows = p->rows + 1;
    d->words = r->chance(70) ? p->direct_words : NULL;
    d->step = 3;
    d->value = p->epoch;
    d->late = r->chance(50) ? NULL : p->direct_late + r->upto(1);
    bool turned = r->chance(50);
    int32_t at[EPO_GG_RANKS] = {0};
    for (int i = 0; i < p->experts; i++) {
        int e = turned ? p->experts - 1 - i : i;
        int32_t row = (int32_t)p->first[e], end = row + (int32_t)p->count[e];
        for (int k = 0; k < d->ranks; k++) {
            int32_t rows = k == d->ranks - 1 || r->chance(20) ? end - row : r->upto(end - row);
            first[e * d->ranks + k] = row;
            to[e * d->ranks + k] = at[k];
            row += rows;
            at[k] += rows;
        }
    }
    size_t bytes = (size_t)p->experts * d->ranks * 4;
    CHECK(cudaMemcpy(p->direct_first, first, bytes, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(p->direct_to, to, bytes, cudaMemcpyHostToDevice));
    bool weights = r->chance(70);
    for (int k = 0; k < d->ranks; k++) {
        d->dweight[k] = weights ? p->direct_dweight[k] : NULL;
        CHECK(cudaMemset(d->base[k], 0xff, (p->rows + 1) * row_bytes(p)));
    }
}

/* Direct rows to where they would be, if that is untouched; else they count as wrong. */
__global__ void collect(pass p, unsigned *wrong) {
    const epo_gg_direct &d = p.direct;
    uint16_t *y = (uint16_t *)p.y[1];
    for (uint64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
        int e = p.owner[row], rank = d.own;
        for (int r = 0; e >= 0 && r < d.ranks; r++) {
            rank = d.first[e * d.ranks + r] <= (int64_t)row ? r : rank;
        }
        if (e < 0 || rank == d.own) {
            continue;
        }
        int64_t from = d.to[e * d.ranks + rank] + (int64_t)row - d.first[e * d.ranks + rank];
        for (int x = threadIdx.x; x < p.hidden; x += blockDim.x) {
            if (y[row * p.hidden + x] != 0xffff) {
                atomicAdd(wrong, 1u);
            }
            y[row * p.hidden + x] = ((const uint16_t *)d.base[rank])[from * p.hidden + x];
        }
        if (p.back && d.dweight[rank] != NULL && threadIdx.x == 0) {
            if (((const uint32_t *)p.dweight[1])[row] != 0xffffffffu) {
                atomicAdd(wrong, 1u);
            }
            p.dweight[1][row] = d.dweight[rank][from];
        }
    }
}

static bool direct_check(pass *p, int i) {
    const epo_gg_direct *d = &p->direct;
    uint64_t words[EPO_GG_RANKS * 3];
    unsigned *count, wrong = 0;
    CHECK(cudaMalloc((void **)&count, 4));
    CHECK(cudaMemset(count, 0, 4));
    collect<<<kBlocks, 256>>>(*p, count);
    CHECK(cudaMemcpy(&wrong, count, 4, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(words, p->direct_words, sizeof(words), cudaMemcpyDeviceToHost));
    CHECK(cudaFree(count));
    for (int r = 0; r < d->ranks && d->words != NULL; r++) {
        wrong += (words[r * 3] == p->epoch) != (d->late != p->direct_late + 1);
    }
    if (wrong != 0) {
        printf("DIRECT: %d ranks, own %d: %u wrong\n", d->ranks, d->own, wrong);
        describe(p, i);
    }
    p->directs++;
    return wrong == 0;
}

/* The experts' rows as they came, and nothing else. */
__global__ void keep_check(pass p, unsigned *wrong) {
    const uint16_t *kept = (const uint16_t *)p.kept, *x = (const uint16_t *)p.x;
    for (uint64_t at = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; at < p.rows * p.hidden;
         at += (uint64_t)gridDim.x * blockDim.x) {
        if (kept[at] != (p.part_of[at / p.hidden] >= 0 ? x[at] : 0xffff)) {
            atomicAdd(wrong, 1u);
        }
    }
}

static bool kept_check(pass *p, int i) {
    unsigned *count, wrong = 0;
    CHECK(cudaMalloc((void **)&count, 4));
    CHECK(cudaMemset(count, 0, 4));
    keep_check<<<kBlocks, 256>>>(*p, count);
    CHECK(cudaMemcpy(&wrong, count, 4, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(count));
    if (wrong != 0) {
        printf("KEPT: %u wrong\n", wrong);
        describe(p, i);
    }
    return wrong == 0;
}

static bool one_case(pass *p, dice *r, int i, cudaStream_t main, cudaStream_t beside,
                     cudaStream_t taker) {
    uint32_t seed = (uint32_t)i * 16;
    int order_host[EPO_GG_PARTS], words = 1 + r->upto(3);
    static int *order;
    if (order == NULL) {
        get_memory(&order, sizeof(order_host));
    }
    draw_pass(r, p);
    p->epoch++;
    CHECK(cudaMemset(p->error, 0, 4));
    inputs_make(p, seed);
    outputs_make(p, 0, seed);
    outputs_make(p, 1, seed);
    CHECK(cudaMemset(p->taken, 0xff, p->rows * row_bytes(p)));
    CHECK(cudaMemset(p->taken_dweight, 0xff, p->rows * 4));
    CHECK(cudaDeviceSynchronize()); /* the streams below do not wait for the fills */
    run_apart(p, 0, 1, main);
    CHECK(cudaDeviceSynchronize());
    if (p->back && p->rows > 0) {
        poison_gaps<<<kBlocks, 256>>>(*p, 0);
    }
    epo_gg_chain c = chain_of(p, 1);
    bool direct = r->chance(50), late = p->rows > 0 && r->chance(50);
    bool takes = p->rows > 0 && r->chance(50) && !direct;
    p->kept = r->chance(50) ? p->keep_room : NULL;
    c.first.keep = p->kept;
    CHECK(cudaMemset(p->keep_room, 0xff, p->rows * row_bytes(p)));
    if (direct) {
        draw_direct(r, p);
        c.direct = p->direct;
    }
    bool leaves = late && r->chance(40); /* SMs are given back while rows do not come */
    bool joins = leaves || r->chance(30);
    if (leaves) {
        c.patience_ns = 1000 + (uint64_t)r->upto(100000);
        c.left = p->left;
        c.left_value = p->epoch;
    }
    c.first.sms = late || takes || r->chance(50) ? 2 + r->upto(90) : 0;
    c.first.cluster = p->cluster != 0 ? p->cluster : r->upto(2);
    c.first.group_m = r->upto(5);
    c.hurry = r->chance(30);
    for (int k = 0; k < p->parts; k++) {
        int swap = r->upto(k);
        order_host[k] = order_host[swap];
        order_host[swap] = k;
        if (late && !r->chance(10)) {
            c.part[k].flag = p->flags + 4 * k;
            c.part[k].epoch = p->epoch;
            c.part[k].words = words;
        }
    }
    CHECK(cudaMemcpy(order, order_host, sizeof(order_host), cudaMemcpyHostToDevice));
    if (late) { /* all of the rows are poison before */
        bool all = true;
        for (int k = 0; k < p->parts; k++) {
            all = all && c.part[k].flag != NULL;
        }
        if (all) {
            CHECK(cudaMemset(p->x, 0xff, p->rows * row_bytes(p)));
        }
    }
    CHECK(cudaDeviceSynchronize());
    if (joins) {
        MUST(epo_gg_chain_prepare(&c, main));
        CHECK(cudaStreamSynchronize(main));
        MUST(epo_gg_chain_run(&c, main));
    } else {
        MUST(epo_gg_chain_launch(&c, main));
    }
    if (takes) {
        take<<<1, 1024, 0, taker>>>(*p, p->done, p->epoch, p->y[1]);
    }
    if (late) {
        arrive<<<1, 1024, 0, beside>>>(*p, words, p->epoch, order, seed);
    }
    if (joins) { /* behind all rows, where they are late */
        c.arrived = leaves;
        MUST(epo_gg_chain_run(&c, beside));
    }
    CHECK(cudaDeviceSynchronize());
    if (leaves) {
        uint64_t left = 0;
        CHECK(cudaMemcpy(&left, p->left, 8, cudaMemcpyDeviceToHost));
        p->leaves += left == p->epoch;
    }
    bool sound = !direct || direct_check(p, i);
    sound = (p->kept == NULL || kept_check(p, i)) && sound;
    return compare(p, i, takes) && sound;
}

static int test_random(int cases, int seed, int only, int cluster) {
    static pass p;
    int failed = 0;
    uint64_t spin = 0;
    cudaStream_t stream[3];
    cudaFuncAttributes loaded; /* not while a kernel waits for another */
    CHECK(cudaFuncGetAttributes(&loaded, arrive));
    CHECK(cudaFuncGetAttributes(&loaded, take));
    for (auto &s : stream) {
        CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    }
    memory_make(&p, 3700, 24, 640, 640);
    p.cluster = cluster;
    CHECK(cudaMemset(p.spin, 0, 8));
    for (int i = 0; i < cases && failed < 5; i++) {
        dice r = {0x9e3779b97f4a7c15ull * (uint64_t)(seed * 1000003 + i + 1)};
        for (int j = 0; j < 8; j++) {
            r.next();
        }
        if (only < 0 || only == i) {
            failed += !one_case(&p, &r, i, stream[0], stream[1], stream[2]);
        }
    }
    CHECK(cudaMemcpy(&spin, p.spin, 8, cudaMemcpyDeviceToHost));
    printf("chains: %d cases, failed %d, left and gone on with %d, direct %d, waited %.1f ms in "
           "all\n",
           cases, failed, p.leaves, p.directs, spin * 1e-6);
    if (only < 0 && cases >= 500 && p.leaves == 0) {
        printf("no chain was left: what follows then was not tried\n");
        failed++;
    }
    return failed;
}

/* ---- time ---- */

static int ascending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}

static void time_pass(pass *p, bool back, cudaStream_t stream) {
    enum { ARMS = 9, TURNS = 15 };
    static const char *const names[ARMS] = {
        "apart, 1 piece",  "apart, 2 pieces", "apart, 4 pieces",
        "apart, 8 pieces", "chain, 1 part",   "chain, 2 parts",
        "chain, 4 parts",  "chain, 8 parts",  "chain, 4 parts, 116 SMs"};
    float ms[ARMS][TURNS];
    cudaEvent_t from, to;
    CHECK(cudaEventCreate(&from));
    CHECK(cudaEventCreate(&to));
    p->back = back;
    for (int turn = -2; turn < TURNS; turn++) {
        for (int a = 0; a < ARMS; a++) {
            int n = a == 8 ? 4 : 1 << (a % 4);
            p->parts = n;
            for (int k = 0; k <= n; k++) {
                p->cut[k] = p->experts * k / n;
            }
            p->epoch++;
            epo_gg_chain c = chain_of(p, 1);
            c.first.sms = a == 8 ? 116 : 0;
            CHECK(cudaEventRecord(from, stream));
            for (int k = 0; k < 2; k++) {
                if (a < 4) {
                    run_apart(p, 1, n, stream);
                } else {
                    MUST(epo_gg_chain_launch(&c, stream));
                }
            }
            CHECK(cudaEventRecord(to, stream));
            CHECK(cudaEventSynchronize(to));
            if (turn >= 0) {
                CHECK(cudaEventElapsedTime(&ms[a][turn], from, to));
            }
        }
    }
    double base = 0;
    for (int a = 0; a < ARMS; a++) {
        qsort(ms[a], TURNS, sizeof(float), ascending);
        double t = ms[a][TURNS / 2] / 2;
        base = a == 0 ? t : base;
        printf("%s\t%s\t%.4f ms\t%.3f of one piece\t+- %.1f %%\n", back ? "backward" : "forward",
               names[a], t, t / base,
               50 * (ms[a][TURNS * 3 / 4] - ms[a][TURNS / 4]) / ms[a][TURNS / 2]);
    }
}

static void time_all(void) {
    static pass p;
    dice r = {12345};
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    memory_make(&p, 40000, 64, 2048, 768);
    p.type = EPO_BF16;
    p.hidden = 2048;
    p.ffn = 768;
    p.experts = 64;
    p.parts = 1;
    p.cut[1] = 64;
    for (int e = 0; e < 64; e++) { /* as random routing: about 22 either way */
        p.first[e] = e > 0 ? (p.first[e - 1] + p.count[e - 1] + 15) / 16 * 16 : 0;
        p.count[e] = (uint64_t)(480 + r.upto(64));
    }
    p.rows = p.first[63] + p.count[63];
    inputs_make(&p, 1);
    CHECK(cudaMemset(p.error, 0, 4));
    for (int i = 0; i < 2; i++) {
        p.back = true;
        outputs_make(&p, i, 1);
    }
    p.from = p.h[0];
    CHECK(cudaDeviceSynchronize());
    time_pass(&p, false, stream);
    time_pass(&p, true, stream);
}

int main(int argc, char **argv) {
    int cases = 2000, seed = 1, only = -1, timed = 0, cluster = 0, failed = 0;
    for (int i = 1; i + 1 < argc; i += 2) {
        int v = (int)strtol(argv[i + 1], NULL, 10);
        cases = strcmp(argv[i], "--cases") == 0 ? v : cases;
        seed = strcmp(argv[i], "--seed") == 0 ? v : seed;
        only = strcmp(argv[i], "--only") == 0 ? v : only;
        cluster = strcmp(argv[i], "--cluster") == 0 ? v : cluster;
        timed = strcmp(argv[i], "--time") == 0 ? v : timed;
    }
    cudaDeviceProp prop;
    CHECK(cudaGetDeviceProperties(&prop, 0));
    if (prop.major != 9 || prop.minor != 0) {
        printf("skipped: chains need sm_90, %s is sm_%d%d\n", prop.name, prop.major, prop.minor);
        return 0;
    }
    failed += cases > 0 ? test_random(cases, seed, only, cluster) : 0;
    if (timed) {
        time_all();
    }
    printf("%s\n", failed == 0 ? "PASS" : "FAIL");
    return failed == 0 ? 0 : 1;
}
