/* SPDX-License-Identifier: Apache-2.0
 *
 * mode.c - EP_OVERLAP_INTERPOSE and EP_OVERLAP_RECORD, read once.
 */
#include "config.h"

#include "preload/intercept/intercept.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/names.h"
#include "preload/record/recorder.h"

#define BYTES_MOST (UINT64_C(1) << 60)

static struct {
    pthread_once_t once;
    intercept_mode mode;
    const char *record;
    char *unknown; /* a word that is no mode */
    pthread_once_t watched;
    atomic_bool inherited;
} context = {.once = PTHREAD_ONCE_INIT, .mode = MODE_OFF, .watched = PTHREAD_ONCE_INIT};

static const char *const names[] = {EPO_INTERPOSE_OFF, EPO_INTERPOSE_OBSERVE,
                                    EPO_INTERPOSE_ACCELERATE};

const char *mode_name(intercept_mode mode) { return names[mode]; }

static bool is_folder(const char *record) {
    record_window window;
    return strcmp(record, "1") != 0 && !record_window_parse(record, &window);
}

/* The program may be in another folder when it ends. */
static const char *from_here(const char *folder) {
    char *here = *folder != '/' ? getcwd(NULL, 0) : NULL, *path = NULL;
    if (here == NULL || asprintf(&path, "%s/%s", here, folder) < 0)
        path = strdup(folder);
    free(here);
    return path;
}

/* A word that we do not know counts as off: to observe or to accelerate is only done
 * for somebody who asked for it. */
static void read_environment(void) {
    const char *word = getenv(EPO_OUT_INTERPOSE), *record = getenv(EPO_OUT_RECORD);
    bool known = word == NULL || *word == '\0';
    for (int i = 0; word != NULL && i < 3; i++)
        if (strcmp(word, names[i]) == 0) {
            context.mode = (intercept_mode)i;
            known = true;
        }
    context.unknown = known ? NULL : strdup(word);
    if (record == NULL || *record == '\0' || strcmp(record, "0") == 0)
        return;
    context.record = is_folder(record) ? from_here(record) : "";
}

static void tell_unknown(void) {
    if (context.unknown != NULL)
        fprintf(stderr,
                "ep-overlap: warning: " EPO_OUT_INTERPOSE "=%.100s is no mode; allowed is off, "
                "observe or accelerate; off is taken\n",
                context.unknown);
}

void mode_tell(void) {
    static pthread_once_t told = PTHREAD_ONCE_INIT;
    pthread_once(&context.once, read_environment);
    pthread_once(&told, tell_unknown);
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

/* Digits with k, m or g behind them; false: something else, or more than there can be. */
static bool read_bytes(const char *text, uint64_t *value) {
    unsigned shift = 0;
    *value = 0;
    if (*text < '0' || *text > '9')
        return false;
    for (; *text >= '0' && *text <= '9'; text++) {
        *value = *value * 10 + (uint64_t)(*text - '0');
        if (*value > BYTES_MOST)
            return false;
    }
    if (*text != '\0') {
        static const char units[] = "kKmMgG";
        const char *unit = strchr(units, *text);
        if (unit == NULL || text[1] != '\0')
            return false;
        shift = 10 * (unsigned)((unit - units) / 2 + 1);
    }
    if (*value > BYTES_MOST >> shift)
        return false;
    *value <<= shift;
    return true;
}

/* Each variable once: it is read again for each communicator. */
static void warn_once(const char *name, const char *text) {
    static const char *told[8];
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    size_t i = 0;
    pthread_mutex_lock(&lock);
    while (i < sizeof told / sizeof *told && told[i] != NULL && strcmp(told[i], name) != 0)
        i++;
    const bool first = i < sizeof told / sizeof *told && told[i] == NULL;
    if (first)
        told[i] = name;
    pthread_mutex_unlock(&lock);
    if (first)
        fprintf(stderr,
                "ep-overlap: warning: %s=%.100s is no number (digits, then k, m or g or nothing); "
                "it counts as unset\n",
                name, text);
}

uint64_t mode_bytes(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    uint64_t value;
    if (text == NULL || *text == '\0')
        return otherwise;
    if (read_bytes(text, &value))
        return value;
    warn_once(name, text);
    return otherwise;
}
