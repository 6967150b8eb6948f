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
#include "rng.h"

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
    /* This program's rows lie in ordinary memory. */
    config.engine = EPO_ENGINE_HOST;
    config.overlap = switches->overlap;
    config.dispatcher = switches->dispatcher;
    config.delay_wgrad = switches->delay_wgrad;
    config.chunks = switches->chunks;
    world->info.size = sizeof world->info;
    epo_status status = passed(epo_group_create(&config, &world->group));
    if (status == EPO_OK)
        status = passed(epo_group_query(world->group, &world->info));
    if (status != EPO_OK) {
        free(world);
        return status;
    }
    *out = world;
    return EPO_OK;
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
    return EPO_OK;
}

epo_status moe_world_close(moe_world *world) {
    if (world == NULL)
        return EPO_OK;
    epo_status status = passed(epo_buffer_destroy(world->buffer));
    epo_status also = passed(epo_group_destroy(world->group));
    free(world);
    return status != EPO_OK ? status : also;
}

epo_status moe_world_sum(moe_world *world, float *data, size_t count) {
    return passed(epo_group_allreduce(world->group, data, count, NULL));
}

epo_status moe_world_gather(moe_world *world, float mine, float *all) {
    memset(all, 0, sizeof *all * (size_t)world->info.ranks);
    all[world->info.rank] = mine;
    return moe_world_sum(world, all, (size_t)world->info.ranks);
}

epo_status moe_world_barrier(moe_world *world) { return passed(epo_group_barrier(world->group)); }

epo_status moe_world_flush(moe_world *world) {
    return passed(epo_group_wgrad_flush(world->group, NULL));
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

/* ---- bf16 storage ----------------------------------------------------- */

/* Round to nearest, ties to even; NaN stays NaN. */
static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

static void narrow(void *to, const float *from, size_t count) {
    uint16_t *out = to;
    for (size_t i = 0; i < count; i++)
        out[i] = to_bf16(from[i]);
}

static void widen(float *to, const void *from, size_t count) {
    const uint16_t *in = from;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)in[i] << 16;
        memcpy(&to[i], &bits, sizeof bits);
    }
}

void moe_block_store(moe_block *block) {
    if (block->world->shape.type == EPO_BF16) {
        narrow(block->store1, block->w1, block->count1);
        narrow(block->store2, block->w2, block->count2);
    }
}

/* ---- one layer -------------------------------------------------------- */

static void free_block(moe_block *block) {
    if (!block->shared) {
        if (block->store1 != block->w1) {
            free(block->store1);
            free(block->store2);
        }
        free(block->w1);
        free(block->w2);
    }
    free(block->dw1);
    free(block->dw2);
    free(block->rows_in);
    free(block->rows_out);
    free(block);
}

/* The arrays of a block: its gradients and row copies, its weights unless `of`
 * lends them.  The options' limits keep the products within 64 bits. */
static epo_status allocate(moe_world *world, const moe_block *of, moe_block **out) {
    const moe_shape *s = &world->shape;
    const bool half = s->type == EPO_BF16;
    const size_t rows = (size_t)s->max_tokens * (size_t)s->hidden * 2 + 1;
    moe_block *b = calloc(1, sizeof *b);
    if (b == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory for a layer");
    b->world = world;
    b->count2 = (size_t)world->local_experts * (size_t)s->ffn * (size_t)s->hidden;
    b->count1 = 2 * b->count2;
    b->shared = of != NULL;
    b->w1 = of != NULL ? of->w1 : calloc(b->count1, sizeof(float));
    b->w2 = of != NULL ? of->w2 : calloc(b->count2, sizeof(float));
    b->store1 = of != NULL ? of->store1 : half ? calloc(b->count1, 2) : (void *)b->w1;
    b->store2 = of != NULL ? of->store2 : half ? calloc(b->count2, 2) : (void *)b->w2;
    b->dw1 = calloc(b->count1, sizeof(float));
    b->dw2 = calloc(b->count2, sizeof(float));
    b->rows_in = half ? malloc(rows) : NULL;
    b->rows_out = half ? malloc(rows) : NULL;
    if (b->w1 == NULL || b->w2 == NULL || b->store1 == NULL || b->store2 == NULL ||
        b->dw1 == NULL || b->dw2 == NULL || (half && (b->rows_in == NULL || b->rows_out == NULL))) {
        size_t bytes = 2 * (b->count1 + b->count2) * sizeof(float);
        free_block(b);
        return epo_fail(EPO_E_NOMEM,
                        "no memory for a layer: its %d experts need %zu MB on each rank; lower "
                        "--hidden, --ffn or --experts",
                        world->local_experts, bytes >> 20);
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
    config.dw1 = block->dw1;
    config.dw2 = block->dw2;
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
    moe_block_store(block);
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
    epo_routing routing = EPO_ROUTING_INIT;
    routing.tokens = tokens;
    routing.top_k = block->world->shape.top_k;
    routing.experts = chosen;
    routing.weights = weights;
    epo_plan_release(block->plan);
    block->plan = NULL;
    block->tokens = tokens;
    return passed(epo_plan_create(block->world->buffer, &routing, NULL, &block->plan));
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

epo_status moe_block_forward(moe_block *block, const real *x, real *y) {
    const size_t count = (size_t)block->tokens * (size_t)block->world->shape.hidden;
    const void *in = x;
    void *out = y;
    if (block->rows_in != NULL) {
        narrow(block->rows_in, x, count);
        in = block->rows_in;
        out = block->rows_out;
    }
    epo_saved_release(block->saved); /* a forward without backward */
    block->saved = NULL;
    epo_status status =
        passed(epo_forward(block->layer, block->plan, in, out, &block->saved, NULL));
    if (status == EPO_OK && block->rows_out != NULL)
        widen(y, block->rows_out, count);
    return status;
}

epo_status moe_block_backward(moe_block *block, const real *dy, real *dx, real *dweights) {
    const size_t count = (size_t)block->tokens * (size_t)block->world->shape.hidden;
    epo_saved *saved = block->saved;
    const void *in = dy;
    void *out = dx;
    if (block->rows_in != NULL) {
        narrow(block->rows_in, dy, count);
        in = block->rows_in;
        out = block->rows_out;
    }
    block->saved = NULL; /* taken over whatever the status */
    epo_status status = passed(epo_backward(block->layer, saved, in, out, dweights, NULL));
    if (status == EPO_OK && block->rows_out != NULL)
        widen(dx, block->rows_out, count);
    return status;
}
