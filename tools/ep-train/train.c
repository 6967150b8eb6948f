/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "train.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>

#include "core/status.h"
#include "measure/machine.h"
#include "need.h"
#include "output.h"

#define STEPS_KEPT 100000 /* of a longer run the last ones */

epo_status train_agree(moe_world *world, epo_status mine, train_voice *voice) {
    const int ranks = world->info.ranks;
    float *all = calloc((size_t)ranks, sizeof *all);
    epo_status status = mine;
    int who = -1;
    if (all == NULL) { /* cannot even ask: the others learn it by this rank's end */
        *voice = VOICE_EACH;
        return epo_fail(EPO_E_NOMEM, "no memory for %d numbers", ranks);
    }
    char text[EPO_ERROR_MAX];
    snprintf(text, sizeof text, "%s", epo_fail_text());
    epo_status sent = moe_world_gather(world, (float)mine, all);
    for (int r = ranks - 1; sent == EPO_OK && r >= 0; r--)
        if (all[r] != 0) {
            who = r;
            status = (epo_status)(int)all[r];
        }
    free(all);
    *voice = sent != EPO_OK ? VOICE_EACH : who == world->info.rank ? VOICE_ME : VOICE_OTHER;
    if (sent != EPO_OK)
        return sent;
    if (mine != EPO_OK)
        epo_fail(mine, "%s", text);
    return status;
}

/* ---- setting up ------------------------------------------------------- */

static void free_train(train *t) {
    model_destroy(t->model);
    data_free(&t->text);
    optim_destroy(t->dense);
    for (int i = 0; t->experts != NULL && i < 2 * t->opt->layers; i++)
        optim_destroy(t->experts[i]);
    free(t->experts);
    free(t->block);
    free(t->input);
    free(t->target);
    free(t->step_ms.value);
}

