/* SPDX-License-Identifier: Apache-2.0
 *
 * chain.c - the experts' two products of all chunks in one launch of the grouped GEMM.
 *
 * The kernel looks at the arrival flags of its parts itself, and writes a word when a
 * part is done: the part's event stands for that word until it is signalled again, so
 * that exchanges begin while the kernel runs on.  Some SMs are left to the exchanges
 * that bring the rows; behind these a second launch takes its share of the tiles.
 *
 * Progress does not depend on whoever else wants this GPU, or a peer's: the first launch
 * gives its SMs back when rows do not come for PATIENCE_NS, the second one stands behind
 * all rows.  Otherwise two groups, or a group and a caller's collective, could each hold
 * on one GPU what the other waits for on the next.
 *
 * Where the issuing thread waits for flags (GPU_WAIT_HOST), it does so for all parts
 * before the launch: ranks that share a GPU would keep each other's exchanges out.
 */
#include "backend/cuda/gpu.h"

#include "backend/cuda/gemm/grouped_gemm.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LENT_BLOCKS 16 /* what the kernel that stores rows to peers takes */
#define PATIENCE_NS UINT64_C(5000000)
/* So many passes of so many that gave their SMs back are more than a late peer now and
 * then: launches for each chunk serve better. */
#define JUDGED 32
#define TOO_MANY 8

struct gpu_words {
    uint64_t *host; /* mapped, [GPU_CHAIN_WORDS + 1] */
    char *dev;
    char *left_dev; /* the last word: the last chain that gave its SMs back */
    bool used[GPU_CHAIN_WORDS];
    uint64_t last;    /* the value written last, of all words: chains count them */
    uint64_t left;    /* that word, as seen last */
    int chains, gave; /* of those judged together */
};

struct gpu_chain {
    cudaStream_t stream; /* of the second launch */
    cudaEvent_t prepared, joined;
};

/* ---- words ---- */

static epo_status words_open(epo_backend *be) {
    if (be->words != NULL)
        return EPO_OK;
    gpu_words *w = calloc(1, sizeof *w);
    void *host = NULL, *dev = NULL;
    if (w == NULL)
        return epo_fail(EPO_E_NOMEM, "rank %d: no memory for %d words", be->rank, GPU_CHAIN_WORDS);
    epo_status status =
        gpu_host_map(be, (GPU_CHAIN_WORDS + 1) * sizeof *w->host, "chain", &host, &dev);
    if (status != EPO_OK) {
        free(w);
        return status;
    }
    w->host = host;
    w->dev = dev;
    w->left_dev = w->dev + GPU_CHAIN_WORDS * sizeof *w->host;
    be->words = w;
    return EPO_OK;
}

void gpu_words_close(epo_backend *be) {
    if (be->words == NULL)
        return;
    (void)cudaFreeHost(be->words->host);
    free(be->words);
    be->words = NULL;
}

/* The event gets a word of its own, for as long as it lives. */
static epo_status word_take(epo_backend *be, epo_event *event) {
    if (event->word != NULL)
        return EPO_OK;
    for (int i = 0; i < GPU_CHAIN_WORDS; i++)
        if (!be->words->used[i]) {
            be->words->used[i] = true;
            event->word = &be->words->host[i];
            event->word_dev = be->words->dev + (size_t)i * sizeof *be->words->host;
            return EPO_OK;
        }
    return epo_fail(EPO_E_STATE, "rank %d: more than %d events for parts of a chain", be->rank,
                    GPU_CHAIN_WORDS);
}

void gpu_word_give(epo_backend *be, epo_event *event) {
    if (event->word == NULL)
        return;
    gpu_watch_forget(be, event->word, sizeof *event->word);
    be->words->used[event->word - be->words->host] = false;
}

epo_status gpu_event_wait(epo_queue *q, epo_event *event, const char *phase) {
    epo_backend *be = q->be;
    if (event->capture != q->capture) /* before the capture, or in one that has ended */
        return EPO_OK;
    if (!event->early) {
        if ((event->behind & gpu_queue_bit(q)) != 0) /* in the stream's order anyway */
            return EPO_OK;
        GPU_TRY(be, phase, cudaStreamWaitEvent(q->stream, event->cuda, 0));
        event->behind |= gpu_queue_bit(q);
        return EPO_OK;
    }
    const epo_ready ready = {.epoch = event->value,
                             .count = 1,
                             .peer = be->rank,
                             .what = "a part of the experts",
                             .chunk = -1,
                             .counter = event->counter};
    if (event->counter != NULL)
        return gpu_replay_wait(q, q->stream, event->replay_word, &ready);
    if (be->wait_mode == GPU_WAIT_HOST)
        return gpu_watch_poll(be, event->word, &ready);
    epo_status status = gpu_watch_add(be, event->word, &ready);
    if (status != EPO_OK)
        return status;
    CUresult r =
        gpu_driver_get(NULL)->wait64((CUstream)q->stream, (CUdeviceptr)(uintptr_t)event->word_dev,
                                     event->value, CU_STREAM_WAIT_VALUE_GEQ);
    return r == CUDA_SUCCESS ? EPO_OK : gpu_fail_driver(be, "cuStreamWaitValue64", phase, r);
}

