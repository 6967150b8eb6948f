/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda_pieces.h - the stand-in for libcuda: memory that is mapped in pieces.
 */
#ifndef EPO_FAKE_CUDA_PIECES_H
#define EPO_FAKE_CUDA_PIECES_H

#include <stddef.h>
#include <stdint.h>

/* FAKE_CUDA_FAIL asks for it: cuda_streams.c. */
int fake_fails(const char *name);
/* The bytes of a piece that FAKE_CUDA_PIECES asks for; 0: none, memory is allocated as a whole. */
size_t pieces_wanted(void);
/* As PyTorch's expandable segments: a range, and pieces in a row. */
int pieces_alloc(uintptr_t *out, size_t size);
/* 1: not of pieces. */
int pieces_free(uintptr_t p);
int pieces_attribute(void *out, int what, uintptr_t p);
/* How many imported ones are mapped. */
int pieces_opened(void);

#endif
