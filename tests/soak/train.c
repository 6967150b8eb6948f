/* SPDX-License-Identifier: Apache-2.0
 *
 * train.c - many training steps of one group, each with a new random routing, each against
 * the fp64 reference; then whether memory and descriptors are what they were.
 *
 *   train [STEPS [10000 [SEED]]]
 *
 * Four ranks as threads, overlapped, weight gradients delayed; dispatchers, styles of routing
 * and tokens change from step to step.  The weights learn: w -= rate * dw, so that an error
 * would stay.
 */
#include "config.h"

#include "../unit/moe_ranks.h"

#include <dirent.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 4, EXPERTS = 16, HIDDEN = 24, FFN = 16, TOP_K = 3, TOKENS = 24, BATCHES = 2 };
enum { STACK = EXPERTS * FFN * HIDDEN };
static const float rate = 1e-3F;
static const double bound = 1e-5;

typedef struct figures {
    long rss_kb;
    int descriptors;
    uint64_t engine_peak; /* all ranks' largest, added: idle blocks come and go below it */
} figures;

typedef struct soak {
    uint64_t steps, seed, step, tokens;
    pthread_barrier_t all;
    moe_case c;
    moe_how how;
    moe_result out;
    float *w1, *w2, *dw1, *dw2;
    double worst;
    bool bad;
    _Atomic uint64_t engine_peak;
    figures early, late;
} soak;

static figures figures_now(soak *s) {
    figures f = {0, 0, s->engine_peak};
    char line[128];
    FILE *status = fopen("/proc/self/status", "re");
    while (status != NULL && fgets(line, sizeof line, status) != NULL)
        if (strncmp(line, "VmRSS:", 6) == 0)
            f.rss_kb = strtol(line + 6, NULL, 10);
    if (status != NULL)
        fclose(status);
    DIR *d = opendir("/proc/self/fd");
    while (d != NULL && readdir(d) != NULL)
        f.descriptors++;
    if (d != NULL)
        closedir(d);
    return f;
}

/* ---- one step, by rank 0 for all ---- */

static float *nan_array(size_t count) {
    float *p = moe_calloc(count, sizeof *p);
    memset(p, 0xff, count * sizeof *p);
    return p;
}

static void step_open(soak *s) {
    s->c = (moe_case){.seed = s->seed + s->step,
                      .ranks = RANKS,
                      .experts = EXPERTS,
                      .hidden = HIDDEN,
                      .ffn = FFN,
                      .top_k = 1 + (int)(s->step % TOP_K),
                      .batches = BATCHES,
                      .max_tokens = TOKENS,
                      .type = EPO_F32,
                      .style = (case_style)(s->step / 7 % CASE_STYLES)};
    moe_case_fill(&s->c);
    memcpy(s->c.w1, s->w1, 2 * STACK * sizeof *s->w1);
    memcpy(s->c.w2, s->w2, STACK * sizeof *s->w2);
    memset(s->c.dw1, 0, 2 * STACK * sizeof *s->w1);
    memset(s->c.dw2, 0, STACK * sizeof *s->w2);
    memset(s->dw1, 0, 2 * STACK * sizeof *s->w1);
    memset(s->dw2, 0, STACK * sizeof *s->w2);
    memset(&s->out, 0, sizeof s->out);
    for (int b = 0; b < BATCHES; b++)
        for (int r = 0; r < RANKS; r++) {
            size_t tokens = (size_t)s->c.batch[b][r].tokens;
            s->tokens += tokens;
            s->out.y[b][r] = nan_array(tokens * HIDDEN);
            s->out.dx[b][r] = nan_array(tokens * HIDDEN);
            s->out.dweights[b][r] = nan_array(tokens * (size_t)s->c.top_k);
        }
    s->out.dw1 = moe_calloc(2 * STACK, sizeof(float));
    s->out.dw2 = moe_calloc(STACK, sizeof(float));
}

static void step_close(soak *s) {
    moe_answer answer;
    memcpy(s->out.dw1, s->dw1, 2 * STACK * sizeof(float));
    memcpy(s->out.dw2, s->dw2, STACK * sizeof(float));
    moe_reference(&s->c, &answer);
    double error = moe_error(&s->c, &s->how, &s->out, &answer, true);
    if (!(error <= bound)) {
        s->bad = true;
        fprintf(stderr, "step %llu: error %g\n", (unsigned long long)s->step, error);
        moe_case_print(&s->c);
    }
    s->worst = error > s->worst ? error : s->worst;
    for (int i = 0; i < 2 * STACK; i++)
        s->w1[i] -= rate * s->dw1[i];
    for (int i = 0; i < STACK; i++)
        s->w2[i] -= rate * s->dw2[i];
    moe_answer_free(&answer);
    moe_result_free(&s->out);
    moe_case_free(&s->c);
}

/* ---- a rank ---- */

static epo_layer *open_layer(moe_rank *c, epo_group *group) {
    soak *s = c->arg;
    const size_t part = STACK / RANKS, at = part * (size_t)c->rank;
    epo_layer_config config = EPO_LAYER_CONFIG_INIT;
    epo_layer *layer = NULL;
    config.experts = EXPERTS;
    config.hidden = HIDDEN;
    config.ffn = FFN;
    config.w1 = s->w1 + 2 * at;
    config.w2 = s->w2 + at;
    config.dw1 = s->dw1 + 2 * at;
    config.dw2 = s->dw2 + at;
    EXPECT(c, c->engine->layer_create(group, &config, &layer) == EPO_OK);
    return layer;
}