/* ---- shapes ---- */

static epo_gg_chain chain_shape(const epo_chain *c) {
    epo_gg_chain gg = {.size = sizeof gg};
    const epo_chain_part *last = &c->part[c->parts - 1];
    epo_gemm first = c->first, second = c->second;
    const epo_swiglu *act = first.act;
    first.first = second.first = c->part[0].first;
    first.count = second.count = last->first + last->count - first.first;
    gg.first = gpu_gemm_shape(&first);
    gg.second = gpu_gemm_shape(&second);
    if (first.kind == EPO_GEMM_FORWARD) {
        gpu_gemm_act(&gg.first, act);
    } else {
        gg.h = act->h;
        gg.dh = act->dh;
        gg.row_weight = act->w;
        gg.row_dweight = act->dw;
    }
    gg.parts = c->parts;
    gg.hurry = c->hurry;
    for (int i = 0; i < c->parts; i++) {
        gg.part[i].first = c->part[i].first;
        gg.part[i].count = c->part[i].count;
    }
    return gg;
}

/* Where peers' rows go, and whom to tell, the epoch apart. */
static epo_gg_direct direct_shape(const epo_backend *be, const epo_chain *c) {
    const epo_chain_direct *d = c->direct;
    epo_gg_direct gg = {.ranks = be->ranks, .own = be->rank, .first = d->first, .to = d->to};
    const uint64_t row_bytes =
        (uint64_t)(c->second.kind == EPO_GEMM_FORWARD ? c->second.n : c->second.k) * 2;
    gg.rows = (d->window->bytes - d->rows) / row_bytes;
    for (int r = 0; r < be->ranks; r++) {
        gg.base[r] = d->window->peer[r] + d->rows;
        gg.dweight[r] = (float *)(void *)(d->window->peer[r] + d->dweights);
    }
    return gg;
}

static epo_status direct_tells(epo_queue *q, const epo_chain *c, epo_gg_chain *gg,
                               const char *phase) {
    const epo_chain_direct *d = c->direct;
    gpu_raise raise;
    if (d == NULL)
        return EPO_OK;
    const epo_exchange x = {.window = d->window,
                            .flag_offset = d->flag_offset,
                            .epoch = d->epoch,
                            .counter = d->counter};
    epo_status status = gpu_flag_raise(q, &x, phase, &raise);
    if (status != EPO_OK)
        return status;
    gg->direct.words = raise.words + raise.part[0].word;
    gg->direct.step = raise.rank_step;
    gg->direct.value = raise.epoch;
    gg->direct.counter = raise.counter;
    gg->direct.late = raise.late;
    return EPO_OK;
}

/* Each rank judges for itself: what peers see of a pass is the same either way. */
static void chains_judge(epo_backend *be) {
    gpu_words *w = be->words;
    const uint64_t left = __atomic_load_n(&w->host[GPU_CHAIN_WORDS], __ATOMIC_ACQUIRE);
    w->gave += left != w->left;
    w->left = left;
    if (++w->chains < JUDGED)
        return;
    if (w->gave >= TOO_MANY && !be->chains_asked) {
        be->chains = false;
        (void)fprintf(stderr,
                      "ep-overlap: rank %d: in %d of %d passes rows came more than %d ms late to "
                      "GEMMs that held SMs for them; from here on each chunk has its own "
                      "launches (EP_OVERLAP_CUDA_CHAIN=1 keeps one for all)\n",
                      be->rank, w->gave, w->chains, (int)(PATIENCE_NS / 1000000));
    }
    w->chains = w->gave = 0;
}

