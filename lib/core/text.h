/* SPDX-License-Identifier: Apache-2.0
 *
 * text.h - strings that grow, and text that is safe to show in a terminal or log.
 */
#ifndef EPO_CORE_TEXT_H
#define EPO_CORE_TEXT_H

#include "core/status.h"

#include <stdbool.h>
#include <stddef.h>

/* A string that grows.  `EPO_TEXT_INIT` is an empty one; `data` is NULL until
 * something was added.  After a failed addition `failed` stays set and every
 * later one does nothing, so that a caller may test once at the end. */
struct epo_text {
    char *data;
    size_t length, room;
    bool failed;
};
#define EPO_TEXT_INIT                                                                              \
    { NULL, 0, 0, false }

void epo_text_add(struct epo_text *text, const char *bytes, size_t length);
void epo_text_add_string(struct epo_text *text, const char *string);
void epo_text_format(struct epo_text *text, const char *format, ...) EPO_PRINTF(2, 3);
/* The string ("" when nothing was added) for the caller to free; NULL when an
 * addition failed.  The text is empty afterwards. */
char *epo_text_take(struct epo_text *text);
void epo_text_free(struct epo_text *text);

/* Replaces every byte that is not printable ASCII by '?', in place: a user's
 * word in a log line can neither break the line nor command a terminal. */
void epo_text_clean(char *string);
/* True when every byte is printable ASCII. */
bool epo_text_is_clean(const char *string);

/* What SLURMD_TRES_BIND ("gpu:per_task:1", since Slurm 24 "gres/gpu:per_task:1")
 * says of GPUs: the text behind "gpu:"; NULL where it says nothing of them. */
const char *epo_text_gpu_bind(const char *tres_bind);

#endif
