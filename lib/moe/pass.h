/* SPDX-License-Identifier: Apache-2.0
 *
 * pass.h - rows to the experts and back: what the parts of a pass are to each other.
 *   pipeline.c, returns.c  there, and back
 *   experts.c, chain.c     the products, chunk by chunk, or all in one operation
 *   memory.c               what a pass takes
 *   own.c                  the caller's function in the products' place
 */
#ifndef EPO_MOE_PASS_H
#define EPO_MOE_PASS_H

#include "moe/moe.h"

/* ---- pipeline.c, returns.c -------------------------------------------- */

/* One way of rows to the experts and back.  A failed step makes the later ones
 * do nothing; moe_pass_end returns the first failure. */
typedef struct moe_pass {
    epo_group *group;
    epo_plan *plan;
    epo_buffer *buffer;
    epo_stream stream;
    int chunks;      /* 1: the whole plan in one piece, whatever its chunks */
    epo_event *done; /* compute: the outputs are complete */
    /* The plan's, with lists of segments that operations read until they have run: a
     * second pass of the plan beside this one has its own, in `apart`. */
    moe_lane dispatch, combine;
    moe_lane link_dispatch, link_combine; /* of plan->link */
    void *apart, *apart_again;
    void *tokens; /* the dispatch slot's rows are kept here, too; NULL: not */
    bool custom;  /* the caller's experts: rows are expanded in any case */
    epo_status status;
    moe_block back, back_weight; /* flex: what goes back */
    moe_block home, home_weight; /* plan->link: to other nodes */
    bool keeps;                  /* in place: copies were issued */
    bool holds;                  /* in place: weight gradients read the rows where they arrived */
    const void *own;             /* plan->own_stays: rows that do not go back */
    const float *own_weight;
    bool beside;          /* another pass's experts run beside */
    bool tail;            /* nothing runs beside the last chunk's way back */
    bool lends;           /* weight gradients beside the last chunk's way back leave it SMs */
    bool sums_beside;     /* the sum over what came back is made beside them, too */
    bool spread;          /* flex in a chain: rows are expanded beside it, go back behind it */
    bool chained;         /* part[chunk] tells of the chunk's rows, not `rows` */
    bool direct;          /* ... and the chain itself stores what goes back at its peers' */
    bool singly;          /* flex: rows go home one by one, and their owners sum */
    const void *near;     /* own rows are expanded from here, and do not travel; NULL: they do */
    moe_block wire;       /* what dispatch sends, as it travels */
    moe_block wire_again; /* ... a second time */
} moe_pass;

/* What one chunk's exchange carries: rows of src to `to`, and, if `extra` is not NULL,
 * extra_bytes for each row to `extra_to`. */
typedef struct moe_cargo {
    const void *rows;
    uint64_t row_bytes, to;
    const void *extra;
    uint64_t extra_bytes, extra_to;
    const int32_t *back; /* rows are sums of top_k of these */
} moe_cargo;
/* Segments and arrivals of the pass's chunks [chunk, end) in the lane. */
epo_exchange moe_pass_load(const moe_pass *p, moe_lane *lane, int chunk, int end,
                           const moe_cargo *c);
/* How many of its segments to send are rows; as many behind them are what goes beside. */
static inline int moe_cargo_rows(const epo_exchange *x, const moe_cargo *c) {
    return c->extra != NULL ? x->nsend / 2 : x->nsend;
}
/* Of the plan's chunks, the first of the pass's chunk. */
int moe_pass_plan_chunk(const moe_pass *p, int chunk);
uint64_t moe_pass_arrive(const moe_pass *p, const moe_slot *slot, int chunk);
/* Tells the scope, after up to three events (NULL: none), that this rank reads the slot's
 * last use no more. */
void moe_pass_credit(moe_pass *p, const moe_slot *slot, epo_scope scope, epo_event *first,
                     epo_event *second, epo_event *third);

