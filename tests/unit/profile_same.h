/* SPDX-License-Identifier: Apache-2.0
 *
 * profile_same.h - do two readings of one file say the same?
 */
#ifndef EPO_TESTS_PROFILE_SAME_H
#define EPO_TESTS_PROFILE_SAME_H

#include "trace/profile.h"

#include <string.h>

static inline bool profile_same_unit(epo_profile *a, epo_profile *b, size_t index) {
    const epo_profile_unit *x = epo_profile_unit_at(a, index), *y = epo_profile_unit_at(b, index);
    epo_profile_times s, t;
    bool measured = epo_profile_measure(a, index, INT64_MIN, INT64_MAX, &s, NULL) == EPO_OK &&
                    epo_profile_measure(b, index, INT64_MIN, INT64_MAX, &t, NULL) == EPO_OK;
    return measured && memcmp(&s, &t, sizeof s) == 0 && x->process == y->process &&
           x->device == y->device && x->kernels == y->kernels && x->copies == y->copies &&
           memcmp(x->count, y->count, sizeof x->count) == 0 &&
           x->send_recv_streams == y->send_recv_streams;
}

static inline bool profile_same(epo_profile *a, epo_profile *b) {
    epo_profile_facts x = epo_profile_tell(a), y = epo_profile_tell(b);
    int64_t first[2] = {0}, last[2] = {0};
    bool same =
        x.units == y.units && x.kernels == y.kernels && x.copies == y.copies &&
        x.skipped == y.skipped && x.flex_kernels == y.flex_kernels &&
        x.copies_unclassified == y.copies_unclassified &&
        epo_profile_name_count(a) == epo_profile_name_count(b) &&
        epo_profile_extent(a, &first[0], &last[0]) == epo_profile_extent(b, &first[1], &last[1]) &&
        first[0] == first[1] && last[0] == last[1];
    for (size_t i = 0; same && i < epo_profile_name_count(a); i++) {
        epo_profile_name m = epo_profile_name_at(a, i), n = epo_profile_name_at(b, i);
        same = strcmp(m.name, n.name) == 0 && m.kind == n.kind && m.count == n.count;
    }
    for (size_t i = 0; same && i < x.units; i++)
        same = profile_same_unit(a, b, i);
    return same;
}

#endif
