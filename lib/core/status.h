/* SPDX-License-Identifier: Apache-2.0
 *
 * status.h - one home for the error text.  The first to detect an error writes
 * its line; callers pass the status on and do not add to it.
 */
#ifndef EPO_CORE_STATUS_H
#define EPO_CORE_STATUS_H

#include "ep_overlap.h"

#define EPO_ERROR_MAX 1024

#if defined(__GNUC__)
#define EPO_PRINTF(f, a) __attribute__((format(printf, f, a)))
#else
#define EPO_PRINTF(f, a)
#endif

/* Sets the calling thread's error line (cut at EPO_ERROR_MAX, line breaks and
 * control characters become '?') and returns `status`:
 *     return epo_fail(EPO_E_ARG, "top_k: found %d, allowed 1..32", k); */
epo_status epo_fail(epo_status status, const char *format, ...) EPO_PRINTF(2, 3);
/* The line as it stands; never NULL. */
const char *epo_fail_text(void);
void epo_fail_clear(void);
/* "EPO_E_ARG"; never NULL. */
const char *epo_fail_name(epo_status status);

/* tests/lint/analyze.sh: a failure is not EPO_OK, which no analyzer can see. */
#ifdef EPO_ANALYZER
#define epo_fail(status, ...) ((void)(epo_fail)((status), __VA_ARGS__), (status))
#endif

#endif
