/* SPDX-License-Identifier: Apache-2.0
 *
 * What is asked of the CUDA engine by its variables and cannot be: it is told, once a group and by
 * one rank, over a runtime in ordinary memory (tests/fake/cuda_runtime.c).
 */
#include "config.h"

#include "backend/cuda/gpu.h"
#include "configs.h"
#include "cuda_ranks.h"

#include "../fake/cuda_runtime.h"

#include <stdio.h>
#include <unistd.h>

enum { RANKS = 2, E = 4, H = 16, K = 2, T = 4 };

static const epo_engine *engine;

typedef struct member {
    epo_world *world;
    int rank, wrong;
    epo_switch overlap;
    int chunks, hidden;
    epo_saved_mode saved;
} member;

/* A forward by alltoall and two by flex. */
static int passes(const member *m, epo_group *group) {
    float *w = cuda_ranks_room((size_t)E * 2 * H * (size_t)m->hidden * 2);
    float *x = cuda_ranks_room((size_t)T * (size_t)m->hidden * 4);
    int64_t experts[T * K];
    int wrong = 0;
    for (int i = 0; i < T * K; i++)
        experts[i] = i % E;
    const epo_routing r = config_routing(T, K, experts, NULL);
    for (int i = 0; i < 3; i++) {
        epo_buffer_config b = config_buffer(E, m->hidden, K, T);
        epo_layer_config l = config_layer(E, m->hidden, H, w, w);
        epo_buffer *buffer = NULL;
        epo_layer *layer = NULL;
        epo_plan *plan = NULL;
        b.type = l.type = EPO_BF16;
        b.dispatcher = i == 0 ? EPO_DISPATCH_ALLTOALL : EPO_DISPATCH_FLEX;
        l.saved = i == 0 ? EPO_SAVE_ROWS : m->saved;
        wrong += engine->buffer_create(group, &b, &buffer) != EPO_OK ||
                 engine->layer_create(group, &l, &layer) != EPO_OK ||
                 engine->plan_create(buffer, &r, NULL, &plan) != EPO_OK ||
                 engine->forward(layer, plan, x, x, NULL, NULL) != EPO_OK;
        engine->plan_release(plan);
        wrong += engine->layer_destroy(layer) != EPO_OK || engine->buffer_destroy(buffer) != EPO_OK;
    }
    free(x);
    free(w);
    return wrong;
}

static void *member_main(void *arg) {
    member *m = arg;
    epo_engine_group g = cuda_ranks_group(m->world, m->rank, RANKS);
    epo_group *group = NULL;
    cudaSetDevice(m->rank);
    g.config.overlap = m->overlap;
    g.config.delay_wgrad = EPO_OFF;
    g.config.dispatcher = EPO_DISPATCH_ALLTOALL;
    g.config.chunks = m->chunks;
    m->wrong = engine->group_create(&g, &group) != EPO_OK || passes(m, group) != 0 ||
               engine->group_destroy(group) != EPO_OK;
    return NULL;
}

/* What the ranks of a group say on stderr, in `said`. */
static void play(const member *like, bool chain, bool pairs, char *said, size_t size) {
    member m[RANKS];
    FILE *f = tmpfile();
    const int old = dup(STDERR_FILENO);
    CU_ASSERT_FATAL(f != NULL && old >= 0 && dup2(fileno(f), STDERR_FILENO) >= 0);
    epo_world *world = cuda_ranks_world(engine, RANKS, chain, pairs);
    for (int r = 0; r < RANKS; r++) {
        m[r] = *like;
        m[r].world = world;
        m[r].rank = r;
    }
    cuda_ranks_run(engine, world, RANKS, member_main, m, sizeof *m);
    (void)dup2(old, STDERR_FILENO);
    (void)close(old);
    rewind(f);
    said[fread(said, 1, size - 1, f)] = '\0';
    (void)fclose(f);
    for (int r = 0; r < RANKS; r++)
        CU_ASSERT_EQUAL(m[r].wrong, 0);
    fake_cuda_forget(false);
}

static int times(const char *said, const char *part) {
    int n = 0;
    for (const char *at = said; (at = strstr(at, part)) != NULL; at += strlen(part))
        n++;
    return n;
}

static void expect(const char *said, const char *part, int wanted) {
    if (times(said, part) != wanted)
        printf("wanted %d times: %s\nsaid: %s\n", wanted, part, said);
    CU_ASSERT_EQUAL(times(said, part), wanted);
}

