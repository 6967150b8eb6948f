/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange.c - rows to peers' windows.
 *
 * On COMM the bytes go by copy engines, which GEMMs do not starve; gathered rows are
 * packed first, and this rank's own rows moved, on the queue's second stream (see
 * staging.c).  Small pieces, and everything of a serial group (whose exchange runs on
 * COMPUTE, with the whole GPU to itself), are written by one kernel straight to the
 * peers; so are gathered rows and sums, unless the exchange is to go by copy engines:
 * then a few SMs pack them.  The flags follow the bytes.
 */
#include "backend/cuda/flex.h"
#include "backend/cuda/gpu.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Blocks of the kernel that stores rows: a few fill a link and are what GEMMs can spare;
 * more where the GPU has nothing else to do. */
#define PUSH_BLOCKS 16
#define PUSH_BLOCKS_NEAR 32
#define PUSH_BLOCKS_ALONE 64

static uint64_t segment_bytes(const epo_segment *s) { return s->rows * s->row_bytes; }
static uint64_t segment_room(const epo_segment *s) { return (segment_bytes(s) + 15) / 16 * 16; }

/* Do the ranks of the scope write each other's memory? */
static bool reaches(const epo_backend *be, epo_scope scope) {
    return be->one_sided && (be->info.nodes == 1 || scope == EPO_SCOPE_NODE);
}

static epo_status exchange_check(const epo_queue *q, const epo_exchange *x, const char *phase) {
    const epo_backend *be = q->be;
    const epo_peers to = epo_peers_of(x->scope, be->rank, be->ranks, be->info.nodes);
    for (int i = 0; i < x->nsend; i++) {
        const epo_segment *s = &x->send[i];
        uint64_t bytes = 0;
        const int n = s->peer - to.first;
        if (n < 0 || n % to.step != 0 || n / to.step >= to.count)
            return epo_fail(EPO_E_ARG,
                            "rank %d: %s: a segment's peer: found %d, which is not in scope %d of "
                            "%d ranks on %d nodes",
                            be->rank, phase, s->peer, (int)x->scope, be->ranks, be->info.nodes);
        if (__builtin_mul_overflow(s->rows, (uint64_t)s->row_bytes, &bytes) ||
            s->dst_offset > x->window->bytes || x->window->bytes - s->dst_offset < bytes)
            return epo_fail(EPO_E_ARG,
                            "rank %d: %s: segment for rank %d: %" PRIu64
                            " rows of %u bytes at %" PRIu64 " pass the window's end at %" PRIu64,
                            q->be->rank, phase, s->peer, s->rows, s->row_bytes, s->dst_offset,
                            x->window->bytes);
    }
    return EPO_OK;
}

/* Pieces for the kernel, launched in tables of one row size. */
typedef struct table {
    epo_queue *q;
    int blocks, sum_blocks;
    cudaStream_t stream;
    const char *phase;
    gpu_segment piece[GPU_SEGMENTS];
    int count;
    uint32_t row_bytes;
    int sum;
    epo_dtype type;
    const uint32_t *late; /* NULL: nothing tells that a wait before expired */
} table;

/* Replays go on behind a wait that expired: what they store to peers whose slots are not free
 * looks at this word first. */
static const uint32_t *late_of(const epo_queue *q, const epo_exchange *x) {
    return x->counter != NULL ? gpu_late_poll(q->be) : NULL;
}

static epo_status table_flush(table *t) {
    const gpu_raise none = {.late = t->late};
    if (t->count > 0 && t->sum > 0)
        GPU_TRY(t->q->be, t->phase,
                gpu_flex_sum_segments(t->stream, t->sum_blocks, t->piece, t->count, t->sum,
                                      t->row_bytes, t->type, t->late));
    else if (t->count > 0)
        GPU_TRY(t->q->be, t->phase,
                gpu_kernel_segments(t->stream, t->blocks, t->piece, t->count, t->row_bytes, &none));
    t->count = 0;
    return EPO_OK;
}

static epo_status table_add(table *t, char *dst, const epo_segment *s) {
    epo_status status = EPO_OK;
    if (t->count == GPU_SEGMENTS ||
        (t->count > 0 && (t->row_bytes != s->row_bytes || t->sum != s->sum)))
        status = table_flush(t);
    t->row_bytes = s->row_bytes;
    t->sum = s->sum;
    t->type = s->type;
    t->piece[t->count++] = (gpu_segment){dst, s->src, s->index, s->rows};
    return status;
}

/* The copies of one exchange; neighbouring bytes are one copy. */
typedef struct copies {
    void **dst, **src;
    size_t *bytes;
    size_t count;
} copies;

