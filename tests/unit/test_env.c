/* SPDX-License-Identifier: Apache-2.0
 *
 * test_env.c - texts, lists of nodes, LD_PRELOAD lists, the record of an environment.
 */
#include "core/env_list.h"
#include "core/env_record.h"
#include "core/hostlist.h"
#include "core/text.h"
#include "unit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Appends to one of the buffers below, all of which are long enough. */
static void add_text(char *text, const char *more) {
    size_t used = strlen(text);
    memcpy(text + used, more, strlen(more) + 1);
}

static void check_append(const char *list, const char *want) {
    char *got = NULL;
    CU_ASSERT_EQUAL_FATAL(epo_env_list_append(list, "/l/ours.so", &got), EPO_OK);
    CU_ASSERT_STRING_EQUAL(got, want);
    free(got);
}

static void append_keeps_the_users_parts(void) {
    check_append(NULL, "/l/ours.so");
    check_append("", "/l/ours.so");
    check_append(" : ", "/l/ours.so");
    check_append("a.so", "a.so:/l/ours.so");
    check_append("a.so b.so", "a.so:b.so:/l/ours.so");
    check_append(":a.so::b.so:", "a.so:b.so:/l/ours.so");
    check_append("/l/ours.so:a.so", "a.so:/l/ours.so");
    check_append("a.so /l/ours.so a.so /l/ours.so", "a.so:/l/ours.so");
    check_append("/l/ours.so.1:ours.so", "/l/ours.so.1:ours.so:/l/ours.so");
}

static void append_refuses_what_a_list_cannot_hold(void) {
    char *got = NULL;
    CU_ASSERT_EQUAL(epo_env_list_append("a", "", &got), EPO_E_ARG);
    CU_ASSERT_EQUAL(epo_env_list_append("a", "/my lib.so", &got), EPO_E_ARG);
    CU_ASSERT_EQUAL(epo_env_list_append("a", "/my:lib.so", &got), EPO_E_ARG);
    CU_ASSERT_PTR_NULL(got);
}

static void remove_takes_one_part_out(void) {
    char *got = NULL;
    CU_ASSERT_EQUAL(epo_env_list_remove("a:x b", "x", &got), EPO_OK);
    CU_ASSERT_STRING_EQUAL(got, "a:b");
    free(got);
    CU_ASSERT_EQUAL(epo_env_list_remove("x", "x", &got), EPO_OK);
    CU_ASSERT_STRING_EQUAL(got, "");
    free(got);
    CU_ASSERT_TRUE(epo_env_list_has("a:x b", "b"));
    CU_ASSERT_FALSE(epo_env_list_has("a:xx b", "x"));
    CU_ASSERT_FALSE(epo_env_list_has(NULL, "x"));
}

/* Random lists: each part once, in the order of first appearance, ours last. */
static void append_against_a_plain_reference(void) {
    static const char *const words[] = {"a", "b", "ab", "ours", "c.so"};
    static const char *const gaps[] = {":", " ", "::", " : "};
    srand(42);
    for (int round = 0; round < 1000; round++) {
        char list[256] = "", want[256] = "";
        bool used[5] = {false};
        int count = rand() % 8;
        for (int i = 0; i < count; i++) {
            int word = rand() % 5;
            add_text(list, i == 0 && rand() % 2 ? "" : gaps[rand() % 4]);
            add_text(list, words[word]);
            if (word != 3 && !used[word]) {
                add_text(want, words[word]);
                add_text(want, ":");
            }
            used[word] = true;
        }
        add_text(want, "ours");
        char *got = NULL, *again = NULL;
        CU_ASSERT_EQUAL_FATAL(epo_env_list_append(list, "ours", &got), EPO_OK);
        CU_ASSERT_STRING_EQUAL(got, want);
        CU_ASSERT_EQUAL_FATAL(epo_env_list_append(got, "ours", &again), EPO_OK);
        CU_ASSERT_STRING_EQUAL(again, got);
        free(got);
        free(again);
    }
}

