/* SPDX-License-Identifier: Apache-2.0
 *
 * tune.c - how many chunks a plan has, by measuring.
 *
 * Results do not depend on the number, so real passes are the measurement: the first
 * plans of a size take the candidates in turns, and the forward passes over them are
 * timed on the device.  A size is the power of two below the largest rank's tokens.
 * Every step follows from what all ranks know (plans are collective, their records tell
 * tokens and times), so all ranks choose alike without a further exchange.
 *
 * EP_OVERLAP_CHUNKS_FILE names a file of lines "alltoall RANKS EXPERTS HIDDEN TOP_K
 * LOG2_TOKENS CHUNKS".  What it holds is not measured; what is measured, rank 0 adds.
 */
#include "moe/moe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const int choices[MOE_TUNE_CHOICES] = {1, 2, 4, 8};
enum { TRIALS = 3, FILE_CHUNKS_MAX = 1024 };
/* Rows of a chunk below this never pay. */
#define LEAST_BYTES (UINT64_C(4) << 20)
/* More chunks than one must win by this. */
#define WORTH 0.98F

static int class_of(int tokens) {
    int found = 0;
    for (; tokens > 1 && found < MOE_TUNE_CLASSES - 1; tokens /= 2)
        found++;
    return found;
}

/* The choices that a plan of `tokens` may take: the first `n` of them. */
static int candidates(const epo_buffer *b, int tokens) {
    const uint64_t bytes = (uint64_t)tokens * (uint64_t)b->top_k * b->row_bytes;
    int n = 1;
    while (n < MOE_TUNE_CHOICES && choices[n] <= b->chunks &&
           bytes / (uint64_t)choices[n] >= LEAST_BYTES)
        n++;
    return n;
}

static void read_file(epo_buffer *b) {
    const char *path = getenv("EP_OVERLAP_CHUNKS_FILE");
    FILE *f = path != NULL && path[0] != '\0' ? fopen(path, "re") : NULL;
    char line[256], word[16];
    int v[6];
    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        if (sscanf(line, "%15s %d %d %d %d %d %d", word, &v[0], &v[1], &v[2], &v[3], &v[4],
                   &v[5]) == 7 &&
            strcmp(word, "alltoall") == 0 && v[0] == b->group->ranks && v[1] == b->experts &&
            v[2] == b->hidden && v[3] == b->top_k && v[4] >= 0 && v[4] < MOE_TUNE_CLASSES &&
            v[5] >= 1 && v[5] <= FILE_CHUNKS_MAX)
            b->tune.of[v[4]].chosen = v[5] < b->chunks ? v[5] : b->chunks;
    if (f != NULL)
        (void)fclose(f);
}

static void write_file(const epo_buffer *b, int class) {
    const char *path = getenv("EP_OVERLAP_CHUNKS_FILE");
    FILE *f = b->group->rank == 0 && path != NULL && path[0] != '\0' ? fopen(path, "ae") : NULL;
    if (f == NULL)
        return;
    (void)fprintf(f, "alltoall %d %d %d %d %d %d\n", b->group->ranks, b->experts, b->hidden,
                  b->top_k, class, b->tune.of[class].chosen);
    (void)fclose(f);
}

void moe_tune_open(epo_buffer *b, bool free_choice) {
    const epo_backend_ops *ops = b->group->ops;
    memset(&b->tune, 0, sizeof b->tune);
    b->tune.due = b->tune.running = -1;
    /* flex counts its rows by chunk before the plan's number is known. */
    b->tune.on = free_choice && b->group->overlap && ops->mark != NULL &&
                 b->dispatcher == EPO_DISPATCH_ALLTOALL;
    if (!b->tune.on)
        return;
    b->chunks = choices[MOE_TUNE_CHOICES - 1] < b->local ? choices[MOE_TUNE_CHOICES - 1] : b->local;
    read_file(b);
}

uint32_t moe_tune_digest(const epo_buffer *b) {
    uint32_t hash = b->tune.on;
    for (int i = 0; i < MOE_TUNE_CLASSES; i++)
        hash = hash * 31 + (uint32_t)b->tune.of[i].chosen;
    return hash & INT32_MAX;
}

void moe_tune_close(epo_buffer *b) {
    for (int i = 0; i < 2; i++)
        if (b->tune.mark[i] != NULL)
            b->group->ops->event_destroy(b->group->be, b->tune.mark[i]);
}

/* The pass timed last, if it is through by now. */
static void take_time(epo_buffer *b) {
    moe_tune *t = &b->tune;
    double s = 0;
    if (t->running < 0 || !t->stopped ||
        !b->group->ops->between(b->group->be, t->mark[0], t->mark[1], &s))
        return;
    float *best = &t->of[t->running].best[t->choice];
    *best = *best == 0 || (float)s < *best ? (float)s : *best;
    t->running = -1;
}

void moe_tune_report(epo_buffer *b, float seconds[MOE_TUNE_CHOICES]) {
    take_time(b);
    for (int i = 0; b->tune.due >= 0 && i < MOE_TUNE_CHOICES; i++)
        seconds[i] = b->tune.of[b->tune.due].best[i];
}

/* slowest[i]: of the ranks; 0: one of them has no time. */
static int decide(const float *slowest) {
    int best = 0;
    for (int i = 1; i < MOE_TUNE_CHOICES; i++)
        if (slowest[i] > 0 && slowest[0] > 0 && slowest[i] < WORTH * slowest[0] &&
            (best == 0 || slowest[i] < slowest[best]))
            best = i;
    return choices[best];
}

void moe_tune_learn(epo_buffer *b, const float *slowest) {
    moe_tune *t = &b->tune;
    if (t->due < 0)
        return;
    t->of[t->due].chosen = decide(slowest);
    write_file(b, t->due);
    t->due = -1;
}

int moe_tune_chunks(epo_buffer *b, int tokens, int *class, int *choice) {
    moe_tune *t = &b->tune;
    const int n = t->on ? candidates(b, tokens) : 1;
    *class = class_of(tokens);
    *choice = -1;
    if (!t->on)
        return b->chunks;
    moe_tune_class *c = &t->of[*class];
    if (c->chosen > 0)
        return c->chosen;
    if (n == 1)
        return 1;
    *choice = c->trials % n;
    if (c->trials < TRIALS * n)
        c->trials++;
    /* One size at a time is told to the others; the next waits, and measures on. */
    if (c->trials == TRIALS * n && t->due < 0)
        t->due = *class;
    return choices[*choice];
}

void moe_tune_start(epo_plan *plan) {
    epo_buffer *b = plan->buffer;
    moe_tune *t = &b->tune;
    if (plan->tune_choice < 0)
        return;
    take_time(b);
    if (t->running >= 0 || !b->group->ops->mark(b->group->compute, &t->mark[0]))
        return;
    t->running = plan->tune_class;
    t->choice = plan->tune_choice;
    t->stopped = false;
}

void moe_tune_stop(epo_plan *plan) {
    moe_tune *t = &plan->buffer->tune;
    if (t->running < 0 || t->stopped || plan->tune_choice < 0)
        return;
    t->stopped = plan->buffer->group->ops->mark(plan->buffer->group->compute, &t->mark[1]);
    if (!t->stopped)
        t->running = -1;
}