static bool copies_open(copies *c, int room) {
    void **all = calloc((size_t)room + 1, 2 * sizeof *all);
    c->bytes = calloc((size_t)room + 1, sizeof *c->bytes);
    c->count = 0;
    c->dst = all;
    c->src = all != NULL ? all + room + 1 : NULL;
    return all != NULL && c->bytes != NULL;
}

static void copies_close(copies *c) {
    free(c->dst);
    free(c->bytes);
}

static void copies_add(copies *c, char *dst, const char *src, uint64_t bytes) {
    if (c->count > 0) {
        const size_t last = c->count - 1;
        if ((char *)c->dst[last] + c->bytes[last] == dst &&
            (const char *)c->src[last] + c->bytes[last] == src) {
            c->bytes[last] += bytes;
            return;
        }
    }
    c->dst[c->count] = dst;
    c->src[c->count] = (void *)(uintptr_t)src;
    c->bytes[c->count++] = bytes;
}

/* In one call where the toolkit and the driver have it (12.8). */
static cudaError_t copies_batch(epo_queue *q, copies *c) {
#if CUDART_VERSION >= 12080
    struct cudaMemcpyAttributes how;
    size_t first = 0;
    memset(&how, 0, sizeof how);
    how.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    how.flags = cudaMemcpyFlagPreferOverlapWithCompute;
#if CUDART_VERSION >= 13000
    return cudaMemcpyBatchAsync((void *const *)c->dst, (const void *const *)c->src, c->bytes,
                                c->count, &how, &first, 1, q->stream);
#else
    size_t failed = 0;
    return cudaMemcpyBatchAsync(c->dst, c->src, c->bytes, c->count, &how, &first, 1, &failed,
                                q->stream);
#endif
#else
    (void)q;
    (void)c;
    return cudaErrorNotSupported;
#endif
}

static size_t step(const void *from, const void *to) {
    return (size_t)((const char *)to - (const char *)from);
}

/* Copies from the i-th on of the same bytes, the same distances apart, to one place: one of two
 * dimensions.  Experts' rows, padded to a capacity, that go back to a rank are that. */
static size_t copies_even(const copies *c, size_t i) {
    size_t n = 1;
    if (i + 1 >= c->count)
        return 1;
    const size_t to = c->bytes[i], from = step(c->src[i], c->src[i + 1]);
    if (from < to || from > INT32_MAX || to > INT32_MAX)
        return 1;
    while (i + n < c->count && c->bytes[i + n] == to &&
           step(c->dst[i + n - 1], c->dst[i + n]) == to &&
           step(c->src[i + n - 1], c->src[i + n]) == from)
        n++;
    return n;
}

static epo_status copies_run(epo_queue *q, copies *c, const char *phase) {
    epo_backend *be = q->be;
    if (c->count > 1 && be->batch_copies && q->capture == 0) { /* graphs have no such node */
        cudaError_t e = copies_batch(q, c);
        if (e == cudaSuccess)
            return EPO_OK;
        if (e != cudaErrorNotSupported && e != cudaErrorCallRequiresNewerDriver)
            return gpu_fail(be, "cudaMemcpyBatchAsync", phase, e);
        (void)cudaGetLastError();
        be->batch_copies = false;
    }
    for (size_t i = 0, n; i < c->count; i += n) {
        n = copies_even(c, i);
        if (n == 1)
            GPU_TRY(be, phase,
                    cudaMemcpyAsync(c->dst[i], c->src[i], c->bytes[i], cudaMemcpyDeviceToDevice,
                                    q->stream));
        else
            GPU_TRY(be, phase,
                    cudaMemcpy2DAsync(c->dst[i], c->bytes[i], c->src[i],
                                      step(c->src[i], c->src[i + 1]), c->bytes[i], n,
                                      cudaMemcpyDeviceToDevice, q->stream));
    }
    return EPO_OK;
}

/* Few SMs, and copy engines for whatever goes to a peer. */
static bool by_engines(const epo_queue *q, const epo_exchange *x) {
    return q->be->pack || (x->way == EPO_WAY_ENGINES && !x->alone);
}

/* Blocks that pack, and those that sum. */
static int pack_blocks(const epo_queue *q, const epo_exchange *x) {
    return x->way == EPO_WAY_ENGINES && !x->alone ? q->be->pack_sms : q->be->sms;
}

/* Is there anything for a kernel beside the copies? */
static bool second_stream(const epo_queue *q, const epo_exchange *x) {
    for (int i = 0; i < x->nsend; i++)
        if (x->send[i].rows > 0 && (x->send[i].peer == q->be->rank || x->send[i].index != NULL))
            return true;
    return false;
}