bool gpu_chain_covers(epo_backend *be, const epo_chain *c) {
    /* What is judged is how chains wait: one of a single part has all rows before it begins. */
    const bool chains = be->chains || (c->parts == 1 && be->info.home);
    if (!be->grouped || !chains || be->words == NULL || c->parts < 1 ||
        c->parts > EPO_CHAIN_PARTS || c->first.act == NULL || c->first.kind == EPO_GEMM_WGRAD)
        return false;
    if (c->direct != NULL &&
        (!be->direct || !be->one_sided || be->info.nodes > 1 || be->ranks > EPO_GG_RANKS))
        return false;
    epo_gg_chain gg = chain_shape(c);
    if (c->direct != NULL)
        gg.direct = direct_shape(be, c);
    return epo_gg_chain_covers(&gg) != 0;
}

/* ---- the operation ---- */

epo_status gpu_chain_open(epo_queue *q) {
    if (q->chain != NULL || !q->be->chains || !q->be->grouped)
        return EPO_OK;
    epo_gg sm90 = {.size = sizeof sm90,
                   .kind = EPO_GG_FORWARD,
                   .type = EPO_BF16,
                   .c_type = EPO_BF16,
                   .n = 64,
                   .k = 64,
                   .experts = 1,
                   .count = 1};
    if (epo_gg_path_of(&sm90) != EPO_GG_SM90)
        return EPO_OK;
    gpu_chain *side = calloc(1, sizeof *side);
    if (side == NULL)
        return epo_fail(EPO_E_NOMEM, "rank %d: no memory for a stream", q->be->rank);
    q->chain = side;
    GPU_TRY(q->be, "chain",
            cudaStreamCreateWithPriority(&side->stream, cudaStreamNonBlocking, q->priority));
    GPU_TRY(q->be, "chain", cudaEventCreateWithFlags(&side->prepared, cudaEventDisableTiming));
    GPU_TRY(q->be, "chain", cudaEventCreateWithFlags(&side->joined, cudaEventDisableTiming));
    return words_open(q->be);
}

void gpu_chain_free(epo_queue *q) {
    gpu_chain *side = q->chain;
    if (side == NULL)
        return;
    if (side->joined != NULL)
        (void)cudaEventDestroy(side->joined);
    if (side->prepared != NULL)
        (void)cudaEventDestroy(side->prepared);
    if (side->stream != NULL)
        (void)cudaStreamDestroy(side->stream);
    free(side);
    q->chain = NULL;
}

/* What the parts wait for: the first one's rows hold the launch up, so that it takes no
 * SM before there is work, as do `flags`; the others' the kernel waits for.  Events, and flags
 * where this thread waits, come all before. */
static epo_status parts_wait(epo_queue *q, const epo_chain *c, epo_gg_chain *gg,
                             const epo_ready *flags, int nflags) {
    const epo_ready *before[EPO_MAX_WAITS + 1];
    int n = 0;
    for (; n < nflags; n++)
        before[n] = &flags[n];
    if (c->part[0].ready != NULL && c->part[0].ready->event == NULL)
        before[n++] = c->part[0].ready;
    epo_status status = gpu_flags_wait(q, before, n);
    for (int i = 0; i < c->parts && status == EPO_OK; i++) {
        const epo_ready *r = c->part[i].ready;
        if (r == NULL)
            continue;
        if (r->event != NULL) {
            status = gpu_event_wait(q, r->event, r->what);
        } else if (i > 0 && q->be->wait_mode == GPU_WAIT_HOST) {
            status = gpu_flag_wait(q, r);
        } else if (i > 0) {
            const uint64_t *flag = NULL;
            status = gpu_flag_watch(q, r, &flag);
            gg->part[i].flag = flag;
            gg->part[i].epoch = r->epoch;
            gg->part[i].words = r->count;
        }
    }
    return status;
}

/* Not NULL: a graph may capture it, and words count on the device. */
static const uint64_t *counter_of(const epo_chain *c) {
    for (int i = 0; i < c->parts; i++)
        if (c->part[i].ready != NULL && c->part[i].ready->counter != NULL)
            return c->part[i].ready->counter;
    return NULL;
}

static epo_status parts_done(epo_queue *q, const epo_chain *c, epo_gg_chain *gg) {
    epo_backend *be = q->be;
    epo_status status = EPO_OK;
    for (int i = 0; i < c->parts && status == EPO_OK; i++) {
        epo_event *done = c->part[i].done;
        if (done == NULL || (status = word_take(be, done)) != EPO_OK)
            continue;
        if (counter_of(c) != NULL) {
            gg->part[i].done = be->chain_words + (done->word - be->words->host);
        } else {
            gg->part[i].done = (uint64_t *)done->word_dev;
            gg->part[i].done_value = be->words->last + 1;
        }
    }
    be->words->last++;
    return status;
}

/* The events as others see them: the words now, and the launch's end for who waits on
 * the CPU. */
