/* SPDX-License-Identifier: Apache-2.0 */
#include "wrap_spank.h"

#include "core/text.h"

#include <stdarg.h>
#include <stdio.h>

void wrap_format(void (*to)(const char *line), const char *format, ...) {
    char line[2 * EPO_ERROR_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    epo_text_clean(line);
    to(line);
}