/* Gathered rows would have to be packed for a copy engine, and each piece costs the CPU
 * a copy: at a pass's beginning, when they come, SMs idle anyway. */
static bool by_kernel(const epo_queue *q, const epo_exchange *x) {
    uint64_t bytes = 0, pieces = 0;
    bool gathered = false;
    for (int i = 0; i < x->nsend; i++)
        if (x->send[i].peer != q->be->rank) {
            bytes += segment_bytes(&x->send[i]);
            gathered = gathered || x->send[i].index != NULL;
            pieces++;
        }
    /* Replayed: nothing is packed, there is one stream, and copy engines ask nobody whether the
     * peers' slots are free. */
    return x->counter != NULL || q->kind != EPO_QUEUE_COMM ||
           ((gathered || x->alone) && !by_engines(q, x)) || bytes < pieces * q->be->small_piece;
}

/* Segments from the front that have rows of one size. */
static int one_size(const epo_exchange *x, int first) {
    int i = first;
    while (i < x->nsend && x->send[i].row_bytes == x->send[first].row_bytes)
        i++;
    return i - first;
}

/* Rows, and perhaps narrow ones beside them: can a launch of each store all, and the
 * last tell of each part? */
static bool few_launches(const epo_exchange *x) {
    const int rows = one_size(x, 0), rest = x->nsend - rows;
    return rows > 0 && rows <= GPU_SEGMENTS && rest <= GPU_SEGMENTS &&
           x->parts <= (rest > 0 ? 1 : GPU_PARTS) && (rest == 0 || one_size(x, rows) == rest);
}

/* Segments [first, first + count) in one launch; where the parts end goes to `raise`. */
static epo_status push_rows(epo_queue *q, const epo_exchange *x, int first, int count,
                            const char *phase, gpu_raise *raise) {
    gpu_segment piece[GPU_SEGMENTS];
    const int blocks = x->alone ? PUSH_BLOCKS_ALONE : x->near ? PUSH_BLOCKS_NEAR : PUSH_BLOCKS;
    uint32_t rows = 0;
    int part = 0, n = 0;
    for (int i = 0; i < count; i++) {
        const epo_segment *s = &x->send[first + i];
        for (; part < raise->parts - 1 && i == x->part_first[part + 1] - x->part_first[0]; part++)
            raise->part[part].end = rows;
        if (s->rows > 0)
            piece[n++] =
                (gpu_segment){x->window->peer[s->peer] + s->dst_offset, s->src, s->index, s->rows};
        rows += (uint32_t)s->rows;
    }
    for (; part < raise->parts; part++)
        raise->part[part].end = rows;
    GPU_TRY(q->be, phase,
            gpu_kernel_segments(q->stream, blocks, piece, n, x->send[first].row_bytes, raise));
    return EPO_OK;
}

/* The kernel raises the flags itself, part by part. */
static epo_status push_few(epo_queue *q, const epo_exchange *x, const char *phase) {
    const int rows = one_size(x, 0), rest = x->nsend - rows;
    gpu_raise raise, none = {.late = late_of(q, x)};
    epo_status status = x->untold ? EPO_OK : gpu_flag_raise(q, x, phase, &raise);
    if (status == EPO_OK && rest > 0)
        status = push_rows(q, x, 0, rows, phase, &none);
    return status != EPO_OK ? status
                            : push_rows(q, x, rest > 0 ? rows : 0, rest > 0 ? rest : rows, phase,
                                        x->untold ? &none : &raise);
}

/* The words that tell of it, where somebody looks at them. */
static epo_status tell(epo_queue *q, cudaStream_t stream, const epo_exchange *x, gpu_flag_to to,
                       const char *phase) {
    return x->untold ? EPO_OK : gpu_flag_write(q, stream, x, to, phase);
}

/* Everything straight to its place, by stores; sums on all SMs, as their operands are what
 * takes time, unless a GEMM has the others. */
static epo_status push(epo_queue *q, const epo_exchange *x, const char *phase) {
    table t = {.q = q,
               .stream = q->stream,
               .phase = phase,
               .late = late_of(q, x),
               .blocks = x->alone ? PUSH_BLOCKS_ALONE : PUSH_BLOCKS,
               .sum_blocks = x->few ? GPU_BESIDE_SMS : q->be->sms};
    epo_status status = EPO_OK;
    for (int i = 0; i < x->nsend && status == EPO_OK; i++) {
        const epo_segment *s = &x->send[i];
        if (s->rows > 0)
            status = table_add(&t, x->window->peer[s->peer] + s->dst_offset, s);
    }
    if (status == EPO_OK)
        status = table_flush(&t);
    if (status == EPO_OK)
        status = tell(q, q->stream, x, GPU_FLAG_ALL, phase);
    return status;
}

