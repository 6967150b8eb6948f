/* SPDX-License-Identifier: Apache-2.0
 *
 * torchtitan's lines: [titan] 2026-07-17 12:05:19,496 - root - INFO - step:  2  loss:  6.09081
 * grad_norm:  4.2098  memory:  4.26GiB(2.39%)  tps: 72,915  tflops: 39.59  mfu: N/A.  They
 * name no time: it is what has passed since the step printed before.
 */
#include "trace/log.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* A number with commas between thousands. */
static double number_of(const char *line, const char *label) {
    const char *at = strstr(line, label);
    char digits[48];
    size_t n = 0;
    if (at == NULL)
        return NAN;
    at += strlen(label);
    at += strspn(at, " ");
    for (; *at != '\0' && *at != ' ' && *at != '(' && n + 1 < sizeof digits; at++)
        if (*at != ',')
            digits[n++] = *at;
    digits[n] = '\0';
    char *end;
    double number = strtod(digits, &end);
    return end == digits ? NAN : number;
}

/* Seconds; NAN: the line has no time. */
static double clock_of(const char *line) {
    for (const char *at = line; (at = strpbrk(at, "0123456789")) != NULL;
         at += strspn(at, "0123456789")) {
        struct tm t = {0};
        int ms;
        if (sscanf(at, "%4d-%2d-%2d %2d:%2d:%2d,%3d", &t.tm_year, &t.tm_mon, &t.tm_mday, &t.tm_hour,
                   &t.tm_min, &t.tm_sec, &ms) != 7)
            continue;
        t.tm_year -= 1900;
        t.tm_mon--;
        return (double)timegm(&t) + ms / 1e3;
    }
    return NAN;
}

static void take_time(epo_log *log, epo_iteration *it, double now) {
    if (it->number == log->clock_step)
        return; /* another rank's line */
    if (it->number > log->clock_step && log->clock_step > 0 && now >= log->clock)
        it->time_ms = (now - log->clock) * 1e3 / (double)(it->number - log->clock_step);
    log->clock = now;
    log->clock_step = it->number;
}

bool epo_log_titan(const char *line, epo_iteration *it, epo_log *log) {
    const char *total = strstr(line, "Training starts at step");
    if (total != NULL && (total = strstr(total, "total steps ")) != NULL) {
        long long planned = strtoll(total + 12, NULL, 10);
        log->planned = planned > log->planned && planned < INT32_MAX ? planned : log->planned;
        return false;
    }
    if (strstr(line, "step:") == NULL || strstr(line, "tps:") == NULL)
        return false;
    double step = number_of(line, "step:");
    if (!(step >= 1 && step < INT32_MAX) || strstr(line, " loss:") == NULL)
        return false;
    it->number = (int64_t)step;
    it->loss = number_of(line, " loss:");
    it->no_loss = isnan(it->loss);
    it->grad_norm = number_of(line, "grad_norm:");
    it->tokens = number_of(line, "tps:");
    it->tflops = number_of(line, "tflops:");
    double memory = number_of(line, "memory:") * 1073741824.0; /* GiB that torch holds reserved */
    if (isfinite(memory) && memory > 0 && !(log->peak_reserved >= memory))
        log->peak_reserved = memory;
    take_time(log, it, clock_of(line));
    return true;
}
