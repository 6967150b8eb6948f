/* SPDX-License-Identifier: Apache-2.0
 *
 * figures.c - at the end of the process, if EP_OVERLAP_RECORD asks for it: one line from
 * rank 0, and one JSON object per rank where a folder is given.
 */
#include "config.h"

#include "preload/intercept/intercept.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "core/names.h"
#include "preload/intercept/mapped.h"
#include "preload/record/file.h"
#include "preload/record/recorder.h"

#define REASONS 3 /* in the line */

static struct {
    pthread_mutex_t lock;
    pid_t pid; /* whose figures these are: a forked child's are not */
} context = {PTHREAD_MUTEX_INITIALIZER, 0};

typedef struct sums {
    uint64_t comms, exchanges, exchange_bytes, sent, carried, other, fell[FALLBACKS];
} sums;

static uint64_t bytes_of(const tally *t) { return atomic_load(&t->bytes); }
static uint64_t calls_of(const tally *t) { return atomic_load(&t->calls); }

static void add_comm(const comm *c, void *argument) {
    sums *s = argument;
    s->comms++;
    /* (an ncclAlltoAll that we carried went out as messages) */
    s->exchanges += calls_of(&c->exchange) + calls_of(&c->whole_passed);
    s->exchange_bytes += bytes_of(&c->exchange) + bytes_of(&c->whole_passed);
    s->sent += bytes_of(&c->send) + bytes_of(&c->whole_passed);
    s->carried += bytes_of(&c->carried);
    for (int k = COLLECTIVE_ALLTOALL + 1; k < COLLECTIVES; k++)
        s->other += bytes_of(&c->whole[k]);
    for (int f = 0; f < FALLBACKS; f++)
        s->fell[f] += bytes_of(&c->fell[f]);
}

/* The reason of the most bytes that is not in `told`; FALLBACK_NONE: none is left. */
static int next_reason(const uint64_t fell[FALLBACKS], const bool told[FALLBACKS]) {
    int most = FALLBACK_NONE;
    for (int f = FALLBACK_NONE + 1; f < FALLBACKS; f++)
        if (!told[f] && fell[f] > 0 && (most == FALLBACK_NONE || fell[f] > fell[most]))
            most = f;
    return most;
}

/* The three of the most bytes, and what can be done about the first of them where anything can. */
static void write_reasons(const uint64_t fell[FALLBACKS]) {
    bool told[FALLBACKS] = {false};
    const char *advice = NULL;
    for (int i = 0, f = next_reason(fell, told); i < REASONS && f != FALLBACK_NONE; i++) {
        fprintf(stderr, "%s%s (%.1f MB)", i == 0 ? "; left to NCCL mostly for: " : ", ",
                fallback_name((fallback)f), (double)fell[f] / 1e6);
        advice = advice != NULL ? advice : fallback_advice((fallback)f);
        told[f] = true;
        f = next_reason(fell, told);
    }
    if (advice != NULL)
        fprintf(stderr, "; %s", advice);
}

static void write_line(const sums *s) {
    fprintf(stderr,
            "ep-overlap: NCCL messages of rank 0: %.1f MB in %" PRIu64 " communicators, %" PRIu64
            " all-to-all exchanges (%.1f MB); %.1f MB carried by copy engines",
            (double)s->sent / 1e6, s->comms, s->exchanges, (double)s->exchange_bytes / 1e6,
            (double)s->carried / 1e6);
    write_reasons(s->fell);
    fputc('\n', stderr);
}

/* ---- JSON ---- */

static void text_out(FILE *f, const char *name, const char *text) {
    fprintf(f, "\"%s\": ", name);
    if (text[0] == '\0') {
        fputs("null", f);
        return;
    }
    record_text_put(f, text, strlen(text));
}

static void tally_out(FILE *f, const char *name, const tally *t) {
    fprintf(f, "\"%s\": {\"calls\": %" PRIu64 ", \"bytes\": %" PRIu64 "}", name, calls_of(t),
            bytes_of(t));
}

typedef struct list {
    FILE *file;
    int count;
} list;

