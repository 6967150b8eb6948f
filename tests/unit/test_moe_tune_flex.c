/* SPDX-License-Identifier: Apache-2.0
 *
 * What flex's passes in one chunk do by measuring, and by size.
 */
#include "tune_world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static double a_second(int rank, int chunks) {
    (void)rank, (void)chunks;
    return 1.0;
}
static double any_time(int rank, int chunks) {
    static double s;
    (void)rank, (void)chunks;
    return s = s > 50 ? 1 : 1.7 * s + 1;
}

/* Do rows go home one by one, in the end, where that takes `takes` of the time? */
static bool home_of(world *w, int tokens, double takes) {
    world_open(w, 64, true);
    home_takes = takes;
    const int chunks = settle(w, tokens, a_second);
    home_takes = 1;
    CU_ASSERT_EQUAL(chunks, given);
    return singly;
}

/* Whether rows go home one by one is measured where they could: flex in one chunk.  Backward
 * passes are the same and do not count. */
static void test_home(void) {
    world w;
    info = (epo_backend_info){.home = 16};
    dispatcher = EPO_DISPATCH_FLEX;
    given = 1;
    backward = any_time;
    CU_ASSERT(home_of(&w, 4096, 0.95));
    CU_ASSERT(home_of(&w, 4096, 0.985));
    CU_ASSERT(home_of(&w, 1, 0.95));
    CU_ASSERT_FALSE(home_of(&w, 4096, 0.993)); /* not worth it */
    CU_ASSERT_FALSE(home_of(&w, 4096, 1.05));
    CU_ASSERT(marks_used > 0);
    given = 2;
    CU_ASSERT_FALSE(home_of(&w, 4096, 0.5));
    given = 1;
    info.home = 3; /* does not divide the row */
    CU_ASSERT_FALSE(home_of(&w, 4096, 0.5));
    CU_ASSERT_EQUAL(marks_used, 0);
    info.home = 16;
    info.ways = 1U << EPO_WAY_ENGINES; /* nothing is stored one by one */
    CU_ASSERT_FALSE(home_of(&w, 4096, 0.5));
    CU_ASSERT_EQUAL(marks_used, 0);
    info.ways = 0;
    info.home_asked = true;
    CU_ASSERT(home_of(&w, 4096, 2));
    CU_ASSERT_EQUAL(marks_used, 0);
    backward = NULL;
    given = 4;
    dispatcher = EPO_DISPATCH_ALLTOALL;
    info = (epo_backend_info){0};
}

/* Do a backward's rows go behind the weight gradients, in the end, where that takes `takes` of
 * the time, and the first backward comes behind `late` plans? */
static bool plain_of(world *w, int tokens, double takes, int late) {
    world_open(w, 64, true);
    plain_takes = takes;
    late_backward = late;
    CU_ASSERT_EQUAL(settle(w, tokens, any_time), given);
    late_backward = 0;
    plain_takes = 1;
    return plain;
}

/* Behind the question of the forward's rows, where there is one; forward passes do not count. */
static void test_tail(void) {
    world w;
    dispatcher = EPO_DISPATCH_FLEX;
    given = 1;
    backward = a_second;
    for (int homes = 0; homes < 2; homes++) {
        info = (epo_backend_info){.few = true, .home = homes * 16U};
        CU_ASSERT(plain_of(&w, 4096, 0.95, 0));
        CU_ASSERT(plain_of(&w, 8, 0.95, 20));
        CU_ASSERT_FALSE(plain_of(&w, 4096, 0.995, 0)); /* not worth it */
        CU_ASSERT_FALSE(plain_of(&w, 4096, 1.05, 3));
        CU_ASSERT_EQUAL(w.buffer[0].tune.of[12].stage, MOE_TUNE_DONE);
        CU_ASSERT_FALSE(plain_of(&w, 4096, 0.5, 1000)); /* there are no such passes */
        CU_ASSERT_EQUAL(w.buffer[0].tune.of[12].stage, MOE_TUNE_TAIL);
    }
    home_takes = 0.9;
    world_open(&w, 64, true);
    plain_takes = 0.9;
    settle(&w, 4096, a_second);
    CU_ASSERT(singly && plain);
    home_takes = plain_takes = 1;
    given = 2;
    CU_ASSERT_FALSE(plain_of(&w, 4096, 0.5, 0));
    given = 1;
    info.few = false;
    CU_ASSERT_FALSE(plain_of(&w, 4096, 0.5, 0));
    backward = NULL;
    given = 4;
    dispatcher = EPO_DISPATCH_ALLTOALL;
    info = (epo_backend_info){0};
}

