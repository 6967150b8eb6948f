/* SPDX-License-Identifier: Apache-2.0
 *
 * tune_world.h - several ranks' buffers, a clock that the test sets, and the record exchange of
 * lib/moe/plan.c played by hand: for tests of lib/moe/tune.c.
 */
#ifndef EPO_TESTS_TUNE_WORLD_H
#define EPO_TESTS_TUNE_WORLD_H

#include "unit.h"

#include "moe/pass.h"

enum { RANKS = 3, MODELS = 1000, PLANS = 2 * 4 * MOE_TUNE_SAMPLES + 8 }; /* at most */

typedef struct world {
    epo_backend_ops ops;
    epo_group group[RANKS];
    epo_buffer buffer[RANKS];
} world;

/* What a test sets. */
extern double clock_s; /* of the marks */
extern bool blind;     /* marks cannot be had */
extern epo_backend_info info;
extern epo_dispatcher dispatcher;
extern int given;                                /* chunks of buffers */
extern double engines_take;                      /* of the time by stores */
extern double home_takes;                        /* of a forward's time with sums on their way */
extern double plain_takes;                       /* of a backward's time with them beside others */
extern double (*backward)(int rank, int chunks); /* NULL: there are no such passes */
extern int late_backward;                        /* so many plans come before any such pass */

/* What it finds. */
extern int marks_used;
extern epo_way way; /* of the last plan */
extern bool singly; /* do its rows go home one by one? */
extern bool plain;  /* ... and a backward's behind the gradients? */

void world_open(world *w, int local, bool free_choice);
/* One collective plan of `tokens` on the last rank, less on the others, and a forward
 * pass over it that takes seconds(rank, chunks).  Returns the chunks. */
int plan_and_pass(world *w, int tokens, double (*seconds)(int rank, int chunks));
int settle(world *w, int tokens, double (*seconds)(int, int));

#endif
