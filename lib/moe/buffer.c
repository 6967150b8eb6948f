/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/route_flex_step.h"
#include "moe/moe.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEFAULT_ALIGN = 16, MAX_ALIGN = 4096, LINE = 64 };

/* Offsets of the window's parts, one after the other. */
typedef struct window_layout {
    uint64_t bytes, flags; /* sets of flags, a word for each rank */
    bool failed;
} window_layout;

static uint64_t place(window_layout *w, uint64_t count, uint64_t size) {
    uint64_t at, bytes, end = 0;
    if (!epo_size_align(w->bytes, LINE, &at) || !epo_size_mul(count, size, &bytes) ||
        !epo_size_add(at, bytes, &end)) {
        w->failed = true;
        return 0;
    }
    w->bytes = end;
    return at;
}

static uint64_t flags(window_layout *w, const epo_buffer *b, int sets) {
    w->flags += (uint64_t)sets;
    return place(w, (uint64_t)sets * (uint64_t)b->group->ranks, sizeof(uint64_t));
}

static void lay_out_links(window_layout *w, epo_buffer *b) {
    uint64_t tokens = (uint64_t)b->most_tokens, k = (uint64_t)b->top_k;
    b->link_arrive = flags(w, b, 1);
    b->relay.arrive = flags(w, b, b->chunks);
    b->relay.credit = flags(w, b, 1);
    b->home.arrive = flags(w, b, b->chunks);
    b->home.credit = flags(w, b, 1);
    b->link_expert = place(w, tokens * k, sizeof(int64_t));
    b->link_weight = place(w, tokens * k, sizeof(float));
    b->relay.rows = place(w, tokens, b->wire_bytes);
    b->home.rows = place(w, tokens, b->row_bytes);
    b->home.extra = place(w, tokens * k, sizeof(float));
}

/* Why rows do not go home one by one; NULL: they may. */
static const char *home_why_not(const epo_buffer *b) {
    const epo_group *g = b->group;
    const epo_backend_info *info = g->ops->info(g->be);
    const bool maps = moe_plan_on_device(b) ? g->ops->route_send != NULL : g->ops->read == NULL;
    return info->home == 0 || g->ops->chain == NULL ? "the backend has no way for them"
           : b->dispatcher != EPO_DISPATCH_FLEX     ? "the buffer's dispatcher is alltoall"
           : !g->overlap                            ? "overlap is off"
           : b->peers.count == 1                    ? "there is one rank"
           : b->links                               ? "the ranks are on several nodes"
           : b->replays                             ? "the buffer is for graphs"
           : b->pad                                 ? "the buffer is padded to a capacity"
           : b->wire != EPO_WIRE_ROWS               ? "rows travel in e4m3"
           : b->row_bytes % info->home != 0         ? "rows are no multiple of 16 bytes"
           : info->ways == 1U << EPO_WAY_ENGINES    ? "EP_OVERLAP_CUDA_WAY is engines"
           : !maps                                  ? "the device makes no maps of so many experts"
                                                    : NULL;
}

bool moe_buffer_home(const epo_buffer *b) { return home_why_not(b) == NULL; }

void moe_home_in_vain(epo_group *g, const char *why) {
    const epo_backend_info *info = g->ops->info(g->be);
    const int most = (int)(sizeof g->home_said / sizeof *g->home_said);
    if (why == NULL || !info->home_asked || info->home == 0 || g->rank != 0)
        return; /* (without any way the backend has said so) */
    for (int i = 0; i < most; i++) {
        if (g->home_said[i] == why)
            return;
        if (g->home_said[i] != NULL)
            continue;
        g->home_said[i] = why;
        (void)fprintf(stderr, "ep-overlap: EP_OVERLAP_CUDA_FLEX_HOME=1 has no effect here: %s\n",
                      why);
        return;
    }
}

static void tell_home(const epo_buffer *b) {
    const char *why = home_why_not(b);
    moe_home_in_vain(b->group, why == NULL && b->chunks > 1 ? "there is more than one chunk" : why);
}

/* Everything peers write lies in one window.  alltoall: rows arrive expert-major
 * and return to their place in the sending order (padding too).  flex: one row a (token, rank),
 * at most most_tokens from each peer; at most min(R, K) come back a token, or K, where they may one
 * by one. */
