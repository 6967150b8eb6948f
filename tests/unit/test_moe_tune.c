/* SPDX-License-Identifier: Apache-2.0
 *
 * The choice of chunks by measuring: several ranks' buffers, a clock that the test
 * sets, and the record exchange of lib/moe/plan.c played by hand.
 */
#include "tune_world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Four chunks are best, but on one rank eight look better. */
static double four_wins(int rank, int chunks) {
    const double s[] = {[1] = 1.0, [2] = 0.9, [4] = 0.7, [8] = 0.8};
    return rank == 1 && chunks == 8 ? 0.1 : s[chunks];
}
static double less_than_a_percent(int rank, int chunks) {
    (void)rank;
    return chunks == 1 ? 1.0 : 0.992;
}
static double four_then_a_little(int rank, int chunks) {
    const double s[] = {[1] = 1.0, [2] = 0.9, [4] = 0.7, [8] = 0.69};
    (void)rank;
    return s[chunks];
}
static double eight_is_worth_it(int rank, int chunks) {
    const double s[] = {[1] = 1.0, [2] = 0.9, [4] = 0.7, [8] = 0.68};
    (void)rank;
    return s[chunks];
}
static double eight_wins(int rank, int chunks) {
    (void)rank;
    return 1.0 / chunks;
}
static double slower(int rank, int chunks) {
    (void)rank;
    return 1.0 + 0.1 * chunks;
}

static void test_fastest(void) {
    world w;
    world_open(&w, 64, true);
    CU_ASSERT_EQUAL(w.buffer[0].chunks, 8);
    CU_ASSERT_EQUAL(settle(&w, 4096, four_wins), 4);
    CU_ASSERT_EQUAL(w.buffer[0].tune.of[12].chosen, 4);
    /* Another size is another question; the first answer stays. */
    CU_ASSERT_EQUAL(settle(&w, 16384, slower), 1);
    CU_ASSERT_EQUAL(plan_and_pass(&w, 4100, four_wins), 4);
}

/* The most that a buffer may have is one of the choices. */
static void test_most(void) {
    world w;
    world_open(&w, 64, true);
    CU_ASSERT_EQUAL(settle(&w, 4096, eight_wins), 8);
    world_open(&w, 2, true);
    CU_ASSERT_EQUAL(settle(&w, 4096, eight_wins), 2);
}

static void test_worth(void) {
    world w;
    world_open(&w, 64, true);
    CU_ASSERT_EQUAL(settle(&w, 4096, less_than_a_percent), 1);
    world_open(&w, 64, true);
    CU_ASSERT_EQUAL(settle(&w, 16384, four_then_a_little), 8);
    CU_ASSERT_EQUAL(settle(&w, 8192, eight_is_worth_it), 8);
}

/* A backward pass, where there is one, weighs as much as it takes. */
static double eight_back(int rank, int chunks) {
    (void)rank;
    return chunks == 8 ? 0.5 : 1.3;
}
static void test_backward(void) {
    world w;
    world_open(&w, 64, true);
    backward = eight_back;
    CU_ASSERT_EQUAL(settle(&w, 4096, four_then_a_little), 8);
    CU_ASSERT_EQUAL(settle(&w, 16384, slower), 8); /* forward alone: 1 */
    backward = NULL;
}

/* Passes of a pipeline whose times vary, as a GPU's do: evenly by 3 % either way, and one of twenty
 * takes a fifth more. */
static struct {
    uint64_t state;
    double first, bytes, chunk, busy; /* of one chunk; that hides; of each chunk; the rest */
} noise;

static double uniform(void) {
    noise.state = noise.state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (double)(noise.state >> 11) * 0x1p-53;
}
static double model(int chunks) {
    const double hidden = noise.bytes * (1 - 1.0 / chunks);
    return noise.first + noise.bytes + noise.busy + noise.chunk * chunks -
           (hidden < noise.busy ? hidden : noise.busy);
}
static double noisy(int rank, int chunks) {
    (void)rank;
    const double late = uniform() < 0.05 ? 1.2 : 1.0;
    return model(chunks) * late * (0.97 + 0.06 * uniform());
}

