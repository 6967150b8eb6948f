/* SPDX-License-Identifier: Apache-2.0
 *
 * Groups: several in one step, in any order of ranks, and made by a caller's
 * bootstrap, whose ranks all hear of one rank's wrong argument.
 */
#include "moe/moe.h"
#include "moe_ranks.h"
#include "unit.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void fill_case(moe_case *c, uint64_t seed) {
    *c = (moe_case){.seed = seed,
                    .ranks = 2,
                    .experts = 8,
                    .hidden = 12,
                    .ffn = 7,
                    .top_k = 3,
                    .batches = 3,
                    .max_tokens = 15,
                    .type = EPO_F32,
                    .style = CASE_UNIFORM};
    moe_case_fill(c);
}

/* Each group alone in a world of two, then both at once in a world of four. */
static void two_groups_of_two_in_a_step_of_four(void) {
    const int members[2][CASE_RANKS] = {{0, 2}, {3, 1}};
    for (int i = 0; i < 4; i++) {
        moe_how how = {.dispatcher = (epo_dispatcher)(i % 2),
                       .overlap = i / 2,
                       .delay = i / 2,
                       .chunks = i / 2 * 2};
        moe_case c[2];
        moe_result alone[2], both[2];
        for (int g = 0; g < 2; g++) {
            fill_case(&c[g], (uint64_t)(90 + g));
            CU_ASSERT_EQUAL(moe_run(&c[g], &how, &alone[g]), 0);
        }
        CU_ASSERT_EQUAL(moe_run_groups(2, c, &how, members, both), 0);
        for (int g = 0; g < 2; g++) {
            CU_ASSERT(moe_same(&c[g], &how, &alone[g], &both[g]));
            moe_result_free(&alone[g]);
            moe_result_free(&both[g]);
            moe_case_free(&c[g]);
        }
    }
}

/* ---- ranks with the same tokens --------------------------------------------- */

static void *copy_of(const void *from, size_t bytes) {
    void *to = from != NULL ? moe_calloc(bytes, 1) : NULL;
    if (to != NULL)
        memcpy(to, from, bytes);
    return to;
}

/* Ranks i*tp+1.. get what rank i*tp has; *masked: each with its share of the slots. */
static void share_tokens(moe_case *c, int tp, moe_case *masked) {
    *masked = *c;
    for (int m = 0; m < c->batches; m++)
        for (int r = 0; r < c->ranks; r++) {
            const case_batch *first = &c->batch[m][r / tp * tp];
            case_batch *b = &c->batch[m][r], *mine = &masked->batch[m][r];
            size_t slots = (size_t)first->tokens * (size_t)c->top_k;
            size_t row = (size_t)first->tokens * (size_t)c->hidden * sizeof(float);
            if (r % tp != 0) {
                free(b->experts);
                free(b->weights);
                free(b->x);
                free(b->dy);
                *b = (case_batch){first->tokens, copy_of(first->experts, slots * 8),
                                  copy_of(first->weights, slots * 4), copy_of(first->x, row),
                                  copy_of(first->dy, row)};
            }
            *mine = *b;
            mine->experts = copy_of(b->experts, slots * 8);
            for (size_t i = 0; i < slots; i++)
                if ((int)(i / (size_t)c->top_k) % tp != r % tp)
                    mine->experts[i] = -1;
        }
}

static void tokens_held_twice_are_computed_once(void) {
    for (uint64_t i = 0; i < 24; i++) {
        int tp = i % 3 == 0 ? 4 : 2;
        moe_case c = {.seed = 700 + i,
                      .ranks = 4,
                      .experts = 8,
                      .hidden = 11,
                      .ffn = 6,
                      .top_k = 3,
                      .batches = 2,
                      .max_tokens = 14,
                      .type = EPO_F32,
                      .style = (case_style)(i % CASE_STYLES)};
        moe_how how = {.dispatcher = (epo_dispatcher)(i % 2),
                       .overlap = i / 2 % 2,
                       .delay = i / 2 % 2,
                       .chunks = 2,
                       .tp = tp};
        moe_case masked;
        moe_answer answer;
        moe_result result;
        moe_case_fill(&c);
        share_tokens(&c, tp, &masked);
        moe_reference(&masked, &answer);
        CU_ASSERT_EQUAL(moe_run(&c, &how, &result), 0);
        CU_ASSERT(moe_error(&c, &how, &result, &answer, true) < 1e-5);
        moe_result_free(&result);
        moe_answer_free(&answer);
        for (int m = 0; m < c.batches; m++)
            for (int r = 0; r < c.ranks; r++)
                free(masked.batch[m][r].experts);
        moe_case_free(&c);
    }
}

