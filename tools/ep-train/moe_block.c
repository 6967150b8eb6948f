/* SPDX-License-Identifier: Apache-2.0
 *
 * moe_block.c - how a program uses libep_overlap.
 *
 *   once          epo_group_create      the ranks of the job
 *                 epo_buffer_create     windows for one shape
 *                 epo_layer_create      one per layer: weights and gradients are ours
 *   micro-batch   epo_plan_create       from the router's choice
 *                 epo_forward           tokens to experts and back
 *                 epo_backward          gradients of rows, weights, router
 *   step          epo_group_wgrad_flush then the optimizer may read dw1 and dw2
 *   end           layers, buffer, group
 *
 * Every call of the library can fail; its line (epo_error) is passed on as it is.
 */
#include "moe_block.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "core/status.h"
#include "measure/gather.h"
#include "measure/narrow.h"
#include "measure/rng.h"
#include "measure/trial.h"

/* The library's error line becomes this program's. */
static epo_status passed(epo_status status) {
    return status == EPO_OK ? EPO_OK : epo_fail(status, "%s", epo_error());
}

/* ---- the ranks -------------------------------------------------------- */

epo_status moe_world_open(const moe_switches *switches, moe_world **out) {
    epo_group_config config = EPO_GROUP_CONFIG_INIT;
    moe_world *world = calloc(1, sizeof *world);
    if (world == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory for the group");
    epo_engine_kind engine = switches->engine;
    world->why = measure_engine(&engine);
    config.engine = engine;
    config.overlap = switches->overlap;
    config.dispatcher = switches->dispatcher;
    config.delay_wgrad = switches->delay_wgrad;
    config.chunks = switches->chunks;
    world->info.size = sizeof world->info;
    /* The group takes the GPU that is current: each rank of a node another one. */
    epo_status status = measure_device_open(engine, measure_local_rank(), &world->device);
    if (status == EPO_OK)
        status = passed(epo_group_create(&config, &world->group));
    if (status == EPO_OK)
        status = passed(epo_group_query(world->group, &world->info));
    if (status != EPO_OK) {
        measure_device_close(&world->device);
        free(world);
        return status;
    }
    measure_device_settle(&world->device, world->info.engine);
    world->dense = world->device.gpu ? dense_gpu() : NULL;
    world->dense_at = world->dense != NULL ? world->device.stream : NULL;
    if (world->dense == NULL)
        world->dense = &dense_host;
    *out = world;
    return EPO_OK;
}

/* The options' limits keep the products within 64 bits. */
static epo_status open_staging(moe_world *world) {
    const moe_shape *s = &world->shape;
    measure_device *d = &world->device;
    moe_staging *at = &world->staging;
    const bool half = s->type != EPO_F32;
    const size_t rows = (size_t)s->max_tokens * (size_t)s->hidden * epo_dtype_size(s->type);
    const size_t slots = (size_t)s->max_tokens * (size_t)s->top_k;
    const size_t weights = 2 * (size_t)world->local_experts * (size_t)s->ffn * (size_t)s->hidden;
    const size_t packed = rows > 2 * weights ? rows : 2 * weights;
    epo_status status = EPO_OK;
    if (half && (at->pack = malloc(packed + 1)) == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory for %zu MB of bf16 rows", packed >> 20);
    if (half || d->gpu)
        status = measure_device_alloc(d, rows, &at->in);
    if (status == EPO_OK && (half || d->gpu))
        status = measure_device_alloc(d, rows, &at->out);
    if (status == EPO_OK && d->gpu)
        status = measure_device_alloc(d, slots * sizeof(int64_t), (void **)&at->chosen);
    if (status == EPO_OK && d->gpu)
        status = measure_device_alloc(d, slots * sizeof(float), (void **)&at->weights);
    if (status == EPO_OK && d->gpu)
        status = measure_device_alloc(d, slots * sizeof(float), (void **)&at->dweights);
    return status;
}

static void close_staging(moe_world *world) {
    moe_staging *at = &world->staging;
    void *memory[] = {at->in, at->out, at->chosen, at->weights, at->dweights};
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++)
        measure_device_free(&world->device, memory[i]);
    free(at->pack);
}

epo_status moe_world_fit(moe_world *world, const moe_shape *shape) {
    epo_buffer_config config = EPO_BUFFER_CONFIG_INIT;
    config.experts = shape->experts;
    config.hidden = shape->hidden;
    config.top_k = shape->top_k;
    config.max_tokens = shape->max_tokens;
    config.type = shape->type;
    epo_status status = passed(epo_buffer_create(world->group, &config, &world->buffer));
    if (status != EPO_OK)
        return status;
    world->shape = *shape;
    world->local_experts = shape->experts / world->info.ranks;
    return open_staging(world);
}

epo_status moe_world_close(moe_world *world) {
    if (world == NULL)
        return EPO_OK;
    epo_status status = passed(epo_buffer_destroy(world->buffer));
    epo_status also = passed(epo_group_destroy(world->group));
    close_staging(world);
    measure_device_close(&world->device);
    free(world);
    return status != EPO_OK ? status : also;
}

epo_status moe_world_sum(moe_world *world, float *data, size_t count) {
    return measure_sum(world->group, &world->device, data, count);
}

epo_status moe_world_gather(moe_world *world, float mine, float *all) {
    memset(all, 0, sizeof *all * (size_t)world->info.ranks);
    all[world->info.rank] = mine;
    return moe_world_sum(world, all, (size_t)world->info.ranks);
}

epo_status moe_world_barrier(moe_world *world) { return passed(epo_group_barrier(world->group)); }

epo_status moe_world_flush(moe_world *world) {
    return passed(epo_group_wgrad_flush(world->group, world->device.stream));
}

epo_status moe_world_sync(moe_world *world) {
    epo_status status = measure_device_sync(&world->device);
    return status == EPO_OK ? passed(epo_group_async_error(world->group)) : status;
}

epo_status moe_world_stats(moe_world *world, epo_stats *stats, int reset) {
    *stats = (epo_stats){.size = sizeof *stats};
    return passed(epo_group_stats(world->group, stats, reset));
}

epo_status moe_world_record(moe_world *world, uint64_t capacity) {
    return passed(epo_record_start(world->group, capacity));
}

epo_status moe_world_recorded(moe_world *world, const epo_interval **intervals, uint64_t *count,
                              uint64_t *dropped) {
    return passed(epo_record_stop(world->group, intervals, count, dropped));
}

/* ---- where the engine has it ------------------------------------------ */

/* `count` numbers of this program to `to`, which the engine reads as `type`. */
static epo_status give(moe_world *world, void *to, const float *from, size_t count) {
    if (world->shape.type == EPO_F32)
        return measure_device_put(&world->device, to, from, count * sizeof *from);
    narrow(world->staging.pack, from, count, world->shape.type);
    return measure_device_put(&world->device, to, world->staging.pack, count * 2);
}

static epo_status take_back(moe_world *world, float *to, const void *from, size_t count) {
    if (world->shape.type == EPO_F32)
        return measure_device_get(&world->device, to, from, count * sizeof *to);
    epo_status status = measure_device_get(&world->device, world->staging.pack, from, count * 2);
    if (status == EPO_OK)
        widen_bf16(to, world->staging.pack, count);
    return status;
}

static epo_status dense_wrong(const moe_world *world) {
    const char *wrong = world->dense->wrong(world->dense_at);
    return wrong == NULL ? EPO_OK : epo_fail(EPO_E_SYSTEM, "rows of the dense parts: %s", wrong);
}

/* The same for rows, which may lie on the GPU. */
static epo_status give_rows(moe_world *world, void *to, const float *from, size_t count) {
    if (world->dense_at == NULL)
        return give(world, to, from, count);
    if (world->shape.type == EPO_F32)
        world->dense->copy(world->dense_at, to, from, count);
    else
        world->dense->narrow(world->dense_at, to, from, count, world->shape.type);
    return dense_wrong(world);
}

static epo_status take_rows(moe_world *world, float *to, const void *from, size_t count) {
    if (world->dense_at == NULL)
        return take_back(world, to, from, count);
    if (world->shape.type == EPO_F32)
        world->dense->copy(world->dense_at, to, from, count);
    else
        world->dense->widen(world->dense_at, to, from, count);
    return dense_wrong(world);
}

epo_status moe_block_store(moe_block *block) {
    epo_status status = EPO_OK;
    if (block->store1 != block->w1)
        status = give(block->world, block->store1, block->w1, block->count1);
    if (status == EPO_OK && block->store2 != block->w2)
        status = give(block->world, block->store2, block->w2, block->count2);
    return status;
}

epo_status moe_block_clear(moe_block *block) {
    measure_device *d = &block->world->device;
    epo_status status = measure_device_zero(d, block->grad1, block->count1 * sizeof(float));
    return status == EPO_OK ? measure_device_zero(d, block->grad2, block->count2 * sizeof(float))
                            : status;
}

epo_status moe_block_fetch(moe_block *block) {
    measure_device *d = &block->world->device;
    epo_status status = EPO_OK;
    if (block->grad1 != block->dw1)
        status = measure_device_get(d, block->dw1, block->grad1, block->count1 * sizeof(float));
    if (status == EPO_OK && block->grad2 != block->dw2)
        status = measure_device_get(d, block->dw2, block->grad2, block->count2 * sizeof(float));
    return status;
}

/* ---- one layer -------------------------------------------------------- */

static void free_block(moe_block *block) {
    measure_device *d = &block->world->device;
    if (!block->shared) {
        if (block->store1 != block->w1) {
            measure_device_free(d, block->store1);
            measure_device_free(d, block->store2);
        }
        free(block->w1);
        free(block->w2);
    }
    if (block->grad1 != block->dw1) {
        measure_device_free(d, block->grad1);
        measure_device_free(d, block->grad2);
    }
    free(block->dw1);
    free(block->dw2);
    free(block);
}

/* What the engine needs elsewhere than the program has it. */
static epo_status allocate_copies(moe_block *b, bool lent) {
    measure_device *d = &b->world->device;
    const size_t size = epo_dtype_size(b->world->shape.type);
    epo_status status = EPO_OK;
    if (!lent && (d->gpu || b->world->shape.type != EPO_F32)) {
        b->store1 = b->store2 = NULL;
        status = measure_device_alloc(d, b->count1 * size, &b->store1);
        if (status == EPO_OK)
            status = measure_device_alloc(d, b->count2 * size, &b->store2);
    }
    if (status == EPO_OK && d->gpu) {
        b->grad1 = b->grad2 = NULL;
        status = measure_device_alloc(d, b->count1 * sizeof(float), (void **)&b->grad1);
        if (status == EPO_OK)
            status = measure_device_alloc(d, b->count2 * sizeof(float), (void **)&b->grad2);
    }
    return status;
}

/* The arrays of a block: its gradients, its weights unless `of` lends them.  The
 * options' limits keep the products within 64 bits. */
static epo_status allocate(moe_world *world, const moe_block *of, moe_block **out) {
    const moe_shape *s = &world->shape;
    moe_block *b = calloc(1, sizeof *b);
    if (b == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory for a layer");
    b->world = world;
    b->count2 = (size_t)world->local_experts * (size_t)s->ffn * (size_t)s->hidden;
    b->count1 = 2 * b->count2;
    b->shared = of != NULL;
    b->w1 = of != NULL ? of->w1 : calloc(b->count1, sizeof(float));
    b->w2 = of != NULL ? of->w2 : calloc(b->count2, sizeof(float));
    b->store1 = of != NULL ? of->store1 : (void *)b->w1;
    b->store2 = of != NULL ? of->store2 : (void *)b->w2;
    b->dw1 = b->grad1 = calloc(b->count1, sizeof(float));
    b->dw2 = b->grad2 = calloc(b->count2, sizeof(float));
    if (b->w1 == NULL || b->w2 == NULL || b->dw1 == NULL || b->dw2 == NULL) {
        size_t bytes = 2 * (b->count1 + b->count2) * sizeof(float);
        free_block(b);
        return epo_fail(EPO_E_NOMEM,
                        "no memory for a layer: its %d experts need %zu MB on each rank; lower "
                        "--hidden, --ffn or --experts",
                        world->local_experts, bytes >> 20);
    }
    epo_status status = allocate_copies(b, of != NULL);
    if (status != EPO_OK) {
        free_block(b);
        return status;
    }
    *out = b;
    return EPO_OK;
}

static epo_status open_layer(moe_block *block) {
    const moe_shape *s = &block->world->shape;
    epo_layer_config config = EPO_LAYER_CONFIG_INIT;
    config.experts = s->experts;
    config.hidden = s->hidden;
    config.ffn = s->ffn;
    config.type = s->type;
    config.wgrad_type = EPO_F32; /* summed over micro-batches without rounding */
    config.w1 = block->store1;
    config.w2 = block->store2;
    config.dw1 = block->grad1;
    config.dw2 = block->grad2;
    return passed(epo_layer_create(block->world->group, &config, &block->layer));
}

epo_status moe_block_create(moe_world *world, uint64_t seed, uint64_t stream, moe_block **out) {
    moe_block *block;
    epo_status status = allocate(world, NULL, &block);
    if (status != EPO_OK)
        return status;
    /* Numbered over all experts, so that the number of ranks changes nothing. */
    const uint64_t first = (uint64_t)(world->info.rank);
    const double width1 = sqrt(3.0 / world->shape.hidden), width2 = sqrt(3.0 / world->shape.ffn);
    for (size_t i = 0; i < block->count1; i++)
        block->w1[i] = (float)(width1 * rng_symmetric(seed, 2 * stream, first * block->count1 + i));
    for (size_t i = 0; i < block->count2; i++)
        block->w2[i] =
            (float)(width2 * rng_symmetric(seed, 2 * stream + 1, first * block->count2 + i));
    status = moe_block_store(block);
    if (status == EPO_OK)
        status = open_layer(block);
    if (status != EPO_OK) {
        free_block(block);
        return status;
    }
    *out = block;
    return EPO_OK;
}

epo_status moe_block_share(moe_world *world, const moe_block *of, moe_block **out) {
    moe_block *block;
    epo_status status = allocate(world, of, &block);
    if (status == EPO_OK && (status = open_layer(block)) != EPO_OK)
        free_block(block);
    if (status == EPO_OK)
        *out = block;
    return status;
}

epo_status moe_block_destroy(moe_block *block) {
    if (block == NULL)
        return EPO_OK;
    epo_saved_release(block->saved);
    epo_plan_release(block->plan);
    epo_status status = passed(epo_layer_destroy(block->layer));
    free_block(block);
    return status;
}

epo_status moe_block_route(moe_block *block, int tokens, const int64_t *chosen,
                           const real *weights) {
    moe_world *world = block->world;
    moe_staging *at = &world->staging;
    epo_routing routing = EPO_ROUTING_INIT;
    const size_t slots = (size_t)tokens * (size_t)world->shape.top_k;
    epo_status status = EPO_OK;
    routing.tokens = tokens;
    routing.top_k = world->shape.top_k;
    routing.experts = chosen;
    routing.weights = weights;
    if (at->chosen != NULL) {
        status = measure_device_put(&world->device, at->chosen, chosen, slots * sizeof *chosen);
        if (status == EPO_OK)
            status =
                measure_device_put(&world->device, at->weights, weights, slots * sizeof *weights);
        routing.experts = at->chosen;
        routing.weights = at->weights;
    }
    epo_plan_release(block->plan);
    block->plan = NULL;
    block->tokens = tokens;
    if (status == EPO_OK)
        status =
            passed(epo_plan_create(world->buffer, &routing, world->device.stream, &block->plan));
    return status;
}

epo_status moe_block_rows(const moe_block *block, uint64_t *rows) {
    const int local = block->world->local_experts;
    uint64_t *count = calloc((size_t)local, sizeof *count), sum = 0;
    if (count == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory for %d counts", local);
    epo_status status = passed(epo_plan_experts(block->plan, NULL, count));
    for (int e = 0; e < local; e++)
        sum += count[e];
    free(count);
    if (status == EPO_OK)
        *rows = sum;
    return status;
}

epo_status moe_block_time_forward(moe_block *block, const real *x, real *y) {
    moe_staging *at = &block->world->staging;
    const void *in = at->in != NULL ? at->in : (const void *)x;
    void *out = at->out != NULL ? at->out : (void *)y;
    epo_saved_release(block->saved); /* a forward without backward */
    block->saved = NULL;
    return passed(epo_forward(block->layer, block->plan, in, out, &block->saved,
                              block->world->device.stream));
}

epo_status moe_block_time_backward(moe_block *block, const real *dy, real *dx, real *dweights) {
    moe_staging *at = &block->world->staging;
    epo_saved *saved = block->saved;
    const void *in = at->in != NULL ? at->in : (const void *)dy;
    void *out = at->out != NULL ? at->out : (void *)dx;
    block->saved = NULL; /* taken over whatever the status */
    return passed(epo_backward(block->layer, saved, in, out,
                               at->dweights != NULL ? at->dweights : dweights,
                               block->world->device.stream));
}

epo_status moe_block_trial(moe_block *block, const real *rows, real *out, real *dweights) {
    moe_world *world = block->world;
    moe_staging *at = &world->staging;
    const void *in = at->in != NULL ? at->in : (const void *)rows;
    void *to = at->out != NULL ? at->out : (void *)out;
    const measure_pass pass = {
        world->group, block->layer, block->plan, in,
        in,           to,           to,          at->dweights != NULL ? at->dweights : dweights,
    };
    return measure_trial(&world->device, &pass);
}

epo_status moe_block_forward(moe_block *block, const real *x, real *y) {
    moe_world *world = block->world;
    const size_t count = (size_t)block->tokens * (size_t)world->shape.hidden;
    epo_status status = EPO_OK;
    if (world->staging.in != NULL)
        status = give_rows(world, world->staging.in, x, count);
    if (status == EPO_OK)
        status = moe_block_time_forward(block, x, y);
    if (status == EPO_OK && world->staging.out != NULL)
        status = take_rows(world, y, world->staging.out, count);
    return status;
}

epo_status moe_block_backward(moe_block *block, const real *dy, real *dx, real *dweights) {
    moe_world *world = block->world;
    const size_t count = (size_t)block->tokens * (size_t)world->shape.hidden;
    const size_t slots = (size_t)block->tokens * (size_t)world->shape.top_k;
    epo_status status = EPO_OK;
    if (world->staging.in != NULL)
        status = give_rows(world, world->staging.in, dy, count);
    if (status == EPO_OK)
        status = moe_block_time_backward(block, dy, dx, dweights);
    if (status == EPO_OK && world->staging.out != NULL)
        status = take_rows(world, dx, world->staging.out, count);
    if (status == EPO_OK && world->staging.dweights != NULL)
        status = measure_device_get(&world->device, dweights, world->staging.dweights,
                                    slots * sizeof *dweights);
    return status;
}