static epo_status open_blocks(train *t) {
    const options *o = t->opt;
    t->block = calloc((size_t)o->layers, sizeof *t->block);
    t->experts = calloc(2 * (size_t)o->layers, sizeof *t->experts);
    if (t->block == NULL || t->experts == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory for %d layers", o->layers);
    for (int l = 0; l < o->layers; l++) {
        epo_status status = moe_block_create(t->world, o->seed, (uint64_t)l + 1, &t->block[l]);
        if (status == EPO_OK)
            status =
                optim_create((optim_kind)o->optimizer, t->block[l]->count1, &t->experts[2 * l]);
        if (status == EPO_OK)
            status =
                optim_create((optim_kind)o->optimizer, t->block[l]->count2, &t->experts[2 * l + 1]);
        if (status != EPO_OK)
            return status;
    }
    return EPO_OK;
}

static model_shape shape_of(const options *o, int tokens) {
    return (model_shape){.hidden = o->hidden,
                         .layers = o->layers,
                         .experts = o->experts,
                         .top_k = o->top_k,
                         .seq = o->seq,
                         .max_tokens = tokens};
}

/* What can be known to fail before hours of training, and before memory is taken. */
static epo_status check_before(const options *o, int rank, int ranks, int max_tokens) {
    const model_shape shape = shape_of(o, max_tokens);
    size_t dense, bytes = model_bytes(&shape, &dense);
    if (o->optimizer == OPTIM_ADAMW)
        bytes += 2 * dense * sizeof(float);
    epo_status status = need_check(o, o->experts / ranks, ranks, (double)bytes, "/proc/meminfo");
    if (status == EPO_OK && rank == 0 && o->json != NULL)
        status = output_check(o->json);
    if (status == EPO_OK && rank == 0 && o->save_weights != NULL)
        status = output_check(o->save_weights);
    return status;
}

static epo_status open_model(train *t) {
    const options *o = t->opt;
    const size_t tokens = (size_t)t->count * (size_t)o->seq;
    const model_shape shape = shape_of(o, (int)tokens);
    t->input = malloc(tokens + 1);
    t->target = malloc(tokens + 1);
    t->step_ms.room = o->steps < STEPS_KEPT ? o->steps : STEPS_KEPT;
    t->step_ms.value = malloc((size_t)t->step_ms.room * sizeof(double));
    if (t->input == NULL || t->target == NULL || t->step_ms.value == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory for a batch of %zu tokens", tokens);
    epo_status status =
        model_create(&shape, t->block, t->world->dense, t->world->dense_at, o->seed, &t->model);
    if (status == EPO_OK)
        status = optim_create((optim_kind)o->optimizer, t->model->dense, &t->dense);
    return status;
}

epo_status train_open(const options *opt, train *out, train_voice *voice) {
    const moe_switches switches = {(epo_engine_kind)opt->engine, (epo_switch)opt->overlap,
                                   (epo_dispatcher)opt->dispatcher, (epo_switch)opt->delay_wgrad,
                                   opt->chunks};
    train t = {.opt = opt};
    *voice = VOICE_EACH;
    epo_status status = moe_world_open(&switches, &t.world);
    if (status != EPO_OK) {
        /* These two and a wrong argument are the same for all. */
        if (status == EPO_E_UNSUPPORTED || status == EPO_E_VERSION || status == EPO_E_ARG)
            *voice = VOICE_FIRST_RANK;
        return status;
    }
    const int rank = t.world->info.rank, ranks = t.world->info.ranks;
    const int max_tokens = (opt->batch + ranks - 1) / ranks * opt->seq;
    status = data_read(opt->file, opt->seq, opt->batch, &t.text);
    if (status == EPO_OK)
        status = check_before(opt, rank, ranks, max_tokens);
    status = train_agree(t.world, status, voice);
    if (status != EPO_OK)
        goto agreed;
    const moe_shape shape = {.experts = opt->experts,
                             .hidden = opt->hidden,
                             .ffn = opt->ffn,
                             .top_k = opt->top_k,
                             .max_tokens = max_tokens,
                             .type = (epo_dtype)opt->dtype};
    status = moe_world_fit(t.world, &shape);
    if (status == EPO_E_ARG || status == EPO_E_UNSUPPORTED) { /* of the same options */
        *voice = VOICE_FIRST_RANK;
        goto agreed;
    }
    data_slice(opt->batch, rank, ranks, &t.first, &t.count);
    *voice = VOICE_EACH;
    if (status == EPO_OK)
        status = open_blocks(&t);
    if (status == EPO_OK)
        status = open_model(&t);
    if (status == EPO_OK)
        status = measure_cores(t.world->group, &t.world->device, &t.cores);
    if (status == EPO_OK)
        *out = t;
    else
        out->world = t.world; /* for the message: the run is abandoned */
    return status;
agreed:
    free_train(&t);
    moe_world_close(t.world); /* keeps the text: it overwrites it only by failing */
    return status;
}

epo_status train_close(train *t) {
    epo_status status = EPO_OK, first = EPO_OK;
    for (int l = 0; l < t->opt->layers; l++) {
        status = moe_block_destroy(t->block[l]);
        first = first != EPO_OK ? first : status;
    }
    status = moe_world_close(t->world);
    free_train(t);
    return first != EPO_OK ? first : status;
}

/* ---- one step --------------------------------------------------------- */

static epo_status micro_batch(train *t, uint64_t number, double share, double *loss) {
    const options *o = t->opt;
    const int tokens = t->count * o->seq;
    data_batch(&t->text, o->seed, number, o->batch, t->first, t->count, o->seq, t->input,
               t->target);
    epo_status status = model_forward(t->model, t->input, t->target, tokens, share, loss);
    return status != EPO_OK ? status : model_backward(t->model, tokens);
}

static double square_sum(const float *g, size_t count) {
    double sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += (double)g[i] * (double)g[i];
    return sum;
}

/* The dense gradients of all ranks together, the mean loss and the gradient's
 * length; equal on every rank, because every sum runs in rank order.  The experts'
 * gradients are complete already: their tokens came from all ranks. */
static epo_status reduce(train *t, double loss, double share, double *mean, double *length) {
    const int ranks = t->world->info.ranks, rank = t->world->info.rank;
    double experts = 0;
    float *all = calloc(2 * (size_t)ranks, sizeof *all);
    if (all == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory for %d numbers", 2 * ranks);
    for (int l = 0; l < t->opt->layers; l++)
        experts += square_sum(t->block[l]->dw1, t->block[l]->count1) +
                   square_sum(t->block[l]->dw2, t->block[l]->count2);
    all[2 * rank] = (float)(loss * share);
    all[2 * rank + 1] = (float)experts;
    epo_status status = moe_world_sum(t->world, all, 2 * (size_t)ranks);
    if (status == EPO_OK)
        status = moe_world_sum(t->world, t->model->g, t->model->dense);
    if (status == EPO_OK) {
        double square = square_sum(t->model->g, t->model->dense);
        *mean = 0;
        for (int r = 0; r < ranks; r++) {
            *mean += (double)all[2 * r];
            square += (double)all[2 * r + 1];
        }
        *length = sqrt(square);
    }
    free(all);
    return status;
}

static epo_status update(train *t) {
    const options *o = t->opt;
    optim_step(t->dense, t->model->w, t->model->g, o->lr, t->step);
    epo_status status = model_store(t->model);
    for (int l = 0; l < o->layers && status == EPO_OK; l++) {
        moe_block *b = t->block[l];
        optim_step(t->experts[2 * l], b->w1, b->dw1, o->lr, t->step);
        optim_step(t->experts[2 * l + 1], b->w2, b->dw2, o->lr, t->step);
        status = moe_block_store(b);
    }
    return status;
}

static epo_status clear_gradients(train *t) {
    epo_status status = model_clear(t->model);
    for (int l = 0; l < t->opt->layers && status == EPO_OK; l++)
        status = moe_block_clear(t->block[l]);
    return status;
}

/* All gradients, complete and where the optimizer reads them. */
static epo_status finish_gradients(train *t) {
    epo_status status = moe_world_flush(t->world);
    if (status == EPO_OK)
        status = model_fetch(t->model);
    for (int l = 0; l < t->opt->layers && status == EPO_OK; l++)
        status = moe_block_fetch(t->block[l]);
    return status;
}

/* As Megatron-LM prints it, so that its readers read it: a loss that is no number
 * is left out and counted. */
static void iteration_line(train *t, FILE *log, double ms, double loss, double length) {
    const options *o = t->opt;
    struct timeval now;
    struct tm local;
    char stamp[32] = "", loss_field[48] = "";
    gettimeofday(&now, NULL);
    if (localtime_r(&now.tv_sec, &local) != NULL)
        strftime(stamp, sizeof stamp, "%Y-%m-%d %H:%M:%S", &local);
    if (!isnan(loss))
        snprintf(loss_field, sizeof loss_field, " lm loss: %.6E |", loss);
    fprintf(log,
            " [%s.%06ld] iteration %8d/%8d | consumed samples: %12lld | elapsed time per "
            "iteration (ms): %.1f | learning rate: %.6E | global batch size: %5d |%s grad norm: "
            "%.3f | number of skipped iterations: %3d | number of nan iterations: %3d |\n",
            stamp, (long)now.tv_usec, t->step, o->steps,
            (long long)t->step * o->batch * o->micro_batches, ms, o->lr,
            o->batch * o->micro_batches, loss_field, length, t->line_skipped, t->line_nans);
    fflush(log);
    t->line_skipped = t->line_nans = 0;
}

static epo_status one_step(train *t, FILE *log) {
    const options *o = t->opt;
    const double start = now_ms(), share = 1.0 / ((double)o->micro_batches * o->batch * o->seq);
    double loss = 0, mean = 0, length = 0;
    epo_status status = clear_gradients(t);
    for (int i = 0; i < o->micro_batches && status == EPO_OK; i++) {
        double part = 0;
        uint64_t number = (uint64_t)(t->step - 1) * (uint64_t)o->micro_batches + (uint64_t)i;
        status = micro_batch(t, number, share, &part);
        loss += part;
    }
    if (status == EPO_OK)
        status = finish_gradients(t);
    if (status == EPO_OK)
        status = reduce(t, loss, share, &mean, &length);
    if (status != EPO_OK)
        return status;
    const int nan = isnan(mean), usable = isfinite(length) && isfinite(mean);
    t->nans += nan;
    t->line_nans += nan;
    t->skipped += !usable;
    t->line_skipped += !usable;
    if (usable && (status = update(t)) != EPO_OK)
        return status;
    t->first_loss = t->step == 1 ? mean : t->first_loss;
    t->last_loss = mean;
    double ms = now_ms() - start;
    if (t->step > o->steps / 10)
        samples_put(&t->step_ms, ms);
    if (t->world->info.rank == t->world->info.ranks - 1 &&
        (t->step % o->log_interval == 0 || t->step == o->steps))
        iteration_line(t, log, ms, mean, length);
    return EPO_OK;
}

epo_status train_run(train *t, FILE *log) {
    for (t->step = 1; t->step <= t->opt->steps; t->step++) {
        epo_status status = one_step(t, log);
        if (status != EPO_OK)
            return status;
    }
    return EPO_OK;
}

epo_status train_prime(train *t) {
    const options *o = t->opt;
    double loss;
    data_batch(&t->text, o->seed, 0, o->batch, t->first, t->count, o->seq, t->input, t->target);
    return model_forward(t->model, t->input, t->target, t->count * o->seq, 1, &loss);
}
