/* SPDX-License-Identifier: Apache-2.0
 *
 * judge.c - what every fault has to end in: statuses, lines, words, and what may be left.
 */
#include "config.h"

#include "fault.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LINES = 2400 };

/* What the line of a rank that waited has to say of the phase: one of these. */
static const struct {
    const char *name, *words[4];
} phases[PHASES] = {
    [PHASE_GROUP] = {"group creation", {"make a group", "group was made", NULL}},
    [PHASE_TOLD] = {"group creation, told", {"bootstrap", "group"}},
    [PHASE_MEETING] = {"group creation, come",
                       {" a group", "group was made", "agreement", "barrier"}},
    [PHASE_NCCL] = {"group creation, in NCCL", {"communicator"}},
    [PHASE_BUFFER] = {"buffer creation", {"allgather", "agreement", "barrier"}},
    [PHASE_PLAN] = {"plan", {"allgather", "counts", "plan"}},
    [PHASE_DISPATCH] = {"dispatch", {"dispatch", NULL, NULL}},
    [PHASE_COMBINE] = {"combine", {"combine", NULL, NULL}},
    [PHASE_FORWARD_DISPATCH] = {"forward: dispatch", {"dispatch", NULL, NULL}},
    [PHASE_FORWARD_EXPERTS] = {"forward: experts", {"combine", "dispatch", NULL}},
    [PHASE_FORWARD_COMBINE] = {"forward: combine", {"combine", NULL, NULL}},
    [PHASE_BACKWARD_DISPATCH] = {"backward: dispatch", {"dispatch", NULL, NULL}},
    [PHASE_BACKWARD_EXPERTS] = {"backward: experts", {"combine", "dispatch", NULL}},
    [PHASE_BACKWARD_COMBINE] = {"backward: combine", {"combine", NULL, NULL}},
    [PHASE_WGRAD] = {"flush: weight gradients", {"barrier", "allreduce", NULL}},
    [PHASE_FLUSH] = {"flush", {"barrier", NULL, NULL}},
    [PHASE_BARRIER] = {"barrier", {"barrier", NULL, NULL}},
    [PHASE_SUM] = {"allreduce", {"allreduce", "allgather", "sum"}},
    [PHASE_DESTROY] = {"group's end", {"barrier", "agreement", "destroy"}},
};

static const char *const ways[WAYS] = {"environment", "bootstrap", "comm", "nccl"};
static const char *const kinds[] = {"nothing", "killed", "stopped", "slow", "late", "twisted"};

/* A twist, a word of the survivors' lines, and who else is told an error. */
static const struct {
    const char *name, *word;
} twists[TWISTS] = {
    [TWIST_NONE] = {"none", ""},
    [TWIST_RANKS] = {"group of other ranks", "one of "},
    [TWIST_DISPATCHER] = {"other dispatcher", "dispatcher"},
    [TWIST_CHUNKS] = {"other chunks", "chunks"},
    [TWIST_HIDDEN] = {"other shapes", "hidden is 32"},
    [TWIST_TYPE] = {"other type", "type is 0"},
    [TWIST_MAX_TOKENS] = {"a buffer beyond memory", "need "},
    [TWIST_TOP_K] = {"other top-k", "top_k is 2"},
    [TWIST_TOKENS] = {"too many tokens", "tokens: found 13"},
    [TWIST_INDEX] = {"an expert out of range", "experts["},
    [TWIST_NULL] = {"no rows", "rank 1"},
    [TWIST_ORDER] = {"other order: combine", "rank 1"},
    [TWIST_SKIP] = {"other order: backward", "rank 1"},
    [TWIST_BARRIER] = {"other order: barrier", "rank 1"},
    [TWIST_EXPERTS] = {"its experts fail", "experts returned"},
    [TWIST_DGRAD] = {"its dgrad fails", "experts returned"},
    [TWIST_WGRAD] = {"its wgrad fails", "experts returned"},
    [TWIST_LEAVE] = {"leaves early", "rank 1"},
    [TWIST_ALLOC] = {"memory ends in forward", "rank 1"},
    [TWIST_FULL] = {"memory full", "rank 1"},
    [TWIST_FILES] = {"descriptors exhausted", "rank 1"},
    [TWIST_CLOCK] = {"clocks hours ahead", ""},
};

const char *phase_name(int p) { return p >= 0 && p < PHASES ? phases[p].name : NULL; }
const char *twist_name(int t) { return t >= 0 && t < TWISTS ? twists[t].name : NULL; }
const char *way_name(int w) { return w >= 0 && w < WAYS ? ways[w] : NULL; }
const char *kind_name(int k) { return k >= 0 && k <= TWISTED ? kinds[k] : NULL; }

bool way_has(way w, int p) {
    switch (w) {
    case WAY_BOOTSTRAP: return p == PHASE_GROUP || p == PHASE_TOLD || p == PHASE_MEETING;
    case WAY_COMM: return p == PHASE_GROUP || p == PHASE_MEETING;
    case WAY_NCCL: return p != PHASE_TOLD;
    default: return p != PHASE_TOLD && p != PHASE_NCCL;
    }
}

/* ---- judging ---- */

