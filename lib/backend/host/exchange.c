/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange.c - rows into peers' windows, and the emulated link.
 *
 * The link is a time per ordered pair of ranks during which it is occupied.  The
 * bytes are copied at once, the flag that tells of them is written when the link
 * would have delivered them: receivers see what they would see with a real link,
 * and waiting for it costs no CPU.
 */
#include "config.h"

#include "backend/host/host.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* "12", "0.5": digits with one point, whatever the locale.  *end: behind it. */
static bool decimal_parse(const char *text, const char **end, double *out) {
    double v = 0.0, scale = 1.0;
    int digits = 0;
    for (; isdigit((unsigned char)*text) && digits < 15; text++, digits++)
        v = v * 10.0 + (*text - '0');
    if (*text == '.')
        for (text++; isdigit((unsigned char)*text) && digits < 15; text++, digits++, scale *= 10.0)
            v = v * 10.0 + (*text - '0');
    *end = text;
    *out = v / scale;
    return digits > 0;
}

epo_status host_link_parse(const char *text, host_link *out) {
    host_link link = {0.0, 0.0};
    if (text != NULL && *text != '\0') {
        const char *end;
        if (!decimal_parse(text, &end, &link.gbs) || *end != ',' ||
            !decimal_parse(end + 1, &end, &link.us) || *end != '\0' || link.gbs <= 0.0)
            return epo_fail(EPO_E_ARG,
                            "%s: found \"%.40s\", allowed \"GB/s,us\" with more than 0 GB/s, as in "
                            "\"0.5,20\"",
                            EPO_ENV_HOST_LINK, text);
    }
    *out = link;
    return EPO_OK;
}

static uint64_t copy_to_peer(epo_backend *be, const epo_exchange *x, int peer) {
    uint64_t bytes = 0;
    unsigned char *window = x->window->base + (uint64_t)peer * x->window->stride;
    (void)be;
    for (int i = 0; i < x->nsend; i++) {
        const epo_segment *s = &x->send[i];
        if (s->peer != peer || s->rows == 0)
            continue;
        unsigned char *dst = window + s->dst_offset;
        const unsigned char *src = s->src;
        if (s->index == NULL) {
            memcpy(dst, src, s->rows * s->row_bytes);
        } else {
            for (uint64_t r = 0; r < s->rows; r++)
                if (s->index[r] == -1)
                    memset(dst + r * s->row_bytes, 0, s->row_bytes);
                else if (s->index[r] >= 0)
                    memcpy(dst + r * s->row_bytes, src + (uint64_t)s->index[r] * s->row_bytes,
                           s->row_bytes);
        }
        bytes += s->rows * s->row_bytes;
    }
    return bytes;
}

static void tell_peer(epo_backend *be, const epo_exchange *x, int peer, int me) {
    unsigned char *window = x->window->base + (uint64_t)peer * x->window->stride;
    uint64_t *flags = (uint64_t *)(void *)(window + x->flag_offset);
    __atomic_store_n(&flags[me], x->epoch, __ATOMIC_RELEASE);
    host_bell_ring(be->shared, peer, HOST_EAR_FLAGS);
}

/* When the link to `peer` has delivered `bytes` given to it at `now`.  It is
 * occupied by the bytes; the latency comes on top for each transfer. */
static int64_t link_due(epo_backend *be, int peer, uint64_t bytes, int64_t now) {
    if (peer == be->rank || be->link.gbs <= 0.0)
        return now;
    int64_t start = now > be->link_free_ns[peer] ? now : be->link_free_ns[peer];
    be->link_free_ns[peer] = start + (int64_t)((double)bytes / be->link.gbs);
    return be->link_free_ns[peer] + (int64_t)(be->link.us * 1e3);
}

/* In slices, so that the group's end is seen. */
static bool link_sleep(epo_backend *be, int64_t until) {
    for (int64_t now = host_now_ns(); now < until; now = host_now_ns()) {
        if (host_broken(be))
            return false;
        int64_t next = until - now > HOST_SLICE_NS ? now + HOST_SLICE_NS : until;
        struct timespec t = {next / 1000000000, next % 1000000000};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
    }
    return true;
}

static int peer_by_due(const int64_t *due, const bool *told, int count) {
    int best = -1;
    for (int p = 0; p < count; p++)
        if (!told[p] && (best < 0 || due[p] < due[best]))
            best = p;
    return best;
}

static void exchange_run(host_worker *w, host_op *op) {
    epo_backend *be = w->be;
    const epo_exchange *x = &op->u.exchange;
    const epo_peers to = epo_peers_of(x->scope, be->rank, be->ranks, be->info.nodes);
    bool linked = be->link.gbs > 0.0, told[HOST_RANKS_MAX] = {false};
    int64_t due[HOST_RANKS_MAX], now = host_now_ns();
    for (int i = 1; i <= to.count; i++) { /* this rank last: others wait longer */
        int n = (to.me + i) % to.count, peer = to.first + n * to.step;
        due[n] = link_due(be, peer, copy_to_peer(be, x, peer), now);
        if (!linked || peer == be->rank) {
            tell_peer(be, x, peer, to.me);
            told[n] = true;
        }
    }
    for (int n; (n = peer_by_due(due, told, to.count)) >= 0; told[n] = true) {
        if (!link_sleep(be, due[n]))
            return;
        tell_peer(be, x, to.first + n * to.step, to.me);
    }
}

static epo_status exchange_check(const epo_backend *be, const epo_exchange *x) {
    const uint64_t bytes = x->window->bytes;
    const epo_peers to = epo_peers_of(x->scope, be->rank, be->ranks, be->info.nodes);
    if (x->flag_offset % 8 != 0 || x->flag_offset > bytes ||
        (uint64_t)be->ranks * 8 > bytes - x->flag_offset)
        return epo_fail(EPO_E_ARG, "flags of an exchange: found offset %llu, window of %llu bytes",
                        (unsigned long long)x->flag_offset, (unsigned long long)bytes);
    for (int i = 0; i < x->nsend; i++) {
        const epo_segment *s = &x->send[i];
        const int n = s->peer - to.first;
        if (n < 0 || n % to.step != 0 || n / to.step >= to.count || s->dst_offset > bytes ||
            (s->row_bytes > 0 && s->rows > (bytes - s->dst_offset) / s->row_bytes))
            return epo_fail(
                EPO_E_ARG,
                "segment %d: %llu rows of %u bytes at %llu for rank %d of %d (scope %d) do not fit "
                "a window of %llu bytes",
                i, (unsigned long long)s->rows, s->row_bytes, (unsigned long long)s->dst_offset,
                s->peer, be->ranks, (int)x->scope, (unsigned long long)bytes);
    }
    return EPO_OK;
}

epo_status host_exchange(epo_queue *q, const epo_exchange *x, const epo_deps *deps) {
    if (q->kind != EPO_QUEUE_COMM)
        return epo_fail(EPO_E_ARG, "an exchange was given to a queue of kind %d, allowed: COMM",
                        (int)q->kind);
    host_op *op;
    epo_status status = exchange_check(q->be, x);
    if (status == EPO_OK)
        status = host_op_create(q, deps, exchange_run, &op);
    if (status != EPO_OK)
        return status;
    op->u.exchange = *x;
    return host_op_issue(q, op);
}
