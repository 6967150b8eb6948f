/* SPDX-License-Identifier: Apache-2.0 */
#include "measure.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/status.h"

#define WARM_UP 2
#define RECORDED 3 /* passes with intervals, apart from the timed ones */
#define CAPACITY (1u << 17)
#define NAMES 32
#define COPY_BYTES ((size_t)16 << 20)

/* One side of the comparison: layers over the run's weights, in its own world or
 * in the run's. */
typedef struct arm {
    moe_world *world;
    bool own;
    moe_block **block;
    int layers;
} arm;

/* What the recorded passes of an arm told about this rank. */
typedef struct recorded {
    double ffn_ms[RECORDED]; /* union of the experts' work */
    char name[NAMES][sizeof((epo_interval *)0)->name];
    double best_ms[NAMES], now_ms[NAMES]; /* by kind of work */
    int names;
    epo_overlap_times unions; /* of the last pass */
    uint64_t dropped;
    int chunks;
} recorded;

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

/* Routes as the model did last, so that both sides move the same rows. */
static epo_status arm_fill(arm *a, train *t) {
    a->layers = t->opt->layers;
    a->block = calloc((size_t)a->layers, sizeof *a->block);
    if (a->block == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory for %d layers", a->layers);
    for (int l = 0; l < a->layers; l++) {
        const model_layer_state *s = &t->model->layer[l];
        epo_status status = moe_block_share(a->world, t->block[l], &a->block[l]);
        if (status == EPO_OK)
            status = moe_block_route(a->block[l], t->block[l]->tokens, s->chosen, s->weights);
        if (status != EPO_OK)
            return status;
    }
    return EPO_OK;
}

static epo_status open_serial(arm *a, train *t) {
    const moe_switches off = {EPO_OFF, t->world->info.dispatcher, EPO_OFF, 1};
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
            epo_status status = moe_block_forward(a->block[l], m->layer[l].norm2, m->dn);
            if (status != EPO_OK)
                return status;
        }
        for (int l = a->layers - 1; l >= 0; l--) {
            const model_layer_state *s = &m->layer[l];
            epo_status status = moe_block_backward(a->block[l], s->norm2, m->dn, s->dweights);
            if (status != EPO_OK)
                return status;
        }
    }
    return moe_world_flush(a->world);
}

static epo_status timed(const arm *a, train *t, double *ms) {
    epo_status status = moe_world_barrier(t->world);
    double start = now_ms();
    if (status == EPO_OK)
        status = pass(a, t);
    *ms = now_ms() - start;
    return status;
}

