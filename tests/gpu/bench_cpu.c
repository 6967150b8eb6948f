/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_cpu.c - where a call's CPU time goes.  The benchmark is linked with
 * --wrap=epo_backend_get: lib/moe then calls the operations through the table made
 * here, which counts and times those of a thread that asked for it.
 */
#include "bench.h"

enum { NAMES = 64 };

typedef struct entry {
    const char *name;
    int calls;
    double us;
} entry;

static _Thread_local struct {
    bool on;
    double start;
    int count;
    entry e[NAMES];
} mine;

const epo_backend_ops *__real_epo_backend_get(void);
const epo_backend_ops *__wrap_epo_backend_get(void);

static void note(const char *name, double since) {
    int i = 0;
    if (!mine.on)
        return;
    while (i < mine.count && strcmp(mine.e[i].name, name) != 0)
        i++;
    if (i == NAMES)
        return;
    if (i == mine.count)
        mine.e[mine.count++] = (entry){name, 0, 0.0};
    mine.e[i].calls++;
    mine.e[i].us += bench_now_us() - since;
}

/* Operations whose name deps holds. */
#define NAMED(op, type)                                                                            \
    static epo_status timed_##op(epo_queue *q, const type *a, const epo_deps *deps) {              \
        const double t = bench_now_us();                                                           \
        const epo_status status = __real_epo_backend_get()->op(q, a, deps);                        \
        note(deps->name, t);                                                                       \
        return status;                                                                             \
    }
NAMED(exchange, epo_exchange)
NAMED(gather, epo_rows_gather)
NAMED(reduce, epo_rows_reduce)
NAMED(gemm, epo_gemm)
NAMED(swiglu, epo_swiglu)
NAMED(chain, epo_chain)

static epo_status timed_copy(epo_queue *q, void *dst, const void *src, uint64_t bytes,
                             const epo_deps *deps) {
    const double t = bench_now_us();
    const epo_status status = __real_epo_backend_get()->copy(q, dst, src, bytes, deps);
    note(deps->name, t);
    return status;
}

static epo_status timed_zero(epo_queue *q, void *ptr, uint64_t bytes, const epo_deps *deps) {
    const double t = bench_now_us();
    const epo_status status = __real_epo_backend_get()->zero(q, ptr, bytes, deps);
    note(deps->name, t);
    return status;
}

static epo_status timed_enter(epo_backend *be, epo_queue *const *q, int count, epo_stream stream) {
    const double t = bench_now_us();
    const epo_status status = __real_epo_backend_get()->stream_enter(be, q, count, stream);
    note("stream enter", t);
    return status;
}

static epo_status timed_leave(epo_backend *be, epo_event *event, epo_stream stream) {
    const double t = bench_now_us();
    const epo_status status = __real_epo_backend_get()->stream_leave(be, event, stream);
    note("stream leave", t);
    return status;
}

static epo_backend_ops timed;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void make_table(void) {
    timed = *__real_epo_backend_get();
    timed.exchange = timed_exchange;
    timed.gather = timed_gather;
    timed.reduce = timed_reduce;
    timed.gemm = timed_gemm;
    timed.swiglu = timed_swiglu;
    if (timed.chain != NULL)
        timed.chain = timed_chain;
    timed.zero = timed_zero;
    if (timed.copy != NULL)
        timed.copy = timed_copy;
    timed.stream_enter = timed_enter;
    timed.stream_leave = timed_leave;
}

const epo_backend_ops *__wrap_epo_backend_get(void) {
    pthread_once(&once, make_table);
    return &timed;
}

void bench_cpu_start(void) {
    mine.on = true;
    mine.count = 0;
    mine.start = bench_now_us();
}

void bench_cpu_print(const char *arm, const char *phase, int calls) {
    const double all = bench_now_us() - mine.start;
    double named = 0;
    mine.on = false;
    for (int i = 0; i < mine.count; i++) {
        named += mine.e[i].us;
        printf("cpu\t%s\t%s\t%s\t%.1f ops\t%.1f us\n", arm, phase, mine.e[i].name,
               (double)mine.e[i].calls / calls, mine.e[i].us / calls);
    }
    printf("cpu\t%s\t%s\tbetween operations\t\t%.1f us of %.1f\n", arm, phase,
           (all - named) / calls, all / calls);
}
