/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls that know no limit: those that return, those that do not, and those that return just
 * then.
 */
#include "backend/limited.h"
#include "core/status.h"
#include "unit.h"

#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef struct call {
    sem_t go; /* fn returns behind it */
    int result;
    sem_t *gone; /* `late` says so */
} call;

static void call_run(void *ctx) {
    call *c = ctx;
    while (sem_wait(&c->go) != 0)
        ;
    c->result = 42;
}

static _Atomic int late_calls;

static void call_late(void *ctx) {
    call *c = ctx;
    sem_t *gone = c->gone;
    atomic_fetch_add(&late_calls, 1);
    sem_destroy(&c->go);
    free(c);
    if (gone != NULL)
        sem_post(gone);
}

static call *call_make(sem_t *gone, unsigned go) {
    call *c = calloc(1, sizeof *c);
    sem_init(&c->go, 0, go);
    c->gone = gone;
    return c;
}

typedef struct asked {
    int count, refuse_at;
    sem_t *release; /* at the last question */
} asked;

static epo_status look(void *asks) {
    asked *a = asks;
    if (++a->count < a->refuse_at)
        return EPO_OK;
    if (a->release != NULL)
        sem_post(a->release);
    return epo_fail(EPO_E_TIMEOUT, "rank 1 did not come");
}

static void a_call_that_returns(void) {
    asked a = {0, 1 << 30, NULL};
    call *c = call_make(NULL, 1);
    CU_ASSERT_EQUAL(epo_limited_call(call_run, call_late, c, look, &a), EPO_OK);
    CU_ASSERT_EQUAL(c->result, 42);
    call_late(c);
    CU_ASSERT_EQUAL(atomic_exchange(&late_calls, 0), 1);
}

static void a_call_that_does_not(void) {
    asked a = {0, 3, NULL};
    sem_t gone;
    sem_init(&gone, 0, 0);
    call *c = call_make(&gone, 0);
    sem_t *go = &c->go;
    CU_ASSERT_EQUAL(epo_limited_call(call_run, call_late, c, look, &a), EPO_E_TIMEOUT);
    CU_ASSERT_STRING_EQUAL(epo_fail_text(), "rank 1 did not come");
    CU_ASSERT_EQUAL(a.count, 3);
    CU_ASSERT_EQUAL(atomic_load(&late_calls), 0); /* it is still under way */
    sem_post(go);
    while (sem_wait(&gone) != 0)
        ;
    CU_ASSERT_EQUAL(atomic_exchange(&late_calls, 0), 1);
    sem_destroy(&gone);
}

/* It returns while the caller gives up: one of the two has it afterwards, never both. */
static void a_call_that_returns_just_then(void) {
    for (int i = 0; i < 50; i++) {
        sem_t gone;
        sem_init(&gone, 0, 0);
        call *c = call_make(&gone, 0);
        asked a = {0, 1, &c->go};
        if (epo_limited_call(call_run, call_late, c, look, &a) == EPO_OK) {
            CU_ASSERT_EQUAL(c->result, 42);
            call_late(c);
        }
        while (sem_wait(&gone) != 0)
            ;
        CU_ASSERT_EQUAL(atomic_exchange(&late_calls, 0), 1);
        sem_destroy(&gone);
    }
}

/* ---- a process that ends while a thread is left ---- */

/* As a library's end, which the thread that is inside does not survive. */
static void library_end(void) { raise(SIGSEGV); }
static void call_handler(void) { _exit(5); }

static int said_by(pid_t process) {
    int said = 0;
    while (waitpid(process, &said, 0) < 0)
        ;
    return said;
}

static int end_of(unsigned go, int status) {
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0) {
        asked a = {0, 3, NULL};
        call *c = call_make(NULL, go);
        if (go == 0)
            atexit(library_end);
        const epo_status left = epo_limited_call(call_run, call_late, c, look, &a);
        exit((left == EPO_OK) == (go > 0) ? status : 99);
    }
    return said_by(pid);
}

static void an_end_keeps_its_status(void) {
    const int kept[] = {0, 1, 77};
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) {
        const int said = end_of(0, kept[i]);
        CU_ASSERT(WIFEXITED(said) && WEXITSTATUS(said) == kept[i]);
    }
    const int said = end_of(1, 3);
    CU_ASSERT(WIFEXITED(said) && WEXITSTATUS(said) == 3);
}

/* Its call has returned by then: the end is the usual one, with every handler. */
static void an_end_after_its_return(void) {
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0) {
        asked a = {0, 3, NULL};
        call *c = call_make(NULL, 0);
        sem_t *go = &c->go;
        atexit(call_handler);
        if (epo_limited_call(call_run, call_late, c, look, &a) != EPO_E_TIMEOUT)
            _exit(99);
        sem_post(go);
        exit(1);
    }
    const int said = said_by(pid);
    CU_ASSERT(WIFEXITED(said) && WEXITSTATUS(said) == 5);
}

/* A fork has none of the threads: its end is the usual one. */
static void an_end_of_a_child(void) {
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0) {
        asked a = {0, 3, NULL};
        atexit(call_handler);
        if (epo_limited_call(call_run, call_late, call_make(NULL, 0), look, &a) != EPO_E_TIMEOUT)
            _exit(99);
        const pid_t child = fork();
        if (child == 0)
            exit(1);
        const int said = said_by(child);
        _exit(WIFEXITED(said) ? WEXITSTATUS(said) : 98);
    }
    const int said = said_by(pid);
    CU_ASSERT(WIFEXITED(said) && WEXITSTATUS(said) == 5);
}

int main(void) {
    static const CU_TestInfo tests[] = {
        {"a call that returns", a_call_that_returns},
        {"a call that does not", a_call_that_does_not},
        {"a call that returns just then", a_call_that_returns_just_then},
        {"a thread is left: the end keeps its status", an_end_keeps_its_status},
        {"a thread was left: the end is the usual one", an_end_after_its_return},
        {"an end of a child of it", an_end_of_a_child},
        CU_TEST_INFO_NULL,
    };
    return unit_run("limited", tests);
}