/* value[i] becomes the largest over the ranks. */
static epo_status slowest(train *t, double *value, int count) {
    const int ranks = t->world->info.ranks, rank = t->world->info.rank;
    float *all = calloc((size_t)ranks * (size_t)count, sizeof *all);
    if (all == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory for %d samples", count);
    for (int i = 0; i < count; i++)
        all[rank * count + i] = (float)value[i];
    epo_status status = moe_world_sum(t->world, all, (size_t)ranks * (size_t)count);
    for (int i = 0; status == EPO_OK && i < count; i++) {
        value[i] = 0;
        for (int r = 0; r < ranks; r++)
            value[i] = fmax(value[i], (double)all[r * count + i]);
    }
    free(all);
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
    return slowest(t, ms, 2 * pairs);
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

static void note_name(recorded *r, const epo_interval *i) {
    int n = 0;
    while (n < r->names && strncmp(r->name[n], i->name, sizeof r->name[n]) != 0)
        n++;
    if (n == NAMES)
        n = NAMES - 1; /* never seen: the engine has fewer kinds */
    else if (n == r->names) {
        memcpy(r->name[n], i->name, sizeof r->name[n]);
        r->best_ms[n] = INFINITY;
        r->names++;
    }
    r->now_ms[n] += (double)(i->end_ns - i->start_ns) * 1e-6;
}

static epo_status note_pass(recorded *r, int which, const epo_interval *interval, uint64_t count) {
    epo_spans comm = {NULL, 0, 0}, compute = {NULL, 0, 0};
    epo_status status = EPO_OK;
    memset(r->now_ms, 0, sizeof r->now_ms);
    for (uint64_t i = 0; status == EPO_OK && i < count; i++) {
        r->chunks = interval[i].chunk >= r->chunks ? interval[i].chunk + 1 : r->chunks;
        if (interval[i].kind == EPO_INTERVAL_COMM)
            status = epo_spans_add(&comm, interval[i].start_ns, interval[i].end_ns);
        if (interval[i].kind == EPO_INTERVAL_COMPUTE) {
            status = epo_spans_add(&compute, interval[i].start_ns, interval[i].end_ns);
            note_name(r, &interval[i]);
        }
    }
    epo_spans_compare(&comm, &compute, &r->unions);
    r->ffn_ms[which] = (double)r->unions.compute * 1e-6;
    for (int n = 0; n < r->names; n++)
        r->best_ms[n] = fmin(r->best_ms[n], r->now_ms[n]);
    epo_spans_free(&comm);
    epo_spans_free(&compute);
    return status;
}

static epo_status record(train *t, const arm *a, recorded *r) {
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
            status = note_pass(r, i, interval, count);
        if (status != EPO_OK)
            return status;
        r->dropped += dropped;
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

/* GB/s of a copy between two arrays of this rank, the best of five. */
static double copy_rate(void) {
    char *from = malloc(COPY_BYTES), *to = malloc(COPY_BYTES);
    double best = INFINITY;
    if (from != NULL && to != NULL) {
        memset(from, 1, COPY_BYTES);
        memset(to, 2, COPY_BYTES);
        for (int i = 0; i < 5; i++) {
            double start = now_ms();
            from[i] = (char)i;
            memcpy(to, from, COPY_BYTES);
            __asm__ volatile("" ::"r"(to) : "memory");
            best = fmin(best, now_ms() - start);
        }
    }
    free(from);
    free(to);
    return (double)COPY_BYTES * 1e-6 / best;
}

/* rows[p]: tokens of this rank that expert layer l sends to rank p != this one,
 * each once. */
static void rows_to(const train *t, int l, float *rows) {
    const int top_k = t->opt->top_k, local = t->world->local_experts, rank = t->world->info.rank;
    const int64_t *chosen = t->model->layer[l].chosen;
    for (int i = 0; i < t->block[l]->tokens; i++, chosen += top_k)
        for (int k = 0; k < top_k; k++) {
            int64_t peer = chosen[k] / local;
            bool seen = peer == rank;
            for (int j = 0; j < k; j++)
                seen = seen || chosen[j] / local == peer;
            rows[peer] += seen ? 0 : 1;
        }
}

/* The least time of one dispatch of layer l (its combine is the same turned
 * round): the busiest pair on an emulated link, else the busiest rank's copies. */
static double least_ms(const float *rows, int ranks, double row_bytes, const epo_group_info *info,
                       double gbs) {
    double pair = 0, busiest = 0;
    for (int r = 0; r < ranks; r++) {
        double out = 0, in = 0;
        for (int p = 0; p < ranks; p++) {
            out += (double)rows[r * ranks + p];
            in += (double)rows[p * ranks + r];
            pair = fmax(pair, (double)rows[r * ranks + p]);
        }
        busiest = fmax(busiest, fmax(out, in));
    }
    if (info->link_gbs > 0)
        return pair * row_bytes / (gbs * 1e6) + (pair > 0 ? info->link_us * 1e-3 : 0);
    return busiest * row_bytes / (gbs * 1e6);
}

static epo_status link_floor(train *t, measured *out) {
    const epo_group_info *info = &t->world->info;
    const int ranks = info->ranks;
    const double row_bytes =
        (double)t->opt->hidden * (double)epo_dtype_size((epo_dtype)t->opt->dtype);
    float *rows = malloc((size_t)ranks * (size_t)ranks * sizeof *rows);
    epo_status status = EPO_OK;
    double sum = 0, rate = info->link_gbs > 0 ? info->link_gbs : copy_rate();
    if (rows == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory for %d x %d counts", ranks, ranks);
    for (int l = 0; status == EPO_OK && l < t->opt->layers; l++) {
        memset(rows, 0, (size_t)ranks * (size_t)ranks * sizeof *rows);
        rows_to(t, l, rows + (size_t)info->rank * (size_t)ranks);
        status = moe_world_sum(t->world, rows, (size_t)ranks * (size_t)ranks);
        sum += least_ms(rows, ranks, row_bytes, info, rate);
    }
    free(rows);
    /* forward and backward each dispatch and combine once */
    out->dispatch_least_ms = out->combine_least_ms = 2 * sum * t->opt->micro_batches;
    out->rate_gbs = rate;
    out->rate_of = info->link_gbs > 0 ? "emulated link" : "memory copy";
    return status;
}

/* ---- together --------------------------------------------------------- */

static epo_status ceilings(train *t, const arm *serial, const arm *on, measured *out) {
    recorded r;
    double flops, ffn[RECORDED + 1];
    epo_status status = record(t, serial, &r);
    if (status == EPO_OK)
        status = flops_of(serial, t, &flops);
    if (status != EPO_OK)
        return status;
    double best = 0;
    for (int n = 0; n < r.names; n++)
        best += r.best_ms[n];
    out->ffn_gflops = best > 0 ? flops / (best * 1e6) : 0;
    memcpy(ffn, r.ffn_ms, sizeof r.ffn_ms);
    ffn[RECORDED] = best;
    status = slowest(t, ffn, RECORDED + 1);
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
    m.share = t->cores > 0 ? fmax(1, (double)t->world->info.ranks / t->cores) : 1;
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
