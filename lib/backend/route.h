/* SPDX-License-Identifier: Apache-2.0
 *
 * route.h - from a routing to index maps: who sends which row where.
 *
 * Plain functions over plain arrays: nothing is allocated, nothing waits, sizes
 * are given.  Placement is by counting and prefix sums in a fixed order, so equal
 * routings give equal maps everywhere.
 *
 * Words: T tokens of this rank, K slots a token, E experts of the group, R ranks,
 * El = E/R local experts of each rank, n chunks of consecutive local experts
 * (n <= El).  experts[T][K] holds global experts, -1 for a slot that is not used.
 * Rows are numbered in int32; callers hold every row count below INT32_MAX.
 */
#ifndef EPO_BACKEND_ROUTE_H
#define EPO_BACKEND_ROUTE_H

#include <stdbool.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define EPO_ROUTE_MAX_TOP_K 32

typedef struct epo_route_shape {
    int ranks, experts, top_k, chunks;
    int align;    /* each expert's rows start at a multiple of this */
    bool tapered; /* the first and last chunk are half as large as the others */
} epo_route_shape;

static inline int epo_route_local(const epo_route_shape *s) { return s->experts / s->ranks; }
/* Half chunks at the ends, where there are experts enough. */
static inline bool epo_route_tapers(const epo_route_shape *s) {
    return s->tapered && s->chunks > 2 && epo_route_local(s) >= 2 * (s->chunks - 1);
}
/* First local expert of chunk c; c == n gives El. */
static inline int epo_route_chunk_first(const epo_route_shape *s, int c) {
    int64_t local = epo_route_local(s);
    if (!epo_route_tapers(s))
        return (int)(c * local / s->chunks);
    return (int)(c == 0           ? 0
                 : c >= s->chunks ? local
                                  : (2 * c - 1) * local / (2 * ((int64_t)s->chunks - 1)));
}
/* The chunk of local expert e: the inverse of the above. */
static inline int epo_route_chunk_of(const epo_route_shape *s, int e) {
    int64_t local = epo_route_local(s), next = (int64_t)e + 1;
    if (!epo_route_tapers(s))
        return (int)((next * s->chunks - 1) / local);
    return (int)(((next * 2 * (s->chunks - 1) - 1) / local + 1) / 2);
}

/* Copies to int32.  Returns the number of the first slot whose value is not in
 * -1..E-1, or T*K if there is none; the copy is complete in that case only. */
uint64_t epo_route_check(const epo_route_shape *s, const int64_t *experts, int tokens,
                         int32_t *copy);
/* expert_rows[E] = slots that name the expert; rank_rows[R] = tokens that name at
 * least one expert of the rank. */
void epo_route_count(const epo_route_shape *s, const int32_t *experts, int tokens,
                     uint32_t *expert_rows, uint32_t *rank_rows);

/* At most `capacity` slots stay with each expert; the others become -1.  by_weight:
 * those with the largest weights[T][K] stay (NULL: all 1.0), equal ones in the order
 * (token, slot); else the first in that order.  A NaN counts as its bits.  Returns the
 * number of slots that were dropped. */
#define EPO_ROUTE_UNLIMITED UINT64_MAX
typedef struct epo_route_rival {
    uint32_t key;
    int32_t flat;
} epo_route_rival;
uint64_t epo_route_drop(const epo_route_shape *s, int32_t *experts, const float *weights,
                        int tokens, uint64_t capacity, bool by_weight,
                        uint32_t *rows /* [E] scratch */,
                        epo_route_rival *rivals /* [T*K] scratch, by_weight only */);
/* The order of weights as unsigned numbers; -0 is 0. */
static inline uint32_t epo_route_weight_key(float weight) {
    uint32_t bits;
    weight += 0.0F;
    memcpy(&bits, &weight, sizeof bits);
    return bits >> 31 != 0 ? ~bits : bits | UINT32_C(1) << 31;
}

/* counts[R][E], row r what epo_route_count gave on rank r. */

/* Expert-major layout of `rank`: first[El] and count[El] (either may be NULL).
 * Returns the rows, alignment included. */
uint64_t epo_route_layout(const epo_route_shape *s, const uint32_t *counts, int rank,
                          uint64_t *first, uint64_t *count);
/* target[E] = row of the owner's expert-major layout where the rows of `source`
 * for that expert begin. */
void epo_route_targets(const epo_route_shape *s, const uint32_t *counts, int source,
                       uint64_t *target);

/* alltoall: rows are sent in the order (global expert, token, slot).
 * expert_first[E]: first send row of each expert, from this rank's counts.
 * token[n], slot[n]: token and flat slot t*K+k of each send row; row[T*K]: the send
 * row of each flat slot, -1 for none. */