static epo_status parts_signal(epo_queue *q, const epo_chain *c, const epo_gg_chain *gg, bool early,
                               const char *phase) {
    for (int i = 0; i < c->parts; i++) {
        epo_event *done = c->part[i].done;
        if (done == NULL)
            continue;
        done->early = early;
        done->capture = q->capture;
        done->behind = gpu_queue_bit(q);
        done->value = gg->part[i].done_value;
        done->counter = gg->done_counter;
        done->replay_word = gg->part[i].done;
        GPU_TRY(q->be, phase, cudaEventRecord(done->cuda, q->stream));
    }
    return EPO_OK;
}

/* Nothing is waited for but what stands before on the queue. */
static bool at_once(const epo_chain *c) {
    for (int i = 0; i < c->parts; i++)
        if (c->part[i].ready != NULL)
            return false;
    return true;
}

static epo_status chain_begin(epo_queue *q, const epo_chain *c, epo_gg_chain *gg,
                              const epo_deps *deps, int flags) {
    const char *phase = deps->name;
    epo_status status = parts_done(q, c, gg);
    if (status == EPO_OK)
        status = direct_tells(q, c, gg, phase);
    if (status == EPO_OK)
        status = gpu_workspace_hold(q, epo_gg_chain_workspace(gg));
    gg->workspace = q->workspace;
    gg->workspace_bytes = q->workspace_bytes;
    gg->counter = counter_of(c);
    gg->done_counter = gg->counter != NULL ? q->be->chain_uses : NULL;
    const epo_ready *first = deps->wait + deps->nwait - flags;
    if (status != EPO_OK || at_once(c))
        return status == EPO_OK ? parts_wait(q, c, gg, first, flags) : status;
    status = epo_gg_chain_prepare(gg, q->stream);
    if (status != EPO_OK)
        return status;
    status = parts_wait(q, c, gg, first, flags);
    if (status != EPO_OK)
        return status;
    /* The second launch does not wait for the first part's rows itself either. */
    GPU_TRY(q->be, phase, cudaEventRecord(q->chain->prepared, q->stream));
    return EPO_OK;
}

/* Behind all rows, so that this launch waits for nothing.  A peer's exchanges run in
 * order: the last part's words speak for all. */
static epo_status last_wait(epo_queue *q, const epo_chain *c, cudaStream_t stream) {
    epo_status status = EPO_OK;
    for (int i = c->parts - 1; i > 0 && status == EPO_OK; i--) {
        const epo_ready *r = c->part[i].ready;
        if (r != NULL && r->event == NULL)
            return gpu_flag_hold(q, stream, r);
    }
    return status;
}

/* The side stream goes on where the first launch was prepared, behind `until`. */
static epo_status side_begin(epo_queue *q, const epo_event *until, const char *phase) {
    gpu_chain *side = q->chain;
    GPU_TRY(q->be, phase, cudaStreamWaitEvent(side->stream, side->prepared, 0));
    GPU_TRY(q->be, phase, cudaStreamWaitEvent(side->stream, until->cuda, 0));
    return EPO_OK;
}

/* What follows on the queue stands behind it, and so behind `until`. */
static epo_status side_end(epo_queue *q, epo_event *until, const char *phase) {
    gpu_chain *side = q->chain;
    GPU_TRY(q->be, phase, cudaEventRecord(side->joined, side->stream));
    GPU_TRY(q->be, phase, cudaStreamWaitEvent(q->stream, side->joined, 0));
    until->behind |= gpu_queue_bit(q);
    return EPO_OK;
}

/* Beside the first launch, for the SMs that were lent and, where there is no budget, for
 * those that it gives back. */
static epo_status chain_join(epo_queue *q, const epo_chain *c, epo_gg_chain *gg,
                             const char *phase) {
    epo_backend *be = q->be;
    gg->first.sms = be->gemm_sms != 0 ? LENT_BLOCKS : be->sms;
    epo_status status = side_begin(q, c->lent, phase);
    if (status == EPO_OK)
        status = last_wait(q, c, q->chain->stream);
    if (status == EPO_OK)
        status = epo_gg_chain_run(gg, q->chain->stream);
    return status == EPO_OK ? side_end(q, c->lent, phase) : status;
}

