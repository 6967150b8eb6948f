/* SPDX-License-Identifier: Apache-2.0
 *
 * trust.h - opening a file that only the administrator can have written.
 */
#ifndef EPO_CORE_TRUST_H
#define EPO_CORE_TRUST_H

#include "core/status.h"

#include <stdbool.h>
#include <sys/types.h>

#define EPO_TRUST_OWNERS 3

/* Who may own what we trust: root always, and these. */
struct epo_trust {
    uid_t owners[EPO_TRUST_OWNERS];
    int count;
};

/* Opens `path` for reading: absolute, without "." and ".." parts; every folder
 * from / on and the file itself belong to a trusted owner, are not writable by
 * group or others and are no symbolic links; the file is a regular one.  (A
 * sticky folder such as /tmp is accepted above the file's own folder.)  All is
 * checked on descriptors.  `*absent` tells a file or folder that does not exist
 * from one that is refused.  On success the caller closes `*fd`. */
epo_status epo_trust_open(const char *path, const struct epo_trust *trust, int *fd, bool *absent);

/* The whole file as one string, at most `limit` bytes and without NUL bytes; to
 * be freed by the caller. */
epo_status epo_trust_read(const char *path, const struct epo_trust *trust, size_t limit,
                          char **content, bool *absent);

#endif
