/* SPDX-License-Identifier: Apache-2.0 */
#include "core/status.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char error_text[EPO_ERROR_MAX];

epo_status epo_fail(epo_status status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(error_text, sizeof error_text, format, args);
    va_end(args);
    for (char *c = error_text; *c != '\0'; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            *c = '?';
    return status;
}

const char *epo_fail_text(void) { return error_text; }

void epo_fail_clear(void) { error_text[0] = '\0'; }

const char *epo_fail_name(epo_status status) {
    switch (status) {
    case EPO_OK: return "EPO_OK";
    case EPO_E_ARG: return "EPO_E_ARG";
    case EPO_E_STATE: return "EPO_E_STATE";
    case EPO_E_NOMEM: return "EPO_E_NOMEM";
    case EPO_E_SYSTEM: return "EPO_E_SYSTEM";
    case EPO_E_TIMEOUT: return "EPO_E_TIMEOUT";
    case EPO_E_PEER: return "EPO_E_PEER";
    case EPO_E_OVERFLOW: return "EPO_E_OVERFLOW";
    case EPO_E_INDEX: return "EPO_E_INDEX";
    case EPO_E_UNSUPPORTED: return "EPO_E_UNSUPPORTED";
    case EPO_E_VERSION: return "EPO_E_VERSION";
    }
    return "EPO_E_?";
}
