/* SPDX-License-Identifier: Apache-2.0 */
#include "measure.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/status.h"
#include "measure/gather.h"
#include "measure/recorded.h"
#include "measure/rows.h"

#define WARM_UP 2
#define RECORDED 3 /* passes with intervals, apart from the timed ones */
#define CAPACITY (1u << 17)

/* One side of the comparison: layers over the run's weights, in its own world or
 * in the run's. */
typedef struct arm {
    moe_world *world;
    bool own;
    moe_block **block;
    int layers;
} arm;

/* ---- the two sides ---------------------------------------------------- */

static epo_status arm_close(arm *a) {
    epo_status first = EPO_OK, status;
    for (int l = 0; a->block != NULL && l < a->layers; l++) {
        status = moe_block_destroy(a->block[l]);
        first = first != EPO_OK ? first : status;
    }
    free(a->block);
    status = a->own ? moe_world_close(a->world) : EPO_OK;
    *a = (arm){NULL, false, NULL, 0};
    return first != EPO_OK ? first : status;
}

/* Until an engine that tries numbers of chunks has chosen: plans with a pass each. */
static epo_status settle_chunks(arm *a, train *t) {
    const model_layer_state *s = &t->model->layer[0];
    epo_status status = EPO_OK;
    const int trials = measure_device_trials(&a->world->device);
    for (int i = 0; i < trials && status == EPO_OK; i++) {
        status = moe_block_route(a->block[0], t->block[0]->tokens, s->chosen, s->weights);
        if (status == EPO_OK)
            status = moe_block_trial(a->block[0], s->norm2, t->model->dn, s->dweights);
        if (status == EPO_OK)
            status = moe_world_sync(a->world);
    }
    return status;
}