/* What goes back in this pass, and what comes. */
moe_lane *moe_pass_homeward(moe_pass *p);
/* Sets p->near; the queue for a dispatch in one chunk. */
epo_queue *moe_near_choose(moe_pass *p, const void *src);
/* flex in one chunk, whose rows return in the order in which they came: all are expanded in one
 * piece, each read once; what does so. */
bool moe_pass_expands_all(const moe_pass *p);
epo_rows_spread moe_pass_expand_all(const moe_pass *p, void *dst);
/* p->near: own rows are taken out of the dispatch's exchange; in moe_pass_expand's place. */
void moe_near_leave(const moe_pass *p, epo_exchange *x);
void moe_near_expand(moe_pass *p, void *dst);
/* The same, peers' rows on a queue of their own: *ready tells of all. */
void moe_near_expand_early(moe_pass *p, void *dst, epo_ready *ready);

enum { MOE_USES_DISPATCH = 1, MOE_USES_COMBINE = 2 };
void moe_pass_begin(moe_pass *p, epo_plan *plan, int chunks, int uses, epo_stream stream);
/* Lists of its own, until moe_pass_end. */
void moe_pass_apart(moe_pass *p);
uint64_t moe_pass_first_row(const moe_pass *p, int chunk); /* chunk == chunks: all rows */
int moe_pass_first_expert(const moe_pass *p, int chunk);   /* likewise */
void moe_pass_get(moe_pass *p, uint64_t count, uint64_t size, moe_block *out);
/* Sends the rows of src[T][H]. */
void moe_pass_dispatch(moe_pass *p, const void *src);
/* Arrived rows to their expert-major place in dst; the last chunk gives the slot back. */
void moe_pass_expand(moe_pass *p, int chunk, void *dst);
/* Do rows arrive at their expert-major place, so that GEMMs read them there? */
bool moe_pass_in_place(const moe_pass *p);
/* Expert-major rows for the chunk's first GEMM, which waits for *ready (if nwait is
 * raised).  In place: the window's, copied to dst unless it is NULL; else dst, expanded. */
const void *moe_pass_take(moe_pass *p, int chunk, void *dst, epo_deps *deps);
/* In place: the rows for all chunks in one operation, and when each chunk's are there. */
const void *moe_pass_take_all(moe_pass *p, epo_ready *arrival);
/* flex, for a chain: all rows to dst, the first chunk's before it, the others' beside it. */
void moe_pass_spread(moe_pass *p, void *dst, epo_ready *arrival);
/* In place: the copy that moe_pass_take makes; behind `after`, if not NULL. */
void moe_pass_keep(moe_pass *p, void *dst, epo_event *after);
/* In place, where the product that reads the rows can keep them, too: it will, and NULL is
 * returned; else dst, for moe_pass_take. */
void *moe_product_keeps(const moe_pass *p, const epo_layer *l, epo_gemm *shape, void *dst);
/* In place: after `used`, and `odd`, if not NULL, the slot is given back. */
void moe_pass_taken(moe_pass *p, epo_event *used, epo_event *odd);
/* p->holds: after `read` the slot is given back. */
void moe_pass_let_go(moe_pass *p, epo_event *read);
/* Where the chunk's experts run. */
epo_queue *moe_pass_lane(const moe_pass *p, int chunk);
/* Chunk's rows, and row_weight[rows] if not NULL, on their way back; call it for
 * chunks in order. */
void moe_pass_return(moe_pass *p, int chunk, const void *rows, const float *row_weight);
void moe_chain_returned(moe_pass *p, const void *rows, const float *row_weight);
/* y[T][H], and slot_weight[T][K] if not NULL, from what came back; moe_pass_sum: with
 * p->sums_beside, weight gradients may be issued before moe_pass_summed. */
void moe_pass_sum(moe_pass *p, void *y, float *slot_weight);
void moe_pass_summed(moe_pass *p);
void moe_pass_finish(moe_pass *p, void *y, float *slot_weight);
/* Waits for the outputs (host); frees; on failure ends the group's work. */
epo_status moe_pass_end(moe_pass *p);

