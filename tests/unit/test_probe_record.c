/* SPDX-License-Identifier: Apache-2.0
 *
 * test_probe_record.c - the probe's record: what goes in comes out, and nothing else does.
 */
#include "core/probe_record.h"
#include "unit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct epo_probe_record record;

static epo_facts *some_facts(void) {
    epo_facts *facts = epo_facts_create();
    CU_ASSERT_PTR_NOT_NULL_FATAL(facts);
    epo_facts_set_text(facts, "gpu_name", "NVIDIA H100 80GB HBM3", "NVML");
    epo_facts_set(facts, "gpu_major", "9", "NVML");
    epo_facts_set(facts, "node.all_gpus_p2p", "True", "NVML, 8 GPUs");
    epo_facts_set_text(facts, "torch_version", "2.8", "METADATA");
    epo_facts_set(facts, "te_version", NULL, "the packages");
    epo_facts_set_unknown(facts, "nccl_version", "the file does not tell", "libnccl.so.2");
    return facts;
}

static void facts_come_back(void) {
    epo_facts *facts = some_facts(), *back = epo_facts_create();
    CU_ASSERT_EQUAL(epo_probe_record_write(facts, &record), EPO_OK);
    CU_ASSERT_EQUAL_FATAL(epo_probe_record_read(&record, back), EPO_OK);
    CU_ASSERT_EQUAL_FATAL(epo_facts_count(back), epo_facts_count(facts));
    for (size_t i = 0; i < epo_facts_count(facts); i++) {
        const epo_fact *one = epo_facts_at(facts, i), *two = epo_facts_at(back, i);
        CU_ASSERT_STRING_EQUAL(one->key, two->key);
        CU_ASSERT_EQUAL(one->kind, two->kind);
        CU_ASSERT_STRING_EQUAL(one->text, two->text);
        CU_ASSERT_STRING_EQUAL(one->source, two->source);
        CU_ASSERT_EQUAL(one->number, two->number);
    }
    epo_facts_destroy(facts);
    epo_facts_destroy(back);
}

static void an_empty_record_is_one(void) {
    epo_facts *facts = epo_facts_create(), *back = epo_facts_create();
    CU_ASSERT_EQUAL(epo_probe_record_write(facts, &record), EPO_OK);
    CU_ASSERT_EQUAL(epo_probe_record_read(&record, back), EPO_OK);
    CU_ASSERT_EQUAL(epo_facts_count(back), 0);
    epo_facts_destroy(facts);
    epo_facts_destroy(back);
}

static void control_characters_do_not_travel(void) {
    epo_facts *facts = epo_facts_create(), *back = epo_facts_create();
    epo_facts_set_text(facts, "gpu_name", "H100\n\033[2Jroot\xc3\xa9", "a\tb");
    CU_ASSERT_EQUAL(epo_probe_record_write(facts, &record), EPO_OK);
    CU_ASSERT_EQUAL(epo_probe_record_read(&record, back), EPO_OK);
    const epo_fact *fact = epo_facts_find(back, "gpu_name");
    CU_ASSERT_PTR_NOT_NULL_FATAL(fact);
    CU_ASSERT_STRING_EQUAL(fact->text, "H100??[2Jroot??");
    CU_ASSERT_STRING_EQUAL(fact->source, "a?b");
    epo_facts_destroy(facts);
    epo_facts_destroy(back);
}

static void too_long_is_unknown_and_too_many_fail(void) {
    static char text[EPO_PROBE_VALUE_MAX + 1];
    epo_facts *facts = epo_facts_create(), *back = epo_facts_create();
    memset(text, 'x', EPO_PROBE_VALUE_MAX);
    epo_facts_set_text(facts, "node.gpus", text, "NVML");
    epo_facts_set_text(facts, "node.nvml", text + 1, "NVML");
    CU_ASSERT_EQUAL(epo_probe_record_write(facts, &record), EPO_OK);
    CU_ASSERT_EQUAL(epo_probe_record_read(&record, back), EPO_OK);
    CU_ASSERT_EQUAL(epo_facts_find(back, "node.gpus")->kind, EPO_FACT_UNKNOWN);
    CU_ASSERT_EQUAL(epo_facts_find(back, "node.nvml")->kind, EPO_FACT_TEXT);
    for (int i = 0; i <= EPO_PROBE_FACTS_MAX; i++) {
        char key[32];
        snprintf(key, sizeof key, "node.x%d", i);
        epo_facts_set(facts, key, "1", "test");
    }
    CU_ASSERT_EQUAL(epo_probe_record_write(facts, &record), EPO_E_OVERFLOW);
    epo_facts_destroy(facts);
    epo_facts_destroy(back);
}

