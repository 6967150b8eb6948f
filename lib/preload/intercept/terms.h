/* SPDX-License-Identifier: Apache-2.0
 *
 * terms.h - what two ranks have in common, from the two cards exchanged when their
 * communicator was made.
 */
#ifndef EPO_INTERCEPT_TERMS_H
#define EPO_INTERCEPT_TERMS_H

#include <stdbool.h>
#include <stdint.h>

#define EPO_TERMS_ABI 3u

/* What one rank of a communicator tells the others of its node. */
typedef struct epo_terms_card {
    uint32_t abi;
    uint64_t least; /* bytes below which a message is NCCL's */
    int32_t rank, ranks, pid, usable;
    int32_t whole; /* wants ncclAlltoAll to be carried, too */
} epo_terms_card;

/* What two ranks have in common; `usable` false: all their messages are NCCL's. */
typedef struct epo_terms {
    bool usable;
    uint64_t least;
} epo_terms;

static inline bool epo_terms_fit(const epo_terms_card *a, const epo_terms_card *b) {
    return a->usable && b->usable && a->abi == EPO_TERMS_ABI && b->abi == EPO_TERMS_ABI &&
           a->ranks == b->ranks && a->rank != b->rank && a->pid != b->pid;
}

/* The same whichever of the two asks. */
static inline epo_terms epo_terms_of(const epo_terms_card *a, const epo_terms_card *b) {
    epo_terms t = {epo_terms_fit(a, b), a->least > b->least ? a->least : b->least};
    return t;
}

/* `bytes` 0 (also: a type that we do not know) is NCCL's. */
static inline bool epo_terms_carry(const epo_terms *t, uint64_t bytes) {
    return t->usable && bytes > 0 && bytes >= t->least;
}

#endif
