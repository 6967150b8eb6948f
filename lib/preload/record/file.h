/* SPDX-License-Identifier: Apache-2.0
 *
 * file.h - the files that a rank leaves in the folder of EP_OVERLAP_RECORD.
 */
#ifndef EPO_RECORD_FILE_H
#define EPO_RECORD_FILE_H

#include <stdio.h>

#include "core/status.h"

#define RECORD_PATH 4096

/* The name of a rank's file.  What has no room is too long for the system, too, so writing it says
 * that. */
void record_file_name(char path[RECORD_PATH], const char *folder, const char *what, int rank);
/* `what` as text. */
typedef void record_put(FILE *f, const void *what);

/* A file at `path` with what `put` writes, or none: it has its name when it is whole. */
epo_status record_file_write(const char *path, record_put *put, const void *what);
/* The first `most` bytes of `text`, in quotes.  JSON is UTF-8; names and paths are any bytes. */
void record_text_put(FILE *f, const char *text, size_t most);

#endif
