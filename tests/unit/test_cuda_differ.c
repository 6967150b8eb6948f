/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranks whose passes do not fit each other, on the CUDA engine over a runtime in ordinary memory
 * (tests/fake/cuda_runtime.c): by peers' memory and over NCCL, in a chain and without.
 */
#include "config.h"

#include "backend/cuda/gpu.h"
#include "cuda_ranks.h"
#include "layers_differ.h"

#include "../fake/cuda_runtime.h"

#include <unistd.h>

enum { RANKS = 2 };

static const epo_engine *engine;

typedef struct member {
    epo_world *world;
    int rank, wrong;
    differ_kind kind;
    epo_dispatcher dispatcher;
    int chunks;
    bool graphs;
} member;

static void *member_main(void *arg) {
    member *m = arg;
    epo_engine_group g = cuda_ranks_group(m->world, m->rank, RANKS);
    epo_group *group = NULL;
    cudaSetDevice(m->rank);
    g.config.overlap = EPO_ON;
    g.config.delay_wgrad = EPO_OFF;
    g.config.dispatcher = m->dispatcher;
    g.config.chunks = m->chunks;
    if (engine->group_create(&g, &group) != EPO_OK)
        m->wrong = 1;
    else
        m->wrong = differ_rank(engine, group, m->rank, m->kind, m->graphs);
    return NULL;
}

static void play(differ_kind kind, epo_dispatcher dispatcher, int chunks, bool pairs, bool graphs) {
    member m[RANKS];
    char left[200];
    epo_world *world = cuda_ranks_world(engine, RANKS, true, pairs);
    for (int r = 0; r < RANKS; r++)
        m[r] = (member){world, r, 0, kind, dispatcher, chunks, graphs};
    cuda_ranks_run(engine, world, RANKS, member_main, m, sizeof *m);
    for (int r = 0; r < RANKS; r++)
        CU_ASSERT_EQUAL(m[r].wrong, 0);
    if (kind != DIFFER_NOT) /* a broken group leaves what peers may still write to */
        fake_cuda_forget(true);
    const int n = fake_cuda_left(left, sizeof left);
    if (n != 0)
        printf("kind %d, dispatcher %d%s: left: %s\n", (int)kind, (int)dispatcher,
               pairs ? ", NCCL" : "", left);
    CU_ASSERT_EQUAL(n, 0);
    fake_cuda_forget(false);
}

static void told(void) {
#ifdef HAVE_NCCL
    const int ways = 2;
#else
    const int ways = 1;
#endif
    for (int kind = 0; kind < DIFFER_KINDS; kind++)
        for (int d = EPO_DISPATCH_ALLTOALL; d <= EPO_DISPATCH_FLEX; d++)
            for (int way = 0; way < ways; way++)
                if (kind != DIFFER_TOKENS || d == EPO_DISPATCH_FLEX)
                    play((differ_kind)kind, (epo_dispatcher)d, 1 + way, way == 1, false);
}

/* Where a graph may replay what was called, the calls themselves are compared at once. */
static void told_in_captures(void) {
    static const differ_kind kinds[] = {DIFFER_FFN,    DIFFER_TOKENS, DIFFER_OWN,
                                        DIFFER_BUFFER, DIFFER_EXTRA,  DIFFER_NOT};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        for (int d = EPO_DISPATCH_ALLTOALL; d <= EPO_DISPATCH_FLEX; d++)
            if (kinds[i] != DIFFER_TOKENS || d == EPO_DISPATCH_FLEX)
                play(kinds[i], (epo_dispatcher)d, 1, false, true);
}

int main(void) {
    static const CU_TestInfo tests[] = {{"each thing that has to be the same", told},
                                        {"in a buffer for graphs", told_in_captures},
                                        CU_TEST_INFO_NULL};
    fake_cuda_stream_ops(true);
    engine = epo_engine_entry(EPO_ENGINE_ABI);
    alarm(200); /* what hangs, ends */
    return engine != NULL ? unit_run("cuda differ", tests) : 1;
}