static epo_engine_group group_of(const moe_rank *c, double timeout_s) {
    epo_engine_group g = {sizeof g, EPO_GROUP_CONFIG_INIT, "a test"};
    g.config.engine = EPO_ENGINE_HOST;
    g.config.rank = c->rank;
    g.config.ranks = c->ranks;
    g.config.threads = c->world;
    g.config.overlap = EPO_OFF;
    g.config.delay_wgrad = EPO_OFF;
    g.config.dispatcher = EPO_DISPATCH_ALLTOALL;
    g.config.timeout_s = timeout_s;
    return g;
}

static void refused_tp(moe_rank *c) {
    epo_engine_group g = group_of(c, 5);
    epo_group *group = NULL;
    g.config.tensor_parallel = 2; /* of three ranks */
    EXPECT(c, c->engine->group_create(&g, &group) == EPO_E_ARG);
    EXPECT(c, strstr(c->engine->error(), "tensor_parallel") != NULL);
}

static void tp_divides_the_ranks(void) { CU_ASSERT_EQUAL(moe_ranks(3, 5.0, refused_tp, NULL), 0); }

/* One rank's argument, where the ranks find each other without a bootstrap: nobody waits for the
 * limit. */
static void refused_chunks(moe_rank *c) {
    epo_engine_group g = group_of(c, 60);
    epo_group *group = NULL;
    g.config.chunks = c->rank == 1 ? -1 : 1;
    const double start = moe_stats_now();
    const epo_status status = c->engine->group_create(&g, &group);
    EXPECT(c, moe_stats_now() - start < 30);
    EXPECT(c, status == EPO_E_ARG && group == NULL);
    EXPECT(c, strstr(c->engine->error(), "chunks: found -1, allowed 0..1024") != NULL);
    EXPECT(c, c->rank == 1 || strstr(c->engine->error(), "rank 1") != NULL);
}

static void a_wrong_argument_is_told_without_a_bootstrap(void) {
    CU_ASSERT_EQUAL(moe_ranks(3, 60.0, refused_chunks, NULL), 0);
}

/* ---- processes and their bootstrap ------------------------------------------- */

enum { RANKS = 4, BYTES = 1024 };

typedef struct board {
    _Atomic int gathers[RANKS], barriers[RANKS];
    unsigned char data[2][RANKS][BYTES]; /* a rank may be one allgather ahead */
    struct {
        int status, sum_right;
        char text[512];
    } rank[RANKS];
} board;

typedef struct place {
    board *b;
    int rank, gathers, barriers;
    int ranks, members[RANKS]; /* of this rank's group */
} place;