static void comm_out(const comm *c, void *argument) {
    static const char *const kinds[COLLECTIVES] = {"alltoall",      "allreduce", "allgather",
                                                   "reducescatter", "broadcast", "reduce"};
    list *l = argument;
    FILE *f = l->file;
    fprintf(f, "%s\n    {\"rank\": %d, \"ranks\": %d, ", l->count++ ? "," : "", c->rank, c->ranks);
    tally_out(f, "send", &c->send);
    fputs(", ", f);
    tally_out(f, "recv", &c->recv);
    fputs(", ", f);
    tally_out(f, "exchange", &c->exchange);
    fprintf(f, ", \"largest_exchange\": %" PRIu64 ", ", (uint64_t)atomic_load(&c->largest));
    tally_out(f, "carried", &c->carried);
    for (int k = 0; k < COLLECTIVES; k++) {
        fputs(", ", f);
        tally_out(f, kinds[k], &c->whole[k]);
    }
    fputs(",\n     ", f);
    text_out(f, "not_carried", c->why == FALLBACK_NONE ? "" : fallback_name(c->why));
    fputs(", \"left_to_nccl\": {", f);
    int fell = 0;
    for (int k = FALLBACK_NONE + 1; k < FALLBACKS; k++)
        if (calls_of(&c->fell[k]) > 0) {
            fputs(fell++ ? ", " : "", f);
            tally_out(f, fallback_name((fallback)k), &c->fell[k]);
        }
    fputs("}}", f);
}

typedef struct whose {
    int rank, ranks;
} whose;

static void json_out(FILE *f, const void *argument) {
    const whose *w = argument;
    const mapped none = {0}, *m = mapped_known() != NULL ? mapped_known() : &none;
    fprintf(f, "{\"version\": 1, \"rank\": %d, \"ranks\": %d, \"pid\": %d, ", w->rank, w->ranks,
            (int)getpid());
    text_out(f, "mode", mode_name(mode_now()));
    fprintf(f, ",\n  \"mapped\": {\"nccls\": %d, ", m->nccls);
    text_out(f, "nccl", m->nccl);
    fputs(", ", f);
    text_out(f, "nccl_path", m->nccl_path);
    fputs(", ", f);
    text_out(f, "torch", m->torch);
    fputs(", ", f);
    text_out(f, "transformer_engine", m->te);
    fputs(", ", f);
    text_out(f, "cuda", m->cuda);
    fputs(", ", f);
    text_out(f, "driver", m->driver);
    fputs("},\n  \"communicators\": [", f);
    list l = {f, 0};
    comm_each(comm_out, &l);
    fputs("\n  ]}\n", f);
}

static void write_file(const char *folder, int rank, int ranks) {
    char path[RECORD_PATH];
    const whose w = {rank, ranks};
    record_file_name(path, folder, "nccl", rank);
    if (record_file_write(path, json_out, &w) != EPO_OK)
        fprintf(stderr, "ep-overlap: %s; no figures written\n", epo_fail_text());
}

/* Rank 0 says it while there is time to make the folder. */
static void look_at_folder(const char *folder) {
    struct stat st;
    int error = stat(folder, &st) != 0             ? errno
                : !S_ISDIR(st.st_mode)             ? ENOTDIR
                : access(folder, W_OK | X_OK) != 0 ? errno
                                                   : 0;
    if (error != 0)
        fprintf(stderr,
                "ep-overlap: warning: " EPO_OUT_RECORD "=%.512s: %s; what is recorded is written "
                "there as the program ends: a folder that can be written is needed by then\n",
                folder, strerror(error));
}

static void write_all(const char *record) {
    recorder_end();
    int ranks;
    const int rank = mapped_rank(&ranks);
    sums s;
    memset(&s, 0, sizeof s);
    comm_each(add_comm, &s);
    if (rank == 0)
        write_line(&s);
    if (record[0] != '\0')
        write_file(record, rank, ranks);
}

/* A reader of standard error that is gone, and a limit of a file's size, are no reason for a
 * program that has ended well to be killed. */
static void figures_write(void) {
    static const struct timespec at_once = {0, 0};
    const char *record = mode_record();
    sigset_t ours, before, pending;
    if (record == NULL || context.pid != getpid())
        return;
    sigemptyset(&ours);
    sigaddset(&ours, SIGPIPE);
    sigaddset(&ours, SIGXFSZ);
    sigpending(&pending);
    (void)pthread_sigmask(SIG_BLOCK, &ours, &before);
    write_all(record);
    if (!sigismember(&pending, SIGPIPE) && !sigismember(&pending, SIGXFSZ))
        while (sigtimedwait(&ours, NULL, &at_once) > 0)
            ;
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void figures_at_exit(void) {
    int ranks;
    const int rank = mapped_rank(&ranks);
    const char *record = mode_record();
    pthread_mutex_lock(&context.lock);
    const bool first = context.pid == 0;
    if (first)
        context.pid = getpid();
    pthread_mutex_unlock(&context.lock);
    if (!first)
        return;
    (void)atexit(figures_write);
    if (record != NULL && record[0] != '\0' && rank == 0)
        look_at_folder(record);
}
