/* SPDX-License-Identifier: Apache-2.0
 *
 * group_card.h - the first thing that ranks tell each other through a caller's
 * bootstrap: whether this one's arguments were right.  So an error of one rank is an
 * error of all, and none waits for a rank that has returned.
 */
#ifndef EPO_CORE_GROUP_CARD_H
#define EPO_CORE_GROUP_CARD_H

#include "core/status.h"

/* [collective over the bootstrap]  `mine`: what this rank found, its text in
 * epo_fail_text().  Returns `mine` if it is an error, else the first refusing rank's
 * with its text. */
epo_status epo_group_card(const epo_bootstrap *bootstrap, int rank, int ranks, epo_status mine);

#endif
