/* SPDX-License-Identifier: Apache-2.0
 *
 * member.h - EXPECT for threads that play ranks without a backend: `m` has the rank and counts
 * what was wrong.
 */
#ifndef EPO_TESTS_MEMBER_H
#define EPO_TESTS_MEMBER_H

#include "core/status.h"

#include <stdio.h>

#define EXPECT(cond)                                                                               \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            m->wrong++;                                                                            \
            fprintf(stderr, "%s:%d: rank %d: %s [%s]\n", __FILE__, __LINE__, m->rank, #cond,       \
                    epo_fail_text());                                                              \
        }                                                                                          \
    } while (0)

#endif
