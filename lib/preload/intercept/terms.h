/* SPDX-License-Identifier: Apache-2.0
 *
 * terms.h - which way a message goes.  Pure functions of what both of its ends know:
 * the two cards exchanged when the communicator was made, and the message's bytes.
 * Nothing else may enter here: an end that decides by anything of its own would wait
 * for a message that its peer sends another way.
 */
#ifndef EPO_INTERCEPT_TERMS_H
#define EPO_INTERCEPT_TERMS_H

#include <stdbool.h>
#include <stdint.h>

#define EPO_TERMS_ABI 1u

/* What one rank of a communicator tells the others of its node. */
typedef struct epo_terms_card {
    uint32_t abi, slots;
    uint64_t slot_bytes, least; /* least: bytes below which a message is NCCL's */
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
           a->ranks == b->ranks && a->rank != b->rank && a->pid != b->pid && a->slots == b->slots &&
           a->slot_bytes == b->slot_bytes && a->slots >= 2 && a->slot_bytes > 0;
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

/* How a window is cut for messages from `peers` other ranks of the node: at least two
 * slots, so that rounds of sends and receives never wait for each other in a ring. */
static inline void epo_terms_slots(unsigned peers, uint64_t bytes, uint32_t *slots,
                                   uint64_t *slot_bytes) {
    const uint64_t unit = UINT64_C(512) << 10, most = UINT64_C(8) << 20;
    *slots = peers <= 2 ? 4 : 2;
    uint64_t each = peers > 0 ? bytes / (peers * *slots) / unit * unit : 0;
    *slot_bytes = each > most ? most : each;
}

#endif