/* A file's answer is not measured again. */
static void test_home_file(void) {
    char path[] = "/tmp/epo_chunks_XXXXXX", line[128] = "";
    world w;
    int fd = mkstemp(path);
    CU_ASSERT_FATAL(fd >= 0);
    close(fd);
    info = (epo_backend_info){.home = 16};
    dispatcher = EPO_DISPATCH_FLEX;
    given = 1;
    setenv("EP_OVERLAP_CHUNKS_FILE", path, 1);
    CU_ASSERT(home_of(&w, 4096, 0.9));
    FILE *f = fopen(path, "r+");
    CU_ASSERT_PTR_NOT_NULL_FATAL(f);
    CU_ASSERT_PTR_NOT_NULL(fgets(line, sizeof line, f));
    CU_ASSERT_STRING_EQUAL(line, "flex 3 192 2048 8 12 1 home\n");
    CU_ASSERT_PTR_NULL(fgets(line, sizeof line, f));
    fputs("flex 3 192 2048 8 13 4\n", f); /* of another number of chunks: no answer */
    fputs("flex 3 192 2048 8 14 1\n", f);
    fclose(f);
    CU_ASSERT(home_of(&w, 4096, 2));
    CU_ASSERT_FALSE(home_of(&w, 16384, 0.5));
    CU_ASSERT_EQUAL(marks_used, 0);
    CU_ASSERT(home_of(&w, 8192, 0.5));
    CU_ASSERT_FALSE(plain);
    given = 2; /* what one chunk has is no answer for more of them */
    info.ways = 1U << EPO_WAY_STORES | 1U << EPO_WAY_ENGINES;
    engines_take = 0.5;
    world_open(&w, 64, true);
    CU_ASSERT_EQUAL(settle(&w, 4096, a_second), 2);
    CU_ASSERT_EQUAL(way, EPO_WAY_ENGINES);
    engines_take = 1;
    info.ways = 0;
    given = 1;
    info.few = true;
    CU_ASSERT(home_of(&w, 4096, 2) && !plain);
    f = fopen(path, "a");
    CU_ASSERT_PTR_NOT_NULL_FATAL(f);
    fputs("flex 3 192 2048 8 10 1 behind\nflex 3 192 2048 8 11 1 home+behind\n", f);
    fclose(f);
    CU_ASSERT(!home_of(&w, 1024, 0.5) && plain);
    CU_ASSERT(home_of(&w, 2048, 2) && plain);
    CU_ASSERT_EQUAL(marks_used, 0);
    backward = a_second;
    plain_takes = 0.9;
    CU_ASSERT(home_of(&w, 512, 0.9) && plain);
    plain_takes = 1;
    backward = NULL;
    f = fopen(path, "r");
    CU_ASSERT_PTR_NOT_NULL_FATAL(f);
    while (fgets(line, sizeof line, f) != NULL)
        ;
    fclose(f);
    CU_ASSERT_STRING_EQUAL(line, "flex 3 192 2048 8 9 1 home+behind\n");
    unsetenv("EP_OVERLAP_CHUNKS_FILE");
    unlink(path);
    given = 4;
    dispatcher = EPO_DISPATCH_ALLTOALL;
    info = (epo_backend_info){0};
}

static epo_status no_spread(epo_queue *queue, const epo_rows_spread *rows, const epo_deps *deps) {
    (void)queue, (void)rows, (void)deps;
    return EPO_OK;
}

/* The dispatch of a pass in one chunk that sends `rows` to another rank: 'n' beside own rows'
 * expanding, 'c' on COMPUTE, '-' on a queue of its own. */
static char near_of(world *w, uint64_t rows, bool beside) {
    static char compute, comm;
    epo_buffer *b = &w->buffer[0];
    epo_group *g = &w->group[0];
    const int first[] = {0, 2};
    const uint64_t back[1] = {0};
    moe_piece send[] = {{.peer = 0, .rows = 100000}, {.peer = 1, .rows = rows}};
    epo_plan plan = {.buffer = b, .chunks = 1, .top_k = 8, .back = (void *)(uintptr_t)back};
    moe_pass p = {.group = g, .buffer = b, .plan = &plan, .beside = beside};
    p.dispatch.send = send;
    p.dispatch.send_first = (int *)(uintptr_t)first;
    w->ops.spread = no_spread;
    g->compute = (epo_queue *)&compute;
    g->comm = (epo_queue *)&comm;
    const epo_queue *queue = moe_near_choose(&p, "x");
    return p.near != NULL ? 'n' : queue == g->compute ? 'c' : '-';
}

/* Few bytes win nothing, very many cost; without sums on the way a combine is on COMM, and what
 * comes behind it has to be, too. */
static void test_near(void) {
    world w;
    dispatcher = EPO_DISPATCH_FLEX;
    world_open(&w, 64, true);
    dispatcher = EPO_DISPATCH_ALLTOALL;
    info = (epo_backend_info){.near_bytes = 3 << 20, .near_most = 32 << 20, .sums = true};
    CU_ASSERT_EQUAL(near_of(&w, 767, false), 'c');
    CU_ASSERT_EQUAL(near_of(&w, 768, false), 'n');
    CU_ASSERT_EQUAL(near_of(&w, 8192, false), 'n');
    CU_ASSERT_EQUAL(near_of(&w, 8193, false), 'c');
    CU_ASSERT_EQUAL(near_of(&w, 767, true), '-');
    info.sums = false;
    CU_ASSERT_EQUAL(near_of(&w, 767, false), '-');
    CU_ASSERT_EQUAL(near_of(&w, 768, false), 'n');
    info.near_bytes = 0;
    CU_ASSERT_EQUAL(near_of(&w, 768, false), '-');
    info = (epo_backend_info){0};
}

int main(void) {
    static const CU_TestInfo tests[] = {
        {"rows that go home one by one", test_home},
        {"rows behind the weight gradients", test_tail},
        {"a file's answer for these", test_home_file},
        {"flex beside own rows, by size", test_near},
        CU_TEST_INFO_NULL,
    };
    return unit_run("tune flex", tests);
}