static void test_regret(void) {
    const int choices[] = {1, 2, 4, 8};
    int far = 0, plans = 0;
    double worst = 0;
    noise.state = 7;
    for (int i = 0; i < MODELS; i++) {
        world w;
        noise.first = uniform();
        noise.bytes = 3 * uniform();
        noise.busy = 0.2 + 3 * uniform();
        noise.chunk = 0.1 * uniform() * uniform();
        world_open(&w, 64, true);
        const int chosen = settle(&w, 4096, noisy);
        double best = model(1);
        for (int k = 1; k < 4; k++)
            best = model(choices[k]) < best ? model(choices[k]) : best;
        const double regret = model(chosen) / best - 1;
        far += regret > 0.02;
        worst = regret > worst ? regret : worst;
        plans += w.buffer[0].tune.of[12].stage == MOE_TUNE_DONE;
    }
    printf("%d of %d beyond 2 %%, worst %.2f %% ", far, MODELS, 100 * worst);
    CU_ASSERT_EQUAL(plans, MODELS); /* all came to an answer */
    CU_ASSERT(far * 200 <= MODELS);
    CU_ASSERT(worst < 0.03);
}

/* The number first, then the way at that number. */
static void test_ways(void) {
    world w;
    info.ways = 1U << EPO_WAY_STORES | 1U << EPO_WAY_ENGINES;
    engines_take = 0.9;
    world_open(&w, 64, true);
    CU_ASSERT_EQUAL(settle(&w, 4096, four_wins), 4);
    CU_ASSERT_EQUAL(way, EPO_WAY_ENGINES);
    CU_ASSERT_EQUAL(settle(&w, 16384, slower), 1); /* one piece has the device to itself */
    CU_ASSERT_EQUAL(way, EPO_WAY_STORES);
    engines_take = 0.99;
    world_open(&w, 64, true);
    CU_ASSERT_EQUAL(settle(&w, 4096, four_wins), 4);
    CU_ASSERT_EQUAL(way, EPO_WAY_STORES);
    engines_take = 0.5; /* given: not measured */
    info.ways = 1U << EPO_WAY_STORES;
    world_open(&w, 64, true);
    CU_ASSERT_EQUAL(settle(&w, 4096, four_wins), 4);
    CU_ASSERT_EQUAL(way, EPO_WAY_STORES);
    info.ways = 1U << EPO_WAY_ENGINES;
    world_open(&w, 64, false);
    CU_ASSERT_EQUAL(plan_and_pass(&w, 4096, four_wins), 4);
    CU_ASSERT_EQUAL(way, EPO_WAY_ENGINES);
    CU_ASSERT_EQUAL(marks_used, 0);
    info.ways = 0;
    engines_take = 1;
}

/* flex's number, or one that was given, stays: the way alone is measured. */
static void test_ways_alone(void) {
    world w;
    info.ways = 1U << EPO_WAY_STORES | 1U << EPO_WAY_ENGINES;
    engines_take = 0.9;
    world_open(&w, 64, false);
    CU_ASSERT_EQUAL(settle(&w, 4096, four_wins), 4);
    CU_ASSERT_EQUAL(way, EPO_WAY_ENGINES);
    CU_ASSERT_EQUAL(plan_and_pass(&w, 64, four_wins), 4); /* too small to ask */
    CU_ASSERT_EQUAL(way, EPO_WAY_STORES);
    dispatcher = EPO_DISPATCH_FLEX;
    engines_take = 1.1;
    world_open(&w, 64, true);
    CU_ASSERT_EQUAL(settle(&w, 4096, four_wins), 4);
    CU_ASSERT_EQUAL(way, EPO_WAY_STORES);
    dispatcher = EPO_DISPATCH_ALLTOALL;
    info.ways = 0;
    engines_take = 1;
}

