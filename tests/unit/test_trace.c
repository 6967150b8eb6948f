/* SPDX-License-Identifier: Apache-2.0
 *
 * test_trace - interval unions against a reference that paints every nanosecond.
 */
#include "trace/intervals.h"
#include "unit.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define SPAN_OF_TIME 400

static uint64_t random_state = 1;
static uint32_t random_below(uint32_t n) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 33) % n;
}

/* One set of up to `most` spans around `origin`, in random order, painted as well. */
static void random_set(epo_spans *set, bool *paint, uint32_t most, int64_t origin) {
    uint32_t count = random_below(most + 1);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t start = random_below(SPAN_OF_TIME);
        uint32_t longest = random_below(4) == 0 ? SPAN_OF_TIME - start : 12;
        uint32_t end = start + random_below(longest + 1); /* length 0 included */
        if (end > SPAN_OF_TIME)
            end = SPAN_OF_TIME;
        CU_ASSERT_EQUAL_FATAL(epo_spans_add(set, origin + start, origin + end), EPO_OK);
        for (uint32_t t = start; t < end; t++)
            paint[t] = true;
    }
}

static void random_sets_against_painting(void) {
    static const int64_t origins[] = {0, -200, INT64_MIN, INT64_MAX - SPAN_OF_TIME,
                                      INT64_C(1) << 53};
    for (int round = 0; round < 2000; round++) {
        bool a[SPAN_OF_TIME] = {false}, b[SPAN_OF_TIME] = {false};
        epo_spans comm = {NULL, 0, 0}, compute = {NULL, 0, 0};
        epo_overlap_times t;
        uint64_t na = 0, nb = 0, common = 0, both = 0;
        int64_t origin = origins[round % 5];
        random_set(&comm, a, round % 3 == 0 ? 4 : 40, origin);
        random_set(&compute, b, round % 2 == 0 ? 4 : 40, origin);
        for (int i = 0; i < SPAN_OF_TIME; i++) {
            na += a[i];
            nb += b[i];
            common += a[i] && b[i];
            both += a[i] || b[i];
        }
        epo_spans_compare(&comm, &compute, &t);
        CU_ASSERT(t.comm == na && t.compute == nb && t.overlapped == common && t.both == both);
        CU_ASSERT_EQUAL(t.exposed, both - nb);
        for (size_t i = 1; i < comm.count; i++)
            CU_ASSERT(comm.span[i - 1].end < comm.span[i].start);
        epo_spans_free(&comm);
        epo_spans_free(&compute);
    }
}

static void known_cases(void) {
    static const struct {
        epo_span span[4];
        int count;
        uint64_t length, pieces;
    } cases[] = {
        {{{0, 0}}, 0, 0, 0},                            /* none */
        {{{5, 5}}, 1, 0, 0},                            /* empty */
        {{{0, 10}, {10, 20}}, 2, 20, 1},                /* touching */
        {{{10, 20}, {0, 10}, {30, 31}}, 3, 21, 2},      /* any order, a gap */
        {{{0, 100}, {10, 20}, {30, 40}}, 3, 100, 1},    /* nested */
        {{{0, 10}, {0, 10}, {0, 10}, {0, 3}}, 4, 10, 1} /* the same again */
    };
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        epo_spans set = {NULL, 0, 0};
        for (int i = 0; i < cases[c].count; i++)
            CU_ASSERT_EQUAL(epo_spans_add(&set, cases[c].span[i].start, cases[c].span[i].end),
                            EPO_OK);
        epo_spans_merge(&set);
        CU_ASSERT_EQUAL(epo_spans_length(&set), cases[c].length);
        CU_ASSERT_EQUAL(set.count, cases[c].pieces);
        epo_spans_free(&set);
    }
}

static void ends_of_64_bits(void) {
    epo_spans set = {NULL, 0, 0}, part = {NULL, 0, 0};
    CU_ASSERT_EQUAL(epo_spans_add(&set, INT64_MIN, 0), EPO_OK);
    CU_ASSERT_EQUAL(epo_spans_add(&set, 0, INT64_MAX), EPO_OK);
    CU_ASSERT_EQUAL(epo_spans_add(&part, -5, 7), EPO_OK);
    epo_spans_merge(&set);
    epo_spans_merge(&part);
    CU_ASSERT_EQUAL(epo_spans_length(&set), UINT64_MAX);
    CU_ASSERT_EQUAL(epo_spans_common(&set, &part), 12);
    epo_spans_free(&set);
    epo_spans_free(&part);
}

static void refused_and_grown(void) {
    epo_spans set = {NULL, 0, 0};
    CU_ASSERT_EQUAL(epo_spans_add(&set, 7, 6), EPO_E_ARG);
    CU_ASSERT_EQUAL(set.count, 0);
    for (int64_t i = 0; i < 2000; i++)
        CU_ASSERT_EQUAL_FATAL(epo_spans_add(&set, i / 2 * 3, i / 2 * 3 + 1), EPO_OK);
    CU_ASSERT_EQUAL(set.count, 2000);
    epo_spans_merge(&set);
    CU_ASSERT_EQUAL(epo_spans_length(&set), 1000);
    epo_spans_free(&set);
    epo_spans_free(&set);
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"random sets against painted nanoseconds", random_sets_against_painting},
        {"none, empty, touching, nested, repeated", known_cases},
        {"the ends of 64 bits", ends_of_64_bits},
        {"a span that ends before it starts; growth", refused_and_grown},
        CU_TEST_INFO_NULL,
    };
    return unit_run("trace", tests);
}
