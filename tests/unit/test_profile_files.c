/* SPDX-License-Identifier: Apache-2.0
 *
 * Profilers' files: databases with the columns of several Nsight versions, Chrome
 * traces in every spelling, and files that are cut, empty or something else.
 */
#include "core/status.h"
#include "trace/profile.h"
#include "unit.h"

#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char path[64];

static void write_file(const char *bytes, size_t length) {
    FILE *f = fopen(path, "w");
    CU_ASSERT_PTR_NOT_NULL_FATAL(f);
    fwrite(bytes, 1, length, f);
    fclose(f);
}

static void write_database(const char *const *statements) {
    sqlite3 *db = NULL;
    unlink(path);
    CU_ASSERT_EQUAL_FATAL(sqlite3_open(path, &db), SQLITE_OK);
    for (; *statements != NULL; statements++) {
        int status = sqlite3_exec(db, *statements, NULL, NULL, NULL);
        if (status != SQLITE_OK)
            fprintf(stderr, "%s: %s\n", *statements, sqlite3_errmsg(db));
        CU_ASSERT_EQUAL_FATAL(status, SQLITE_OK);
    }
    sqlite3_close(db);
}

static epo_status read_it(epo_profile **out) {
    static const epo_profile_options options = {0};
    return epo_profile_read(path, &options, out);
}

#define PID(pid) "(" #pid " << 24)"
#define STRINGS                                                                                    \
    "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)",                                 \
        "INSERT INTO StringIds VALUES (1, 'void deep_ep::intranode::dispatch<8>()'), "             \
        "(2, 'nvjet_tst_128'), (3, 'flash_fwd')"

static void check_ab(void) {
    epo_profile *p = NULL;
    epo_profile_times t;
    CU_ASSERT_EQUAL_FATAL(read_it(&p), EPO_OK);
    epo_profile_facts f = epo_profile_tell(p);
    CU_ASSERT(f.kind == EPO_PROFILE_NSIGHT && f.kernels == 4 && f.units == 2);
    CU_ASSERT(epo_profile_unit_at(p, 0)->process == 4711 && epo_profile_unit_at(p, 0)->device == 0);
    CU_ASSERT(epo_profile_unit_at(p, 1)->device == 1);
    CU_ASSERT_EQUAL(epo_profile_measure(p, 0, INT64_MIN, INT64_MAX, &t, NULL), EPO_OK);
    CU_ASSERT(t.comm == 120 && t.overlapped == 40 && t.exposed == 80 && t.gemm_attention == 100);
    CU_ASSERT_EQUAL(f.flex_kernels, 2);
    epo_profile_destroy(p);
}

/* Nsight Systems 2020: few columns, copies without devices. */
static void columns_of_2020_are_read(void) {
    static const char *const sql[] = {
        STRINGS,
        "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, \"end\" INTEGER NOT "
        "NULL, "
        "deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, "
        "correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL, shortName "
        "INTEGER "
        "NOT NULL, launchType INTEGER, cacheConfig INTEGER, registersPerThread INTEGER NOT NULL)",
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES "
        "(100, 200, 0, 1, 7, 1, " PID(4711) ", 1, 1, NULL, NULL, 32), "
                                            "(160, 260, 0, 1, 8, 2, " PID(
                                                4711) ", 2, 2, NULL, NULL, 32), "
                                                      "(100, 200, 1, 1, 7, 3, " PID(
                                                          4711) ", 1, 1, NULL, NULL, 32), "
                                                                "(150, 170, 1, 1, 8, 4, " PID(
                                                                    4711) ", 3, 3, NULL, NULL, 32)",
        "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, \"end\" INTEGER NOT "
        "NULL, "
        "deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, "
        "correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT "
        "NULL)",
        "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES "
        "(300, 320, 0, 1, 9, 5, " PID(4711) ", 64, 10), (400, 420, 0, 1, 9, 6, " PID(
            4711) ", 64, 1)",
        NULL};
    write_database(sql);
    check_ab();
}

