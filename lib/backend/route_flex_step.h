/* SPDX-License-Identifier: Apache-2.0
 *
 * route_flex_step.h - the steps of flex's maps that a thread does by itself, for the
 * CPU and for kernels.
 *
 * A sender knows all places of its rows: among its rows for the expert, in the order
 * of sending and in the order of return.  These travel as one meta row beside each
 * token row, so a receiver only adds where each sender's part begins, and needs no
 * scan of its own.  The maps are those of route.h's epo_route_flex_*.
 *
 * A meta row, in 32-bit words: 0 place in the returning order of the block, 1 last
 * chunk, 2 and 3 unused, then K local experts (-1: not here), K places among the
 * sender's rows of that expert, K router weights (fp32).
 */
#ifndef EPO_BACKEND_ROUTE_FLEX_STEP_H
#define EPO_BACKEND_ROUTE_FLEX_STEP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#define EPO_STEP static __host__ __device__ __forceinline__
#else
#define EPO_STEP static inline
#endif

#define EPO_FLEX_META_HEAD 4

/* Words of a meta row: a multiple of 16 bytes. */
EPO_STEP int epo_flex_meta_words(int top_k) { return (EPO_FLEX_META_HEAD + 3 * top_k + 3) / 4 * 4; }

/* First and last chunk of rank d that use the token; false: none does. */
EPO_STEP bool epo_flex_token_chunks(const int32_t *experts, int top_k, int local, int chunks,
                                    int rank, int *first, int *last) {
    const int32_t from = rank * local;
    int32_t low = local, high = -1;
    for (int k = 0; k < top_k; k++) {
        const int32_t at = experts[k] - from;
        if ((uint32_t)at >= (uint32_t)local)
            continue;
        low = at < low ? at : low;
        high = at > high ? at : high;
    }
    if (high < 0)
        return false;
    *first = chunks == 1 ? 0 : (int)((((int64_t)low + 1) * chunks - 1) / local);
    *last = chunks == 1 ? 0 : (int)((((int64_t)high + 1) * chunks - 1) / local);
    return true;
}

/* Word w of the meta row of a token for rank d; experts, place and weight are those of
 * the token's slots; weight NULL: 1. */
EPO_STEP uint32_t epo_flex_meta_word(int w, const int32_t *experts, const int32_t *place,
                                     const float *weight, int top_k, int local, int rank,
                                     int32_t returned, int32_t last) {
    const int k = w - EPO_FLEX_META_HEAD, slot = k % top_k;
    if (w == 0)
        return (uint32_t)returned;
    if (w == 1)
        return (uint32_t)last;
    if (k < 0 || k >= 3 * top_k)
        return 0;
    const int32_t at = experts[slot] - rank * local;
    const bool here = (uint32_t)at < (uint32_t)local;
    if (k < top_k)
        return here ? (uint32_t)at : UINT32_MAX;
    if (!here)
        return 0;
    if (k < 2 * top_k)
        return (uint32_t)place[slot];
    union {
        float f;
        uint32_t u;
    } bits;
    bits.f = weight != NULL ? weight[slot] : 1.0f;
    return bits.u;
}

/* What a receiver knows of one source. */
typedef struct epo_flex_source {
    const int32_t *meta;    /* its meta rows */
    const int32_t *target;  /* [El] expert-major row where its rows of each expert begin */
    const int32_t *returns; /* [n] added to a place of return: the row in the returning order */
    int32_t window;         /* the window's row of its first row */
    int32_t limit;          /* expert-major rows: nothing is written beyond */
    int32_t back_limit;     /* rows that go back */
} epo_flex_source;

/* The receiver's maps; any of them may be NULL. */
typedef struct epo_flex_arrived {
    int32_t *expand; /* [rows] */
    float *weight;   /* [rows] */
    int32_t *back;   /* [returned][K] */
    int32_t *fan;    /* [window rows][K] expert-major rows of each */
} epo_flex_arrived;

/* Slot k of row i of a source.  False: the meta is impossible. */
EPO_STEP bool epo_flex_arrive(const epo_flex_source *s, const epo_flex_arrived *out, int32_t i,
                              int k, int top_k, int local, int chunks) {
    const int32_t *m = s->meta + (int64_t)i * epo_flex_meta_words(top_k);
    const int32_t e = m[EPO_FLEX_META_HEAD + k], last = m[1], window = s->window + i;
    int32_t row = -1;
    bool good = e >= -1 && e < local && (uint32_t)last < (uint32_t)chunks;
    if (good && e >= 0) {
        row = s->target[e] + m[EPO_FLEX_META_HEAD + top_k + k];
        good = (uint32_t)row < (uint32_t)s->limit;
    }
    const int32_t to = good ? s->returns[last] + m[0] : -1;
    if (!good || (uint32_t)to >= (uint32_t)s->back_limit)
        return false;
    if (out->back != NULL)
        out->back[(int64_t)to * top_k + k] = row;
    if (out->fan != NULL)
        out->fan[(int64_t)window * top_k + k] = row;
    if (row < 0)
        return true;
    union {
        int32_t i;
        float f;
    } bits;
    bits.i = m[EPO_FLEX_META_HEAD + 2 * top_k + k];
    if (out->expand != NULL)
        out->expand[row] = window;
    if (out->weight != NULL)
        out->weight[row] = bits.f;
    return true;
}

#endif
