/* SPDX-License-Identifier: Apache-2.0
 *
 * Chrome traces, by the fast way and by the JSON parser alone: both say the same.
 */
#include "fuzz_profile.h"

#include "../unit/profile_same.h"

static bool read_by(bool plain, const char *path, epo_profile **out) {
    const epo_profile_options options = {.budget = 64, .plain = plain};
    return epo_profile_read_chrome(path, &options, out) == EPO_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char path[64];
    epo_profile *fast = NULL, *plain = NULL;
    int fd = fuzz_file(data, size, path, sizeof path);
    if (fd >= 0) {
        bool fine = read_by(false, path, &fast);
        if (fine != read_by(true, path, &plain) || (fine && !profile_same(fast, plain)))
            abort();
        epo_profile_destroy(fast);
        epo_profile_destroy(plain);
        close(fd);
    }
    fuzz_profile(data, size, epo_profile_read_chrome);
    return 0;
}