static void test_ways_file(void) {
    char path[] = "/tmp/epo_chunks_XXXXXX", line[128] = "";
    world w;
    int fd = mkstemp(path);
    CU_ASSERT_FATAL(fd >= 0);
    close(fd);
    setenv("EP_OVERLAP_CHUNKS_FILE", path, 1);
    info.ways = 1U << EPO_WAY_STORES | 1U << EPO_WAY_ENGINES;
    engines_take = 0.9;
    world_open(&w, 64, true);
    CU_ASSERT_EQUAL(settle(&w, 8192, four_wins), 4);
    FILE *f = fopen(path, "r");
    CU_ASSERT_PTR_NOT_NULL_FATAL(f);
    CU_ASSERT_PTR_NOT_NULL(fgets(line, sizeof line, f));
    CU_ASSERT_STRING_EQUAL(line, "alltoall 3 192 2048 8 13 4 engines\n");
    CU_ASSERT_PTR_NULL(fgets(line, sizeof line, f)); /* once */
    fclose(f);
    world_open(&w, 64, true);
    CU_ASSERT_EQUAL(plan_and_pass(&w, 8192, four_wins), 4);
    CU_ASSERT_EQUAL(way, EPO_WAY_ENGINES);
    CU_ASSERT_EQUAL(marks_used, 0);
    f = fopen(path, "a");
    CU_ASSERT_PTR_NOT_NULL_FATAL(f);
    fputs("alltoall 3 192 2048 8 13 2 engines\n", f);
    fclose(f);
    world_open(&w, 64, false); /* a number that was given stays, the way is the file's */
    CU_ASSERT_EQUAL(plan_and_pass(&w, 8192, four_wins), 4);
    CU_ASSERT_EQUAL(way, EPO_WAY_ENGINES);
    info.ways = 1U << EPO_WAY_STORES; /* what the file says is not allowed here */
    world_open(&w, 64, true);
    CU_ASSERT_EQUAL(plan_and_pass(&w, 8192, four_wins), 2);
    CU_ASSERT_EQUAL(way, EPO_WAY_STORES);
    info.ways = 0;
    engines_take = 1;
    unsetenv("EP_OVERLAP_CHUNKS_FILE");
    unlink(path);
}

/* Small sizes go in one piece at once, and nothing is timed. */
static void test_small(void) {
    world w;
    world_open(&w, 64, true);
    CU_ASSERT_EQUAL(plan_and_pass(&w, 64, four_wins), 1);
    CU_ASSERT_EQUAL(plan_and_pass(&w, 0, four_wins), 1);
    CU_ASSERT_EQUAL(marks_used, 0);
    CU_ASSERT_EQUAL(settle(&w, 512, four_wins), 4);
}

static void test_few_experts(void) {
    world w;
    world_open(&w, 3, true);
    CU_ASSERT_EQUAL(w.buffer[0].chunks, 3);
    CU_ASSERT_EQUAL(settle(&w, 4096, four_wins), 2);
}

static void test_pinned(void) {
    world w;
    world_open(&w, 64, false);
    CU_ASSERT_EQUAL(plan_and_pass(&w, 4096, four_wins), 4); /* the buffer's own */
    CU_ASSERT_EQUAL(marks_used, 0);
}

/* Without times, one piece: the serial path's. */
static void test_blind(void) {
    world w;
    world_open(&w, 64, true);
    blind = true;
    CU_ASSERT_EQUAL(settle(&w, 4096, four_wins), 1);
}

