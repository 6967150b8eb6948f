/* SPDX-License-Identifier: Apache-2.0
 *
 * far.c - ranks of several machines: small allgathers over TCP, by way of rank 0.
 *
 * How they get their connections is far_meet.c's.  A frame is a head and bytes; a rank that
 * fails sends its error instead, which everybody gets.
 */
#include "config.h"

#include "backend/far.h"
#include "backend/host/far_meet.h"
#include "core/status.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FAR_TEXT 256
#define FAR_RANKS 256
enum { FAR_DATA = 1, FAR_FAIL = 2 };

typedef struct far_head {
    uint64_t turn;
    uint32_t kind, bytes;
} far_head;

typedef struct far_failure {
    int32_t status;
    char text[FAR_TEXT];
} far_failure;

struct epo_far {
    int rank, ranks;
    double timeout_s;
    uint64_t turn;
    int *fd; /* [ranks]; -1: none.  Rank 0 has one to each, the others to rank 0 */
    int listener;
    pthread_mutex_t sending; /* a failure may be told while another thread exchanges */
};

static epo_status far_lost(const epo_far *f, int rank, const char *what, int error) {
    return epo_fail(error == ETIMEDOUT ? EPO_E_TIMEOUT : EPO_E_PEER,
                    error == ETIMEDOUT ? "rank %d: %s: rank %d did not come within %.0f s"
                                       : "rank %d: %s: the connection to rank %d has ended (%.0f s "
                                         "were allowed); it ended, or another rank did",
                    f->rank, what, rank, f->timeout_s);
}

/* ---- connecting ------------------------------------------------------------- */

static epo_status far_gather_ranks(epo_far *f, const far_card *card) {
    const bool complete = far_gather(f->listener, card, f->ranks, f->fd, far_now() + f->timeout_s);
    close(f->listener); /* nobody else is to come */
    f->listener = -1;
    for (int r = 1; r < f->ranks && !complete; r++)
        if (f->fd[r] < 0)
            return far_lost(f, r, "meeting", ETIMEDOUT);
    return EPO_OK;
}

static epo_status far_join(epo_far *f, const far_card *card) {
    far_stage stage;
    f->fd[0] = far_reach(card, f->rank, f->ranks, far_now() + f->timeout_s, &stage);
    if (f->fd[0] >= 0)
        return EPO_OK;
    if (stage == FAR_NOWHERE)
        return epo_fail(EPO_E_PEER,
                        "rank %d: none of rank 0's %d addresses leads to it (port %d) within %.0f "
                        "s; the machines must reach each other by TCP",
                        f->rank, card->count, card->port, f->timeout_s);
    return epo_fail(
        EPO_E_PEER,
        stage == FAR_REACHED
            ? "rank %d: meeting: whoever answers at rank 0's addresses (port %d) did "
              "not prove within %.0f s that it is rank 0"
            : "rank %d: meeting: no welcome from rank 0 (port %d) within %.0f s, though "
              "it was reached: it has ended, or waits for no more ranks",
        f->rank, card->port, f->timeout_s);
}

static epo_far *far_new(int rank, int ranks, double timeout_s) {
    epo_far *f = calloc(1, sizeof *f);
    if (f == NULL || (f->fd = malloc((size_t)ranks * sizeof *f->fd)) == NULL) {
        free(f);
        return NULL;
    }
    f->rank = rank;
    f->ranks = ranks;
    f->timeout_s = timeout_s;
    f->listener = -1;
    pthread_mutex_init(&f->sending, NULL);
    for (int r = 0; r < ranks; r++)
        f->fd[r] = -1;
    return f;
}

/* Everybody's card; rank 0's goes to *zero, and the first that is in error is everybody's. */
static epo_status far_cards(const epo_bootstrap *bootstrap, int rank, int ranks, epo_status mine,
                            far_card *card, far_card *zero) {
    far_card all[FAR_RANKS]; /* no memory that could be lacking: the others wait */
    if (ranks > FAR_RANKS)
        return epo_fail(EPO_E_ARG, "ranks: found %d, allowed 1..%d", ranks, FAR_RANKS);
    char text[EPO_ERROR_MAX];
    snprintf(text, sizeof text, "%s", epo_fail_text());
    card->status = (int32_t)mine;
    if (mine != EPO_OK)
        snprintf(card->why, sizeof card->why, "%.*s", (int)sizeof card->why - 1, text);
    const int rc = bootstrap->allgather(bootstrap->ctx, card, sizeof *card, all);
    if (mine != EPO_OK)
        return epo_fail(mine, "%s", text);
    if (rc != 0)
        return epo_fail(EPO_E_PEER, "rank %d: the caller's bootstrap failed", rank);
    for (int r = 0; r < ranks; r++)
        if (all[r].status != EPO_OK)
            return epo_fail(EPO_E_PEER, "%.*s", (int)sizeof all[r].why - 1, all[r].why);
    *zero = all[0];
    return EPO_OK;
}

