/* SPDX-License-Identifier: Apache-2.0 */
#ifdef HAVE_CONFIG_H
#include "config.h"
#endif
#include "tool.h"

#include "core/status.h"
#include "json.h"
#include "measure/launch.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef PACKAGE_VERSION
#define PACKAGE_VERSION "unknown"
#endif

typedef struct shown_name {
    struct shown_name *next;
    char text[];
} shown_name;

static struct {
    bool json;     /* asked for, and an error is told so, too */
    pid_t process; /* the one that prints JSON, not the ranks that it starts */
    shown_name *shown;
} run;

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

/* A line break, a terminal's command. */
static bool is_control(char c) { return (unsigned char)c < ' ' || c == 0x7f; }

static void clean(char *text) {
    for (; *text != '\0'; text++)
        *text = is_control(*text) ? '?' : *text;
}

const char *epo_tool_shown(const char *name) {
    size_t length = 0;
    while (name[length] != '\0' && !is_control(name[length]))
        length++;
    if (name[length] == '\0')
        return name;
    length = strlen(name) + 1;
    shown_name *shown = malloc(sizeof *shown + length);
    if (shown == NULL)
        return "?";
    memcpy(shown->text, name, length);
    clean(shown->text);
    shown->next = run.shown;
    run.shown = shown;
    return shown->text;
}

static void forget_shown(void) {
    while (run.shown != NULL) {
        shown_name *next = run.shown->next;
        free(run.shown);
        run.shown = next;
    }
}

/* --json, or env's --format json, among the command's own options; as getopt does, short
 * for it, too.  What follows "--", and exec's program, is another's. */
static bool asks_for_json(int argc, char **argv) {
    bool is_exec = argc > 0 && strcmp(argv[0], "exec") == 0;
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        size_t length = strlen(argv[i]);
        if (length > 2 && strncmp(argv[i], "--json", length) == 0)
            return true;
        if (strcmp(argv[i], "--format=json") == 0 ||
            (strcmp(argv[i], "--format") == 0 && i + 1 < argc && strcmp(argv[i + 1], "json") == 0))
            return true;
        if (is_exec && argv[i][0] != '-')
            break;
    }
    return false;
}

static void answer_error(const char *name, int status, const char *message) {
    epo_json json = {.out = stdout};
    bool is_shared = strcmp(name, "bench") == 0; /* one answer of a step's ranks together */
    if (!run.json || run.process != getpid() || (is_shared && launch_is_other()))
        return;
    epo_json_object(&json, NULL);
    epo_json_object(&json, "error");
    epo_json_text(&json, "command", name);
    epo_json_integer(&json, "status", status);
    epo_json_text(&json, "message", message);
    epo_json_end(&json, '}');
    epo_json_end(&json, '}');
}

int epo_tool_fail(const char *name, epo_status status) {
    bool system = status == EPO_E_NOMEM || status == EPO_E_STATE;
    epo_tool_progress_end();
    return epo_tool_error(name, system ? EPO_EXIT_SYSTEM : EPO_EXIT_UNREADABLE, "%s",
                          epo_fail_text());
}

int epo_tool_error(const char *name, int status, const char *format, ...) {
    char message[EPO_ERROR_MAX + 512];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    clean(message);
    fprintf(stderr, "ep-overlap%s%s: %s\n", name[0] != '\0' ? " " : "", name, message);
    answer_error(name, status, message);
    return status;
}

int epo_tool_usage(const char *name, const char *format, ...) {
    char message[EPO_ERROR_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    return epo_tool_error(name, EPO_EXIT_USAGE, "%s (see: ep-overlap %s --help)", message, name);
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

static int refuse_command(const char *name) {
    char names[256] = "";
    size_t used = 0;
    for (const epo_tool *const *t = __start_epo_tools; t < __stop_epo_tools; t++)
        used += (size_t)snprintf(names + used, sizeof names - used, " %s", (*t)->name);
    return epo_tool_error("", EPO_EXIT_USAGE, "there is no command \"%.200s\"; the commands are:%s",
                          name, names);
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
    run.json = asks_for_json(argc - 1, argv + 1);
    run.process = getpid();
    if (tool == NULL)
        return refuse_command(name);
    int status = epo_tool_finish(name, tool->run(argc - 1, argv + 1));
    forget_shown();
    return status;
}
