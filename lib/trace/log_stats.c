/* SPDX-License-Identifier: Apache-2.0 */
#include "trace/log_stats.h"

#include "core/status.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define WARMUP_RATIO 1.2 /* of the median: a start-up iteration, not noise */

epo_window epo_log_steady_window(const epo_log *log) {
    if (log->count == 0)
        return (epo_window){0, -1};
    size_t skip = (log->count + 9) / 10;
    if (skip >= log->count)
        skip = log->count - 1;
    return (epo_window){log->iteration[skip].number, log->iteration[log->count - 1].number};
}

static int compare_numbers(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts `value`. */
static epo_summary summarise(double *value, size_t count) {
    epo_summary s = {.count = count};
    if (count == 0) {
        s.mean = s.median = s.least = s.most = s.deviation = NAN;
        return s;
    }
    qsort(value, count, sizeof *value, compare_numbers);
    double sum = 0, squares = 0;
    for (size_t i = 0; i < count; i++)
        sum += value[i];
    s.mean = sum / (double)count;
    for (size_t i = 0; i < count; i++)
        squares += (value[i] - s.mean) * (value[i] - s.mean);
    s.deviation = count > 1 ? sqrt(squares / (double)(count - 1)) : 0;
    s.median = count % 2 == 1 ? value[count / 2] : (value[count / 2 - 1] + value[count / 2]) / 2;
    s.least = value[0];
    s.most = value[count - 1];
    return s;
}

static bool inside(const epo_window *w, int64_t number) {
    return number >= w->first && number <= w->last;
}

/* The values at `offset` of the iterations inside the window. */
static epo_summary summarise_field(const epo_log *log, epo_window w, size_t offset, double *room) {
    size_t count = 0;
    for (size_t i = 0; i < log->count; i++) {
        double value;
        memcpy(&value, (const char *)&log->iteration[i] + offset, sizeof value);
        if (inside(&w, log->iteration[i].number) && isfinite(value) && !log->iteration[i].restarts)
            room[count++] = value;
    }
    return summarise(room, count);
}

static void count_iterations(const epo_log *log, epo_window_stats *s) {
    size_t first_tenth = (log->count + 9) / 10;
    for (size_t i = 0; i < log->count; i++) {
        const epo_iteration *it = &log->iteration[i];
        if (!inside(&s->window, it->number))
            continue;
        s->iterations++;
        s->restarts += it->restarts;
        s->skipped += isnan(it->skipped) ? 0 : it->skipped;
        s->nans += isnan(it->nans) ? 0 : it->nans;
        s->lossless += log->has_loss && isnan(it->loss);
        if (i < first_tenth && it->time_ms > WARMUP_RATIO * s->time_ms.median)
            s->has_warmup = true;
    }
}

/* What happens after iteration n lies inside the window if n and n+1 do. */
static void count_events(const epo_log *log, epo_window_stats *s) {
    for (size_t i = 0; i < log->events; i++) {
        const epo_log_event *e = &log->event[i];
        bool within = e->after >= s->window.first && e->after < s->window.last;
        s->has_save = s->has_save || (within && e->kind == EPO_EVENT_SAVE);
        s->has_evaluation = s->has_evaluation || (within && e->kind == EPO_EVENT_EVALUATION);
        /* a profiler that ran before the window may still run inside it */
        s->has_profiler =
            s->has_profiler || (e->kind == EPO_EVENT_PROFILER && e->after < s->window.last);
    }
}

epo_status epo_log_stats(const epo_log *log, epo_window window, epo_window_stats *stats) {
    epo_window_stats s = {.window = window};
    double *room = reallocarray(NULL, log->count + 1, sizeof *room);
    if (room == NULL)
        return epo_fail(EPO_E_NOMEM, "log: no memory for %zu iterations", log->count);
    s.time_ms = summarise_field(log, window, offsetof(epo_iteration, time_ms), room);
    s.tflops = summarise_field(log, window, offsetof(epo_iteration, tflops), room);
    s.tokens = summarise_field(log, window, offsetof(epo_iteration, tokens), room);
    free(room);
    count_iterations(log, &s);
    count_events(log, &s);
    if (s.iterations == 0)
        return epo_fail(EPO_E_ARG, "no iteration of %lld-%lld is in the log (%lld-%lld)",
                        (long long)window.first, (long long)window.last,
                        log->count > 0 ? (long long)log->iteration[0].number : 0,
                        log->count > 0 ? (long long)log->iteration[log->count - 1].number : 0);
    if (s.time_ms.count == 0)
        return epo_fail(EPO_E_ARG, "no iteration of %lld-%lld tells its time",
                        (long long)window.first, (long long)window.last);
    *stats = s;
    return EPO_OK;
}

typedef struct sums {
    double n, a, b, aa, bb, ab;
} sums;

/* Welford's way: no cancellation on curves that hardly move. */
static void add_pair(sums *s, double a, double b) {
    s->n++;
    double da = a - s->a, db = b - s->b;
    s->a += da / s->n;
    s->b += db / s->n;
    s->aa += da * (a - s->a);
    s->bb += db * (b - s->b);
    s->ab += da * (b - s->b);
}

static void compare_one(const epo_iteration *x, const epo_iteration *y, sums *s,
                        epo_loss_comparison *c) {
    if (isnan(x->loss) || isnan(y->loss)) {
        c->lost++;
        return;
    }
    c->common++;
    bool norms = isnan(x->grad_norm) ? isnan(y->grad_norm) : x->grad_norm == y->grad_norm;
    c->identical += x->loss == y->loss && norms;
    double scale = fmax(fabs(x->loss), fabs(y->loss));
    double difference = scale > 0 ? fabs(x->loss - y->loss) / scale : 0;
    if (difference > c->largest) {
        c->largest = difference;
        c->largest_at = x->number;
    }
    c->final_a = x->loss;
    c->final_b = y->loss;
    add_pair(s, x->loss, y->loss);
}

void epo_log_compare_losses(const epo_log *a, const epo_log *b, epo_loss_comparison *out) {
    epo_loss_comparison c = {.final_a = NAN, .final_b = NAN};
    sums s = {0};
    for (size_t i = 0, k = 0; i < a->count && k < b->count;) {
        const epo_iteration *x = &a->iteration[i], *y = &b->iteration[k];
        if (x->number == y->number)
            compare_one(x, y, &s, &c);
        i += x->number <= y->number;
        k += y->number <= x->number;
    }
    c.correlation = s.n >= 2 && s.aa > 0 && s.bb > 0 ? s.ab / sqrt(s.aa * s.bb) : NAN;
    *out = c;
}
