/* SPDX-License-Identifier: Apache-2.0 */
#include "core/unserved.h"

#include "core/names.h"
#include "core/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define VERSION 1
#define STATE_ON 1

/* The record's first numbers (spank/record.c). */
enum { AT_VERSION, AT_JOB, AT_STEP, AT_STATE, AT_EXPLICIT, NUMBERS };

static bool read_numbers(const char *text, unsigned long numbers[NUMBERS]) {
    for (int i = 0; i < NUMBERS; i++) {
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
    unsigned long numbers[NUMBERS];
    const char *record = getenv(EPO_STEP_RECORD), *name = getenv("SLURMD_NODENAME");
    if (record == NULL || getenv(EPO_OUT_DECISION) != NULL || !read_numbers(record, numbers) ||
        numbers[AT_VERSION] != VERSION || numbers[AT_STATE] != STATE_ON ||
        numbers[AT_EXPLICIT] != 1 || getenv("SLURM_PROCID") == NULL)
        return false;
    /* a heterogeneous step's record is job 0 */
    if (numbers[AT_JOB] != 0 && (!is_number("SLURM_JOB_ID", numbers[AT_JOB]) ||
                                 !is_number("SLURM_STEP_ID", numbers[AT_STEP])))
        return false;
    snprintf(node, room, "%s", name != NULL && name[0] != '\0' ? name : "this node");
    epo_text_clean(node);
    return true;
}
