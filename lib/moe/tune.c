/* SPDX-License-Identifier: Apache-2.0
 *
 * tune.c - how many chunks a plan has, and which way its rows take beside GEMMs, by
 * measuring: first the number, then, where the backend has two ways, the way; or, of flex in one
 * chunk, whether a forward's rows go home one by one, and whether a backward's last sums run
 * beside the weight gradients or behind them.
 *
 * Results do not depend on either, so real passes are the measurement: the first
 * plans of a size take the candidates in turns, and the passes over them are timed on the
 * device.  Rounds become longer, and who is behind by more than such a round can be wrong
 * drops out; so the close ones are told apart, and none costs much until then.  A time is what
 * a third of the passes stay below, forward and, where there are any, backward, of the slowest
 * rank.  A size is the power of two below the largest rank's tokens.
 * Every step follows from what all ranks know (plans are collective, their records tell
 * tokens and times), so all ranks choose alike without a further exchange.
 *
 * EP_OVERLAP_CHUNKS_FILE names a file of lines "DISPATCHER RANKS EXPERTS HIDDEN TOP_K
 * LOG2_TOKENS CHUNKS [engines|home|behind|home+behind]".  What it holds is not measured; what is
 * measured, rank 0 adds.  flex takes the last word alone from it.
 */
#include "moe/moe.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/names.h"

static const int choices[MOE_TUNE_CHOICES] = {1, 2, 4, 8};
enum { ROUNDS = 4, FILE_CHUNKS_MAX = 1024 };
/* Plans of a candidate in each round; and how much slower one may be that stays: some 2.5 times
 * what the difference of two such times varies by then, if passes vary by 3 %. */
static const int round_trials[ROUNDS] = {3, 3, 6, 12};
static const float round_beyond[ROUNDS] = {1.09F, 1.06F, 1.045F, 1.03F};
/* Rows of a chunk below this never pay. */
#define LEAST_BYTES (UINT64_C(4) << 20)
/* Fewer chunks are taken where they are slower by no more than this; and copy engines must win by
 * the other. */
#define EQUAL 1.01F
#define WORTH 0.98F

static int class_of(int tokens) {
    int found = 0;
    for (; tokens > 1 && found < MOE_TUNE_CLASSES - 1; tokens /= 2)
        found++;
    return found;
}

/* Are a plan's chunks, if it has so many, worth a look? */
static bool pays(const epo_buffer *b, int tokens, int chunks) {
    const uint64_t bytes = (uint64_t)tokens * (uint64_t)b->top_k * b->row_bytes;
    return bytes / (uint64_t)chunks >= LEAST_BYTES;
}

/* The numbers that a plan of `tokens` may take: the first `n` of them. */
static int candidates(const epo_buffer *b, int tokens) {
    int n = 1;
    while (n < MOE_TUNE_CHOICES && choices[n] <= b->chunks && pays(b, tokens, choices[n]))
        n++;
    return n;
}

static uint32_t ways_of(const epo_buffer *b) { return b->group->ops->info(b->group->be)->ways; }

/* What is taken without measuring. */
static epo_way first_way(const epo_buffer *b) {
    return ways_of(b) == 1U << EPO_WAY_ENGINES ? EPO_WAY_ENGINES : EPO_WAY_STORES;
}

static bool home_first(const epo_buffer *b) {
    return moe_buffer_home(b) && b->group->ops->info(b->group->be)->home_asked;
}

static const char *dispatcher_of(const epo_buffer *b) {
    return b->dispatcher == EPO_DISPATCH_FLEX ? "flex" : "alltoall";
}

/* A line's answer for the buffer; false: it is none. */
static bool take_line(epo_buffer *b, const char *line) {
    char word[16], way[16] = "";
    int v[6];
    if (sscanf(line, "%15s %d %d %d %d %d %d %15s", word, &v[0], &v[1], &v[2], &v[3], &v[4], &v[5],
               way) < 7)
        return line[strspn(line, " \t\r\n")] == '\0';
    if (strcmp(word, dispatcher_of(b)) != 0 || v[0] != b->group->ranks || v[1] != b->experts ||
        v[2] != b->hidden || v[3] != b->top_k || v[4] < 0 || v[4] >= MOE_TUNE_CLASSES || v[5] < 1 ||
        v[5] > FILE_CHUNKS_MAX ||
        /* One chunk of flex has questions of its own. */
        (b->dispatcher == EPO_DISPATCH_FLEX && (v[5] == 1) != (b->chunks == 1)))
        return true;
    moe_tune_class *c = &b->tune.of[v[4]];
    const bool engines = strcmp(way, "engines") == 0 && (ways_of(b) & 1U << EPO_WAY_ENGINES) != 0;
    c->chosen = !b->tune.free || v[5] > b->chunks ? b->chunks : v[5];
    c->way = engines ? EPO_WAY_ENGINES : first_way(b);
    c->home = b->tune.homes && strncmp(way, "home", 4) == 0;
    c->plain = b->tune.tails && strstr(way, "behind") != NULL;
    c->stage = MOE_TUNE_DONE;
    return true;
}

