/* SPDX-License-Identifier: Apache-2.0 */
#ifdef HAVE_CONFIG_H
#include "config.h"
#endif
#include "tool.h"

#include "core/status.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef PACKAGE_VERSION
#define PACKAGE_VERSION "unknown"
#endif

extern const epo_tool *const __start_epo_tools[] __attribute__((visibility("hidden")));
extern const epo_tool *const __stop_epo_tools[] __attribute__((visibility("hidden")));

static const epo_tool *find(const char *name) {
    for (const epo_tool *const *t = __start_epo_tools; t < __stop_epo_tools; t++)
        if (strcmp((*t)->name, name) == 0)
            return *t;
    return NULL;
}

static void print_list(void) {
    for (int place = 0; place < 100; place++)
        for (const epo_tool *const *t = __start_epo_tools; t < __stop_epo_tools; t++)
            if ((*t)->place == place)
                printf("  %-9s %s\n", (*t)->name, (*t)->summary);
}

static void print_help(void) {
    fputs("ep-overlap - is this training job allowed to overlap expert-parallel\n"
          "communication, did it, and did it pay?\n\n"
          "usage: ep-overlap COMMAND [OPTIONS] ...      ep-overlap COMMAND --help\n\n",
          stdout);
    print_list();
    fputs("\nexamples:\n"
          "  ep-overlap lint -- torchrun pretrain_gpt.py --bf16 --num-experts 64 ...\n"
          "  ep-overlap explain OVL-006\n"
          "  ep-overlap report baseline.log overlap.log --window 3-8\n"
          "  ep-overlap profile baseline.sqlite overlap.sqlite --svg overlap.svg\n"
          "  ep-overlap doctor train.log\n\n"
          "exit status: 0 fine, 1 a rule is violated or the verdict is no, 2 wrong usage,\n"
          "  3 an input cannot be read, 4 the inputs do not tell or cannot be compared,\n"
          "  5 the system failed (memory, disk)\n",
          stdout);
}

int epo_tool_fail(const char *name, epo_status status) {
    epo_tool_progress_end();
    fprintf(stderr, "ep-overlap %s: %s\n", name, epo_fail_text());
    return status == EPO_E_NOMEM || status == EPO_E_STATE ? EPO_EXIT_SYSTEM : EPO_EXIT_UNREADABLE;
}

int epo_tool_usage(const char *name, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "ep-overlap %s: ", name);
    vfprintf(stderr, format, args);
    fprintf(stderr, " (see: ep-overlap %s --help)\n", name);
    va_end(args);
    return EPO_EXIT_USAGE;
}

int epo_tool_finish(const char *name, int status) {
    if (fflush(stdout) == 0 && !ferror(stdout))
        return status;
    fprintf(stderr, "ep-overlap %s: cannot write the output: %s\n", name, strerror(errno));
    return EPO_EXIT_SYSTEM;
}

void epo_tool_progress(void *what, uint64_t done, uint64_t total) {
    if (!isatty(STDERR_FILENO))
        return;
    double mb = (double)done / 1e6;
    if (total > 0)
        fprintf(stderr, "\r%s: %.0f of %.0f MB (%.0f %%)\033[K", (const char *)what, mb,
                (double)total / 1e6, 100.0 * (double)done / (double)total);
    else
        fprintf(stderr, "\r%s: %.0f MB\033[K", (const char *)what, mb);
}

void epo_tool_progress_end(void) {
    if (isatty(STDERR_FILENO))
        fputs("\r\033[K", stderr);
}

int main(int argc, char **argv) {
    if (argc < 2) {
        print_help();
        return EPO_EXIT_USAGE;
    }
    const char *name = argv[1];
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0 || strcmp(name, "help") == 0) {
        const epo_tool *tool = argc > 2 ? find(argv[2]) : NULL;
        if (tool != NULL)
            return tool->run(2, (char *[]){argv[2], (char *)"--help", NULL});
        print_help();
        return epo_tool_finish("help", EPO_EXIT_FINE);
    }
    if (strcmp(name, "--version") == 0) {
        puts("ep-overlap " PACKAGE_VERSION);
        return epo_tool_finish("version", EPO_EXIT_FINE);
    }
    const epo_tool *tool = find(name);
    if (tool == NULL) {
        fprintf(stderr, "ep-overlap: there is no command \"%s\"; the commands are:\n", name);
        for (const epo_tool *const *t = __start_epo_tools; t < __stop_epo_tools; t++)
            fprintf(stderr, "  %s\n", (*t)->name);
        return EPO_EXIT_USAGE;
    }
    return epo_tool_finish(name, tool->run(argc - 1, argv + 1));
}