/* ---- experts.c -------------------------------------------------------- */

/* A direction's two products and the activation behind (backward: before) them; first.a is
 * not known yet. */
typedef struct moe_products {
    epo_gemm first, second;
    epo_swiglu act;
} moe_products;
moe_products moe_products_forward(const epo_layer *l, const epo_saved *saved, void *a, void *out);
/* da overwrites nothing: `a` is made again in its place, dh in h's. */
moe_products moe_products_backward(const epo_layer *l, const moe_wgrad *w, void *dx,
                                   float *dweight);
/* Chunk's experts, up to the rows that go back; rows: where x is expanded to. */
void moe_experts_forward(moe_pass *p, epo_layer *l, int c, epo_saved *saved, void *rows, void *a,
                         void *out);
void moe_experts_backward(moe_pass *p, epo_layer *l, int c, moe_wgrad *w, void *dx, float *dweight);
/* The pass's weight gradients, unless delayed, not wanted or issued. */
void moe_backward_wgrad(moe_pass *p, epo_layer *l, moe_wgrad *w);
/* After the pass, which ended with `status`: w runs later, has run, or is dropped. */
epo_status moe_backward_settle(moe_pass *p, epo_layer *l, moe_wgrad *w, epo_status status);

/* ---- memory.c ---------------------------------------------------------- */

/* Bytes of a layer's arrays for a plan; 0: not there. */
typedef struct moe_sizes {
    uint64_t x, tokens, wire, h, a, out, back, back_weight, home, home_weight; /* forward */
    bool x_stays;                  /* until the backward */
    uint64_t dy, x_again, dweight; /* backward */
} moe_sizes;
/* A forward's own arrays; x: expanded rows that are not saved. */
typedef struct moe_forward_blocks {
    moe_block x, a, out;
} moe_forward_blocks;
void moe_forward_memory(moe_pass *p, const epo_layer *layer, epo_saved *saved, bool keep,
                        moe_forward_blocks *b);
/* A pass that only returns rows: what moe_pass_return needs. */
void moe_return_memory(moe_pass *p);
void moe_forward_blocks_put(epo_group *g, moe_forward_blocks *b);
/* Takes saved's blocks over; NULL: it failed, and so did the pass. */
moe_wgrad *moe_backward_memory(moe_pass *p, epo_layer *layer, epo_saved *saved, moe_block *out,
                               moe_block *dweight);
/* Makes it, where it must, after the chunks' experts; then `grad` speaks of it, too. */
void moe_saved_restore(moe_pass *p, const epo_layer *l, const epo_saved *saved, moe_wgrad *w);
/* p->tokens, if not NULL, from the slot's rows, after `arrived`. */
void moe_pass_keep_tokens(moe_pass *p, epo_queue *lane, const epo_ready *arrived);

/* ---- own.c ------------------------------------------------------------- */

/* As moe_experts_forward and _backward, for layers with experts of the caller's. */
void moe_own_forward(moe_pass *p, epo_layer *l, int c, epo_saved *saved, void *rows, void *out);
void moe_own_backward(moe_pass *p, epo_layer *l, int c, moe_wgrad *w, void *dx, float *dweight);
epo_status moe_own_wgrad(moe_wgrad *w, const epo_deps *deps);

/* ---- chain.c ---------------------------------------------------------- */

/* Both products of all chunks, if the backend has one operation for them: then true,
 * part[chunk] tells of a chunk's rows, and `used` or `grad` of the whole; the slot must
 * be given back by moe_pass_taken behind the ways back.  False: nothing was issued. */
bool moe_chain_forward(moe_pass *p, const epo_layer *l, epo_saved *saved, void *rows, void *a,
                       void *out);
bool moe_chain_backward(moe_pass *p, const epo_layer *l, moe_wgrad *w, void *dx, float *dweight);

#endif