/* Numbers of chunks are measured anew then, every time. */
static void file_complain(const epo_buffer *b, const char *path, const char *what) {
    (void)fprintf(stderr, "ep-overlap: rank %d: EP_OVERLAP_CHUNKS_FILE: %s cannot be %s: %s\n",
                  b->group->rank, path, what, strerror(errno));
}

static void read_file(epo_buffer *b) {
    const char *path = getenv(EPO_ENV_CHUNKS_FILE);
    FILE *f = path != NULL && path[0] != '\0' ? fopen(path, "re") : NULL;
    char line[256];
    if (f == NULL && path != NULL && path[0] != '\0' && errno != ENOENT)
        file_complain(b, path, "read");
    int strange = 0;
    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        strange += take_line(b, line) ? 0 : 1;
    if (f != NULL)
        (void)fclose(f);
    if (strange > 0 && b->group->rank == 0)
        (void)fprintf(stderr,
                      "ep-overlap: EP_OVERLAP_CHUNKS_FILE: %s: passed over lines that are not "
                      "'DISPATCHER RANKS EXPERTS HIDDEN TOP_K LOG2_TOKENS CHUNKS "
                      "[engines|home|behind|home+behind]': %d\n",
                      path, strange);
}

static const char *last_word(const epo_buffer *b, const moe_tune_class *c) {
    return c->home && c->plain      ? " home+behind"
           : c->home                ? " home"
           : c->plain               ? " behind"
           : c->way != first_way(b) ? " engines"
                                    : "";
}

static void write_file(const epo_buffer *b, int class) {
    const char *path = getenv(EPO_ENV_CHUNKS_FILE);
    FILE *f = b->group->rank == 0 && path != NULL && path[0] != '\0' ? fopen(path, "ae") : NULL;
    if (f == NULL) {
        if (b->group->rank == 0 && path != NULL && path[0] != '\0')
            file_complain(b, path, "written");
        return;
    }
    const bool put = fprintf(f, "%s %d %d %d %d %d %d%s\n", dispatcher_of(b), b->group->ranks,
                             b->experts, b->hidden, b->top_k, class, b->tune.of[class].chosen,
                             last_word(b, &b->tune.of[class])) > 0;
    if (fclose(f) != 0 || !put) /* the disk is full */
        file_complain(b, path, "written");
}

void moe_tune_open(epo_buffer *b, bool free_choice) {
    const epo_backend_ops *ops = b->group->ops;
    const bool able = b->group->overlap && ops->mark != NULL && !b->replays;
    memset(&b->tune, 0, sizeof b->tune);
    b->tune.due = -1;
    for (int i = 0; i < MOE_TUNE_PASSES; i++)
        b->tune.timer[i].running = -1;
    /* flex counts its rows by chunk before the plan's number is known. */
    b->tune.free = able && free_choice && b->dispatcher == EPO_DISPATCH_ALLTOALL;
    b->tune.ways = able && (ways_of(b) & (ways_of(b) - 1)) != 0;
    b->tune.homes = able && b->chunks == 1 && moe_buffer_home(b) && !home_first(b);
    b->tune.tails = able && b->chunks == 1 && b->dispatcher == EPO_DISPATCH_FLEX && !b->links &&
                    !b->group->delay_wgrad && ops->info(b->group->be)->few;
    if (b->tune.free)
        b->chunks =
            choices[MOE_TUNE_CHOICES - 1] < b->local ? choices[MOE_TUNE_CHOICES - 1] : b->local;
    if (b->tune.free || b->tune.ways || b->tune.homes || b->tune.tails)
        read_file(b);
}

uint32_t moe_tune_digest(const epo_buffer *b) {
    uint32_t hash = b->tune.free + 2U * b->tune.ways + 4U * b->tune.homes +
                    (moe_buffer_home(b) ? 8U : 0) + 16U * b->tune.tails;
    for (int i = 0; i < MOE_TUNE_CLASSES; i++)
        hash = hash * 31 + (uint32_t)b->tune.of[i].chosen * 8 + (uint32_t)b->tune.of[i].way * 4 +
               b->tune.of[i].home * 2U + b->tune.of[i].plain;
    return hash & INT32_MAX;
}

