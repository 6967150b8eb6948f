/* SPDX-License-Identifier: Apache-2.0 */
#include "core/unserved.h"

#include "core/names.h"
#include "core/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define VERSION 1
#define STATE_ON 1

/* The record's first four numbers: version, job, step, state (spank/record.c). */
static bool read_numbers(const char *text, unsigned long numbers[4]) {
    for (int i = 0; i < 4; i++) {
        char *end;
        if (*text < '0' || *text > '9')
            return false;
        numbers[i] = strtoul(text, &end, 10);
        if (*end != ' ')
            return false;
        text = end + 1;
    }
    return true;
}

static bool is_number(const char *variable, unsigned long number) {
    char text[32];
    const char *value = getenv(variable);
    snprintf(text, sizeof text, "%lu", number);
    return value != NULL && strcmp(value, text) == 0;
}

bool epo_step_is_unserved(char *node, size_t room) {
    unsigned long numbers[4];
    const char *record = getenv(EPO_STEP_RECORD), *name = getenv("SLURMD_NODENAME");
    if (record == NULL || getenv(EPO_OUT_DECISION) != NULL || !read_numbers(record, numbers) ||
        numbers[0] != VERSION || numbers[3] != STATE_ON || getenv("SLURM_PROCID") == NULL)
        return false;
    /* a heterogeneous step's record is job 0 */
    if (numbers[1] != 0 &&
        (!is_number("SLURM_JOB_ID", numbers[1]) || !is_number("SLURM_STEP_ID", numbers[2])))
        return false;
    snprintf(node, room, "%s", name != NULL && name[0] != '\0' ? name : "this node");
    epo_text_clean(node);
    return true;
}
