/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_run.c - the arms, the ranks as threads or as the step has them, and the
 * figures that follow from what they measured.
 */
#include "config.h"

#include "bench_rank.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tool.h"

/* ---- arms ------------------------------------------------------------------ */

static const char *dispatcher_name(epo_dispatcher d) {
    return d == EPO_DISPATCH_FLEX ? "flex" : "alltoall";
}

static bench_arm *add_arm(bench_arm *arm, int *arms, epo_dispatcher d, const char *what) {
    bench_arm *a = &arm[*arms];
    memset(a, 0, sizeof *a);
    snprintf(a->name, sizeof a->name, "%s %s", dispatcher_name(d), what);
    a->dispatcher = d;
    a->overlap = EPO_ON;
    a->delay = EPO_OFF;
    ++*arms;
    return a;
}

static void add_overlapped(const bench_options *o, bench_arm *arm, int *arms, epo_dispatcher d,
                           int serial, int chunks) {
    char what[32];
    for (int delay = 0; delay < 2; delay++) {
        const char *words = delay ? "overlap+wgrad" : "overlap";
        if (o->chunk_counts > 1 || chunks > 0)
            snprintf(what, sizeof what, "%s n=%d", words, chunks);
        else
            snprintf(what, sizeof what, "%s", words);
        bench_arm *a = add_arm(arm, arms, d, what);
        a->delay = delay ? EPO_ON : EPO_OFF;
        a->chunks = chunks;
        a->serial = serial;
    }
}

int bench_arms(const bench_options *o, bench_arm *arm) {
    int arms = 0;
    for (int d = EPO_DISPATCH_ALLTOALL; d <= EPO_DISPATCH_FLEX; d++) {
        if (o->dispatcher >= 0 && o->dispatcher != d)
            continue;
        const int serial = arms;
        bench_arm *a = add_arm(arm, &arms, (epo_dispatcher)d, "serial");
        a->overlap = EPO_OFF;
        a->serial = serial;
        for (int i = 0; i < o->chunk_counts || i == 0; i++)
            add_overlapped(o, arm, &arms, (epo_dispatcher)d, serial,
                           o->chunk_counts > 0 ? o->chunks[i] : 0);
    }
    return arms;
}

/* ---- ranks ------------------------------------------------------------------ */

void bench_progress(bench_rank *b, const char *what, int done, int of) {
    const double now = now_ms();
    if (b->rank != 0)
        return;
    if (isatty(STDERR_FILENO)) {
        fprintf(stderr, "\r%s: %d of %d\033[K", what, done + 1, of);
    } else if (b->shown_ms <= 0) {
        b->shown_ms = now;
    } else if (now - b->shown_ms > 5000) {
        fprintf(stderr, "ep-overlap bench: %s: %d of %d\n", what, done + 1, of);
        b->shown_ms = now;
    }
}

/* The ranks no longer agree: the others would wait for this one.  One line of the
 * first rank that knows, then the process ends; a step's other ranks see that. */
static void *abandon(const bench_rank *b, epo_status status) {
    static pthread_mutex_t first = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&first); /* and keep it */
    const bool same = status == EPO_E_ARG || status == EPO_E_UNSUPPORTED;
    epo_tool_progress_end();
    const int exit_status = status == EPO_E_ARG ? EPO_EXIT_USAGE : EPO_EXIT_SYSTEM;
    if (!same || b->world != NULL || b->rank <= 0)
        (void)epo_tool_error("bench", exit_status, "%s", epo_fail_text());
    fflush(NULL);
    _exit(exit_status);
}

static void *run_rank(void *ctx) {
    bench_rank *b = ctx;
    epo_status status = bench_rank_open(b);
    if (status == EPO_OK)
        status = bench_rank_measure(b);
    if (status == EPO_OK)
        status = bench_rank_close(b);
    return status == EPO_OK ? NULL : abandon(b, status);
}

static epo_status make_worlds(epo_world **world, const bench_options *o, int arms, int ranks) {
    for (int a = 0; a < arms; a++) {
        epo_status status = bench_passed(epo_world_create_on(o->engine, ranks, &world[a]));
        if (status != EPO_OK)
            return status;
    }
    return EPO_OK;
}