void moe_tune_close(epo_buffer *b) {
    for (int i = 0; i < 2 * MOE_TUNE_PASSES; i++)
        if (b->tune.timer[i / 2].mark[i % 2] != NULL)
            b->group->ops->event_destroy(b->group->be, b->tune.timer[i / 2].mark[i % 2]);
}

static void sample_add(moe_tune_samples *took, float seconds) {
    int at = took->count;
    if (at == MOE_TUNE_SAMPLES)
        return;
    for (; at > 0 && took->seconds[at - 1] > seconds; at--)
        took->seconds[at] = took->seconds[at - 1];
    took->seconds[at] = seconds;
    took->count++;
}

/* What a third of the passes stay below: late ones do not show in it. */
static float typical(const moe_tune_samples *took) {
    return took->count > 0 ? took->seconds[(took->count - 1) / 3] : 0;
}

/* The pass timed last, if it is through by now. */
static void take_time(epo_buffer *b, moe_tune_pass pass) {
    moe_tune_timer *t = &b->tune.timer[pass];
    double s = 0;
    if (t->running < 0 || !t->stopped ||
        !b->group->ops->between(b->group->be, t->mark[0], t->mark[1], &s))
        return;
    if (b->tune.of[t->running].stage == t->stage && s > 0) /* else it was decided without */
        sample_add(&b->tune.of[t->running].took[pass][t->choice], (float)s);
    t->running = -1;
}

/* Backward passes count where each of the candidates had some. */
static bool both_ways(const moe_tune_class *c) {
    bool both = true;
    for (int i = 0; i < MOE_TUNE_CHOICES; i++)
        both = both && (c->took[MOE_TUNE_FORWARD][i].count == 0 || (c->out >> i & 1) != 0 ||
                        c->took[MOE_TUNE_BACKWARD][i].count > 0);
    return both;
}

void moe_tune_report(epo_buffer *b, float seconds[MOE_TUNE_CHOICES]) {
    for (int i = 0; i < MOE_TUNE_PASSES; i++)
        take_time(b, (moe_tune_pass)i);
    if (b->tune.due < 0)
        return;
    const moe_tune_class *c = &b->tune.of[b->tune.due];
    const moe_tune_pass pass = c->stage == MOE_TUNE_TAIL ? MOE_TUNE_BACKWARD : MOE_TUNE_FORWARD;
    const bool both = pass == MOE_TUNE_FORWARD && both_ways(c);
    for (int i = 0; i < MOE_TUNE_CHOICES; i++)
        if ((c->out >> i & 1) == 0 && c->took[pass][i].count > 0)
            seconds[i] =
                typical(&c->took[pass][i]) + (both ? typical(&c->took[MOE_TUNE_BACKWARD][i]) : 0);
}

/* Of those that are left; 0: nobody has a time. */
static float fastest(const moe_tune_class *c, const float *slowest) {
    float least = 0;
    for (int i = 0; i < MOE_TUNE_CHOICES; i++)
        if ((c->out >> i & 1) == 0 && slowest[i] > 0 && (least <= 0 || slowest[i] < least))
            least = slowest[i];
    return least;
}

/* slowest[i]: of the ranks; 0: one of them has no time.  The choice, or -1: another round. */
static int decide(moe_tune_class *c, const float *slowest) {
    const float least = fastest(c, slowest);
    int left = 0, best = -1;
    for (int i = 0; i < MOE_TUNE_CHOICES; i++) {
        if (slowest[i] <= 0 || slowest[i] > round_beyond[c->round] * least)
            c->out |= 1U << i;
        left += (c->out >> i & 1) == 0;
        if (best < 0 && (c->out >> i & 1) == 0 && slowest[i] <= EQUAL * least)
            best = i;
    }
    c->trials = 0;
    if (left > 1 && ++c->round < ROUNDS)
        return -1;
    if (c->stage == MOE_TUNE_WAY && best == 1 && slowest[0] > 0 && slowest[1] >= WORTH * slowest[0])
        best = 0;
    return best < 0 ? 0 : best;
}

/* The class's next question, or none. */
static void go_on(epo_buffer *b, moe_tune_class *c) {
    const bool behind = c->stage == MOE_TUNE_NUMBER;
    c->stage = behind && b->tune.homes                     ? MOE_TUNE_HOME
               : c->stage < MOE_TUNE_TAIL && b->tune.tails ? MOE_TUNE_TAIL
               : behind && b->tune.ways && c->chosen > 1   ? MOE_TUNE_WAY
                                                           : MOE_TUNE_DONE;
    c->trials = c->round = 0;
    c->out = 0;
    memset(c->took, 0, sizeof c->took);
}

