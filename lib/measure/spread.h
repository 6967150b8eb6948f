/* SPDX-License-Identifier: Apache-2.0
 *
 * spread.h - samples of a time: median, least, most.
 */
#ifndef EPO_MEASURE_SPREAD_H
#define EPO_MEASURE_SPREAD_H

#include <stdint.h>
#include <stdlib.h>
#include <time.h>

typedef struct samples {
    double *value; /* [room] */
    int count, room, next;
} samples;

typedef struct spread {
    double median, least, most;
} spread;

/* The newest replaces the oldest when there is no room. */
static inline void samples_put(samples *s, double value) {
    s->value[s->next] = value;
    s->next = (s->next + 1) % s->room;
    s->count += s->count < s->room;
}

static inline int spread_order(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts the values; all zero without any. */
static inline spread spread_of(double *value, int count) {
    spread s = {0, 0, 0};
    if (count < 1)
        return s;
    qsort(value, (size_t)count, sizeof *value, spread_order);
    s.least = value[0];
    s.most = value[count - 1];
    s.median = (value[(count - 1) / 2] + value[count / 2]) / 2;
    return s;
}

static inline double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

#endif
