/* SPDX-License-Identifier: Apache-2.0
 *
 * limited.h - a limit for calls of others that know none.
 */
#ifndef EPO_BACKEND_LIMITED_H
#define EPO_BACKEND_LIMITED_H

#include <pthread.h>

#include "ep_overlap.h"

/* Runs `fn(ctx)` on a thread of its own and asks `look(asks)` now and then whether to wait on.
 * EPO_OK: fn has returned.  Else what `look` said, or that there is no thread; ctx is not the
 * caller's any more then: `late(ctx)` is called behind fn, should that ever return.  While a
 * thread is left so, exit() keeps its status but calls no handler that was registered before. */
epo_status epo_limited_call(void (*fn)(void *ctx), void (*late)(void *ctx), void *ctx,
                            epo_status (*look)(void *asks), void *asks);

/* With the lock: waits for `wake`, whose clock is CLOCK_MONOTONIC, `ns` (below a second) at most.
 */
void epo_limited_nap(pthread_cond_t *wake, pthread_mutex_t *lock, long ns);

#endif
