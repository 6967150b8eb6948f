/* SPDX-License-Identifier: Apache-2.0
 *
 * scratch.h - a temporary file without a name.
 */
#ifndef EPO_CORE_SCRATCH_H
#define EPO_CORE_SCRATCH_H

#include <stdio.h>

/* Open for reading and writing, gone when it is closed; in TMPDIR, or where that is unset
 * in /tmp, /var/tmp or the working folder.  NULL with errno of the first of them.
 * (glibc's tmpfile() looks at /tmp alone, whatever TMPDIR says.) */
FILE *epo_scratch_open(void);

#endif
