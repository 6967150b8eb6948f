/* SPDX-License-Identifier: Apache-2.0
 *
 * fault.c - one fault of one rank, judged from outside.
 *
 *   fault list                         the cases, one a line
 *   fault KIND PHASE|TWIST             one of them
 *   options: -n RANKS [3], -l SECONDS  limit of the group [2], -x  no next job
 *            -w WAY  how ranks meet: environment, bootstrap, comm; nccl: and rows go through NCCL
 *            -g GROUPS  of as many ranks each [1]; the others are not to notice
 *
 * Ranks are processes.  What is looked at: how long after the strike the last survivor
 * ends, its status, its one line, what is left when all have ended (processes, sockets,
 * shared memory), and whether the next job runs.  A case is one line of fields with tabs:
 * engine, kind, phase, ok | FAIL, milliseconds, what is left, the next job, a survivor's line.
 */
#include "config.h"

#include "fault.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

static int find(const char *word, const char *(*name)(int)) {
    for (int i = 0; name(i) != NULL; i++)
        if (strcmp(name(i), word) == 0)
            return i;
    return -1;
}

static void list(way w) {
    for (int k = KILLED; k < TWISTED; k++)
        for (int p = 0; p < PHASES; p++)
            if (way_has(w, p))
                printf("%s\t%s\n", kind_name(k), phase_name(p));
    for (int t = TWIST_NONE + 1; t < TWISTS && w == WAY_ENVIRONMENT; t++)
        printf("%s\t%s\n", kind_name(TWISTED), twist_name(t));
}

static const char *next_job(const fault_case *c) {
    fault_case healthy = {
        .way = c->way, .ranks = c->ranks, .groups = c->groups, .limit_s = 20, .apart = c->apart};
    watch w;
    int rank;
    const bool good = watch_run(&w, &healthy, NULL) && judge_ranks(&w, &rank) == NULL;
    watch_end(&w);
    return good ? "runs" : "does not run";
}

static int run_case(const fault_case *c, bool alone) {
    watch w;
    char left[80], line[TEXT];
    int rank = 0;
    const bool ended = watch_run(&w, c, NULL);
    const char *wrong = ended ? judge_ranks(&w, &rank) : "did not end by itself";
    const int ms = judge_ms(&w);
    const bool nothing = judge_left(&w, left, sizeof left);
    judge_line(&w, line, sizeof line);
    const int status = w.exit[rank];
    watch_end(&w);
    const char *next = alone ? "-" : next_job(c);
    const bool good = wrong == NULL && nothing && strcmp(next, "does not run") != 0;
    printf("%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\n", device_name, kind_name((int)c->kind),
           c->kind == TWISTED ? twist_name((int)c->twist) : phase_name((int)c->phase),
           good ? "ok" : "FAIL", ms, left, next, line);
    if (wrong != NULL)
        printf("# rank %d: %s (status %d)\n", rank, wrong, status);
    return good ? 0 : 1;
}

static int usage(void) {
    fputs("usage: fault [-n RANKS] [-l SECONDS] [-w WAY] [-g GROUPS] [-x] list | KIND PHASE|TWIST "
          "| nothing\n",
          stderr);
    return 2;
}

int main(int argc, char **argv) {
    fault_case c = {.ranks = 3, .groups = 1, .limit_s = 2};
    int option, what = 0, by = 0;
    bool alone = false;
    while ((option = getopt(argc, argv, "n:l:w:g:x")) != -1) {
        if (option == 'n')
            c.ranks = (int)strtol(optarg, NULL, 10);
        else if (option == 'l')
            c.limit_s = strtod(optarg, NULL);
        else if (option == 'w')
            by = find(optarg, way_name);
        else if (option == 'g')
            c.groups = (int)strtol(optarg, NULL, 10);
        else if (option == 'x')
            alone = true;
        else
            return usage();
    }
    if (c.ranks < 2 || c.ranks > FAULT_RANKS || !(c.limit_s > 0.1) || optind == argc || by < 0 ||
        c.groups < 1 || c.ranks % c.groups != 0 || c.ranks / c.groups <= VICTIM)
        return usage();
    c.way = (way)by;
    if (strcmp(argv[optind], "list") == 0) {
        list(c.way);
        return 0;
    }
    int found = find(argv[optind], kind_name);
    if (found > NOTHING && optind + 1 < argc)
        what = find(argv[optind + 1], found == TWISTED ? twist_name : phase_name);
    if (found < 0 || what < 0 || (found > NOTHING && optind + 1 == argc))
        return usage();
    c.kind = (strike_kind)found;
    if (found == TWISTED)
        c.twist = (twist)what;
    else
        c.phase = (phase)what;
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    c.apart = stand_apart();
    return run_case(&c, alone);
}
