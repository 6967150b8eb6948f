/* SPDX-License-Identifier: Apache-2.0
 *
 * mode.c - EP_OVERLAP_INTERPOSE and EP_OVERLAP_RECORD, read once.
 */
#include "config.h"

#include "preload/intercept/intercept.h"

#include <stdlib.h>
#include <string.h>

#include "core/names.h"
#include "preload/record/recorder.h"

static struct {
    pthread_once_t once;
    intercept_mode mode;
    const char *record;
    pthread_once_t watched;
    atomic_bool inherited;
} context = {PTHREAD_ONCE_INIT, MODE_OFF, NULL, PTHREAD_ONCE_INIT, false};

static const char *const names[] = {EPO_INTERPOSE_OFF, EPO_INTERPOSE_OBSERVE,
                                    EPO_INTERPOSE_ACCELERATE};

const char *mode_name(intercept_mode mode) { return names[mode]; }

/* A word that we do not know counts as off: to observe or to accelerate is only done
 * for somebody who asked for it. */
static void read_environment(void) {
    const char *word = getenv(EPO_OUT_INTERPOSE), *record = getenv(EPO_OUT_RECORD);
    for (int i = 0; word != NULL && i < 3; i++)
        if (strcmp(word, names[i]) == 0)
            context.mode = (intercept_mode)i;
    if (record == NULL || *record == '\0' || strcmp(record, "0") == 0)
        return;
    record_window window;
    const bool plain = strcmp(record, "1") == 0 || record_window_parse(record, &window);
    context.record = plain ? "" : strdup(record);
}

intercept_mode mode_now(void) {
    pthread_once(&context.once, read_environment);
    return atomic_load_explicit(&context.inherited, memory_order_relaxed) ? MODE_OFF : context.mode;
}

static void in_child(void) { atomic_store(&context.inherited, true); }
static void watch_forks(void) { (void)pthread_atfork(NULL, NULL, in_child); }
void mode_off_in_children(void) { pthread_once(&context.watched, watch_forks); }

const char *mode_record(void) {
    pthread_once(&context.once, read_environment);
    return context.record;
}

uint64_t mode_bytes(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    uint64_t value = 0;
    if (text == NULL || *text < '0' || *text > '9')
        return otherwise;
    for (; *text >= '0' && *text <= '9' && value < (UINT64_C(1) << 40); text++)
        value = value * 10 + (uint64_t)(*text - '0');
    if (*text == 'k' || *text == 'K')
        value <<= 10, text++;
    else if (*text == 'm' || *text == 'M')
        value <<= 20, text++;
    else if (*text == 'g' || *text == 'G')
        value <<= 30, text++;
    return *text == '\0' ? value : otherwise;
}
