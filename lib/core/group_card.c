/* SPDX-License-Identifier: Apache-2.0 */
#include "core/group_card.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CARD_MAGIC UINT32_C(0x65706331) /* "epc1" */
#define CARDS_HERE 256                  /* without memory that could be lacking: the others wait */

typedef struct card {
    uint32_t magic;
    int32_t status, rank;
    char text[244];
} card;

static epo_status read_cards(const card *all, int ranks) {
    for (int r = 0; r < ranks; r++)
        if (all[r].magic != CARD_MAGIC || all[r].rank != r)
            return epo_fail(EPO_E_PEER,
                            "the caller's bootstrap: allgather gave nothing of rank %d, or its "
                            "ep-overlap is another version",
                            r);
    for (int r = 0; r < ranks; r++)
        if (all[r].status != EPO_OK)
            return epo_fail((epo_status)all[r].status, "rank %d made no group: %.240s", r,
                            all[r].text);
    return EPO_OK;
}

epo_status epo_group_card(const epo_bootstrap *bootstrap, int rank, int ranks, epo_status mine) {
    card own, here[CARDS_HERE], *more = NULL, *all = here;
    char text[EPO_ERROR_MAX];
    snprintf(text, sizeof text, "%s", epo_fail_text());
    if (ranks > CARDS_HERE && (all = more = calloc((size_t)ranks, sizeof *all)) == NULL)
        return epo_fail(EPO_E_NOMEM, "a group: need %zu bytes for %d ranks",
                        (size_t)ranks * sizeof *all, ranks);
    memset(&own, 0, sizeof own);
    own.magic = CARD_MAGIC;
    own.status = (int32_t)mine;
    own.rank = rank;
    if (mine != EPO_OK)
        snprintf(own.text, sizeof own.text, "%.240s", text);
    int rc = bootstrap->allgather(bootstrap->ctx, &own, sizeof own, all);
    epo_status status = mine;
    if (mine != EPO_OK)
        status = epo_fail(mine, "%s", text); /* what the callback may have overwritten */
    else if (rc != 0)
        status = epo_fail(EPO_E_PEER, "the caller's bootstrap: allgather returned %d", rc);
    else
        status = read_cards(all, ranks);
    free(more);
    return status;
}