static epo_status run_threads(const bench_rank *like, int ranks) {
    epo_world *world[BENCH_ARMS] = {NULL};
    bench_rank *b = calloc((size_t)ranks, sizeof *b);
    pthread_t *thread = calloc((size_t)ranks, sizeof *thread);
    epo_status status = b == NULL || thread == NULL
                            ? epo_fail(EPO_E_NOMEM, "no memory for %d ranks", ranks)
                            : make_worlds(world, like->o, like->arms, ranks);
    for (int r = 0; r < ranks && status == EPO_OK; r++) {
        b[r] = *like;
        b[r].world = world;
        b[r].rank = r;
        b[r].ranks = ranks;
        int failed = pthread_create(&thread[r], NULL, run_rank, &b[r]);
        if (failed != 0) /* those that run wait for it: abandon ends them all */
            abandon(&b[r], epo_fail(EPO_E_SYSTEM, "thread %d of %d cannot be started: %s", r, ranks,
                                    strerror(failed)));
    }
    for (int r = 0; r < ranks && status == EPO_OK; r++)
        pthread_join(thread[r], NULL);
    for (int a = 0; a < like->arms; a++)
        epo_world_destroy(world[a]);
    free(thread);
    free(b);
    return status;
}

/* How many ranks the launcher started; 1: none, or it does not say. */
int bench_step_ranks(void) {
    static const char *const names[] = {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE",
                                        "SLURM_STEP_NUM_TASKS"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const char *text = getenv(names[i]);
        if (text != NULL && *text != '\0')
            return (int)strtol(text, NULL, 10);
    }
    return 1;
}

int bench_start(const bench_options *o, int gpus, bool *processes) {
    int ranks = gpus < 1 ? 2 : gpus < BENCH_RANKS ? gpus : BENCH_RANKS;
    while (gpus > 0 && ranks > 1 && o->experts % ranks != 0)
        ranks--;
    ranks = o->ranks > 0 ? o->ranks : ranks;
    *processes =
        ranks > 1 && (o->launch == LAUNCH_PROCESSES || (o->launch == LAUNCH_AUTO && gpus > 0));
    return ranks;
}

/* ---- figures ------------------------------------------------------------------ */

static double efficiency(const bench_arm *arm, int a, double serial, double on, double floor) {
    return arm[a].serial == a || serial <= floor ? NAN : (serial - on) / (serial - floor);
}

static void conclude(const bench_arm *arm, int arms, bench_result *r) {
    const bool host = strcmp(r->engine, "host") == 0;
    r->share = host && r->cores > 0 ? fmax(1, (double)r->info.ranks / r->cores) : 1;
    r->gflops_f = r->ffn_best_f > 0 ? r->flop_f / (r->ffn_best_f * 1e6) : 0;
    r->gflops_b = r->ffn_best_b > 0 ? r->flop_b / (r->ffn_best_b * 1e6) : 0;
    for (int a = 0; a < arms; a++) {
        bench_figures *f = &r->arm[a];
        const bench_figures *s = &r->arm[arm[a].serial];
        f->floor_f = fmax(r->ffn_best_f * r->share, 2 * r->least_ms);
        f->floor_b = fmax(r->ffn_best_b * r->share, 4 * r->least_ms);
        f->exposed_f = f->forward.median - s->ffn_f;
        f->exposed_b = f->both.median - s->ffn_b;
        f->efficiency_f = efficiency(arm, a, s->forward.median, f->forward.median, f->floor_f);
        f->efficiency_b = efficiency(arm, a, s->both.median, f->both.median, f->floor_b);
    }
}

epo_status bench_measure(const bench_options *o, const bench_arm *arm, int arms, bench_result *out,
                         bool *rank_zero) {
    const int step = bench_step_ranks();
    bench_rank b = {.o = o, .arm = arm, .arms = arms, .rank = -1, .out = out};
    epo_status status = EPO_OK;
    memset(out, 0, sizeof *out);
    if (step > 1 && o->ranks > 0)
        return epo_fail(EPO_E_ARG,
                        "--ranks: found %d in a step of %d ranks; leave it out, the step's ranks "
                        "are the ranks",
                        o->ranks, step);
    if (step > 1) {
        (void)run_rank(&b);
        *rank_zero = b.rank == 0;
    } else {
        status = run_threads(&b, o->ranks > 0 ? o->ranks : 2);
        *rank_zero = true;
    }
    epo_tool_progress_end();
    if (status == EPO_OK && *rank_zero)
        conclude(arm, arms, out);
    return status;
}
