/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPO_TESTS_FUZZ_PROFILE_H
#define EPO_TESTS_FUZZ_PROFILE_H

#include "fuzz.h"

#include "trace/profile.h"

/* Reads the bytes by `read` and measures what came out, with memory for few spans. */
static inline void fuzz_profile(const uint8_t *data, size_t size,
                                epo_status (*reader)(const char *, const epo_profile_options *,
                                                     epo_profile **)) {
    char path[64];
    const epo_profile_options options = {.budget = 64};
    static epo_profile_timeline timeline;
    epo_profile *profile = NULL;
    int fd = fuzz_file(data, size, path, sizeof path);
    if (fd >= 0 && reader(path, &options, &profile) == EPO_OK)
        for (size_t i = 0; i < epo_profile_tell(profile).units; i++) {
            epo_profile_times t;
            memset(&timeline, 0, sizeof timeline);
            if (!epo_profile_extent(profile, &timeline.first, &timeline.last))
                break;
            if (epo_profile_measure(profile, i, INT64_MIN, INT64_MAX, &t, &timeline) == EPO_OK &&
                (t.overlapped + t.exposed != t.comm || t.comm > t.busy))
                abort();
        }
    epo_profile_destroy(profile);
    if (fd >= 0)
        close(fd);
}

#endif
