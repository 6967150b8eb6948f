/* SPDX-License-Identifier: Apache-2.0
 *
 * chain_pass.cuh - one pass through the experts, as test_chain.cu makes it twice, and its
 * memory.
 */
#ifndef EPO_TESTS_GPU_GEMM_CHAIN_PASS_CUH
#define EPO_TESTS_GPU_GEMM_CHAIN_PASS_CUH

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gg_reference.cuh"

#define MUST(call)                                                                                 \
    do {                                                                                           \
        if ((call) != EPO_OK) {                                                                    \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, epo_fail_text());        \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

constexpr int kBlocks = 528;
constexpr int kMaxExperts = 256;

/* One pass through the experts, forward or backward, and what it makes, twice. */
struct pass {
    bool back;
    epo_dtype type;
    int hidden, ffn, experts, parts, cluster;
    int cut[EPO_GG_PARTS + 1];
    uint64_t rows, first[kMaxExperts], count[kMaxExperts];
    /* x: rows that come in (forward x, backward dy), y: those that go back. */
    void *x, *w1, *w2, *h[2], *a[2], *y[2], *taken;
    float *weight, *dweight[2], *taken_dweight;
    uint64_t *op_first, *op_count, *flags, *done;
    int *owner, *part_of;
    void *ws;
    uint64_t ws_bytes;
    const void *from; /* backward, h is read there; NULL: where dh comes */
    uint64_t epoch;
    uint64_t *left;
    int leaves; /* chains that were left */
    /* Rows that go to ranks' memories: rank r's own at[r], and words that tell. */
    epo_gg_direct direct;
    int directs;
    void *kept; /* NULL: rows that come in are not kept */
    void *keep_room;
    int32_t *direct_first, *direct_to;
    float *direct_dweight[EPO_GG_RANKS];
    uint64_t *direct_words;
    uint32_t *direct_late; /* a word that is 0, one that is set */
    uint64_t *spin;
    uint32_t *error;
};

static uint64_t row_bytes(const pass *p) { return (uint64_t)p->hidden * 2; }
static uint64_t act_bytes(const pass *p) { return (uint64_t)p->ffn * 2; }

template <class T> static void get_memory(T **p, uint64_t bytes) {
    CHECK(cudaMalloc((void **)p, bytes + 256));
}

static void memory_make(pass *p, uint64_t rows, int experts, int hidden, int ffn) {
    uint64_t weights = (uint64_t)experts * hidden * ffn * 2;
    memset(p, 0, sizeof(*p));
    get_memory(&p->x, rows * hidden * 2);
    get_memory(&p->w1, 2 * weights);
    get_memory(&p->w2, weights);
    for (int i = 0; i < 2; i++) {
        get_memory(&p->h[i], rows * ffn * 4);
        get_memory(&p->a[i], rows * ffn * 2);
        get_memory(&p->y[i], rows * hidden * 2);
        get_memory(&p->dweight[i], rows * 4);
    }
    get_memory(&p->taken, rows * hidden * 2);
    get_memory(&p->taken_dweight, rows * 4);
    get_memory(&p->weight, rows * 4);
    get_memory(&p->op_first, kMaxExperts * 8);
    get_memory(&p->op_count, kMaxExperts * 8);
    get_memory(&p->flags, EPO_GG_PARTS * 4 * 8);
    get_memory(&p->done, EPO_GG_PARTS * 8);
    get_memory(&p->owner, rows * 4);
    get_memory(&p->part_of, rows * 4);
    get_memory(&p->left, 8);
    get_memory(&p->keep_room, rows * hidden * 2);
    get_memory(&p->direct_first, kMaxExperts * EPO_GG_RANKS * 4);
    get_memory(&p->direct_to, kMaxExperts * EPO_GG_RANKS * 4);
    get_memory(&p->direct_words, EPO_GG_RANKS * 3 * 8);
    get_memory(&p->direct_late, 8);
    for (auto &base : p->direct.base) {
        get_memory((char **)&base, rows * hidden * 2);
    }
    for (auto &base : p->direct_dweight) {
        get_memory(&base, rows * 4);
    }
    get_memory(&p->spin, 8);
    get_memory(&p->error, 4);
    p->ws_bytes = 8 << 20;
    get_memory(&p->ws, p->ws_bytes);
    CHECK(cudaMemset(p->left, 0, 8));
    CHECK(cudaMemset(p->direct_words, 0, EPO_GG_RANKS * 3 * 8));
    CHECK(cudaMemset(p->direct_late, 0, 4));
    CHECK(cudaMemset(p->direct_late + 1, 0xff, 4));
    CHECK(cudaMemset(p->flags, 0, EPO_GG_PARTS * 4 * 8));
    CHECK(cudaMemset(p->done, 0, EPO_GG_PARTS * 8));
}

#endif
