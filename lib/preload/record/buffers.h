/* SPDX-License-Identifier: Apache-2.0
 *
 * buffers.h - the memory that CUPTI writes its records to: a fixed number of buffers that
 * go round.  CUPTI asks for them on the program's own threads.
 */
#ifndef EPO_RECORD_BUFFERS_H
#define EPO_RECORD_BUFFERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* CUPTI's two callbacks. */
void buffers_requested(uint8_t **buffer, size_t *size, size_t *most_records);
void buffers_completed(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid);

/* The next that came back; NULL: none. */
uint8_t *buffers_next(size_t *valid);
void buffers_reuse(uint8_t *buffer);
size_t buffers_away(void);      /* with CUPTI */
uint64_t buffers_refused(void); /* requests while all were away, since buffers_reset() */
void buffers_reset(void);
/* Frees what is here. */
void buffers_free(void);

#endif