/* Nsight Systems 2025: green contexts, graph nodes, devices of copies. */
static void columns_of_2025_are_read(void) {
    static const char *const sql[] = {
        STRINGS,
        "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, \"end\" INTEGER NOT "
        "NULL, "
        "deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, greenContextId INTEGER, streamId "
        "INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT "
        "NULL, "
        "shortName INTEGER NOT NULL, mangledName INTEGER, launchType INTEGER, graphNodeId INTEGER, "
        "graphId INTEGER)",
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES "
        "(100, 200, 0, 1, NULL, 7, 1, " PID(
            4711) ", 1, 1, 1, NULL, NULL, NULL), "
                  "(160, 260, 0, 1, NULL, 8, 2, " PID(
                      4711) ", 2, 2, 2, NULL, 17, 1), "
                            "(100, 200, 1, 1, NULL, 7, 3, " PID(
                                4711) ", 1, 1, 1, NULL, NULL, NULL), "
                                      "(150, 170, 1, 1, NULL, 8, 4, " PID(
                                          4711) ", 3, 3, 3, NULL, NULL, NULL)",
        "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, \"end\" INTEGER NOT "
        "NULL, "
        "deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, greenContextId INTEGER, streamId "
        "INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL, "
        "copyKind "
        "INTEGER NOT NULL, deprecatedSrcId INTEGER, srcKind INTEGER, dstKind INTEGER, srcDeviceId "
        "INTEGER, srcContextId INTEGER, dstDeviceId INTEGER, dstContextId INTEGER)",
        "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY (start, \"end\", deviceId, contextId, streamId, "
        "globalPid, bytes, copyKind, srcDeviceId, dstDeviceId) VALUES "
        "(300, 320, 0, 1, 9, " PID(4711) ", 64, 8, 0, 1), (400, 420, 0, 1, 9, " PID(
            4711) ", 64, 1, NULL, "
                  "NULL)",
        "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, \"end\" INTEGER)",
        NULL};
    write_database(sql);
    check_ab();
}

static void graphs_as_blocks_and_missing_tables_are_told(void) {
    static const char *const sql[] = {
        "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, \"end\" INTEGER)",
        "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (1, 2), (3, 4)",
        "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, \"end\" INTEGER, deviceId "
        "INTEGER, "
        "shortName TEXT)",
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1, 2, 0, 'flash_fwd'), (5, 4, 0, 'x'), "
        "(NULL, 4, 0, 'x'), ('a', 'b', 0, NULL)",
        NULL};
    epo_profile *p = NULL;
    write_database(sql);
    CU_ASSERT_EQUAL_FATAL(read_it(&p), EPO_OK);
    epo_profile_facts f = epo_profile_tell(p);
    CU_ASSERT(f.graph_launches == 2 && f.kernels == 1 && f.skipped == 3 && f.nameless == 0);
    CU_ASSERT(strstr(f.missing, "globalPid") != NULL && strstr(f.missing, "StringIds") != NULL &&
              strstr(f.missing, "MEMCPY") != NULL);
    epo_profile_destroy(p);
}

static void copies_without_kind_are_not_guessed(void) {
    static const char *const sql[] = {"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, "
                                      "\"end\" INTEGER, deviceId INTEGER, "
                                      "streamId INTEGER, demangledName TEXT)",
                                      "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, "
                                      "\"end\" INTEGER, deviceId INTEGER)",
                                      "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (1, 2, 0)",
                                      NULL};
    epo_profile *p = NULL;
    write_database(sql);
    CU_ASSERT_EQUAL_FATAL(read_it(&p), EPO_OK);
    CU_ASSERT_TRUE(epo_profile_tell(p).copies_unclassified);
    epo_profile_destroy(p);
}

static void kernels_without_names_and_copies_without_times_are_counted(void) {
    static const char *const sql[] = {
        STRINGS,
        "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, \"end\" INTEGER, deviceId "
        "INTEGER, streamId INTEGER, demangledName INTEGER)",
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1, 2, 0, 7, 1), (1, 2, 0, 7, 77), "
        "(3, 4, 0, 7, 77), (5, 6, 0, 7, NULL), (NULL, 6, 0, 7, 77)",
        "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, \"end\" INTEGER, deviceId "
        "INTEGER, streamId INTEGER, copyKind INTEGER)",
        "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (1, 2, 0, 7, 1), (NULL, 2, 0, 7, 8), "
        "(2, 1, 0, 7, 8), ('a', 2, 0, 7, NULL)",
        NULL};
    epo_profile *p = NULL;
    write_database(sql);
    CU_ASSERT_EQUAL_FATAL(read_it(&p), EPO_OK);
    epo_profile_facts f = epo_profile_tell(p);
    CU_ASSERT(f.kernels == 4 && f.nameless == 3 && f.copies == 1 && f.skipped == 4);
    CU_ASSERT_FALSE(f.copies_unclassified);
    epo_profile_destroy(p);
}

static void check_refused(const char *needle) {
    epo_profile *p = NULL;
    CU_ASSERT_EQUAL(read_it(&p), EPO_E_ARG);
    CU_ASSERT_PTR_NULL(p);
    if (strstr(epo_fail_text(), needle) == NULL)
        fprintf(stderr, "\"%s\" lacks \"%s\"\n", epo_fail_text(), needle);
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), needle));
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), path)); /* names the file */
}

