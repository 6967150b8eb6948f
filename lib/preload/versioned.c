/* SPDX-License-Identifier: Apache-2.0 */
#include "preload/versioned.h"

#include <string.h>

#include "core/status.h"

#define SIZE_MAX_SANE 65536 /* larger is an uninitialised struct */

static size_t size_of(const void *versioned) {
    size_t size;
    memcpy(&size, versioned, sizeof size);
    return size;
}

epo_status epo_versioned_check(const void *caller, size_t least, const char *name) {
    if (caller == NULL)
        return epo_fail(EPO_E_ARG, "%s: found NULL, a pointer to the struct is needed", name);
    size_t size = size_of(caller);
    if (size < least || size > SIZE_MAX_SANE)
        return epo_fail(EPO_E_ARG,
                        "%s: its size field is %zu, at least %zu is needed; initialise the struct "
                        "as ep_overlap.h shows",
                        name, size, least);
    return EPO_OK;
}

epo_status epo_versioned_read(void *full, const void *caller, size_t least, const char *name) {
    epo_status status = epo_versioned_check(caller, least, name);
    if (status != EPO_OK)
        return status;
    size_t mine = size_of(full), theirs = size_of(caller);
    for (size_t i = mine; i < theirs; i++)
        if (((const unsigned char *)caller)[i] != 0)
            return epo_fail(EPO_E_VERSION,
                            "%s: the program uses a field at byte %zu that this libep_overlap does "
                            "not know; install a newer one",
                            name, i);
    memcpy((char *)full + sizeof mine, (const char *)caller + sizeof mine,
           (theirs < mine ? theirs : mine) - sizeof mine);
    return EPO_OK;
}

void epo_versioned_write(void *caller, const void *full) {
    size_t mine = size_of(full), theirs = size_of(caller);
    size_t common = theirs < mine ? theirs : mine;
    memcpy((char *)caller + sizeof mine, (const char *)full + sizeof mine, common - sizeof mine);
    if (theirs > mine)
        memset((char *)caller + mine, 0, theirs - mine);
}
