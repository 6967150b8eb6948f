/* SPDX-License-Identifier: Apache-2.0
 *
 * graph_margin.c - a rank comes to a replay, or to calls without a graph, about when the others'
 * limit ends: every number that comes out is right, or NaN, and then there is an error.  So a
 * rank whose wait expired raised no flag behind it that anybody believed.
 */
#include "graph.h"

/* All outputs of one way, on the CPU, one behind the other. */
static char *outputs_read(const job *j, int way) {
    test_output out[TEST_OUTPUTS];
    uint64_t bytes = 0, at = 0;
    test_outputs(&j->s.c, j->rank, &j->a[way], NULL, out);
    TEST_CUDA(cudaStreamSynchronize(j->stream));
    for (int i = 0; i < TEST_OUTPUTS; i++)
        bytes += out[i].count * test_size(out[i].type);
    char *host = malloc(bytes + 1);
    for (int i = 0; i < TEST_OUTPUTS; i++) {
        TEST_CUDA(cudaMemcpy(host + at, out[i].device, out[i].count * test_size(out[i].type),
                             cudaMemcpyDeviceToHost));
        at += out[i].count * test_size(out[i].type);
    }
    return host;
}

/* Numbers of the first `promised` outputs that are NaN, and those that are neither that nor as
 * wanted. */
static void outputs_judge(job *j, const char *want, const char *got, int promised) {
    test_output out[TEST_OUTPUTS];
    uint64_t at = 0;
    test_outputs(&j->s.c, j->rank, &j->a[1], NULL, out);
    for (int i = 0; i < TEST_OUTPUTS; i++) {
        const size_t size = test_size(out[i].type);
        for (uint64_t k = 0; k < out[i].count && i < promised; k++) {
            const bool nan = isnan(test_load(got + at, k, out[i].type));
            j->b->rank[j->rank].nans += nan ? 1 : 0;
            j->b->rank[j->rank].wrong[i] +=
                !nan && memcmp(got + at + k * size, want + at + k * size, size) != 0 ? 1 : 0;
        }
        at += out[i].count * size;
    }
}

/* Rank 0 goes on at once, rank 1 when rank 0's limit ends. */
static void take_turns(job *j) {
    if (j->rank == 0)
        atomic_store(&j->b->launched, test_now());
    while (j->rank == 1 &&
           (atomic_load(&j->b->launched) == 0 ||
            test_now() < atomic_load(&j->b->launched) + MARGIN_LIMIT_S + j->s.margin_s))
        usleep(20);
}

/* Without a graph; how many of the outputs were promised: a call that fails writes nothing. */
static int calls_late(job *j, epo_plan *plan) {
    epo_saved *saved = NULL;
    const test_arrays *a = &j->a[1];
    take_turns(j);
    if (j->engine->forward(j->layer[1], plan, a->x, a->y, &saved, j->stream) != EPO_OK)
        return 0;
    return j->engine->backward(j->layer[1], saved, a->dy, a->dx, a->dweights, j->stream) == EPO_OK
               ? TEST_OUTPUTS
               : 1;
}

/* What comes out is right, or NaN with an error, whoever was first. */
epo_status graph_margin_run(job *j) {
    const epo_routing r = test_routing(&j->s.c, j->rank, j->a[0].experts, j->a[0].weights);
    epo_plan *plan = NULL;
    int promised = TEST_OUTPUTS;
    graph_inputs_send(j, 1, false);
    epo_status status = graph_calls(j, j->plain, j->layer[0], &plan);
    j->engine->plan_release(plan);
    char *want = outputs_read(j, 0);
    graph_inputs_send(j, 1, false);
    plan = NULL;
    if (status == EPO_OK)
        status = j->engine->plan_create(j->plain, &r, j->stream, &plan);
    if (status == EPO_OK)
        status = j->engine->group_barrier(j->group);
    if (status == EPO_OK && j->s.called) {
        promised = calls_late(j, plan);
    } else {
        take_turns(j);
        TEST_CUDA(cudaGraphLaunch(j->exec, j->stream));
    }
    char *got = outputs_read(j, 1);
    outputs_judge(j, want, got, promised);
    for (int i = 0; i < 1000 && status == EPO_OK; i++) { /* 1 s */
        status = j->engine->group_async_error(j->group);
        usleep(1000);
    }
    j->engine->plan_release(plan);
    free(want);
    free(got);
    return status;
}

/* Right, or NaN and an error. */
bool graph_margin_judge(const job *j, char *text, size_t size) {
    bool ok = true;
    size_t used = (size_t)snprintf(text, size, "%+.1f ms", 1e3 * j->s.margin_s);
    for (int r = 0; r < j->s.c.ranks; r++) {
        const uint64_t *w = j->b->rank[r].wrong;
        const uint64_t nans = j->b->rank[r].nans;
        const int status = j->b->rank[r].status;
        ok = ok && (nans == 0 || status != EPO_OK) && atomic_load(&j->b->launched) != 0;
        for (int i = 0; i < TEST_OUTPUTS; i++)
            ok = ok && w[i] == 0;
        if (used < size)
            used += (size_t)snprintf(
                text + used, size - used,
                "; rank %d: status %d, %llu NaN, wrong y %llu dx %llu dweights %llu dw1 %llu dw2 "
                "%llu",
                r, status, (unsigned long long)nans, (unsigned long long)w[0],
                (unsigned long long)w[1], (unsigned long long)w[2], (unsigned long long)w[3],
                (unsigned long long)w[4]);
    }
    return ok;
}
