/* SPDX-License-Identifier: Apache-2.0
 *
 * Every symptom in a line that shows it, none in healthy logs; the matcher against
 * plain search.
 */
#include "core/status.h"
#include "trace/matcher.h"
#include "trace/symptoms.h"
#include "unit.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t scan_one(epo_symptom_scan *scan, const char *line, uint64_t number) {
    return epo_symptom_scan_line(scan, line, strlen(line), number);
}

static epo_symptom_scan *new_scan(void) {
    epo_symptom_scan *scan = NULL;
    CU_ASSERT_EQUAL_FATAL(epo_symptom_scan_create(&scan), EPO_OK);
    return scan;
}

static void each_symptom_is_found_in_its_line(void) {
    for (size_t i = 0; i < epo_symptoms_count(); i++) {
        const epo_symptom *s = epo_symptoms_at(i);
        epo_symptom_scan *scan = new_scan();
        char line[1024];
        snprintf(line, sizeof line, "12: [rank3]: %s", s->example);
        size_t found = scan_one(scan, line, 77);
        const epo_symptom_seen *seen = epo_symptom_scan_seen(scan, i);
        if (seen->count != 1 || found != 1)
            fprintf(stderr, "%s: found %zu times, %zu symptoms\n", s->id, (size_t)seen->count,
                    found);
        CU_ASSERT(seen->count == 1 && found == 1 && seen->line == 77);
        CU_ASSERT(strncmp(seen->text, line, 40) == 0);
        CU_ASSERT_EQUAL(epo_symptom_scan_unknown(scan)->count, 0);
        epo_symptom_scan_destroy(scan);
    }
}

/* Each pattern by itself: its parts with something between. */
static void each_pattern_is_found(void) {
    for (size_t i = 0; i < epo_symptoms_count() * 3; i++) {
        const char *pattern = epo_symptoms_at(i / 3)->pattern[i % 3];
        char line[512] = "x ";
        if (pattern[0] == '\0')
            continue;
        for (const char *c = pattern; *c != '\0'; c++)
            snprintf(line + strlen(line), sizeof line - strlen(line), *c == '*' ? " - " : "%c", *c);
        epo_symptom_scan *scan = new_scan();
        scan_one(scan, line, 1);
        if (epo_symptom_scan_seen(scan, i / 3)->count != 1)
            fprintf(stderr, "%s: not found in \"%s\"\n", pattern, line);
        CU_ASSERT_EQUAL(epo_symptom_scan_seen(scan, i / 3)->count, 1);
        epo_symptom_scan_destroy(scan);
    }
}

static void healthy_lines_show_nothing(void) {
    static const char *const healthy[] = {
        "using world size: 16, data-parallel size: 16, context-parallel size: 1",
        "------------------------ arguments ------------------------",
        "  overlap_moe_expert_parallel_comm ................ True",
        "  delay_wgrad_compute ............................. True",
        "  distributed_timeout_minutes ..................... 10",
        "  moe_flex_dispatcher_backend ..................... deepep",
        "  cuda_graph_impl ................................. none",
        "-------------------- end of arguments ---------------------",
        "> initializing torch distributed ...",
        "INFO:megatron.core.num_microbatches_calculator:setting number of microbatches to constant "
        "16",
        "NCCL version 2.28.3+cuda13.0",
        "node1:42:42 [0] NCCL INFO NCCL_P2P_DISABLE set by environment to 0.",
        "+ export CUDA_DEVICE_MAX_CONNECTIONS=32",
        "+ export CUDA_LAUNCH_BLOCKING=0",
        "DeepEP dispatch with 20 SMs, timeout of 100 s",
        "ep-overlap: on, dispatcher flex, delayed wgrad (--ep-overlap=on, the command line)",
        "ep-overlap: set TORCH_NCCL_HIGH_PRIORITY=1 CUDA_DEVICE_MAX_CONNECTIONS=32",
        " [2026-09-24 09:43:42] iteration        2/      20 | consumed samples:           32 | "
        "elapsed "
        "time per iteration (ms): 658.3 | learning rate: 1.000000E-04 | global batch size:    16 | "
        "lm "
        "loss: 1.250274E+01 | loss scale: 1.0 | grad norm: 2.772 | number of skipped iterations:   "
        "0 | "
        "number of nan iterations:   0 |",
        "[Rank 0] (after 2 iterations) memory (MB) | allocated: 70974.6 | max allocated: 136133.7",
        "saving checkpoint at iteration      10 to /ckpt in torch_dist format",
        "ep-train: overlap is on because of --ep-overlap=on",
        "training ...",
        ""};
    epo_symptom_scan *scan = new_scan();
    for (size_t i = 0; i < sizeof healthy / sizeof *healthy; i++) {
        size_t found = scan_one(scan, healthy[i], i + 1);
        if (found > 0)
            fprintf(stderr, "a symptom in: %s\n", healthy[i]);
        CU_ASSERT_EQUAL(found, 0);
    }
    CU_ASSERT_EQUAL(epo_symptom_scan_unknown(scan)->count, 0);
    epo_symptom_scan_destroy(scan);
}