static epo_buffer *open_buffer(moe_rank *c, epo_group *group, epo_dispatcher dispatcher) {
    epo_buffer_config config = EPO_BUFFER_CONFIG_INIT;
    epo_buffer *buffer = NULL;
    config.experts = EXPERTS;
    config.hidden = HIDDEN;
    config.top_k = TOP_K;
    config.max_tokens = TOKENS;
    config.dispatcher = dispatcher;
    EXPECT(c, c->engine->buffer_create(group, &config, &buffer) == EPO_OK);
    return buffer;
}

static void pass(moe_rank *c, epo_layer *layer, epo_buffer *buffer, epo_group *group) {
    soak *s = c->arg;
    const epo_engine *e = c->engine;
    epo_plan *plan[BATCHES] = {NULL};
    epo_saved *saved[BATCHES] = {NULL};
    for (int b = 0; b < BATCHES; b++) {
        const case_batch *in = &s->c.batch[b][c->rank];
        epo_routing routing = EPO_ROUTING_INIT;
        routing.tokens = in->tokens;
        routing.top_k = s->c.top_k;
        routing.experts = in->experts;
        routing.weights = in->weights;
        EXPECT(c, e->plan_create(buffer, &routing, NULL, &plan[b]) == EPO_OK);
        EXPECT(c,
               e->forward(layer, plan[b], in->x, s->out.y[b][c->rank], &saved[b], NULL) == EPO_OK);
    }
    for (int b = BATCHES - 1; b >= 0; b--) {
        const case_batch *in = &s->c.batch[b][c->rank];
        EXPECT(c, e->backward(layer, saved[b], in->dy, s->out.dx[b][c->rank],
                              s->out.dweights[b][c->rank], NULL) == EPO_OK);
        e->plan_release(plan[b]);
    }
    EXPECT(c, e->group_wgrad_flush(group, NULL) == EPO_OK);
}

/* All ranks' memory, then the process's, when everybody stands still. */
static void take_figures(moe_rank *c, epo_group *group, figures *out) {
    soak *s = c->arg;
    epo_stats stats = {.size = sizeof stats};
    EXPECT(c, c->engine->group_stats(group, &stats, 0) == EPO_OK);
    s->engine_peak += stats.memory_peak;
    pthread_barrier_wait(&s->all);
    if (c->rank == 0) {
        *out = figures_now(s);
        s->engine_peak = 0;
    }
    pthread_barrier_wait(&s->all);
}

static void run_rank(moe_rank *c) {
    soak *s = c->arg;
    epo_group *group = moe_rank_group(c, &s->how);
    epo_layer *layer = open_layer(c, group);
    epo_buffer *buffer[2];
    for (int d = 0; d < 2; d++)
        buffer[d] = open_buffer(c, group, (epo_dispatcher)d);
    for (uint64_t i = 0; i < s->steps; i++) {
        if (c->rank == 0) {
            s->step = i;
            step_open(s);
        }
        pthread_barrier_wait(&s->all);
        if (c->failures == 0)
            pass(c, layer, buffer[i % 2], group);
        pthread_barrier_wait(&s->all);
        if (c->rank == 0)
            step_close(s);
        if (i + 1 == s->steps / 5)
            take_figures(c, group, &s->early);
    }
    take_figures(c, group, &s->late);
    EXPECT(c, c->engine->layer_destroy(layer) == EPO_OK);
    for (int d = 0; d < 2; d++)
        EXPECT(c, c->engine->buffer_destroy(buffer[d]) == EPO_OK);
    EXPECT(c, c->engine->group_destroy(group) == EPO_OK);
}

static float *first_weights(uint64_t *state, size_t count) {
    float *w = moe_calloc(count, sizeof *w);
    for (size_t i = 0; i < count; i++)
        w[i] = 0.3F * ((float)moe_random(state) / 2147483648.0F - 1.0F);
    return w;
}

int main(int argc, char **argv) {
    soak s = {.steps = argc > 1 ? strtoull(argv[1], NULL, 0) : 10000,
              .seed = argc > 2 ? strtoull(argv[2], NULL, 0) : (uint64_t)time(NULL),
              .how = {.dispatcher = EPO_DISPATCH_FLEX, .overlap = 1, .delay = 1, .chunks = 3}};
    uint64_t state = s.seed;
    if (s.steps < 10) {
        fputs("usage: train [STEPS [10000, at least 10] [SEED]]\n", stderr);
        return 2;
    }
    printf("seed %llu\n", (unsigned long long)s.seed);
    pthread_barrier_init(&s.all, NULL, RANKS);
    s.w1 = first_weights(&state, 2 * STACK);
    s.w2 = first_weights(&state, STACK);
    s.dw1 = moe_calloc(2 * STACK, sizeof(float));
    s.dw2 = moe_calloc(STACK, sizeof(float));
    time_t start = time(NULL);
    int failures = moe_ranks(RANKS, 60.0, run_rank, &s);
    bool flat = s.late.engine_peak / 5 * 4 <= s.early.engine_peak &&
                s.late.descriptors == s.early.descriptors && s.late.rss_kb < s.early.rss_kb + 1024;
    printf("%llu steps, %llu tokens, %lld s: largest error %.2g (bound %.0e), %d failed calls\n",
           (unsigned long long)s.steps, (unsigned long long)s.tokens,
           (long long)(time(NULL) - start), s.worst, bound, failures);
    printf(
        "after a fifth of them and at the end: engine at most %llu and %llu bytes, process %ld and "
        "%ld kB, %d and %d descriptors: %s\n",
        (unsigned long long)s.early.engine_peak, (unsigned long long)s.late.engine_peak,
        s.early.rss_kb, s.late.rss_kb, s.early.descriptors, s.late.descriptors,
        flat ? "flat" : "NOT FLAT");
    free(s.w1);
    free(s.w2);
    free(s.dw1);
    free(s.dw2);
    pthread_barrier_destroy(&s.all);
    return failures == 0 && !s.bad && flat ? 0 : 1;
}