void epo_route_send_first(const epo_route_shape *s, const uint32_t *expert_rows,
                          uint64_t *expert_first);
void epo_route_send(const epo_route_shape *s, const int32_t *experts, int tokens,
                    const uint64_t *expert_first, uint64_t *cursor /* [E] scratch */,
                    int32_t *token, int32_t *slot, int32_t *row);
/* The way back: source r's rows of local expert e begin at first[e * R + r] of `rank`'s
 * layout, whose experts begin at expert_first[El], and return to r's send rows from
 * to[e * R + r] on. */
void epo_route_returns(const epo_route_shape *s, const uint32_t *counts, int rank,
                       const uint64_t *expert_first, int32_t *first, int32_t *to);
/* index[rows]: i for a row, -1 for alignment. */
void epo_route_pad(const epo_route_shape *s, const uint64_t *first, const uint64_t *count,
                   uint64_t rows, int32_t *index);

/* flex: one row per (token, destination rank).  To rank d they go in the order
 * (first chunk that uses the row, token); back from d in (last chunk, token). */

/* The sender's side; N = sum of rank_rows, blocks of destinations in rank order.
 * first_of[R][n+1], last_of[R][n+1]: prefix sums, by chunk, from the block's start
 * in the sending order and in the returning order;
 * token[N]: token of each row in sending order;
 * meta_expert[N][K], meta_slot[N][K]: for each row, in token order within its
 * block, the destination's local expert and the flat slot, -1 for slots elsewhere;
 * sum[T][width]: returned rows of the token, by ascending rank, then -1;
 * weight[T*K]: place of the slot's gradient in the returned [N][K], or -1. */
typedef struct epo_route_flex_send {
    const uint64_t *rank_first; /* [R] start of each block */
    uint32_t *first_of, *last_of;
    int32_t *token, *meta_expert, *meta_slot;
    int32_t *sum;
    int width; /* min(R, K) */
    int32_t *weight;
} epo_route_flex_send;
void epo_route_flex_make_send(const epo_route_shape *s, const int32_t *experts, int tokens,
                              uint32_t *cursor /* [3*R*n] scratch */, epo_route_flex_send *out);

/* The receiver's side.  meta_expert[N][K]: received, sources in rank order, tokens
 * in order within a source; source_rows[R] rows of each.
 * first_of[R][n+1], last_of: as above, per source;
 * expand[rows]: window row of each expert-major row, -1 for alignment (the window
 * holds the sources' blocks in rank order, each in sending order);
 * weight[rows]: place of the row's router weight in the received [N][K], or -1;
 * back[N][K]: expert-major rows of each returned row, slot order; returned rows are
 * in the order (last chunk, source, token);
 * back_first[n][R]: first returned row of (chunk, source).
 * Returns 0, or 1 + the number of a meta row that names an impossible expert, or
 * whose experts do not add up to `count`. */
typedef struct epo_route_flex_recv {
    const uint64_t *first, *count; /* layout of this rank */
    /* [R]: the rows that each source has in every expert's part, whether they come or
     * not (those that do not are as alignment); NULL: as many as come. */
    const uint64_t *block;
    uint64_t rows;
    uint32_t *first_of, *last_of;
    int32_t *expand, *weight, *back;
    uint64_t *back_first;
} epo_route_flex_recv;
uint64_t epo_route_flex_make_recv(const epo_route_shape *s, const int32_t *meta_expert,
                                  const uint32_t *source_rows,
                                  uint64_t *cursor /* [El + 2*R*n] scratch */,
                                  epo_route_flex_recv *out);

/* flex across nodes: one row per (token, node), and one back.  A node has `each` = E/N
 * consecutive experts. */

/* rows[N] = tokens that name at least one of the node's experts. */
void epo_route_node_count(const int32_t *experts, int tokens, int top_k, int each, int nodes,
                          uint32_t *rows);
/* Of one node's rows, in token order: token[rows] and expert[rows][K], which is the number
 * within the node, -1 for slots of other nodes.  Returns the rows. */
uint64_t epo_route_node_take(const int32_t *experts, int tokens, int top_k, int each, int node,
                             int32_t *token, int64_t *expert);
/* The places of such rows where they go in the order (first chunk that uses the row, row),
 * and back in (last chunk, row); first_of[n+1], last_of[n+1]: prefix sums by chunk.  `s` is
 * the shape of the node alone; a chunk is that of whichever of its ranks. */
void epo_route_node_order(const epo_route_shape *s, const int64_t *expert, uint64_t rows,
                          uint32_t *first_of, uint32_t *last_of, int32_t *sent, int32_t *returned);

#endif