static void test_file(void) {
    char path[] = "/tmp/epo_chunks_XXXXXX", line[128] = "";
    world w;
    int fd = mkstemp(path);
    CU_ASSERT_FATAL(fd >= 0);
    FILE *f = fdopen(fd, "w");
    CU_ASSERT_PTR_NOT_NULL_FATAL(f);
    fputs("nonsense\nflex 3 192 2048 8 12 4\nalltoall 3 192 2048 8 12 2\nalltoall 3 192 2048 8 99 "
          "4\n",
          f);
    /* other groups' and other shapes' answers, and what is no answer */
    fputs("alltoall 4 192 2048 8 12 4\nalltoall 3 96 2048 8 12 4\nalltoall 3 192 1024 8 12 4\n"
          "alltoall 3 192 2048 4 12 4\nalltoall 3 192 2048 8 -1 4\nalltoall 3 192 2048 8 32 "
          "4\nalltoall 3 192 2048 8 12 0\n"
          "alltoall 3 192 2048 8 12\nalltoall 3 192 2048 8 14 16\n",
          f);
    fclose(f);
    setenv("EP_OVERLAP_CHUNKS_FILE", path, 1);
    world_open(&w, 64, true);
    CU_ASSERT_EQUAL(plan_and_pass(&w, 16384, four_wins), 8); /* sixteen are more than it can */
    const uint32_t digest = moe_tune_digest(&w.buffer[0]);
    CU_ASSERT_EQUAL(plan_and_pass(&w, 4096, four_wins), 2);
    CU_ASSERT_EQUAL(marks_used, 0);
    CU_ASSERT_EQUAL(settle(&w, 8192, four_wins), 4); /* measured: rank 0 adds it, once */
    f = fopen(path, "r");
    CU_ASSERT_PTR_NOT_NULL_FATAL(f);
    int lines = 0;
    while (fgets(line, sizeof line, f) != NULL)
        lines++;
    fclose(f);
    CU_ASSERT_EQUAL(lines, 14);
    CU_ASSERT_STRING_EQUAL(line, "alltoall 3 192 2048 8 13 4\n");
    world_open(&w, 64, true);
    CU_ASSERT_EQUAL(plan_and_pass(&w, 8192, four_wins), 4);
    CU_ASSERT_NOT_EQUAL(moe_tune_digest(&w.buffer[0]), digest);
    unsetenv("EP_OVERLAP_CHUNKS_FILE");
    unlink(path);
}

/* What goes to stderr while a file by that name is read and, at last, written. */
static void settle_told(const char *path, char *told, size_t size) {
    world w;
    FILE *f = tmpfile();
    CU_ASSERT_PTR_NOT_NULL_FATAL(f);
    const int before = dup(STDERR_FILENO);
    fflush(stderr);
    dup2(fileno(f), STDERR_FILENO);
    setenv("EP_OVERLAP_CHUNKS_FILE", path, 1);
    world_open(&w, 64, true);
    const int chunks = settle(&w, 8192, four_wins);
    unsetenv("EP_OVERLAP_CHUNKS_FILE");
    fflush(stderr);
    dup2(before, STDERR_FILENO);
    close(before);
    rewind(f);
    told[fread(told, 1, size - 1, f)] = '\0';
    fclose(f);
    CU_ASSERT_EQUAL(chunks, 4); /* measured all the same */
}

/* A file that cannot serve is no silent matter, one that is not there yet is none at all. */
static void test_file_told(void) {
    char path[] = "/tmp/epo_chunks_XXXXXX", told[2048];
    int fd = mkstemp(path);
    CU_ASSERT_FATAL(fd >= 0);
    CU_ASSERT_EQUAL(write(fd, "nonsense\n\nalltoall 3 192\n", 26), 26);
    close(fd);
    settle_told(path, told, sizeof told);
    CU_ASSERT_PTR_NOT_NULL(strstr(told, path));
    CU_ASSERT_PTR_NOT_NULL(
        strstr(told, "LOG2_TOKENS CHUNKS [engines|home|behind|home+behind]': 2\n"));
    unlink(path);
    settle_told(path, told, sizeof told); /* it is made */
    CU_ASSERT_STRING_EQUAL(told, "");
    unlink(path);
    settle_told("/dev/null/chunks", told, sizeof told);
    CU_ASSERT_PTR_NOT_NULL(strstr(told, "/dev/null/chunks cannot be read: Not a directory"));
    CU_ASSERT_PTR_NOT_NULL(strstr(told, "/dev/null/chunks cannot be written: Not a directory"));
}

