/* SPDX-License-Identifier: Apache-2.0
 *
 * probe - facts of this node and of one task, as one record on descriptor 3.
 *
 * It asks NVML and reads folders that may hang or crash it.  Before each stage the
 * record is made ready as it would stand if the stage never ended; when the time is
 * up or a signal of a crash comes, that record is what is written.
 */
#include "core/probe_record.h"
#include "core/probe_run.h"
#include "probe/probe.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#define RECORD_END 3
#define TIMEOUT_MIN 100
#define TIMEOUT_MAX 600000

/* What signal handlers need: the record to write, or NULL. */
static struct epo_probe_record ready[2];
static const struct epo_probe_record *volatile at_end;

static void write_record(const struct epo_probe_record *record) {
    const char *from = (const char *)record;
    for (size_t done = 0; done < sizeof *record;) {
        ssize_t wrote = write(RECORD_END, from + done, sizeof *record - done);
        if (wrote < 0 && errno != EINTR)
            return;
        done += wrote > 0 ? (size_t)wrote : 0;
    }
}

static void stop(int number) {
    if (at_end != NULL)
        write_record(at_end);
    if (number == SIGALRM)
        _exit(3);
    raise(number); /* SA_RESETHAND: this time it ends us */
}

static void catch_signals(int timeout_ms) {
    static char stack[65536]; /* a crash may be a spent stack */
    static const int numbers[] = {SIGALRM, SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL, SIGXCPU};
    stack_t other = {.ss_sp = stack, .ss_size = sizeof stack};
    struct sigaction action = {.sa_handler = stop, .sa_flags = SA_RESETHAND | SA_ONSTACK};
    sigfillset(&action.sa_mask);
    sigaltstack(&other, NULL);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        sigaction(numbers[i], &action, NULL);
    /* Ahead of the kill from outside, so that what is known gets out. */
    int margin = timeout_ms / 10 > 50 ? timeout_ms / 10 : 50;
    long left = timeout_ms - margin;
    struct itimerval timer = {.it_value = {left / 1000, left % 1000 * 1000}};
    setitimer(ITIMER_REAL, &timer, NULL);
}

struct stage {
    const char *doing;
    void (*run)(epo_probe_task *task, epo_facts *facts);
    const char *unknown[10]; /* until it has ended */
};

/* What files say is asked before NVML, whose driver may hang. */
static const struct stage stages[] = {
    {"while it read the task's Python",
     epo_probe_python,
     {"torch_version", "te_version", "triton_version", "deep_ep.imports",
      "deep_ep.has_event_overlap", "deep_ep.has_hybrid_buffer", NULL}},
    {"while it looked for NCCL", epo_probe_nccl, {"nccl_version", NULL}},
    {"while it looked for container and nvcc",
     epo_probe_surroundings,
     {"in_container", "node.cuda_home_has_nvcc", NULL}},
    {"while it asked NVML",
     epo_probe_gpus,
     {"node.gpu_count", "gpu_name", "gpu_major", "node.all_gpus_p2p", "node.driver_version",
      "node.cuda_version", NULL}},
};
#define STAGES (sizeof stages / sizeof *stages)

/* The record for the case that stage `from` does not end: the facts so far, and what
 * is missing as unknown. */
static bool prepare(const epo_facts *facts, size_t from) {
    struct epo_probe_record *into = at_end == &ready[0] ? &ready[1] : &ready[0];
    epo_facts *all = epo_facts_create();
    bool good =
        all != NULL && epo_probe_record_write(facts, into) == EPO_OK &&
        epo_probe_record_read(into, all) == EPO_OK &&
        epo_facts_set_unknown(all, EPO_PROBE_STOPPED, stages[from].doing, "the probe") == EPO_OK;
    for (size_t s = from; s < STAGES && good; s++)
        for (int i = 0; stages[s].unknown[i] != NULL && good; i++)
            good = epo_facts_set_unknown(all, stages[s].unknown[i], "the probe was stopped",
                                         stages[from].doing) == EPO_OK;
    good = good && epo_probe_record_write(all, into) == EPO_OK;
    epo_facts_destroy(all);
    if (good)
        at_end = into;
    return good;
}

static const char *task_variable(void *context, const char *name) {
    char full[64];
    (void)context;
    snprintf(full, sizeof full, EPO_PROBE_PREFIX "%s", name);
    return getenv(full);
}

static int probe(epo_probe_task *task, int timeout_ms) {
    epo_facts *facts = epo_facts_create();
    bool good = facts != NULL;
    (void)fcntl(RECORD_END, F_SETFD, FD_CLOEXEC); /* what a driver starts keeps it not open */
    catch_signals(timeout_ms);
    for (size_t i = 0; i < STAGES && good; i++) {
        good = prepare(facts, i);
        if (good)
            stages[i].run(task, facts);
    }
    struct epo_probe_record *last = at_end == &ready[0] ? &ready[1] : &ready[0];
    good = good && epo_probe_record_write(facts, last) == EPO_OK;
    if (good) {
        at_end = NULL;
        write_record(last);
        _exit(0); /* a driver's exit handlers may hang, too */
    } else {
        fprintf(stderr, "ep-overlap-probe: %s\n", epo_fail_text());
    }
    epo_facts_destroy(facts);
    return good ? 0 : 1;
}

static int usage(void) {
    fputs(
        "probe: started by ep-overlap's plugin and by \"ep-overlap check\", which is for people\n",
        stderr);
    return 2;
}

int main(int argc, char **argv) {
    epo_probe_task task = {.variable = task_variable,
                           .left_out = getenv(EPO_PROBE_LEFT_OUT),
                           .entries_left = EPO_PROBE_ENTRIES,
                           .bytes_left = EPO_PROBE_READ};
    long timeout_ms = 0;
    int at = 1;
    for (; at < argc && strcmp(argv[at], "--") != 0; at++) {
        if (strncmp(argv[at], "--timeout-ms=", 13) == 0)
            timeout_ms = strtol(argv[at] + 13, NULL, 10);
        else if (strncmp(argv[at], "--nvml=", 7) == 0)
            task.nvml_path = argv[at] + 7;
        else if (strcmp(argv[at], "--whole-node") == 0)
            task.whole_node = true;
        else
            return usage();
    }
    if (at == argc || timeout_ms < TIMEOUT_MIN || timeout_ms > TIMEOUT_MAX)
        return usage();
    task.arguments = argv + at + 1;
    task.argument_count = argc - at - 1;
    return probe(&task, (int)timeout_ms);
}