static bool has_sums(const epo_exchange *x) {
    for (int i = 0; i < x->nsend; i++)
        if (x->send[i].sum > 0)
            return true;
    return false;
}

/* The second stream, behind the queue; what follows without waits need not join again. */
static epo_status join(epo_queue *q, bool stale, cudaStream_t *out) {
    epo_status status = gpu_staging_join(q, stale, out);
    q->stale = q->stale && status != EPO_OK;
    return status;
}

/* Peers' gathered rows to staging, and own rows with them; from[i]: where segment i
 * lies contiguously then. */
static epo_status pack(epo_queue *q, const epo_exchange *x, cudaStream_t stream, const char *phase,
                       const char **from, bool *packed) {
    const int blocks = pack_blocks(q, x);
    table t = {.q = q, .stream = stream, .phase = phase, .blocks = blocks, .sum_blocks = blocks};
    uint64_t need = 0;
    char *at = NULL;
    epo_status status = EPO_OK;
    for (int i = 0; i < x->nsend; i++) {
        from[i] = x->send[i].src;
        if (x->send[i].peer != q->be->rank && x->send[i].index != NULL)
            need += segment_room(&x->send[i]);
    }
    *packed = need > 0;
    if (need > 0)
        status = gpu_staging_take(q, need, &at);
    for (int i = 0; i < x->nsend && status == EPO_OK; i++) {
        const epo_segment *s = &x->send[i];
        if (s->rows == 0 || (s->peer != q->be->rank && s->index == NULL) || need == 0)
            continue;
        if (s->peer == q->be->rank) {
            status = table_add(&t, x->window->base + s->dst_offset, s);
            continue;
        }
        from[i] = at;
        status = table_add(&t, at, s);
        at += segment_room(s);
    }
    return status == EPO_OK ? table_flush(&t) : status;
}

/* This rank's own rows to its own window. */
static epo_status keep(epo_queue *q, const epo_exchange *x, cudaStream_t stream,
                       const char *phase) {
    table t = {.q = q,
               .stream = stream,
               .phase = phase,
               .blocks = PUSH_BLOCKS,
               .sum_blocks = pack_blocks(q, x)};
    epo_status status = EPO_OK;
    for (int i = 0; i < x->nsend && status == EPO_OK; i++)
        if (x->send[i].peer == q->be->rank && x->send[i].rows > 0)
            status = table_add(&t, x->window->base + x->send[i].dst_offset, &x->send[i]);
    return status == EPO_OK ? table_flush(&t) : status;
}

/* To peers by copy engines, then their flags; own rows were packed along, or go
 * beside, where a GEMM that holds the SMs does not keep the peers waiting. */
static epo_status copy(epo_queue *q, const epo_exchange *x, const epo_deps *deps, bool stale,
                       const char **from) {
    epo_backend *be = q->be;
    const char *phase = deps->name;
    const bool second = second_stream(q, x);
    cudaStream_t beside = NULL;
    copies c;
    bool packed = false;
    epo_status status = second ? join(q, stale, &beside) : EPO_OK;
    if (status == EPO_OK)
        status = pack(q, x, beside, phase, from, &packed);
    if (status == EPO_OK && packed)
        status = gpu_staging_packed(q, phase);
    if (status != EPO_OK)
        return status;
    if (copies_open(&c, x->nsend)) {
        for (int i = 0; i < x->nsend; i++) {
            const epo_segment *s = &x->send[i];
            if (s->peer != be->rank && s->rows > 0)
                copies_add(&c, x->window->peer[s->peer] + s->dst_offset, from[i], segment_bytes(s));
        }
        status = copies_run(q, &c, phase);
    } else {
        status = epo_fail(EPO_E_NOMEM, "rank %d: no memory for %d copies", be->rank, x->nsend);
    }
    copies_close(&c);
    if (status == EPO_OK && packed)
        status = gpu_staging_copied(q, phase);
    if (status == EPO_OK)
        status = tell(q, q->stream, x, packed || !second ? GPU_FLAG_ALL : GPU_FLAG_PEERS, phase);
    if (status != EPO_OK || packed || !second)
        return status;
    status = keep(q, x, beside, phase);
    gpu_staging_ahead(q);
    if (status == EPO_OK)
        status = tell(q, beside, x, GPU_FLAG_SELF, phase);
    return status;
}