static bool lay_out(epo_buffer *b, uint64_t max_rows) {
    uint64_t full = moe_capacity_of(b, b->max_tokens, b->top_k);
    uint64_t ranks = (uint64_t)b->peers.count, k = (uint64_t)b->top_k;
    uint64_t tokens = (uint64_t)b->most_tokens, wide = ranks < k ? ranks : k;
    bool flex = b->dispatcher == EPO_DISPATCH_FLEX, device = flex && moe_plan_on_device(b);
    uint64_t in = flex ? ranks * tokens : max_rows, back = tokens * (flex ? wide : k);
    if (b->pad && !flex)
        back = (uint64_t)b->experts * full;
    if (b->replays && flex) /* see replay_flex.c */
        back = ranks * tokens;
    const uint64_t home = b->chunks == 1 && moe_buffer_home(b) ? tokens * k : 0;
    window_layout w = {0, 0, false};
    b->counts_arrive = flags(&w, b, 1);
    b->meta_arrive = flags(&w, b, 1);
    b->meta_credit = flags(&w, b, 1);
    b->dispatch.arrive = flags(&w, b, b->chunks);
    b->dispatch.credit = flags(&w, b, 1);
    b->dispatch.expanded = flags(&w, b, flex ? b->chunks : 0);
    b->combine.arrive = flags(&w, b, b->chunks);
    b->combine.credit = flags(&w, b, 1);
    b->counts = place(&w, 2 * ranks, b->counts_bytes);
    b->meta_expert = place(&w, flex && !device ? in * k : 0, sizeof(int32_t));
    b->meta_weight = place(&w, !flex ? in : device ? 0 : in * k, sizeof(float));
    b->meta_rows = place(&w, device ? in : 0, 4 * (uint64_t)epo_flex_meta_words(b->top_k));
    b->dispatch.rows = place(&w, in, b->wire_bytes);
    b->combine.rows = place(&w, back > home ? back : home, b->row_bytes);
    b->combine.extra = place(&w, flex ? back * k : back, sizeof(float));
    if (b->links)
        lay_out_links(&w, b);
    b->counters = place(&w, b->replays ? 3 : 0, sizeof(uint64_t));
    b->window_bytes = w.bytes;
    b->window_flags = w.flags;
    return !w.failed;
}

/* Every chunk has flags of its own. */
static epo_status check_flags(const epo_buffer *b) {
    const epo_backend_info *info = b->group->ops->info(b->group->be);
    if (info->window_flags == 0 || b->window_flags <= (uint64_t)info->window_flags)
        return EPO_OK;
    return epo_fail(EPO_E_ARG,
                    "buffer: chunks: %d of them have %" PRIu64 " flags, the %s engine has %d for a "
                    "buffer; use fewer",
                    b->chunks, b->window_flags, info->engine, info->window_flags);
}

/* With a capacity, each expert's part is bounded. */
static uint64_t capacity_rows(const epo_buffer *b) {
    uint64_t rows = moe_capacity_of(b, b->max_tokens, b->top_k), up;
    if (rows == EPO_ROUTE_UNLIMITED || rows > INT32_MAX / (uint64_t)b->experts ||
        !epo_size_align(rows * (uint64_t)b->group->ranks, (uint64_t)b->align, &up) ||
        up > INT32_MAX / (uint64_t)b->local)
        return 0;
    return up * (uint64_t)b->local;
}

/* Slots are numbered in an int32 whatever a capacity leaves of them: this rank's, of flex what
 * comes of all ranks. */
static bool slots_fit(const epo_buffer *b) {
    const uint64_t ranks = b->dispatcher == EPO_DISPATCH_FLEX ? (uint64_t)b->group->ranks : 1;
    return (uint64_t)b->max_tokens * (uint64_t)b->top_k <= INT32_MAX / ranks;
}

/* The most expert-major rows that can arrive; 0: more than an int32 can number. */
static uint64_t worst_rows(const epo_buffer *b) {
    uint64_t rows, up, align = (uint64_t)b->align, bounded = capacity_rows(b);
    if (b->pad)
        return bounded;
    if (!epo_size_mul((uint64_t)b->max_tokens, (uint64_t)b->top_k, &rows) ||
        !epo_size_mul(rows, (uint64_t)b->group->ranks, &rows) ||
        !epo_size_add(rows, (uint64_t)b->local * (align - 1), &rows) ||
        !epo_size_align(rows, align, &up) || up > INT32_MAX)
        return bounded;
    return bounded > 0 && bounded < up ? bounded : up;
}