/* Known when the buffer is made, not in the middle of its first pass. */
static void test_too_many_chunks(void) {
    world w;
    uint64_t bytes = 0;
    world_open(&w, 64, false);
    epo_buffer_config c = EPO_BUFFER_CONFIG_INIT;
    c.experts = 512 * RANKS;
    c.hidden = 8;
    c.top_k = 2;
    c.max_tokens = 4;
    c.dispatcher = EPO_DISPATCH_ALLTOALL;
    c.chunks = 512;
    info.engine = "fake";
    info.nodes = 1;
    CU_ASSERT_EQUAL(moe_buffer_bytes(&w.group[0], &c, &bytes), EPO_OK);
    info.window_flags = 512;
    CU_ASSERT_EQUAL(moe_buffer_bytes(&w.group[0], &c, &bytes), EPO_E_ARG);
    CU_ASSERT_PTR_NOT_NULL(
        strstr(epo_fail_text(), "chunks: 512 of them have 1029 flags, the fake engine has 512"));
    c.chunks = 253; /* 5 + 2 * 253 */
    CU_ASSERT_EQUAL(moe_buffer_bytes(&w.group[0], &c, &bytes), EPO_OK);
    info.window_flags = 511;
    CU_ASSERT_EQUAL(moe_buffer_bytes(&w.group[0], &c, &bytes), EPO_OK);
    info.window_flags = 510;
    CU_ASSERT_EQUAL(moe_buffer_bytes(&w.group[0], &c, &bytes), EPO_E_ARG);
    info.window_flags = 512;
    c.chunks = 254;
    CU_ASSERT_EQUAL(moe_buffer_bytes(&w.group[0], &c, &bytes), EPO_E_ARG);
    c.chunks = 170; /* flex has three a chunk */
    c.dispatcher = EPO_DISPATCH_FLEX;
    CU_ASSERT_EQUAL(moe_buffer_bytes(&w.group[0], &c, &bytes), EPO_E_ARG);
    info.window_flags = info.nodes = 0;
    info.engine = NULL;
}

/* What is taken where nobody says and nothing is measured. */
static void test_unmeasured(void) {
    world w;
    world_open(&w, 64, true);
    epo_buffer *b = &w.buffer[0];
    b->max_tokens = 65536;
    info = (epo_backend_info){.default_chunks = 4};
    b->dispatcher = EPO_DISPATCH_FLEX;
    CU_ASSERT_EQUAL(moe_buffer_chunks(b->group, 0, b), 4);
    info.flex_chunks = 1;
    CU_ASSERT_EQUAL(moe_buffer_chunks(b->group, 0, b), 1);
    CU_ASSERT_EQUAL(moe_buffer_chunks(b->group, 2, b), 2);
    b->dispatcher = EPO_DISPATCH_ALLTOALL;
    CU_ASSERT_EQUAL(moe_buffer_chunks(b->group, 0, b), 4);
    CU_ASSERT_EQUAL(moe_buffer_chunks(b->group, 65, b), 64); /* an expert each */
    /* Chunks that pay: a token has 8 rows of 4096 bytes, with flex one for each of 3 ranks. */
    info.chunk_bytes = 1 << 20;
    b->max_tokens = 4 << 20 >> 15;
    CU_ASSERT_EQUAL(moe_buffer_chunks(b->group, 0, b), 4);
    b->max_tokens--;
    CU_ASSERT_EQUAL(moe_buffer_chunks(b->group, 0, b), 3);
    b->max_tokens = 1;
    CU_ASSERT_EQUAL(moe_buffer_chunks(b->group, 0, b), 1);
    CU_ASSERT_EQUAL(moe_buffer_chunks(b->group, 5, b), 5); /* who asks for them gets them */
    info.flex_chunks = 4;
    b->dispatcher = EPO_DISPATCH_FLEX;
    b->max_tokens = 256;
    CU_ASSERT_EQUAL(moe_buffer_chunks(b->group, 0, b), 3);
    b->group->overlap = false;
    CU_ASSERT_EQUAL(moe_buffer_chunks(b->group, 5, b), 1);
    info = (epo_backend_info){0};
}

int main(void) {
    static const CU_TestInfo tests[] = {
        {"the number fastest on the slowest rank", test_fastest},
        {"the most that there may be", test_most},
        {"less than one percent is not worth it", test_worth},
        {"backward passes count", test_backward},
        {"random models, times that vary", test_regret},
        {"small sizes in one piece", test_small},
        {"no more chunks than experts", test_few_experts},
        {"a number that was given", test_pinned},
        {"no times to be had", test_blind},
        {"a file's answers", test_file},
        {"a file that cannot serve is told of", test_file_told},
        {"more chunks than an engine has flags for", test_too_many_chunks},
        {"the way behind the number", test_ways},
        {"the way alone", test_ways_alone},
        {"a file's way", test_ways_file},
        {"where nothing is measured", test_unmeasured},
        CU_TEST_INFO_NULL,
    };
    return unit_run("tune", tests);
}
