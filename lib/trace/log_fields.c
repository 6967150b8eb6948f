/* SPDX-License-Identifier: Apache-2.0
 *
 * The names under which frameworks print the same quantity.
 */
#include "trace/log.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

typedef struct field {
    const char *name;
    size_t offset; /* of a double in epo_iteration */
    double scale;
} field;

#define AT(member) offsetof(epo_iteration, member)
static const field fields[] = {
    {"elapsed time per iteration (ms)", AT(time_ms), 1},
    {"elapsed time per iteration (s)", AT(time_ms), 1000},
    {"train_step_timing in s", AT(time_ms), 1000},
    {"iteration time (s)", AT(time_ms), 1000},
    {"throughput per GPU (TFLOP/s/GPU)", AT(tflops), 1},
    {"throughput (TFLOP/s/GPU)", AT(tflops), 1},
    {"TFLOPS_per_GPU", AT(tflops), 1},
    {"GPU utilization", AT(tflops), 1},
    {"tokens_per_sec_per_gpu", AT(tokens), 1},
    {"tokens per second per GPU", AT(tokens), 1},
    {"lm loss", AT(loss), 1},
    {"lm_loss", AT(loss), 1},
    {"reduced_train_loss", AT(loss), 1},
    {"train_loss", AT(loss), 1},
    {"loss", AT(loss), 1},
    {"grad norm", AT(grad_norm), 1},
    {"grad_norm", AT(grad_norm), 1},
    {"global batch size", AT(batch), 1},
    {"global_batch_size", AT(batch), 1},
    {"number of skipped iterations", AT(skipped), 1},
    {"number of nan iterations", AT(nans), 1},
};

static void take_peak(double *peak, double bytes) {
    if (isfinite(bytes) && bytes >= 0 && !(*peak >= bytes))
        *peak = bytes;
}

/* NeMo prints bytes on the iteration's line. */
static bool memory_field(const char *name, size_t length, double value, epo_log *log) {
    static const char *const allocated[] = {"max_memory_allocated", "peak_memory_usage"};
    for (size_t i = 0; i < 2; i++)
        if (strlen(allocated[i]) == length && memcmp(allocated[i], name, length) == 0) {
            take_peak(&log->peak_allocated, value);
            return true;
        }
    if (length == 19 && memcmp(name, "max_memory_reserved", length) == 0) {
        take_peak(&log->peak_reserved, value);
        return true;
    }
    return false;
}

bool epo_log_field(const char *name, size_t length, const char *value, epo_iteration *iteration,
                   epo_log *log) {
    char *end;
    double number = strtod(value, &end); /* "654.5/735.1": this one and the mean so far */
    if (end == value)
        return false;
    if (memory_field(name, length, number, log))
        return true;
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        if (strlen(fields[i].name) != length || strncasecmp(fields[i].name, name, length) != 0)
            continue;
        if (*end == ',' && isdigit((unsigned char)end[1]) &&
            memchr(value, '.', (size_t)(end - value)) == NULL)
            snprintf(log->comma, sizeof log->comma, "%.*s", (int)strcspn(value, " |\t"), value);
        double *to = (double *)(void *)((char *)iteration + fields[i].offset);
        *to = number * fields[i].scale;
        return true;
    }
    return false;
}
