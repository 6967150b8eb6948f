/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_measure.c - the samples of all arms in turns, recordings, bytes, ceilings.
 */
#include "config.h"

#include "bench_rank.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "measure/gather.h"
#include "measure/machine.h"
#include "measure/recorded.h"
#include "measure/rows.h"

#define WARM_UP 3
#define RECORDINGS 5
#define CAPACITY (1u << 16)
#define COMPARED ((uint64_t)32 << 20) /* bytes of each end of an array */

/* ---- one pass ------------------------------------------------------------ */

/* [collective]  Ready together: the ranks' clocks start within a barrier's length. */
static epo_status line_up(bench_rank *b) {
    epo_status status = measure_device_sync(&b->device);
    return status == EPO_OK ? bench_passed(epo_group_barrier(b->side[0].group)) : status;
}

/* A forward, whose CPU time is noted, and a backward if `whole`. */
static epo_status one_pass(bench_rank *b, int a, bool whole, double *call_us) {
    bench_side *s = &b->side[a];
    epo_saved *saved = NULL;
    const double from = now_ms();
    epo_status status =
        bench_passed(epo_forward(s->layer, s->plan, b->x, b->y, &saved, b->device.stream));
    if (call_us != NULL)
        *call_us = 1e3 * (now_ms() - from);
    if (status != EPO_OK || whole)
        return status != EPO_OK ? status
                                : bench_passed(epo_backward(s->layer, saved, b->dy, b->dx,
                                                            b->dweights, b->device.stream));
    status = measure_mark_set(&b->device, &b->end); /* before what only saving costs */
    epo_saved_release(saved);
    return status;
}

static epo_status flush(bench_rank *b, int a) {
    return bench_passed(epo_group_wgrad_flush(b->side[a].group, b->device.stream));
}

/* One sample: a forward; or several micro-batches and the flush of what was delayed,
 * so that a delayed gradient is paid for. */
static epo_status sample(bench_rank *b, int a, bool whole, double *ms, double *call_us) {
    epo_status status = line_up(b);
    if (status == EPO_OK)
        status = measure_mark_set(&b->device, &b->start);
    for (int i = 0; status == EPO_OK && i < (whole ? BENCH_MICROBATCHES : 1); i++)
        status = one_pass(b, a, whole, call_us);
    if (status == EPO_OK && whole)
        status = flush(b, a);
    if (status == EPO_OK && whole)
        status = measure_mark_set(&b->device, &b->end);
    if (status == EPO_OK)
        status = measure_mark_elapsed(&b->device, &b->start, &b->end, ms);
    if (whole)
        *ms /= BENCH_MICROBATCHES;
    return status == EPO_OK ? measure_device_sync(&b->device) : status;
}

/* ---- the same bits ------------------------------------------------------- */

/* FNV-1a over 64-bit words: for equality, not against malice. */
static uint64_t add_bits(uint64_t hash, const void *data, size_t bytes) {
    const char *at = data;
    for (size_t i = 0; i < bytes; i += sizeof(uint64_t)) {
        uint64_t word = 0;
        memcpy(&word, at + i, bytes - i < sizeof word ? bytes - i : sizeof word);
        hash = (hash ^ word) * UINT64_C(0x100000001b3);
        hash ^= hash >> 29;
    }
    return hash;
}

/* All of a small array, begin and end of a large one. */
static epo_status add_array(bench_rank *b, const char *array, uint64_t bytes, char *copy,
                            uint64_t *hash) {
    const uint64_t some = bytes < COMPARED ? bytes : COMPARED;
    const uint64_t at[] = {0, bytes - some};
    epo_status status = EPO_OK;
    for (int i = 0; i < (bytes > COMPARED ? 2 : 1) && status == EPO_OK; i++) {
        status = measure_device_get(&b->device, copy, array + at[i], some);
        *hash = add_bits(*hash, copy, some);
    }
    return status;
}

