/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_rank.c - a rank's rows, weights and routing, and the arms over them.
 */
#include "config.h"

#include "bench_rank.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/size.h"
#include "measure/narrow.h"
#include "measure/rng.h"
#include "measure/trial.h"

#define BLOCK ((uint64_t)1 << 20) /* random numbers that are made; the rest repeats them */
#define SEED 20251129u
#define PLANS 3 /* made one after the other: the last one's time counts */

/* ---- rows, weights, routing --------------------------------------------- */

/* `count` elements of the rows' type in device memory, uniform in +-scale. */
static epo_status random_array(bench_rank *b, uint64_t count, double scale, uint64_t stream,
                               void **out) {
    const uint64_t size = epo_dtype_size(b->o->type), some = count < BLOCK ? count : BLOCK;
    float *number = malloc((some + 1) * sizeof *number);
    void *type = malloc((some + 1) * size);
    char *there = NULL;
    epo_status status = number == NULL || type == NULL
                            ? epo_fail(EPO_E_NOMEM, "no memory for %" PRIu64 " numbers", some)
                            : measure_device_alloc(&b->device, count * size, out);
    for (uint64_t i = 0; status == EPO_OK && i < some; i++)
        number[i] = (float)(scale * rng_symmetric(SEED, stream, i));
    if (status == EPO_OK) {
        there = *out;
        narrow(type, number, some, b->o->type);
        status = measure_device_put(&b->device, there, type, some * size);
    }
    for (uint64_t done = some; status == EPO_OK && done < count;) {
        const uint64_t more = count - done < done ? count - done : done;
        status = measure_device_put(&b->device, there + done * size, there, more * size);
        done += more;
    }
    free(type);
    free(number);
    return status;
}

/* Distinct experts for each token, uniform; the weights of a token add up to 1. */
static epo_status make_routing(bench_rank *b) {
    const bench_options *o = b->o;
    const uint64_t slots = (uint64_t)o->tokens * (uint64_t)o->top_k;
    float *weight = malloc(slots * sizeof *weight);
    b->chosen = malloc(slots * sizeof *b->chosen);
    if (weight == NULL || b->chosen == NULL) {
        free(weight);
        return epo_fail(EPO_E_NOMEM, "no memory for the routing of %d tokens", o->tokens);
    }
    for (uint64_t t = 0, draw = 0; t < (uint64_t)o->tokens; t++)
        for (int k = 0; k < o->top_k; k++) {
            int64_t *mine = b->chosen + t * (uint64_t)o->top_k;
            bool again = true;
            while (again) {
                mine[k] =
                    (int64_t)(rng_at(SEED, 10 + (uint64_t)b->rank, draw++) % (uint64_t)o->experts);
                again = false;
                for (int j = 0; j < k; j++)
                    again = again || mine[j] == mine[k];
            }
            weight[t * (uint64_t)o->top_k + (uint64_t)k] = 1.0F / (float)o->top_k;
        }
    b->weight_bytes = slots * sizeof *weight;
    epo_status status = measure_device_alloc(&b->device, slots * sizeof *b->chosen, &b->experts);
    if (status == EPO_OK)
        status = measure_device_alloc(&b->device, b->weight_bytes, &b->weights);
    if (status == EPO_OK)
        status = measure_device_alloc(&b->device, b->weight_bytes, &b->dweights);
    if (status == EPO_OK)
        status = measure_device_put(&b->device, b->experts, b->chosen, slots * sizeof *b->chosen);
    if (status == EPO_OK)
        status = measure_device_put(&b->device, b->weights, weight, b->weight_bytes);
    free(weight);
    return status;
}

static epo_status make_memory(bench_rank *b) {
    const bench_options *o = b->o;
    const uint64_t size = epo_dtype_size(o->type), h = (uint64_t)o->hidden, f = (uint64_t)o->ffn;
    const uint64_t rows = (uint64_t)o->tokens * h, n = (uint64_t)b->local * f * h;
    const uint64_t rank = (uint64_t)b->rank; /* the options' limits keep n below 2^50 */
    b->w2_bytes = n * size;
    b->w1_bytes = 2 * b->w2_bytes;
    b->row_bytes = rows * size;
    epo_status status = random_array(b, 2 * n, 1.7 / (double)h, 100 + rank, &b->w1);
    if (status == EPO_OK)
        status = random_array(b, n, 1.7 / (double)f, 200 + rank, &b->w2);
    if (status == EPO_OK)
        status = random_array(b, rows, 1.0, 300 + rank, &b->x);
    if (status == EPO_OK)
        status = random_array(b, rows, 1.0, 400 + rank, &b->dy);
    void **zeroed[] = {&b->dw1, &b->dw2, &b->y, &b->dx};
    const uint64_t bytes[] = {b->w1_bytes, b->w2_bytes, b->row_bytes, b->row_bytes};
    for (int i = 0; i < 4 && status == EPO_OK; i++)
        status = measure_device_alloc(&b->device, bytes[i], zeroed[i]);
    return status == EPO_OK ? make_routing(b) : status;
}

/* ---- arms ---------------------------------------------------------------- */

static epo_status open_group(bench_rank *b, int a) {
    epo_group_config c = EPO_GROUP_CONFIG_INIT;
    const bench_arm *arm = &b->arm[a];
    c.engine = b->o->engine;
    if (b->world != NULL) {
        c.rank = b->rank;
        c.ranks = b->ranks;
        c.threads = b->world[a];
        c.engine = EPO_ENGINE_AUTO; /* the world's */
    }
    c.overlap = arm->overlap;
    c.delay_wgrad = arm->delay;
    c.dispatcher = arm->dispatcher;
    c.chunks = arm->chunks;
    c.timeout_s = b->o->timeout_s;
    c.warn_s = b->o->timeout_s;
    c.wgrad_limit_bytes = UINT64_C(64) << 30; /* memory is what bounds it here */
    return bench_passed(epo_group_create(&c, &b->side[a].group));
}

