/* SPDX-License-Identifier: Apache-2.0 */
#include "trace/matcher.h"

#include "core/status.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define NONE UINT16_MAX

struct epo_matcher {
    uint16_t (*next)[256];
    uint16_t *fail;  /* state of the longest proper suffix */
    uint16_t *word;  /* that ends in this state; NONE */
    uint16_t *other; /* nearest suffix state in which a word ends; 0: none */
    uint16_t *same;  /* per word: another one with the same letters; NONE */
    size_t states, words;
};

void epo_matcher_destroy(epo_matcher *m) {
    if (m == NULL)
        return;
    free(m->next);
    free(m->fail);
    free(m->word);
    free(m->other);
    free(m->same);
    free(m);
}

static epo_status allocate(epo_matcher *m, size_t states, size_t words) {
    m->next = calloc(states, sizeof *m->next);
    m->fail = calloc(states, sizeof *m->fail);
    m->word = malloc(states * sizeof *m->word);
    m->other = calloc(states, sizeof *m->other);
    m->same = malloc((words + 1) * sizeof *m->same);
    if (m->next == NULL || m->fail == NULL || m->word == NULL || m->other == NULL ||
        m->same == NULL)
        return epo_fail(EPO_E_NOMEM, "matcher: no memory for %zu states", states);
    memset(m->word, 0xff, states * sizeof *m->word);
    memset(m->same, 0xff, (words + 1) * sizeof *m->same);
    m->states = 1;
    m->words = words;
    return EPO_OK;
}

static void add_word(epo_matcher *m, const char *text, size_t index) {
    uint16_t at = 0;
    for (const unsigned char *c = (const unsigned char *)text; *c != '\0'; c++) {
        if (m->next[at][*c] == 0)
            m->next[at][*c] = (uint16_t)m->states++;
        at = m->next[at][*c];
    }
    if (at == 0)
        return;
    m->same[index] = m->word[at];
    m->word[at] = (uint16_t)index;
}

/* Breadth first: a state's suffix is known before the state. */
static void link_states(epo_matcher *m, uint16_t *queue) {
    size_t head = 0, tail = 0;
    for (int c = 0; c < 256; c++)
        if (m->next[0][c] != 0)
            queue[tail++] = m->next[0][c];
    while (head < tail) {
        uint16_t at = queue[head++], suffix = m->fail[at];
        m->other[at] = m->word[suffix] != NONE ? suffix : m->other[suffix];
        for (int c = 0; c < 256; c++) {
            uint16_t child = m->next[at][c];
            if (child == 0) {
                m->next[at][c] = m->next[suffix][c];
                continue;
            }
            m->fail[child] = m->next[suffix][c];
            queue[tail++] = child;
        }
    }
}

epo_status epo_matcher_create(const char *const *word, size_t count, epo_matcher **out) {
    size_t letters = 1;
    for (size_t i = 0; i < count; i++)
        letters += strlen(word[i]);
    if (letters > EPO_MATCHER_STATES || count >= NONE)
        return epo_fail(EPO_E_OVERFLOW, "matcher: %zu letters, at most %d", letters,
                        EPO_MATCHER_STATES);
    epo_matcher *m = calloc(1, sizeof *m);
    uint16_t *queue = malloc(letters * sizeof *queue);
    epo_status status = m == NULL || queue == NULL ? epo_fail(EPO_E_NOMEM, "matcher: no memory")
                                                   : allocate(m, letters, count);
    if (status == EPO_OK) {
        for (size_t i = 0; i < count; i++)
            add_word(m, word[i], i);
        link_states(m, queue);
        *out = m;
    } else {
        epo_matcher_destroy(m);
    }
    free(queue);
    return status;
}

void epo_matcher_scan(const epo_matcher *m, const char *text, size_t length,
                      epo_matcher_found *found, void *context) {
    uint16_t at = 0;
    for (size_t i = 0; i < length; i++) {
        at = m->next[at][(unsigned char)text[i]];
        if (m->word[at] == NONE && m->other[at] == 0)
            continue;
        for (uint16_t s = m->word[at] != NONE ? at : m->other[at]; s != 0; s = m->other[s])
            for (uint16_t w = m->word[s]; w != NONE; w = m->same[w])
                found(context, w, i + 1);
    }
}
