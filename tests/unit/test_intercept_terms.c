/* SPDX-License-Identifier: Apache-2.0
 *
 * The way of a message must be the same at both of its ends, for any two cards.
 */
#include "config.h"

#include "unit.h"

#include <stdlib.h>

#include "preload/intercept/nccl_abi.h"
#include "preload/intercept/terms.h"

static uint64_t state = 7;

static uint64_t next(uint64_t most) {
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (state >> 33) % most;
}

static epo_terms_card random_card(void) {
    epo_terms_card c = {
        .abi = EPO_TERMS_ABI + (next(8) == 0),
        .least = next(4) << 19,
        .rank = (int32_t)next(4),
        .ranks = 4 + (next(8) == 0),
        .pid = (int32_t)next(6),
        .usable = next(8) != 0,
    };
    return c;
}

static void test_both_ends(void) {
    int carried = 0, left = 0;
    for (int i = 0; i < 200000; i++) {
        const epo_terms_card a = random_card(), b = random_card();
        const epo_terms sender = epo_terms_of(&a, &b), receiver = epo_terms_of(&b, &a);
        const uint64_t bytes = next(8) << 18;
        const bool carries = epo_terms_carry(&sender, bytes);
        if (carries != epo_terms_carry(&receiver, bytes)) {
            CU_FAIL_FATAL("the ends differ");
        }
        carried += carries;
        left += !carries;
        if (carries && (bytes < a.least || bytes < b.least || !a.usable || !b.usable))
            CU_FAIL_FATAL("carried where the cards do not allow it");
    }
    CU_ASSERT_TRUE(carried > 1000 && left > 1000);
}

static void test_refusals(void) {
    const epo_terms_card good = {EPO_TERMS_ABI, 1 << 20, 0, 2, 10, 1, 0};
    epo_terms_card peer = good;
    peer.rank = 1;
    peer.pid = 11;
    CU_ASSERT_TRUE(epo_terms_of(&good, &peer).usable);
    const epo_terms t = epo_terms_of(&good, &peer);
    CU_ASSERT_TRUE(epo_terms_carry(&t, 1 << 20));
    CU_ASSERT_FALSE(epo_terms_carry(&t, (1 << 20) - 1));
    CU_ASSERT_FALSE(epo_terms_carry(&t, 0));
    epo_terms_card bad[5] = {peer, peer, peer, peer, peer};
    bad[0].rank = 0; /* two processes of one rank */
    bad[1].pid = 10; /* threads of one process */
    bad[2].abi++;
    bad[3].usable = 0;
    bad[4].ranks = 3;
    for (int i = 0; i < 5; i++)
        CU_ASSERT_FALSE(epo_terms_of(&good, &bad[i]).usable);
}

static void test_types(void) {
    CU_ASSERT_EQUAL(epo_nccl_type_bytes(0), 1);
    CU_ASSERT_EQUAL(epo_nccl_type_bytes(4), 8);
    CU_ASSERT_EQUAL(epo_nccl_type_bytes(6), 2);
    CU_ASSERT_EQUAL(epo_nccl_type_bytes(9), 2);
    CU_ASSERT_EQUAL(epo_nccl_type_bytes(12), 0);
    CU_ASSERT_EQUAL(epo_nccl_type_bytes(-1), 0);
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"both ends of a message decide alike", test_both_ends},
        {"what refuses a pair", test_refusals},
        {"bytes of NCCL's types", test_types},
        CU_TEST_INFO_NULL,
    };
    return unit_run("interposer: terms", tests);
}
