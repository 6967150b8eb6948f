/* SPDX-License-Identifier: Apache-2.0
 *
 * tool.h - what the subcommands of ep-overlap share.
 *
 * A new subcommand is one file here that defines its run function and ends in
 *     EPO_TOOL(70, bench, "measure overlap on this machine", bench_run)
 * and its name in Makefile.inc; the dispatcher finds it by itself.
 */
#ifndef EPO_TOOLS_TOOL_H
#define EPO_TOOLS_TOOL_H

#include "ep_overlap.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/* One table of exit statuses for every subcommand; docs/toolkit.md shows it. */
typedef enum epo_exit {
    EPO_EXIT_FINE = 0,       /* nothing found against it; the verdict is yes */
    EPO_EXIT_NO = 1,         /* a rule is violated; the verdict is no */
    EPO_EXIT_USAGE = 2,      /* the command line is wrong */
    EPO_EXIT_UNREADABLE = 3, /* an input is missing, cut off, or of another kind */
    EPO_EXIT_UNDECIDED = 4,  /* the inputs do not tell, or cannot be compared */
    EPO_EXIT_SYSTEM = 5      /* memory, disk or a library failed */
} epo_exit;

/* argv[0] is the subcommand's name. */
typedef int epo_tool_run(int argc, char **argv);

typedef struct epo_tool {
    int place; /* in the list of --help */
    const char *name, *summary;
    epo_tool_run *run;
} epo_tool;

#define EPO_TOOL(place, name, summary, run)                                                        \
    static const epo_tool epo_tool_##name = {place, #name, summary, run};                          \
    static const epo_tool *const epo_tool_entry_##name                                             \
        __attribute__((used, section("epo_tools"))) = &epo_tool_##name;

/* What follows says to stderr why a command has no answer, once, and to programs (--json) on
 * stdout as {"error": {"command", "status", "message"}} in place of the answer; of bench, whose
 * ranks have one, from the first.  So a command that may still fail has printed no JSON before. */

/* "ep-overlap NAME: " and epo_fail_text(); the exit status for `status`. */
int epo_tool_fail(const char *name, epo_status status);
/* "ep-overlap NAME: ..."; `status`. */
int epo_tool_error(const char *name, int status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* "ep-overlap NAME: ..." and where help is; EPO_EXIT_USAGE. */
int epo_tool_usage(const char *name, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Of "": what "$LOG" gives where LOG is not set. */
#define EPO_TOOL_NO_NAME "a file's name is empty: is a variable not set?"

/* Flushes stdout: a full disk or a closed pipe turns `status` into EPO_EXIT_SYSTEM. */
int epo_tool_finish(const char *name, int status);

/* A name as a terminal may see it: control characters (a line break) as ?.  What it gives
 * lives as long as the command. */
const char *epo_tool_shown(const char *name);

/* An epo_progress (trace/lines.h): a line on stderr, if that is a terminal. */
void epo_tool_progress(void *what, uint64_t done, uint64_t total);
void epo_tool_progress_end(void);

#endif