/* Two-sided: all on the queue's stream, as NCCL's kernels need SMs anyway. */
static epo_status pairs(epo_queue *q, const epo_exchange *x, const epo_deps *deps, bool stale,
                        const char **from) {
    const bool second = second_stream(q, x);
    cudaStream_t beside = NULL;
    bool packed = false;
    epo_status status = second ? join(q, stale, &beside) : EPO_OK;
    if (status == EPO_OK)
        status = pack(q, x, beside, deps->name, from, &packed);
    if (status == EPO_OK && second && !packed)
        status = keep(q, x, beside, deps->name);
    if (status == EPO_OK && second)
        status = gpu_staging_packed(q, deps->name);
    if (status == EPO_OK)
        status = gpu_pairs_exchange(q, x, from, deps);
    if (status == EPO_OK && packed)
        status = gpu_staging_copied(q, deps->name);
    if (status == EPO_OK)
        status = tell(q, q->stream, x, GPU_FLAG_ARRIVED, deps->name);
    return status;
}

/* One part, between gpu_op_begin and gpu_op_end.  Who waits for a pass's last part waits
 * for all: where it is told of on the queue itself, own rows of earlier parts, which go
 * beside, must be there. */
static epo_status exchange_part(epo_queue *q, const epo_exchange *x, const epo_deps *deps,
                                bool stale) {
    const bool sums = has_sums(x);
    const bool reached = reaches(q->be, x->scope);
    const bool stores = reached && (by_kernel(q, x) || (sums && !by_engines(q, x)));
    epo_status status = EPO_OK;
    if (stores || x->nsend == 0 || !second_stream(q, x))
        status = gpu_staging_settle(q, deps->name);
    if (status != EPO_OK)
        return status;
    /* A graph's index may leave rows alone, which only the kernel that stores them can. */
    if (x->counter != NULL && !stores && second_stream(q, x))
        return epo_fail(EPO_E_STATE,
                        "rank %d: %s: gathered rows of calls that graphs may capture are stored by "
                        "a kernel, and this exchange has another way",
                        q->be->rank, deps->name);
    if (x->nsend == 0 && (reached || x->nrecv == 0))
        return tell(q, q->stream, x, reached ? GPU_FLAG_ALL : GPU_FLAG_ARRIVED, deps->name);
    if (stores)
        return !sums && few_launches(x) ? push_few(q, x, deps->name) : push(q, x, deps->name);
    const char **from = calloc((size_t)x->nsend + 1, sizeof *from);
    if (from == NULL)
        return epo_fail(EPO_E_NOMEM, "rank %d: no memory for %d segments", q->be->rank, x->nsend);
    status = reached ? copy(q, x, deps, stale, from) : pairs(q, x, deps, stale, from);
    free(from);
    return status;
}

epo_status gpu_exchange(epo_queue *q, const epo_exchange *x, const epo_deps *deps) {
    bool stale = q->stale || deps->nwait > 0;
    epo_status status = exchange_check(q, x, deps->name);
    if (status == EPO_OK && x->gathered > 0 && q->kind == EPO_QUEUE_COMM && q->capture == 0 &&
        (q->be->pack || !q->be->one_sided || x->way == EPO_WAY_ENGINES))
        status = gpu_staging_reserve(q, x->gathered);
    if (status != EPO_OK || !gpu_op_begin(q, deps, &status))
        return status;
    if (x->parts <= 1 || (by_kernel(q, x) && few_launches(x))) {
        status = exchange_part(q, x, deps, stale);
        return status == EPO_OK ? gpu_op_end(q, deps) : status;
    }
    for (int i = 0; i < x->parts && status == EPO_OK; i++) {
        epo_exchange part = *x;
        part.send = x->send + (x->part_first[i] - x->part_first[0]);
        part.nsend = x->part_first[i + 1] - x->part_first[i];
        part.flag_offset = x->flag_offset + (uint64_t)i * x->flag_step;
        part.parts = 0;
        status = exchange_part(q, &part, deps, stale);
        stale = q->stale;
    }
    return status == EPO_OK ? gpu_op_end(q, deps) : status;
}

epo_status gpu_copy(epo_queue *q, void *dst, const void *src, uint64_t bytes,
                    const epo_deps *deps) {
    void *to = dst, *from = (void *)(uintptr_t)src;
    size_t size = bytes;
    copies c = {&to, &from, &size, bytes > 0 ? 1 : 0};
    epo_status status;
    if (!gpu_op_begin(q, deps, &status))
        return status;
    status = copies_run(q, &c, deps->name);
    return status == EPO_OK ? gpu_op_end(q, deps) : status;
}