epo_status epo_far_open(const epo_bootstrap *bootstrap, int rank, int ranks, double timeout_s,
                        epo_far **out) {
    far_card card = {.count = 0}, zero;
    epo_far *f = far_new(rank, ranks, timeout_s);
    epo_status status =
        f == NULL ? epo_fail(EPO_E_NOMEM, "rank %d: no memory for %d ranks", rank, ranks) : EPO_OK;
    if (status == EPO_OK && rank == 0)
        status = far_listen(&card, &f->listener);
    status = far_cards(bootstrap, rank, ranks, status, &card, &zero);
    if (status == EPO_OK)
        status = rank == 0 ? far_gather_ranks(f, &card) : far_join(f, &zero);
    if (status != EPO_OK) {
        epo_far_close(f);
        return status;
    }
    *out = f;
    return EPO_OK;
}

void epo_far_close(epo_far *f) {
    if (f == NULL)
        return;
    for (int r = 0; r < f->ranks; r++)
        if (f->fd[r] >= 0)
            close(f->fd[r]);
    if (f->listener >= 0)
        close(f->listener);
    pthread_mutex_destroy(&f->sending);
    free(f->fd);
    free(f);
}

/* ---- together ---------------------------------------------------------------- */

/* `rank`'s frame of this turn. */
static epo_status far_take(epo_far *f, int rank, void *data, size_t bytes, double until) {
    far_head head = {0};
    far_failure failure;
    int error = far_move(f->fd[rank], &head, sizeof head, false, until);
    if (error == 0 && head.kind == FAR_FAIL && head.bytes == sizeof failure) {
        error = far_move(f->fd[rank], &failure, sizeof failure, false, until);
        failure.text[FAR_TEXT - 1] = '\0';
        if (error == 0)
            return epo_fail(failure.status > EPO_OK && failure.status <= EPO_E_VERSION
                                ? (epo_status)failure.status
                                : EPO_E_PEER,
                            "%s", failure.text);
    }
    if (error == 0 && (head.kind != FAR_DATA || head.turn != f->turn || head.bytes != bytes))
        return epo_fail(EPO_E_PEER,
                        "the ranks disagree: rank %d is in exchange %llu of %u bytes, rank %d in "
                        "%llu of %zu",
                        rank, (unsigned long long)head.turn, head.bytes, f->rank,
                        (unsigned long long)f->turn, bytes);
    if (error == 0 && bytes > 0)
        error = far_move(f->fd[rank], data, bytes, false, until);
    return error == 0 ? EPO_OK : far_lost(f, rank, "allgather", error);
}

static epo_status far_give(epo_far *f, int rank, uint32_t kind, const void *data, size_t bytes,
                           double until) {
    /* a failure may be told by another thread, and is of no turn */
    const far_head head = {kind == FAR_DATA ? f->turn : 0, kind, (uint32_t)bytes};
    pthread_mutex_lock(&f->sending);
    int error = far_send(f->fd[rank], &head, sizeof head, until);
    if (error == 0 && bytes > 0)
        error = far_send(f->fd[rank], data, bytes, until);
    pthread_mutex_unlock(&f->sending);
    return error == 0 ? EPO_OK : far_lost(f, rank, "allgather", error);
}

void epo_far_fail(epo_far *f, epo_status status, const char *text) {
    far_failure failure = {.status = (int32_t)status};
    const double until = far_now() + 1;
    snprintf(failure.text, sizeof failure.text, "%s", text);
    for (int r = 0; r < f->ranks; r++)
        if (f->fd[r] >= 0)
            (void)far_give(f, r, FAR_FAIL, &failure, sizeof failure, until);
}

epo_status epo_far_allgather(epo_far *f, const void *mine, size_t bytes, void *all) {
    const double until = far_now() + f->timeout_s;
    const size_t whole = bytes * (size_t)f->ranks;
    char text[FAR_TEXT];
    epo_status status =
        whole > UINT32_MAX
            ? epo_fail(EPO_E_ARG, "rank %d: an exchange of %zu bytes", f->rank, whole)
            : EPO_OK;
    f->turn++;
    if (f->rank != 0) {
        if (status == EPO_OK)
            status = far_give(f, 0, FAR_DATA, mine, bytes, until);
        /* Rank 0 knows who is late, and says so when its own time is over. */
        return status == EPO_OK ? far_take(f, 0, all, whole, until + 1 + f->timeout_s / 4) : status;
    }
    if (bytes > 0)
        memcpy(all, mine, bytes);
    for (int r = 1; r < f->ranks && status == EPO_OK; r++)
        status = far_take(f, r, (char *)all + (size_t)r * bytes, bytes, until);
    for (int r = 1; r < f->ranks && status == EPO_OK; r++)
        status = far_give(f, r, FAR_DATA, all, whole, until);
    if (status != EPO_OK) { /* rank 0 tells all: they wait for it */
        snprintf(text, sizeof text, "%s", epo_fail_text());
        epo_far_fail(f, status, text);
        epo_fail(status, "%s", text);
    }
    return status;
}