/* A page of the names that cannot be read is no missing name. */
static void damaged_names_are_refused(void) {
    columns_of_2025_are_read();
    FILE *f = fopen(path, "r+");
    unsigned char page[4096];
    CU_ASSERT_EQUAL_FATAL(fseek(f, 4096, SEEK_SET), 0); /* the first table's root */
    CU_ASSERT_EQUAL_FATAL(fread(page, 1, sizeof page, f), sizeof page);
    page[0] = 0x77; /* no kind of page */
    CU_ASSERT_EQUAL_FATAL(fseek(f, 4096, SEEK_SET), 0);
    CU_ASSERT_EQUAL_FATAL(fwrite(page, 1, sizeof page, f), sizeof page);
    fclose(f);
    check_refused("the database cannot be read after 1 rows");
}

static void other_databases_are_refused(void) {
    static const char *const empty[] = {"CREATE TABLE other (a)", NULL};
    write_database(empty);
    check_refused("no table CUPTI_ACTIVITY_KIND_KERNEL");
    static const char *const view[] = {
        "CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL "
        "SELECT "
        "x + 1 FROM r) SELECT x AS start, x AS \"end\", 0 AS deviceId, 'x' AS shortName FROM r",
        NULL};
    write_database(view); /* would never end */
    check_refused("no table");
    static const char *const nameless[] = {"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start "
                                           "INTEGER, \"end\" INTEGER, deviceId INTEGER)",
                                           NULL};
    write_database(nameless);
    check_refused("names");
}

/* Any prefix of a database, and one with bytes changed, is read or refused in one line. */
static void damaged_databases_do_no_harm(void) {
    columns_of_2025_are_read();
    FILE *f = fopen(path, "r");
    char *bytes = malloc(1 << 20);
    size_t length = fread(bytes, 1, 1 << 20, f);
    unsigned seed = 2;
    fclose(f);
    for (size_t cut = 16; cut < length; cut += 509) {
        epo_profile *p = NULL;
        write_file(bytes, cut);
        bool fine = read_it(&p) == EPO_OK;
        CU_ASSERT(fine || strstr(epo_fail_text(), path) != NULL);
        epo_profile_destroy(p);
    }
    for (int round = 0; round < 200; round++) {
        epo_profile *p = NULL;
        char *damaged = malloc(length);
        memcpy(damaged, bytes, length);
        for (int i = 0; i < 8; i++)
            damaged[100 + (size_t)rand_r(&seed) % (length - 100)] = (char)rand_r(&seed);
        write_file(damaged, length);
        (void)read_it(&p);
        epo_profile_destroy(p);
        free(damaged);
    }
    free(bytes);
}

/* ---- Chrome traces ------------------------------------------------------- */

static epo_profile_times chrome_times(const char *text) {
    epo_profile *p = NULL;
    epo_profile_times t = {0};
    write_file(text, strlen(text));
    epo_status status = read_it(&p);
    if (status != EPO_OK)
        fprintf(stderr, "%s\n", epo_fail_text());
    CU_ASSERT_EQUAL_FATAL(status, EPO_OK);
    CU_ASSERT_EQUAL_FATAL(epo_profile_tell(p).units, 1);
    CU_ASSERT_EQUAL(epo_profile_measure(p, 0, INT64_MIN, INT64_MAX, &t, NULL), EPO_OK);
    epo_profile_destroy(p);
    return t;
}