static epo_status check_numbers(const epo_group *g, const epo_buffer_config *c) {
    const struct {
        const char *name;
        int64_t found, low, high;
    } ranges[] = {
        {"hidden", c->hidden, 1, 1 << 24},
        {"top_k", c->top_k, 1, EPO_ROUTE_MAX_TOP_K},
        {"max_tokens", c->max_tokens, 1, INT32_MAX},
        {"chunks", c->chunks, 0, 1024},
        {"align_rows", c->align_rows, 0, MAX_ALIGN},
        {"dispatcher", (int)c->dispatcher, EPO_DISPATCH_DEFAULT, EPO_DISPATCH_FLEX},
        {"wire", (int)c->wire, EPO_WIRE_ROWS, EPO_WIRE_E4M3},
    };
    epo_status status = moe_check_experts(c->experts, g->ranks);
    for (size_t i = 0; status == EPO_OK && i < sizeof ranges / sizeof *ranges; i++)
        status = moe_check_range(ranges[i].name, ranges[i].found, ranges[i].low, ranges[i].high);
    return status == EPO_OK ? moe_check_type(g->ops->info(g->be), "type", c->type) : status;
}

/* As asked, else as many as the backend likes, of chunks that are worth it. */
int moe_buffer_chunks(const epo_group *g, int asked, const epo_buffer *b) {
    const epo_backend_info *info = g->ops->info(g->be);
    int n = asked > 0 ? asked : g->chunks;
    if (n == 0) {
        /* Copies of a token: one per slot, or per rank. */
        int copies =
            b->dispatcher == EPO_DISPATCH_FLEX && g->ranks < b->top_k ? g->ranks : b->top_k;
        uint64_t bytes = (uint64_t)b->max_tokens * (uint64_t)copies * b->row_bytes;
        n = b->dispatcher == EPO_DISPATCH_FLEX && info->flex_chunks > 0 ? info->flex_chunks
                                                                        : info->default_chunks;
        if (info->chunk_bytes > 0 && bytes / info->chunk_bytes < (uint64_t)n)
            n = (int)(bytes / info->chunk_bytes);
    }
    if (!g->overlap || n < 1)
        n = 1;
    return n < b->local ? n : b->local;
}

static epo_status wire_set(epo_buffer *b, epo_wire wire) {
    b->wire = wire;
    b->wire_bytes = b->row_bytes;
    if (wire == EPO_WIRE_ROWS)
        return EPO_OK;
    if (b->dispatcher != EPO_DISPATCH_FLEX)
        return epo_fail(EPO_E_ARG, "buffer: wire e4m3 with the dispatcher alltoall, whose rows are "
                                   "read where they arrive; use flex");
    if (b->hidden % EPO_WIRE_GROUP != 0)
        return epo_fail(EPO_E_ARG, "buffer: wire e4m3: hidden is %d, allowed are multiples of %d",
                        b->hidden, EPO_WIRE_GROUP);
    if (b->group->ops->wire_pack == NULL)
        return epo_fail(EPO_E_UNSUPPORTED,
                        "buffer: wire e4m3: the %s engine has EPO_WIRE_ROWS alone",
                        b->group->ops->name);
    b->wire_bytes = epo_wire_bytes((uint64_t)b->hidden);
    return EPO_OK;
}

/* Whom rows are exchanged with, and for how many tokens. */
static epo_status links_set(epo_buffer *b, const epo_buffer_config *c) {
    const epo_group *g = b->group;
    const int nodes = g->ops->info(g->be)->nodes;
    b->links = nodes > 1 && b->dispatcher == EPO_DISPATCH_FLEX;
    b->scope = b->links ? EPO_SCOPE_NODE : EPO_SCOPE_GROUP;
    b->peers = epo_peers_of(b->scope, g->rank, g->ranks, nodes);
    b->experts = b->local * b->peers.count;
    b->most_tokens = c->max_tokens;
    if (!b->links)
        return EPO_OK;
    if (c->pad_to_capacity != 0)
        return epo_fail(EPO_E_UNSUPPORTED,
                        "buffer: flex across %d nodes does not pad to the capacity; use alltoall, "
                        "or leave padding out",
                        nodes);
    const int32_t most = INT32_MAX / (nodes + 1) / c->top_k; /* places of slots of all rows */
    if (c->max_tokens > most)
        return epo_fail(EPO_E_ARG,
                        "buffer: max_tokens: found %d, allowed with %d nodes and top_k %d 1..%d",
                        c->max_tokens, nodes, c->top_k, most);
    b->most_tokens = c->max_tokens * nodes;
    return EPO_OK;
}

