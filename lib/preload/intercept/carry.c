/* SPDX-License-Identifier: Apache-2.0
 *
 * carry.c - one group's messages of one communicator, put on the lanes.
 *
 * Order.  Messages of one direction between two ranks follow each other on their lane.
 * Operations are issued in rounds: the n-th piece to every peer, then the piece before
 * it from every peer, so that each operation waits only for ones of an earlier round,
 * wherever streams share a hardware queue.
 */
#include "config.h"

#include "preload/intercept/channel.h"

#include <stdlib.h>

typedef struct flow {
    size_t message; /* index in the group; == count: done */
    uint64_t at;
    int width; /* lanes in use; 0: nothing goes this way */
} flow;

typedef struct job {
    channel *ch;
    const message *messages;
    size_t count;
    lanes *lanes;
    bool captured;
    cudaStream_t *streams; /* the different ones */
    int stream_count;
    flow send[AGREE_RANKS], recv[AGREE_RANKS];
    bool self;
} job;

#define TRY(ch, call)                                                                              \
    do {                                                                                           \
        cu_result r_ = (call);                                                                     \
        if (r_ != 0)                                                                               \
            return channel_fail((ch), #call, r_);                                                  \
    } while (0)

static bool is_ours(const job *j, const message *m) {
    return m->comm == j->ch->owner && m->carried;
}

static int index_of(const channel *ch, int rank) {
    for (int i = 0; i < ch->count; i++)
        if (channel_has(ch, i) && ch->peer[i].rank == rank)
            return i;
    return ch->agree.me;
}

/* ---- what a group needs ---- */

static void flow_seek(const job *j, flow *f, int peer, bool send) {
    while (f->message < j->count) {
        const message *m = &j->messages[f->message];
        if (is_ours(j, m) && m->send == send && m->peer == peer && f->at < m->bytes)
            return;
        f->message++;
        f->at = 0;
    }
}

static void flow_widen(const channel *ch, flow *f, uint64_t bytes) {
    const uint64_t pieces = (bytes + ch->slot_bytes - 1) / ch->slot_bytes;
    const int width = pieces < CHANNEL_WIDTH ? (int)pieces : CHANNEL_WIDTH;
    f->width = width > f->width ? width : f->width;
}

/* A set of streams that is free or already part of this capture. */
static ncclResult_t lanes_for_capture(job *j, uint64_t id) {
    channel *ch = j->ch;
    for (lanes *l = ch->capturing; l != NULL; l = l->next) {
        int status = 0;
        if (l->capture == id || l->probe == NULL ||
            (ch->cu->capturing(l->probe, &status) == 0 && status == 0)) {
            l->capture = id;
            j->lanes = l;
            return ncclSuccess;
        }
    }
    lanes *l = calloc(1, sizeof *l);
    int mode = CU_CAPTURE_RELAXED;
    if (l == NULL)
        return ncclSystemError;
    (void)ch->cu->capture_mode(&mode);
    const bool made = channel_lanes(ch, l);
    (void)ch->cu->capture_mode(&mode);
    if (!made) {
        free(l);
        return ncclSystemError;
    }
    l->capture = id;
    l->next = ch->capturing;
    ch->capturing = l;
    ch->captured = true;
    j->lanes = l;
    return ncclSuccess;
}

static ncclResult_t lanes_choose(job *j) {
    channel *ch = j->ch;
    j->lanes = &ch->eager;
    for (int i = 0; i < j->stream_count; i++) {
        int status = 0;
        uint64_t id = 0;
        if (ch->cu->capturing(j->streams[i], &status) != 0 || status != CU_CAPTURE_ACTIVE)
            continue;
        TRY(ch, ch->cu->capture_info(j->streams[i], &status, &id, NULL, NULL, NULL));
        j->captured = true;
        return lanes_for_capture(j, id);
    }
    return ncclSuccess;
}

static ncclResult_t job_open(job *j, channel *ch, const message *messages, size_t count) {
    *j = (job){.ch = ch, .messages = messages, .count = count};
    j->streams =
        count < SIZE_MAX / sizeof(cudaStream_t) ? malloc(count * sizeof(cudaStream_t)) : NULL;
    if (j->streams == NULL)
        return ncclSystemError;
    for (size_t i = 0; i < count; i++) {
        const message *m = &messages[i];
        if (!is_ours(j, m))
            continue;
        int s = 0;
        while (s < j->stream_count && j->streams[s] != m->stream)
            s++;
        if (s == j->stream_count)
            j->streams[j->stream_count++] = m->stream;
        if (m->peer == ch->owner->rank)
            j->self = true;
        else
            flow_widen(ch, &(m->send ? j->send : j->recv)[index_of(ch, m->peer)], m->bytes);
    }
    for (int i = 0; i < ch->count; i++) {
        flow_seek(j, &j->send[i], ch->peer[i].rank, true);
        flow_seek(j, &j->recv[i], ch->peer[i].rank, false);
    }
    return lanes_choose(j);
}

/* Calls `visit` for each lane that takes part. */
static ncclResult_t each_lane(job *j, ncclResult_t (*visit)(job *, cu_stream, cu_event)) {
    ncclResult_t r = ncclSuccess;
    channel *ch = j->ch;
    for (int k = 0; k < ch->count * CHANNEL_WIDTH && r == ncclSuccess; k++) {
        const int i = k / CHANNEL_WIDTH, w = k % CHANNEL_WIDTH;
        if (w < j->send[i].width)
            r = visit(j, j->lanes->send[i][w], ch->sent[i][w]);
        if (w < j->recv[i].width && r == ncclSuccess)
            r = visit(j, j->lanes->recv[i][w], ch->received[i][w]);
    }
    return j->self && r == ncclSuccess ? visit(j, j->lanes->self, ch->copied) : r;
}

/* ---- joining the program's streams ---- */

static ncclResult_t lane_begin(job *j, cu_stream lane, cu_event done) {
    (void)done;
    TRY(j->ch, j->ch->cu->stream_wait(lane, j->ch->reached, 0));
    j->lanes->probe = lane;
    return ncclSuccess;
}

/* Behind what the same lane did in a graph, or eagerly, before. */
static ncclResult_t lane_follow(job *j, cu_stream lane, cu_event done) {
    TRY(j->ch, j->ch->cu->stream_wait(lane, done, j->captured ? CU_EXTERNAL : 0));
    return ncclSuccess;
}

static ncclResult_t lane_end(job *j, cu_stream lane, cu_event done) {
    const cuda_driver *cu = j->ch->cu;
    cu_event join = done;
    if (j->captured) {
        TRY(j->ch, cu->event_record_external(done, lane, CU_EXTERNAL));
        join = j->ch->join;
    }
    TRY(j->ch, cu->event_record(join, lane));
    for (int s = 0; s < j->stream_count; s++)
        TRY(j->ch, cu->stream_wait(j->streams[s], join, 0));
    return ncclSuccess;
}

static ncclResult_t fork_lanes(job *j) {
    for (int s = 0; s < j->stream_count; s++) {
        TRY(j->ch, j->ch->cu->event_record(j->ch->reached, j->streams[s]));
        ncclResult_t r = each_lane(j, lane_begin);
        if (r != ncclSuccess)
            return r;
    }
    return j->captured || j->ch->captured ? each_lane(j, lane_follow) : ncclSuccess;
}

/* ---- pieces ---- */

static cu_pointer word_of(const channel *ch, int from, int to, uint64_t slot) {
    return ch->words + (cu_pointer)(((uint64_t)(from * AGREE_RANKS + to) * AGREE_SLOTS + slot) *
                                    sizeof(agree_word));
}

/* Where `from`'s slot lies in `to`'s window: no area for `to` itself. */
static uint64_t slot_offset(const channel *ch, int from, int to, uint64_t slot) {
    const uint64_t area = (uint64_t)(from < to ? from : from - 1);
    return (area * ch->slots + slot) * ch->slot_bytes;
}

static uint64_t piece_bytes(const channel *ch, const message *m, uint64_t at) {
    return m->bytes - at < ch->slot_bytes ? m->bytes - at : ch->slot_bytes;
}

/* A copy inside this GPU.  Plain ones are made by a kernel, which waits for its turn behind
 * a GEMM; the hint leaves them to a copy engine.  Graphs take plain ones only. */
static cu_result copy_here(job *j, cu_pointer to, cu_pointer from, size_t bytes, cu_stream lane) {
    const cuda_driver *cu = j->ch->cu;
    cu_copy_attributes attributes = {.order = CU_SOURCE_IN_ORDER, .flags = CU_OVERLAP};
    size_t first = 0;
    if (cu->copy_batch != NULL && !j->captured &&
        cu->copy_batch(&to, &from, &bytes, 1, &attributes, &first, 1, lane) == 0)
        return 0;
    return cu->copy(to, from, bytes, lane);
}

static ncclResult_t send_piece(job *j, int i) {
    channel *ch = j->ch;
    flow *f = &j->send[i];
    const message *m = &j->messages[f->message];
    const uint64_t slot = f->at / ch->slot_bytes % ch->slots, n = piece_bytes(ch, m, f->at);
    const cu_pointer word = word_of(ch, ch->agree.me, i, slot);
    const cu_stream lane = j->lanes->send[i][slot % CHANNEL_WIDTH];
    TRY(ch, ch->cu->wait_value(lane, word, 0, CU_WAIT_EQUAL));
    TRY(ch, ch->cu->copy(ch->peer[i].window + slot_offset(ch, ch->agree.me, i, slot),
                         (cu_pointer)m->source + f->at, n, lane));
    TRY(ch, ch->cu->write_value(lane, word, 1, 0));
    f->at += n;
    flow_seek(j, f, ch->peer[i].rank, true);
    return ncclSuccess;
}

static ncclResult_t recv_piece(job *j, int i) {
    channel *ch = j->ch;
    flow *f = &j->recv[i];
    const message *m = &j->messages[f->message];
    const uint64_t slot = f->at / ch->slot_bytes % ch->slots, n = piece_bytes(ch, m, f->at);
    const cu_pointer word = word_of(ch, i, ch->agree.me, slot);
    const cu_stream lane = j->lanes->recv[i][slot % CHANNEL_WIDTH];
    TRY(ch, ch->cu->wait_value(lane, word, 1, CU_WAIT_EQUAL));
    TRY(ch, copy_here(j, (cu_pointer)m->target + f->at,
                      ch->window + slot_offset(ch, i, ch->agree.me, slot), n, lane));
    TRY(ch, ch->cu->write_value(lane, word, 0, 0));
    f->at += n;
    flow_seek(j, f, ch->peer[i].rank, false);
    return ncclSuccess;
}

static ncclResult_t move_all(job *j) {
    channel *ch = j->ch;
    const int n = ch->count, me = ch->agree.me;
    ncclResult_t r = ncclSuccess;
    for (bool more = true, first = true; more && r == ncclSuccess; first = false) {
        more = first;
        for (int k = 1; k < n && r == ncclSuccess; k++) {
            const int i = (me + k) % n;
            if (j->send[i].width == 0 || j->send[i].message == j->count)
                continue;
            r = send_piece(j, i);
            more = true;
        }
        for (int k = 1; k < n && r == ncclSuccess && !first; k++) {
            const int i = (me + n - k) % n;
            if (j->recv[i].width == 0 || j->recv[i].message == j->count)
                continue;
            r = recv_piece(j, i);
            more = true;
        }
    }
    return r;
}

/* The k-th message to oneself is the k-th from oneself (group.c has seen to it).  Not on the
 * program's stream: the default one takes no copy of the kind wanted. */
static ncclResult_t move_self(job *j) {
    const int rank = j->ch->owner->rank;
    size_t r = 0;
    for (size_t s = 0; s < j->count && j->self; s++) {
        const message *from = &j->messages[s], *to;
        if (!is_ours(j, from) || from->peer != rank || !from->send)
            continue;
        for (to = &j->messages[r]; !is_ours(j, to) || to->peer != rank || to->send;)
            to = &j->messages[++r];
        r++;
        if (to->target != from->source)
            TRY(j->ch, copy_here(j, (cu_pointer)to->target, (cu_pointer)from->source, from->bytes,
                                 j->lanes->self));
    }
    return ncclSuccess;
}

/* ---- the two halves of a group ---- */

static ncclResult_t in_context(channel *ch, const message *messages, size_t count,
                               ncclResult_t (*work)(job *)) {
    job j;
    cu_context popped;
    pthread_mutex_lock(&ch->lock);
    ncclResult_t r = ncclSuccess;
    const cu_result pushed = ch->cu->context_push(ch->context);
    if (pushed != 0)
        r = channel_fail(ch, "cuCtxPushCurrent", pushed);
    if (r == ncclSuccess) {
        r = job_open(&j, ch, messages, count);
        if (r == ncclSuccess && j.stream_count > 0)
            r = work(&j);
        free(j.streams);
        (void)ch->cu->context_pop(&popped);
    }
    pthread_mutex_unlock(&ch->lock);
    return r;
}

static ncclResult_t carry_lanes(job *j) {
    ncclResult_t r = move_all(j);
    if (r == ncclSuccess)
        r = move_self(j);
    return r == ncclSuccess ? each_lane(j, lane_end) : r;
}

ncclResult_t channel_fork(channel *ch, const message *messages, size_t count) {
    return in_context(ch, messages, count, fork_lanes);
}

ncclResult_t channel_carry(channel *ch, const message *messages, size_t count) {
    return in_context(ch, messages, count, carry_lanes);
}