static epo_status open_objects(bench_rank *b, int a) {
    const bench_options *o = b->o;
    bench_side *s = &b->side[a];
    epo_buffer_config bc = EPO_BUFFER_CONFIG_INIT;
    bc.experts = o->experts;
    bc.hidden = o->hidden;
    bc.top_k = o->top_k;
    bc.max_tokens = o->tokens;
    bc.type = o->type;
    epo_layer_config lc = EPO_LAYER_CONFIG_INIT;
    lc.experts = o->experts;
    lc.hidden = o->hidden;
    lc.ffn = o->ffn;
    lc.type = lc.wgrad_type = o->type;
    lc.w1 = b->w1;
    lc.w2 = b->w2;
    lc.dw1 = b->dw1;
    lc.dw2 = b->dw2;
    epo_status status = bench_passed(epo_buffer_create(s->group, &bc, &s->buffer));
    return status == EPO_OK ? bench_passed(epo_layer_create(s->group, &lc, &s->layer)) : status;
}

static epo_status trial(bench_rank *b, const bench_side *s) {
    const measure_pass p = {s->group, s->layer, s->plan, b->x, b->dy, b->y, b->dx, b->dweights};
    return measure_trial(&b->device, &p);
}

static epo_status make_plan(bench_rank *b, int a) {
    bench_side *s = &b->side[a];
    epo_routing r = EPO_ROUTING_INIT;
    r.tokens = b->o->tokens;
    r.top_k = b->o->top_k;
    r.experts = b->experts;
    r.weights = b->weights;
    const bool choosing = b->arm[a].overlap == EPO_ON && b->arm[a].chunks == 0;
    const int plans = choosing ? measure_device_trials(&b->device) : PLANS;
    epo_status status = EPO_OK;
    for (int i = 0; i < plans && status == EPO_OK; i++) {
        if (choosing && i > 0)
            status = trial(b, s);
        epo_plan_release(s->plan);
        s->plan = NULL;
        if (status == EPO_OK)
            status = measure_device_sync(&b->device);
        const double from = now_ms();
        if (status == EPO_OK)
            status = bench_passed(epo_plan_create(s->buffer, &r, b->device.stream, &s->plan));
        if (status == EPO_OK)
            status = measure_device_sync(&b->device);
        s->plan_ms = now_ms() - from;
    }
    return status;
}

/* The first arm's group tells what the others cannot know before: ranks, engine. */
static epo_status first_group(bench_rank *b) {
    epo_group_info info = {.size = sizeof info};
    epo_status status = measure_device_open(
        b->o->engine, b->world != NULL ? b->rank : measure_local_rank(), &b->device);
    if (status == EPO_OK)
        status = open_group(b, 0);
    if (status == EPO_OK)
        status = bench_passed(epo_group_query(b->side[0].group, &info));
    if (status != EPO_OK)
        return status;
    measure_device_settle(&b->device, info.engine);
    if (b->o->sms > 0 && !b->device.gpu)
        return epo_fail(EPO_E_ARG, "--sms: found %d, but the host engine has no SMs; leave it out",
                        b->o->sms);
    b->rank = info.rank;
    b->ranks = info.ranks;
    if (b->o->experts % b->ranks != 0)
        return epo_fail(EPO_E_ARG,
                        "--experts: found %d, allowed is a multiple of the %d ranks; give --ranks "
                        "or other --experts",
                        b->o->experts, b->ranks);
    b->local = b->o->experts / b->ranks;
    return EPO_OK;
}

epo_status bench_rank_open(bench_rank *b) {
    epo_status status = first_group(b);
    if (status == EPO_OK)
        status = make_memory(b);
    if (status == EPO_OK)
        status = measure_mark_create(&b->device, &b->start);
    if (status == EPO_OK)
        status = measure_mark_create(&b->device, &b->end);
    for (int a = 0; a < b->arms && status == EPO_OK; a++) {
        bench_progress(b, b->arm[a].name, a, b->arms);
        if (a > 0)
            status = open_group(b, a);
        if (status == EPO_OK)
            status = open_objects(b, a);
        if (status == EPO_OK)
            status = make_plan(b, a);
    }
    return status;
}

epo_status bench_rank_close(bench_rank *b) {
    epo_status first = EPO_OK;
    for (int a = 0; a < b->arms; a++) {
        bench_side *s = &b->side[a];
        epo_plan_release(s->plan);
        const epo_status all[] = {bench_passed(epo_layer_destroy(s->layer)),
                                  bench_passed(epo_buffer_destroy(s->buffer)),
                                  bench_passed(epo_group_destroy(s->group))};
        for (int i = 0; i < 3; i++)
            first = first != EPO_OK ? first : all[i];
    }
    void *memory[] = {b->w1, b->w2, b->dw1,     b->dw2,      b->x,      b->dy,
                      b->y,  b->dx, b->weights, b->dweights, b->experts};
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++)
        measure_device_free(&b->device, memory[i]);
    measure_mark_destroy(&b->device, &b->start);
    measure_mark_destroy(&b->device, &b->end);
    measure_device_close(&b->device);
    free(b->chosen);
    return first;
}