/* y, dx, the gradients of weights and router of one pass, as one number. */
static epo_status take_bits(bench_rank *b, int a, char *copy) {
    void *array[] = {b->y, b->dx, b->dweights, b->dw1, b->dw2};
    const uint64_t bytes[] = {b->row_bytes, b->row_bytes, b->weight_bytes, b->w1_bytes,
                              b->w2_bytes};
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    epo_status status = EPO_OK;
    for (int i = 0; i < 5 && status == EPO_OK; i++)
        status = measure_device_zero(&b->device, array[i], bytes[i]);
    if (status == EPO_OK)
        status = line_up(b);
    if (status == EPO_OK)
        status = one_pass(b, a, true, NULL);
    if (status == EPO_OK)
        status = flush(b, a);
    for (int i = 0; i < 5 && status == EPO_OK; i++)
        status = add_array(b, array[i], bytes[i], copy, &hash);
    b->side[a].bits = hash;
    return status;
}

static epo_status compare_bits(bench_rank *b) {
    double differs[BENCH_ARMS] = {0};
    char *copy = malloc(COMPARED);
    epo_status status =
        copy == NULL ? epo_fail(EPO_E_NOMEM, "no memory for %zu bytes", (size_t)COMPARED) : EPO_OK;
    for (int a = 0; a < b->arms && status == EPO_OK; a++) {
        bench_progress(b, "outputs and gradients compared", a, b->arms);
        status = take_bits(b, a, copy);
        differs[a] = b->side[a].bits != b->side[b->arm[a].serial].bits;
    }
    free(copy);
    if (status == EPO_OK)
        status = measure_largest(b->side[0].group, &b->device, differs, b->arms);
    for (int a = 0; a < b->arms && status == EPO_OK && b->rank == 0; a++) {
        b->out->arm[a].identical = differs[a] == 0;
        b->out->arm[a].bits = b->side[a].bits;
    }
    return status;
}

/* ---- times --------------------------------------------------------------- */

enum { FORWARD, BOTH, CALL, KINDS };

/* ms[kind][arm][round].  Every second round in the other order, so that no arm always
 * follows the same one. */
static epo_status take_samples(bench_rank *b, double *ms) {
    const int rounds = b->o->repeats;
    epo_status status = EPO_OK;
    for (int i = -WARM_UP; i < rounds; i++) {
        bench_progress(b, "rounds", i + WARM_UP, rounds + WARM_UP);
        for (int turn = 0; turn < b->arms; turn++) {
            const int a = i % 2 == 0 ? turn : b->arms - 1 - turn;
            double took[KINDS] = {0, 0, 0};
            status = sample(b, a, false, &took[FORWARD], &took[CALL]);
            if (status == EPO_OK)
                status = sample(b, a, true, &took[BOTH], NULL);
            if (status != EPO_OK)
                return status;
            for (int k = 0; k < KINDS && i >= 0; k++)
                ms[((size_t)k * (size_t)b->arms + (size_t)a) * (size_t)rounds + (size_t)i] =
                    took[k];
        }
    }
    return measure_largest(b->side[0].group, &b->device, ms, KINDS * b->arms * rounds);
}

static spread pairs(const double *serial, const double *arm, double *scratch, int rounds) {
    for (int i = 0; i < rounds; i++)
        scratch[i] = serial[i] / arm[i];
    return spread_of(scratch, rounds);
}

static spread copied(const double *ms, double *scratch, int rounds) {
    memcpy(scratch, ms, (size_t)rounds * sizeof *ms);
    return spread_of(scratch, rounds);
}