static void chrome_traces_are_read_in_every_spelling(void) {
    epo_profile_times t = chrome_times(
        "{\"schemaVersion\": 1, \"deviceProperties\": [{\"id\": 0, \"traceEvents\": "
        "[{\"ph\":\"X\"}]}],\n"
        "\"traceEvents\": [\n"
        "{\"ph\": \"X\", \"cat\": \"kernel\", \"name\": \"void deep_ep::dispatch\", \"pid\": 0, "
        "\"tid\": 7,"
        " \"ts\": 1700000000000000.125, \"dur\": 10.5, \"args\": {\"device\": 0, \"stream\": 7, "
        "\"grid\": [1,2,3], \"nested\": {\"device\": 5, \"ts\": 3}}},\n"
        "{\"args\": {\"stream\": 8, \"device\": 0}, \"dur\": \"4\", \"ts\": "
        "1.700000000000005125e15, "
        "\"name\": \"nvjet_x\", \"cat\": \"kernel\", \"ph\": \"X\"},\n"
        "{\"ph\": \"X\", \"cat\": \"cpu_op\", \"name\": \"aten::mm\", \"ts\": 1, \"dur\": 1000},\n"
        "{\"ph\": \"i\", \"cat\": \"kernel\", \"name\": \"nvjet_x\", \"ts\": 1, \"dur\": 1000},\n"
        "{\"ph\": \"M\", \"name\": \"process_name\", \"args\": {\"name\": \"python\"}}\n"
        "], \"traceName\": \"x\"}");
    CU_ASSERT(t.comm == 10500);
    t = chrome_times("[{\"ph\":\"X\",\"cat\":\"Kernel\",\"name\":\"flash_\\u0066wd\",\"ts\":0.001,"
                     "\"dur\":0.002,\"pid\":3},"); /* an array may end anywhere */
    CU_ASSERT(t.of[EPO_KERNEL_ATTENTION] == 2 && t.busy == 2);
    t = chrome_times("\xEF\xBB\xBF[{\"ph\":\"X\",\"cat\":\"kernel\",\"name\":\"flash_fwd\","
                     "\"ts\":1,\"dur\":2,\"pid\":3}]\r\n"); /* as from Windows */
    CU_ASSERT(t.of[EPO_KERNEL_ATTENTION] == 2000 && t.busy == 2000);
}

/* An error has the file's byte (the parser's may be the one behind). */
static void a_mark_of_utf_8_counts_as_bytes(void) {
    write_file("[1, x", 5);
    check_refused("byte 6: not JSON");
    write_file("\xEF\xBB\xBF[1, x", 8);
    check_refused("byte 9: not JSON");
    write_file("[\xEF\xBB\xBF]", 5);
    check_refused("not JSON");
}

static void our_recordings_name_their_class(void) {
    epo_profile *p = NULL;
    static const char text[] = "{\"traceEvents\":[{\"ph\":\"X\",\"cat\":\"ep_comm\",\"name\":"
                               "\"dispatch\",\"pid\":2,\"ts\":1,"
                               "\"dur\":4,\"args\":{\"stream\":1}},{\"ph\":\"X\",\"cat\":\"gemm\","
                               "\"name\":\"experts\",\"pid\":2,"
                               "\"ts\":3,\"dur\":4,\"args\":{\"stream\":0}},{\"ph\":\"X\",\"cat\":"
                               "\"gemm\",\"name\":\"experts\","
                               "\"pid\":3,\"ts\":3,\"dur\":4}]}";
    epo_profile_times t;
    write_file(text, sizeof text - 1);
    CU_ASSERT_EQUAL_FATAL(read_it(&p), EPO_OK);
    CU_ASSERT_EQUAL(epo_profile_tell(p).units, 2);
    CU_ASSERT_EQUAL(epo_profile_unit_at(p, 0)->process, 2);
    CU_ASSERT_EQUAL(epo_profile_measure(p, 0, INT64_MIN, INT64_MAX, &t, NULL), EPO_OK);
    CU_ASSERT(t.comm == 4000 && t.overlapped == 2000 && t.exposed == 2000 && t.busy == 6000);
    epo_profile_destroy(p);
}

static void copies_of_pytorch_have_their_kind(void) {
    epo_profile_times t = chrome_times(
        "[{\"ph\":\"X\",\"cat\":\"gpu_memcpy\",\"name\":\"Memcpy PtoP (Device -> "
        "Device)\",\"ts\":0,"
        "\"dur\":1,\"args\":{\"device\":0,\"stream\":3}},"
        "{\"ph\":\"X\",\"cat\":\"gpu_memcpy\",\"name\":\"Memcpy HtoD (Pinned -> Device)\",\"ts\":2,"
        "\"dur\":1,\"args\":{\"device\":0,\"stream\":3}},"
        "{\"ph\":\"X\",\"cat\":\"gpu_memset\",\"name\":\"Memset (Device)\",\"ts\":4,\"dur\":1,"
        "\"args\":{\"device\":0,\"stream\":3}},"
        "{\"ph\":\"X\",\"cat\":\"gpu_memcpy\",\"name\":\"Memcpy DtoD (Device -> Device)\",\"ts\":6,"
        "\"dur\":1,\"args\":{\"device\":0,\"stream\":4}}]");
    CU_ASSERT(t.comm == 1000 && t.of[EPO_KERNEL_COPY] == 3000);
}