/* Who did not come, the caller's own way of meeting knows alone. */
static bool is_nameless(const fault_case *c) {
    return (c->way == WAY_BOOTSTRAP && c->phase <= PHASE_MEETING) ||
           (c->way == WAY_COMM && c->phase <= PHASE_MEETING);
}

static void read_lines(int fd, char *text, size_t size) {
    ssize_t n = pread(fd, text, size - 1, 0);
    text[n > 0 ? n : 0] = '\0';
}

static int lines_of(const char *text) {
    int n = 0;
    for (; *text != '\0'; text++)
        n += *text == '\n';
    return n;
}

static bool has_word(const fault_case *c, const char *text) {
    if (c->kind == TWISTED)
        return strstr(text, twists[c->twist].word) != NULL;
    if (is_nameless(c))
        return strstr(text, c->way == WAY_COMM ? "nccl_comm" : "bootstrap") != NULL;
    for (int i = 0; i < 4 && phases[c->phase].words[i] != NULL; i++)
        if (strstr(text, phases[c->phase].words[i]) != NULL)
            return true;
    return false;
}

bool must_run(const fault_case *c) {
    return c->kind == NOTHING || c->kind == SLOW || (c->kind == TWISTED && c->twist == TWIST_CLOCK);
}

/* What is wrong with the end of `rank`; NULL: nothing. */
static const char *judge_rank(const watch *w, int rank) {
    const fault_case *c = &w->b->c;
    char text[LINES];
    read_lines(w->err[rank], text, sizeof text);
    /* Its work done, nobody waits for another. */
    if (c->kind != TWISTED && c->phase == PHASE_DESTROY && rank != VICTIM && w->exit[rank] == 0)
        return NULL;
    if (must_run(c) || rank >= c->ranks / c->groups) { /* another group's */
        if (w->exit[rank] != 0)
            return w->exit[rank] == 2 ? "wrong numbers" : "failed";
        return NULL;
    }
    if (rank == VICTIM && (c->kind == KILLED || c->kind == STOPPED))
        return w->exit[rank] == 128 + SIGKILL ? NULL : "the victim was not struck";
    if (rank == VICTIM && (c->twist == TWIST_LEAVE || c->phase == PHASE_DESTROY))
        return NULL;
    if (w->exit[rank] != 1)
        return "status is not 1";
    if (lines_of(text) != 1)
        return "not one line";
    if (rank != VICTIM && c->twist != TWIST_MAX_TOKENS && !is_nameless(c) &&
        strstr(text, "rank 1") == NULL)
        return "its line does not name rank 1";
    if (rank != VICTIM && !has_word(c, text))
        return "its line does not tell the phase";
    return NULL;
}

int judge_ms(const watch *w) {
    const int64_t at = atomic_load(&w->b->struck_ns), struck = at != 0 ? at : w->start_ns;
    int64_t worst = 0;
    for (int r = 0; r < w->b->c.ranks; r++)
        if ((must_run(&w->b->c) || (r != VICTIM && r < w->b->c.ranks / w->b->c.groups)) &&
            w->end_ns[r] - struck > worst)
            worst = w->end_ns[r] - struck;
    return (int)(worst / 1000000);
}

const char *judge_ranks(const watch *w, int *rank) {
    const char *wrong = NULL;
    for (int r = 0; r < w->b->c.ranks && wrong == NULL; r++) {
        wrong = judge_rank(w, r);
        *rank = r;
    }
    return wrong;
}

void judge_line_of(const watch *w, int rank, char *text, size_t size) {
    read_lines(w->err[rank], text, size);
    for (char *c = text; *c != '\0'; c++)
        if (*c == '\n' || *c == '\t')
            *c = c[1] == '\0' ? '\0' : '|';
}

void judge_line(const watch *w, char *text, size_t size) {
    judge_line_of(w, VICTIM, text, size);
    for (int r = w->b->c.ranks - 1; r >= 0; r--) {
        char line[TEXT];
        judge_line_of(w, r, line, sizeof line);
        if (r != VICTIM && line[0] != '\0')
            snprintf(text, size, "%s", line);
    }
}

static int count_lines(const char *path, const char *with) {
    char line[TEXT];
    int n = 0;
    FILE *f = fopen(path, "re");
    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        n += strstr(line, with) != NULL;
    if (f != NULL)
        fclose(f);
    return n;
}

static int count_files(const char *path) {
    int n = 0;
    DIR *d = opendir(path);
    for (const struct dirent *e; d != NULL && (e = readdir(d)) != NULL;)
        n += e->d_name[0] != '.';
    if (d != NULL)
        closedir(d);
    return n;
}

bool judge_left(const watch *w, char *text, size_t size) {
    int processes = 0, sockets = 0, files = 0;
    while (processes < 100 && (waitpid(-1, NULL, WNOHANG) != -1 || errno != ECHILD))
        processes++;
    if (w->b->c.apart) {
        sockets = count_lines("/proc/net/unix", "ep-overlap");
        files = count_files("/dev/shm");
    }
    if (processes + sockets + files == 0)
        snprintf(text, size, "nothing");
    else
        snprintf(text, size, "%d processes, %d sockets, %d files", processes, sockets, files);
    return processes + sockets + files == 0;
}
