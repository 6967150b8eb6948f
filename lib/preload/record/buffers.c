/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "preload/record/buffers.h"

#include <pthread.h>
#include <stdlib.h>

#include "preload/record/hold.h"

typedef struct slot {
    uint8_t *memory;
    enum { FREE, AWAY, BACK } where;
    size_t valid;
    uint64_t turn; /* in which order they came back */
} slot;

static struct {
    pthread_mutex_t lock;
    slot slots[HOLD_BUFFERS];
    uint64_t turns, refused;
} context = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* CUPTI drops records, and counts them, where it gets no buffer. */
void buffers_requested(uint8_t **buffer, size_t *size, size_t *most_records) {
    slot *chosen = NULL;
    *buffer = NULL;
    *size = 0;
    *most_records = 0;
    pthread_mutex_lock(&context.lock);
    for (int i = 0; i < HOLD_BUFFERS; i++)
        if (context.slots[i].where == FREE &&
            (chosen == NULL || (chosen->memory == NULL && context.slots[i].memory != NULL)))
            chosen = &context.slots[i];
    if (chosen != NULL && chosen->memory == NULL)
        chosen->memory = aligned_alloc(4096, HOLD_BUFFER);
    if (chosen == NULL || chosen->memory == NULL) {
        context.refused++;
    } else {
        chosen->where = AWAY;
        *buffer = chosen->memory;
        *size = HOLD_BUFFER;
    }
    pthread_mutex_unlock(&context.lock);
}

static slot *slot_of(const uint8_t *buffer) {
    for (int i = 0; i < HOLD_BUFFERS; i++)
        if (context.slots[i].memory == buffer && buffer != NULL)
            return &context.slots[i];
    return NULL;
}

/* One that is not ours was another's, registered before us. */
void buffers_completed(void *cuda, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
    (void)cuda;
    (void)stream;
    pthread_mutex_lock(&context.lock);
    slot *s = slot_of(buffer);
    if (s != NULL && s->where == AWAY) {
        s->where = BACK;
        s->valid = valid <= size ? valid : size;
        s->turn = context.turns++;
    }
    pthread_mutex_unlock(&context.lock);
}

uint8_t *buffers_next(size_t *valid) {
    slot *first = NULL;
    pthread_mutex_lock(&context.lock);
    for (int i = 0; i < HOLD_BUFFERS; i++)
        if (context.slots[i].where == BACK &&
            (first == NULL || context.slots[i].turn < first->turn))
            first = &context.slots[i];
    if (first != NULL)
        *valid = first->valid;
    pthread_mutex_unlock(&context.lock);
    return first != NULL ? first->memory : NULL;
}

void buffers_reuse(uint8_t *buffer) {
    pthread_mutex_lock(&context.lock);
    slot *s = slot_of(buffer);
    if (s != NULL)
        s->where = FREE;
    pthread_mutex_unlock(&context.lock);
}

size_t buffers_away(void) {
    size_t away = 0;
    pthread_mutex_lock(&context.lock);
    for (int i = 0; i < HOLD_BUFFERS; i++)
        away += context.slots[i].where == AWAY;
    pthread_mutex_unlock(&context.lock);
    return away;
}

uint64_t buffers_refused(void) {
    pthread_mutex_lock(&context.lock);
    const uint64_t refused = context.refused;
    pthread_mutex_unlock(&context.lock);
    return refused;
}

void buffers_reset(void) {
    pthread_mutex_lock(&context.lock);
    context.refused = 0;
    pthread_mutex_unlock(&context.lock);
}

/* What CUPTI has stays: it may still write there. */
void buffers_free(void) {
    pthread_mutex_lock(&context.lock);
    for (int i = 0; i < HOLD_BUFFERS; i++)
        if (context.slots[i].where == FREE) {
            free(context.slots[i].memory);
            context.slots[i].memory = NULL;
        }
    pthread_mutex_unlock(&context.lock);
}
