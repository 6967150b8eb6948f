/* SPDX-License-Identifier: Apache-2.0
 *
 * link.h - flex across nodes: link.c, link_maps.c, link_pass.c.
 */
#ifndef EPO_MOE_LINK_H
#define EPO_MOE_LINK_H

#include "moe/pass.h"

/* Flex across nodes.  A token's row goes once to each other node that has experts for it, to
 * the rank with the sender's place there (the relay), which sends it on as if it were one of
 * its own tokens; what comes back is summed there and sent home once.  The plan's maps are
 * those of the node: of this rank's tokens, and behind them those that it relays, in the order
 * (node, token), whatever the chunks. */
struct moe_link {
    int tokens, all; /* of this rank; with those that it relays */
    uint64_t dropped;
    int nodes, node;
    uint64_t out, in;               /* rows to and from other nodes */
    uint64_t *out_block, *in_block; /* [N]: first of each node's */
    uint64_t *out_rows, *in_rows;   /* [N] */
    uint64_t *there, *home;         /* [N]: before this rank's rows at that relay, and before
                                     * its block of what it relays in the owner's home slot */
    uint64_t *there_tokens;         /* [N]: the relay's own tokens */
    uint32_t *out_first, *out_last; /* [N][n+1]: prefix sums by chunk */
    uint32_t *in_first, *in_last;
    int32_t *out_token;               /* [out]: in token order */
    int32_t *out_sent, *out_returned; /* [out]: place within its node's block */
    int32_t *in_sent, *in_returned;   /* [in] */
    int64_t *out_expert, *in_expert;  /* [out][K], [in][K]: the node's, -1 for others */
    int64_t *experts;                 /* [all][K]: of this node */
    float *weights;                   /* [all][K] */
    moe_lane dispatch, combine;
    uint64_t *back_first;        /* [n+1]: rows that go home, by chunk */
    const int32_t *back_sum;     /* [in][width]: of the combine slot's rows */
    const int32_t *back_weight;  /* [in][K] */
    const int32_t *sum, *weight; /* [tokens][N], [tokens][K]: of the home slot */
    moe_arena routing, maps;
    void *memory, *chunks_memory;
};

/* [collective]  Exchanges what the nodes must know; *routing becomes the plan's.  Every rank
 * returns the same verdict. */
epo_status moe_link_open(epo_buffer *b, epo_routing *routing, epo_status wrong, moe_link **out);
/* Behind the plan's own maps. */
epo_status moe_link_finish(epo_plan *p);
void moe_link_free(epo_group *group, moe_link *link);

/* plan->link: rows of src[T][H], as they travel, to the relays; where the relayed ones and
 * this rank's own lie then. */
const void *moe_link_dispatch(moe_pass *p, const void *src);
/* The chunk has come from other nodes. */
epo_ready moe_link_arrived(const moe_pass *p, int chunk);
/* All that came was sent on: behind the last chunk. */
void moe_link_sent_on(moe_pass *p);
/* Behind the chunk's way back within the node: what is complete goes home. */
void moe_link_return(moe_pass *p, int chunk, bool weights);
/* In moe_pass_finish's place, but for the combine slot's credit. */
void moe_link_sum(moe_pass *p, void *y, float *slot_weight);

#endif