epo_status gpu_side_run(epo_queue *q, epo_gg *gg, epo_event *until, const char *phase) {
    gpu_chain *side = q->chain;
    if (side == NULL || until->capture != 0)
        return epo_gg_launch(gg, q->stream);
    epo_status status = epo_gg_prepare(gg, q->stream);
    if (status != EPO_OK)
        return status;
    GPU_TRY(q->be, phase, cudaEventRecord(side->prepared, q->stream));
    status = epo_gg_run(gg, q->stream);
    if (status == EPO_OK)
        status = side_begin(q, until, phase);
    gg->sms = q->be->sms - gg->sms;
    if (status == EPO_OK)
        status = epo_gg_run(gg, side->stream);
    return status == EPO_OK ? side_end(q, until, phase) : status;
}

/* Do all exchanges go by SMs of our own and copy engines? */
static bool no_pairs(const epo_backend *be) { return be->one_sided && be->info.nodes <= 1; }

/* What is left when all rows are here.  NCCL's kernels, which come later, too, want the SMs
 * that the first launch leaves: there it all comes behind it. */
static epo_status chain_end(epo_queue *q, const epo_chain *c, epo_gg_chain *gg, const char *phase) {
    const bool joins = no_pairs(q->be) && c->lent != NULL;
    const int sms = gg->first.sms;
    epo_status status = EPO_OK;
    gg->arrived = 1;
    if (joins)
        status = chain_join(q, c, gg, phase);
    if (status != EPO_OK || (joins && q->be->gemm_sms == 0))
        return status;
    gg->first.sms = sms;
    if (!joins)
        status = last_wait(q, c, q->stream);
    return status == EPO_OK ? epo_gg_chain_run(gg, q->stream) : status;
}

/* Does the kernel look at flags?  Else one launch does it all. */
static bool looks(const epo_gg_chain *gg) {
    for (int i = 0; i < gg->parts; i++)
        if (gg->part[i].flag != NULL)
            return true;
    return false;
}

static epo_status chain_run(epo_queue *q, const epo_chain *c, epo_gg_chain *gg, const char *phase) {
    epo_backend *be = q->be;
    const int sms = be->gemm_sms != 0 ? be->gemm_sms : be->sms;
    const int lent = no_pairs(be) ? LENT_BLOCKS : be->lend_sms;
    const bool waits = be->wait_mode != GPU_WAIT_HOST && looks(gg);
    const bool lends = waits && (c->lent != NULL || !no_pairs(be));
    gg->first.sms = !lends ? sms : sms > 2 * lent ? sms - lent : sms / 2;
    gg->patience_ns = PATIENCE_NS;
    gg->arrived = !waits;
    if (gg->counter == NULL) { /* whose launches stay what they are */
        gg->left = (uint64_t *)(void *)be->words->left_dev;
        gg->left_value = be->words->last;
        chains_judge(be);
    }
    epo_status status =
        at_once(c) ? epo_gg_chain_launch(gg, q->stream) : epo_gg_chain_run(gg, q->stream);
    return status == EPO_OK && waits ? chain_end(q, c, gg, phase) : status;
}

/* What is waited for before the launch is prepared, `events`; flags that the stream waits for are
 * waited for behind that, with the first part's: how many of them stand at the end of deps->wait,
 * where lib/moe has them. */
static int deps_part(const epo_queue *q, const epo_deps *deps, epo_deps *events) {
    int flags = 0;
    *events = *deps;
    while (q->be->wait_mode != GPU_WAIT_HOST && flags < deps->nwait &&
           deps->wait[deps->nwait - 1 - flags].event == NULL)
        flags++;
    events->nwait -= flags;
    return flags;
}

epo_status gpu_chain_op(epo_queue *q, const epo_chain *c, const epo_deps *deps) {
    epo_gg_chain gg = chain_shape(c);
    epo_gg_chain_maps maps;
    epo_deps events;
    epo_status status;
    maps.made = 0;
    gg.maps = &maps;
    if (c->direct != NULL)
        gg.direct = direct_shape(q->be, c);
    const int flags = deps_part(q, deps, &events);
    if (!gpu_op_begin(q, &events, &status))
        return status == EPO_OK ? parts_signal(q, c, &gg, false, deps->name) : status;
    status = chain_begin(q, c, &gg, deps, flags);
    /* Broken while this thread waited: passed over, the parts are done. */
    const bool runs = atomic_load(&q->be->late) == EPO_OK;
    if (status == EPO_OK && runs)
        status = chain_run(q, c, &gg, deps->name);
    if (status != EPO_OK) {
        char text[EPO_ERROR_MAX / 2];
        snprintf(text, sizeof text, "%s", epo_fail_text());
        return epo_fail(status, "rank %d: %s: %s", q->be->rank, deps->name, text);
    }
    status = parts_signal(q, c, &gg, runs, deps->name);
    return status == EPO_OK ? gpu_op_end(q, deps) : status;
}
