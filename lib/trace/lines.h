/* SPDX-License-Identifier: Apache-2.0
 *
 * lines.h - the lines of a text file of any size, in bounded memory.
 */
#ifndef EPO_TRACE_LINES_H
#define EPO_TRACE_LINES_H

#include "ep_overlap.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EPO_LINE_MAX 65536 /* bytes kept of one line; what stands behind is passed over */

typedef struct epo_lines epo_lines;

/* Told now and then how far a long read is; total 0: not known. */
typedef void epo_progress(void *context, uint64_t done, uint64_t total);

/* What messages call a path: "-" is standard input. */
const char *epo_lines_name(const char *path);
/* Puts the path's name before the failure's line, unless it stands there; gives `status`. */
epo_status epo_lines_fail(epo_status status, const char *path);
/* Whether a file that begins so is no text as we read it, but can be made to be: compressed,
 * UTF-16; the error line names `name` and the command. */
epo_status epo_lines_refuse(const char *name, const char *head, size_t length);
/* A folder, what epo_lines_refuse finds, or a file whose first bytes hold a zero, is refused. */
epo_status epo_lines_open(const char *path, const char *name, epo_progress *progress, void *context,
                          epo_lines **out);
/* The next line without its end, valid until the next call; zeros and other
 * control characters but tab became blanks, colours are gone.  NULL at the end or
 * on an error, which epo_lines_status tells. */
const char *epo_lines_next(epo_lines *lines, size_t *length);
uint64_t epo_lines_number(const epo_lines *lines); /* of the line last given, from 1 */
uint64_t epo_lines_offset(const epo_lines *lines); /* its first byte's, from 0 */
epo_status epo_lines_status(const epo_lines *lines);
void epo_lines_close(epo_lines *lines);

#endif
