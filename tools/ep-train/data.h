/* SPDX-License-Identifier: Apache-2.0
 *
 * data.h - the text, and which pieces of it a rank reads when.
 */
#ifndef EP_TRAIN_DATA_H
#define EP_TRAIN_DATA_H

#include <stddef.h>
#include <stdint.h>

#include "ep_overlap.h"

#define DATA_DEFAULT "/usr/share/common-licenses/GPL-3"

typedef struct data_text {
    uint8_t *byte;
    size_t count;
} data_text;

/* Reads `path` (NULL: DATA_DEFAULT); a batch of `batch` sequences of seq + 1
 * bytes must be able to differ, so seq + batch bytes are needed at least. */
epo_status data_read(const char *path, int seq, int batch, data_text *out);
void data_free(data_text *text);

/* This rank's part of a micro-batch of `batch` sequences: as even as it goes. */
void data_slice(int batch, int rank, int ranks, int *first, int *count);
/* Sequences first .. first+count of micro-batch `number`: input[count][seq] and
 * the byte that follows each, target[count][seq].  By seed and number alone. */
void data_batch(const data_text *text, uint64_t seed, uint64_t number, int batch, int first,
                int count, int seq, uint8_t *input, uint8_t *target);

#endif