static void unknown_refusals_are_kept(void) {
    epo_symptom_scan *scan = new_scan();
    scan_one(scan, "AssertionError: something of tomorrow", 5);
    scan_one(scan, "ValueError: another", 6);
    CU_ASSERT(epo_symptom_scan_unknown(scan)->count == 2 &&
              epo_symptom_scan_unknown(scan)->line == 5);
    epo_symptom_scan_destroy(scan);
    epo_symptom_scan_destroy(NULL);
}

static void the_table_is_whole(void) {
    for (size_t i = 0; i < epo_symptoms_count(); i++) {
        const epo_symptom *s = epo_symptoms_at(i);
        for (size_t k = 0; k < i; k++)
            CU_ASSERT_STRING_NOT_EQUAL(s->id, epo_symptoms_at(k)->id);
        CU_ASSERT(s->title[0] && s->pattern[0][0] && s->cause[0] && s->confirm[0] && s->mend[0]);
    }
    CU_ASSERT_PTR_NULL(epo_symptoms_at(epo_symptoms_count()));
}

typedef struct hits {
    size_t count[8];
} hits;

static void count_hit(void *context, size_t word, size_t end) {
    (void)end;
    ((hits *)context)->count[word]++;
}

/* Words over two letters meet and nest in every way. */
static void the_matcher_finds_what_plain_search_finds(void) {
    unsigned seed = 4;
    for (int round = 0; round < 500; round++) {
        char word[8][8], text[200];
        const char *list[8];
        for (int w = 0; w < 8; w++) {
            int length = rand_r(&seed) % 6;
            for (int i = 0; i < length; i++)
                word[w][i] = (char)('a' + rand_r(&seed) % 2);
            word[w][length] = '\0';
            list[w] = word[w];
        }
        for (size_t i = 0; i < sizeof text - 1; i++)
            text[i] = (char)('a' + rand_r(&seed) % 2);
        text[sizeof text - 1] = '\0';
        epo_matcher *m = NULL;
        hits found = {{0}};
        CU_ASSERT_EQUAL_FATAL(epo_matcher_create(list, 8, &m), EPO_OK);
        epo_matcher_scan(m, text, strlen(text), count_hit, &found);
        for (int w = 0; w < 8; w++) {
            size_t wanted = 0;
            for (const char *at = text; word[w][0] != '\0' && (at = strstr(at, word[w])) != NULL;
                 at++)
                wanted++;
            CU_ASSERT_EQUAL(found.count[w], wanted);
        }
        epo_matcher_destroy(m);
    }
    epo_matcher_destroy(NULL);
}

static void too_many_letters_are_refused(void) {
    char *big = malloc(EPO_MATCHER_STATES + 2);
    memset(big, 'x', EPO_MATCHER_STATES + 1);
    big[EPO_MATCHER_STATES + 1] = '\0';
    const char *list[] = {big};
    epo_matcher *m = NULL;
    CU_ASSERT_EQUAL(epo_matcher_create(list, 1, &m), EPO_E_OVERFLOW);
    CU_ASSERT_PTR_NULL(m);
    free(big);
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"each symptom is found in its line", each_symptom_is_found_in_its_line},
        {"each pattern is found", each_pattern_is_found},
        {"healthy lines show nothing", healthy_lines_show_nothing},
        {"unknown refusals are kept", unknown_refusals_are_kept},
        {"the table is whole", the_table_is_whole},
        {"the matcher finds what plain search finds", the_matcher_finds_what_plain_search_finds},
        {"too many letters are refused", too_many_letters_are_refused},
        CU_TEST_INFO_NULL,
    };
    return unit_run("symptoms", tests);
}
