/* SPDX-License-Identifier: Apache-2.0
 *
 * elf.h - two questions to a library's file, which is read and never loaded.  All
 * numbers in it are a stranger's.
 */
#ifndef EPO_PROBE_ELF_H
#define EPO_PROBE_ELF_H

#include "probe/files.h"

/* DT_RPATH (searched before LD_LIBRARY_PATH) or DT_RUNPATH (behind it), with
 * $ORIGIN filled in; false when there is none. */
bool probe_elf_search(epo_probe_task *task, const char *path, char *folders, size_t room,
                      bool *before);
/* Copies the text that stands behind `mark` in the read-only data, up to the first
 * byte that no version has. */
bool probe_elf_text(epo_probe_task *task, const char *path, const char *mark, char *text,
                    size_t room);
/* The number in an exported variable of four bytes. */
bool probe_elf_number(const char *path, const char *symbol, uint32_t *number);

#endif
