/* SPDX-License-Identifier: Apache-2.0
 *
 * shared.c - what the tasks of one step on one node tell each other: memory that
 * they inherit, with a lock that survives a killed owner.
 */
#include "context.h"

#include <errno.h>
#include <sys/mman.h>

struct ep_shared *ep_shared_create(void) {
    struct ep_shared *shared =
        mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_mutexattr_t attributes;
    if (shared == MAP_FAILED)
        return NULL;
    int failed = pthread_mutexattr_init(&attributes);
    if (failed == 0) {
        failed = pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED) != 0 ||
                 pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST) != 0 ||
                 pthread_mutex_init(&shared->lock, &attributes) != 0;
        pthread_mutexattr_destroy(&attributes);
    }
    if (failed != 0) {
        munmap(shared, sizeof *shared);
        return NULL;
    }
    return shared;
}

void ep_shared_destroy(struct ep_shared *shared) {
    if (shared != NULL)
        munmap(shared, sizeof *shared);
}

bool ep_shared_lock(struct ep_shared *shared) {
    int locked = pthread_mutex_lock(&shared->lock);
    if (locked == EOWNERDEAD)
        locked = pthread_mutex_consistent(&shared->lock);
    return locked == 0;
}

void ep_shared_unlock(struct ep_shared *shared) { pthread_mutex_unlock(&shared->lock); }