static void events_without_times_are_left_out(void) {
    static const char text[] =
        "[{\"ph\":\"X\",\"cat\":\"kernel\",\"name\":\"nvjet\",\"ts\":0,\"dur\":1,\"pid\":0},"
        "{\"ph\":\"X\",\"cat\":\"kernel\",\"name\":\"nvjet\",\"ts\":5,\"pid\":0},"
        "{\"ph\":\"X\",\"cat\":\"kernel\",\"name\":\"nvjet\",\"ts\":5,\"dur\":-1,\"pid\":0},"
        "{\"ph\":\"X\",\"cat\":\"kernel\",\"name\":\"nvjet\",\"ts\":9e300,\"dur\":1,\"pid\":0},"
        "{\"ph\":\"X\",\"cat\":\"kernel\",\"name\":\"nvjet\",\"ts\":99999999999999999999,\"dur\":1}"
        "]";
    epo_profile *p = NULL;
    write_file(text, sizeof text - 1);
    CU_ASSERT_EQUAL_FATAL(read_it(&p), EPO_OK);
    CU_ASSERT(epo_profile_tell(p).kernels == 1 && epo_profile_tell(p).skipped == 4);
    epo_profile_destroy(p);
}

static void cut_traces_name_the_byte(void) {
    static const char text[] =
        "{\"traceEvents\": [{\"ph\": \"X\", \"cat\": \"kernel\", \"name\": \"nvjet\", \"ts\": 1, "
        "\"dur\": 2, \"pid\": 0}]}";
    for (size_t cut = 1; cut < sizeof text - 1; cut++) {
        write_file(text, cut);
        check_refused("byte");
    }
    write_file("", 0);
    check_refused("is empty");
    write_file("{\"a\": tru }", 11);
    check_refused("byte 10");
    write_file("[]", 2);
    check_refused("without trace events");
    static const char reason[] = "{\"ep_overlap\": {\"line\": \"communication was not recorded: no "
                                 "libcupti\"}, \"traceEvents\": []}";
    write_file(reason, sizeof reason - 1);
    check_refused("holds no trace: communication was not recorded: no libcupti");
    write_file("{}{}", 4);
    check_refused("trailing garbage");
}

static void other_files_are_refused(void) {
    write_file("\x7f"
               "ELF\0\0\0\0",
               8);
    check_refused("neither an SQLite export");
    write_file("\x1f\x8b\x08\0", 4);
    check_refused("compressed");
    write_file("\x1f\x8b", 2);
    check_refused("compressed");
    char *deep = malloc(100000);
    memset(deep, '[', 100000);
    write_file(deep, 100000);
    check_refused("nested deeper");
    static const char event[] = "[{\"ph\":\"X\",\"cat\":\"kernel\",\"name\":\"nvjet\",\"ts\":0,"
                                "\"dur\":1,\"pid\":0,\"args\":{\"x\":";
    memcpy(deep, event, sizeof event - 1); /* where an event's shape is learnt, too */
    write_file(deep, 100000);
    check_refused("nested deeper");
    free(deep);
}

static void a_value_without_end_is_refused(void) {
    size_t length = 40u << 20;
    char *text = malloc(length);
    memset(text, 'x', length);
    memcpy(text, "{\"a\": \"", 7);
    write_file(text, length);
    check_refused("longer than 32 MiB");
    free(text);
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"columns of Nsight 2020 are read", columns_of_2020_are_read},
        {"columns of Nsight 2025 are read", columns_of_2025_are_read},
        {"graphs as blocks, missing tables are told", graphs_as_blocks_and_missing_tables_are_told},
        {"copies without kind are not guessed", copies_without_kind_are_not_guessed},
        {"kernels without names, copies without times: counted",
         kernels_without_names_and_copies_without_times_are_counted},
        {"damaged names are refused", damaged_names_are_refused},
        {"other databases are refused", other_databases_are_refused},
        {"damaged databases do no harm", damaged_databases_do_no_harm},
        {"Chrome traces in every spelling", chrome_traces_are_read_in_every_spelling},
        {"a mark of UTF-8 counts as bytes", a_mark_of_utf_8_counts_as_bytes},
        {"our recordings name their class", our_recordings_name_their_class},
        {"PyTorch's copies have their kind", copies_of_pytorch_have_their_kind},
        {"events without times are left out", events_without_times_are_left_out},
        {"cut traces name the byte", cut_traces_name_the_byte},
        {"other files are refused", other_files_are_refused},
        {"a value without end is refused", a_value_without_end_is_refused},
        CU_TEST_INFO_NULL,
    };
    snprintf(path, sizeof path, "test_profile_files.%d.tmp", (int)getpid());
    int status = unit_run("profile_files", tests);
    unlink(path);
    return status;
}