void moe_tune_learn(epo_buffer *b, const float *slowest) {
    moe_tune *t = &b->tune;
    if (t->due < 0)
        return;
    moe_tune_class *c = &t->of[t->due];
    const int due = t->due, best = decide(c, slowest);
    t->due = -1;
    if (best < 0)
        return;
    if (c->stage == MOE_TUNE_NUMBER)
        c->chosen = choices[best];
    else if (c->stage == MOE_TUNE_HOME)
        c->home = best == 1;
    else if (c->stage == MOE_TUNE_TAIL)
        c->plain = best == 1;
    else
        c->way = best == 1 ? EPO_WAY_ENGINES : EPO_WAY_STORES;
    go_on(b, c);
    if (c->stage == MOE_TUNE_DONE || c->stage == MOE_TUNE_TAIL)
        write_file(b, due);
}

/* The next of `n` answers to the class's question that are left. */
static int try_next(moe_tune *t, moe_tune_class *c, int class, int n) {
    int list[MOE_TUNE_CHOICES], left = 0;
    for (int i = 0; i < n; i++)
        if ((c->out >> i & 1) == 0)
            list[left++] = i;
    if (left == 0) /* of the larger sizes in this class */
        return 0;
    const int choice = list[c->trials % left], all = round_trials[c->round] * left;
    if (c->trials < all)
        c->trials++;
    /* One size at a time is told to the others; the next waits, and measures on. */
    if (c->trials >= all && t->due < 0)
        t->due = class;
    return choice;
}

void moe_tune_choose(epo_plan *p, int tokens) {
    epo_buffer *b = p->buffer;
    moe_tune *t = &b->tune;
    const int class = p->tune_class = class_of(tokens);
    moe_tune_class *c = &t->of[class];
    p->tune_choice = -1;
    p->way = first_way(b);
    p->singly = c->home || (b->chunks == 1 && home_first(b));
    p->plain = c->plain;
    const bool back = t->backs;
    t->backs = false;
    p->chunks = t->free ? 1 : b->chunks;
    if (c->stage == MOE_TUNE_NUMBER && !t->free &&
        (t->homes || t->tails || (t->ways && b->chunks > 1))) {
        c->chosen = b->chunks;
        go_on(b, c);
    }
    p->tune_stage = c->stage;
    if (c->chosen > 0)
        p->chunks = c->chosen;
    if (c->stage == MOE_TUNE_DONE) {
        p->way = c->way;
    } else if (c->stage == MOE_TUNE_HOME) {
        p->tune_choice = try_next(t, c, class, 2);
        p->singly = p->tune_choice == 1;
    } else if (c->stage == MOE_TUNE_TAIL && back) { /* else nobody would tell */
        p->tune_choice = try_next(t, c, class, 2);
        p->plain = p->tune_choice == 1;
    } else if (c->stage == MOE_TUNE_NUMBER && t->free && candidates(b, tokens) > 1) {
        p->tune_choice = try_next(t, c, class, candidates(b, tokens));
        p->chunks = choices[p->tune_choice];
    } else if (c->stage == MOE_TUNE_WAY && pays(b, tokens, p->chunks)) {
        p->tune_choice = try_next(t, c, class, 2);
        p->way = p->tune_choice == 1 ? EPO_WAY_ENGINES : EPO_WAY_STORES;
    }
}

void moe_tune_start(epo_plan *plan, moe_tune_pass pass) {
    epo_buffer *b = plan->buffer;
    moe_tune_timer *t = &b->tune.timer[pass];
    b->tune.backs = b->tune.backs || pass == MOE_TUNE_BACKWARD;
    if (plan->tune_choice < 0 || plan->tune_stage != b->tune.of[plan->tune_class].stage ||
        (plan->tune_stage == MOE_TUNE_HOME && pass != MOE_TUNE_FORWARD) ||
        (plan->tune_stage == MOE_TUNE_TAIL && pass != MOE_TUNE_BACKWARD))
        return;
    take_time(b, pass);
    if (t->running >= 0 || !b->group->ops->mark(b->group->compute, &t->mark[0]))
        return;
    t->running = plan->tune_class;
    t->choice = plan->tune_choice;
    t->stage = plan->tune_stage;
    t->stopped = false;
}

void moe_tune_stop(epo_plan *plan, moe_tune_pass pass) {
    moe_tune_timer *t = &plan->buffer->tune.timer[pass];
    if (t->running < 0 || t->stopped || plan->tune_choice < 0)
        return;
    t->stopped = plan->buffer->group->ops->mark(plan->buffer->group->compute, &t->mark[1]);
    if (!t->stopped)
        t->running = -1;
}
