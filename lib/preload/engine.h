/* SPDX-License-Identifier: Apache-2.0
 *
 * engine.h - finds and opens the engine modules.
 */
#ifndef EPO_PRELOAD_ENGINE_H
#define EPO_PRELOAD_ENGINE_H

#include <stddef.h>

#include "backend/engine.h"

#define EPO_ENGINE_WHY_MAX 256

/* The engine of `kind`, opened at the first call and never closed.  AUTO takes
 * CUDA if its module is installed and this process may use a GPU, else the host
 * engine; `why` (EPO_ENGINE_WHY_MAX bytes) then says which of the two was missing,
 * else it is "".  A module that is missing, does not load or is of another build
 * is an error that names the file.  Outputs are written on success only. */
epo_status epo_engine_open(epo_engine_kind kind, const epo_engine **out, char *why);

#endif