static void only_a_probe_s_facts_are_taken(void) {
    static const char *const bad[] = {"overlap_moe_expert_parallel_comm",
                                      "env.PATH",
                                      "",
                                      "node",
                                      "node.A",
                                      "node.a b",
                                      "gpu_nam",
                                      "gpu_name2"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        epo_facts *facts = epo_facts_create();
        CU_ASSERT_FALSE(epo_probe_key_allowed(bad[i]));
        epo_facts_set(facts, bad[i], "1", "test");
        CU_ASSERT_EQUAL(epo_probe_record_write(facts, &record), EPO_E_ARG);
        epo_facts_destroy(facts);
    }
}

static uint64_t fnv(void) {
    uint64_t sum = UINT64_C(14695981039346656037);
    const unsigned char *parts[] = {(unsigned char *)&record.count, (unsigned char *)&record.used,
                                    (unsigned char *)record.text};
    const size_t sizes[] = {4, 4, sizeof record.text};
    for (int p = 0; p < 3; p++)
        for (size_t i = 0; i < sizes[p]; i++)
            sum = (sum ^ parts[p][i]) * UINT64_C(1099511628211);
    return sum;
}

/* Any single damaged byte is found by the checksum or the head. */
static void a_damaged_byte_is_found(void) {
    epo_facts *facts = some_facts(), *back = epo_facts_create();
    CU_ASSERT_EQUAL(epo_probe_record_write(facts, &record), EPO_OK);
    for (size_t at = 0; at < sizeof record; at += at < 600 ? 1 : 997) {
        ((unsigned char *)&record)[at] ^= 0x41;
        CU_ASSERT_NOT_EQUAL(epo_probe_record_read(&record, back), EPO_OK);
        CU_ASSERT_EQUAL(epo_facts_count(back), 0);
        ((unsigned char *)&record)[at] ^= 0x41;
    }
    CU_ASSERT_EQUAL(epo_probe_record_read(&record, back), EPO_OK);
    epo_facts_destroy(facts);
    epo_facts_destroy(back);
}

/* A liar with the right checksum: whatever is taken is clean and allowed. */
static void a_liar_s_record_does_no_harm(void) {
    epo_facts *facts = some_facts();
    unsigned seed = 7, taken = 0, refused = 0;
    for (int round = 0; round < 3000; round++) {
        CU_ASSERT_EQUAL_FATAL(epo_probe_record_write(facts, &record), EPO_OK);
        for (int hits = 1 + rand_r(&seed) % 3; hits > 0; hits--)
            switch (rand_r(&seed) % 4) {
            case 0: record.used = (uint32_t)rand_r(&seed) % 40000; break;
            case 1: record.count = (uint32_t)rand_r(&seed) % 140; break;
            default: record.text[(unsigned)rand_r(&seed) % 400] = (char)(rand_r(&seed) % 256);
            }
        record.checksum = fnv();
        epo_facts *back = epo_facts_create();
        if (epo_probe_record_read(&record, back) != EPO_OK) {
            CU_ASSERT_EQUAL(epo_facts_count(back), 0);
            refused++;
        } else {
            taken++;
        }
        for (size_t i = 0; i < epo_facts_count(back); i++) {
            const epo_fact *fact = epo_facts_at(back, i);
            CU_ASSERT_TRUE(epo_probe_key_allowed(fact->key));
            for (const char *c = fact->text; *c != '\0'; c++)
                CU_ASSERT_TRUE(*c >= ' ' && *c < 127);
        }
        epo_facts_destroy(back);
    }
    CU_ASSERT_TRUE(refused > 1000 && taken > 10);
    epo_facts_destroy(facts);
}

static void another_release_is_named(void) {
    epo_facts *facts = some_facts(), *back = epo_facts_create();
    CU_ASSERT_EQUAL(epo_probe_record_write(facts, &record), EPO_OK);
    record.version = 2;
    CU_ASSERT_EQUAL(epo_probe_record_read(&record, back), EPO_E_VERSION);
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "version 2"));
    epo_facts_destroy(facts);
    epo_facts_destroy(back);
}

int main(void) {
#define TEST(name)                                                                                 \
    { #name, name }
    const CU_TestInfo tests[] = {TEST(facts_come_back),
                                 TEST(an_empty_record_is_one),
                                 TEST(control_characters_do_not_travel),
                                 TEST(too_long_is_unknown_and_too_many_fail),
                                 TEST(only_a_probe_s_facts_are_taken),
                                 TEST(a_damaged_byte_is_found),
                                 TEST(a_liar_s_record_does_no_harm),
                                 TEST(another_release_is_named),
                                 CU_TEST_INFO_NULL};
    return unit_run("probe record", tests);
}