static void home_is_told(void) {
    static const member plain = {.overlap = EPO_ON, .chunks = 1, .hidden = H};
    char said[4096];
    member m = plain;
    play(&m, true, false, said, sizeof said);
    expect(said, "FLEX_HOME", 0); /* nobody asked */
    setenv("EP_OVERLAP_CUDA_FLEX_HOME", "1", 1);
    play(&m, true, false, said, sizeof said);
    expect(said, "has no effect", 1);
    expect(said,
           "EP_OVERLAP_CUDA_FLEX_HOME=1 has no effect here: the buffer's dispatcher is alltoall\n",
           1);
    m.chunks = 2;
    play(&m, true, false, said, sizeof said);
    expect(said, "no effect here: there is more than one chunk\n", 1); /* of two buffers */
    m = plain;
    m.hidden = 12;
    play(&m, true, false, said, sizeof said);
    expect(said, "no effect here: rows are no multiple of 16 bytes\n", 1);
    m = plain;
    m.overlap = EPO_OFF;
    play(&m, true, false, said, sizeof said);
    expect(said, "no effect here: overlap is off\n", 1);
    m = plain;
    m.saved = EPO_SAVE_TOKENS;
    play(&m, true, false, said, sizeof said);
    expect(said, "no effect here: the layer saves tokens\n", 1);
    play(&plain, false, false, said, sizeof said);
    expect(said, "FLEX_HOME=1 has no effect in this group: there are no chains\n", 1);
    expect(said, "has no effect", 1);
#ifdef HAVE_NCCL
    play(&plain, true, true, said, sizeof said);
    expect(said, "FLEX_HOME=1 has no effect in this group: peers' rows go by NCCL\n", 1);
#endif
    setenv("EP_OVERLAP_CUDA_FLEX_HOME", "0", 1);
    play(&plain, false, false, said, sizeof said);
    expect(said, "has no effect", 0);
    unsetenv("EP_OVERLAP_CUDA_FLEX_HOME");
}

static void others_are_told(void) {
    static const member plain = {.overlap = EPO_ON, .chunks = 1, .hidden = H};
    char said[4096];
#ifdef HAVE_NCCL
    static const char *const far[][2] = {
        {"EP_OVERLAP_CUDA_DIRECT", "1"},   {"EP_OVERLAP_CUDA_SUMS", "1"},
        {"EP_OVERLAP_CUDA_NEAR", "0"},     {"EP_OVERLAP_CUDA_SMALL", "0"},
        {"EP_OVERLAP_CUDA_WAY", "stores"}, {"EP_OVERLAP_CUDA_PACK_SMS", "4"}};
    for (size_t i = 0; i < sizeof far / sizeof *far; i++) {
        char line[160];
        snprintf(line, sizeof line, "%s=%s has no effect in this group: peers' rows go by NCCL\n",
                 far[i][0], far[i][1]);
        setenv(far[i][0], far[i][1], 1);
        play(&plain, true, true, said, sizeof said);
        expect(said, line, 1);
        play(&plain, true, false, said, sizeof said);
        expect(said, far[i][0], 0);
        unsetenv(far[i][0]);
    }
#endif
    setenv("EP_OVERLAP_CUDA_DIRECT", "1", 1);
    play(&plain, false, false, said, sizeof said);
    expect(said, "EP_OVERLAP_CUDA_DIRECT=1 has no effect in this group: there are no chains\n", 1);
    unsetenv("EP_OVERLAP_CUDA_DIRECT");
    setenv("EP_OVERLAP_CUDA_GEMM", "portable", 1);
    setenv("EP_OVERLAP_CUDA_KEEP", "1", 1);
    play(&plain, true, false, said, sizeof said);
    expect(said, "EP_OVERLAP_CUDA_KEEP=1 has no effect in this group: the products are", 1);
    expect(said, "EP_OVERLAP_CUDA_CHAIN=1 has no effect in this group: the products are", 1);
    unsetenv("EP_OVERLAP_CUDA_KEEP");
    unsetenv("EP_OVERLAP_CUDA_GEMM");
}

int main(void) {
    static const CU_TestInfo tests[] = {{"rows that were to go home one by one", home_is_told},
                                        {"other settings", others_are_told},
                                        CU_TEST_INFO_NULL};
    fake_cuda_stream_ops(true);
    engine = epo_engine_entry(EPO_ENGINE_ABI);
    alarm(200); /* what hangs, ends */
    return engine != NULL ? unit_run("cuda said", tests) : 1;
}