static epo_status times(bench_rank *b) {
    const size_t rounds = (size_t)b->o->repeats, kind = rounds * (size_t)b->arms;
    double *ms = calloc(KINDS * kind + rounds, sizeof *ms);
    if (ms == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory for %d rounds", b->o->repeats);
    double *scratch = ms + KINDS * kind;
    epo_status status = take_samples(b, ms);
    for (int a = 0; a < b->arms && status == EPO_OK && b->rank == 0; a++) {
        bench_figures *f = &b->out->arm[a];
        const double *mine = ms + (size_t)a * rounds;
        const double *serial = ms + (size_t)b->arm[a].serial * rounds;
        f->forward = copied(mine, scratch, b->o->repeats);
        f->both = copied(mine + kind, scratch, b->o->repeats);
        f->call_us = copied(mine + 2 * kind, scratch, b->o->repeats).median;
        f->faster_f = pairs(serial, mine, scratch, b->o->repeats);
        f->faster_b = pairs(serial + kind, mine + kind, scratch, b->o->repeats);
        f->plan_ms = b->side[a].plan_ms;
    }
    free(ms);
    return status;
}

/* ---- recordings ------------------------------------------------------------ */

static epo_status record(bench_rank *b, int a, bool whole, measure_recorded *r) {
    epo_group *group = b->side[a].group;
    memset(r, 0, sizeof *r);
    for (int i = 0; i < RECORDINGS; i++) {
        const epo_interval *interval = NULL;
        uint64_t count = 0, dropped = 0;
        epo_status status = line_up(b);
        if (status == EPO_OK)
            status = bench_passed(epo_record_start(group, CAPACITY));
        if (status == EPO_OK)
            status = one_pass(b, a, whole, NULL);
        if (status == EPO_OK && whole)
            status = flush(b, a);
        if (status == EPO_OK)
            status = measure_device_sync(&b->device);
        if (status == EPO_OK)
            status = bench_passed(epo_record_stop(group, &interval, &count, &dropped));
        if (status == EPO_OK)
            status = measure_recorded_add(r, interval, count, dropped);
        if (status != EPO_OK)
            return status;
    }
    return EPO_OK;
}

/* FFN_alone of a serial arm: the slowest rank's union of the experts' work, which in
 * serial passes has nothing beside it; *best: every kind of GEMM at its best. */
static epo_status alone(bench_rank *b, int a, bool whole, double *ffn, double *best) {
    measure_recorded r;
    epo_status status = record(b, a, whole, &r);
    if (status != EPO_OK)
        return status;
    double value[2] = {spread_of(r.ffn_ms, r.passes).median, measure_recorded_best(&r)};
    status = measure_largest(b->side[0].group, &b->device, value, 2);
    *ffn = value[0];
    *best = value[1];
    return status;
}

static epo_status recordings(bench_rank *b) {
    double best_f = INFINITY, best_b = INFINITY;
    epo_status status = EPO_OK;
    for (int a = 0; a < b->arms && status == EPO_OK; a++) {
        bench_figures *f = &b->out->arm[a];
        measure_recorded r;
        double best[2] = {INFINITY, INFINITY}, ffn[2] = {0, 0};
        bench_progress(b, "recordings", a, b->arms);
        if (b->arm[a].serial == a) {
            status = alone(b, a, false, &ffn[0], &best[0]);
            if (status == EPO_OK)
                status = alone(b, a, true, &ffn[1], &best[1]);
            best_f = fmin(best_f, best[0]);
            best_b = fmin(best_b, best[1]);
        }
        if (status == EPO_OK)
            status = record(b, a, true, &r);
        if (status != EPO_OK || b->rank != 0)
            continue;
        f->ffn_f = ffn[0];
        f->ffn_b = ffn[1];
        f->unions = r.unions;
        f->chunks = r.chunks;
    }
    if (status == EPO_OK && b->rank == 0) {
        b->out->ffn_best_f = best_f;
        b->out->ffn_best_b = best_b;
    }
    return status;
}

static epo_status counted_passes(bench_rank *b) {
    epo_status status = EPO_OK;
    for (int a = 0; a < b->arms && status == EPO_OK; a++) {
        epo_stats s = {.size = sizeof s};
        status = bench_passed(epo_group_stats(b->side[a].group, &s, 1));
        if (status == EPO_OK)
            status = line_up(b);
        if (status == EPO_OK)
            status = one_pass(b, a, true, NULL);
        if (status == EPO_OK)
            status = flush(b, a);
        if (status == EPO_OK)
            status = measure_device_sync(&b->device);
        s.size = sizeof s;
        if (status == EPO_OK)
            status = bench_passed(epo_group_stats(b->side[a].group, &s, 0));
        if (status == EPO_OK && b->rank == 0)
            b->out->arm[a].pass = s;
    }
    return status;
}

/* ---- ceilings ---------------------------------------------------------------- */

/* FLOPs of a rank's experts: fc1 has 2FH multiply-adds a row, fc2 FH, backward twice
 * that; of the busiest rank. */
static epo_status flops(bench_rank *b) {
    uint64_t *count = calloc((size_t)b->local, sizeof *count);
    double rows = 0;
    if (count == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory for %d counts", b->local);
    epo_status status = bench_passed(epo_plan_experts(b->side[0].plan, NULL, count));
    for (int e = 0; e < b->local; e++)
        rows += (double)count[e];
    free(count);
    if (status == EPO_OK)
        status = measure_largest(b->side[0].group, &b->device, &rows, 1);
    if (status == EPO_OK && b->rank == 0) {
        b->out->flop_f = 6.0 * rows * b->o->hidden * b->o->ffn;
        b->out->flop_b = 3 * b->out->flop_f;
    }
    return status;
}

/* Rank 0 alone copies, while the others wait on the CPU: no other traffic, and no GPU
 * that waits for rank 0 while it asks for memory. */
static epo_status wire(bench_rank *b, const epo_group_info *info) {
    const int ranks = b->ranks;
    float *rows = calloc((size_t)ranks * (size_t)ranks + 1, sizeof *rows);
    double gbs = info->link_gbs;
    epo_status status =
        rows == NULL ? epo_fail(EPO_E_NOMEM, "no memory for %d ranks", ranks) : line_up(b);
    if (status == EPO_OK && b->rank == 0 && ranks > 1 && !(gbs > 0))
        status = measure_copy_rate(&b->device, b->device.number + 1, &gbs);
    if (status == EPO_OK)
        status = line_up(b);
    if (status == EPO_OK) {
        measure_rows_to(b->chosen, b->o->tokens, b->o->top_k, b->local, b->rank,
                        rows + (size_t)b->rank * (size_t)ranks);
        status = measure_sum(b->side[0].group, &b->device, rows, (size_t)ranks * (size_t)ranks);
    }
    if (status == EPO_OK && b->rank == 0) {
        const double row = (double)b->o->hidden * (double)epo_dtype_size(b->o->type);
        b->out->copy_gbs = gbs;
        b->out->copy_of = ranks < 2            ? "one rank: nothing is sent"
                          : info->link_gbs > 0 ? "emulated link"
                          : !b->device.gpu     ? "memory copy"
                          : gbs > 0            ? "peer copy, both ways at once"
                                               : "not measured: one GPU visible";
        b->out->least_ms = measure_rows_least_ms(rows, ranks, row, info, gbs);
    }
    free(rows);
    return status;
}

static epo_status settings(bench_rank *b, epo_group_info *info) {
    bench_result *r = b->out;
    int cores = 0, gpus = 0;
    epo_status status = bench_passed(epo_group_query(b->side[0].group, info));
    if (status == EPO_OK)
        status = measure_cores(b->side[0].group, &b->device, &cores);
    if (status == EPO_OK)
        status = measure_gpus(b->side[0].group, &b->device, &gpus);
    if (status != EPO_OK || b->rank != 0)
        return status;
    r->cores = cores;
    r->info = *info;
    snprintf(r->engine, sizeof r->engine, "%s", info->engine);
    snprintf(r->versions, sizeof r->versions, "%s", info->versions);
    snprintf(r->gpu, sizeof r->gpu, "%s", b->device.name);
    const char *why = strstr(info->reason, "host engine: ");
    snprintf(r->why_host, sizeof r->why_host, "%s", why != NULL ? why : "");
    r->sms = b->device.sms;
    r->gpus = gpus;
    r->threads = b->world != NULL;
    r->shared = b->device.gpu && gpus < b->ranks;
    return EPO_OK;
}

epo_status bench_rank_measure(bench_rank *b) {
    epo_group_info info = {.size = sizeof info};
    epo_status status = settings(b, &info);
    if (status == EPO_OK)
        status = compare_bits(b);
    if (status == EPO_OK)
        status = times(b);
    if (status == EPO_OK)
        status = recordings(b);
    if (status == EPO_OK)
        status = counted_passes(b);
    if (status == EPO_OK)
        status = flops(b);
    if (status == EPO_OK)
        status = wire(b, &info);
    if (status == EPO_OK && b->rank == 0) {
        b->out->process_mb = measure_process_mb();
        b->out->gpu_used_mb = measure_device_used_mb(&b->device);
    }
    return status;
}