/* What is known before a routing is, so that a graph can hold it. */
static epo_status replays_set(epo_buffer *b) {
    const epo_group *g = b->group;
    if (!b->pad)
        return epo_fail(EPO_E_UNSUPPORTED,
                        "buffer: graphs with pad_to_capacity %d: what a CUDA graph holds must not "
                        "depend on the routing; pad to a capacity",
                        b->pad);
    if (g->delay_wgrad)
        return epo_fail(EPO_E_UNSUPPORTED, "buffer: graphs in a group that delays weight "
                                           "gradients; make the group with delay_wgrad off");
    if (g->ops->replay_open == NULL)
        return epo_fail(EPO_E_UNSUPPORTED, "buffer: graphs: the %s engine has none", g->ops->name);
    b->replays = true;
    return EPO_OK;
}

/* Checks the configuration and lays the window out; makes nothing. */
static epo_status configure(const epo_group *g, const epo_buffer_config *given, epo_buffer *b,
                            uint64_t *max_rows) {
    epo_buffer_config c = EPO_BUFFER_CONFIG_INIT;
    epo_status status =
        moe_input(&c, sizeof c, given, offsetof(epo_buffer_config, type), "epo_buffer_config");
    if (status == EPO_OK)
        status = check_numbers(g, &c);
    if (status != EPO_OK)
        return status;
    *b = (epo_buffer){.object = {&moe_engine}, .group = (epo_group *)(uintptr_t)g};
    b->all_experts = c.experts;
    b->local = c.experts / g->ranks;
    b->hidden = c.hidden;
    b->top_k = c.top_k;
    b->max_tokens = c.max_tokens;
    b->align = c.align_rows > 0 ? c.align_rows : DEFAULT_ALIGN;
    b->type = c.type;
    b->dispatcher = c.dispatcher != EPO_DISPATCH_DEFAULT ? c.dispatcher : g->dispatcher;
    b->row_bytes = (uint64_t)c.hidden * moe_type_size(c.type);
    status = links_set(b, &c);
    if (status == EPO_OK)
        status = wire_set(b, c.wire);
    if (status == EPO_OK)
        status = moe_capacity_set(b, &c);
    if (status != EPO_OK)
        return status;
    if (c.graphs != 0)
        status = replays_set(b);
    if (status != EPO_OK)
        return status;
    b->chunks = moe_buffer_chunks(g, c.chunks, b);
    if (b->replays && !moe_plan_on_device(b))
        return epo_fail(EPO_E_UNSUPPORTED,
                        "buffer: graphs with %d ranks, %d experts and %d chunks: the device does "
                        "not make the maps of so many; use fewer chunks",
                        g->ranks, b->experts, b->chunks);
    moe_tune_open(b, c.chunks == 0 && g->chunks == 0);
    b->counts_bytes = moe_plan_record_bytes(
        b->experts, b->peers.count,
        b->dispatcher == EPO_DISPATCH_FLEX && moe_plan_on_device(b) ? b->chunks : 0);
    uint64_t worst = worst_rows(b);
    if (!slots_fit(b) || (worst == 0 && moe_capacity_of(b, c.max_tokens, c.top_k) != 0))
        return epo_fail(EPO_E_ARG,
                        "buffer: %d tokens x %d slots x %d ranks%s are more rows than %d; lower "
                        "max_tokens%s",
                        c.max_tokens, c.top_k, g->ranks, b->pad ? ", padded," : "", INT32_MAX,
                        b->pad ? " or the capacity" : "");
    *max_rows = c.max_rows > 0 && c.max_rows < worst ? c.max_rows : worst;
    if (!lay_out(b, *max_rows))
        return epo_fail(EPO_E_NOMEM, "buffer: its window needs more than 2^64 bytes");
    return check_flags(b);
}

epo_status moe_buffer_bytes(const epo_group *group, const epo_buffer_config *config,
                            uint64_t *bytes) {
    if (group == NULL || bytes == NULL)
        return epo_fail(EPO_E_ARG, "buffer_bytes: group or bytes is NULL");
    epo_buffer b;
    uint64_t max_rows;
    epo_status status = configure(group, config, &b, &max_rows);
    if (status != EPO_OK)
        return status;
    const uint64_t page = group->ops->info(group->be)->window_page;
    uint64_t all = b.window_bytes;
    if (page > 0 && !epo_size_align(b.window_bytes, page, &all))
        return epo_fail(EPO_E_NOMEM, "buffer: its window needs more than 2^64 bytes");
    *bytes = all;
    return EPO_OK;
}

