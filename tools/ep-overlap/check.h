/* SPDX-License-Identifier: Apache-2.0
 *
 * check.h - what "ep-overlap check" finds, before it is printed.
 */
#ifndef EPO_TOOLS_CHECK_H
#define EPO_TOOLS_CHECK_H

#include "core/config.h"
#include "core/policy.h"
#include "rules/node.h"

#define CHECK_PATH 4096
#define CHECK_DISPATCHERS 5 /* EPO_CHOICE_... */

/* Plugin and Slurm, side by side.  A text is "" where it could not be found. */
typedef struct check_versions {
    char plugin[CHECK_PATH]; /* by plugstack.conf, else where it was installed */
    char plugstack[CHECK_PATH], config[CHECK_PATH]; /* the file, and its conf= */
    char argument[CHECK_PATH]; /* a word of that line that the plugin does not know */
    int listed;                /* lines of plugstack.conf with it: the last one counts */
    char built_for[32], slurm[64];
    bool mismatch;            /* major.minor differ */
    char engines[CHECK_PATH]; /* the folder that they are looked for in */
    bool host, cuda;          /* there */
} check_versions;

typedef struct check {
    bool node, show, json;
    const char *config_path; /* --config */
    check_versions versions;
    struct epo_config *config;
    char config_error[1024];
    struct epo_decision decision;
    char decision_error[1024];
    const char *gpu_class;
    epo_facts *facts; /* of the node */
    char probe_error[1024];
    epo_findings general;                       /* least versions, class, require_gpu */
    epo_findings dispatcher[CHECK_DISPATCHERS]; /* what speaks against each */
} check;

/* check_versions.c: reads files, and asks Slurm's own commands for their version. */
void check_versions_find(check_versions *versions);
/* The engines that the library opens which steps get; `library`: of the site, or NULL. */
void check_engines_find(check_versions *versions, const char *library);
/* Where a part of this installation lies: beside this program, or as it was compiled. */
bool check_own_file(const char *relative, const char *compiled, char path[CHECK_PATH]);

/* check_print.c */
void check_print_text(const check *c);
void check_print_json(const check *c);
/* One line, and the exit status. */
const char *check_verdict(const check *c, int *status);

#endif