static void a_record_comes_back_as_it_was(void) {
    srand(7);
    for (int round = 0; round < 500; round++) {
        struct epo_env_record record = EPO_ENV_RECORD_INIT, back = EPO_ENV_RECORD_INIT;
        char values[8][24], befores[8][24];
        int count = rand() % 8;
        for (int i = 0; i < count; i++) {
            char name[16];
            snprintf(name, sizeof name, "NAME_%d", i);
            for (int j = 0; j < 23; j++) {
                values[i][j] = (char)(rand() % 255 + 1);
                befores[i][j] = (char)(rand() % 255 + 1);
            }
            values[i][rand() % 24] = befores[i][rand() % 24] = '\0';
            values[i][23] = befores[i][23] = '\0';
            CU_ASSERT_EQUAL(epo_env_record_add(&record, name, values[i], i % 2 ? befores[i] : NULL),
                            EPO_OK);
        }
        char *text = NULL;
        CU_ASSERT_EQUAL_FATAL(epo_env_record_write(&record, &text), EPO_OK);
        CU_ASSERT_TRUE(epo_text_is_clean(text));
        CU_ASSERT_EQUAL_FATAL(epo_env_record_read(text, &back), EPO_OK);
        CU_ASSERT_EQUAL_FATAL(back.count, count);
        for (int i = 0; i < count; i++) {
            CU_ASSERT_STRING_EQUAL(back.entries[i].value, values[i]);
            if (i % 2)
                CU_ASSERT_STRING_EQUAL(back.entries[i].before, befores[i]);
            if (i % 2 == 0)
                CU_ASSERT_PTR_NULL(back.entries[i].before);
        }
        free(text);
        epo_env_record_clear(&record);
        epo_env_record_clear(&back);
    }
}

static void a_record_that_is_none_is_refused(void) {
    static const char *const texts[] = {"x",       "=1",      "A=1;;B=2", "1A=2",   "A=%0",
                                        "A=%00",   "A=%zz",   "A=1|2|3",  "A=a b",  "A B=1",
                                        "A=1;=2;", "A=\"1\"", ";",        "A=1|%1", "A=\n"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        struct epo_env_record record = EPO_ENV_RECORD_INIT;
        CU_ASSERT_EQUAL(epo_env_record_read(texts[i], &record), EPO_E_ARG);
        CU_ASSERT_EQUAL(record.count, 0);
    }
    char many[EPO_ENV_RECORD_MAX * 4 + 8] = "";
    for (int i = 0; i <= EPO_ENV_RECORD_MAX; i++)
        add_text(many, "A=1;");
    struct epo_env_record record = EPO_ENV_RECORD_INIT;
    CU_ASSERT_EQUAL(epo_env_record_read(many, &record), EPO_E_ARG);
}