/* Routes as the model did last, so that both sides move the same rows. */
static epo_status arm_fill(arm *a, train *t) {
    a->layers = t->opt->layers;
    a->block = calloc((size_t)a->layers, sizeof *a->block);
    if (a->block == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory for %d layers", a->layers);
    for (int l = 0; l < a->layers; l++) {
        const model_layer_state *s = &t->model->layer[l];
        epo_status status = moe_block_share(a->world, t->block[l], &a->block[l]);
        if (status == EPO_OK && l == 0 && a->world->info.overlap && a->world->info.chunks == 0)
            status = settle_chunks(a, t);
        if (status == EPO_OK)
            status = moe_block_route(a->block[l], t->block[l]->tokens, s->chosen, s->weights);
        if (status != EPO_OK)
            return status;
    }
    return EPO_OK;
}

static epo_status open_serial(arm *a, train *t) {
    const moe_switches off = {t->world->device.gpu ? EPO_ENGINE_CUDA : EPO_ENGINE_HOST, EPO_OFF,
                              t->world->info.dispatcher, EPO_OFF, 1};
    epo_status status = moe_world_open(&off, &a->world);
    a->own = status == EPO_OK;
    if (status == EPO_OK)
        status = moe_world_fit(a->world, &t->world->shape);
    return status == EPO_OK ? arm_fill(a, t) : status;
}

/* One step's passes: all micro-batches forward and backward, then the delayed
 * weight gradients.  The rows are those of the last micro-batch each time. */
static epo_status pass(const arm *a, train *t) {
    model *m = t->model;
    for (int i = 0; i < t->opt->micro_batches; i++) {
        for (int l = 0; l < a->layers; l++) {
            epo_status status = moe_block_time_forward(a->block[l], m->layer[l].norm2, m->dn);
            if (status != EPO_OK)
                return status;
        }
        for (int l = a->layers - 1; l >= 0; l--) {
            const model_layer_state *s = &m->layer[l];
            epo_status status = moe_block_time_backward(a->block[l], s->norm2, m->dn, s->dweights);
            if (status != EPO_OK)
                return status;
        }
    }
    epo_status status = moe_world_flush(a->world);
    return status == EPO_OK ? moe_world_sync(a->world) : status;
}

static epo_status timed(const arm *a, train *t, double *ms) {
    epo_status status = moe_world_barrier(t->world);
    double start = now_ms();
    if (status == EPO_OK)
        status = pass(a, t);
    *ms = now_ms() - start;
    return status;
}

/* ---- wall times ------------------------------------------------------- */

/* Interleaved, and each pair in the other order than the one before, so that
 * neither side always comes second. */
static epo_status time_pairs(train *t, const arm *serial, const arm *on, int pairs, double *ms) {
    for (int i = -WARM_UP; i < pairs; i++)
        for (int side = 0; side < 2; side++) {
            int is_on = side ^ (i & 1);
            double took;
            if (is_on && on->block == NULL)
                continue;
            epo_status status = timed(is_on ? on : serial, t, &took);
            if (status != EPO_OK)
                return status;
            if (i >= 0)
                ms[is_on * pairs + i] = took;
        }
    return measure_largest(t->world->group, &t->world->device, ms, 2 * pairs);
}

static epo_status wall_times(train *t, const arm *serial, const arm *on, measured *out) {
    const int pairs = out->pairs;
    double *ms = calloc(3 * (size_t)pairs, sizeof *ms);
    if (ms == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory for %d pairs", pairs);
    epo_status status = time_pairs(t, serial, on, pairs, ms);
    if (status == EPO_OK) {
        for (int i = 0; out->have_on && i < pairs; i++)
            ms[2 * pairs + i] = ms[i] / ms[pairs + i];
        out->serial = spread_of(ms, pairs);
        out->on = spread_of(ms + pairs, pairs);
        out->speedup = spread_of(ms + 2 * pairs, pairs);
    }
    free(ms);
    return status;
}

/* ---- recorded passes -------------------------------------------------- */

static epo_status record(train *t, const arm *a, measure_recorded *r) {
    memset(r, 0, sizeof *r);
    for (int i = 0; i < RECORDED; i++) {
        const epo_interval *interval;
        uint64_t count, dropped;
        double ms;
        epo_status status = moe_world_record(a->world, CAPACITY);
        if (status == EPO_OK)
            status = timed(a, t, &ms);
        if (status == EPO_OK)
            status = moe_world_recorded(a->world, &interval, &count, &dropped);
        if (status == EPO_OK)
            status = measure_recorded_add(r, interval, count, dropped);
        if (status != EPO_OK)
            return status;
    }
    return EPO_OK;
}

/* ---- ceilings --------------------------------------------------------- */

/* Multiply-adds count two: fc1 has 2FH of them a row, fc2 FH; backward twice that. */
static epo_status flops_of(const arm *a, const train *t, double *flops) {
    double rows = 0;
    for (int l = 0; l < a->layers; l++) {
        uint64_t of_layer;
        epo_status status = moe_block_rows(a->block[l], &of_layer);
        if (status != EPO_OK)
            return status;
        rows += (double)of_layer;
    }
    *flops = 18.0 * rows * t->opt->hidden * t->opt->ffn * t->opt->micro_batches;
    return EPO_OK;
}

static epo_status link_floor(train *t, measured *out) {
    const epo_group_info *info = &t->world->info;
    const int ranks = info->ranks;
    const double row_bytes =
        (double)t->opt->hidden * (double)epo_dtype_size((epo_dtype)t->opt->dtype);
    float *rows = malloc((size_t)ranks * (size_t)ranks * sizeof *rows);
    epo_status status = EPO_OK;
    double sum = 0, rate = info->link_gbs;
    int64_t *chosen =
        calloc((size_t)t->model->shape.max_tokens * (size_t)t->opt->top_k + 1, sizeof *chosen);
    if (rows == NULL || chosen == NULL) {
        free(rows);
        free(chosen);
        return epo_fail(EPO_E_NOMEM, "no memory for %d x %d counts", ranks, ranks);
    }
    /* GPUs: one rank's copies at a time, and nothing else on the links */
    const bool mine = !t->world->device.gpu || info->rank == 0;
    status = moe_world_barrier(t->world);
    if (status == EPO_OK && mine && !(rate > 0))
        status = measure_copy_rate(&t->world->device, t->world->device.number + 1, &rate);
    if (status == EPO_OK)
        status = moe_world_barrier(t->world);
    for (int l = 0; status == EPO_OK && l < t->opt->layers; l++) {
        memset(rows, 0, (size_t)ranks * (size_t)ranks * sizeof *rows);
        t->world->dense->get(t->world->dense_at, chosen, t->model->layer[l].chosen,
                             (size_t)t->block[l]->tokens * (size_t)t->opt->top_k * sizeof *chosen);
        measure_rows_to(chosen, t->block[l]->tokens, t->opt->top_k, t->world->local_experts,
                        info->rank, rows + (size_t)info->rank * (size_t)ranks);
        status = moe_world_sum(t->world, rows, (size_t)ranks * (size_t)ranks);
        sum += measure_rows_least_ms(rows, ranks, row_bytes, info, rate);
    }
    free(chosen);
    free(rows);
    /* forward and backward each dispatch and combine once */
    out->dispatch_least_ms = out->combine_least_ms = 2 * sum * t->opt->micro_batches;
    out->rate_gbs = rate;
    out->rate_of = info->link_gbs > 0      ? "emulated link"
                   : !t->world->device.gpu ? "memory copy"
                   : rate > 0              ? "peer copy"
                                           : "not measured: one GPU visible";
    return status;
}

/* ---- together --------------------------------------------------------- */

static epo_status ceilings(train *t, const arm *serial, const arm *on, measured *out) {
    measure_recorded r;
    double flops, ffn[RECORDED + 1];
    epo_status status = record(t, serial, &r);
    if (status == EPO_OK)
        status = flops_of(serial, t, &flops);
    if (status != EPO_OK)
        return status;
    const double best = measure_recorded_best(&r);
    out->ffn_gflops = best > 0 ? flops / (best * 1e6) : 0;
    memcpy(ffn, r.ffn_ms, RECORDED * sizeof ffn[0]);
    ffn[RECORDED] = best;
    status = measure_largest(t->world->group, &t->world->device, ffn, RECORDED + 1);
    out->ffn_best_ms = ffn[RECORDED];
    out->ffn_alone_ms = spread_of(ffn, RECORDED).median;
    if (status == EPO_OK && out->have_on)
        status = record(t, on, &r);
    out->unions = r.unions;
    out->dropped = r.dropped;
    out->chunks = r.chunks;
    return status == EPO_OK ? link_floor(t, out) : status;
}

static epo_status one_counted_pass(train *t, const arm *a, measured *out) {
    double ms;
    epo_status status = moe_world_stats(a->world, &out->pass, 1);
    if (status == EPO_OK)
        status = timed(a, t, &ms);
    return status == EPO_OK ? moe_world_stats(a->world, &out->pass, 0) : status;
}

epo_status measure_run(train *t, int pairs, measured *out) {
    arm serial = {NULL, false, NULL, 0}, on = {t->world, false, NULL, 0};
    measured m = {.pairs = pairs, .have_on = t->world->info.overlap != 0};
    epo_status status = open_serial(&serial, t);
    if (status == EPO_OK && m.have_on)
        status = arm_fill(&on, t);
    if (status == EPO_OK)
        status = wall_times(t, &serial, &on, &m);
    if (status == EPO_OK)
        status = ceilings(t, &serial, &on, &m);
    if (status == EPO_OK)
        status = one_counted_pass(t, m.have_on ? &on : &serial, &m);
    if (status != EPO_OK) /* the run is abandoned: closing would wait for the peers */
        return status;
    m.share = t->cores > 0 && !t->world->device.gpu
                  ? fmax(1, (double)t->world->info.ranks / t->cores)
                  : 1;
    m.floor_ms = fmax(m.ffn_best_ms * m.share, m.dispatch_least_ms + m.combine_least_ms);
    m.exposed_ms = (m.have_on ? m.on.median : m.serial.median) - m.ffn_alone_ms;
    m.efficiency = m.have_on && m.serial.median > m.floor_ms
                       ? (m.serial.median - m.on.median) / (m.serial.median - m.floor_ms)
                       : NAN;
    status = arm_close(&on);
    epo_status also = arm_close(&serial);
    if (status == EPO_OK && also == EPO_OK)
        *out = m;
    return status != EPO_OK ? status : also;
}
