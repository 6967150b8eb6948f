/* SPDX-License-Identifier: Apache-2.0
 *
 * words.c - words of the room that a stream writes and waits for: what stands in a row goes to
 * the driver in one call, where it has one.
 */
#include "config.h"

#include "preload/intercept/channel.h"

static void add(channel_words *w, uint32_t what, cu_pointer word, uint32_t value) {
    w->op[w->count++] = (cu_word_operation){.what = what,
                                            .word = word,
                                            .value = value,
                                            .flags = what == CU_WORD_WAIT ? CU_WAIT_AT_LEAST : 0};
}

void words_write(channel_words *w, cu_pointer word, uint32_t value) {
    add(w, CU_WORD_WRITE, word, value);
}

void words_wait(channel_words *w, cu_pointer word, uint32_t value) {
    add(w, CU_WORD_WAIT, word, value);
}

cu_result words_flush(const channel *ch, channel_words *w, cu_stream stream) {
    const unsigned count = w->count;
    cu_result r = 0;
    w->count = 0;
    if (count > 1 && ch->batch)
        return ch->cu->batch(stream, count, w->op, 0);
    for (unsigned i = 0; i < count && r == 0; i++) {
        const cu_word_operation *op = &w->op[i];
        r = op->what == CU_WORD_WAIT
                ? ch->cu->wait_value(stream, op->word, (uint32_t)op->value, op->flags)
                : ch->cu->write_value(stream, op->word, (uint32_t)op->value, op->flags);
    }
    return r;
}
