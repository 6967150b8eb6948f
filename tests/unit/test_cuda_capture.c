/* SPDX-License-Identifier: Apache-2.0
 *
 * What a capture of the caller's leaves behind, on the CUDA engine over a runtime in ordinary
 * memory (tests/fake/cuda_runtime.c): events that nobody can ask for, and peers that do not wait
 * for a call that was refused.
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
static pthread_barrier_t together;

typedef struct member {
    epo_world *world;
    int rank, wrong;
    double waited;
    char text[300];
} member;

static epo_group *open_group(const member *m) {
    epo_engine_group g = cuda_ranks_group(m->world, m->rank, RANKS);
    epo_group *group = NULL;
    cudaSetDevice(m->rank);
    g.config.overlap = EPO_ON;
    g.config.delay_wgrad = EPO_OFF;
    g.config.dispatcher = EPO_DISPATCH_ALLTOALL;
    g.config.chunks = 1;
    return engine->group_create(&g, &group) == EPO_OK ? group : NULL;
}

static void expect(member *m, bool good, const char *what) {
    if (good)
        return;
    m->wrong++;
    printf("rank %d: %s [%s]\n", m->rank, what, engine->error());
}

static void play(void *(*rank_main)(void *), bool pairs) {
    member m[RANKS];
    pthread_barrier_init(&together, NULL, RANKS);
    epo_world *world = cuda_ranks_world(engine, RANKS, false, pairs);
    for (int r = 0; r < RANKS; r++)
        m[r] = (member){.world = world, .rank = r};
    cuda_ranks_run(engine, world, RANKS, rank_main, m, sizeof *m);
    pthread_barrier_destroy(&together);
    for (int r = 0; r < RANKS; r++)
        CU_ASSERT_EQUAL(m[r].wrong, 0);
    fake_cuda_forget(false);
}

/* ---- a buffer that is ended too early ------------------------------------------ */

/* The capture is the process's: both ranks begin it and end it together. */
static void capture(const member *m, cudaStream_t stream, bool begin) {
    pthread_barrier_wait(&together);
    if (m->rank == 0)
        fake_cuda_capture(begin ? stream : NULL);
    pthread_barrier_wait(&together);
}

/* A forward and its backward, recorded on rank 0. */
static void record_layer(member *m, epo_buffer *buffer, epo_layer *layer, float *x,
                         cudaStream_t stream, epo_plan **plan) {
    int64_t experts[T * K];
    epo_saved *saved = NULL;
    for (int i = 0; i < T * K; i++)
        experts[i] = i % E;
    const epo_routing r = config_routing(T, K, experts, NULL);
    capture(m, stream, true);
    expect(m, engine->plan_create(buffer, &r, (epo_stream)stream, plan) == EPO_OK, "no plan");
    expect(m, engine->forward(layer, *plan, x, x, &saved, (epo_stream)stream) == EPO_OK,
           "no forward");
    expect(m, engine->backward(layer, saved, x, x, NULL, (epo_stream)stream) == EPO_OK,
           "no backward");
    capture(m, stream, false);
}

/* It is refused, and that is all. */
static void *early_main(void *arg) {
    member *m = arg;
    epo_group *group = open_group(m);
    float *w = cuda_ranks_room((size_t)E * 2 * H * H * 4);
    float *x = cuda_ranks_room((size_t)T * H * 4);
    epo_buffer_config b = config_buffer(E, H, K, T);
    epo_layer_config l = config_layer(E, H, H, w, w);
    epo_buffer *buffer = NULL;
    epo_layer *layer = NULL;
    epo_plan *plan = NULL;
    cudaStream_t stream = NULL;
    b.capacity = T * K;
    b.pad_to_capacity = b.graphs = 1;
    l.dw1 = l.dw2 = w;
    expect(m, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess,
           "no stream");
    expect(m, engine->buffer_create(group, &b, &buffer) == EPO_OK, "no buffer");
    expect(m, engine->layer_create(group, &l, &layer) == EPO_OK, "no layer");
    record_layer(m, buffer, layer, x, stream, &plan);
    expect(m, engine->buffer_destroy(buffer) == EPO_E_STATE, "a buffer with a plan was ended");
    expect(m, strstr(engine->error(), "1 plans made from it still exist") != NULL, "another text");
    expect(m, engine->group_async_error(group) == EPO_OK, "the group is broken");
    engine->plan_release(plan);
    expect(m, engine->layer_destroy(layer) == EPO_OK, "the layer stays");
    expect(m, engine->buffer_destroy(buffer) == EPO_OK, "the buffer stays");
    expect(m, engine->group_destroy(group) == EPO_OK, "the group stays");
    (void)cudaStreamDestroy(stream);
    free(x);
    free(w);
    return NULL;
}

static void a_buffer_ended_too_early_costs_nothing(void) { play(early_main, false); }

/* ---- a sum on a stream that is being captured ------------------------------------ */

static void *sum_main(void *arg) {
    member *m = arg;
    epo_group *group = open_group(m);
    float *data = cuda_ranks_room(64);
    cudaStream_t stream = NULL;
    expect(m, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess,
           "no stream");
    expect(m, engine->group_allreduce(group, data, 16, (epo_stream)stream) == EPO_OK, "no sum");
    capture(m, stream, true);
    const double start = gpu_now();
    epo_status status = engine->group_allreduce(group, data, 16, (epo_stream)stream);
    while (m->rank == 1 && status == EPO_OK && gpu_now() - start < 30)
        status = engine->group_async_error(group);
    expect(m, status == EPO_E_UNSUPPORTED, "it is not refused on both");
    expect(m, strstr(engine->error(), "rank 0: the stream is being captured") != NULL,
           "another text");
    expect(m, gpu_now() - start < 30, "it was waited for");
    capture(m, stream, false);
    (void)engine->group_destroy(group);
    (void)cudaStreamDestroy(stream);
    free(data);
    return NULL;
}

static void a_refused_sum_ends_the_others(void) { play(sum_main, false); }

int main(void) {
    static const CU_TestInfo tests[] = {
        {"a buffer ended too early costs nothing", a_buffer_ended_too_early_costs_nothing},
        {"a refused sum ends the others", a_refused_sum_ends_the_others},
        CU_TEST_INFO_NULL};
    engine = epo_engine_entry(EPO_ENGINE_ABI);
    alarm(100); /* what hangs, ends */
    return engine != NULL ? unit_run("cuda capture", tests) : 1;
}
