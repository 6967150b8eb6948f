/* SPDX-License-Identifier: Apache-2.0
 *
 * carry.c - one group's messages of one communicator: which of them both ends agree on, and
 * those on the program's stream.
 *
 * Messages are numbered as NCCL matches them: the k-th that a rank sends to another is the k-th
 * that the other receives from it.  Every message counts, small ones too, so numbers agree
 * whatever the two ends think of it.  A graph breaks that, because it repeats: from the first
 * that is captured on, everything of the communicator is NCCL's.
 */
#include "config.h"

#include "preload/intercept/channel.h"
#include "preload/record/recorder.h"

#define TIDY_S 0.5

typedef struct way { /* what this group has with one peer; indices of messages, -1: none */
    int send, recv;
    bool many; /* more than one message in a direction */
    bool sends, receives;
    agree_offer offer, mine; /* offer: theirs */
    bool offered;
    cu_pointer to;
} way;

typedef struct job {
    channel *ch;
    message *messages;
    size_t count;
    cudaStream_t stream, side;     /* side: where ours goes */
    bool streams, captured, mixed; /* streams: more than one; mixed: NCCL has a part, too */
    bool self;                     /* something goes to oneself, on a stream beside it */
    way way[AGREE_RANKS];
    channel_words words; /* not on the stream yet */
} job;

