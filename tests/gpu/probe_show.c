/* SPDX-License-Identifier: Apache-2.0
 *
 * probe_show.c - runs the probe as the plugin does and prints its facts, for a bare
 * machine where the toolkit cannot be built.  probe_show PROBE [TIMEOUT_MS] [PROGRAM ARGS...]
 */
#include "core/probe_record.h"
#include "core/probe_run.h"
#include "rules/node.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static const char *variable(void *context, const char *name) {
    (void)context;
    return getenv(name);
}

static double milliseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

/* What the GPUs alone say about each dispatcher. */
static void show_dispatcher(const epo_facts *found, const char *word, int dispatcher) {
    static epo_findings findings;
    epo_facts *facts = epo_facts_create();
    static const char *const keys[] = {"gpu_name", "gpu_major", "node.all_gpus_p2p",
                                       "node.gpu_count"};
    for (size_t i = 0; facts != NULL && i < sizeof keys / sizeof *keys; i++) {
        const epo_fact *fact = epo_facts_find(found, keys[i]);
        if (fact != NULL && fact->kind != EPO_FACT_UNKNOWN)
            (void)epo_facts_set(facts, fact->key, fact->text, fact->source);
    }
    const epo_node_question question = {.dispatcher = dispatcher, .holds_gpus = true};
    if (facts == NULL || epo_node_judge(&question, facts, &findings) != EPO_OK)
        return;
    printf("dispatcher %s = %s\n", word, findings.errors == 0 ? "yes" : "no");
    for (size_t i = 0; i < findings.count; i++)
        if (findings.item[i].severity == EPO_SEVERITY_ERROR)
            printf("    %s: %s\n", findings.item[i].id, findings.item[i].found);
    epo_facts_destroy(facts);
}

int main(int argc, char **argv) {
    epo_facts *facts = epo_facts_create();
    int fd = argc > 1 ? open(argv[1], O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0 || facts == NULL) {
        fprintf(stderr, "usage: probe_show PROBE [TIMEOUT_MS] [PROGRAM ARGS...]\n");
        return 2;
    }
    const struct epo_probe_request request = {.program = fd,
                                              .variable = variable,
                                              .arguments = argv + (argc > 3 ? 3 : argc),
                                              .argument_count = argc > 3 ? argc - 3 : 0,
                                              .timeout_ms =
                                                  argc > 2 ? (int)strtol(argv[2], NULL, 10) : 5000};
    double begin = milliseconds();
    epo_status status = epo_probe_run(&request, facts);
    double took = milliseconds() - begin;
    if (status != EPO_OK)
        printf("failed: %s\n", epo_fail_text());
    for (size_t i = 0; i < epo_facts_count(facts); i++) {
        const epo_fact *fact = epo_facts_at(facts, i);
        const char *note = fact->kind == EPO_FACT_UNKNOWN ? "unknown: "
                           : fact->kind == EPO_FACT_NULL  ? "none"
                                                          : "";
        printf("%s = %s%s (%s)\n", fact->key, note, fact->text, fact->source);
    }
    show_dispatcher(facts, "alltoall", EPO_CHOICE_ALLTOALL);
    show_dispatcher(facts, "flex", EPO_CHOICE_FLEX);
    show_dispatcher(facts, "deepep", EPO_CHOICE_DEEPEP);
    show_dispatcher(facts, "hybridep", EPO_CHOICE_HYBRIDEP);
    printf("took %.1f ms\n", took);
    epo_facts_destroy(facts);
    return status == EPO_OK ? 0 : 1;
}