static void lists_of_nodes(void) {
    static const struct {
        const char *list, *node;
        int has; /* -1: the list is not valid */
    } cases[] = {
        {"n1", "n1", 1},
        {"n1", "n11", 0},
        {"n1", "n", 0},
        {"n[1-3]", "n2", 1},
        {"n[1-3]", "n4", 0},
        {"n[1-3]", "n02", 0},
        {"n[001-128]", "n017", 1},
        {"n[001-128]", "n17", 0},
        {"n[8-12]", "n10", 1},
        {"a,n[1,3,5-7],b", "n6", 1},
        {"a,n[1,3,5-7],b", "n4", 0},
        {"a,n[1,3,5-7],b", "b", 1},
        {"r[1-2]n[1-2]", "r2n1", 1},
        {"r[1-2]n[1-2]", "r2n3", 0},
        {"r[1-2]1[3-4]", "r213", 1},
        {"n[1-3]-ib", "n2-ib", 1},
        {"n[1-3]-ib", "n2", 0},
        {"gpu_a.site,GPU_B", "gpu_a.site", 1},
        {"gpu_a.site,GPU_B", "GPU_B", 1},
        {"", "n", -1},
        {"n[1-3", "n1", -1},
        {"n[]", "n", -1},
        {"n[3-1]", "n2", -1},
        {"n[1-3]]", "n2", -1},
        {"n1,", "n1", -1},
        {"n 1", "n1", -1},
        {"n[1,]", "n1", -1},
        {"n[a]", "na", -1},
        {"n[1-9999999999]", "n1", -1},
        {"n[0000000001]", "n0000000001", -1},
        {"n[000000001]", "n000000001", 1},
        {"n[-3]", "n3", -1},
        {"n[1-]", "n1", -1},
        {"n*", "n1", -1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        CU_ASSERT_EQUAL(epo_hostlist_valid(cases[i].list), cases[i].has >= 0);
        CU_ASSERT_EQUAL(epo_hostlist_has(cases[i].list, cases[i].node), cases[i].has > 0);
    }
}

static bool collect(const char *node, void *context) {
    char *text = context;
    add_text(text, node);
    add_text(text, " ");
    return strlen(text) < 40;
}

static void lists_of_nodes_are_walked_in_order(void) {
    char text[128] = "";
    CU_ASSERT_TRUE(epo_hostlist_each("a,r[1-2]n[08-10],z", collect, text));
    CU_ASSERT_STRING_EQUAL(text, "a r1n08 r1n09 r1n10 r2n08 r2n09 r2n10 z ");
    text[0] = '\0';
    CU_ASSERT_TRUE(epo_hostlist_each("n[0-999999999]", collect, text));
    CU_ASSERT(strlen(text) < 60);
    CU_ASSERT_FALSE(epo_hostlist_each("n[", collect, text));
}

static bool count(const char *node, void *context) {
    (void)node;
    ++*(long *)context;
    return true;
}

static void no_list_keeps_its_reader_busy(void) {
    char deep[2048] = "";
    long nodes = 0;
    CU_ASSERT_TRUE(epo_hostlist_each("r[1-256]n[0-255]", count, &nodes));
    CU_ASSERT_EQUAL(nodes, 65536);
    CU_ASSERT_FALSE(epo_hostlist_each("n[0-999999999]", count, &nodes));
    CU_ASSERT(nodes < 1000000);
    for (int i = 0; i < 300; i++) /* no name of it is short enough to be one */
        add_text(deep, "[0-9]");
    nodes = 0;
    CU_ASSERT_FALSE(epo_hostlist_each(deep, count, &nodes));
    CU_ASSERT_EQUAL(nodes, 0);
}

static void texts_grow_and_are_cleaned(void) {
    struct epo_text text = EPO_TEXT_INIT;
    for (int i = 0; i < 1000; i++)
        epo_text_format(&text, "%d,", i % 10);
    CU_ASSERT_EQUAL(text.length, 2000);
    char *data = epo_text_take(&text);
    CU_ASSERT_PTR_NOT_NULL_FATAL(data);
    CU_ASSERT_EQUAL(strlen(data), 2000);
    free(data);
    data = epo_text_take(&text);
    CU_ASSERT_STRING_EQUAL(data, "");
    free(data);
    char dirty[] = "a\nb\033[1m\x9b\x7f\t~";
    CU_ASSERT_FALSE(epo_text_is_clean(dirty));
    epo_text_clean(dirty);
    CU_ASSERT_STRING_EQUAL(dirty, "a?b?[1m???~");
    CU_ASSERT_TRUE(epo_text_is_clean(dirty));
}

int main(void) {
#define TEST(name)                                                                                 \
    { #name, name }
    const CU_TestInfo tests[] = {TEST(append_keeps_the_users_parts),
                                 TEST(append_refuses_what_a_list_cannot_hold),
                                 TEST(remove_takes_one_part_out),
                                 TEST(append_against_a_plain_reference),
                                 TEST(a_record_comes_back_as_it_was),
                                 TEST(a_record_that_is_none_is_refused),
                                 TEST(lists_of_nodes),
                                 TEST(lists_of_nodes_are_walked_in_order),
                                 TEST(no_list_keeps_its_reader_busy),
                                 TEST(texts_grow_and_are_cleaned),
                                 CU_TEST_INFO_NULL};
    return unit_run("env", tests);
}