#define TRY(ch, call)                                                                              \
    do {                                                                                           \
        cu_result r_ = (call);                                                                     \
        if (r_ != 0)                                                                               \
            return channel_fail((ch), #call, r_);                                                  \
    } while (0)

/* ---- what the group has ---- */

static void look_at(job *j, size_t k, int i) {
    const message *m = &j->messages[k];
    way *w = &j->way[i];
    int *place = m->send ? &w->send : &w->recv;
    w->many = w->many || *place >= 0;
    *place = (int)k;
}

static void number(channel *ch, message *m, int i) {
    m->number = m->send ? ++ch->peer[i].sent : ++ch->peer[i].received;
}

static void job_open(job *j, channel *ch, message *messages, size_t count) {
    bool first = true;
    *j = (job){.ch = ch, .messages = messages, .count = count};
    for (int i = 0; i < AGREE_RANKS; i++)
        j->way[i].send = j->way[i].recv = -1;
    for (size_t k = 0; k < count; k++) {
        message *m = &messages[k];
        if (m->comm != ch->owner)
            continue;
        j->streams = j->streams || (!first && m->stream != j->stream);
        j->stream = m->stream;
        first = false;
        const int i = channel_index(ch, m->peer);
        if (i < 0)
            continue;
        number(ch, m, i);
        look_at(j, k, i);
    }
    int status = 0;
    j->captured = !first && ch->cu->capturing(j->stream, &status) == 0 && status != 0;
}

static agree_pair *pair_of(const channel *ch, const message *m, int i) {
    return m->send ? channel_out(ch, i) : channel_in(ch, i);
}

static void refuse(const channel *ch, message *m, int i, fallback why) {
    m->why = why;
    agree_refuse(pair_of(ch, m, i), m->number, why);
}

/* The index of the peer; -1: it is none of this channel's. */
static int peer_of(const job *j, const message *m) {
    return m->comm == j->ch->owner ? channel_index(j->ch, m->peer) : -1;
}

/* All messages of the group that have a peer here, in one direction or the other. */
static void refuse_all(job *j, fallback why) {
    for (size_t k = 0; k < j->count; k++) {
        message *m = &j->messages[k];
        const int i = peer_of(j, m);
        if (i >= 0)
            refuse(j->ch, m, i, why);
    }
}

/* ---- agreeing ---- */

/* Why the two messages with a peer are NCCL's whatever becomes of them; both ends say the same.
 * One each way, both large enough: only then do both ends stand in such a group.  The first ones
 * are NCCL's, which connects with them: later it would wait in the program's call for a peer that
 * may not come, where it would not without us. */
static fallback way_why(const job *j, int i) {
    const way *w = &j->way[i];
    if (w->many)
        return FALLBACK_MANY;
    if (w->send < 0 || w->recv < 0 ||
        !epo_terms_carry(&j->ch->peer[i].terms, j->messages[w->send].bytes) ||
        !epo_terms_carry(&j->ch->peer[i].terms, j->messages[w->recv].bytes))
        return FALLBACK_ONE_WAY;
    return j->messages[w->send].number == 1 || j->messages[w->recv].number == 1 ? FALLBACK_FIRST
                                                                                : FALLBACK_NONE;
}

static bool way_fits(const job *j, int i) { return way_why(j, i) == FALLBACK_NONE; }

/* Of a message that one of the ends has refused. */
static fallback why_refused(agree_pair *p, uint32_t number_) {
    const unsigned why = agree_why(p, number_);
    return why > FALLBACK_NONE && why < FALLBACKS ? (fallback)why : FALLBACK_LATE;
}

static bool offer(job *j, int i) {
    message *m = &j->messages[j->way[i].recv];
    agree_pair *p = channel_in(j->ch, i);
    agree_offer *mine = &j->way[i].mine;
    const fallback why = reach_offer(j->ch, i, (cu_pointer)m->target, m->bytes, mine);
    if (why != FALLBACK_NONE) {
        refuse(j->ch, m, i, why);
        return false;
    }
    mine->ticket = j->ch->peer[i].ticket + 1;
    if (agree_give(p, m->number, mine))
        return true;
    m->why = why_refused(p, m->number);
    return false;
}

/* This rank's part of every way: offers first, so that no rank waits for another in a ring. */
static void offer_all(job *j) {
    for (int i = 0; i < j->ch->count; i++) {
        way *w = &j->way[i];
        const fallback why = channel_has(j->ch, i) ? way_why(j, i) : FALLBACK_PEER;
        w->sends = why == FALLBACK_NONE;
        w->receives = w->offered = w->sends && offer(j, i);
        if (w->send >= 0 && !w->sends)
            refuse(j->ch, &j->messages[w->send], i, why);
        if (w->recv >= 0 && !w->sends)
            refuse(j->ch, &j->messages[w->recv], i, why);
    }
}

static void take_all(job *j, const agree_limit *limit) {
    for (int i = 0; i < j->ch->count; i++) {
        way *w = &j->way[i];
        if (!w->sends)
            continue;
        agree_pair *p = channel_out(j->ch, i);
        message *m = &j->messages[w->send];
        w->sends = false;
        if (agree_get(p, m->number, limit, &w->offer)) {
            fallback why = FALLBACK_UNREACHED;
            w->to = reach_open(j->ch, i, &w->offer, &why);
            if (w->to == 0)
                agree_refuse(p, m->number, why);
            w->sends = w->to != 0 && agree_take(p, m->number);
        }
        if (!w->sends)
            m->why = why_refused(p, m->number);
    }
}

static void hear_all(job *j, const agree_limit *limit) {
    for (int i = 0; i < j->ch->count; i++) {
        way *w = &j->way[i];
        agree_pair *p = channel_in(j->ch, i);
        if (!w->offered)
            continue;
        message *m = &j->messages[w->recv];
        w->receives = agree_taken(p, m->number, limit);
        if (!w->receives)
            m->why = why_refused(p, m->number);
        if ((w->mine.id & PIECES_ID) != 0 &&
            (w->receives || m->why == FALLBACK_UNREACHED || m->why == FALLBACK_FILES))
            pieces_heard(j->ch, i, w->mine.id, w->receives ? FALLBACK_NONE : m->why);
    }
}

/* From now on all of the communicator is NCCL's, at every rank. */
static void close_room(channel *ch, fallback why) {
    unsigned open = 0;
    (void)atomic_compare_exchange_strong(&ch->agree.room->closed, &open, why);
}

/* More than one message to a peer in one direction, or a graph: none is ours. */
static fallback all_refused(job *j) {
    channel *ch = j->ch;
    if (j->captured)
        close_room(ch, FALLBACK_GRAPH);
    const unsigned closed = atomic_load(&ch->agree.room->closed);
    if (closed != 0)
        return closed < FALLBACKS ? (fallback)closed : FALLBACK_ERROR;
    if (ch->ended || atomic_load(&ch->aborted))
        return FALLBACK_ERROR;
    bool many = j->streams;
    for (int i = 0; i < ch->count; i++)
        many = many || j->way[i].many;
    return many ? FALLBACK_MANY : FALLBACK_NONE;
}

static bool is_self(const job *j, const message *m) {
    return m->comm == j->ch->owner && m->peer == j->ch->owner->rank;
}

/* The next one to or from oneself, from `at` on; j->count: none. */
static size_t next_self(const job *j, size_t at, bool send) {
    while (at < j->count && !(is_self(j, &j->messages[at]) && j->messages[at].send == send))
        at++;
    return at;
}

/* Messages to oneself match within their group: the k-th sent with the k-th received.  Where
 * they do not, NCCL says so. */
static void take_self(job *j) {
    size_t s = next_self(j, 0, true), r = next_self(j, 0, false);
    for (; s < j->count && r < j->count;
         s = next_self(j, s + 1, true), r = next_self(j, r + 1, false))
        if (j->messages[s].bytes == 0 || j->messages[s].bytes != j->messages[r].bytes)
            return;
    for (size_t k = 0; k < j->count && s == r; k++)
        if (is_self(j, &j->messages[k]))
            j->messages[k].carried = true;
}

static bool is_tried(const job *j) {
    for (int i = 0; i < j->ch->count; i++)
        if (channel_has(j->ch, i) && way_fits(j, i))
            return true;
    return false;
}

/* Somebody did not come in time: what was not agreed took all the time there was. */
static bool is_late(const job *j, double since) {
    bool refused = false;
    for (int i = 0; i < j->ch->count; i++)
        refused = refused || (channel_has(j->ch, i) && way_fits(j, i) &&
                              !(j->way[i].sends && j->way[i].receives));
    return refused && agree_now() - since >= j->ch->patience;
}

/* The stream has work before the exchange: to wait meanwhile costs the GPU nothing. */
static bool has_work(void *of) {
    const job *j = of;
    return !atomic_load(&j->ch->aborted) && j->ch->cu->stream_query(j->stream) == CU_NOT_READY;
}

static agree_limit limit_from(job *j, double now, double patience) {
    const channel *ch = j->ch;
    const double idle = patience < ch->idle_s ? patience : ch->idle_s;
    return (agree_limit){now + patience, now + idle, ch->idle_s < ch->wait_s ? has_work : NULL, j};
}

/* Marks what is ours; the others are NCCL's.  True: something is. */
static bool agree_all(job *j) {
    channel *ch = j->ch;
    bool any = false;
    const fallback why = all_refused(j);
    if (why != FALLBACK_NONE) {
        refuse_all(j, why);
        return false;
    }
    offer_all(j);
    const double now = agree_now();
    const agree_limit take = limit_from(j, now, ch->patience);
    agree_limit hear = limit_from(j, now, 2 * ch->patience);
    hear.idle += ch->idle_s; /* (the sender may have to open something) */
    take_all(j, &take);
    hear_all(j, &hear);
    if (is_tried(j))
        ch->patience = agree_patience(ch->patience, ch->wait_s, is_late(j, now));
    for (int i = 0; i < ch->count; i++) {
        const way *w = &j->way[i];
        if (w->sends)
            j->messages[w->send].carried = any = true;
        if (w->receives)
            j->messages[w->recv].carried = any = true;
    }
    for (size_t k = 0; k < j->count; k++) {
        const message *m = &j->messages[k];
        j->mixed = j->mixed || (m->comm == ch->owner && !m->carried && !is_self(j, m));
    }
    if (any && !j->mixed)
        take_self(j);
    return any;
}

/* ---- on the stream ---- */

static void say_ready(job *j) {
    channel *ch = j->ch;
    for (int i = 0; i < ch->count; i++)
        if (j->way[i].receives)
            words_write(&j->words, channel_word(ch, &channel_in(ch, i)->arrived),
                        ++ch->peer[i].ticket);
}

static ncclResult_t write_to(job *j, int i) {
    channel *ch = j->ch;
    const way *w = &j->way[i];
    const message *m = &j->messages[w->send];
    agree_pair *p = channel_out(ch, i);
    const uint64_t bytes = m->bytes < w->offer.bytes ? m->bytes : w->offer.bytes;
    atomic_store(&ch->peer[i].theirs, w->offer.ticket);
    words_wait(&j->words, channel_word(ch, &p->arrived), w->offer.ticket);
    TRY(ch, words_flush(ch, &j->words, j->side));
    TRY(ch, ch->cu->copy(w->to, (cu_pointer)m->source, bytes, j->side));
    words_write(&j->words, channel_word(ch, &p->written), m->number);
    return ncclSuccess;
}

static void wait_for(job *j, int i) {
    channel *ch = j->ch;
    const uint32_t number_ = j->messages[j->way[i].recv].number;
    atomic_store(&ch->peer[i].wanted, number_);
    words_wait(&j->words, channel_word(ch, &channel_in(ch, i)->written), number_);
}

/* What goes to oneself has a stream of its own, which begins where the program's stands now. */
static ncclResult_t fork_self(job *j) {
    channel *ch = j->ch;
    const size_t s = next_self(j, 0, true);
    if (s == j->count || !j->messages[s].carried)
        return ncclSuccess;
    TRY(ch, ch->cu->event_record(ch->fork, j->side));
    j->self = true;
    return ncclSuccess;
}

static ncclResult_t move_self(job *j) {
    channel *ch = j->ch;
    size_t s = next_self(j, 0, true), r = next_self(j, 0, false);
    TRY(ch, ch->cu->stream_wait(ch->self, ch->fork, 0));
    for (; s < j->count; s = next_self(j, s + 1, true), r = next_self(j, r + 1, false)) {
        const cu_pointer to = (cu_pointer)j->messages[r].target,
                         from = (cu_pointer)j->messages[s].source;
        if (to != from)
            TRY(ch, copy_here(ch, to, from, j->messages[s].bytes, ch->self));
    }
    return ncclSuccess;
}

static ncclResult_t join_self(job *j) {
    channel *ch = j->ch;
    TRY(ch, ch->cu->event_record(ch->join, ch->self));
    TRY(ch, ch->cu->stream_wait(j->side, ch->join, 0));
    return ncclSuccess;
}

/* Where the recorder wants it: where the exchange begins and ends on its stream, which waits for
 * most of it without any activity.  A word that nobody else uses takes the value. */
static void mark(job *j, uint32_t what) {
    channel *ch = j->ch;
    if (ch->cu->set32 != NULL && recorder_wants_marks())
        (void)ch->cu->set32(
            channel_word(ch, &ch->agree.room->pair[ch->agree.me][ch->agree.me].arrived), what, 1,
            j->side);
}

/* First what takes longest and what the peers wait for; the calls behind it are made meanwhile. */
static ncclResult_t move_parts(job *j) {
    channel *ch = j->ch;
    const int n = ch->count, me = ch->agree.me;
    ncclResult_t r = fork_self(j);
    say_ready(j);
    for (int k = 1; k < n && r == ncclSuccess; k++)
        if (j->way[(me + k) % n].sends)
            r = write_to(j, (me + k) % n);
    if (r == ncclSuccess && j->self)
        r = move_self(j);
    for (int k = 1; k < n; k++)
        if (j->way[(me + n - k) % n].receives)
            wait_for(j, (me + n - k) % n);
    if (r != ncclSuccess)
        return r;
    TRY(ch, words_flush(ch, &j->words, j->side));
    return ncclSuccess;
}

/* What is on the streams has an end, also where the driver refused something and that is a part:
 * giving memory back and the end of the communicator wait for it. */
static ncclResult_t move_all(job *j) {
    channel *ch = j->ch;
    mark(j, RECORDER_MARK_BEGIN);
    ncclResult_t r = move_parts(j), joined = j->self ? join_self(j) : ncclSuccess;
    mark(j, RECORDER_MARK_END);
    const cu_result last = ch->cu->event_record(ch->last, j->side);
    if (joined != ncclSuccess || last != 0)
        atomic_store(&ch->lost, true);
    if (last != 0)
        joined = channel_fail(ch, "event_record(last)", last);
    return r != ncclSuccess ? r : joined;
}

/* Where the exchange before this one stands on another stream, this one comes behind it. */
static ncclResult_t follow_last(job *j) {
    channel *ch = j->ch;
    unsigned long long id = 0;
    const bool told = ch->cu->stream_id != NULL && ch->cu->stream_id(j->side, &id) == 0;
    if (!told || id != ch->last_stream)
        TRY(ch, ch->cu->stream_wait(j->side, ch->last, 0));
    ch->last_stream = told ? id : UINT64_MAX;
    return ncclSuccess;
}

/* NCCL's part runs beside ours, which has a stream of its own then. */
static ncclResult_t choose_side(job *j) {
    channel *ch = j->ch;
    j->side = j->mixed ? ch->side : j->stream;
    if (j->mixed) {
        TRY(ch, ch->cu->event_record(ch->fork, j->stream));
        TRY(ch, ch->cu->stream_wait(ch->side, ch->fork, 0));
    }
    return follow_last(j);
}

/* ---- a group ---- */

static bool tidy_due(const channel *ch) { return agree_now() - ch->tidied >= TIDY_S; }

static void tidy(channel *ch, double now) {
    const bool may = channel_may_give_back(ch);
    reach_tidy(ch, may);
    if (may)
        ch->given_back = now;
    ch->tidied = now;
}

/* A group of which something may be ours, or that is captured, or at times. */
static ncclResult_t exchange(job *j, bool *beside) {
    channel *ch = j->ch;
    cu_context popped;
    ncclResult_t r = ncclSuccess;
    int mode = CU_CAPTURE_RELAXED; /* a graph may be captured elsewhere meanwhile */
    if (ch->cu->context_push(ch->context) != 0) {
        refuse_all(j, FALLBACK_ERROR);
        return r;
    }
    const bool relaxed = ch->cu->capture_mode(&mode) == 0;
    ch->round++;
    if (!j->captured && tidy_due(ch)) {
        tidy(ch, agree_now());
    }
    if (agree_all(j)) {
        r = choose_side(j);
        if (r == ncclSuccess)
            r = move_all(j);
        if (r != ncclSuccess)
            close_room(ch, FALLBACK_ERROR); /* the driver's */
        *beside = j->mixed;
    }
    if (relaxed)
        (void)ch->cu->capture_mode(&mode);
    (void)ch->cu->context_pop(&popped);
    return r;
}

/* Nothing may be ours. */
static void refuse_idle(job *j) {
    for (size_t k = 0; k < j->count; k++) {
        message *m = &j->messages[k];
        const int i = peer_of(j, m);
        if (i >= 0)
            refuse(j->ch, m, i, way_why(j, i));
    }
}

/* What goes to oneself is NCCL's because something else is. */
static void explain_self(job *j) {
    fallback why = FALLBACK_NONE;
    for (size_t k = 0; k < j->count; k++) {
        const message *m = &j->messages[k];
        if (m->comm == j->ch->owner && !m->carried && m->why > why)
            why = m->why;
    }
    for (size_t k = 0; k < j->count; k++)
        if (is_self(j, &j->messages[k]))
            j->messages[k].why = why;
}

/* Small messages alone cost one question to the driver. */
ncclResult_t channel_exchange(channel *ch, message *messages, size_t count, bool *beside) {
    job j;
    ncclResult_t r = ncclSuccess;
    *beside = false;
    pthread_mutex_lock(&ch->lock);
    const bool due = tidy_due(ch);
    job_open(&j, ch, messages, count);
    if (j.captured || is_tried(&j) || due)
        r = exchange(&j, beside);
    else
        refuse_idle(&j);
    explain_self(&j);
    pthread_mutex_unlock(&ch->lock);
    if (due && !j.captured)
        channel_sweep(false);
    return r;
}

ncclResult_t channel_join(channel *ch, cudaStream_t stream) {
    TRY(ch, ch->cu->stream_wait(stream, ch->last, 0));
    return ncclSuccess;
}

void channel_alone(channel *ch, message *m) {
    pthread_mutex_lock(&ch->lock);
    const int i = channel_index(ch, m->peer);
    if (i >= 0) {
        number(ch, m, i);
        refuse(ch, m, i, FALLBACK_ONE_WAY);
    }
    pthread_mutex_unlock(&ch->lock);
}