static bool wait_for(_Atomic int *word, int value) {
    for (int i = 0; i < 20000; i++) {
        if (atomic_load(word) >= value)
            return true;
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
    return false;
}

static int board_allgather(void *ctx, const void *mine, size_t bytes, void *all) {
    place *p = ctx;
    int half = p->gathers++ % 2;
    if (bytes > BYTES)
        return 1;
    memcpy(p->b->data[half][p->rank], mine, bytes);
    atomic_store(&p->b->gathers[p->rank], p->gathers);
    for (int i = 0; i < p->ranks; i++) {
        if (!wait_for(&p->b->gathers[p->members[i]], p->gathers))
            return 2;
        memcpy((char *)all + (size_t)i * bytes, p->b->data[half][p->members[i]], bytes);
    }
    return 0;
}

static int board_barrier(void *ctx) {
    place *p = ctx;
    atomic_store(&p->b->barriers[p->rank], ++p->barriers);
    for (int i = 0; i < p->ranks; i++)
        if (!wait_for(&p->b->barriers[p->members[i]], p->barriers))
            return 2;
    return 0;
}

/* A group over the bootstrap; its ranks add 1 << rank. */
static void one_process(place *p, int chunks) {
    const epo_engine *e = epo_engine_entry(EPO_ENGINE_ABI);
    epo_bootstrap bootstrap = {sizeof bootstrap, p, board_allgather, board_barrier};
    epo_engine_group g = {sizeof g, EPO_GROUP_CONFIG_INIT, "a test"};
    epo_group *group = NULL;
    float value = (float)(1 << p->rank), sum = 0;
    g.config.engine = EPO_ENGINE_HOST;
    g.config.rank = p->rank;
    g.config.ranks = RANKS;
    g.config.members = p->members;
    g.config.nmembers = p->ranks;
    g.config.bootstrap = &bootstrap;
    g.config.overlap = EPO_OFF;
    g.config.delay_wgrad = EPO_OFF;
    g.config.dispatcher = EPO_DISPATCH_ALLTOALL;
    g.config.chunks = chunks;
    epo_status status = e->group_create(&g, &group);
    for (int i = 0; i < p->ranks; i++)
        sum += (float)(1 << p->members[i]);
    if (status == EPO_OK)
        status = e->group_allreduce(group, &value, 1, NULL);
    p->b->rank[p->rank].status = (int)status;
    p->b->rank[p->rank].sum_right = value == sum;
    if (status != EPO_OK)
        snprintf(p->b->rank[p->rank].text, sizeof p->b->rank[0].text, "%s", e->error());
    (void)e->group_destroy(group);
}

/* Forks the ranks; those of `wrong` give chunks that nobody has.  The time it took. */
static double run_processes(board *b, const int (*members)[RANKS], int size, int wrong) {
    struct timespec start, end;
    pid_t pid[RANKS];
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int g = 0; g < RANKS / size; g++)
        for (int i = 0; i < size; i++) {
            place p = {.b = b, .rank = members[g][i], .ranks = size};
            memcpy(p.members, members[g], sizeof p.members);
            pid[p.rank] = fork();
            if (pid[p.rank] == 0) {
                one_process(&p, p.rank == wrong ? -1 : 1);
                _exit(0);
            }
        }
    for (int r = 0; r < RANKS; r++) {
        int status = 1;
        CU_ASSERT(pid[r] > 0 && waitpid(pid[r], &status, 0) == pid[r] && status == 0);
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    return (double)(end.tv_sec - start.tv_sec) + 1e-9 * (double)(end.tv_nsec - start.tv_nsec);
}

static board *board_new(void) {
    void *p = mmap(NULL, sizeof(board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        abort();
    return p;
}

static void two_groups_by_bootstrap(void) {
    const int members[2][RANKS] = {{2, 0}, {1, 3}};
    board *b = board_new();
    run_processes(b, members, 2, -1);
    for (int r = 0; r < RANKS; r++) {
        CU_ASSERT_EQUAL(b->rank[r].status, EPO_OK);
        CU_ASSERT(b->rank[r].sum_right);
        if (b->rank[r].status != EPO_OK)
            fprintf(stderr, "rank %d: %s\n", r, b->rank[r].text);
    }
    munmap(b, sizeof *b);
}

/* Without being told the others would wait for 20 s, the bootstrap's own limit. */
static void one_ranks_wrong_argument_is_everybodys(void) {
    const int members[1][RANKS] = {{0, 1, 2, 3}};
    board *b = board_new();
    CU_ASSERT(run_processes(b, members, RANKS, 2) < 15);
    for (int r = 0; r < RANKS; r++) {
        CU_ASSERT_EQUAL(b->rank[r].status, EPO_E_ARG);
        CU_ASSERT(strstr(b->rank[r].text, "chunks") != NULL);
        CU_ASSERT(r == 2 || strstr(b->rank[r].text, "rank 2 made no group") != NULL);
    }
    munmap(b, sizeof *b);
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"two groups by a caller's bootstrap", two_groups_by_bootstrap},
        {"one rank's wrong argument is everybody's", one_ranks_wrong_argument_is_everybodys},
        {"two groups of two in a step of four", two_groups_of_two_in_a_step_of_four},
        {"tokens held twice are computed once", tokens_held_twice_are_computed_once},
        {"tensor_parallel divides the ranks", tp_divides_the_ranks},
        {"a wrong argument is told without a bootstrap",
         a_wrong_argument_is_told_without_a_bootstrap},
        CU_TEST_INFO_NULL,
    };
    return unit_run("moe groups", tests);
}