/* What must be the same on every rank, and the rows that each rank can hold. */
typedef struct buffer_digest {
    uint64_t max_rows;
    double capacity_factor;
    int32_t status, experts, hidden, top_k, max_tokens, chunks, align, type, dispatcher, tuned;
    int32_t capacity, overflow, pad, wire, replays;
} buffer_digest;

static buffer_digest digest_of(const epo_buffer *b, uint64_t max_rows) {
    buffer_digest d;
    memset(&d, 0, sizeof d);
    d.max_rows = max_rows;
    d.experts = b->all_experts;
    d.hidden = b->hidden;
    d.top_k = b->top_k;
    d.max_tokens = b->max_tokens;
    d.chunks = b->chunks;
    d.align = b->align;
    d.type = (int32_t)b->type;
    d.dispatcher = (int32_t)b->dispatcher;
    d.tuned = (int32_t)moe_tune_digest(b);
    d.capacity_factor = b->capacity_factor;
    d.capacity = b->capacity;
    d.overflow = (int32_t)b->overflow;
    d.pad = b->pad;
    d.wire = (int32_t)b->wire;
    d.replays = b->replays;
    return d;
}

static epo_status disagree(const buffer_digest *a, const buffer_digest *b, int rank) {
    const struct {
        const char *name;
        int32_t first, other;
    } f[] = {
        {"experts", a->experts, b->experts},
        {"hidden", a->hidden, b->hidden},
        {"top_k", a->top_k, b->top_k},
        {"max_tokens", a->max_tokens, b->max_tokens},
        {"chunks", a->chunks, b->chunks},
        {"align_rows", a->align, b->align},
        {"type", a->type, b->type},
        {"dispatcher", a->dispatcher, b->dispatcher},
        {"what EP_OVERLAP_CHUNKS_FILE, EP_OVERLAP_CUDA_WAY and EP_OVERLAP_CUDA_FLEX_HOME give",
         a->tuned, b->tuned},
        {"capacity", a->capacity, b->capacity},
        {"overflow", a->overflow, b->overflow},
        {"pad_to_capacity", a->pad, b->pad},
        {"wire", a->wire, b->wire},
        {"graphs", a->replays, b->replays},
    };
    for (size_t i = 0; i < sizeof f / sizeof *f; i++)
        if (f[i].first != f[i].other)
            return epo_fail(EPO_E_PEER,
                            "buffer: %s is %d on rank 0 and %d on rank %d; give all ranks the same",
                            f[i].name, f[i].first, f[i].other, rank);
    if (memcmp(&a->capacity_factor, &b->capacity_factor, sizeof a->capacity_factor) != 0)
        return epo_fail(EPO_E_PEER,
                        "buffer: capacity_factor is %g on rank 0 and %g on rank %d; give all ranks "
                        "the same",
                        a->capacity_factor, b->capacity_factor, rank);
    return EPO_OK;
}

/* All ranks learn each other's capacity, or that a rank's arguments were wrong:
 * then each of them returns an error and nobody waits. */
static epo_status agree(epo_buffer *b, epo_status mine, uint64_t max_rows, uint64_t *largest) {
    epo_group *g = b->group;
    buffer_digest own = digest_of(b, max_rows);
    own.status = (int32_t)mine;
    buffer_digest *all = calloc((size_t)g->ranks, sizeof *all);
    if (all == NULL)
        return moe_group_break(g, epo_fail(EPO_E_NOMEM, "memory: need %zu bytes for %d ranks",
                                           (size_t)g->ranks * sizeof *all, g->ranks));
    char text[EPO_ERROR_MAX];
    memcpy(text, epo_fail_text(), sizeof text);
    epo_status status = g->ops->allgather(g->be, &own, sizeof own, all);
    if (status == EPO_OK && mine != EPO_OK)
        status = epo_fail(mine, "%s", text);
    for (int r = 0; status == EPO_OK && r < g->ranks; r++) {
        if (all[r].status != EPO_OK)
            status = epo_fail((epo_status)all[r].status,
                              "buffer_create: rank %d refused its "
                              "arguments; its error line tells why",
                              r);
        else
            status = disagree(&all[0], &all[r], r);
        *largest = all[r].max_rows > *largest ? all[r].max_rows : *largest;
        if (status == EPO_OK)
            b->max_rows[r] = all[r].max_rows;
    }
    free(all);
    return status;
}

epo_status moe_buffer_create(epo_group *group, const epo_buffer_config *config, epo_buffer **out) {
    if (group == NULL)
        return epo_fail(EPO_E_ARG, "buffer_create: group is NULL");
    epo_status status = moe_group_turn(group, EPO_TURN_BUFFER, NULL, moe_group_ok(group));
    if (status != EPO_OK)
        return status;
    group->buffers_asked++;
    epo_buffer *b = calloc(1, sizeof *b);
    uint64_t *rows = calloc((size_t)group->ranks, sizeof *rows), max_rows = 0, largest = 0;
    if (b == NULL || rows == NULL) {
        status = moe_group_break(
            group, epo_fail(EPO_E_NOMEM, "memory: need %zu bytes for a buffer", sizeof *b));
        goto failed;
    }
    status = out == NULL ? epo_fail(EPO_E_ARG, "buffer_create: out is NULL")
                         : configure(group, config, b, &max_rows);
    if (status == EPO_OK && b->replays)
        status = group->ops->replay_open(group->be);
    b->group = group;
    b->number = group->buffers_asked;
    b->max_rows = rows;
    status = agree(b, status, max_rows, &largest);
    if (status != EPO_OK)
        goto failed;
    if (!lay_out(b, largest)) {
        status = epo_fail(EPO_E_NOMEM, "buffer: its window needs more than 2^64 bytes");
        goto failed;
    }
    status = group->ops->window_create(group->be, b->window_bytes, &b->window);
    if (status != EPO_OK)
        goto failed;
    tell_home(b);
    group->buffers++;
    *out = b;
    return EPO_OK;
failed:
    free(rows);
    free(b);
    return status;
}

epo_status moe_buffer_destroy(epo_buffer *buffer) {
    if (buffer == NULL)
        return EPO_OK;
    epo_group *group = buffer->group;
    const epo_status outside = moe_group_outside(group, "buffer_destroy");
    if (outside != EPO_OK)
        return outside;
    if (buffer->plans > 0) /* delayed weight gradients hold some */
        (void)moe_wgrad_settle(group, NULL);
    if (buffer->plans > 0)
        return moe_buffer_turn(
            buffer, EPO_TURN_BUFFER_END,
            epo_fail(EPO_E_STATE,
                     "buffer_destroy: %d plans made from it still exist (a saved pass holds "
                     "one, too); release them first",
                     buffer->plans));
    /* Flags of the last pass may still be on their way to a peer's window. */
    epo_status status = moe_buffer_turn(buffer, EPO_TURN_BUFFER_END, moe_group_ok(group));
    if (status == EPO_OK) {
        status = moe_group_drain(group);
        if (status == EPO_OK)
            status = group->ops->barrier(group->be);
        if (status != EPO_OK) /* what is queued still must not write into a window that is gone */
            status = moe_group_break(group, status);
    }
    moe_tune_close(buffer);
    group->ops->window_destroy(group->be, buffer->window);
    group->buffers--;
    free(buffer->max_rows);
    free(buffer);
    return moe_gone(status);
}

epo_ready moe_buffer_flag(const epo_buffer *buffer, uint64_t offset, uint64_t epoch,
                          const char *what, int chunk) {
    return (epo_ready){
        .flag = moe_buffer_at(buffer, offset),
        .epoch = epoch,
        .count = buffer->peers.count,
        .peer = -1,
        .what = what,
        .chunk = chunk,
        .first = buffer->peers.first,
        .step = buffer->peers.step,
        .counter = moe_buffer_counter(buffer, offset),
    };
}

epo_ready moe_buffer_link_flag(const epo_buffer *buffer, uint64_t offset, uint64_t epoch,
                               const char *what, int chunk) {
    const epo_group *g = buffer->group;
    const epo_peers peers =
        epo_peers_of(EPO_SCOPE_LINK, g->rank, g->ranks, g->ops->info(g->be)->nodes);
    epo_ready ready = moe_buffer_flag(buffer, offset, epoch, what, chunk);
    ready.count = peers.count;
    ready.first = peers.first;
    ready.step = peers.step;
    return ready;
}
